"""
`StaticReplayCache`: the replay cache whose tensors never move and whose positions live on the device.

The plain cache decides on the host where tokens go; a compiled or captured forward would freeze that. Here a forward
reads nothing back: what depends on sizes is decided by Python integers (one token is a step, up to `max_window` + 1
recorded ones a window, more a scan), and what depends on positions is arithmetic on small tensors, done once for all
layers in `begin_forward` and written back in `end_forward`.

Every row is described by counts of tokens:

    seen     tokens so far                                 (batch,)
    base     of these, tokens in the checkpoint            (phases, batch)
    the buffer holds the tokens base, ..., seen - 1; token m lies in slot m % capacity, its raw convolution input in
    slot m % ring, and its keys and values in slot m (behind some unused ones)

so a rollback only lowers `seen`. A flush moves `base` up to `seen` less what may still be cropped. Layers do not flush
at the same token: each belongs to a *phase*, which moves its flushes by up to `buffer_len` - 1 tokens, so that no step
of a decode pays for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import get_layer_types_and_kwargs

from .cache import RIGHT_PADDING, ReplayCache, ReplayStats
from .config import ReplayConfig
from .layers import CropError, ReplayLayer
from .static_layers import STATIC_LAYER_TYPES, StaticAttentionLayer, StaticReplayLayer, write_rows
from .static_positions import StaticForward, StaticSegment


SLOTS_MULTIPLE = 8  # attention kernels copy a mask whose rows are not aligned to this


class CacheFullError(ValueError, IndexError):
    """More tokens than `max_cache_len`. (Upstream's static cache raises the second of the bases.)"""


# Where rows stand and what was counted, all (..., batch) int64 but for `recent` (batch, max_window) bool, which of the
# newest columns are tokens.
_POSITIONS = ("rows", "base", "croppable", "recent", "forwards", "folds", "scanned", "idle", "cropped")


class StaticReplayCache(ReplayCache):
    """
    A [`ReplayCache`] of fixed size, for forwards that are compiled or captured: no tensor moves, and a forward reads
    nothing back to the host. Attention layers hold `max_cache_len` tokens per row (and, while the past is recorded,
    one window more); the recurrent layers have no length.

    Args:
        config ([`PreTrainedConfig`]): of the model (or of the model around it; the text config is used).
        max_cache_len (`int`): tokens that attention layers have room for.
        replay_config ([`ReplayConfig`], *optional*): settings, which `fields` override.
        **fields: of [`ReplayConfig`].

    While the past is recorded, the newest `max_window` columns can be cropped, over any number of forwards, and no
    more: buffers do not grow. `activate_past_recording()` before the first forward lays them out for it; on a cache in
    use it reallocates once. Tensors are allocated at the first forward, which must not be a compiled one (or by
    [`allocate`]), for one batch size.

    Raises:
        ValueError: an unsupported model, no `max_cache_len`, or an unknown or invalid setting.
        CacheFullError: a forward beyond `max_cache_len`. Where positions are not on the CPU, the device finds it, as
            with upstream's static cache.
    """

    def __init__(
        self,
        config=None,
        max_cache_len: int | None = None,
        replay_config: ReplayConfig | None = None,
        **fields: Any,
    ):
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(
                f"A StaticReplayCache has a fixed size: pass `max_cache_len`, the tokens that it has room for, not "
                f"{max_cache_len!r}."
            )
        self.max_cache_len = max_cache_len
        self.fresh, self._recording, self._batch = True, False, None
        self.capacity = self.front_slots = self.key_slots = 0  # set with the sizes
        super().__init__(config, replay_config, **fields)
        buffer_len, count = self.replay_config.buffer_len, len(self.replay_layers)
        delays = [number * buffer_len // count for number in range(count)]
        phases = sorted(set(delays))
        for layer, delay in zip(self.replay_layers, delays):
            layer.phase = phases.index(delay)
        self._phase_delays = phases
        self.has_attention = any(isinstance(layer, StaticAttentionLayer) for layer in self.layers)
        self.layout = 0  # counts the times that tensors were allocated
        self.graphs = None  # of captured forwards, see `capture.py`

    def _make_layers(self, text_config: Any) -> list[Any]:
        layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
        unknown = sorted(set(layer_types) - set(STATIC_LAYER_TYPES))
        if unknown:
            raise ValueError(
                f"The static replay cache has no layers of type {', '.join(map(repr, unknown))}: use "
                "`cache_implementation='replayssm'`."
            )
        shared = {"max_cache_len": self.max_cache_len, "recurrence": self.signature.recurrence}
        return [STATIC_LAYER_TYPES[name](**shared, **kwargs) for name, kwargs in zip(layer_types, layer_kwargs)]

    # Memory.

    def ring(self, kernel: int) -> int:
        """Slots of the ring of raw convolution inputs: the convolution's reach, a window and what may be cropped."""
        return kernel + (self.max_window + 1 if self._recording else 0)

    def _lay_out(self) -> None:
        """Sets the numbers of slots: of the input buffers, of attention, and of attention's unused ones in front."""
        window, tokens = 0, self.max_cache_len
        if self._recording:
            # Beside the newest `max_window` tokens and those of a flush, a window of drafts and the token before them.
            window, tokens = self.max_window, tokens + self.max_window + 1
        self.capacity = self.replay_config.buffer_len + 2 * window
        self.key_slots = -(-(tokens + 1) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
        self.front_slots = self.key_slots - tokens

    def allocate(
        self,
        batch_size: int,
        dtype: torch.dtype,
        devices: torch.device | dict[int, torch.device],
        key_shape: tuple[int | list[int], int | list[int]] | None = None,
    ) -> None:
        """
        Allocates everything for `batch_size` rows.

        Args:
            dtype: of the activations.
            devices: one, or for each recurrent layer (by its index in the model) its own.
            key_shape: heads and head_dim of keys and values, or lists with one for each layer, for a model on one
                device. None: attention layers allocate at their first forward, on the device of their keys.

        Raises:
            ValueError: it is allocated already, for another batch size.
        """
        if self._batch is not None:
            self._check_batch(batch_size)
            return
        of_layer = lambda value, index: value[index] if isinstance(value, (list, dict)) else value  # noqa: E731
        self._lay_out()
        with torch.inference_mode(False):
            for index, layer in enumerate(self.layers):
                if isinstance(layer, StaticReplayLayer):
                    layer.allocate(batch_size, dtype, torch.device(of_layer(devices, index)))
            home = self.replay_layers[0].device
            rows = lambda *shape: torch.zeros((*shape, batch_size), dtype=torch.long, device=home)  # noqa: E731
            phases = len(self._phase_delays)
            self.rows = rows(3)  # seen, columns, tokens
            self.base, self.croppable = rows(phases), rows()
            # Checkpoints written, tokens that went by scan, forwards without a token, columns cropped.
            self.folds, self.forwards = rows(phases), rows()
            self.scanned, self.idle, self.cropped = rows(), rows(), rows()
            self.recent = torch.zeros((batch_size, self.max_window), dtype=torch.bool, device=home)
            self.phase_delays = torch.tensor(self._phase_delays, device=home)[:, None]
            if key_shape is not None:
                for index, layer in enumerate(self.layers):
                    if isinstance(layer, StaticAttentionLayer):
                        shape = batch_size, of_layer(key_shape[0], index), 0, of_layer(key_shape[1], index)
                        empty = torch.zeros(shape, dtype=dtype, device=home)
                        layer.lazy_initialization(empty, empty)
        self._batch = batch_size
        self.mark_static()

    @property
    def seen(self) -> torch.Tensor:
        """(batch,) int64, on the device: tokens of each row."""
        return self.rows[0]

    @property
    def columns(self) -> torch.Tensor:
        """(batch,) int64, on the device: columns of each row, padding included."""
        return self.rows[1]

    @property
    def is_allocated(self) -> bool:
        return self._batch is not None

    @property
    def is_laid_out_for_recording(self) -> bool:
        return self.capacity > self.replay_config.buffer_len

    def static_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that has an address, by name; (batch, ...) in the layers, (..., batch) in the positions."""
        if self._batch is None:
            return
        for name in _POSITIONS:
            yield name, getattr(self, name)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, (StaticReplayLayer, StaticAttentionLayer)):
                for name, tensor in layer.static_tensors().items():
                    yield f"layers.{index}.{name}", tensor

    def mark_static(self) -> None:
        """Tells compilers that these tensors stay where they are."""
        if torch.compiler.is_compiling() or self._batch is None:
            return
        for _, tensor in self.static_tensors():
            torch._dynamo.mark_static_address(tensor)
        for tensor in (self.phase_delays, *(constant for layer in self.replay_layers for constant in layer.constants)):
            torch._dynamo.mark_static_address(tensor)
        self.layout += 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def _enlarge(self) -> None:
        """
        Makes room for what is recorded now, on a cache that was laid out for less. All addresses change, so compiled
        forwards are compiled again.
        """
        before = old_capacity, old_front, _ = self.capacity, self.front_slots, self.key_slots
        self._lay_out()
        if self.capacity <= old_capacity:
            self.capacity, self.front_slots, self.key_slots = before
            return
        for layer in self.replay_layers:
            seen, base = self.seen.to(layer.device), self.base[layer.phase].to(layer.device)
            token = base[:, None] + torch.arange(old_capacity, device=layer.device)
            held = layer.in_order(base)
            layer.inputs = layer.inputs.map(lambda t: t.new_zeros((*t.shape[:2], self.capacity, *t.shape[3:])))
            for buffer, values in zip(layer.inputs.tensors(), held):
                write_rows(buffer, token % self.capacity, values.transpose(1, 2), dim=2)
            ring, old_ring = self.ring(layer.conv_kernel_size[0]), layer.conv_inputs.shape[1]
            token = seen[:, None] + torch.arange(-old_ring, 0, device=layer.device)
            values = layer.newest_of_ring(seen, old_ring)
            layer.conv_inputs = values.new_zeros((self._batch, ring, values.shape[2]))
            write_rows(layer.conv_inputs, token % ring, values, token >= 0)
        for layer in self.layers:
            if isinstance(layer, StaticAttentionLayer) and layer.is_initialized:
                behind = self.key_slots - self.front_slots - (layer.keys.shape[2] - old_front)
                layer.keys, layer.values = (
                    F.pad(old[:, :, old_front:], (0, 0, self.front_slots, behind)) for old in (layer.keys, layer.values)
                )
        self.recent = F.pad(self.recent, (self.max_window - self.recent.shape[1], 0))
        self.mark_static()

    # One forward.

    @property
    def is_fresh(self) -> bool:
        return self.fresh

    def _check_batch(self, batch_size: int) -> None:
        if self._batch != batch_size:
            raise ValueError(
                f"This cache is laid out for a batch of {self._batch}, and the inputs are a batch of {batch_size}. Use "
                "a new cache, or move its rows with `batch_repeat_interleave` or `batch_select_indices`."
            )

    def begin_forward(self, num_tokens: int, batch_size: int, mask: torch.Tensor | None = None) -> StaticForward:
        """As in [`ReplayCache`]. A mask is read in a first forward that is not compiled, and never else."""
        self._refuse_interrupted()
        if num_tokens == 0:
            raise ValueError("A forward through a cache takes at least one token; this one has none.")
        if self._batch is None:
            raise ValueError("This cache has no memory yet: call the model, or `cache.allocate(...)`, first.")
        self._check_batch(batch_size)
        if mask is not None:
            mask = mask.to(self.seen.device, torch.bool)
            if self.fresh and not torch.compiler.is_compiling():
                if bool(mask.all()):
                    mask = None
                elif bool((mask.any(1) & ~mask[:, -1]).any()):
                    raise ValueError(RIGHT_PADDING)
        if mask is None:
            numbers = self.seen[:, None]
            if num_tokens != 1:
                numbers = numbers + torch.arange(num_tokens, device=self.seen.device)
        else:
            numbers = self.seen[:, None] + mask.long().cumsum(1) - 1
        self._refuse_overflow(numbers)

        window = self.max_window
        if not self._recording:
            segments = [self._static_segment(None, slice(0, num_tokens), mask, num_tokens > 1, keep=0)]
        elif num_tokens <= window + 1:
            segments = [self._static_segment(None, slice(0, num_tokens), mask, False, keep=window)]
        else:  # a prefill leaves what may be cropped in the buffer
            cut = num_tokens - window
            scan = self._static_segment(None, slice(0, cut), mask, True, keep=0)
            segments = [scan, self._static_segment(scan, slice(cut, num_tokens), mask, False, keep=window)]
        self.forward_in_progress = StaticForward(num_tokens, segments, self.fresh, numbers, mask)
        return self.forward_in_progress

    def _static_segment(
        self, before: StaticSegment | None, columns: slice, mask: torch.Tensor | None, scan: bool, keep: int
    ) -> StaticSegment:
        """
        The segment of these columns behind `before`. A flush leaves the newest `keep` tokens in the buffer, and is due
        when the number of tokens that may be folded passes a multiple of `buffer_len`, less the delay of the phase.
        """
        seen, base = (self.seen, self.base) if before is None else (before.seen + before.counts, before.after)
        tokens = columns.stop - columns.start
        mask = None if mask is None else mask[:, columns]
        counts = torch.full_like(seen, tokens) if mask is None else mask.sum(1)
        end = seen + (tokens - keep if mask is None else counts - keep)  # of what may be folded
        if scan:
            after, due = end.expand_as(base), None
        else:
            buffer_len, delay = self.replay_config.buffer_len, self.phase_delays
            due = (end + delay) // buffer_len > (base + delay) // buffer_len
            after = torch.where(due, end, base)
        return StaticSegment(columns, scan, tokens, seen, base, counts, after, due, self.capacity, mask)

    def _refuse_overflow(self, numbers: torch.Tensor) -> None:
        """On the CPU, where reading costs nothing; elsewhere the index out of range is the device's to find."""
        if not self.has_attention or numbers.device.type != "cpu" or torch.compiler.is_compiling():
            return
        room = self.key_slots - self.front_slots
        if int(numbers.max()) >= room:
            raise CacheFullError(
                f"The cache has room for {self.max_cache_len} tokens"
                + (f" and a window of {room - self.max_cache_len}" if room > self.max_cache_len else "")
                + f"; this forward takes a row to {int(numbers.max()) + 1}. Build it with a larger `max_cache_len`."
            )

    @torch.no_grad()
    def end_forward(self) -> None:
        """Closes the forward: moves the positions to where the tokens went."""
        forward = self.forward_in_progress
        tokens, segments, mask = forward.num_tokens, forward.segments, forward.real
        # (Every operation here is a launch in every step.)
        if mask is None:
            self.rows.add_(tokens)
        else:
            counts = mask.sum(1)
            self.rows.add_(torch.stack([counts, torch.full_like(counts, tokens), counts]))
            self.idle.add_(counts == 0)
        self.base.copy_(segments[-1].after)
        self.forwards.add_(1)
        for segment in segments:
            self.folds.add_(1 if segment.scan else segment.due)
            if segment.scan:
                self.scanned.add_(segment.counts)
        if self._recording:
            self.croppable.add_(tokens).clamp_(max=self.max_window)
            if mask is None:
                mask = self.recent.new_ones((self.recent.shape[0], tokens))
            self.recent.copy_(torch.cat([self.recent, mask], 1)[:, tokens:])
        self.fresh, self.forward_in_progress = False, None

    def abort_forward(self) -> None:
        forward, self.forward_in_progress = self.forward_in_progress, None
        self.interrupted = forward is not None and forward.touched

    @property
    def stats(self) -> ReplayStats:
        """Counted on the device: to read them waits for it."""
        stats = ReplayStats(crops=self._crops)
        if self._batch is None:
            return stats
        folds, forwards, rows = self.folds.tolist(), self.forwards.tolist(), self.rows.tolist()
        with_tokens, appended = sum(forwards) - int(self.idle.sum()), sum(rows[2]) - int(self.scanned.sum())
        stats.forwards, stats.tokens, stats.tokens_cropped = max(forwards), sum(rows[2]), int(self.cropped.sum())
        for layer in self.replay_layers:
            writes = sum(folds[layer.phase])
            stats.checkpoint_writes += writes
            stats.checkpoint_bytes_written += writes * layer.checkpoint_bytes
            stats.per_token_bytes += with_tokens * layer.checkpoint_bytes
            stats.input_bytes_written += appended * layer.inputs.slot_bytes
        # Layers flush at different tokens: the mean over layers.
        stats.checkpoint_writes = round(stats.checkpoint_writes / len(self.replay_layers))
        return stats

    @stats.setter
    def stats(self, value: ReplayStats) -> None:
        self._crops = value.crops

    # Rollback.

    @property
    def record_past(self) -> bool:
        return self._recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value == self._recording:
            return
        self._recording = value
        if self._batch is not None:
            self.croppable.zero_()
            self._enlarge()

    @property
    def max_window(self) -> int:
        return self._max_window

    @max_window.setter
    def max_window(self, value: int) -> None:
        # It does not shrink once there is memory: what could be taken back still can be.
        changed = value != getattr(self, "_max_window", value)
        if changed and self._batch is not None and value < self._max_window:
            return
        self._max_window = value
        if changed and self._batch is not None:
            self._enlarge()

    @property
    def max_croppable(self) -> int:
        return 0 if self._batch is None else int(self.croppable.min())

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """
        As in [`ReplayCache`]; croppable are the newest `max_window` columns.

        Counts on the host are checked against what can be removed, for which the host waits for the device (that has
        nothing left to do once the drafts are known to be accepted or not). Counts in a tensor on the cache's device,
        if that is not the CPU, are checked there: nothing is read back, and a wrong one is an assertion of the device.
        """
        self._refuse_interrupted()
        if (
            isinstance(tokens_to_remove, torch.Tensor)
            and tokens_to_remove.device.type != "cpu"
            and self._recording
            and tokens_to_remove.shape in ((), (self._batch,))
            and tokens_to_remove.dtype in (torch.int32, torch.int64)
        ):
            counts = -tokens_to_remove.to(self.seen.device).expand(self._batch)
            torch._assert_async(((counts >= 0) & (counts <= self.croppable)).all())
        else:
            counts = self._crop_counts(tokens_to_remove)
            self._refuse_unrecorded()
            if counts is None:
                return
            croppable = self.croppable.cpu()
            if bool((counts > croppable).any()):
                row = int((counts - croppable).argmax())
                raise CropError(
                    f"Cannot crop {int(counts[row])} tokens: {int(croppable[row])} can be removed (in row {row}). A "
                    f"static cache keeps the newest `max_window` ({self.max_window}) tokens; older ones are folded "
                    "into the state. Build it with a larger `max_window`."
                )
            counts = counts.to(self.seen.device)
        self._crops += 1
        self._crop_on_device(counts)

    @torch.no_grad()
    def _crop_on_device(self, counts: torch.Tensor) -> None:
        window = self.recent.shape[1]
        source = torch.arange(window, device=counts.device) - counts[:, None]
        removed = torch.arange(window, device=counts.device) >= window - counts[:, None]
        self.seen.sub_((self.recent & removed).sum(1))
        self.recent.copy_(self.recent.gather(1, source.clamp(min=0)) & (source >= 0))
        self.columns.sub_(counts)
        self.croppable.sub_(counts)
        self.cropped.add_(counts)

    def reset(self) -> None:
        """As a fresh cache of the same layout: no tokens, recording off, counters at zero. No tensor moves."""
        for _, tensor in self.static_tensors():
            tensor.zero_()
        self._recording = False
        self.fresh, self.forward_in_progress, self.interrupted = True, None, False
        self.resume_at, self.drafts_begin = 0, None
        self.stats = ReplayStats()

    # Rows.

    @torch.inference_mode(False)
    @torch.no_grad()
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was. In place, unless the number of rows changes."""
        self._refuse_interrupted()
        if self._batch is None:
            return
        in_place = len(beam_idx) == self._batch
        on: dict[torch.device, torch.Tensor] = {}

        def pick(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            if tensor.device not in on:
                on[tensor.device] = beam_idx.to(tensor.device)
            picked = tensor.index_select(dim, on[tensor.device])
            return tensor.copy_(picked) if in_place else picked

        for name in _POSITIONS:
            setattr(self, name, pick(getattr(self, name), 0 if name == "recent" else -1))
        for layer in self.layers:
            if isinstance(layer, (StaticReplayLayer, StaticAttentionLayer)):
                layer.set_static_tensors({name: pick(tensor, 0) for name, tensor in layer.static_tensors().items()})
        if not in_place:
            self._batch = len(beam_idx)
            self.mark_static()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._batch is not None:
            self.reorder_cache(torch.arange(self._batch, device="cpu").repeat_interleave(repeats))

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are of this cache's addresses.
        return self.__dict__ | {"graphs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_static()

    def restore(self, snapshot: StaticReplayCache) -> None:
        """Makes this cache what `snapshot` was; the snapshot stays usable. In place where both are laid out alike."""
        mine, theirs = dict(self.static_tensors()), dict(snapshot.static_tensors())
        # (Two sizes may have as many slots of keys, and use others of them.)
        settings = lambda cache: (cache.signature, cache.replay_config, cache.max_cache_len)  # noqa: E731
        alike = settings(self) == settings(snapshot) and mine.keys() == theirs.keys()
        if not alike or any(mine[name].shape != theirs[name].shape for name in mine):
            super().restore(snapshot)
            return
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
            for layer, other in zip(self.replay_layers, snapshot.replay_layers):
                for constant, value in zip(layer.constants, other.constants):
                    constant.copy_(value)
        for name in ("fresh", "_recording", "interrupted", "resume_at", "drafts_begin", "_max_window"):
            setattr(self, name, getattr(snapshot, name))
        self._crops = snapshot._crops
        self.forward_in_progress = None

    # Lengths, for readers.

    @property
    def lengths(self) -> torch.Tensor | None:
        """(batch,) int64, on the device: the tokens that each row has seen. None before there is memory."""
        return None if self._batch is None else self.seen

    @property
    def held(self) -> torch.Tensor | None:
        """(phases, batch) int64, on the device: how many tokens each row holds in its buffer, by flush phase."""
        return None if self._batch is None else self.seen - self.base

    def padding_mask(self, device: torch.device | str = "cpu") -> None:
        """None: padding takes no slot here."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Columns of the longest row, padding included: a tensor () on the device; the integer 0 on a fresh cache."""
        return 0 if self.fresh else self.columns.max()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """`max_cache_len`; -1 for a model without attention, whose cache has no end."""
        if layer_idx is not None:
            return self.layers[layer_idx].get_max_length()
        return max(layer.get_max_length() for layer in self.layers)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None and not isinstance(self.layers[layer_idx], ReplayLayer):
            return super().has_previous_state(layer_idx, state_idx)
        return not self.fresh

    @property
    def batch_size(self) -> int:
        return -1 if self._batch is None else self._batch

    def __repr__(self) -> str:
        return (
            f"StaticReplayCache({self.signature.model_type}, layers={len(self.layers)}, "
            f"replayed={len(self.replay_layers)}, batch={self.batch_size}, max_cache_len={self.max_cache_len}, "
            f"max_window={self.max_window}, {self.replay_config})"
        )
