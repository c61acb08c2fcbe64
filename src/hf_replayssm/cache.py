"""
`ReplayCache`: a transformers `Cache` whose recurrent layers hold a checkpoint of the state and the inputs since.

How one forward goes through it. The model opens it with `begin_forward(tokens, mask)`, which decides once for all
layers which tokens go where (a [`ReplayForward`] of one or two [`Segment`]s, see `positions.py`) and changes nothing.
Each recurrent layer then runs its segments (`layers.py`): one `decode` where there are Triton kernels, `convolve` and
`replay` elsewhere, or, for a prefill, a scan that starts from the whole state. What of it is the recurrence's own is in
`recurrences`. `end_forward` moves the write positions, once for all layers. So a forward that fails before its first
layer leaves the cache as it was, and every layer is always at the same position.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from .config import ReplayConfig
from .families import signature
from .layers import REPLAY_LAYER_TYPES, CropError, OwnedLayer, ReplayLayer, attention_part
from .ops.refuse_backward import RefuseBackward
from .positions import Positions, ReplayForward, Rows, Segment, upload


# A forward of more tokens than this on a cache that records its past is a prefill: it leaves its last `max_window`
# tokens for a crop instead of all of them. A window of drafts is far below, a prompt that must not stay in the buffer
# is usually above; and the products of a window grow with the square of its length.
LONGEST_WINDOW = 256


RIGHT_PADDING = (
    "The attention mask pads on the right. With a cache the next token would follow the padding: set "
    "`tokenizer.padding_side = 'left'` (or call the model without a cache)."
)


@dataclass
class ReplayStats:
    """
    What a cache has done since it was made or reset. Counts are over rows: a forward of 3 rows by 2 tokens is 6.

    `checkpoint_writes` counts how often a row's state was written, once for all recurrent layers together (each writes
    at the same tokens); the bytes count every layer.
    """

    forwards: int = 0
    tokens: int = 0  # real tokens that went in; masked ones are not counted
    checkpoint_writes: int = 0
    checkpoint_bytes_written: int = 0
    per_token_bytes: int = 0  # what writing the state back at every forward, as the classic step does, would have cost
    input_bytes_written: int = 0  # into the buffers
    crops: int = 0
    tokens_cropped: int = 0
    buffer_growths: int = 0

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


class ReplayCache(Cache):
    """
    The cache of an enabled model: recurrent layers replay, attention layers are transformers' dynamic ones.

    Args:
        config ([`PreTrainedConfig`]): of the model (or of the model around it; the text config is used).
        replay_config ([`ReplayConfig`], *optional*): settings, which `fields` override.
        **fields: of [`ReplayConfig`], e.g. `buffer_len=16, checkpoint_dtype=torch.bfloat16`.

    Raises:
        ValueError: an unsupported model, or an unknown or invalid setting.

    `stats` ([`ReplayStats`]) counts what was written. Tensors of the recurrent layers are in `layers[i].checkpoint`
    (batch, *state_shape; of Mamba-2 heads, head_dim, state), of 8 bits with `layers[i].scale`, and `layers[i].inputs`.

    Example:

    ```python
    cache = ReplayCache(config=model.config, buffer_len=16)
    cache.activate_past_recording()
    model(prompt, cache=cache)
    model(drafts, cache=cache)     # all of them are verified in this one pass
    cache.crop(-rejected)          # moves the write position
    ```
    """

    def __init__(self, config=None, replay_config: ReplayConfig | None = None, **fields: Any):
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"A ReplayCache is built for a model: pass `config=model.config`, not {type(config)}.")
        self.replay_config = (replay_config or ReplayConfig()).replace(**fields)
        text_config = config.get_text_config(decoder=True)
        self.signature = signature(text_config)  # raises for an unsupported model
        if self.replay_config.time_step_limit is not None and not self.signature.recurrence.has_time_step_limit:
            raise ValueError(
                f"`time_step_limit` overrides a limit on dt that models of type {self.signature.model_type!r} do not "
                "have: leave it out."
            )
        self.replay_config = self.signature.recurrence.settings(self.replay_config)
        super().__init__(layers=self._make_layers(text_config))
        self.replay_layers = [layer for layer in self.layers if isinstance(layer, ReplayLayer)]
        for number, layer in enumerate(self.replay_layers):
            layer.number = number
        self._own_layers()
        self.positions = Positions()
        self.max_window = self.replay_config.max_window
        self.forward_in_progress: ReplayForward | None = None
        self.interrupted = False
        # For the first round of assisted `generate`: columns that need not be fed again, and where its drafts begin.
        self.resume_at, self.drafts_begin = 0, None
        self.stats = ReplayStats()

    def _make_layers(self, text_config: Any) -> list[Any]:
        layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
        return [
            REPLAY_LAYER_TYPES[name](recurrence=self.signature.recurrence, **kwargs)
            if name in REPLAY_LAYER_TYPES
            else DYNAMIC_LAYER_TYPE_MAPPING[name](**kwargs)
            for name, kwargs in zip(layer_types, layer_kwargs)
        ]

    # One forward.

    @property
    def is_fresh(self) -> bool:
        """Whether no column has gone in."""
        return self.positions.columns == 0

    def begin_forward(self, num_tokens: int, batch_size: int, mask: torch.Tensor | None = None) -> ReplayForward:
        """
        Opens a forward of `num_tokens` columns: decides where its tokens go, and changes nothing yet.

        Args:
            mask (batch, num_tokens) bool, *optional*: False where a column is padding. None: all are tokens.

        Raises:
            ValueError: another batch size than the cache's, padding on the right of a first forward, or a cache whose
                last forward failed half-way.
        """
        now = self.positions
        self._refuse_interrupted()
        if num_tokens == 0:
            raise ValueError("A forward through a cache takes at least one token; this one has none.")
        if now.batch_size not in (None, batch_size):
            raise ValueError(
                f"This cache holds a batch of {now.batch_size}, and the inputs are a batch of {batch_size}. Use a new "
                "cache (or `cache.reset()`), or move its rows with `batch_repeat_interleave` or `batch_select_indices`."
            )
        if mask is not None:
            mask = mask.to("cpu", torch.bool)
            if bool(mask.all()):
                mask = None
            elif now.columns == 0 and bool((mask.any(1) & ~mask[:, -1]).any()):
                raise ValueError(RIGHT_PADDING)

        zeros = torch.zeros(batch_size, dtype=torch.long, device="cpu")
        if now.batch_size is None:
            now = dataclasses.replace(now, seen=zeros, held=zeros, first=zeros, croppable=zeros, holes=zeros)
        plan = self._plan_recorded if now.recording else self._plan_unrecorded
        self.forward_in_progress = plan(now, num_tokens, mask)
        return self.forward_in_progress

    def end_forward(self) -> None:
        """Closes the forward: moves the write positions to where the tokens went."""
        forward = self.forward_in_progress
        stats = self._counted(forward)
        self.stats, self.positions, self.forward_in_progress = stats, forward.after, None

    def _counted(self, forward: ReplayForward) -> ReplayStats:
        """The counters with this forward."""
        state_bytes = sum(layer.checkpoint_bytes for layer in self.replay_layers)
        slot_bytes = sum(layer.inputs.slot_bytes for layer in self.replay_layers)
        writes = appended = 0
        for segment in forward.segments:
            counts = segment.counts.values
            if segment.scan:
                writes += int(((segment.start.values > 0) | (counts > 0)).sum())
                continue
            appended += int(counts.sum())
            writes += sum(int((fold.values > 0).sum()) for fold in (segment.fold_first, segment.fold_last) if fold)
        tokens = sum(segment.counts.values for segment in forward.segments)
        now = self.stats
        return dataclasses.replace(
            now,
            forwards=now.forwards + 1,
            tokens=now.tokens + int(tokens.sum()),
            checkpoint_writes=now.checkpoint_writes + writes,
            checkpoint_bytes_written=now.checkpoint_bytes_written + writes * state_bytes,
            per_token_bytes=now.per_token_bytes + int((tokens > 0).sum()) * state_bytes,
            input_bytes_written=now.input_bytes_written + appended * slot_bytes,
            buffer_growths=now.buffer_growths + forward.grows,
        )

    def abort_forward(self) -> None:
        """Closes a forward that failed. If a layer had begun to change, the cache refuses to go on."""
        forward, self.forward_in_progress = self.forward_in_progress, None
        self.interrupted = forward is not None and (forward.touched or self._attention_moved())

    def _refuse_interrupted(self) -> None:
        if self.interrupted:
            raise ValueError(
                "The last forward through this cache failed half-way, so its layers no longer agree. Call "
                "`cache.reset()` and start over, or `cache.restore(...)` a snapshot taken before."
            )

    def _attention_moved(self) -> bool:
        return any(
            part.get_seq_length(layer) != self.positions.columns
            for layer in self.layers
            if (part := attention_part(layer)) is not None and layer.is_initialized
        )

    def _plan_unrecorded(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> ReplayForward:
        """Nothing needs to be cropped later: once a row reaches `buffer_len`, everything is folded."""
        buffer_len = self.replay_config.buffer_len
        after = self._extended(now, tokens, mask)
        counts = after.seen - now.seen
        capacity = max(buffer_len, self._capacity())
        if int(now.held.max()) + tokens <= capacity:
            # One row at `buffer_len` folds all rows: they stay in step, and the state is passed over once.
            held = now.held + counts
            flush = int(held.max()) >= buffer_len
            segment = self._segment(now, slice(0, tokens), mask, fold_last=Rows(held) if flush else None)
        else:
            segment, flush = self._segment(now, slice(0, tokens), mask, scan=True), True
        zeros = torch.zeros_like(counts)
        held, first = (zeros, zeros) if flush else (held, now.first)
        after = dataclasses.replace(after, held=held, first=first, croppable=zeros, since_crop=0)
        return ReplayForward(tokens, [segment], after, capacity, ring=0)

    def _plan_recorded(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> ReplayForward:
        """
        What may be cropped later stays in the buffer: the newest `max_window` columns, and all since the last crop. Of
        a prefill (a first forward, or one of more than `LONGEST_WINDOW` tokens) only the former.
        """
        window, buffer_len = self.max_window, self.replay_config.buffer_len
        limit = buffer_len + window  # tokens held beyond which old ones are folded
        after = self._extended(now, tokens, mask)
        counts = after.seen - now.seen
        prefill = tokens > (window if now.columns == 0 else max(LONGEST_WINDOW, limit))

        # New tokens are appended before old ones are folded: there is room for one more window, here of the drafts
        # and the token before them. A buffer that a round outgrows grows by a good step, so that the next rounds do
        # not copy it again.
        need, present = window if prefill else int((now.held + counts).max()), self._capacity()
        capacity = max(limit + window + 1, present)
        grows = need > capacity
        capacity = need + buffer_len if grows else capacity
        if capacity > present:  # a larger buffer is laid out afresh
            now = dataclasses.replace(now, first=torch.zeros_like(now.first))

        if prefill:
            cut = tokens - window
            early, late = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
            scan = self._segment(now, slice(0, cut), early, scan=True)
            zeros = torch.zeros_like(counts)
            between = dataclasses.replace(now, seen=now.seen + scan.counts.values, held=zeros, first=zeros)
            rest = self._segment(between, slice(cut, tokens), late)
            after = dataclasses.replace(
                after, held=rest.counts.values, first=zeros, croppable=torch.full_like(zeros, window), since_crop=window
            )
            segments = [scan, rest]
        else:
            held, first, croppable, fold_first = now.held, now.first, now.croppable, None
            if int((held + counts).max()) > limit:
                # Behind the last crop a window stays as well (as far as the limit goes): with two tokenizers a
                # draft's crop reaches behind it, on top of all tokens since.
                keep = now.since_crop + min(window, max(0, limit - tokens))
                keep = torch.full_like(held, keep).minimum(croppable)
                keep = now.real_among_newest(keep)
                fold_first = Rows(held - keep)
                held, first = held - fold_first.values, (first + fold_first.values) % capacity
                croppable = croppable.minimum(now.columns_holding(held))
                fold_first = fold_first or None
            segments = [self._segment(now, slice(0, tokens), mask, fold_first=fold_first)]
            after = dataclasses.replace(after, croppable=croppable + tokens, since_crop=now.since_crop + tokens)
            after = after.holding(held + counts, first)
        return ReplayForward(tokens, segments, after, capacity, ring=capacity, grows=grows)

    def _segment(
        self,
        now: Positions,
        columns: slice,
        mask: torch.Tensor | None,
        scan: bool = False,
        fold_first: Rows | None = None,
        fold_last: Rows | None = None,
    ) -> Segment:
        """The segment of these columns, for rows that stand where `now` says."""
        tokens = columns.stop - columns.start
        order = None
        counts = torch.full_like(now.held, tokens)
        if mask is not None and not bool(mask.all()):
            counts = mask.sum(1)
            order = (~mask).long().argsort(dim=1, stable=True)
        if scan:
            fold_last = Rows(torch.ones_like(now.held))
        first, start, seen = Rows(now.first), Rows(now.held), Rows(now.seen)
        return Segment(columns, scan, Rows(counts), first, start, seen, fold_first, fold_last or None, order)

    def _extended(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> Positions:
        """`now` with the new columns counted."""
        counts = torch.full_like(now.seen, tokens) if mask is None else mask.sum(1)
        columns_mask = now.mask
        if mask is not None or now.mask is not None:
            past = (
                torch.ones((len(counts), now.columns), dtype=torch.bool, device="cpu") if now.mask is None else now.mask
            )
            new = torch.ones((len(counts), tokens), dtype=torch.bool, device="cpu") if mask is None else mask
            columns_mask = torch.cat([past, new], 1)
        return dataclasses.replace(now, columns=now.columns + tokens, seen=now.seen + counts, mask=columns_mask)

    def _capacity(self) -> int:
        buffers = [layer.inputs.capacity for layer in self.replay_layers if layer.inputs is not None]
        return min(buffers, default=0)

    # Rollback.

    @property
    def record_past(self) -> bool:
        """Whether new tokens can be cropped later. May be switched in mid-stream; off, the buffers stay small."""
        return self.positions.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value == self.positions.recording:
            return
        croppable = None if self.positions.croppable is None else torch.zeros_like(self.positions.croppable)
        self.positions = dataclasses.replace(self.positions, recording=value, since_crop=0, croppable=croppable)
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer) and not isinstance(layer, ReplayLayer):
                layer.record_past = value

    def activate_past_recording(self) -> None:
        """From now on new tokens can be cropped."""
        self.record_past = True

    def is_recording_past(self, layer_idx: int) -> bool:
        """
        As upstream's, except that replay layers always answer True: only an upstream mixer asks, and True leads it to
        `update_conv_state`, which refuses it, instead of to an update in place of a state that is thrown away.
        """
        return isinstance(self.layers[layer_idx], ReplayLayer) or super().is_recording_past(layer_idx)

    @property
    def max_croppable(self) -> int:
        """How many columns `crop` can remove now, from every row."""
        return 0 if self.positions.croppable is None else int(self.positions.croppable.min())

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """
        Removes the newest columns, exactly as if they had never been seen.

        Croppable are all columns since the last crop, over any number of forwards, and the newest `max_window`. Of a
        prefill (a first forward, or a later one of more than 256 columns and of `buffer_len + max_window`) only the
        latter are.

        Args:
            tokens_to_remove: a count <= 0 for all rows, or a (batch,) integer tensor of counts <= 0. After the latter
                the rows have lengths of their own: `get_seq_length` is the longest, and shorter rows are padded on
                the left, which the model's forward takes into account by itself.

        Raises:
            CropError: a positive count, a depth beyond `max_croppable`, or a cache that does not record its past.
        """
        now = self.positions
        self._refuse_interrupted()
        counts = self._crop_counts(tokens_to_remove)
        self._refuse_unrecorded()
        if counts is None or now.seen is None:
            return
        if bool((counts > now.croppable).any()):
            row = int((counts - now.croppable).argmax())
            raise CropError(
                f"Cannot crop {int(counts[row])} tokens: {int(now.croppable[row])} can be removed "
                f"(in row {row}). The cache keeps the newest `max_window` ({self.max_window}) tokens and, of forwards "
                f"of up to {LONGEST_WINDOW}, all since the last crop; older ones are folded into the state. Build it "
                "with a larger `max_window`."
            )

        self.stats.crops += 1
        self.stats.tokens_cropped += int(counts.sum())
        self.positions = dataclasses.replace(now, since_crop=0)
        self._remove(counts)

    def _refuse_unrecorded(self) -> None:
        if not self.record_past:
            raise CropError(
                "`crop` was called on a cache that does not record its past. Call `cache.activate_past_recording()` "
                "before the forward whose tokens may have to go (`generate` without drafts switches it off)."
            )

    def _remove(self, counts: torch.Tensor) -> None:
        """
        Removes each row's newest `counts` columns (counts >= 0), moves every row to the right end, and drops the
        columns on the left that no row needs any more.
        """
        now = self.positions
        lengths = now.columns - now.holes - counts  # of each row, from its first column to its last
        columns = int(lengths.max())
        if columns == 0:
            self._empty()
            return
        mask = now.mask
        if mask is None and int(lengths.min()) < columns:
            mask = torch.ones((len(counts), now.columns), dtype=torch.bool, device="cpu")
        if mask is not None:
            source = torch.arange(columns, device="cpu") + (now.columns - counts - columns)[:, None]
            mask = mask.gather(1, source.clamp(min=0)) & (source >= 0)
            mask = None if bool(mask.all()) else mask
        real = now.real_among_newest(counts)
        self.positions = dataclasses.replace(
            now,
            columns=columns,
            seen=now.seen - real,
            croppable=now.croppable - counts,
            mask=mask,
            holes=columns - lengths,
        ).holding(now.held - real, now.first)
        for layer in self.layers:
            if (part := attention_part(layer)) is not None and layer.is_initialized:
                self._crop_attention(layer, part, counts, now.columns - columns)

    def _crop_counts(self, tokens_to_remove: int | torch.Tensor) -> torch.Tensor | None:
        """The counts as a (batch,) tensor of numbers >= 0 (None on a cache without rows and nothing to remove)."""
        batch = None if self.batch_size == -1 else self.batch_size
        if isinstance(tokens_to_remove, (list, tuple)):
            tokens_to_remove = torch.tensor(tokens_to_remove, device="cpu")
        if isinstance(tokens_to_remove, torch.Tensor) and tokens_to_remove.dim() > 0:
            counts = tokens_to_remove.to("cpu")
            wrong_shape = counts.dim() != 1 or (batch is not None and len(counts) != batch)
            if counts.is_floating_point() or counts.dtype == torch.bool or wrong_shape:
                raise CropError(
                    f"`crop` takes one count, or an integer tensor of one count for each of the {batch or 0} rows; "
                    f"this is a {counts.dtype} tensor of shape {tuple(counts.shape)}."
                )
            counts = counts.long()
        else:
            counts = torch.full((batch or 1,), operator.index(tokens_to_remove), dtype=torch.long, device="cpu")
        if bool((counts > 0).any()):
            raise CropError(
                f"`crop` takes counts <= 0, the number of tokens to remove as a negative number, not "
                f"{tokens_to_remove}."
            )
        if batch is None:
            if bool((counts < 0).any()):
                raise CropError(f"Cannot crop {int(-counts.min())} tokens: the cache is empty, 0 can be removed.")
            return None
        return -counts

    def _crop_attention(
        self, layer: DynamicLayer, part: type[DynamicLayer], counts: torch.Tensor, shorter: int
    ) -> None:
        """Drops each row's newest `counts` keys and values; the rest goes to the right end, `shorter` columns fewer."""
        stored = layer.keys.shape[-2]
        length = stored - shorter
        if issubclass(part, DynamicSlidingWindowLayer):
            layer.cumulative_length -= shorter
            # A later crop may reach behind this one, so as much as the recurrent layers can still lose stays.
            length = min(stored - int(counts.min()), layer.sliding_window - 1 + int(self.positions.croppable.max()))
            length = min(length, layer.cumulative_length)
        if bool((counts == counts[0]).all()):
            last = stored - int(counts[0])
            layer.keys = layer.keys[..., last - length : last, :]
            layer.values = layer.values[..., last - length : last, :]
            return
        source = (torch.arange(length, device="cpu") + (stored - counts - length)[:, None]).clamp(min=0)
        source = upload(source, layer.keys.device)[:, None, :, None]
        layer.keys, layer.values = (
            states.gather(-2, source.expand(-1, states.shape[1], -1, states.shape[-1]))
            for states in (layer.keys, layer.values)
        )

    def _empty(self) -> None:
        """No token is left: as before the first forward, except for the settings."""
        self.positions = Positions(recording=self.positions.recording)
        for layer in self.layers:
            layer.reset()

    def reset(self) -> None:
        """As a fresh cache: no tokens, recording off, counters at zero."""
        self.record_past = False
        self._empty()
        self.max_window = self.replay_config.max_window
        self.forward_in_progress, self.interrupted = None, False
        self.stats = ReplayStats()

    # Rows.

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; rows may repeat, and their number may change."""
        self._refuse_interrupted()
        if self.positions.batch_size is None:
            return
        self.positions = self.positions.select(beam_idx.to("cpu"))
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        if int(self.positions.holes.min()) > 0:  # the longest rows have left
            self._remove(torch.zeros_like(self.positions.holes))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, repeats next to each other."""
        if self.positions.batch_size is not None:
            self.reorder_cache(torch.arange(self.positions.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at `indices` (integers, or a (batch,) bool mask)."""
        self.reorder_cache(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    # Copies.

    def snapshot(self) -> ReplayCache:
        """A copy that [`restore`] takes, as `copy.deepcopy` makes it."""
        return copy.deepcopy(self)

    def __copy__(self) -> ReplayCache:
        # Layers write in place: two caches that share them would be no copies.
        return copy.deepcopy(self)

    def _own_layers(self) -> None:
        for layer in self.layers:
            if isinstance(layer, OwnedLayer):
                layer.cache = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own_layers()

    def restore(self, snapshot: ReplayCache) -> None:
        """Makes this cache what `snapshot` was; the snapshot stays usable."""
        self.__setstate__(copy.deepcopy(snapshot).__dict__)

    # Lengths and states, for readers.

    @property
    def lengths(self) -> torch.Tensor | None:
        """(batch,) int64, CPU: the tokens that each row has seen, without padding. None before the first forward."""
        return self.positions.seen

    @property
    def held(self) -> torch.Tensor | None:
        """(batch,) int64, CPU: how many tokens each row holds in its buffer."""
        return self.positions.held

    def padding_mask(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """(batch, get_seq_length()) bool: which columns are tokens; None when all are."""
        return None if self.positions.mask is None else upload(self.positions.mask, torch.device(device))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the longest row, padding included; of pure state-space models too."""
        return self.positions.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if attention_part(self.layers[layer_idx]) is not None:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.positions.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None and not isinstance(self.layers[layer_idx], ReplayLayer):
            return super().has_previous_state(layer_idx, state_idx)
        return self.positions.columns > 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        new = key_states, value_states
        keys, values = super().update(key_states.detach(), value_states.detach(), layer_idx, *args, **kwargs)
        if torch.is_grad_enabled():  # what is kept must not hold on to the graph; a gradient is refused as in a mixer
            keys, values = RefuseBackward.apply(keys, *new), RefuseBackward.apply(values, *new)
        return keys, values

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args, **kwargs) -> torch.Tensor:
        return self.layers[layer_idx].update_conv_state(conv_states, *args, **kwargs)

    @property
    def batch_size(self) -> int:
        return -1 if self.positions.batch_size is None else self.positions.batch_size

    @property
    def is_linear(self) -> list[bool]:
        # `generate` takes a cache of linear layers only for one without a length, and feeds it all tokens again in
        # the next turn. This one has a length.
        if len(self.replay_layers) == len(self.layers):
            return [False] * len(self.layers)
        return super().is_linear

    def __repr__(self) -> str:
        return (
            f"ReplayCache({self.signature.model_type}, layers={len(self.layers)}, replayed={len(self.replay_layers)}, "
            f"batch={self.batch_size}, length={self.get_seq_length()}, max_window={self.max_window}, "
            f"{self.replay_config})"
        )


@dataclass(frozen=True)
class LayerReport:
    """What one layer gets: for `doctor`."""

    index: int
    layer_type: str
    cache_layer: str  # class name
    treatment: str  # "replay", "replay + attention cache", "attention cache", "no cache"


def describe_layers(config: Any) -> list[LayerReport]:
    """Layer by layer, what a [`ReplayCache`] for this config holds. `ValueError` for an unsupported model."""
    config = config.get_text_config(decoder=True)
    cache = ReplayCache(config=config)
    reports = []
    for index, (layer_type, layer) in enumerate(zip(cache.signature.layer_types, cache.layers)):
        parts = ["replay"] if isinstance(layer, ReplayLayer) else []
        parts += ["attention cache"] if attention_part(layer) is not None else []
        reports.append(LayerReport(index, layer_type, type(layer).__name__, " + ".join(parts) or "no cache"))
    return reports
