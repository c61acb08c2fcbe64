"""
Arithmetic that several kernels share: softplus, SiLU, matrix products that keep float32 accuracy, and a cheap way to
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._availability import interpreted


try:
    from triton.language.target_info import is_cuda
except ImportError:  # an older triton: without the faster ways to float32

    @triton.jit
    def is_cuda():
        return False


INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in float32, accurate for very negative x too; above 20 it is x, as in `torch.nn.functional`."""
    e = tl.exp(tl.minimum(x, 20.0))
    # log1p(e) = 2 artanh(s) with s = e / (2 + e). The series is exact to rounding up to s = 0.2; a logarithm of 1 + e
    # would lose the digits of a small e.
    s = e / (2.0 + e)
    q = s * s
    series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11))))))
    return tl.where(x > 20.0, x, tl.where(e < 0.5, series, tl.log(1.0 + e)))


# Two numbers that lie in one register, in an operation each: the compiler takes a third one, for the upper half.
_TWO_BFLOAT16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@triton.jit
def widened(x):
    """x in float32."""
    if x.dtype == tl.bfloat16:
        if not INTERPRETED:
            if is_cuda():
                return tl.inline_asm_elementwise(_TWO_BFLOAT16, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    return x.to(tl.float32)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def final_dt(dt, bias, low, high):
    """The one rule for dt: bias, softplus, limit, in float32. NaN stays NaN."""
    dt = softplus(dt + bias)
    dt = tl.where(dt < low, low, dt)
    return tl.where(dt > high, high, dt)


# Matrix units multiply 16-bit numbers exactly and add in float32. A float32 operand therefore goes through them as a
# sum of bfloat16 terms (8 bits each, so three hold all 24), which keeps float32 accuracy at a few products; tf32, with
# its 10 bits, would not do for a state. float16 (11 bits) is two such terms.


@triton.jit
def dot_16bit(a, b, acc):
    """acc + a @ b of operands of one 16-bit type. (Triton's interpreter multiplies the bit patterns of bfloat16.)"""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def leading_bits(x):
    """
    The leading 8 bits of float32 `x`, as bfloat16 and as float32. Cut off, not rounded: a matter of integer operations,
    where a conversion of single numbers to bfloat16 runs at a sixteenth of the rate. What is left is exact.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def dot_float32_by_16bit(a, b, acc):
    """
    acc + a @ b with float32 `a` as a sum of three bfloat16 numbers, for a state. `b` is an activation: bfloat16,
    float16, or float32 (exact as well).
    """
    if b.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    high, a_high = leading_bits(a)
    middle, a_middle = leading_bits(a - a_high)
    low = (a - a_high - a_middle).to(tl.bfloat16)
    if b.dtype == tl.bfloat16:
        acc = dot_16bit(low, b, acc)
        acc = dot_16bit(middle, b, acc)
        return dot_16bit(high, b, acc)
    b_high, b_low = _two_terms(b)
    acc = dot_16bit(middle, b_low, acc)
    acc = dot_16bit(low, b_high, acc)
    acc = dot_16bit(high, b_low, acc)
    acc = dot_16bit(middle, b_high, acc)
    return dot_16bit(high, b_high, acc)


# A float32 number is also the sum of two tf32 numbers of 11 bits each, in half as many operations: what is missing is
# not above its own last bit (2^-23), and one tf32 number would be far from it. 16-bit numbers are tf32 numbers.


@triton.jit
def _two_tf32(x):
    """
    `x` as the sum of two float32 numbers for units that look at their leading 19 bits. The first is rounded: the second
    has either sign then, and so has what products leave out.
    """
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot_float32(a, b, acc):
    """acc + a @ b with float32 accuracy, of operands of 16 bits or float32."""
    if (a.dtype == b.dtype) & (a.dtype != tl.float32):
        acc = dot_16bit(a, b, acc)
    elif is_cuda():
        A: tl.constexpr = a.dtype == tl.float32  # a second term
        B: tl.constexpr = b.dtype == tl.float32
        a_high, a_low = _two_tf32(a) if A else (a.to(tl.float32), a)
        b_high, b_low = _two_tf32(b) if B else (b.to(tl.float32), b)
        if A:
            acc = tl.dot(a_low, b_high, acc, input_precision="tf32")
        if B:
            acc = tl.dot(a_high, b_low, acc, input_precision="tf32")
        acc = tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def dot_for_output(a, b, acc):
    """
    acc + a @ b where only an output depends on it. 16-bit numbers are multiplied exactly; of a float32 operand beside a
    16-bit one two bfloat16 terms (16 bits, a relative error of 1e-5) are taken.
    """
    if (a.dtype == b.dtype) & (a.dtype != tl.float32):
        return dot_16bit(a, b, acc)
    a_whole: tl.constexpr = a.dtype == tl.bfloat16
    b_whole: tl.constexpr = b.dtype == tl.bfloat16
    if not a_whole and not b_whole:
        if (a.dtype == tl.float32) & (b.dtype == tl.float32):
            return tl.dot(a, b, acc, input_precision="ieee")
    a_high, a_low = _two_terms(a)
    b_high, b_low = _two_terms(b)
    if not b_whole:
        acc = dot_16bit(a_high, b_low, acc)
    if not a_whole:
        acc = dot_16bit(a_low, b_high, acc)
    return dot_16bit(a_high, b_high, acc)


@triton.jit
def _two_terms(x):
    """The leading bits of `x` and the rest, as bfloat16."""
    if x.dtype == tl.bfloat16:
        return x, x
    high, leading = leading_bits(x.to(tl.float32))
    return high, (x.to(tl.float32) - leading).to(tl.bfloat16)
