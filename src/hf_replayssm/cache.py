"""
`ReplayCache`: a transformers `Cache` whose recurrent layers hold a checkpoint of the state and the inputs since.

How one forward goes through it. The model opens it with `begin_forward(tokens, mask)`, which decides once for all
layers which tokens go where (a [`ReplayForward`] of one or two [`Segment`]s) and changes nothing. Each recurrent layer
then runs its segments: `convolve`, and either `append` + the `replay` op, or, for a prefill, a scan over the
`whole_state`. `end_forward` moves the write positions, once for all layers. So a forward that fails before its first
layer leaves the cache as it was, and every layer is always at the same position.

The tokens of a row are counted in two ways, which differ only where tokens were masked (padding):
*columns* are what attention layers count, padding included; *tokens* are the real ones, which the recurrence has seen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from .config import ReplayConfig
from .ops import causal_conv, mamba2


# A forward of more tokens than this on a cache that records its past is a prefill: it leaves its last `max_window`
# tokens for a crop instead of all of them. A window of drafts is far below, a prompt that must not stay in the buffer
# is usually above; and the products of a window grow with the square of its length.
LONGEST_WINDOW = 256


class CropError(ValueError, RuntimeError):
    """A `crop` that cannot be done. Nothing was changed. (Upstream's layers raise either of the two bases.)"""


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


class Rows:
    """
    One integer for each row of the batch. `same` is that integer when all rows agree (the usual case, in which ops
    take slices instead of gathers), else None.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values  # (batch,) int64, on the CPU
        first = int(values[0])
        self.same = first if bool((values == first).all()) else None
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> int | torch.Tensor:
        """The shared integer, or the (batch,) tensor on `device`."""
        return self.tensor(device) if self.same is None else self.same

    def tensor(self, device: torch.device) -> torch.Tensor:
        """(batch,) on `device`."""
        if device not in self._on:
            self._on[device] = self.values.to(device)
        return self._on[device]

    def __bool__(self) -> bool:
        return self.same != 0


@dataclass
class Segment:
    """
    Some consecutive columns of a forward, and what a recurrent layer does with them.

    `scan=False`: the tokens are appended to the buffer and replayed. `scan=True`: a prefill; all that is held and the
    segment's own tokens are folded into the checkpoint, and the buffer is empty afterwards.
    """

    columns: slice
    scan: bool
    counts: Rows  # real tokens
    start: Rows  # write position before the segment (after `fold_first`)
    seen: Rows  # tokens that the row had seen before the segment
    fold_first: Rows | None = None  # slots to fold before the tokens are appended
    fold_last: Rows | None = None  # slots to fold after them: all of the row's, or 0
    order: torch.Tensor | None = None  # (b, t): real tokens first; None when all are real
    _on: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.columns.stop - self.columns.start

    @cached_property
    def end(self) -> Rows:
        """One past the newest valid slot, once the tokens are appended."""
        return Rows(self.start.values + self.counts.values)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`order`, its inverse, and which tokens are real in that order, each (b, t), on `device`."""
        if device not in self._on:
            order = self.order.to(device)
            real = torch.arange(self.num_tokens, device=device) < self.counts.tensor(device)[:, None]
            self._on[device] = (order, order.argsort(1), real)
        return self._on[device]

    def real_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers (b, t, c) into `order`; masked tokens become zero (a product would keep a NaN)."""
        if self.order is None:
            return tensor
        order, _, real = self.on(tensor.device)
        gathered = tensor.gather(1, order[..., None].expand(-1, -1, tensor.shape[-1]))
        return torch.where(real[..., None], gathered, gathered.new_zeros(()))

    def original_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of [`real_first`] for outputs (b, t, ...): zeros at masked columns."""
        if self.order is None:
            return tensor
        _, inverse, real = self.on(tensor.device)
        shape = (*real.shape, *[1] * (tensor.dim() - 2))
        tensor = torch.where(real.view(shape), tensor, tensor.new_zeros(()))
        return tensor.gather(1, inverse.view(shape).expand_as(tensor))

    def ring_slots(self, kernel: int, ring: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Where the `kernel - 1` inputs before this segment lie in a ring of `ring` slots, oldest first, and which of
        them exist (None: all). (K - 1,) when the rows agree, else (b, K - 1).
        """
        key = ("ring", kernel, ring, device)
        if key not in self._on:
            self._on[key] = ring_slots(self.seen, kernel - 1, ring, device)
        return self._on[key]


def ring_slots(
    seen: Rows, count: int, ring: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The ring slots of the newest `count` tokens of rows that have seen `seen`; see [`Segment.ring_slots`]."""
    newest = torch.tensor(seen.same) if seen.same is not None else seen.values[:, None]
    token = newest - count + torch.arange(count)
    exists = token >= 0
    return (token % ring).to(device), None if bool(exists.all()) else exists.to(device)


@dataclass
class ReplayForward:
    """One forward through the model: its segments, and the positions that hold once it has ended."""

    num_tokens: int
    segments: list[Segment]
    after: Positions
    capacity: int  # slots that the buffers must have
    ring: int  # tokens, beyond the convolution's own reach, whose raw inputs must be kept
    grows: bool = False  # the buffers are too small for it
    touched: bool = False  # a layer has begun to change


@dataclass
class Positions:
    """
    Where every row stands. All recurrent layers of a cache share one; it changes in `end_forward`, `crop`, row
    operations and `reset` only. Tensors are (batch,) int64 on the CPU and are replaced, never written to.
    """

    columns: int = 0  # of the longest row
    seen: torch.Tensor | None = None  # tokens
    held: torch.Tensor | None = None  # tokens in the buffer: the write position
    croppable: torch.Tensor | None = None  # newest columns that a crop may still remove
    mask: torch.Tensor | None = None  # (batch, columns) bool: which columns are tokens; None when all are
    holes: torch.Tensor | None = None  # columns on the left of each row that are there because another row is longer
    since_crop: int = 0  # columns since the last crop
    recording: bool = False

    @property
    def batch_size(self) -> int | None:
        return None if self.seen is None else self.seen.shape[0]

    def real_among_newest(self, columns: torch.Tensor) -> torch.Tensor:
        """How many of the newest `columns` (batch,) columns of each row are tokens."""
        if self.mask is None:
            return columns
        newest_first = torch.nn.functional.pad(self.mask.flip(1).long().cumsum(1), (1, 0))
        return newest_first.gather(1, columns[:, None]).squeeze(1)

    def columns_holding(self, tokens: torch.Tensor) -> torch.Tensor:
        """The most newest columns of each row among which there are no more than `tokens` (batch,) tokens."""
        if self.mask is None:
            return tokens
        return (self.mask.flip(1).long().cumsum(1) <= tokens[:, None]).sum(1)

    def select(self, index: torch.Tensor) -> Positions:
        """The positions of the rows at `index`."""
        pick = lambda rows: None if rows is None else rows.index_select(0, index)  # noqa: E731
        return dataclasses.replace(
            self,
            seen=pick(self.seen),
            held=pick(self.held),
            croppable=pick(self.croppable),
            mask=pick(self.mask),
            holes=pick(self.holes),
        )


class InputBuffer:
    """
    The inputs of the tokens since the checkpoint, for one layer: x (b, h, slots, p) and B (b, g, slots, n) in the
    activation dtype, dt (b, h, slots) in float32.
    """

    names = ("x", "B", "dt")

    def __init__(self, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor):
        self.x, self.B, self.dt = x, B, dt

    @property
    def capacity(self) -> int:
        return self.dt.shape[2]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one row."""
        return sum(t[0].numel() * t.element_size() for t in self.tensors()) // self.capacity

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.B, self.dt

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> InputBuffer:
        return InputBuffer(*(function(tensor) for tensor in self.tensors()))

    def grown(self, capacity: int) -> InputBuffer:
        """A copy with more slots."""

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros((*tensor.shape[:2], capacity, *tensor.shape[3:]))
            larger[:, :, : tensor.shape[2]] = tensor
            return larger

        return self.map(grow)

    def write(self, new: tuple[torch.Tensor, ...], segment: Segment) -> None:
        """Appends x (b, t, h, p), B (b, t, g, n), dt (b, t, h): real tokens only, at each row's write position."""
        if segment.start.same is not None and segment.order is None:
            slots = slice(segment.start.same, segment.end.same)
            for buffer, values in zip(self.tensors(), new):
                buffer[:, :, slots] = values.transpose(1, 2)
            return
        device = self.dt.device
        real = torch.arange(segment.num_tokens) < segment.counts.values[:, None]
        row, token = (index.to(device) for index in real.nonzero(as_tuple=True))
        slot = segment.start.tensor(device)[row] + token
        for buffer, values in zip(self.tensors(), new):
            buffer[row, :, slot] = values[row, token].to(buffer.dtype)

    def drop(self, count: Rows) -> None:
        """Removes each row's first `count` slots; later ones move to the front. (What lies behind is unspecified.)"""
        capacity = self.capacity
        if count.same is not None:
            for buffer in self.tensors():
                buffer[:, :, : capacity - count.same] = buffer[:, :, count.same :].clone()
            return
        source = (torch.arange(capacity) + count.values[:, None]).clamp(max=capacity - 1).to(self.dt.device)
        for buffer in self.tensors():
            index = source.view(len(source), 1, capacity, *[1] * (buffer.dim() - 3)).expand_as(buffer)
            buffer.copy_(buffer.gather(2, index))


class ReplayLayer(LinearAttentionLayer):
    """
    The cache of one Mamba-2 layer: `checkpoint` (batch, heads, head_dim, state), `inputs` (an [`InputBuffer`]) and
    `conv_inputs` (batch, ring, conv_dim), the newest raw inputs of the convolution in a ring indexed by the token's
    number, so that neither a step nor a rollback moves them. All are allocated at the first forward.

    Readers that know nothing of replay see whole states: `recurrent_states`, `conv_states` materialise. Writers that
    know nothing of it (an upstream mixer) are refused.
    """

    is_compileable = False  # it allocates as it goes, and reads positions on the host
    is_croppable = True

    def __init__(self, number_of_states: int = 1, **kwargs):
        if number_of_states != 1:
            raise ValueError(f"A replay layer holds one recurrent state; this layer has {number_of_states}.")
        # Not `super().__init__`: what it sets to plain attributes are properties here, views of the replayed state.
        self.number_of_states = 1
        self.cache: ReplayCache | None = None  # set by the cache that owns the layer
        self.conv_kernel_size: dict[int, int | None] = {0: None}
        self.release()

    def release(self) -> None:
        """Gives the tensors back; the next forward allocates again."""
        self.checkpoint: torch.Tensor | None = None
        self.inputs: InputBuffer | None = None
        self.conv_inputs: torch.Tensor | None = None
        self.A: torch.Tensor | None = None  # (heads,) of the mixer, to fold when somebody reads the state
        self.device = self.dtype = None

    # What the mixer calls, in this order, for every segment of a forward.

    def convolve(
        self,
        inputs: torch.Tensor,
        segment: Segment,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Callable[[torch.Tensor], torch.Tensor],
        long_conv: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """
        The causal convolution of the segment's `inputs` (b, t, conv_dim; real tokens first, masked ones zero) behind
        each row's own history, which it takes up. `long_conv` maps (b, conv_dim, L) to the same shape for a prefill.
        Returns (b, t, conv_dim).
        """
        kernel = weight.shape[1]
        self._reserve_conv(inputs, kernel)
        history = self._conv_history(segment, kernel, inputs.dtype)
        if segment.scan:
            window = torch.cat([history, inputs], dim=1).transpose(1, 2)
            out = long_conv(window)[..., kernel - 1 :].transpose(1, 2)
        else:
            out = causal_conv.causal_conv(history, inputs, weight, bias, activation)
        self._record_conv(inputs, segment)
        return out

    def append(self, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, segment: Segment) -> None:
        """Folds what the segment says must go first, then buffers its tokens: x (b, t, h, p), B (b, t, g, n), dt."""
        self._reserve_state(x, B, dt, A)
        if segment.fold_first is not None:
            self._write_checkpoint(self._fold(segment.fold_first), segment.fold_first)
            self.inputs.drop(segment.fold_first)
        self.inputs.write((x, B, dt), segment)

    def flush(self, segment: Segment) -> None:
        """Folds the rows that have come to `buffer_len`, if any."""
        if segment.fold_last is not None:
            self._write_checkpoint(self._fold(segment.fold_last), segment.fold_last)

    def flush_to(self, state: torch.Tensor, segment: Segment) -> None:
        """The same where the caller has the state after the segment at hand."""
        self._write_checkpoint(state, segment.fold_last)

    def state_before_scan(
        self, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, segment: Segment
    ) -> torch.Tensor | None:
        """The whole state that a scan starts from (b, h, p, n), float32; None when no row has seen a token."""
        self._reserve_state(x, B, dt, A)
        return self._fold(segment.start) if segment.seen else None

    # The state.

    def whole_state(self) -> torch.Tensor | None:
        """The state after all tokens, pending ones included: (b, h, p, n), float32. None before the first forward."""
        if self.checkpoint is None:
            return None
        return self._fold(Rows(self.cache.positions.held)).clone()

    def newest_conv_inputs(self) -> torch.Tensor | None:
        """The newest `kernel` raw inputs as upstream lays them out: (b, conv_dim, kernel), zeros before the start."""
        if self.conv_inputs is None:
            return None
        seen = Rows(self.cache.positions.seen)
        slots, exists = ring_slots(seen, self.conv_kernel_size[0], self.conv_inputs.shape[1], self.conv_inputs.device)
        return self._ring_read(slots, exists).transpose(1, 2)

    def _fold(self, count: Rows) -> torch.Tensor:
        return mamba2.fold(
            self.inputs.x, self.inputs.B, self.inputs.dt, self.A, self.checkpoint, count.on(self.checkpoint.device)
        )

    def _write_checkpoint(self, state: torch.Tensor, count: Rows) -> None:
        """The only place that writes a checkpoint: the rows for which `count` is not zero take their new `state`."""
        if count.same is not None:
            self.checkpoint.copy_(state)
        else:
            rows = count.values.nonzero().squeeze(1).to(self.checkpoint.device)
            self.checkpoint.index_copy_(0, rows, state.index_select(0, rows).to(self.checkpoint.dtype))

    # Memory.

    def _reserve_state(self, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor) -> None:
        forward, config = self.cache.forward_in_progress, self.cache.replay_config
        forward.touched = True
        self.A = A
        if self.checkpoint is not None and self.inputs.capacity >= forward.capacity:
            return
        with torch.inference_mode(False):  # plain tensors, so that the cache can go on outside of inference mode
            if self.checkpoint is not None:
                self.inputs = self.inputs.grown(forward.capacity)
                return
            batch, _, heads, head_dim = x.shape
            groups, state = B.shape[2:]
            self.device, self.dtype = x.device, x.dtype
            self.checkpoint = torch.zeros(
                (batch, heads, head_dim, state), dtype=config.checkpoint_dtype, device=x.device
            )
            shapes = ((batch, heads, forward.capacity, head_dim), (batch, groups, forward.capacity, state))
            self.inputs = InputBuffer(
                *(torch.zeros(shape, dtype=x.dtype, device=x.device) for shape in shapes),
                torch.zeros((batch, heads, forward.capacity), dtype=dt.dtype, device=x.device),
            )

    @torch.inference_mode(False)
    def _reserve_conv(self, inputs: torch.Tensor, kernel: int) -> None:
        forward = self.cache.forward_in_progress
        forward.touched = True
        ring = kernel + forward.ring
        if self.conv_inputs is None:
            self.conv_kernel_size = {0: kernel}
            self.conv_inputs = inputs.new_zeros((inputs.shape[0], ring, inputs.shape[2]))
        elif self.conv_inputs.shape[1] < ring:
            # A larger ring: every token that is there moves to its slot in the new one.
            seen, old = Rows(self.cache.positions.seen), self.conv_inputs
            slots, exists = ring_slots(seen, old.shape[1], old.shape[1], old.device)
            kept = self._ring_read(slots, exists)
            self.conv_inputs = old.new_zeros((old.shape[0], ring, old.shape[2]))
            slots, exists = ring_slots(seen, old.shape[1], ring, old.device)
            if seen.same is not None:
                existing = slice(None) if exists is None else exists
                self.conv_inputs[:, slots[existing]] = kept[:, existing]
            else:
                exists = torch.ones_like(slots, dtype=torch.bool) if exists is None else exists
                row, column = exists.nonzero(as_tuple=True)
                self.conv_inputs[row, slots[row, column]] = kept[row, column]

    def _conv_history(self, segment: Segment, kernel: int, dtype: torch.dtype) -> torch.Tensor:
        slots, exists = segment.ring_slots(kernel, self.conv_inputs.shape[1], self.conv_inputs.device)
        return self._ring_read(slots, exists).to(dtype)

    def _ring_read(self, slots: torch.Tensor, exists: torch.Tensor | None) -> torch.Tensor:
        """(b, len(slots), conv_dim); zeros where `exists` is False."""
        if slots.dim() == 1:
            values = self.conv_inputs.index_select(1, slots)
        else:
            values = self.conv_inputs.gather(1, slots[..., None].expand(-1, -1, self.conv_inputs.shape[2]))
        if exists is None:
            return values
        return torch.where(exists[..., None], values, values.new_zeros(()))

    def _record_conv(self, inputs: torch.Tensor, segment: Segment) -> None:
        ring = self.conv_inputs.shape[1]
        seen, counts = segment.seen, segment.counts
        if seen.same is not None and segment.order is None:
            count = min(counts.same, ring)
            begin = (seen.same + counts.same - count) % ring
            head = min(count, ring - begin)
            inputs = inputs[:, counts.same - count :]
            self.conv_inputs[:, begin : begin + head] = inputs[:, :head]
            if head < count:
                self.conv_inputs[:, : count - head] = inputs[:, head:]
            return
        token = torch.arange(segment.num_tokens)
        keep = (token < counts.values[:, None]) & (token >= counts.values[:, None] - ring)
        row, token = keep.nonzero(as_tuple=True)
        slot = (seen.values[row] + token) % ring
        row, token, slot = (index.to(inputs.device) for index in (row, token, slot))
        self.conv_inputs[row, slot] = inputs[row, token].to(self.conv_inputs.dtype)

    @torch.inference_mode(False)
    def select_rows(self, index: torch.Tensor) -> None:
        """Keeps the rows at `index` (repeats allowed)."""
        if self.checkpoint is None:
            return
        pick = lambda tensor: tensor.index_select(0, index.to(tensor.device))  # noqa: E731
        self.checkpoint, self.conv_inputs = pick(self.checkpoint), pick(self.conv_inputs)
        self.inputs = self.inputs.map(pick)

    # What readers and writers of upstream's linear-attention layers find here.

    @property
    def record_past(self) -> bool:
        """Whether the newest tokens can be cropped; one switch for the whole cache."""
        return self.cache is not None and self.cache.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if self.cache is not None:  # upstream's __init__ of a sliding layer sets it before there is a cache
            self.cache.record_past = value

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.cache is not None and self.cache.positions.columns > 0}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        return {0: self.whole_state()}

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        return {0: self.newest_conv_inputs()}

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        return {0: self.checkpoint is not None}

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        return {0: self.conv_inputs is not None}

    def update_conv_state(self, *args, **kwargs):
        raise ValueError(
            "A mixer that knows nothing of replay tried to write to a ReplayCache. Call `hf_replayssm.enable(model)` on "
            "the model that uses this cache, or use another cache (`cache_implementation='dynamic'`)."
        )

    update_recurrent_state = update_conv_state

    def crop(self, tokens_to_remove: int) -> None:
        raise CropError("Replay layers are cropped together: call `crop` on the cache, not on a layer.")

    def reset(self) -> None:
        self.release()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.select_rows(beam_idx)

    def offload(self) -> None:
        raise ValueError("A ReplayCache cannot be offloaded: use `cache_implementation='dynamic'`.")

    prefetch = offload


class _AttentionToo(ReplayLayer):
    """A layer with both a Mamba-2 state and attention keys and values (Zamba2, Falcon-H1)."""

    attention: type[DynamicLayer]

    # Attention calls this one; the recurrent part allocates through `_reserve_*`.
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.attention.lazy_initialization(self, key_states, value_states)

    def reset(self) -> None:
        ReplayLayer.reset(self)
        self.attention.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        ReplayLayer.reorder_cache(self, beam_idx)
        self.attention.reorder_cache(self, beam_idx)


class ReplayAndFullAttentionLayer(_AttentionToo, DynamicLayer):
    attention = DynamicLayer

    def __init__(self, **kwargs):
        DynamicLayer.__init__(self)
        ReplayLayer.__init__(self, **kwargs)


class ReplayAndSlidingWindowAttentionLayer(_AttentionToo, DynamicSlidingWindowLayer):
    attention = DynamicSlidingWindowLayer

    def __init__(self, sliding_window: int, **kwargs):
        self.cache = None
        DynamicSlidingWindowLayer.__init__(self, sliding_window=sliding_window)
        ReplayLayer.__init__(self, **kwargs)


REPLAY_LAYER_TYPES = {
    "linear_attention": ReplayLayer,
    "hybrid": ReplayAndFullAttentionLayer,
    "hybrid_sliding": ReplayAndSlidingWindowAttentionLayer,
}


def attention_part(layer: Any) -> type[DynamicLayer] | None:
    """The attention class of a cache layer, whose methods act on its keys and values alone; None without attention."""
    return next((base for base in (DynamicSlidingWindowLayer, DynamicLayer) if isinstance(layer, base)), None)


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
    (batch, heads, head_dim, state) and `layers[i].inputs`.

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
        from .models.families import family_of_config, signature

        if config is None:
            raise ValueError("A ReplayCache is built for a model: pass `config=model.config`.")
        self.replay_config = (replay_config or ReplayConfig()).replace(**fields)
        text_config = config.get_text_config(decoder=True)
        family_of_config(text_config)
        self.signature = signature(text_config)
        layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
        classes = DYNAMIC_LAYER_TYPE_MAPPING | REPLAY_LAYER_TYPES
        super().__init__(layers=[classes[name](**kwargs) for name, kwargs in zip(layer_types, layer_kwargs)])
        self.replay_layers = [layer for layer in self.layers if isinstance(layer, ReplayLayer)]
        for layer in self.replay_layers:
            layer.cache = self
        self.positions = Positions()
        self.max_window = self.replay_config.max_window
        self.forward_in_progress: ReplayForward | None = None
        self.interrupted = False
        self.stats = ReplayStats()

    # One forward.

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
        if self.interrupted:
            raise ValueError(
                "The last forward through this cache failed half-way, so its layers no longer agree. Call "
                "`cache.reset()` and start over, or `cache.restore(...)` a snapshot taken before."
            )
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
                raise ValueError(
                    "The attention mask pads on the right. With a cache the next token would follow the padding: set "
                    "`tokenizer.padding_side = 'left'` (or call the model without a cache)."
                )

        zeros = torch.zeros(batch_size, dtype=torch.long)
        if now.batch_size is None:
            now = dataclasses.replace(now, seen=zeros, held=zeros, croppable=zeros, holes=zeros)
        plan = self._plan_recorded if now.recording else self._plan_unrecorded
        self.forward_in_progress = plan(now, num_tokens, mask)
        return self.forward_in_progress

    def end_forward(self) -> None:
        """Closes the forward: moves the write positions to where the tokens went."""
        forward, now = self.forward_in_progress, self.positions
        self.forward_in_progress = None
        held = torch.zeros_like(forward.after.held) if now.held is None else now.held
        counts = [segment.counts.values for segment in forward.segments]
        state_bytes = sum(
            layer.checkpoint[0].numel() * layer.checkpoint.element_size() for layer in self.replay_layers
        )
        slot_bytes = sum(layer.inputs.slot_bytes for layer in self.replay_layers)
        writes = 0
        for segment in forward.segments:
            if segment.scan:
                writes += int(((held > 0) | (segment.counts.values > 0)).sum())
                continue
            for fold in (segment.fold_first, segment.fold_last):
                writes += 0 if fold is None else int((fold.values > 0).sum())
            self.stats.input_bytes_written += int(segment.counts.values.sum()) * slot_bytes
        self.stats.forwards += 1
        self.stats.buffer_growths += forward.grows
        self.stats.tokens += int(sum(count.sum() for count in counts))
        self.stats.checkpoint_writes += writes
        self.stats.checkpoint_bytes_written += writes * state_bytes
        self.stats.per_token_bytes += int((sum(counts) > 0).sum()) * state_bytes
        self.positions = forward.after

    def abort_forward(self) -> None:
        """Closes a forward that failed. If a layer had begun to change, the cache refuses to go on."""
        forward, self.forward_in_progress = self.forward_in_progress, None
        self.interrupted = forward is not None and (forward.touched or self._attention_moved())

    def _attention_moved(self) -> bool:
        return any(
            part.get_seq_length(layer) != self.positions.columns
            for layer in self.layers
            if (part := attention_part(layer)) is not None and layer.is_initialized
        )

    def _plan_unrecorded(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> ReplayForward:
        """Nothing needs to be cropped later: a row that reaches `buffer_len` is folded whole."""
        buffer_len = self.replay_config.buffer_len
        after = self._extended(now, tokens, mask)
        counts = after.seen - now.seen
        capacity = max(buffer_len, self._capacity())
        if int(now.held.max()) + tokens <= capacity:
            full = now.held + counts
            full_rows = Rows(torch.where(full >= buffer_len, full, 0))
            segment = self._segment(now.held, now.seen, slice(0, tokens), mask, fold_last=full_rows)
            held = full - full_rows.values
        else:
            segment = self._segment(now.held, now.seen, slice(0, tokens), mask, scan=True)
            held = torch.zeros_like(counts)
        after = dataclasses.replace(after, held=held, croppable=torch.zeros_like(held), since_crop=0)
        return ReplayForward(tokens, [segment], after, capacity, ring=0)

    def _plan_recorded(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> ReplayForward:
        """
        What may be cropped later stays in the buffer: the newest `max_window` columns, and all since the last crop. Of
        a prefill (a first forward, or one of more than `LONGEST_WINDOW` tokens) only the former.
        """
        window, buffer_len = self.max_window, self.replay_config.buffer_len
        capacity = buffer_len + window
        after = self._extended(now, tokens, mask)
        counts = after.seen - now.seen
        first = now.columns == 0
        if tokens > (window if first else max(LONGEST_WINDOW, capacity)):
            cut = tokens - window
            early, late = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
            scan = self._segment(now.held, now.seen, slice(0, cut), early, scan=True)
            seen = now.seen + scan.counts.values
            rest = self._segment(torch.zeros_like(seen), seen, slice(cut, tokens), late)
            after = dataclasses.replace(
                after, held=rest.counts.values, croppable=torch.full_like(seen, window), since_crop=window
            )
            segments = [scan, rest]
        else:
            held, croppable, fold_first = now.held, now.croppable, None
            if int((held + counts).max()) > capacity:
                # As far as the capacity goes, a window in front of the new tokens stays as well: the crop after them
                # may reach behind them.
                keep = max(now.since_crop, min(window, capacity - tokens))
                keep = torch.full_like(held, keep).minimum(croppable)
                keep = now.real_among_newest(keep)
                fold_first = Rows(torch.where(held + counts > capacity, held - keep, 0))
                held = held - fold_first.values
                croppable = croppable.minimum(now.columns_holding(held))
                fold_first = fold_first or None
            rest = self._segment(held, now.seen, slice(0, tokens), mask, fold_first=fold_first)
            after = dataclasses.replace(
                after, held=held + counts, croppable=croppable + tokens, since_crop=now.since_crop + tokens
            )
            segments = [rest]
        need, present = int(after.held.max()), self._capacity()
        grows = need > max(capacity, present)
        # A buffer that a round outgrows grows by a good step, so that the next rounds do not copy it again.
        capacity = need + buffer_len if grows else max(capacity, present)
        return ReplayForward(tokens, segments, after, capacity, ring=capacity, grows=grows)

    def _segment(
        self,
        held: torch.Tensor,
        seen: torch.Tensor,
        columns: slice,
        mask: torch.Tensor | None,
        scan: bool = False,
        fold_first: Rows | None = None,
        fold_last: Rows | None = None,
    ) -> Segment:
        tokens = columns.stop - columns.start
        order = None
        counts = torch.full_like(held, tokens)
        if mask is not None and not bool(mask.all()):
            counts = mask.sum(1)
            order = (~mask).long().argsort(dim=1, stable=True)
        if scan:
            fold_last = Rows(torch.ones_like(held))
        return Segment(
            columns, scan, Rows(counts), Rows(held), Rows(seen), fold_first, fold_last or None, order
        )

    def _extended(self, now: Positions, tokens: int, mask: torch.Tensor | None) -> Positions:
        """`now` with the new columns counted."""
        counts = torch.full_like(now.seen, tokens) if mask is None else mask.sum(1)
        columns_mask = now.mask
        if mask is not None or now.mask is not None:
            past = torch.ones((len(counts), now.columns), dtype=torch.bool) if now.mask is None else now.mask
            new = torch.ones((len(counts), tokens), dtype=torch.bool) if mask is None else mask
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
        self.positions = dataclasses.replace(
            self.positions, recording=value, since_crop=0, croppable=croppable
        )
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

        Args:
            tokens_to_remove: a count <= 0 for all rows, or a (batch,) integer tensor of counts <= 0. After the latter
                the rows have lengths of their own: `get_seq_length` is the longest, and shorter rows are padded on
                the left, which the model's forward takes into account by itself.

        Raises:
            CropError: a positive count, a depth beyond `max_croppable`, or a cache that does not record its past.
        """
        now = self.positions
        counts = self._crop_counts(tokens_to_remove)
        if not now.recording:
            raise CropError(
                "`crop` was called on a cache that does not record its past. Call `cache.activate_past_recording()` "
                "before the forward whose tokens may have to go."
            )
        if counts is None or now.seen is None:
            return
        if bool((counts > now.croppable).any()):
            row = int((counts - now.croppable).argmax())
            raise CropError(
                f"Cannot crop {int(counts[row])} tokens: {int(now.croppable[row])} can be removed "
                f"(in row {row}). The cache keeps the newest `max_window` ({self.max_window}) tokens and all since the "
                "last crop; older ones are folded into the state. Build it with a larger `max_window`."
            )

        self.stats.crops += 1
        self.stats.tokens_cropped += int(counts.sum())
        lengths = now.columns - now.holes - counts  # of each row, from its first column to its last
        columns = int(lengths.max())
        if columns == 0:
            self._empty()
            return
        mask = now.mask
        if mask is None and int(lengths.min()) < columns:
            mask = torch.ones((len(counts), now.columns), dtype=torch.bool)
        if mask is not None:
            # Every row's newest column comes to the right end.
            source = torch.arange(columns) + (now.columns - counts - columns)[:, None]
            mask = mask.gather(1, source.clamp(min=0)) & (source >= 0)
            mask = None if bool(mask.all()) else mask
        real = now.real_among_newest(counts)
        self.positions = dataclasses.replace(
            now,
            columns=columns,
            seen=now.seen - real,
            held=now.held - real,
            croppable=now.croppable - counts,
            mask=mask,
            holes=columns - lengths,
            since_crop=0,
        )
        for layer in self.layers:
            if (part := attention_part(layer)) is not None and layer.is_initialized:
                self._crop_attention(layer, part, counts, now.columns - columns)

    def _crop_counts(self, tokens_to_remove: int | torch.Tensor) -> torch.Tensor | None:
        """The counts as a (batch,) tensor of numbers >= 0 (None on a cache without rows and nothing to remove)."""
        batch = self.positions.batch_size
        if isinstance(tokens_to_remove, torch.Tensor) and tokens_to_remove.dim() > 0:
            counts = tokens_to_remove.to("cpu")
            if counts.is_floating_point() or counts.dtype == torch.bool or counts.shape != (batch or 0,):
                raise CropError(
                    f"`crop` takes one count, or an integer tensor of one count for each of the {batch or 0} rows; this "
                    f"is a {counts.dtype} tensor of shape {tuple(counts.shape)}."
                )
            counts = counts.long()
        else:
            counts = torch.full((batch or 1,), int(tokens_to_remove), dtype=torch.long)
        if bool((counts > 0).any()):
            raise CropError(
                f"`crop` takes counts <= 0, the number of tokens to remove as a negative number, not {tokens_to_remove}."
            )
        if batch is None:
            if bool((counts < 0).any()):
                raise CropError(f"Cannot crop {int(-counts.min())} tokens: the cache is empty, 0 can be removed.")
            return None
        return -counts

    def _crop_attention(
        self, layer: DynamicLayer, part: type[DynamicLayer], counts: torch.Tensor, shorter: int
    ) -> None:
        """Drops each row's newest `counts` keys and values and moves the rest to the right end, `shorter` columns on."""
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
        source = (torch.arange(length) + (stored - counts - length)[:, None]).clamp(min=0)
        source = source.to(layer.keys.device)[:, None, :, None]
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
        now = self.positions
        if now.batch_size is None:
            return
        self.positions = now.select(beam_idx.to("cpu"))
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, repeats next to each other."""
        if self.positions.batch_size is not None:
            self.reorder_cache(torch.arange(self.positions.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at `indices` (integers, or a (batch,) bool mask)."""
        self.reorder_cache(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    # Copies.

    def snapshot(self) -> ReplayCache:
        """A copy that [`restore`] takes."""
        return copy.deepcopy(self)

    def restore(self, snapshot: ReplayCache) -> None:
        """Makes this cache what `snapshot` was; the snapshot stays usable."""
        fields = copy.deepcopy(snapshot.__dict__)
        self.__dict__.update(fields)
        for layer in self.replay_layers:
            layer.cache = self

    # Lengths and states, for readers.

    @property
    def lengths(self) -> torch.Tensor | None:
        """(batch,) int64, CPU: how many tokens each row has seen, padding not counted. None before the first forward."""
        return self.positions.seen

    @property
    def held(self) -> torch.Tensor | None:
        """(batch,) int64, CPU: how many tokens each row holds in its buffer."""
        return self.positions.held

    def padding_mask(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """(batch, get_seq_length()) bool: which columns are tokens; None when all are."""
        return None if self.positions.mask is None else self.positions.mask.to(device)

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
            f"batch={self.batch_size}, length={self.get_seq_length()}, {self.replay_config})"
        )

