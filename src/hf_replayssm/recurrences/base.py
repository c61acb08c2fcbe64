"""
A recurrence, as a layer of the cache sees it.

The layer holds tensors and knows where in them the rows stand. Of a recurrence it asks what to allocate, how to fold
buffered inputs into the state, and how the new tokens of a segment are appended and read out. So one layer class serves
every recurrence, in the plain variant and in the static one.

Letters in the shapes: b batch, s buffer slots, t new tokens; the others are each recurrence's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..config import ReplayConfig


Tensors = tuple[torch.Tensor, ...]


class Input(NamedTuple):
    """One tensor of the input buffer, (b, shape[0], s, *shape[1:])."""

    shape: tuple[int, ...]
    in_sums_dtype: bool = False  # float32 (or float64, as the model); otherwise in the dtype of the activations


class Window(Protocol):
    """What a layer shows to [`Recurrence.replay`]: its buffer, and where the tokens of one segment go in it."""

    checkpoint: torch.Tensor  # the state in front of place 0, with its scale applied if it has one
    num_tokens: int
    # Places in `inputs()`, the same for all rows (an integer) or each row's own (b,): of the first new token, and one
    # past the newest. What lies in or behind `end` is never to be used, NaN included.
    start: int | torch.Tensor
    end: int | torch.Tensor
    flushes: bool  # whether every row is known to fold everything behind this segment: the state is needed anyway

    def inputs(self) -> Tensors:
        """The buffer's tensors, in which a row's tokens are in places 0, 1, ...; views where that is possible."""

    def append(self, **new: torch.Tensor) -> None:
        """Writes new tokens, (b, t, *shape), to the tensors of these names in the buffer, at the write position."""


class Recurrence(ABC):
    """
    A recurrence with its sizes. Subclasses are frozen dataclasses of the integers that a config gives, the same for all
    layers of a model, and hold no tensors. (A forward takes sizes from the shapes of tensors: integers that differ from
    one model to the next a compiler takes for variable.)

    `constants` are what a fold needs besides the buffer and is no token's: tensors made of the mixer's parameters.
    """

    name: ClassVar[str]
    has_time_step_limit: ClassVar[bool] = False  # on dt, which `ReplayConfig.time_step_limit` overrides
    scale_dim: ClassVar[int] = -1  # of the state: its numbers share a scale where they are stored in 8 bits
    conv_kernel: int

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Of one row, as the ops take the state."""

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, Input]:
        """The tensors of the input buffer by name, in the order in which ops take them."""

    @property
    @abstractmethod
    def constants(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the constants by name, in the order in which ops take them. All are in the dtype of sums."""

    def new_inputs(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of an empty input buffer; `dtype` is that of the activations."""
        sums = sums_dtype(dtype)
        return {
            name: torch.zeros(
                (batch, one.shape[0], slots, *one.shape[1:]),
                dtype=sums if one.in_sums_dtype else dtype,
                device=device,
            )
            for name, one in self.inputs.items()
        }

    def default_buffer_len(self, checkpoint_dtype: torch.dtype) -> int:
        """Tokens between two flushes, where nobody asks for another number."""
        return 16

    def settings(self, config: ReplayConfig) -> ReplayConfig:
        """The settings with all that was left open filled in."""
        if config.buffer_len is not None:
            return config
        return config.replace(buffer_len=self.default_buffer_len(config.checkpoint_dtype))

    def as_upstream(self, state: torch.Tensor) -> torch.Tensor:
        """The state (b, *state_shape) as upstream lays it out."""
        return state

    # As PyTorch ops.

    @abstractmethod
    def fold(
        self, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, count: int | torch.Tensor
    ) -> torch.Tensor:
        """
        The state (b, *state_shape) after the first `count` places of `inputs` (an integer, or (b,)), in the dtype of
        sums. What lies behind them is never used, NaN included.
        """

    @abstractmethod
    def replay(
        self, window: Window, constants: Tensors, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Appends the new tokens to all tensors of the buffer, and returns their outputs (b, t, ...) and, if it is at hand
        where `window.flushes`, the state behind them (else None: the layer folds). `operands` are the mixer's, a row's
        real tokens first; the first of them is in the dtype of the activations.
        """

    # As Triton kernels: one call appends, gives outputs and flushes. They take the layer's tensors as they lie, and
    # `positions` (5, b) int32, see `Segment.kernel_positions`, says where the rows stand. `storage` is how the
    # checkpoint is stored, where that is not as it is: `scale`, its scales, and `seed`, of stochastic rounding.

    @abstractmethod
    def fold_triton(
        self, positions: torch.Tensor, inputs: Tensors, constants: Tensors, checkpoint: torch.Tensor, **storage: Any
    ) -> torch.Tensor:
        """[`fold`] of as many tokens as `positions` say."""

    @abstractmethod
    def step_triton(
        self,
        positions: torch.Tensor,
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        *operands: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Outputs (b, t, ...) of new tokens behind the convolution. `options` may hold `storage`."""

    def decode_triton(
        self,
        positions: torch.Tensor,
        convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
        inputs: Tensors,
        constants: Tensors,
        checkpoint: torch.Tensor,
        *operands: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """
        The convolution and [`step_triton`] in one call, where a recurrence has it. `convolution` are its raw inputs
        (b, t, channels), the ring of earlier ones, the weight and the bias.
        """
        raise NotImplementedError(f"{self.name} has no kernel with the convolution in it.")


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of every sum over activations of this dtype: float32, or float64 when they already are."""
    return torch.promote_types(dtype, torch.float32)
