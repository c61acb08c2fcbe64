"""
Mamba-1 decoding with replay: the public functions. They check their arguments and call torch custom operators, which
choose a launch configuration and launch the kernels of `_mamba1_kernels.py`.

Letters in the shapes: b batch, t new tokens, g groups of channels that share B and C (blocked), p channels of a group,
n state, s buffer slots. States and A have the channels last: (b, g, n, p) and (g, n, p).

The convolution stands before the projections to dt, B and C, hence in a call of its own: `causal_conv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._launch import (
    as_int32,
    cdiv,
    check,
    check_checkpoint,
    check_options,
    check_owned,
    check_positions,
    check_same_dtype,
    launch_options,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    rows_contiguous,
)
from ._mamba1_kernels import _fold_kernel, _scan_kernel, _step_kernel, _window_kernel
from ._operators import define
from ._overlap import can_overlap


MAX_STATE = 256


@dataclass(frozen=True)
class Tile:
    """How a kernel goes over channels, rows and tokens."""

    block_p: int  # channels of a group, a power of two
    vector: int  # channels of a thread that lie next to each other, a power of two
    ahead: int  # tokens whose inputs are loaded at once (of a window: `stages`)
    warps: int = 1
    registers: int = 0  # of a thread, at most (0: what the compiler takes; NVIDIA only)
    rows: int = 0  # of a program of a step (0: by the size of the device); one of a window has one
    evict: str = ""  # eviction policy of the state's loads
    stages: int = 2  # tokens of a window: those whose loads are under way, and the one being computed
    overlap: bool = False  # the launch begins before the one in front of it has ended


OVERRIDE: Tile | None = None  # for tuning


def mamba1_step(
    positions: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    x_buffer: torch.Tensor,
    B_buffer: torch.Tensor,
    dt_buffer: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """
    Appends t new tokens to the buffer and returns their outputs; rows that are told to fold some of their oldest
    tokens into the checkpoint. For one token this is a decode step, for more a window of drafts.

    Args:
        positions: (5, b) int32, see `_positions.py`. Everything in it is read on the device; SEEN only with `seed`.
        x (b, t, g, p), B (b, t, g, n), C (b, t, g, n): of the new tokens, x as it leaves the convolution.
        dt (b, t, g, p): raw with `dt_bias` (g, p): bias and softplus are applied in float32, to new and to buffered
            tokens; without it final.
        x_buffer (b, g, s, p), B_buffer (b, g, s, n), dt_buffer (b, g, s, p): the buffer, contiguous, written, of the
            dtypes of x, B and dt. It needs s >= HELD + COUNT slots in every row.
        A (g, n, p): decay rates, negative. D (g, p): skip weights, or None.
        checkpoint (b, g, n, p): contiguous, float32, bfloat16, float16, or with `scale` int8 or float8_e4m3fn; rows
            with FOLD > 0 are written.
        z (b, t, g, p): the gate, whose SiLU multiplies the output; None for none.
        out_dtype: of the result; that of `x` by default.
        scale (b, g, 1, p): contiguous, float32: what each channel of a checkpoint of 8 bits is times. Written with it.
        seed: of stochastic rounding of what is written to the checkpoint, an integer below 2^32; None: to nearest.

    Returns: y (b, t, g, p). Sums are float32. Tokens from a row's COUNT on are not appended and their output is
    unspecified.

    Raises:
        ValueError: shapes, dtypes, layouts or devices that do not fit together.
    """
    _check_buffers(positions, x_buffer, B_buffer, dt_buffer, A, dt_bias, checkpoint, scale, seed)
    _check_new(x, B, C, dt, A, D, z, out_dtype, checkpoint)
    for name, tensor, buffer in (("x", x, x_buffer), ("B", B, B_buffer), ("dt", dt, dt_buffer)):
        check_same_dtype(name, tensor, buffer, f"{name}_buffer")
    return _step_op(positions, x, B, C, dt, x_buffer, B_buffer, dt_buffer, A, D, checkpoint, dt_bias, z, scale, seed,
                    out_dtype)  # fmt: skip


def mamba1_fold(
    positions: torch.Tensor,
    x_buffer: torch.Tensor,
    B_buffer: torch.Tensor,
    dt_buffer: torch.Tensor,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    inplace: bool = False,
    scale: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """
    The state after the FOLD oldest tokens of each row's buffer. COUNT is not read, and HELD only with `seed`.

    Args: as for [`mamba1_step`].
        inplace: write it to the checkpoint of the rows with FOLD > 0 instead (a flush), and return the checkpoint.

    Returns: (b, g, n, p) float32; with `inplace` the checkpoint.
    """
    _check_buffers(positions, x_buffer, B_buffer, dt_buffer, A, dt_bias, checkpoint, scale, seed)
    if inplace:
        _flush_op(positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, dt_bias, scale, seed)
        return checkpoint
    return _fold_op(positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, dt_bias, scale)


def mamba1_scan(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    *,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A sequence of any length behind an initial state: a prefill, or a long continuation. Nothing is buffered.

    Args:
        x, B, C, dt, A, D, dt_bias, z, out_dtype: as for [`mamba1_step`]. A token of no effect has a raw dt of minus
            infinity, or a final one of 0, and a finite x and B.
        initial_state (b, g, n, p): any of the three dtypes; zeros when None.

    Returns: y (b, t, g, p), and the state behind the last token (b, g, n, p) in float32.
    """
    check("x", x, (None, None, None, None), x)
    batch, _, groups, channels = x.shape
    check("A", A, (groups, None, channels), x)
    if initial_state is not None:
        check("initial_state", initial_state, (batch, groups, A.shape[1], channels), x)
    _check_state_size(A.shape[1])
    if dt_bias is not None:
        check("dt_bias", dt_bias, (groups, channels), x)
    _check_new(x, B, C, dt, A, D, z, out_dtype, x)
    return _scan_op(x, B, C, dt, A, D, initial_state, dt_bias, z, out_dtype)


