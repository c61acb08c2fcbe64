"""
A state in fewer bits: how kernels read a checkpoint of 8 bits, and round what they write.

In 8 bits (int8, float8_e4m3fn) a row of the state is stored times one float32 scale, which takes the row's greatest
number to 127 or 448. Stochastic rounding takes its random bits from a hash of a seed, the number of tokens in the state
and the place in it, so that they are the same in any launch and on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._arithmetic import INTERPRETED, is_cuda


LEAST_SCALE = tl.constexpr(2.0**-126)  # of rows below it the inverse would not be finite: they are stored as zeros


# Each of four bytes, less its sign, becomes the last of 2^23 as float32 is written, from which 2^23 + 128 is taken: two
# operations at the full rate, where a conversion of integers has a quarter of it.
_FOUR_BYTES = tl.constexpr("""
{
    .reg .b32 four;
    xor.b32 four, $4, 0x80808080;
    prmt.b32 $0, four, 0x4b000000, 0x7440;
    prmt.b32 $1, four, 0x4b000000, 0x7441;
    prmt.b32 $2, four, 0x4b000000, 0x7442;
    prmt.b32 $3, four, 0x4b000000, 0x7443;
    sub.rn.f32 $0, $0, 0f4b000080;
    sub.rn.f32 $1, $1, 0f4b000080;
    sub.rn.f32 $2, $2, 0f4b000080;
    sub.rn.f32 $3, $3, 0f4b000080;
}
""")
_TWO_BYTES = tl.constexpr("""
{
    .reg .b32 two;
    xor.b32 two, $2, 0x8080;
    prmt.b32 $0, two, 0x4b000000, 0x7440;
    prmt.b32 $1, two, 0x4b000000, 0x7441;
    sub.rn.f32 $0, $0, 0f4b000080;
    sub.rn.f32 $1, $1, 0f4b000080;
}
""")
# The same in float16, two numbers in a register, by way of 2^10 and 2^10 + 128.
_FOUR_BYTES_16 = tl.constexpr("""
{
    .reg .b32 four, less;
    mov.b32 less, 0x64806480;
    xor.b32 four, $2, 0x80808080;
    prmt.b32 $0, four, 0x64646464, 0x4140;
    prmt.b32 $1, four, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, less;
    sub.rn.f16x2 $1, $1, less;
}
""")


@triton.jit
def as_float32(x, PAIRS: tl.constexpr = False):
    """What is stored, without its scale. PAIRS: a thread has two neighbours at a time, as matrix products have them."""
    if x.dtype == tl.int8:
        if not INTERPRETED:
            if is_cuda():
                if PAIRS:
                    return tl.inline_asm_elementwise(_TWO_BYTES, "=f,=f,r", [x], tl.float32, is_pure=True, pack=2)
                return tl.inline_asm_elementwise(_FOUR_BYTES, "=f,=f,=f,=f,r", [x], tl.float32, is_pure=True, pack=4)
    return x.to(tl.float32)


@triton.jit
def as_float16(x):
    """What is stored in 8 bits, without its scale: float16 holds all of it, and matrix units take it."""
    if x.dtype == tl.int8:
        if not INTERPRETED:
            if is_cuda():
                return tl.inline_asm_elementwise(_FOUR_BYTES_16, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4)
    return x.to(tl.float16)


@triton.jit
def absolute_bits(x):
    """The bits of |x| as int32, which are ordered as the numbers are, with what is not finite on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_scale(scale_ptr, row, index, SIZE: tl.constexpr):
    """The scales (INDEX,) of what is at `index` of a row of SIZE of them; 1.0 where the checkpoint has none."""
    if scale_ptr is None:
        return tl.full(index.shape, 1.0, tl.float32)
    else:
        return tl.load(scale_ptr + row * SIZE + index, mask=index < SIZE, other=0.0)


@triton.jit
def store_scale(scale_ptr, row, index, greatest, dtype: tl.constexpr, SIZE: tl.constexpr):
    """
    Stores the scales of what is at `index`, of which `greatest` (INDEX,) has the greatest `absolute_bits`; returns what
    to multiply it by.
    """
    scale = greatest.to(tl.float32, bitcast=True) * (1.0 / 127.0 if dtype == tl.int8 else 1.0 / 448.0)
    scale = tl.where(scale < LEAST_SCALE, 0.0, scale)
    tl.store(scale_ptr + row * SIZE + index, scale, mask=index < SIZE)
    return tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def rounded(x, dtype: tl.constexpr, place, first_key, second_key, STOCHASTIC: tl.constexpr):
    """
    float32 `x`, in 8 bits divided by its scale, as `dtype`: to the nearest, ties to even, or up or down at random.
    `place` is that of each number in the state of a row of the batch.
    """
    if dtype == tl.float32:
        return x
    if STOCHASTIC:
        bits = _mixed(place.to(tl.uint32) + first_key, second_key)
        if dtype == tl.int8:
            # Between -1/2 and 1/2, neither of which it reaches, in steps of 2^-16.
            dither = (((bits >> 16) << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.5
            x = tl.minimum(tl.maximum(x + dither, -127.0), 127.0)
        else:
            # Random bits below the last one of the other type carry into it as often as they should.
            if dtype == tl.float8e4nv:
                x = tl.minimum(tl.maximum(x, -448.0), 448.0)
            BELOW: tl.constexpr = 16 if dtype == tl.bfloat16 else 13 if dtype == tl.float16 else 20
            as_bits = x.to(tl.uint32, bitcast=True)
            raised = ((as_bits + (bits >> (32 - BELOW))) >> BELOW) << BELOW
            x = tl.where(absolute_bits(x) < 0x7F800000, raised.to(tl.float32, bitcast=True), x)
    elif INTERPRETED and dtype == tl.float8e4nv:  # the interpreter cuts off, and loses what carries into an exponent
        as_bits = x.to(tl.uint32, bitcast=True)
        nearest = ((as_bits + 0x7FFFF + ((as_bits >> 20) & 1)) >> 20) << 20
        x = tl.where(absolute_bits(x) < 0x7F800000, nearest.to(tl.float32, bitcast=True), x)
    if dtype == tl.int8:
        # The last byte of 1.5 * 2^23 + x, which adds to the nearest. (What is not finite is so in its scale.)
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return x.to(dtype)


# The hash, of 32 bits with a key in its middle. (`ops/quantize.py` of hf_replayssm has the same.)


@triton.jit
def _mixed(h, key):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = ((h ^ (h >> 15)) ^ key) * 0x45D9F3B
    return h ^ (h >> 16)


@triton.jit
def random_keys(seed, positions_ptr, b, batch, fold):
    """The two keys (uint32) of row b's state behind `fold` more tokens than its checkpoint holds; else unused."""
    no_key = tl.zeros((), tl.uint32)
    if seed is None:
        return no_key, no_key
    else:
        tokens = tl.load(positions_ptr + b) - tl.load(positions_ptr + 2 * batch + b) + fold
        first = _mixed(tokens.to(tl.uint32) ^ seed.to(tl.uint32), no_key)
        return first, _mixed(first + 0x9E3779B9, no_key)
