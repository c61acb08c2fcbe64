"""
The layers of a replay cache: for every recurrent layer of the model the checkpoint, the inputs since, and the newest
raw inputs of the convolution. Attention layers are transformers' own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from .ops import backend, causal_conv, mamba2
from .positions import Rows, Segment, fold_positions, ring_slots, upload


if TYPE_CHECKING:
    from .cache import ReplayCache


class CropError(ValueError, RuntimeError):
    """A `crop` that cannot be done. Nothing was changed. (Upstream's layers raise either of the two bases.)"""


class InputBuffer:
    """
    The inputs of the tokens since the checkpoint, for one layer: x (b, h, slots, p) and B (b, g, slots, n) in the
    activation dtype, dt (b, h, slots) in float32.

    The slots are a ring: what a row holds begins at a slot of its own (`Positions.first`) and goes on from slot 0
    behind the last one. So a fold of old tokens moves a number, and no slot is copied.
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
        return sum(t.numel() * t.element_size() for t in self.tensors()) // (self.dt.shape[0] * self.capacity)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.B, self.dt

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> InputBuffer:
        return InputBuffer(*(function(tensor) for tensor in self.tensors()))

    def grown(self, capacity: int, first: Rows) -> InputBuffer:
        """A copy with more slots, in which every row begins at slot 0; `first` is where it begins in this one."""

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros((*tensor.shape[:2], capacity, *tensor.shape[3:]))
            larger[:, :, : tensor.shape[2]] = tensor
            return larger

        return InputBuffer(*self.in_order(first, self.capacity)).map(grow)

    def in_order(self, first: Rows, count: int) -> tuple[torch.Tensor, ...]:
        """
        x, B and dt with the `count` slots of each row from slot `first` on as slots 0, 1, ... (others may follow): what
        the reference ops read. Views, unless rows begin at different slots or these run over the end of the ring.
        """
        if first.same == 0:
            return self.tensors()
        count = max(count, 1)  # the ops find a slot to gather from, should all rows be empty
        if first.same is not None:
            begin = first.same % self.capacity
            if begin + count <= self.capacity:
                return tuple(tensor[:, :, begin : begin + count] for tensor in self.tensors())
        slots = first.slots_from(count, self.capacity, self.dt.device)
        if slots.dim() == 1:
            return tuple(tensor.index_select(2, slots) for tensor in self.tensors())
        row = torch.arange(len(slots), device=slots.device)[:, None]
        return tuple(tensor[row, :, slots].transpose(1, 2) for tensor in self.tensors())

    def write(self, new: tuple[torch.Tensor, ...], segment: Segment) -> None:
        """Appends x (b, t, h, p), B (b, t, g, n), dt (b, t, h): real tokens only, at each row's write position."""
        if segment.order is None and segment.first.same is not None and segment.start.same is not None:
            begin = (segment.first.same + segment.start.same) % self.capacity
            end = begin + segment.num_tokens
            if end <= self.capacity:
                for buffer, values in zip(self.tensors(), new):
                    buffer[:, :, begin:end] = values.transpose(1, 2)
                return
        row, token, slot = segment.write_index(self.capacity, self.dt.device)
        for buffer, values in zip(self.tensors(), new):
            buffer[row, :, slot] = values[row, token].to(buffer.dtype)


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
        self.cache = None  # set by the cache that owns the layer
        self.conv_kernel_size: dict[int, int | None] = {0: None}
        self.release()

    def release(self) -> None:
        """Gives the tensors back; the next forward allocates again."""
        self.checkpoint: torch.Tensor | None = None
        self.inputs: InputBuffer | None = None
        self.conv_inputs: torch.Tensor | None = None
        self.A: torch.Tensor | None = None  # (heads,) of the mixer, to fold when somebody reads the state
        self.device = self.dtype = None

    # What the mixer calls for every segment of a forward: `decode`, where the Triton kernels do all of it; else
    # `convolve`, and then `step` (kernels) or `replay` (PyTorch), or, for a scan, `state_before_scan` and `flush_to`.

    def decay_rates(self, A_log: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A (h,) in `dtype`, the dtype of sums, from the mixer's `A_log` (h,)."""
        return -A_log.to(dtype).exp()

    def _kernel_positions(self, segment: Segment, device: torch.device) -> torch.Tensor:
        """(5, b) int32 on `device`: where this layer's rows stand before the segment."""
        return segment.kernel_positions(device)

    def uses_kernels(self, activations: torch.Tensor) -> bool:
        """Whether the Triton kernels serve `activations` on their device, and what the layer already holds."""
        config = self.cache.replay_config
        held = activations if self.inputs is None else self.inputs.x
        dtypes = activations.dtype, held.dtype, config.checkpoint_dtype
        return backend.resolve(config.backend, activations.device, dtypes) == "triton"

    def decode(
        self,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        segment: Segment,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        heads: tuple[int, int],
        groups: tuple[int, int],
        **dt_rule: torch.Tensor | float,
    ) -> torch.Tensor:
        """
        All that a segment without a scan needs, as one call of kernels: raw xBC (b, t, conv_dim) and dt (b, t, h; real
        tokens first) -> (b, t, h, p); anything may stand behind a row's real tokens. `heads` is (h, p), `groups` is
        (g, n).
        """
        self._reserve_conv(xBC, weight.shape[1])
        self._reserve_state(xBC, heads, groups, A)
        positions, buffers = self._kernel_positions(segment, xBC.device), self.inputs.tensors()
        xBC = xBC.to(self.conv_inputs.dtype)  # that of the first forward; autocast may give another one later
        conv = self.conv_inputs, weight, bias
        return mamba2.decode_triton(
            positions, xBC, dt, *conv, buffers, A, D, self.checkpoint, activation=activation, **dt_rule
        )

    def step(
        self,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        segment: Segment,
        **dt_rule: torch.Tensor | float,
    ) -> torch.Tensor:
        """[`decode`] behind `convolve`: x (b, t, h, p), B and C (b, t, g, n), raw dt -> (b, t, h, p)."""
        self._reserve_state(x, x.shape[2:], B.shape[2:], A)
        positions, buffers = self._kernel_positions(segment, x.device), self.inputs.tensors()
        x, B, C = (tensor.to(self.inputs.x.dtype) for tensor in (x, B, C))  # see `decode`
        return mamba2.step_triton(positions, x, B, C, dt, buffers, A, D, self.checkpoint, **dt_rule)

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

    def replay(
        self,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor,
        segment: Segment,
    ) -> torch.Tensor:
        """[`step`] as PyTorch ops: append, output and flush; dt is final. Returns (b, t, h, p)."""
        self.append(x, B, dt, A, segment)
        first, start, end = segment.behind_fold
        inputs, device = self.inputs.in_order(first, end.max), x.device
        if segment.num_tokens == 1 and segment.fold_last is not None and segment.fold_last.same is not None:
            # All rows flush at this token: its state is needed anyway, and gives the output as well.
            state = mamba2.fold(*inputs, A, self.checkpoint, end.on(device))
            self.flush_to(state, segment)
            return mamba2.read_out(C, x, D, state)
        operands = (C, *inputs, A, D, self.checkpoint)
        if segment.order is None and start.same is not None:
            y = mamba2.replay(*operands, start.same, end.same)
        else:
            # (Counts on the device are not read: the ops would go through all slots.)
            inputs = tuple(tensor[:, :, : max(end.max, 1)] for tensor in inputs)
            operands = (C, *inputs, A, D, self.checkpoint)
            y = mamba2.replay(*operands, start.tensor(device), end.tensor(device))
        self.flush(segment)
        return y

    def append(self, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, segment: Segment) -> None:
        """Folds what the segment says must go first, and buffers its tokens: x (b, t, h, p), B (b, t, g, n), dt."""
        self._reserve_state(x, x.shape[2:], B.shape[2:], A)
        if segment.fold_first is not None:
            self._write_checkpoint(self._fold(segment.first, segment.fold_first), segment.fold_first)
        self.inputs.write((x, B, dt), segment)

    def flush(self, segment: Segment) -> None:
        """Folds everything, if this segment is the one that fills the buffer."""
        if segment.fold_last is not None:
            self._write_checkpoint(self._fold(segment.first, segment.fold_last), segment.fold_last)

    def flush_to(self, state: torch.Tensor, segment: Segment) -> None:
        """The same where the caller has the state after the segment at hand."""
        self._write_checkpoint(state, segment.fold_last)

    def state_before_scan(
        self, x: torch.Tensor, B: torch.Tensor, A: torch.Tensor, segment: Segment
    ) -> torch.Tensor | None:
        """The whole state that a scan starts from (b, h, p, n), float32; None when no row has seen a token."""
        self._reserve_state(x, x.shape[2:], B.shape[2:], A)
        if not segment.seen:
            return None
        if self.uses_kernels(x):
            positions = self._kernel_positions(segment, x.device)
            return mamba2.fold_triton(positions, self.inputs.tensors(), self.A, self.checkpoint)
        return self._fold(segment.first, segment.start)

    # The state.

    def whole_state(self) -> torch.Tensor | None:
        """The state after all tokens, pending ones included: (b, h, p, n), float32. None before the first forward."""
        if self.checkpoint is None:
            return None
        first, held = Rows(self.cache.positions.first), Rows(self.cache.positions.held)
        if self.uses_kernels(self.inputs.x):
            positions = fold_positions(first, held, self.checkpoint.device)
            return mamba2.fold_triton(positions, self.inputs.tensors(), self.A, self.checkpoint)
        return self._fold(first, held).clone()

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
        return mamba2.fold(*inputs, self.A, self.checkpoint, count.on(self.checkpoint.device))

    def _write_checkpoint(self, state: torch.Tensor, count: Rows) -> None:
        """The rows for which `count` is not zero take their new `state`. (Kernels write the checkpoint themselves.)"""
        if count.same is not None:
            self.checkpoint.copy_(state)
        else:
            rows = upload(count.values.nonzero().squeeze(1), self.checkpoint.device)
            self.checkpoint.index_copy_(0, rows, state.index_select(0, rows).to(self.checkpoint.dtype))

    # Memory.

    def _reserve_state(
        self, activations: torch.Tensor, heads: tuple[int, int], groups: tuple[int, int], A: torch.Tensor
    ) -> None:
        """Allocates for the batch, device and dtype of `activations`; `heads` is (h, p), `groups` is (g, n)."""
        forward, config = self.cache.forward_in_progress, self.cache.replay_config
        forward.touched = True
        self.A = A.detach()
        if self.checkpoint is not None and self.inputs.capacity >= forward.capacity:
            return
        with torch.inference_mode(False):  # plain tensors, so that the cache can go on outside of inference mode
            if self.checkpoint is not None:
                self.inputs = self.inputs.grown(forward.capacity, Rows(self.cache.positions.first))
                return
            (h, p), (g, n) = heads, groups
            batch, slots = activations.shape[0], forward.capacity
            self.device, self.dtype = device, dtype = activations.device, activations.dtype
            self.checkpoint = torch.zeros((batch, h, p, n), dtype=config.checkpoint_dtype, device=device)
            # The kernels take these as they are: contiguous, which a selection of rows keeps.
            self.inputs = InputBuffer(
                torch.zeros((batch, h, slots, p), dtype=dtype, device=device),
                torch.zeros((batch, g, slots, n), dtype=dtype, device=device),
                torch.zeros((batch, h, slots), dtype=A.dtype, device=device),
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
