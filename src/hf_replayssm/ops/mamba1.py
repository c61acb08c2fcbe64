"""
Mamba-1 with replay: the PyTorch reference, which defines the meaning and is the path of every device without Triton.

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t,   y_t = C_t S_t + D x_t,   gated: y_t silu(z_t)

(Gu and Dao, "Mamba", 2023, algorithm 2, with a time step of its own for every channel, and a decay of its own for every
channel and every column of the state.) So nothing is shared by the columns of a channel, and there is no way to an
output that avoids the states between: `replay` runs through the buffered tokens from the checkpoint on, in registers,
and the state is written at a flush only.

Letters in the shapes: b batch, g groups of channels that share B and C (one, but for Zamba, where a group is one of the
mixer's heads), p channels of a group (the layer's channels are blocked: channel = group * p + i), n state, s buffer
slots, t new tokens. A state is (b, g, n, p), and A (g, n, p): neighbouring channels are neighbours in memory, so that a
kernel's thread owns whole channels; upstream's layout is `state.transpose(-1, -2)`, with groups and channels as one.

`dt_bias` (g, p) says what a dt (.., g, p) is: with it, raw, as it leaves its projection, and bias and softplus are
applied here (the buffer then holds the raw dt in the activation dtype, half the bytes of a final one); without it,
final. A token of no effect has a raw dt of minus infinity or a final one of 0.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .mamba2 import accumulate_dtype


# Tokens between two writes of the state, where nobody says otherwise, the same for every model, dtype and batch. With
# 16 columns a step moves, for each channel, 16 s (1 + 1 / L) bytes of state (s bytes an element), 4 for each held token
# (x and raw dt), and 11 of its own: least at L of 4 to 6 in float32 and at 3 to 4 in 16 bits. But each held token costs
# 16 exponentials, too, of which an H200 does 16 per clock and multiprocessor: for four tokens that takes as long as
# reading a state in float32. Measured there, 3 is the best at batches of 128 and over, and within 3 % of it at 32.
BUFFER_LEN = 3


def decay_rates(A_log: torch.Tensor) -> torch.Tensor:
    """
    A (g, n, p), contiguous, from a layer's parameter A_log: (d, n), or (g, p, n) as Zamba has it. A = -exp(A_log) in
    float32 or better.
    """
    rates = -torch.exp(A_log.to(accumulate_dtype(A_log)))
    return (rates if rates.dim() == 3 else rates[None]).transpose(-1, -2).contiguous()


def final_dt(dt: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """
    The one rule for dt: bias, then softplus, both in the accumulation dtype, as mamba_ssm's kernels do it. (Upstream's
    PyTorch path rounds both to the activation dtype.) dt (.., g, p), dt_bias (g, p) or None for a final dt.
    """
    dtype = accumulate_dtype(dt)
    dt = dt.to(dtype)
    return dt if dt_bias is None else F.softplus(dt + dt_bias.to(dtype))


def replay(
    C: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: torch.Tensor,
    start: int | torch.Tensor,
    end: int | torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Outputs of the newest tokens of the buffer; changes nothing.

    Args:
        C (b, t, g, n): of the new tokens.
        x (b, g, s, p), B (b, g, s, n), dt (b, g, s, p): the buffer, s >= 1. The new tokens are already in it.
        A (g, n, p): negative. D (g, p), or None for no skip.
        checkpoint (b, g, n, p): the state before slot 0.
        start: the slot of the first new token, an integer for all rows or a (b,) tensor; token i is in slot start + i.
        end: one past the newest valid slot, likewise. What lies in or behind it is never used, NaN included: for
            a row in which `start + i >= end` (masked tokens at its end) the output of token i is C_i S of its end.
        dt_bias (g, p): of a raw dt. z (b, t, g, p): the gate; None for none.

    Returns: (b, t, g, p), in the accumulation dtype.
    """
    state = fold(x, B, dt, A, checkpoint, start, dt_bias=dt_bias)
    tokens = C.shape[1]
    if isinstance(start, torch.Tensor):
        slot = start[:, None] + torch.arange(tokens, device=x.device)  # (b, t)
        real = slot < end[:, None]
        row = torch.arange(len(x), device=x.device)[:, None]
        slot = slot.clamp(max=x.shape[2] - 1)
        new = (final_dt(dt[row, :, slot], dt_bias), x[row, :, slot], B[row, :, slot])  # (b, t, g, ..)
        dt, x, B = (torch.where(real[..., None, None], tensor, tensor.new_zeros(())) for tensor in new)
    else:
        x, B = (tensor[:, :, start:end].transpose(1, 2) for tensor in (x, B))
        dt = final_dt(dt[:, :, start:end].transpose(1, 2), dt_bias)
    return scan(C, x, B, dt, A, D, state, z=z)[0]


