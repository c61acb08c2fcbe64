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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs

from .cache import RIGHT_PADDING, ReplayCache, ReplayStats
from .config import ReplayConfig
from .layers import CropError, InputBuffer, OwnedLayer, ReplayLayer
from .ops import backend, mamba2


SLOTS_MULTIPLE = 8  # attention kernels copy a mask whose rows are not aligned to this


class CacheFullError(ValueError, IndexError):
    """More tokens than `max_cache_len`. (Upstream's static cache raises the second of the bases.)"""


# One forward.


@dataclass
class StaticSegment:
    """
    [`Segment`] on the device: some consecutive columns of a forward, and what a recurrent layer does with them. All
    tensors are int64 and describe the rows before the segment.
    """

    columns: slice
    scan: bool
    num_tokens: int
    seen: torch.Tensor  # (b,)
    base: torch.Tensor  # (phases, b)
    counts: torch.Tensor  # (b,) real new tokens
    after: torch.Tensor  # (phases, b): `base` after the segment
    due: torch.Tensor | None  # (phases, b) bool: which rows write their checkpoint; None for a scan, all
    capacity: int
    real: torch.Tensor | None  # (b, t) bool: which columns are tokens; None when all are
    _on: dict[Any, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> StaticSegment:
        """The same with tensors on `device`: layers may be spread over several."""
        if device == self.seen.device:
            return self
        if device not in self._on:
            move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
            self._on[device] = StaticSegment(
                self.columns,
                self.scan,
                self.num_tokens,
                move(self.seen),
                move(self.base),
                move(self.counts),
                move(self.after),
                None,
                self.capacity,
                move(self.real),
            )
        return self._on[device]

    def kernel_positions(self) -> torch.Tensor:
        """(phases, 5, b) int32: [`Segment.kernel_positions`] of each phase."""
        if "kernel" not in self._on:
            held = self.seen - self.base
            fold = held if self.scan else self.after - self.base
            seen, counts = self.seen.expand_as(held), self.counts.expand_as(held)
            positions = torch.stack([seen, self.base % self.capacity, held, counts, fold], dim=1)
            self._on["kernel"] = positions.to(torch.int32)
        return self._on["kernel"]

    def _order(self) -> torch.Tensor:
        if "order" not in self._on:
            self._on["order"] = (~self.real).long().argsort(dim=1, stable=True)
        return self._on["order"]

    def _in_front(self) -> torch.Tensor:
        """(b, t) bool: which tokens are real once they are in front."""
        return torch.arange(self.num_tokens, device=self.counts.device) < self.counts[:, None]

    def real_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers (b, t, c) so that real tokens come first; masked ones become zero (a product would keep a NaN)."""
        if self.real is None:
            return tensor
        here = self.to(tensor.device)
        gathered = tensor.gather(1, here._order()[..., None].expand(-1, -1, tensor.shape[-1]))
        return torch.where(here._in_front()[..., None], gathered, gathered.new_zeros(()))

    def original_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of [`real_first`] for outputs (b, t, ...): zeros at masked columns."""
        if self.real is None:
            return tensor
        here = self.to(tensor.device)
        shape = (*here.real.shape, *[1] * (tensor.dim() - 2))
        tensor = torch.where(here._in_front().view(shape), tensor, tensor.new_zeros(()))
        return tensor.gather(1, here._order().argsort(1).view(shape).expand_as(tensor))

    def new_tokens(self, index: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The numbers (b, t) in the sequence of the new tokens, real ones first, and which of them are real (None: all).
        `index` (b, i): of these new tokens instead; those at a negative index do not exist.
        """
        if index is None:
            index = torch.arange(self.num_tokens, device=self.seen.device)
            valid = None if self.real is None else self._in_front()
        else:
            valid = (index >= 0) & (index < self.counts[:, None])
        return self.seen[:, None] + index, valid


@dataclass
class StaticForward:
    """One forward through the model: its segments, and the tensors that hold once it has ended."""

    num_tokens: int
    segments: list[StaticSegment]
    fresh: bool  # no token has been seen before
    numbers: torch.Tensor  # (b, t): the number of each column's token; a masked column has that of the one before it
    real: torch.Tensor | None  # (b, t) bool
    aligned_right: bool = False  # see `StaticAttentionLayer.update`
    touched: bool = False  # a layer has begun to change
    _on: dict[Any, Any] = field(default_factory=dict)

    @property
    def numbers_from_0(self) -> torch.Tensor:
        """`numbers`, where columns before the first token have that of the first."""
        return self.numbers if self.real is None else self.numbers.clamp(min=0)

    def key_slots(self, front: int, device: torch.device) -> torch.Tensor:
        """(b, t): where keys and values of the new columns go, behind `front` slots of which masked ones take one."""
        if device not in self._on:
            slots = self.numbers + front
            slots = slots if self.real is None else torch.where(self.real, slots, 0)
            self._on[device] = slots.to(device)
        return self._on[device]


# Layers.


def write_rows(
    buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None = None, dim: int = 1
) -> None:
    """
    Writes `values` (b, i, ...) to the slots (b, i) of `buffer`, whose slots are its dimension `dim`: (b, s, ...) or
    (b, ..., s, ...). Where `valid` (b, i) is False, what is there stays. No slot comes twice in a row, but for the one
    of masked keys, in which it does not matter what is left.
    """
    row = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    index = [row, slots] if dim == 1 else [row, None, slots]
    values = values.to(buffer.dtype)
    if valid is not None:
        shape = (*valid.shape, *[1] * (values.dim() - 2))
        values = torch.where(valid.view(shape), values, torch.ops.aten.index(buffer, index))
    # On the buffer itself, not on a view of it: a compiler writes in place then.
    torch.ops.aten.index_put_(buffer, index, values)


class StaticReplayLayer(ReplayLayer):
    """[`ReplayLayer`] at fixed addresses; `phase` says which row of the cache's positions is its own."""

    is_compileable = True
    phase: int

    def release(self) -> None:
        super().release()
        self.kernels = False

    def allocate(self, batch: int, geometry: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Tensors for `batch` rows; `geometry` is (heads, head_dim, state, groups, conv kernel)."""
        h, p, n, g, kernel = geometry
        config = self.cache.replay_config
        sums = torch.promote_types(dtype, torch.float32)
        new = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        self.device, self.dtype = device, dtype
        self.kernels = backend.resolve(config.backend, device, (dtype, config.checkpoint_dtype)) == "triton"
        self.A = new(h, dtype=sums)
        self.checkpoint = new(batch, h, p, n, dtype=config.checkpoint_dtype)
        slots = self.cache.capacity
        self.inputs = InputBuffer(
            new(batch, h, slots, p, dtype=dtype), new(batch, g, slots, n, dtype=dtype), new(batch, h, slots, dtype=sums)
        )
        self.conv_kernel_size = {0: kernel}
        self.conv_inputs = new(batch, self.cache.ring(kernel), h * p + 2 * g * n, dtype=dtype)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "checkpoint": self.checkpoint,
            "x": self.inputs.x,
            "B": self.inputs.B,
            "dt": self.inputs.dt,
            "conv_inputs": self.conv_inputs,
        }

    def set_static_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.checkpoint, self.conv_inputs = tensors["checkpoint"], tensors["conv_inputs"]
        self.inputs = InputBuffer(tensors["x"], tensors["B"], tensors["dt"])

    # What the mixer calls.

    def uses_kernels(self, activations: torch.Tensor) -> bool:
        return self.kernels

    def decay_rates(self, A_log: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # They are computed where a sequence begins or a prompt goes on, and read from then on: a step has a launch
        # or two less, and what reads the state later finds them at an address that no graph reuses.
        forward = self.cache.forward_in_progress
        if forward.fresh or forward.segments[0].scan:
            self.A.copy_(super().decay_rates(A_log.detach(), self.A.dtype))
        return self.A

    def _kernel_positions(self, segment: StaticSegment, device: torch.device) -> torch.Tensor:
        return segment.to(device).kernel_positions()[self.phase]

    def _reserve_conv(self, inputs: torch.Tensor, kernel: int) -> None:
        self.cache.forward_in_progress.touched = True

    def _reserve_state(self, activations: torch.Tensor, heads, groups, A: torch.Tensor) -> None:
        self.cache.forward_in_progress.touched = True

    def _conv_history(self, segment: StaticSegment, kernel: int, dtype: torch.dtype) -> torch.Tensor:
        seen = segment.to(self.conv_inputs.device).seen
        return self.newest_of_ring(seen, kernel - 1).to(dtype)

    def newest_of_ring(self, seen: torch.Tensor, count: int) -> torch.Tensor:
        token = seen[:, None] - count + torch.arange(count, device=seen.device)
        return self._ring_read(token % self.conv_inputs.shape[1], token >= 0)

    def _record_conv(self, inputs: torch.Tensor, segment: StaticSegment) -> None:
        ring = self.conv_inputs.shape[1]
        segment = segment.to(self.conv_inputs.device)
        index = None
        if segment.num_tokens > ring:  # only each row's newest `ring`, which have a slot each
            index = segment.counts[:, None] - ring + torch.arange(ring, device=inputs.device)
            inputs = inputs.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, inputs.shape[2]))
        tokens, valid = segment.new_tokens(index)
        write_rows(self.conv_inputs, tokens % ring, inputs, valid)

    def replay(
        self,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        segment: StaticSegment,
    ) -> torch.Tensor:
        segment = segment.to(x.device)
        base, after = segment.base[self.phase], segment.after[self.phase]
        tokens, valid = segment.new_tokens()
        for buffer, values in zip(self.inputs.tensors(), (x, B, dt)):
            write_rows(buffer, tokens % segment.capacity, values, valid, dim=2)
        inputs = self.in_order(base)
        start = segment.seen - base
        y = mamba2.replay(C, *inputs, A, D, self.checkpoint, start, start + segment.counts)
        # (Whether any row flushes is not known here; the state is computed for all of them.)
        state = mamba2.fold(*inputs, A, self.checkpoint, after - base).to(self.checkpoint.dtype)
        self.checkpoint.copy_(torch.where((after > base)[:, None, None, None], state, self.checkpoint))
        return y

    def in_order(self, base: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x, B and dt with the slots of each row from its token number `base` (b,) on as slots 0, 1, ..."""
        capacity = self.inputs.capacity
        slots = (base[:, None] + torch.arange(capacity, device=base.device)) % capacity
        row = torch.arange(len(slots), device=base.device)[:, None]
        return tuple(tensor.transpose(1, 2)[row, slots].transpose(1, 2) for tensor in self.inputs.tensors())

    def state_before_scan(
        self, x: torch.Tensor, B: torch.Tensor, A: torch.Tensor, segment: StaticSegment
    ) -> torch.Tensor | None:
        if self.cache.forward_in_progress.fresh:
            return None
        if self.kernels:
            positions = self._kernel_positions(segment, x.device)
            return mamba2.fold_triton(positions, self.inputs.tensors(), self.A, self.checkpoint)
        segment = segment.to(x.device)
        return self._whole_state(segment.seen, segment.base[self.phase])

    def flush_to(self, state: torch.Tensor, segment: StaticSegment) -> None:
        self.checkpoint.copy_(state)

    # The state, for readers.

    def _whole_state(self, seen: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return mamba2.fold(*self.in_order(base), self.A, self.checkpoint, seen - base)

    def whole_state(self) -> torch.Tensor | None:
        if self.checkpoint is None:
            return None
        seen, base = (tensor.to(self.device) for tensor in (self.cache.seen, self.cache.base[self.phase]))
        if not self.kernels:
            return self._whole_state(seen, base).clone()
        held, zeros = seen - base, torch.zeros_like(seen)
        positions = torch.stack([seen, base % self.inputs.capacity, held, zeros, held]).to(torch.int32)
        return mamba2.fold_triton(positions, self.inputs.tensors(), self.A, self.checkpoint)

    def newest_conv_inputs(self) -> torch.Tensor | None:
        if self.conv_inputs is None:
            return None
        seen = self.cache.seen.to(self.device)
        return self.newest_of_ring(seen, self.conv_kernel_size[0]).transpose(1, 2)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.cache is not None and not self.cache.is_fresh}

    def reset(self) -> None:
        raise ValueError("The layers of a static replay cache are reset together: call `reset` on the cache.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise ValueError("Rows of a static replay cache move in all layers: call `reorder_cache` on the cache.")

    def get_max_length(self) -> int:
        return -1


class StaticAttentionLayer(OwnedLayer, CacheLayerMixin):
    """
    Keys and values (batch, heads, slots, head_dim) of full attention. Token m of a row is in slot `front` + m: padding
    takes no slot, and rows may have lengths of their own. Masked columns are written to slot 0, which nothing reads.

    The unused slots are in front so that a token beyond the last slot raises, as an index out of range.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, max_cache_len: int, **kwargs):
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        slots = self.cache.key_slots
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], slots, states.shape[-1])) for states in (key_states, value_states)
        )
        self.is_initialized = True
        self.cache.mark_static()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the new (b, heads, t, head_dim) and returns what attention looks at: the new ones alone where there are
        no others, else all slots, of which the model's mask hides those that hold nothing.
        """
        forward = self.cache.forward_in_progress
        forward.touched = True
        if not self.is_initialized:
            with torch.inference_mode(False):
                self.lazy_initialization(key_states, value_states)
        front = self.cache.front_slots
        slots = forward.key_slots(front, self.keys.device)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            write_rows(buffer, slots, states.transpose(1, 2), dim=2)
        if forward.fresh:
            return key_states, value_states
        if forward.aligned_right:
            return self._aligned_right(forward)
        return self.keys, self.values

    def _aligned_right(self, forward: StaticForward) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies in which every row ends in the last slot: FlashAttention takes several new tokens only there."""
        slots = self.keys.shape[2]
        end = (self.cache.front_slots + 1 + forward.numbers[:, -1:]).to(self.keys.device)
        source = (torch.arange(slots, device=self.keys.device) + end - slots).clamp(min=0)
        row = torch.arange(len(source), device=source.device)[:, None]
        return tuple(states.transpose(1, 2)[row, source].transpose(1, 2) for states in (self.keys, self.values))

    def static_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.keys is None else {"keys": self.keys, "values": self.values}

    def set_static_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.keys is not None:
            self.keys, self.values = tensors["keys"], tensors["values"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | torch.Tensor:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        raise CropError("The layers of a static replay cache are cropped together: call `crop` on the cache.")

    reset = StaticReplayLayer.reset
    reorder_cache = StaticReplayLayer.reorder_cache
    offload = ReplayLayer.offload
    prefetch = offload


class StaticReplayAndAttentionLayer(StaticReplayLayer, StaticAttentionLayer):
    """A layer with both a Mamba-2 state and attention keys and values (Zamba2, Falcon-H1)."""

    def __init__(self, max_cache_len: int, **kwargs):
        StaticAttentionLayer.__init__(self, max_cache_len)
        StaticReplayLayer.__init__(self, **kwargs)

    # Attention calls this one; the recurrent part allocates through `allocate`.
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        StaticAttentionLayer.lazy_initialization(self, key_states, value_states)

    def get_max_length(self) -> int:
        return self.max_cache_len

    def static_tensors(self) -> dict[str, torch.Tensor]:
        return StaticReplayLayer.static_tensors(self) | StaticAttentionLayer.static_tensors(self)

    def set_static_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        StaticReplayLayer.set_static_tensors(self, tensors)
        StaticAttentionLayer.set_static_tensors(self, tensors)


STATIC_LAYER_TYPES: dict[str, type] = {
    "linear_attention": StaticReplayLayer,
    "full_attention": StaticAttentionLayer,
    "hybrid": StaticReplayAndAttentionLayer,
    "dummy": DummyLayer,
}


# The cache.

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
        return [
            STATIC_LAYER_TYPES[name](max_cache_len=self.max_cache_len, **kwargs)
            for name, kwargs in zip(layer_types, layer_kwargs)
        ]

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
        geometry = self.signature.geometry
        of_layer = lambda value, index: value[index] if isinstance(value, (list, dict)) else value  # noqa: E731
        self._lay_out()
        with torch.inference_mode(False):
            for index, layer in enumerate(self.layers):
                if isinstance(layer, StaticReplayLayer):
                    layer.allocate(batch_size, geometry, dtype, torch.device(of_layer(devices, index)))
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
        for tensor in (self.phase_delays, *(layer.A for layer in self.replay_layers)):
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
        bytes_of = lambda tensor: tensor.nbytes // self._batch  # noqa: E731
        stats.forwards, stats.tokens, stats.tokens_cropped = max(forwards), sum(rows[2]), int(self.cropped.sum())
        for layer in self.replay_layers:
            writes = sum(folds[layer.phase])
            stats.checkpoint_writes += writes
            stats.checkpoint_bytes_written += writes * bytes_of(layer.checkpoint)
            stats.per_token_bytes += with_tokens * bytes_of(layer.checkpoint)
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
                if layer.A is not None:
                    layer.A.copy_(other.A)
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
