"""Arithmetic that several kernels share: softplus, SiLU, and matrix products that keep float32 accuracy."""

from __future__ import annotations

import triton
import triton.language as tl

from ._availability import interpreted


INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in float32, accurate for very negative x too; x itself above 20, as `torch.nn.functional` has it."""
    e = tl.exp(tl.minimum(x, 20.0))
    # log1p(e) = 2 artanh(s) with s = e / (2 + e). The series is exact to rounding up to s = 0.2; a logarithm of 1 + e
    # would lose the digits of a small e.
    s = e / (2.0 + e)
    q = s * s
    series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11))))))
    return tl.where(x > 20.0, x, tl.where(e < 0.5, series, tl.log(1.0 + e)))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def final_dt(dt, bias, low, high):
    """The one rule for dt: bias, softplus, limit, in float32. NaN stays NaN."""
    dt = softplus(dt + bias)
    dt = tl.where(dt < low, low, dt)
    return tl.where(dt > high, high, dt)


# Matrix units multiply 16-bit numbers exactly and add in float32. A float32 operand therefore goes through them as a sum
# of bfloat16 terms (8 bits each, so three hold all 24), which keeps float32 accuracy at a few products; tf32, with its
# 10 bits, would not do for a state. float16 (11 bits) is two such terms.


@triton.jit
def dot_16bit(a, b, acc):
    """acc + a @ b of operands of one 16-bit type. (Triton's interpreter multiplies the bit patterns of bfloat16.)"""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def dot_float32_by_16bit(a, b, acc):
    """acc + a @ b with float32 `a`, all of its bits used. `b` is an activation: bfloat16, float16 or float32."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    high = a.to(tl.bfloat16)
    rest = a - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    if b.dtype == tl.bfloat16:
        acc = dot_16bit(low, b, acc)
        acc = dot_16bit(middle, b, acc)
        return dot_16bit(high, b, acc)
    b_high = b.to(tl.bfloat16)
    b_low = (b.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16)
    acc = dot_16bit(middle, b_low, acc)
    acc = dot_16bit(low, b_high, acc)
    acc = dot_16bit(high, b_low, acc)
    acc = dot_16bit(middle, b_high, acc)
    return dot_16bit(high, b_high, acc)


@triton.jit
def dot_by_state(c, state, acc):
    """
    acc + c @ state^T, c (T, N), state (P, N), for an output: of a float32 state two bfloat16 terms (16 bits, relative
    error 1e-5) are enough where `c` itself has at most 11; 16-bit states go through exactly.
    """
    if c.dtype == tl.float32:
        return tl.dot(c, tl.trans(state.to(tl.float32)), acc, input_precision="ieee")
    if state.dtype == c.dtype:
        return dot_16bit(c, tl.trans(state), acc)
    high = state.to(tl.bfloat16)
    if c.dtype == tl.bfloat16:
        low = (state.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        acc = dot_16bit(c, tl.trans(low), acc)
        return dot_16bit(c, tl.trans(high), acc)
    c_high = c.to(tl.bfloat16)
    c_low = (c.to(tl.float32) - c_high.to(tl.float32)).to(tl.bfloat16)
    acc = dot_16bit(c_low, tl.trans(high), acc)
    if state.dtype != tl.bfloat16:
        low = (state.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        acc = dot_16bit(c_high, tl.trans(low), acc)
    return dot_16bit(c_high, tl.trans(high), acc)
