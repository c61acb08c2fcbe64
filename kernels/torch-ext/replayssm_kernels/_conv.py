"""The causal convolution over a ring of raw inputs: the part that kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._arithmetic import silu
from ._launch import (
    cdiv,
    check,
    check_owned,
    check_positions,
    check_same_dtype,
    next_power_of_2,
    on_device_of,
    rows_contiguous,
)
from ._operators import define


PIECE = 32  # tokens of a window that are handled at a time


@triton.jit
def _taps(weight_ptr, channel, channel_ok, K: tl.constexpr, BLOCK_C: tl.constexpr):
    """The K taps of each channel (and zeros up to the fourth) as a tuple of (BLOCK_C,)."""
    if K <= 4:
        # A channel's taps lie next to each other: one load for all of them, then they are taken apart.
        k = tl.arange(0, 4)
        taps = tl.load(
            weight_ptr + channel[:, None] * K + k[None, :], mask=channel_ok[:, None] & (k < K)[None, :], other=0.0
        )
        even, odd = tl.split(tl.reshape(taps, (BLOCK_C, 2, 2)))
        zeroth, second = tl.split(even)
        first, third = tl.split(odd)
        taps = (zeroth, first, second, third)
    else:  # (one `return` below: triton wants the same type from all of them, whichever branch is compiled)
        taps = ()
        for k in tl.static_range(K):
            taps = taps + (tl.load(weight_ptr + channel * K + k, mask=channel_ok, other=0.0),)
    return taps


@triton.jit
def convolve(
    new_ptr,  # raw inputs of this row, (T, channels): `new_stride` apart, channels contiguous
    new_stride,
    ring_ptr,  # ring of this row, (RING, CHANNELS)
    weight_ptr,  # (CHANNELS, K)
    bias_ptr,  # (CHANNELS,), or anything where HAS_BIAS is false
    seen,
    count,
    t,  # (BLOCK_T,): which of the new tokens; consecutive
    channel,  # (BLOCK_C,)
    channel_ok,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """
    (BLOCK_T, BLOCK_C) float32: activation(bias + sum_k weight_k input_{t - K + 1 + k}) for the tokens t < count; zero
    inputs stand before the sequence's start and behind `count`, so the tile is finite everywhere.
    """
    taps = _taps(weight_ptr, channel, channel_ok, K, BLOCK_C)
    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for k in tl.static_range(K):
        i = t + (k - (K - 1))  # counted from the first new token
        taken = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if k < K - 1:
            # A token before the first new one comes from the ring; `seen + i` is its number in the sequence.
            old = (i < 0) & (seen + i >= 0)
            slot = tl.where(old, seen + i, 0) % RING
            taken += tl.load(
                ring_ptr + slot[:, None] * CHANNELS + channel[None, :],
                mask=old[:, None] & channel_ok[None, :],
                other=0.0,
            ).to(tl.float32)
        if k > K - 1 - BLOCK_T:  # this tap reaches new tokens
            taken += tl.load(
                new_ptr + i[:, None] * new_stride + channel[None, :],
                mask=((i >= 0) & (i < count))[:, None] & channel_ok[None, :],
                other=0.0,
            ).to(tl.float32)
        acc += taken * taps[k].to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=channel_ok, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = silu(acc)
    return acc


@triton.jit
def record(
    new_ptr,
    new_stride,
    ring_ptr,
    seen,
    count,
    t,
    channel,
    channel_ok,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    REUSES_SLOTS: tl.constexpr,  # whether new tokens may take the slots of history that `convolve` has just read
):
    """Takes the raw inputs up into the ring (the newest RING of them). To be called after `convolve`."""
    keep = ((t < count) & (t >= count - RING))[:, None] & channel_ok[None, :]
    raw = tl.load(new_ptr + t[:, None] * new_stride + channel[None, :], mask=keep, other=0.0)
    if REUSES_SLOTS:
        tl.debug_barrier()
    slot = (seen + t) % RING
    tl.store(ring_ptr + slot[:, None] * CHANNELS + channel[None, :], raw.to(ring_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["batch", "T", "t0"])
def _causal_conv_kernel(
    positions_ptr,
    new_ptr,  # (batch, T, CHANNELS)
    ring_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # (batch, T, CHANNELS)
    batch,
    stride_b,
    stride_t,
    T,
    t0,  # the first new token of this launch
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    REUSES_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    seen = tl.load(positions_ptr + b)
    count = tl.load(positions_ptr + 3 * batch + b)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = channel < CHANNELS
    row_ptr = new_ptr + b * stride_b
    row_ring_ptr = ring_ptr + b * (RING * CHANNELS)
    t = t0 + tl.arange(0, BLOCK_T)
    out = convolve(row_ptr, stride_t, row_ring_ptr, weight_ptr, bias_ptr, seen, count, t, channel, ok,
                   CHANNELS, RING, K, HAS_BIAS, SILU, BLOCK_T, BLOCK_C)  # fmt: skip
    record(row_ptr, stride_t, row_ring_ptr, seen, count, t, channel, ok, CHANNELS, RING, REUSES_SLOTS)
    tl.store(
        out_ptr + b * (T * CHANNELS) + t[:, None] * CHANNELS + channel[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(t < T)[:, None] & ok[None, :],
    )


def check_conv(
    inputs: torch.Tensor,
    conv_inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> bool:
    """Whether the activation is SiLU (otherwise there is none). `ValueError` for what does not fit together."""
    batch, _, channels = inputs.shape
    check("conv_weight", weight, (channels, None), like=inputs)
    check_owned("conv_inputs", conv_inputs, (batch, None, channels), like=inputs)
    check_same_dtype("conv_inputs", conv_inputs, inputs, "the new inputs")
    if bias is not None:
        check("conv_bias", bias, (channels,), like=inputs)
    if conv_inputs.shape[1] < weight.shape[1]:
        raise ValueError(f"conv_inputs has {conv_inputs.shape[1]} slots; the kernel size {weight.shape[1]} is needed.")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation is 'silu' (or 'swish') or None, not {activation!r}.")
    return activation is not None


class Convolution(NamedTuple):
    """What the kernels of a recurrence take of the convolution in front: shapes as for [`causal_conv`]."""

    ring: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool

    @classmethod
    def of(cls, conv_inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> Convolution:
        return cls(conv_inputs, weight.contiguous(), None if bias is None else bias.contiguous(), silu)


def causal_conv(
    positions: torch.Tensor,
    inputs: torch.Tensor,
    conv_inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """
    The depthwise causal convolution of t new tokens behind their history, which takes them up.

    Args:
        positions (5, b) int32, see `_positions.py`: SEEN and COUNT are read.
        inputs (b, t, c): raw. conv_inputs (b, r, c): ring of earlier raw inputs, token m in slot m % r; contiguous,
            written, r >= K. weight (c, K). bias (c,) or None. activation: "silu" (or "swish"), or None.

    Returns: (b, t, c) in the dtype of `inputs`; sums are float32. From a row's COUNT on it is unspecified.
    """
    check("inputs", inputs, (None, None, None), inputs)
    check_positions(positions, inputs.shape[0], inputs)
    return _conv_op(
        positions, inputs, conv_inputs, weight, bias, check_conv(inputs, conv_inputs, weight, bias, activation)
    )


def _conv(
    positions: torch.Tensor,
    inputs: torch.Tensor,
    conv_inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    batch, tokens, channels = inputs.shape
    out = inputs.new_empty((batch, tokens, channels))
    if out.numel() == 0:
        return out
    inputs = rows_contiguous(inputs)
    bias = None if bias is None else bias.contiguous()
    kernel, ring = weight.shape[1], conv_inputs.shape[1]
    block_t = min(next_power_of_2(tokens), PIECE)
    block_c = max(16, min(1024 // block_t, 256, next_power_of_2(channels)))
    with on_device_of(inputs):
        for t0 in range(0, tokens, block_t):  # one after the other: later pieces may take slots that earlier ones read
            _causal_conv_kernel[(cdiv(channels, block_c), batch)](
                positions, inputs, conv_inputs, weight.contiguous(), positions if bias is None else bias, out, batch,
                inputs.stride(0), inputs.stride(1), tokens, t0, CHANNELS=channels, RING=ring, K=kernel,
                HAS_BIAS=bias is not None, SILU=silu, REUSES_SLOTS=ring < kernel - 1 + tokens, BLOCK_T=block_t,
                BLOCK_C=block_c, num_warps=max(1, min(4, block_t * block_c // 256)),
            )  # fmt: skip
    return out


_conv_op = define(
    "causal_conv",
    _conv,
    mutates=("conv_inputs",),
    fake=lambda positions, inputs, *args: inputs.new_empty(inputs.shape),
)
