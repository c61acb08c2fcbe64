"""
How a state is stored in fewer bits: the one place where a checkpoint is rounded and read back, for every recurrence.
(The kernels do the same arithmetic themselves, `_rounding.py` of `replayssm_kernels`.)

In 8 bits a row of the state is stored as whole numbers from -127 to 127 (int8), or as float8_e4m3fn up to 448, times
one float32 scale, which takes the row's greatest number to the greatest stored one. Which numbers share a scale is the
recurrence's to say (`Recurrence.scale_dim`).

Stochastic rounding goes to one of both neighbours, to the nearer one more often: what is stored is right on average,
where rounding to the nearest would lose what is less than half a step time and again. Its random bits are a function of
the seed, the layer, the number of tokens in the state and the place in it, so they come out the same whatever else is
in the batch, on every device, in any order. Rows of a batch that have seen as many tokens share them.

Letters in the shapes: b batch; the state's own dimensions follow.
"""

from __future__ import annotations

import math

import torch


# The greatest number that is stored.
GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# Bits of a float32 below the last one of the other type.
BITS_BELOW = {torch.bfloat16: 16, torch.float16: 13, torch.float8_e4m3fn: 20}

LEAST_SCALE = 2.0**-126  # a row below it is stored as zeros: the inverse of its scale would not be finite


def has_scale(dtype: torch.dtype) -> bool:
    """Whether a checkpoint of this dtype has scales beside it."""
    return dtype in GREATEST


def new_scale(shape: tuple[int, ...], dim: int, device: torch.device) -> torch.Tensor:
    """The scales of a state (b, ...) of this shape, all zero: float32, and 1 in the dimension `dim` that shares one."""
    shape = list(shape)
    shape[dim] = 1
    return torch.zeros(shape, dtype=torch.float32, device=device)


def read(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The state that is stored: `values` themselves, or float32 where they have a scale."""
    return values if scale is None else values.float() * scale


def store(
    state: torch.Tensor, dtype: torch.dtype, dim: int, bits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The state (b, ...) as it is stored, and its scales (None for a dtype without): to the nearest, ties to even, or with
    `bits` (`random_bits`) stochastically. A number that is not finite makes its row so.
    """
    if dtype not in GREATEST:
        return (state.to(dtype) if bits is None else _stochastic(state.float(), dtype, bits)), None
    state, greatest = state.float(), GREATEST[dtype]
    scale = state.abs().amax(dim, keepdim=True) * (1.0 / greatest)
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    scaled = (state * inverse).clamp(-greatest, greatest)
    if bits is not None:
        return _stochastic(scaled, dtype, bits), scale
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def _stochastic(x: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    """float32 `x` in `dtype`, rounded up as often as random `bits` (of 32) say."""
    if dtype == torch.int8:
        # Between -1/2 and 1/2, neither of which it reaches: a whole number stays what it is.
        dither = ((bits >> 16).float() + 0.5) * 2.0**-16 - 0.5
        return (x + dither).round().clamp(-127.0, 127.0).to(dtype)
    # Random bits below the last one carry into it as often as they should. (Of numbers so small that the type has
    # fewer bits for them, the last step is to the nearest.)
    below = BITS_BELOW[dtype]
    raised = ((x.view(torch.int32) + (bits >> (32 - below)).to(torch.int32)) >> below) << below
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(dtype)


# Random bits: a multiplicative hash of 32 bits with two keys. (All numbers are below 2^63 as int64, and the same as
# uint32 in a kernel.)

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_FACTORS = 0x7FEB352D, 0x45D9F3B


def _mixed(h, key=0):
    """A hash of h (integers below 2^32: int, or int64 tensor)."""
    h = ((h ^ (h >> 16)) * _FACTORS[0]) & _MASK
    h = (((h ^ (h >> 15)) ^ key) * _FACTORS[1]) & _MASK
    return h ^ (h >> 16)


def layer_seed(seed: int, layer: int) -> int:
    """The seed of one layer, below 2^32."""
    return _mixed((_mixed(seed) + _GOLDEN * (layer + 1)) & _MASK)


def random_bits(seed: int, tokens: int | torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """
    32 random bits for each number of a state (b, *shape), int64. `seed` is a layer's; `tokens`, an integer (b is 1
    then) or (b,), are how many are in the state.
    """
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.to(torch.int64).view(-1, *[1] * len(shape))
    else:
        tokens = torch.full((1, *[1] * len(shape)), tokens, dtype=torch.int64, device=device)
    first = _mixed((tokens ^ seed) & _MASK)
    second = _mixed((first + _GOLDEN) & _MASK)
    place = torch.arange(math.prod(shape), device=device).view(1, *shape)
    return _mixed((place + first) & _MASK, second)


# Rows are moved as they lie: torch has few operations on float8.


def raw(values: torch.Tensor) -> torch.Tensor:
    """The same memory, as a dtype that torch can index."""
    return values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values


def select(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a checkpoint or of any other tensor (b, ...)."""
    return raw(values).index_select(0, index).view(values.dtype)
