"""RMS norms, gated as behind a recurrence or plain as between layers, in one launch: a row's group is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._arithmetic import silu
from ._launch import DTYPES, cdiv, check, next_power_of_2, on_device_of, rows_contiguous
from ._operators import define


WIDEST = 16384  # columns that a program holds in registers; a wider group is read twice, in parts


@triton.jit
def _operands(y_ptr, gate_ptr, column, ok, GATED: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr):
    """What is normalised and silu(gate), float32, zeros where not `ok`. Without a gate: y twice."""
    y = tl.load(y_ptr + column, mask=ok, other=0.0).to(tl.float32)
    gate = y
    if GATED:
        gate = silu(tl.load(gate_ptr + column, mask=ok, other=0.0).to(tl.float32))
        if not NORM_BEFORE_GATE:
            y = y * gate
    return y, gate


@triton.jit
def _store(
    out_ptr, weight_ptr, x, gate, column, ok,
    Y: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr, WEIGHT_IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Weights the normalised x; Y is the dtype of y. Where PyTorch rounds on the way, so does this."""
    weight = tl.load(weight_ptr + column, mask=ok, other=0.0)
    if WEIGHT_IN_FLOAT32:
        x = x * weight.to(tl.float32)
        if NORM_BEFORE_GATE:
            x = x * gate
        x = x.to(Y).to(tl.float32)
    else:
        x = x.to(Y).to(tl.float32) * weight.to(tl.float32)
        if weight.dtype == Y:  # the product of two different dtypes is float32
            x = x.to(Y).to(tl.float32)
    tl.store(out_ptr + column, x.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _rms_norm_kernel(
    y_ptr,  # (rows, GROUPS * GROUP)
    gate_ptr,  # likewise, rows `gate_stride` apart; not read unless GATED
    weight_ptr,  # (GROUPS * GROUP,)
    out_ptr,  # like y, contiguous
    y_stride,
    gate_stride,
    eps,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
    WEIGHT_IN_FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each group of each row."""
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    start = tl.program_id(0) % GROUPS * GROUP
    y_ptr += row * y_stride + start
    gate_ptr += row * gate_stride + start
    weight_ptr += start
    out_ptr += row * (GROUPS * GROUP) + start
    Y: tl.constexpr = y_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    if GROUP <= BLOCK:
        ok = column < GROUP
        x, gate = _operands(y_ptr, gate_ptr, column, ok, GATED, NORM_BEFORE_GATE)
        scale = tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps)
        _store(out_ptr, weight_ptr, x * scale, gate, column, ok, Y, NORM_BEFORE_GATE, WEIGHT_IN_FLOAT32)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, GROUP, BLOCK):
            ok = first + column < GROUP
            x, gate = _operands(y_ptr, gate_ptr, first + column, ok, GATED, NORM_BEFORE_GATE)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / GROUP + eps)
        for first in range(0, GROUP, BLOCK):
            ok = first + column < GROUP
            x, gate = _operands(y_ptr, gate_ptr, first + column, ok, GATED, NORM_BEFORE_GATE)
            _store(out_ptr, weight_ptr, x * scale, gate, first + column, ok, Y, NORM_BEFORE_GATE, WEIGHT_IN_FLOAT32)


def rms_norm(
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int | None = None,
    *,
    weight_in_float32: bool = False,
    norm_before_gate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """
    The RMS norm of y * silu(gate), or without a gate (None) of y, in groups of neighbouring columns, times a weight.
    All of it is float32, and rounded where the modules of transformers round:

        by default          x = y silu(gate);  n = x / sqrt(mean(x^2) + eps), rounded as y is;  out = weight n
        weight_in_float32   x = y silu(gate);  n = x / sqrt(mean(x^2) + eps);  out = weight n, rounded as y is
        norm_before_gate    x = y;  n as before;  out = weight n silu(gate), rounded as y is

    Args:
        y (..., d). gate: of the same shape; rows may lie apart, as in a part of a projection's output.
        weight (d,). group_size: columns of a group, a divisor of d; all of them by default.
        weight_in_float32, norm_before_gate: as above; the second asks for the first (Falcon-H1 has both or the first).
        out_dtype: rounds the result once more, as `.to(out_dtype)` would.

    Returns: like y. Without `out_dtype` in the dtype of weight * y, or, with `weight_in_float32`, of y.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    shape = y.shape
    if not shape:
        raise ValueError("y has no dimension to normalise: give it one.")
    columns = shape[-1]
    check("y", y, shape, y)
    if gate is not None:
        check("gate", gate, shape, y)
    check("weight", weight, (columns,), y)
    group_size = columns if group_size is None else group_size
    if columns and (group_size < 1 or columns % group_size):
        raise ValueError(f"{columns} columns are not groups of {group_size}: `group_size` must divide them.")
    if norm_before_gate and gate is None:
        raise ValueError("`norm_before_gate=True` needs a gate: pass one, or leave it out.")
    if norm_before_gate and not weight_in_float32:
        raise ValueError("`norm_before_gate=True` weights in float32: pass `weight_in_float32=True` with it.")
    if out_dtype not in (None, *DTYPES):
        raise ValueError(f"`out_dtype` is float32, bfloat16 or float16, not {out_dtype}.")
    if out_dtype is None:
        out_dtype = y.dtype if weight_in_float32 else torch.promote_types(weight.dtype, y.dtype)
    return _norm_op(y, gate, weight, float(eps), group_size, weight_in_float32, norm_before_gate, out_dtype)


def _norm(
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    weight_in_float32: bool,
    norm_before_gate: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty_like(y, dtype=out_dtype, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    columns = y.shape[-1]
    y, y_stride = _rows(y, columns)
    gated = gate is not None
    gate, gate_stride = _rows(gate, columns) if gated else (y, 0)
    block = max(16, min(next_power_of_2(group_size), WIDEST))
    with on_device_of(y):
        _rms_norm_kernel[(out.numel() // group_size,)](
            y, gate, weight.contiguous(), out, y_stride, gate_stride, eps, columns // group_size, group_size, gated,
            norm_before_gate, weight_in_float32, block, num_warps=min(16, cdiv(block, 256)),
        )  # fmt: skip
    return out


def _rows(tensor: torch.Tensor, columns: int) -> tuple[torch.Tensor, int]:
    """The tensor as rows, and how far they are apart. (A view, if it is what a projection gives or a part of it.)"""
    if tensor.is_contiguous():
        return tensor, columns
    tensor = rows_contiguous(tensor.reshape(-1, columns))
    return tensor, tensor.stride(0)


_norm_op = define(
    "rms_norm",
    _norm,
    mutates=(),
    fake=lambda y, *args: y.new_empty(y.shape, dtype=args[-1]),
)