def fold(
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    count: int | torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The state after the first `count` slots of the buffer (an integer for all rows, or a (b,) tensor): what a flush
    stores. Shapes as in [`replay`]; slots from `count` on are never used, NaN included.

    Returns: (b, g, n, p), in the accumulation dtype.
    """
    dtype = accumulate_dtype(x, checkpoint)
    state = checkpoint.to(dtype)
    slots = x.shape[2] if isinstance(count, torch.Tensor) else count  # (a tensor is not read on the host)
    x, B, dt = (tensor[:, :, :slots].transpose(1, 2) for tensor in (x, B, dt))  # (b, s, g, ..)
    dt = final_dt(dt, dt_bias)
    if isinstance(count, torch.Tensor):
        valid = (torch.arange(slots, device=x.device) < count[:, None])[..., None, None]
        x, B, dt = (torch.where(valid, tensor, tensor.new_zeros(())) for tensor in (x, B, dt))
    step = _tokens_at_once(state)
    for begin in range(0, slots, step):
        state = _states(*(tensor[:, begin : begin + step] for tensor in (x, B, dt)), A, state)[:, -1]
    return state


def scan(
    C: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor | None,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A sequence of any length behind an initial state, which upstream's own scans do not take. The states of a few tokens
    are in memory at a time.

    Args:
        C (b, t, g, n), x (b, t, g, p), B (b, t, g, n), dt (b, t, g, p), t >= 1.
        state (b, g, n, p): before the first token; zeros when None.
        A, D, dt_bias, z: as in [`replay`].

    Returns: y (b, t, g, p) and the state behind the last token (b, g, n, p), in the accumulation dtype.
    """
    dtype = accumulate_dtype(x) if state is None else accumulate_dtype(x, state)
    batch, tokens, groups, channels = x.shape
    if state is None:
        state = x.new_zeros((batch, groups, B.shape[-1], channels), dtype=dtype)
    state, dt = state.to(dtype), final_dt(dt, dt_bias)
    y = x.new_empty(x.shape, dtype=dtype)
    step = _tokens_at_once(state)
    for begin in range(0, tokens, step):
        few = slice(begin, begin + step)
        states = _states(x[:, few], B[:, few], dt[:, few], A, state)  # (b, t, g, n, p)
        y[:, few] = (C[:, few].to(dtype)[..., None, :] @ states).squeeze(-2)
        state = states[:, -1]
    return _skip_and_gate(y, x, D, z), state.clone()


def read_out(
    C: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, state: torch.Tensor, *, z: torch.Tensor | None = None
) -> torch.Tensor:
    """
    y = C S + D x of one token whose state S (b, g, n, p) is at hand, which is so at a flush. C (b, 1, g, n), x and z
    (b, 1, g, p). Returns (b, 1, g, p) in the accumulation dtype.
    """
    y = (C.to(state.dtype)[..., None, :] @ state[:, None]).squeeze(-2)
    return _skip_and_gate(y, x, D, z)


def _states(x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The states behind each of a few tokens: x, dt (b, t, g, p), B (b, t, g, n), dt final -> (b, t, g, n, p)."""
    dtype = state.dtype
    dt = dt.to(dtype)[..., None, :]  # (b, t, g, 1, p)
    decay = torch.exp(A.to(dtype) * dt)
    states = dt * x.to(dtype)[..., None, :] * B.to(dtype)[..., None]
    for t in range(x.shape[1]):
        state = states[:, t].addcmul_(decay[:, t], state)
    return states


def _tokens_at_once(state: torch.Tensor) -> int:
    """So many that their states stay within a cache of a megabyte or two: one pass after the other goes over them."""
    return max(1, min(64, 2**18 // max(state.numel(), 1)))


def _skip_and_gate(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    if D is not None:
        y = y + D.to(y.dtype) * x.to(y.dtype)
    return y if z is None else y * F.silu(z.to(y.dtype))


# The same as Triton kernels (package `replayssm_kernels`; shapes and conditions are there). They take a cache's tensors
# as they lie in memory, append to the buffers and flush in the same call, and read where the rows stand on the device:
# `positions` (5, b) are `Segment.kernel_positions`. The convolution is a call before, `replayssm_kernels.causal_conv`.
# `storage` is how the checkpoint is stored: `scale`, and `seed` of stochastic rounding.


def step_triton(
    positions: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """
    Append, output and flush in one call. x, dt and z (b, t, g, p), B and C (b, t, g, n); dt and z may have any strides.
    Returns (b, t, g, p) in the dtype of x: rounded once, as upstream does for its last projection.
    """
    from replayssm_kernels import mamba1_step

    return mamba1_step(positions, x, B, C, dt, *buffers, A, D, checkpoint, dt_bias=dt_bias, z=z, **storage)


def fold_triton(
    positions: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """[`fold`] of as many tokens as `positions` say. Returns (b, g, n, p), float32; the checkpoint stays as it is."""
    from replayssm_kernels import mamba1_fold

    return mamba1_fold(positions, *buffers, A, checkpoint, dt_bias=dt_bias, **storage)


def scan_triton(
    C: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor | None,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`scan`] in one launch: y in the dtype of x, the state in float32."""
    from replayssm_kernels import mamba1_scan

    return mamba1_scan(x, B, C, dt, A, D, state, dt_bias=dt_bias, z=z)