def _check_buffers(positions, x_buffer, B_buffer, dt_buffer, A, dt_bias, checkpoint, scale, seed) -> None:
    batch, groups, state, channels = check_checkpoint(checkpoint, 4, -2, scale, seed)
    _check_state_size(state)
    check_positions(positions, batch, checkpoint)
    check_owned("x_buffer", x_buffer, (batch, groups, None, channels), checkpoint)
    slots = x_buffer.shape[2]
    check_owned("B_buffer", B_buffer, (batch, groups, slots, state), checkpoint)
    check_owned("dt_buffer", dt_buffer, (batch, groups, slots, channels), checkpoint)
    check("A", A, (groups, state, channels), checkpoint)
    if dt_bias is not None:
        check("dt_bias", dt_bias, (groups, channels), checkpoint)


def _check_new(x, B, C, dt, A, D, z, out_dtype, like) -> None:
    groups, state, channels = A.shape
    check("x", x, (like.shape[0], None, groups, channels), like)
    batch, tokens = x.shape[:2]
    check("B", B, (batch, tokens, groups, state), like)
    check("C", C, (batch, tokens, groups, state), like)
    check("dt", dt, (batch, tokens, groups, channels), like)
    if D is not None:
        check("D", D, (groups, channels), like)
    if z is not None:
        check("z", z, (batch, tokens, groups, channels), like)
    check_options(tokens, out_dtype)


def _check_state_size(state: int) -> None:
    if state > MAX_STATE:
        raise ValueError(f"The state has {state} columns; the kernels hold up to {MAX_STATE} in registers.")


# Launch configurations.


