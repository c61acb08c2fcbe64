"""
Gated DeltaNet and KDA: the buffer holds k (b, m, s, c) raw, as it leaves the convolution, and, in the dtype of sums, u
(b, h, s, d), which depends on the state, and the log decay g (b, h, s), of KDA (b, h, s, c). See `ops/gated_delta.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops import gated_delta
from .base import Input, Recurrence, Tensors, Window


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """
    h value heads of d channels, m key heads of c channels, each of which serves h / m value heads. `decay_per_channel`:
    a log decay for each channel of a key (KDA), not one for each head. There are no constants.
    """

    key_heads: int
    heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_kernel: int
    decay_per_channel: bool = False

    name = "gated_delta"
    scale_dim = -2  # the keys' channels of a value channel (of KDA a tenth less error than the other way around)

    def default_buffer_len(self, checkpoint_dtype: torch.dtype) -> int:
        """
        KDA's slots are large: for each channel k in 2 bytes, u and the decay in 4. A step reads half of L slots and
        writes the state once in L, so least is moved at L = sqrt(2 s K V / (2 K + 4 V + 4 K)), for s bytes a number of
        the state: 10, 7 in 16 bits and 5 in 8 (K = V = 128).
        """
        if not self.decay_per_channel:
            return super().default_buffer_len(checkpoint_dtype)
        return {4: 10, 2: 7, 1: 5}[min(checkpoint_dtype.itemsize, 4)]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.key_dim, self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def inputs(self) -> dict[str, Input]:
        decay = (self.heads, self.key_dim) if self.decay_per_channel else (self.heads,)
        return {
            "k": Input((self.key_heads, self.key_dim)),
            "u": Input((self.heads, self.value_dim), in_sums_dtype=True),
            "g": Input(decay, in_sums_dtype=True),
        }

    @property
    def constants(self) -> dict[str, tuple[int, ...]]:
        return {}

    def fold(
        self, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, count: int | torch.Tensor
    ) -> torch.Tensor:
        return gated_delta.fold(*inputs, checkpoint, count)

    def replay(
        self,
        window: Window,
        constants: Tensors,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q and k (b, t, m, c), v (b, t, h, d), final g (b, t, h[, c]) and beta (b, t, h) -> (b, t, h, d)."""
        window.append(k=k, g=g)
        y, u = gated_delta.replay(q, v, beta, *window.inputs(), window.checkpoint, window.start, window.end)
        window.append(u=u)
        return y, None

    def fold_triton(
        self, positions: torch.Tensor, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, **storage: Any
    ) -> torch.Tensor:
        return gated_delta.fold_triton(positions, inputs, checkpoint, **storage)

    def step_triton(
        self,
        positions: torch.Tensor,
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **storage: Any,
    ) -> torch.Tensor:
        """As [`replay`]. (q, k and v in another dtype than the buffer's k, as under autocast, are cast.)"""
        q, k, v = (tensor.to(inputs[0].dtype) for tensor in (q, k, v))
        return gated_delta.step_triton(positions, q, k, v, g, beta, inputs, checkpoint, **storage)

    def decode_triton(
        self,
        positions: torch.Tensor,
        convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Raw qkv (b, t, conv_channels), final g and beta -> (b, t, h, d). `options`: `activation`."""
        qkv, *ring_weight_bias = convolution
        return gated_delta.decode_triton(positions, qkv, g, beta, *ring_weight_bias, inputs, checkpoint, **options)
