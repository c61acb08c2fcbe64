"""Mamba-2: the buffer holds x (b, h, s, p), B (b, g, s, n) and the final dt (b, h, s). See `ops/mamba2.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops import mamba2
from .base import Input, Recurrence, Tensors, Window


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """h heads of head_dim p with a state of n, g groups of heads that share B and C. Constants: A (h,), negative."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int

    name = "mamba2"
    has_time_step_limit = True
    # (scale_dim: the state of one channel of head_dim. With a scale for each column in place of each row, int8 states
    # of the bundled model have two thirds of the error, but a flush would have to go over whole heads at a time.)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_size

    @property
    def conv_channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def inputs(self) -> dict[str, Input]:
        return {
            "x": Input((self.heads, self.head_dim)),
            "B": Input((self.groups, self.state_size)),
            "dt": Input((self.heads,), in_sums_dtype=True),
        }

    @property
    def constants(self) -> dict[str, tuple[int, ...]]:
        return {"A": (self.heads,)}

    def fold(
        self, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, count: int | torch.Tensor
    ) -> torch.Tensor:
        return mamba2.fold(*inputs, *constants, checkpoint, count)

    def replay(
        self,
        window: Window,
        constants: Tensors,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (b, t, h, p), B and C (b, t, g, n), final dt (b, t, h), D (h,) -> (b, t, h, p)."""
        window.append(x=x, B=B, dt=dt)
        inputs = window.inputs()
        if window.flushes and window.num_tokens == 1:
            # The state of every row is needed anyway, and gives the output as well.
            state = self.fold(inputs, constants, window.checkpoint, window.end)
            return mamba2.read_out(C, x, D, state), state
        return mamba2.replay(C, *inputs, *constants, D, window.checkpoint, window.start, window.end), None

    def fold_triton(
        self, positions: torch.Tensor, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, **storage: Any
    ) -> torch.Tensor:
        return mamba2.fold_triton(positions, inputs, *constants, checkpoint, **storage)

    def step_triton(
        self,
        positions: torch.Tensor,
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        D: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """
        As [`replay`], with raw dt and its rule in `options`. (x, B and C in another dtype than the buffer's, as under
        autocast, are cast.)
        """
        x, B, C = (tensor.to(inputs[0].dtype) for tensor in (x, B, C))
        return mamba2.step_triton(positions, x, B, C, dt, inputs, *constants, D, checkpoint, **options)

    def decode_triton(
        self,
        positions: torch.Tensor,
        convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        dt: torch.Tensor,
        D: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Raw xBC (b, t, conv_channels) and dt (b, t, h) -> (b, t, h, p). `options`: `activation`, the rule for dt."""
        xBC, *ring_weight_bias = convolution
        return mamba2.decode_triton(positions, xBC, dt, *ring_weight_bias, inputs, *constants, D, checkpoint, **options)
