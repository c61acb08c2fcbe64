"""
Mamba-1: the buffer holds x (b, g, s, p), B (b, g, s, n) and the raw dt (b, g, s, p), all in the dtype of the
activations. See `ops/mamba1.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops import mamba1
from .base import Input, Recurrence, Tensors, Window


@dataclass(frozen=True)
class Mamba1(Recurrence):
    """
    g groups of p channels that share B and C, with a state of n for each channel. Constants: A (g, n, p), negative, and
    the bias of dt (g, p). Upstream lays states out as (b, g p, n); Zamba, whose heads are the groups, as (b, g, p, n).
    """

    groups: int
    channels: int  # of a group
    state_size: int
    conv_kernel: int
    state_by_group: bool = False  # as Zamba's

    name = "mamba1"
    scale_dim = -2  # the columns of a channel

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.groups, self.state_size, self.channels

    @property
    def conv_channels(self) -> int:
        return self.groups * self.channels

    @property
    def inputs(self) -> dict[str, Input]:
        of_channels = Input((self.groups, self.channels))
        return {"x": of_channels, "B": Input((self.groups, self.state_size)), "dt": of_channels}

    @property
    def constants(self) -> dict[str, tuple[int, ...]]:
        return {"A": (self.groups, self.state_size, self.channels), "dt_bias": (self.groups, self.channels)}

    def default_buffer_len(self, checkpoint_dtype: torch.dtype) -> int:
        return mamba1.BUFFER_LEN

    def as_upstream(self, state: torch.Tensor) -> torch.Tensor:
        state = state.transpose(-1, -2)
        return state if self.state_by_group else state.flatten(1, 2)

    def fold(
        self, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, count: int | torch.Tensor
    ) -> torch.Tensor:
        A, dt_bias = constants
        return mamba1.fold(*inputs, A, checkpoint, count, dt_bias=dt_bias)

    def replay(
        self,
        window: Window,
        constants: Tensors,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, raw dt and the gate z (b, t, g, p), B and C (b, t, g, n), D (g, p) -> (b, t, g, p)."""
        A, dt_bias = constants
        window.append(x=x, B=B, dt=dt)
        inputs = window.inputs()
        if window.flushes and window.num_tokens == 1:
            state = self.fold(inputs, constants, window.checkpoint, window.end)
            return mamba1.read_out(C, x, D, state, z=z), state
        places = window.checkpoint, window.start, window.end
        return mamba1.replay(C, *inputs, A, D, *places, dt_bias=dt_bias, z=z), None

    def fold_triton(
        self, positions: torch.Tensor, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, **storage: Any
    ) -> torch.Tensor:
        A, dt_bias = constants
        return mamba1.fold_triton(positions, inputs, A, checkpoint, dt_bias=dt_bias, **storage)

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
        z: torch.Tensor,
        **storage: Any,
    ) -> torch.Tensor:
        """As [`replay`]. (x, B and dt in another dtype than the buffer's, as under autocast, are cast.)"""
        A, dt_bias = constants
        x, B, dt = (tensor.to(buffer.dtype) for tensor, buffer in zip((x, B, dt), inputs))
        return mamba1.step_triton(positions, x, B, C, dt, inputs, A, D, checkpoint, dt_bias=dt_bias, z=z, **storage)
