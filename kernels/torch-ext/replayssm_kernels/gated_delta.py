"""
Decoding of Gated DeltaNet and Kimi Delta Attention (KDA) with replay: the public functions. They check their arguments
and call torch custom operators, which choose a launch configuration and launch the kernels of
`_gated_delta_kernels.py`.

Letters in the shapes: b batch, t new tokens, h value heads, m key heads (each serves h / m value heads, blocked: key
head = head // (h / m)), k channels of a key, v channels of a value, s buffer slots, r slots of the ring of raw inputs,
c = 2 m k + h v channels of the convolution, K its kernel size. [, k] is there for KDA only.
"""

from __future__ import annotations

import functools

import torch

from ._configs import Config, Tile, fit
from ._conv import PIECE, Convolution, check_conv
from ._gated_delta_kernels import _append_kernel, _fold_kernel, _step_kernel, _window_kernel
from ._launch import (
    as_int32,
    can_limit_registers,
    cdiv,
    check,
    check_checkpoint,
    check_options,
    check_owned,
    check_positions,
    check_same_dtype,
    launch_options,
    next_power_of_2,
    on_device_of,
    rows_contiguous,
)
from ._operators import define
from ._overlap import can_overlap


def gated_delta_step(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """
    Appends t new tokens to the buffer and returns their outputs; rows that are told to fold some of their oldest
    tokens into the checkpoint. For one token this is a decode step, for more a window of drafts.

    Args:
        positions: (5, b) int32, see `_positions.py`. Everything in it is read on the device.
        q (b, t, m, k), k (b, t, m, k), v (b, t, h, v): of the new tokens, as they leave the convolution: q and k are
            normalised here, and q scaled by k^-1/2.
        g (b, t, h[, k]): final log decay, <= 0. beta (b, t, h): final. Both of any dtype, computed with in float32.
        k_buffer (b, m, s, k), u_buffer (b, h, s, v) float32, g_buffer (b, h, s[, k]) float32: the buffer, contiguous;
            written. It needs s >= HELD + COUNT slots in every row. k in it is raw.
        checkpoint (b, h, k, v): contiguous, float32, bfloat16, float16, or with `scale` int8 or float8_e4m3fn; rows
            with FOLD > 0 are written.
        out_dtype: of the result; that of `v` by default.
        scale (b, h, 1, v): contiguous, float32: what each column of a checkpoint of 8 bits is times. Written with it.
        seed: of stochastic rounding of what is written to the checkpoint, an integer below 2^32; None: to nearest.

    Returns: y (b, t, h, v). Sums are float32. Tokens from a row's COUNT on are not appended and their output is
    unspecified.

    Raises:
        ValueError: shapes, dtypes, layouts or devices that do not fit together.
    """
    _check_buffers(positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)
    batch, heads, key_dim, value_dim = checkpoint.shape
    key_heads = k_buffer.shape[1]
    check("q", q, (batch, None, key_heads, key_dim), checkpoint)
    tokens = q.shape[1]
    check("k", k, (batch, tokens, key_heads, key_dim), checkpoint)
    check("v", v, (batch, tokens, heads, value_dim), checkpoint)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_same_dtype(name, tensor, k_buffer, "k_buffer")
    _check_gates(g, beta, tokens, g_buffer, checkpoint)
    check_options(tokens, out_dtype)
    return _step_op(positions, q, k, v, g, beta, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed, out_dtype)


def gated_delta_decode(
    positions: torch.Tensor,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_inputs: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    *,
    activation: str | None = "silu",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """
    [`gated_delta_step`] with the causal convolution and its activation in front.

    Args:
        qkv (b, t, c): raw, channels in the order q of all key heads, k of all key heads, v of all value heads.
        conv_inputs (b, r, c): ring of the raw inputs of earlier tokens, indexed by a token's number modulo r;
            contiguous and written. It needs r >= K slots.
        conv_weight (c, K), conv_bias (c,) or None. activation: "silu" (or "swish"), or None.
        The others as for [`gated_delta_step`].

    Returns: y (b, t, h, v).
    """
    _check_buffers(positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)
    batch, heads, key_dim, value_dim = checkpoint.shape
    channels = 2 * k_buffer.shape[1] * key_dim + heads * value_dim
    check("qkv", qkv, (batch, None, channels), checkpoint)
    check_same_dtype("qkv", qkv, k_buffer, "k_buffer")
    tokens = qkv.shape[1]
    silu = check_conv(qkv, conv_inputs, conv_weight, conv_bias, activation)
    _check_gates(g, beta, tokens, g_buffer, checkpoint)
    check_options(tokens, out_dtype)
    return _decode_op(positions, qkv, g, beta, conv_inputs, conv_weight, conv_bias, k_buffer, u_buffer, g_buffer,
                      checkpoint, silu, scale, seed, out_dtype)  # fmt: skip


def gated_delta_fold(
    positions: torch.Tensor,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    *,
    inplace: bool = False,
    scale: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """
    The state after the FOLD oldest tokens of each row's buffer. COUNT is not read, and HELD only with `seed`.

    Args: as for [`gated_delta_step`].
        inplace: write it to the checkpoint of the rows with FOLD > 0 instead (a flush), and return the checkpoint.

    Returns: (b, h, k, v) float32; with `inplace` the checkpoint.
    """
    _check_buffers(positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)
    if inplace:
        _flush_op(positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)
        return checkpoint
    return _fold_op(positions, k_buffer, u_buffer, g_buffer, scale, checkpoint)


def _check_buffers(positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed) -> None:
    batch, heads, key_dim, value_dim = check_checkpoint(checkpoint, 4, -2, scale, seed)
    check_positions(positions, batch, checkpoint)
    check_owned("k_buffer", k_buffer, (batch, None, None, key_dim), checkpoint)
    key_heads, slots = k_buffer.shape[1:3]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{heads} value heads cannot be shared out evenly among the {key_heads} heads of k_buffer.")
    check_owned("u_buffer", u_buffer, (batch, heads, slots, value_dim), checkpoint)
    check_owned("g_buffer", g_buffer, (batch, heads, slots, *((key_dim,) if g_buffer.dim() == 4 else ())), checkpoint)
    for name, buffer in (("u_buffer", u_buffer), ("g_buffer", g_buffer)):
        if buffer.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, not {buffer.dtype}: what is rounded there stays in the state.")


def _check_gates(g, beta, tokens, g_buffer, checkpoint) -> None:
    batch, heads = g_buffer.shape[:2]
    check("g", g, (batch, tokens, heads, *g_buffer.shape[3:]), checkpoint)
    check("beta", beta, (batch, tokens, heads), checkpoint)


# How the kernels are launched. Of a `Tile` block_p are columns of the state (of V) and `columns` rows of it (of K) at a
# time; with `state` "keep" a flush does not read the state again.

OVERRIDE: Config | None = None  # for tuning


@functools.cache
def _config(
    heads: int, key_dim: int, value_dim: int, slots: int, tokens: int, per_channel: bool, scaled: bool
) -> Config:
    """`heads`: of the whole batch. (From `benchmark_gated_delta.py --tune` on an H200.)"""
    append_warps = 2 if heads < 1024 else 1
    evict = "" if per_channel and heads >= 2048 else "evict_first"
    if tokens > 1:
        # (A longer buffer takes more than one turn anyway: of 16 places more of them are full.)
        tile = Tile(64, 4 if heads < 1024 else 2, 32, slots=32 if slots <= 32 or per_channel else 16)
        append_warps = 2 if heads < 2048 else 1
    elif per_channel:
        tile = Tile(32, 1, 32, evict, state="keep")
    else:
        # (A state of 8 bits is cheap to read again; kept, it would be spilled as the float32 numbers that it becomes.)
        state = "again" if scaled else "keep"
        few_warps = 128 <= heads < 2048
        tile = Tile(32, 1 if few_warps else 2, 32, evict, state=state, registers=0 if few_warps else 128)
    return Config(
        fit(tile, value_dim, key_dim, tuned_for=128),
        append_warps=append_warps,
        ahead=2**23 if tokens == 1 and not per_channel and heads >= 4096 else 0,
    )


def _fold_tile(key_dim: int, value_dim: int) -> Tile:
    """For a flush alone."""
    return fit(Tile(64, 4, 32, slots=32), value_dim, key_dim, tuned_for=128)


def _tile_sizes(tile: Tile, key_dim: int, slots: int) -> tuple[int, int, int, int]:
    """BLOCK_V, BLOCK_K, BLOCK_J, ROWS."""
    block_k = max(next_power_of_2(key_dim), 16)
    return tile.block_p, block_k, min(max(next_power_of_2(slots), 16), tile.slots), min(block_k, tile.columns)


# The operators.


def _step(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    scale: torch.Tensor | None,
    seed: int | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    y = v.new_empty(v.shape, dtype=out_dtype or v.dtype)
    _launch(positions, rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), g, beta, None, k_buffer, u_buffer,
            g_buffer, checkpoint, scale, seed, y)  # fmt: skip
    return y


def _decode(
    positions: torch.Tensor,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_inputs: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    silu: bool,
    scale: torch.Tensor | None,
    seed: int | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    y = qkv.new_empty((*qkv.shape[:2], u_buffer.shape[1], u_buffer.shape[3]), dtype=out_dtype or qkv.dtype)
    conv = Convolution.of(conv_inputs, conv_weight, conv_bias, silu)
    _launch(positions, rows_contiguous(qkv), None, None, g, beta, conv, k_buffer, u_buffer, g_buffer, checkpoint, scale,
            seed, y)  # fmt: skip
    return y


def _launch(positions, q, k, v, g, beta, conv, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed, y) -> None:
    """One call of step (`q`, `k`, `v` given) or of decode (`conv` given; `q` holds the raw inputs)."""
    if y.numel() == 0:
        return
    batch, tokens, heads, value_dim = y.shape
    key_heads, slots, key_dim = k_buffer.shape[1:]
    per_channel = g_buffer.dim() == 4
    if per_channel:
        g = rows_contiguous(g)
    config = OVERRIDE or _config(batch * heads, key_dim, value_dim, slots, tokens, per_channel, scale is not None)
    if conv:
        v = q.new_empty((batch, tokens, heads, value_dim))  # behind the convolution
    ring, taps = (conv.ring.shape[1], conv.weight.shape[1]) if conv else (1, 1)
    storage = scale, as_int32(seed)
    unused = positions  # stands where a pointer is not read
    # Arguments go by position: with fifty of them, names cost the host more than the launch.
    conv_tensors = (
        conv.ring if conv else unused,
        conv.weight if conv else unused,
        conv.bias if conv and conv.bias is not None else unused,
    )
    q_strides = (q.stride(0), q.stride(1), 0 if conv else q.stride(2))
    k_strides = (0, 0, 0) if conv else k.stride()[:3]
    v_strides = (0, 0, 0) if v is None else v.stride()[:3]
    g_strides, beta_strides = g.stride()[:3], beta.stride()
    sizes = (key_heads, heads, key_dim, value_dim, slots, per_channel)
    has_bias, silu = conv is not None and conv.bias is not None, conv is not None and conv.silu
    how = _tile_sizes(config.tile, key_dim, slots)
    block_k = how[1]
    tiles = (batch * heads * cdiv(value_dim, config.tile.block_p),)
    k, v = unused if k is None else k, unused if v is None else v

    with on_device_of(checkpoint):
        overlaps = config.overlap and can_overlap(checkpoint.device)
        ahead = min(checkpoint.numel() * checkpoint.element_size(), config.ahead) // 2**14 if overlaps else 0
        block_t = 1 if tokens == 1 else min(max(next_power_of_2(tokens), 8), PIECE)
        # (With a convolution a program holds all its taps: 2048 channels of 8 tokens would not fit into registers.)
        block_c = config.append_block if tokens == 1 else min(config.append_block, max(2048 // block_t, 64))
        kq_shape = (batch, heads if per_channel else key_heads, 2 * tokens, key_dim)
        kq = q.new_empty(kq_shape, dtype=torch.float32 if per_channel else q.dtype)
        scores = torch.empty((batch, heads, 2 * tokens, slots + 1), dtype=torch.float32, device=y.device)
        # (With a decay of each channel all sums over tokens are within a thread, if a warp has whole rows.)
        block_j = 4 if per_channel and tokens == 1 else 16
        append_warps = 1 if per_channel else config.append_warps
        # (A window of KDA has few operations for each number: more programs at a time are worth a few spilled numbers.)
        limited = {}
        if per_channel and 1 < block_t <= 8 and conv is None and can_limit_registers(checkpoint.device):
            limited["maxnreg"] = 128
        grid = (key_heads + (cdiv(heads * value_dim, block_c) if conv else 0), batch)
        for t0 in range(0, tokens, block_t):  # one after the other, since a piece needs the u of the one before
            _append_kernel[grid](
                positions, q, k, v, g, *conv_tensors, k_buffer, g_buffer, kq, scores, checkpoint, batch, *q_strides,
                *k_strides, *g_strides, tokens, t0, ahead, *sizes, conv is not None, ring, taps, has_bias, silu,
                ring < taps - 1 + tokens, block_t, block_k, block_j, next_power_of_2(heads // key_heads), block_c,
                overlaps, ahead > 0, num_warps=append_warps, **limited,
            )  # fmt: skip
            if tokens == 1:
                _step_kernel[tiles](
                    positions, v, beta, k_buffer, u_buffer, g_buffer, kq, scores, checkpoint, y, batch, *v_strides[::2],
                    *beta_strides[::2], *storage, *sizes, *how, config.tile.evict, overlaps,
                    config.tile.state == "stream", config.tile.state == "keep",
                    **launch_options(config.tile, y.device, overlaps),
                )  # fmt: skip
            else:
                _window_kernel[tiles](
                    positions, v, beta, k_buffer, u_buffer, g_buffer, kq, scores, checkpoint, y, batch, *v_strides,
                    *beta_strides, tokens, t0, *storage, *sizes, block_t, *how, config.tile.evict, overlaps,
                    can_overlap(checkpoint.device), tokens <= block_t,
                    **launch_options(config.tile, y.device, overlaps),
                )  # fmt: skip
        if tokens > block_t:
            _launch_fold(checkpoint, positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)


def _launch_fold(out, positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed) -> None:
    """Into `out`; where that is the checkpoint, of rows that fold anything."""
    batch, heads, key_dim, value_dim = checkpoint.shape
    key_heads, slots = k_buffer.shape[1:3]
    tile = _fold_tile(key_dim, value_dim)
    with on_device_of(checkpoint):
        _fold_kernel[(batch * heads * cdiv(value_dim, tile.block_p),)](
            positions, checkpoint, k_buffer, u_buffer, g_buffer, out, batch, scale, as_int32(seed), key_heads, heads,
            key_dim, value_dim, slots, g_buffer.dim() == 4, out is checkpoint, *_tile_sizes(tile, key_dim, slots),
            **launch_options(tile, out.device),
        )  # fmt: skip


def _fold(
    positions: torch.Tensor,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    scale: torch.Tensor | None,
    checkpoint: torch.Tensor,
) -> torch.Tensor:
    out = torch.empty_like(checkpoint, dtype=torch.float32)
    if out.numel() > 0:
        _launch_fold(out, positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, None)
    return out


def _flush(
    positions: torch.Tensor,
    k_buffer: torch.Tensor,
    u_buffer: torch.Tensor,
    g_buffer: torch.Tensor,
    checkpoint: torch.Tensor,
    scale: torch.Tensor | None,
    seed: int | None,
) -> None:
    if checkpoint.numel() > 0:
        _launch_fold(checkpoint, positions, k_buffer, u_buffer, g_buffer, checkpoint, scale, seed)


_step_op = define(
    "gated_delta_step",
    _step,
    mutates=("k_buffer", "u_buffer", "g_buffer", "checkpoint", "scale"),
    fake=lambda positions, q, k, v, *args: v.new_empty(v.shape, dtype=args[-1] or v.dtype),
)
_decode_op = define(
    "gated_delta_decode",
    _decode,
    mutates=("conv_inputs", "k_buffer", "u_buffer", "g_buffer", "checkpoint", "scale"),
    fake=lambda positions, qkv, g, beta, conv_inputs, weight, bias, k_buffer, u_buffer, *args: qkv.new_empty(
        (*qkv.shape[:2], u_buffer.shape[1], u_buffer.shape[3]), dtype=args[-1] or qkv.dtype
    ),
)
_fold_op = define(
    "gated_delta_fold",
    _fold,
    mutates=(),
    fake=lambda *args: torch.empty_like(args[-1], dtype=torch.float32),
)
_flush_op = define("gated_delta_flush", _flush, mutates=("checkpoint", "scale"), fake=lambda *args: None)