def _tile(checkpoint: torch.Tensor, x: torch.Tensor, tokens: int) -> Tile:
    """
    Of a step or a fold. With 1024 elements of a state a warp and 16 columns a thread has two channels and all of their
    columns; with 128 registers 16 warps are at work on a multiprocessor, each with 4 KiB of the state under way. (For
    16-bit activations that spills nothing, as compiled for compute capability 9.0.)
    """
    if OVERRIDE is not None:
        return OVERRIDE
    columns, channels = _program(checkpoint)
    registers = 0
    if columns * channels == 1024 and columns == 16:
        registers = 144 if tokens > 1 and x.element_size() > 2 else 128
    if tokens > 1:
        return Tile(channels, 2, ahead=2, registers=registers, stages=4, overlap=True)
    return Tile(channels, 2, ahead=3, registers=registers, overlap=True)


def _scan_tile(out: torch.Tensor) -> Tile:
    if OVERRIDE is not None:
        return OVERRIDE
    columns, channels = _program(out)
    return Tile(channels, 2, ahead=2 if columns * channels == 1024 else 4)


def _program(states: torch.Tensor) -> tuple[int, int]:
    """
    Columns and channels of a program. Where there are few rows it has fewer channels, down to a quarter: then it is not
    how much is under way that decides, but how much is done at the same time.
    """
    batch, groups, state, channels = states.shape
    columns, elements = _columns(state), 1024
    while elements > 256 and batch * groups * channels * columns < 4 * multiprocessors(states.device) * elements:
        elements //= 2
    return columns, max(min(elements // columns, 64), 4)


def _columns(state: int) -> int:
    return max(next_power_of_2(state), 4)


def _launch_rows(checkpoint: torch.Tensor, tile: Tile) -> tuple[int, int]:
    """
    Programs, and rows of each, for all of which it reads A once: A has as many elements as one row's state, so L2
    would have to deliver as much of the one as of the other. But enough programs for all multiprocessors come first,
    and with more rows than two the last programs to end leave more of the device idle than is saved.
    """
    batch, groups, _, channels = checkpoint.shape
    tiles = groups * cdiv(channels, tile.block_p)
    rows = tile.rows or max(1, min(2, round(batch * tiles / (16 * multiprocessors(checkpoint.device)))))
    return tiles * cdiv(batch, rows), rows


# The operators.


def _step(
    positions: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    x_buffer: torch.Tensor,
    B_buffer: torch.Tensor,
    dt_buffer: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: torch.Tensor,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    scale: torch.Tensor | None,
    seed: int | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    if y.numel() == 0:
        return y
    batch, tokens, groups, channels = x.shape
    slots, state = B_buffer.shape[2:]
    tile = _tile(checkpoint, x, tokens)
    overlaps = tile.overlap and can_overlap(x.device)
    new, strides = _new(x, dt, B, C, z)
    A, D, dt_bias = _parameters(A, D, dt_bias)
    storage = scale, as_int32(seed)
    unused = positions  # stands where a pointer is not read
    # Arguments go by position: with so many of them, names cost the host more than the launch.
    tensors = (positions, *new, unused if dt_bias is None else dt_bias, x_buffer, B_buffer, dt_buffer, checkpoint, A,
               unused if D is None else D, y, batch)  # fmt: skip
    sizes = (groups, state, channels, slots, D is not None, z is not None, dt_bias is not None)
    *block, ahead = _sizes(tile, state)
    with on_device_of(checkpoint):
        if tokens > 1:
            programs = batch * groups * cdiv(channels, tile.block_p)
            _window_kernel[(programs,)](
                *tensors, tokens, *strides, *storage, *sizes, *block, tile.evict, tile.stages, overlaps,
                **launch_options(tile, x.device, overlaps),
            )  # fmt: skip
        else:
            programs, rows = _launch_rows(checkpoint, tile)
            _step_kernel[(programs,)](
                *tensors, rows, *strides, *storage, *sizes, *block, ahead, tile.evict, rows == 1, overlaps,
                **launch_options(tile, x.device, overlaps),
            )  # fmt: skip
    return y


def _fold(
    positions: torch.Tensor,
    x_buffer: torch.Tensor,
    B_buffer: torch.Tensor,
    dt_buffer: torch.Tensor,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    dt_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty_like(checkpoint, dtype=torch.float32)
    _launch_fold(out, positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, dt_bias, scale, None)
    return out


def _flush(
    positions: torch.Tensor,
    x_buffer: torch.Tensor,
    B_buffer: torch.Tensor,
    dt_buffer: torch.Tensor,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    dt_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    seed: int | None,
) -> None:
    _launch_fold(checkpoint, positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, dt_bias, scale, seed)


def _launch_fold(out, positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, dt_bias, scale, seed) -> None:
    """Into `out`; where that is the checkpoint, of rows that fold anything."""
    if out.numel() == 0:
        return
    batch, groups, state, channels = checkpoint.shape
    slots = B_buffer.shape[2]
    tile = _tile(checkpoint, x_buffer, 1)
    programs, rows = _launch_rows(checkpoint, tile)
    A, _, dt_bias = _parameters(A, None, dt_bias)
    with on_device_of(checkpoint):
        _fold_kernel[(programs,)](
            positions, x_buffer, B_buffer, dt_buffer, positions if dt_bias is None else dt_bias, checkpoint, A, out,
            batch, rows, scale, as_int32(seed), groups, state, channels, slots, out is checkpoint, dt_bias is not None,
            *_sizes(tile, state), **launch_options(tile, out.device),
        )  # fmt: skip


def _scan(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, groups, channels = x.shape
    state = A.shape[1]
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    out = x.new_empty((batch, groups, state, channels), dtype=torch.float32)
    if out.numel() == 0:
        return y, out
    tile = _scan_tile(out)
    new, strides = _new(x, dt, B, C, z)
    A, D, dt_bias = _parameters(A, D, dt_bias)
    unused = A
    with on_device_of(x):
        _scan_kernel[(batch * groups * cdiv(channels, tile.block_p),)](
            *new, unused if dt_bias is None else dt_bias,
            unused if initial_state is None else initial_state.contiguous(), A, unused if D is None else D, y, out,
            batch, tokens, *strides, groups, state, channels, initial_state is not None, D is not None, z is not None,
            dt_bias is not None, *_sizes(tile, state), **launch_options(tile, x.device),
        )  # fmt: skip
    return y, out


def _new(x, dt, B, C, z) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The new tokens' tensors and their strides, as kernels take them. (A gate may be every second channel.)"""
    B, C = rows_contiguous(B), rows_contiguous(C)
    z_or_x = x if z is None else z
    strides = (*x.stride(), *dt.stride(), *B.stride()[:3], *C.stride()[:3], *z_or_x.stride())
    return (x, dt, B, C, z_or_x), strides


def _parameters(A, D, dt_bias) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in (A, D, dt_bias))


def _sizes(tile: Tile, state: int) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_P, VECTOR, AHEAD."""
    return _columns(state), tile.block_p, tile.vector, tile.ahead


def _fake_scan(x, B, C, dt, A, D, initial_state, dt_bias, z, out_dtype):
    state = x.new_empty((x.shape[0], x.shape[2], A.shape[1], x.shape[3]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), state


_step_op = define(
    "mamba1_step",
    _step,
    mutates=("x_buffer", "B_buffer", "dt_buffer", "checkpoint", "scale"),
    fake=lambda positions, x, *args: x.new_empty(x.shape, dtype=args[-1] or x.dtype),
)
_fold_op = define(
    "mamba1_fold",
    _fold,
    mutates=(),
    fake=lambda *args: torch.empty_like(args[5], dtype=torch.float32),
)
_flush_op = define("mamba1_flush", _flush, mutates=("checkpoint", "scale"), fake=lambda *args: None)
_scan_op = define("mamba1_scan", _scan, mutates=(), fake=_fake_scan)
