"""
The layers of a replay cache: for every recurrent layer of the model the checkpoint, the inputs since, and the newest
raw inputs of the convolution. Attention layers are transformers' own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from .ops import backend, causal_conv, quantize
from .positions import Rows, Segment, fold_positions, ring_slots, upload
from .recurrences import Recurrence


if TYPE_CHECKING:
    from .cache import ReplayCache


class CropError(ValueError, RuntimeError):
    """A `crop` that cannot be done. Nothing was changed. (Upstream's layers raise either of the two bases.)"""


class InputBuffer:
    """
    The inputs of the tokens since the checkpoint, for one layer: tensors (b, ..., slots, ...) by name, the slots in
    dimension 2. Which there are is the recurrence's to say ([`Recurrence.inputs`]).

    The slots are a ring: what a row holds begins at a slot of its own (`Positions.first`) and goes on from slot 0
    behind the last one. So a fold of old tokens moves a number, and no slot is copied.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.names, self._tensors = tuple(tensors), tuple(tensors.values())
        # Of one slot of one row. (Read at every forward.)
        self.slot_bytes = sum(t.shape[1] * math.prod(t.shape[3:]) * t.element_size() for t in self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self.names.index(name)]

    @property
    def capacity(self) -> int:
        return self._tensors[0].shape[2]

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._tensors

    def named(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self._tensors))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> InputBuffer:
        return InputBuffer({name: function(tensor) for name, tensor in self.named().items()})

    def grown(self, capacity: int, first: Rows) -> InputBuffer:
        """A copy with more slots, in which every row begins at slot 0; `first` is where it begins in this one."""

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros((*tensor.shape[:2], capacity, *tensor.shape[3:]))
            larger[:, :, : tensor.shape[2]] = tensor
            return larger

        return InputBuffer(dict(zip(self.names, map(grow, self.in_order(first, self.capacity)))))

    def in_order(self, first: Rows, count: int) -> tuple[torch.Tensor, ...]:
        """
        The tensors with the `count` slots of each row from slot `first` on as slots 0, 1, ... (others may follow): what
        the reference ops read. Views, unless rows begin at different slots or these run over the end of the ring.
        """
        if first.same == 0:
            return self._tensors
        count = max(count, 1)  # the ops find a slot to gather from, should all rows be empty
        if first.same is not None:
            begin = first.same % self.capacity
            if begin + count <= self.capacity:
                return tuple(tensor[:, :, begin : begin + count] for tensor in self._tensors)
        slots = first.slots_from(count, self.capacity, self.device)
        if slots.dim() == 1:
            return tuple(tensor.index_select(2, slots) for tensor in self._tensors)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        return tuple(tensor[row, :, slots].transpose(1, 2) for tensor in self._tensors)

    def write(self, new: dict[str, torch.Tensor], segment: Segment) -> None:
        """
        Appends the segment's tokens, (b, t, ...) without the dimension of slots, to the tensors of these names: real
        ones only, at each row's write position.
        """
        if segment.order is None and segment.first.same is not None and segment.start.same is not None:
            begin = (segment.first.same + segment.start.same) % self.capacity
            end = begin + segment.num_tokens
            if end <= self.capacity:
                for name, values in new.items():
                    self[name][:, :, begin:end] = values.transpose(1, 2)
                return
        row, token, slot = segment.write_index(self.capacity, self.device)
        for name, values in new.items():
            buffer = self[name]
            buffer[row, :, slot] = values[row, token].to(buffer.dtype)


class LayerWindow:
    """[`recurrences.Window`] of a [`ReplayLayer`]."""

    def __init__(self, layer: ReplayLayer, segment: Segment):
        self._layer, self._segment = layer, segment
        self.checkpoint, self.num_tokens = layer.checkpoint_state(), segment.num_tokens
        self._first, start, end = segment.behind_fold
        self._end = end
        device = layer.checkpoint.device
        self._apart = segment.order is not None or start.same is None
        if self._apart:
            self.start, self.end = start.tensor(device), end.tensor(device)
        else:
            self.start, self.end = start.same, end.same
        self.flushes = segment.fold_last is not None and segment.fold_last.same is not None

    def inputs(self) -> tuple[torch.Tensor, ...]:
        inputs = self._layer.inputs.in_order(self._first, self._end.max)
        if self._apart:  # counts on the device are not read: the ops would go through all slots
            inputs = tuple(tensor[:, :, : max(self._end.max, 1)] for tensor in inputs)
        return inputs

    def append(self, **new: torch.Tensor) -> None:
        self._layer.inputs.write(new, self._segment)


class OwnedLayer:
    """
    A layer that knows the cache it is part of. Weakly: memory goes with the last reference to a cache, and does not
    wait for the garbage collector. Copies are given their cache by the copy of the cache.
    """

    _cache: weakref.ref[ReplayCache] | None = None

    @property
    def cache(self) -> ReplayCache | None:
        return None if self._cache is None else self._cache()

    @cache.setter
    def cache(self, cache: ReplayCache | None) -> None:
        self._cache = None if cache is None else weakref.ref(cache)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}


class ReplayLayer(OwnedLayer, LinearAttentionLayer):
    """
    The cache of one recurrent layer, of whichever [`Recurrence`]: `checkpoint` (batch, *state_shape), with a checkpoint
    of 8 bits its `scale` (batch, ..., 1 where numbers share one), `inputs` (an [`InputBuffer`]) and `conv_inputs`
    (batch, ring, channels), the newest raw inputs of the convolution in a ring indexed by the token's number, so that
    neither a step nor a rollback moves them. All are allocated at the first forward. `constants` are what a fold needs
    of the mixer, for when somebody reads the state.

    Readers that know nothing of replay see whole states: `recurrent_states`, `conv_states` materialise. Writers that
    know nothing of it (an upstream mixer) are refused.
    """

    is_compileable = False  # it allocates as it goes, and reads positions on the host
    is_croppable = True

    def __init__(self, recurrence: Recurrence, number_of_states: int = 1, **kwargs):
        if number_of_states != 1:
            raise ValueError(f"A replay layer holds one recurrent state; this layer has {number_of_states}.")
        self.recurrence = recurrence
        # Not `super().__init__`: what it sets to plain attributes are properties here, views of the replayed state.
        self.number_of_states = 1
        self.cache = None  # set by the cache that owns the layer, as is
        self.number = 0  # of the layer among the recurrent ones
        self.conv_kernel_size: dict[int, int | None] = {0: None}
        self.release()

    def release(self) -> None:
        """Gives the tensors back; the next forward allocates again."""
        self.checkpoint: torch.Tensor | None = None
        self.checkpoint_bytes = 0  # of one row, its scales included
        self.scale: torch.Tensor | None = None
        self.inputs: InputBuffer | None = None
        self.conv_inputs: torch.Tensor | None = None
        self.constants: tuple[torch.Tensor, ...] = ()
        self.device = self.dtype = None

    # torch does not pickle float8: it goes as the bytes that it is.

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.checkpoint is not None:
            state["checkpoint"] = quantize.raw(self.checkpoint), self.checkpoint.dtype
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.checkpoint is not None:
            values, dtype = self.checkpoint
            self.checkpoint = values.view(dtype)

    # What the mixer calls for every segment of a forward: `decode`, where the Triton kernels do all of it; else
    # `convolve`, and then `step` (kernels) or `replay` (PyTorch), or, for a scan, `state_before_scan` and `flush_to`.
    # `operands` and `options` are the recurrence's own.

    def update_constants(self, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """
        The constants of the recurrence, for this forward and for folds behind it. They are computed where a sequence
        begins or a prompt goes on, and read from then on: a step has some launches less.
        """
        begins = self.cache.is_fresh or self.cache.forward_in_progress.segments[0].scan
        if not begins and self.constants and not torch.is_grad_enabled():
            return self.constants
        constants = compute()
        self.constants = tuple(constant.detach() for constant in constants)
        return constants

    def _kernel_positions(self, segment: Segment, device: torch.device) -> torch.Tensor:
        """(5, b) int32 on `device`: where this layer's rows stand before the segment."""
        return segment.kernel_positions(device)

    def uses_kernels(self, activations: torch.Tensor) -> bool:
        """Whether the Triton kernels serve `activations` on their device, and what the layer already holds."""
        held = activations if self.inputs is None else self.inputs.tensors()[0]
        return self._kernels_serve(activations.device, activations.dtype, held.dtype)

    def _kernels_serve(self, device: torch.device, *dtypes: torch.dtype) -> bool:
        config = self.cache.replay_config
        return backend.resolve(config.backend, device, (*dtypes, config.checkpoint_dtype)) == "triton"

    def _storage(self) -> dict[str, Any]:
        """What kernels are told of how the checkpoint is stored: see [`Recurrence`]."""
        storage, seed = {} if self.scale is None else {"scale": self.scale}, self._seed
        return storage if seed is None else storage | {"seed": seed}

    @property
    def _seed(self) -> int | None:
        """Of stochastic rounding; None: to the nearest."""
        config = self.cache.replay_config
        return quantize.layer_seed(config.seed, self.number) if config.rounding == "stochastic" else None

    def decode(
        self,
        segment: Segment,
        raw: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *operands: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """
        All that a segment without a scan needs, as one call of kernels: `raw` (b, t, channels) in front of the
        convolution with `weight` (channels, K) -> (b, t, ...). A row's real tokens come first; anything may stand
        behind them. See [`Recurrence.decode_triton`].
        """
        self._reserve_conv(raw, weight.shape[1])
        self._reserve_state(raw)
        positions = self._kernel_positions(segment, raw.device)
        raw = raw.to(self.conv_inputs.dtype)  # that of the first forward; autocast may give another one later
        convolution = raw, self.conv_inputs, weight, bias
        return self.recurrence.decode_triton(
            positions,
            convolution,
            self.inputs.tensors(),
            self.constants,
            self.checkpoint,
            *operands,
            **options,
            **self._storage(),
        )

    def convolve_triton(
        self, segment: Segment, raw: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """[`convolve`] of a segment without a scan, by the kernel."""
        self._reserve_conv(raw, weight.shape[1])
        positions = self._kernel_positions(segment, raw.device)
        ring = self.conv_inputs  # of the dtype of the first forward; see `decode`
        return causal_conv.causal_conv_triton(positions, raw.to(ring.dtype), ring, weight, bias, activation)

    def step(self, segment: Segment, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """[`decode`] behind `convolve`. See [`Recurrence.step_triton`]."""
        self._reserve_state(operands[0])
        positions = self._kernel_positions(segment, operands[0].device)
        return self.recurrence.step_triton(
            positions,
            self.inputs.tensors(),
            self.constants,
            self.checkpoint,
            *operands,
            **options,
            **self._storage(),
        )

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

    def replay(self, segment: Segment, *operands: torch.Tensor) -> torch.Tensor:
        """[`step`] as PyTorch ops: folds what must go first, appends, reads out, flushes. See [`Recurrence.replay`]."""
        self._reserve_state(operands[0])
        if segment.fold_first is not None:
            state = self._fold(segment.first, segment.fold_first)
            self._write_checkpoint(state, segment, segment.fold_first)
        y, state = self.recurrence.replay(LayerWindow(self, segment), self.constants, *operands)
        if segment.fold_last is not None:  # this segment is the one that fills the buffer
            self.flush_to(self._fold(segment.first, segment.fold_last) if state is None else state, segment)
        return y

    def flush_to(self, state: torch.Tensor, segment: Segment) -> None:
        """Writes the state after the segment."""
        self._write_checkpoint(state, segment, segment.fold_last)

    def state_before_scan(self, activations: torch.Tensor, segment: Segment) -> torch.Tensor | None:
        """The whole state that a scan of `activations` (b, t, ...) starts from; None when no row has seen a token."""
        self._reserve_state(activations)
        if not segment.seen:
            return None
        if self.uses_kernels(activations):
            return self._fold_triton(self._kernel_positions(segment, activations.device))
        return self._fold(segment.first, segment.start)

    # The state.

    def whole_state(self) -> torch.Tensor | None:
        """
        The state after all tokens, pending ones included, as upstream lays it out (of Mamba-2 (b, h, p, n)), float32.
        None before the first forward.
        """
        if self.checkpoint is None:
            return None
        first, held = Rows(self.cache.positions.first), Rows(self.cache.positions.held)
        if self.uses_kernels(self.inputs.tensors()[0]):
            return self.recurrence.as_upstream(self._fold_triton(fold_positions(first, held, self.checkpoint.device)))
        return self.recurrence.as_upstream(self._fold(first, held).clone())

    def newest_conv_inputs(self) -> torch.Tensor | None:
        """The newest `kernel` raw inputs as upstream lays them out: (b, conv_dim, kernel), zeros before the start."""
        if self.conv_inputs is None:
            return None
        seen = Rows(self.cache.positions.seen)
        slots, exists = ring_slots(seen, self.conv_kernel_size[0], self.conv_inputs.shape[1], self.conv_inputs.device)
        return self._ring_read(slots, exists).transpose(1, 2)

    def _fold(self, first: Rows, count: Rows) -> torch.Tensor:
        """The state after the `count` oldest tokens of the buffer, which begin at slot `first`."""
        inputs = self.inputs.in_order(first, count.max)
        if count.same is None:
            inputs = tuple(tensor[:, :, : max(count.max, 1)] for tensor in inputs)
        return self.recurrence.fold(inputs, self.constants, self.checkpoint_state(), count.on(self.checkpoint.device))

    def _fold_triton(self, positions: torch.Tensor) -> torch.Tensor:
        return self.recurrence.fold_triton(
            positions, self.inputs.tensors(), self.constants, self.checkpoint, **self._storage()
        )

    def checkpoint_state(self) -> torch.Tensor:
        """The state in front of the buffer, (b, *state_shape): the checkpoint with its scale, if it has one."""
        return quantize.read(self.checkpoint, self.scale)

    def _write_checkpoint(self, state: torch.Tensor, segment: Segment, count: Rows) -> None:
        """
        The rows for which `count` is not zero take their new `state`, behind as many held tokens of the segment (of a
        scan: behind all its tokens). (Kernels write the checkpoint themselves.)
        """
        rows = None
        if count.same is None:
            rows = upload(count.values.nonzero().squeeze(1), self.checkpoint.device)
            state = state.index_select(0, rows)
        tokens = None
        if self._seed is not None:
            seen = segment.seen.values + (
                segment.counts.values if segment.scan else count.values - segment.start.values
            )
            tokens = Rows(seen).on(self.checkpoint.device)
            tokens = tokens[rows] if isinstance(tokens, torch.Tensor) and rows is not None else tokens
        for owned, new in zip((self.checkpoint, self.scale), self._rounded(state, tokens)):
            if new is None:
                continue
            if rows is None:
                owned.copy_(new)
            else:
                quantize.raw(owned).index_copy_(0, rows, quantize.raw(new))

    def _rounded(
        self, state: torch.Tensor, tokens: int | torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The state of some rows behind `tokens` tokens as the checkpoint stores it, and its scales."""
        bits = None
        if self._seed is not None:
            bits = quantize.random_bits(self._seed, tokens, state.shape[1:], state.device)
        return quantize.store(state, self.checkpoint.dtype, self.recurrence.scale_dim, bits)

    # Memory.

    def _reserve_state(self, activations: torch.Tensor) -> None:
        """Allocates for the batch, device and dtype of `activations`."""
        forward = self.cache.forward_in_progress
        forward.touched = True
        if self.checkpoint is not None and self.inputs.capacity >= forward.capacity:
            return
        with torch.inference_mode(False):  # plain tensors, so that the cache can go on outside of inference mode
            if self.checkpoint is not None:
                self.inputs = self.inputs.grown(forward.capacity, Rows(self.cache.positions.first))
                return
            self._allocate_state(activations.shape[0], forward.capacity, activations.dtype, activations.device)

    def _allocate_state(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is that of the activations. (Kernels take the tensors as they are: contiguous, as rows kept are.)"""
        self.device, self.dtype = device, dtype
        shape, checkpoint_dtype = (batch, *self.recurrence.state_shape), self.cache.replay_config.checkpoint_dtype
        self.checkpoint = backend.new_checkpoint(shape, checkpoint_dtype, device)
        self.checkpoint_bytes = math.prod(shape[1:]) * self.checkpoint.element_size()
        if quantize.has_scale(checkpoint_dtype):
            self.scale = quantize.new_scale(shape, self.recurrence.scale_dim, device)
            self.checkpoint_bytes += math.prod(self.scale.shape[1:]) * self.scale.element_size()
        self.inputs = InputBuffer(self.recurrence.new_inputs(batch, slots, dtype, device))

    def _reserve_conv(self, inputs: torch.Tensor, kernel: int) -> None:
        """A ring for the reach of the convolution and what the forward may need to give back."""
        forward = self.cache.forward_in_progress
        forward.touched = True
        ring = kernel + forward.ring
        if self.conv_inputs is None or self.conv_inputs.shape[1] < ring:
            self._allocate_conv(inputs, kernel, ring)

    @torch.inference_mode(False)
    def _allocate_conv(self, inputs: torch.Tensor, kernel: int, ring: int) -> None:
        if self.conv_inputs is None:
            self.conv_kernel_size = {0: kernel}
            self.conv_inputs = inputs.new_zeros((inputs.shape[0], ring, inputs.shape[2]))
        else:
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
        token = torch.arange(segment.num_tokens, device="cpu")
        keep = (token < counts.values[:, None]) & (token >= counts.values[:, None] - ring)
        row, token = keep.nonzero(as_tuple=True)
        slot = (seen.values[row] + token) % ring
        row, token, slot = (upload(index, inputs.device) for index in (row, token, slot))
        self.conv_inputs[row, slot] = inputs[row, token].to(self.conv_inputs.dtype)

    @torch.inference_mode(False)
    def select_rows(self, index: torch.Tensor) -> None:
        """Keeps the rows at `index` (repeats allowed)."""
        if self.checkpoint is None:
            return
        pick = lambda tensor: quantize.select(tensor, index.to(tensor.device))  # noqa: E731
        self.checkpoint, self.conv_inputs = pick(self.checkpoint), pick(self.conv_inputs)
        self.scale = None if self.scale is None else pick(self.scale)
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
            "A mixer that knows nothing of replay tried to write to a ReplayCache. Call `hf_replayssm.enable(model)` "
            "on the model that uses this cache, or use another cache (`cache_implementation='dynamic'`)."
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
    """A layer with both a recurrent state and attention keys and values (Zamba, Zamba2, Falcon-H1)."""

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
