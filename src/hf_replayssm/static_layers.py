"""
The layers of a static replay cache: tensors that never move, written at places that are known on the device only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from .layers import CropError, InputBuffer, OwnedLayer, ReplayLayer
from .ops import quantize
from .recurrences.base import sums_dtype
from .static_positions import StaticForward, StaticSegment


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


class StaticWindow:
    """[`recurrences.Window`] of a [`StaticReplayLayer`], whose tensors are where the segment's are."""

    flushes = False  # nobody knows here

    def __init__(self, layer: StaticReplayLayer, segment: StaticSegment):
        self._layer, self._segment = layer, segment
        self.checkpoint, self.num_tokens = layer.checkpoint_state(), segment.num_tokens
        self.base, self.after = segment.base[layer.phase], segment.after[layer.phase]
        self.start = segment.seen - self.base
        self.end = self.start + segment.counts
        self._inputs: tuple[torch.Tensor, ...] | None = None

    def inputs(self) -> tuple[torch.Tensor, ...]:
        if self._inputs is None:
            self._inputs = self._layer.in_order(self.base)
        return self._inputs

    def append(self, **new: torch.Tensor) -> None:
        tokens, valid = self._segment.new_tokens()
        slots = tokens % self._segment.capacity
        for name, values in new.items():
            write_rows(self._layer.inputs[name], slots, values, valid, dim=2)
        self._inputs = None


class StaticReplayLayer(ReplayLayer):
    """[`ReplayLayer`] at fixed addresses; `phase` says which row of the cache's positions is its own."""

    is_compileable = True
    phase: int

    def release(self) -> None:
        super().release()
        self.kernels = False

    def allocate(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Tensors for `batch` rows; `dtype` is that of the activations."""
        recurrence = self.recurrence
        self.kernels = self._kernels_serve(device, dtype)
        self._allocate_state(batch, self.cache.capacity, dtype, device)
        sums = sums_dtype(dtype)
        self.constants = tuple(torch.zeros(shape, dtype=sums, device=device) for shape in recurrence.constants.values())
        self.conv_kernel_size = {0: recurrence.conv_kernel}
        ring = batch, self.cache.ring(recurrence.conv_kernel), recurrence.conv_channels
        self.conv_inputs = torch.zeros(ring, dtype=dtype, device=device)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"checkpoint": self.checkpoint, **scale, **self.inputs.named(), "conv_inputs": self.conv_inputs}

    def set_static_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.checkpoint, self.conv_inputs = tensors["checkpoint"], tensors["conv_inputs"]
        self.scale = tensors.get("scale")
        self.inputs = InputBuffer({name: tensors[name] for name in self.inputs.names})

    # What the mixer calls.

    def uses_kernels(self, activations: torch.Tensor) -> bool:
        return self.kernels

    def update_constants(self, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        # What reads the state later finds them at an address that no graph reuses.
        forward = self.cache.forward_in_progress
        if forward.fresh or forward.segments[0].scan:
            for constant, value in zip(self.constants, compute()):
                constant.copy_(value.detach())
        return self.constants

    def _kernel_positions(self, segment: StaticSegment, device: torch.device) -> torch.Tensor:
        return segment.to(device).kernel_positions()[self.phase]

    def _reserve_conv(self, inputs: torch.Tensor, kernel: int) -> None:
        self.cache.forward_in_progress.touched = True

    def _reserve_state(self, activations: torch.Tensor) -> None:
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

    def replay(self, segment: StaticSegment, *operands: torch.Tensor) -> torch.Tensor:
        self._reserve_state(operands[0])
        window = StaticWindow(self, segment.to(operands[0].device))
        y, _ = self.recurrence.replay(window, self.constants, *operands)
        # (Whether any row flushes is not known here; the state is computed for all of them.)
        count = window.after - window.base
        state = self.recurrence.fold(window.inputs(), self.constants, window.checkpoint, count)
        due = (count > 0).view(-1, *[1] * (state.dim() - 1))
        for owned, new in zip((self.checkpoint, self.scale), self._rounded(state, window.after)):
            if new is not None:
                owned = quantize.raw(owned)
                owned.copy_(torch.where(due, quantize.raw(new), owned))
        return y

    def in_order(self, base: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The buffer's tensors with the slots of each row from its token number `base` (b,) on as slots 0, 1, ..."""
        capacity = self.inputs.capacity
        slots = (base[:, None] + torch.arange(capacity, device=base.device)) % capacity
        row = torch.arange(len(slots), device=base.device)[:, None]
        return tuple(tensor.transpose(1, 2)[row, slots].transpose(1, 2) for tensor in self.inputs.tensors())

    def state_before_scan(self, activations: torch.Tensor, segment: StaticSegment) -> torch.Tensor | None:
        if self.cache.forward_in_progress.fresh:
            return None
        if self.kernels:
            return self._fold_triton(self._kernel_positions(segment, activations.device))
        segment = segment.to(activations.device)
        return self._whole_state(segment.seen, segment.base[self.phase])

    def flush_to(self, state: torch.Tensor, segment: StaticSegment) -> None:
        after = segment.to(state.device).after[self.phase]
        for owned, new in zip((self.checkpoint, self.scale), self._rounded(state, after)):
            if new is not None:
                owned.copy_(new)

    # The state, for readers.

    def _whole_state(self, seen: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return self.recurrence.fold(self.in_order(base), self.constants, self.checkpoint_state(), seen - base)

    def whole_state(self) -> torch.Tensor | None:
        if self.checkpoint is None:
            return None
        seen, base = (tensor.to(self.device) for tensor in (self.cache.seen, self.cache.base[self.phase]))
        if not self.kernels:
            return self.recurrence.as_upstream(self._whole_state(seen, base).clone())
        held, zeros = seen - base, torch.zeros_like(seen)
        positions = torch.stack([seen, base % self.inputs.capacity, held, zeros, held])
        return self.recurrence.as_upstream(self._fold_triton(positions.to(torch.int32)))

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
    """A layer with both a recurrent state and attention keys and values (Zamba, Zamba2, Falcon-H1)."""

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
