"""
Gated DeltaNet and Kimi Delta Attention from a checkpoint and a buffer: decode steps, windows of drafts, and flushes.

For a row and a value head, S0 the checkpoint (K x V), tokens counted from the oldest in the buffer, G_t the sum of g up
to t (a number, or for KDA one per key channel), k and q of unit length, q scaled by K^-1/2:

    u_t = beta_t (v_t - S0^T (exp(G_t) k_t) - sum_{j<t} (k_j . exp(G_t - G_j) k_t) u_j)
    y_t = S0^T (exp(G_t) q_t) + sum_{j<=t} (k_j . exp(G_t - G_j) q_t) u_j                                  (output)
    S_f = exp(G_f) S0 + sum_{j<=f} (exp(G_f - G_j) k_j) u_j^T                                              (flush)

Everything is a matter of one column of V at a time, but for the *scores*, the products of two keys or of a key and a
query with the decay between them. A call reads the state once, against k and q of all new tokens.

Two launches do a call: `_append_kernel` (convolution, append of k and g, the scores, once for each key head) and
`_step_kernel` (one token) or `_window_kernel` (more), which finds u and appends it. A flush reads the state again,
piece after piece, or takes it from the registers that a step has it in. Behind a window of several pieces it is left to
`_fold_kernel`.

Layouts: checkpoint (batch, value head, K, V); k (batch, key head, slot, K) raw, u (batch, value head, slot, V) float32,
g (batch, value head, slot) or for KDA (batch, value head, slot, K), float32; the ring of raw inputs (batch, ring,
channels), channels being q of all key heads, k of all key heads, v of all value heads. From one launch to the next go
rows 2t (of k_t) and 2t + 1 (of q_t): `kq`, and `scores` with a place of the buffer in each column, in the last column
what the product with the state is to be multiplied by. Tokens of the buffer are gone through from the newest to the
oldest, since a token decays with those behind it: sums over them then need no order reversed, which a warp can only do
by passing every number on.

u gets into the state: every sum that it depends on has float32 accuracy, k is normalised in float32 whenever it is
read, and a flush takes the very u of the token's output. Exponents are formed for pairs of tokens, from sums of g that
are counted from the newer one backwards: no cancellation, and never above 0. (Between a window and the tokens before it
there are two factors, of what decays on either side of their border.)

A checkpoint of 8 bits has a float32 scale for each column of V, (batch, value head, V): a product with a column takes
it once, behind the sum over K. A flush finds the greatest number of each of its columns first, and then rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._arithmetic import dot_float32, dot_float32_by_16bit
from ._conv import convolve, record
from ._overlap import may_start_next, prefetch, wait_for_previous
from ._positions import ring_slot, row_positions
from ._rounding import absolute_bits, as_float32, load_scale, random_keys, rounded, store_scale


EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _inverse_length(squares):
    """Of a vector with this sum of squares. (The units give 22 bits, a step of Newton's method the rest.)"""
    squares += EPS
    inverse = tl.rsqrt(squares)
    # (0 of an infinite sum, as in upstream's modules: there the step would make NaN.)
    return tl.where(inverse == 0.0, 0.0, inverse * (1.5 - (0.5 * squares * inverse) * inverse))


@triton.jit
def _decay(exponent):
    # (exp would see to results below 2^-126, at twice the operations. NaN stays NaN.)
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)


@triton.jit
def _interleave(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of two (ROWS, COLUMNS) in turns: (2 ROWS, COLUMNS)."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (2 * ROWS, COLUMNS))


@triton.jit
def _tile(tile, HV: tl.constexpr, HK: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Row, value head, key head and columns of the head's state (BLOCK_V,) of a tile."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row_head = tile // BLOCKS
    h = row_head % HV
    return (row_head // HV).to(tl.int64), h, h // (HV // HK), (tile % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)


@triton.jit
def _prefetch_rows(row_ptr, row, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The columns of this program's tile of some rows (R,) of (rows, V) are on their way into the L2 cache."""
    LINE: tl.constexpr = 1024 // row_ptr.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    v = (tl.program_id(0) % BLOCKS) * BLOCK_V
    for line in tl.static_range((BLOCK_V + LINE - 1) // LINE):
        prefetch(row_ptr + row * V + tl.minimum(v + line * LINE, V - 1))


@triton.jit
def _keys(place, end, first, c, k_row_ptr, K: tl.constexpr, SLOTS: tl.constexpr):
    """Keys (J, BLOCK_K) float32 at some places, zeros where these are not in 0 .. end-1, and inverse lengths (J,)."""
    k = _buffered_k(place, end, first, c, k_row_ptr, K, SLOTS).to(tl.float32)
    return k, _inverse_length(tl.sum(k * k, axis=1))


@triton.jit
def _buffered_k(place, end, first, c, k_row_ptr, K: tl.constexpr, SLOTS: tl.constexpr):
    """Keys (J, channels) at some places as they are stored, zeros where these are not in 0 .. end-1."""
    used = (place >= 0) & (place < end)
    slot = ring_slot(first, tl.where(used, place, 0), SLOTS)
    # Masked loads do not touch memory: whatever unused slots hold (NaN included) is never seen.
    return tl.load(k_row_ptr + slot[:, None] * K + c[None, :], mask=used[:, None] & (c < K)[None, :], other=0.0)


@triton.jit
def _next_g(place, end, first, g_row_ptr, SLOTS: tl.constexpr):
    """g (J,) of the place behind each, where both are in 0 .. end-1; zeros elsewhere."""
    after = (place >= 0) & (place + 1 < end)
    slot = ring_slot(first, tl.where(after, place + 1, 0), SLOTS)
    return tl.load(g_row_ptr + slot, mask=after, other=0.0)


@triton.jit
def _next_g_channels(place, end, first, c, g_row_ptr, K: tl.constexpr, SLOTS: tl.constexpr):
    """The same for KDA: (J, channels)."""
    after = (place >= 0) & (place + 1 < end)
    slot = ring_slot(first, tl.where(after, place + 1, 0), SLOTS)
    return tl.load(g_row_ptr + slot[:, None] * K + c[None, :], mask=after[:, None] & (c < K)[None, :], other=0.0)


@triton.jit
def _scores(place, new, first, elapsed, g, k, q, c, k_row_ptr, g_row_ptr, K: tl.constexpr, SLOTS: tl.constexpr,
            PER_CHANNEL: tl.constexpr):  # fmt: skip
    """
    Of one token, at place `new`, with the tokens at some places before it, the newest first: k_j . decay k and
    k_j . decay q, (J,) each; and `elapsed`, the sum of g over the places behind the one behind these, with theirs.
    """
    past, inverse = _keys(place, new, first, c, k_row_ptr, K, SLOTS)
    last = (place >= 0) & (place + 1 == new)
    if PER_CHANNEL:
        behind = tl.where(last[:, None], g[None, :], _next_g_channels(place, new, first, c, g_row_ptr, K, SLOTS))
        past *= _decay(tl.cumsum(behind, axis=0) + elapsed[None, :])
    else:
        behind = tl.where(last, g, _next_g(place, new, first, g_row_ptr, SLOTS))
        inverse *= _decay(tl.cumsum(behind, axis=0) + elapsed)
    by_k = tl.sum(past * k[None, :], axis=1) * inverse
    by_q = tl.sum(past * q[None, :], axis=1) * inverse
    return by_k, by_q, elapsed + tl.sum(behind, axis=0)


@triton.jit
def _total(elapsed, new, first, g, c, g_row_ptr, K: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """The sum of g from the oldest place to the token at place `new`, from `elapsed` over all but the oldest."""
    if PER_CHANNEL:
        oldest = tl.load(g_row_ptr + first * K + c, mask=c < tl.where(new > 0, K, 0), other=0.0)
    else:
        oldest = tl.load(g_row_ptr + first, mask=new > 0, other=0.0)
    return elapsed + tl.where(new > 0, oldest, g)


@triton.jit(do_not_specialize=["batch", "T", "t0", "ahead"])
def _append_kernel(
    positions_ptr,  # (5, batch)
    q_ptr,  # CONV: raw inputs (batch, T, channels); else q (batch, T, key head, K)
    k_ptr,  # (batch, T, key head, K); unused with CONV
    v_ptr,  # (batch, T, value head, V), written with CONV; unused without
    g_ptr,  # (batch, T, value head), or (batch, T, value head, K)
    ring_ptr,  # (batch, RING, channels), with CONV
    weight_ptr,  # (channels, TAPS), with CONV
    conv_bias_ptr,
    k_buffer_ptr,
    g_buffer_ptr,
    kq_ptr,  # (batch, key head, 2 T, K) raw; for KDA (batch, value head, 2 T, K) float32: normalised and decayed
    scores_ptr,  # (batch, value head, 2 T, SLOTS + 1)
    checkpoint_ptr,  # with AHEAD
    batch,
    q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_t, k_stride_h,
    g_stride_b, g_stride_t, g_stride_h,
    T,
    t0,  # the first new token of this launch
    ahead,  # with AHEAD: blocks of 16 KiB, from the start of the checkpoint
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    CONV: tl.constexpr,
    RING: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    REUSES_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_R: tl.constexpr,  # value heads of a key head, a power of 2
    BLOCK_C: tl.constexpr,
    STARTS: tl.constexpr,  # the next launch early
    AHEAD: tl.constexpr,  # the L2 cache is asked for what that reads first
):  # fmt: skip
    if STARTS:
        may_start_next()
    # Programs 0 .. HK-1 of a row: k, q, g and scores of a key head. The others, with CONV: BLOCK_C channels of v each.
    unit = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    count = tl.minimum(count, T)
    token = tl.arange(0, BLOCK_T)
    t = t0 + token
    real = t < count
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    new_ptr = q_ptr + b * q_stride_b
    row_ring_ptr = ring_ptr + b * (RING * CHANNELS)
    seen = tl.load(positions_ptr + b)

    if unit >= HK:
        if CONV:
            channel = (unit - HK) * BLOCK_C + tl.arange(0, BLOCK_C)
            ok = channel < HV * V
            v = convolve(new_ptr, q_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t,
                         2 * HK * K + channel, ok, CHANNELS, RING, TAPS, HAS_CONV_BIAS, SILU, BLOCK_T,
                         BLOCK_C)  # fmt: skip
            record(new_ptr, q_stride_t, row_ring_ptr, seen, count, t, 2 * HK * K + channel, ok, CHANNELS, RING,
                   REUSES_SLOTS)  # fmt: skip
            at = v_ptr + b * (T * (HV * V)) + t[:, None] * (HV * V) + channel[None, :]
            tl.store(at, v.to(v_ptr.dtype.element_ty), mask=(t < T)[:, None] & ok[None, :])
        return

    m = unit
    if AHEAD:
        # (This launch leaves the memory little to do. A larger part of the state would push out of the cache what is in
        # use; asked for by the next launch, of later programs, it was slower.)
        line = tl.cast(checkpoint_ptr, tl.int64) + tl.arange(0, 128) * 128
        for block in range(tl.program_id(1) * HK + m, ahead, batch * HK):
            prefetch(line + block * (128 * 128))
    c = tl.arange(0, BLOCK_K)
    if PER_CHANNEL:
        c = tl.max_contiguous(c, 4)
    c_ok = c < K
    tile_ok = real[:, None] & c_ok[None, :]
    dtype = k_buffer_ptr.dtype.element_ty
    if CONV:
        # Rounded to the activation dtype, as a convolution that stores its result does.
        q_channel = m * K + c
        k_channel = q_channel + HK * K
        q = convolve(new_ptr, q_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, q_channel, c_ok,
                     CHANNELS, RING, TAPS, HAS_CONV_BIAS, SILU, BLOCK_T, BLOCK_K).to(dtype)  # fmt: skip
        k = convolve(new_ptr, q_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, k_channel, c_ok,
                     CHANNELS, RING, TAPS, HAS_CONV_BIAS, SILU, BLOCK_T, BLOCK_K).to(dtype)  # fmt: skip
        q = tl.where(tile_ok, q, 0.0)
        k = tl.where(tile_ok, k, 0.0)
        record(new_ptr, q_stride_t, row_ring_ptr, seen, count, t, q_channel, c_ok, CHANNELS, RING, REUSES_SLOTS)
        record(new_ptr, q_stride_t, row_ring_ptr, seen, count, t, k_channel, c_ok, CHANNELS, RING, REUSES_SLOTS)
    else:
        # (Whether a token counts is asked of the values, so that their loads need not wait for the row's positions.)
        there = (t < T)[:, None] & c_ok[None, :]
        q = tl.load(new_ptr + t[:, None] * q_stride_t + m * q_stride_h + c[None, :], there, other=0.0)
        at = k_ptr + b * k_stride_b + t[:, None] * k_stride_t + m * k_stride_h + c[None, :]
        k = tl.load(at, there, other=0.0)
        q = tl.where(real[:, None], q, 0.0)
        k = tl.where(real[:, None], k, 0.0)
    k_row_ptr = k_buffer_ptr + (b * HK + m) * (SLOTS * K)
    slot = ring_slot(first, tl.where(real, held + t, 0), SLOTS)
    tl.store(k_row_ptr + slot[:, None] * K + c[None, :], k, mask=tile_ok)
    wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
    k_scale = _inverse_length(tl.sum(wide_k * wide_k, axis=1))
    q_scale = _inverse_length(tl.sum(wide_q * wide_q, axis=1)) * K**-0.5
    PER_KEY_HEAD: tl.constexpr = HV // HK
    WIDTH: tl.constexpr = SLOTS + 1
    j = tl.arange(0, BLOCK_J)

    if PER_CHANNEL:
        for r in tl.static_range(PER_KEY_HEAD):
            h = m * PER_KEY_HEAD + r
            g_row_ptr = g_buffer_ptr + (b * HV + h) * (SLOTS * K)
            g = tl.load(g_ptr + b * g_stride_b + t[:, None] * g_stride_t + h * g_stride_h + c[None, :],
                        mask=(t < T)[:, None] & c_ok[None, :], other=0.0).to(tl.float32)  # fmt: skip
            g = tl.where(real[:, None], g, 0.0)
            tl.store(g_row_ptr + slot[:, None] * K + c[None, :], g, mask=tile_ok)
            row_scores_ptr = scores_ptr + (b * HV + h) * (2 * T * WIDTH)
            row_kq_ptr = kq_ptr + (b * HV + h) * (2 * T * K)
            if BLOCK_T == 1:
                new = tl.where(count > 0, held, 0)
                k_1 = tl.reshape(wide_k * k_scale[:, None], (BLOCK_K,))
                q_1 = tl.reshape(wide_q * q_scale[:, None], (BLOCK_K,))
                g_1 = tl.reshape(g, (BLOCK_K,))
                elapsed = tl.zeros((BLOCK_K,), tl.float32)
                blocks = (new + BLOCK_J - 1) // BLOCK_J
                for block in range(blocks):  # from the newest to the oldest, since a token decays with those behind it
                    place = new - 1 - block * BLOCK_J - j
                    by_k, by_q, elapsed = _scores(place, new, first, elapsed, g_1, k_1, q_1, c, k_row_ptr, g_row_ptr,
                                                  K, SLOTS, PER_CHANNEL)  # fmt: skip
                    tl.store(row_scores_ptr + place, by_k, mask=place >= 0)
                    tl.store(row_scores_ptr + WIDTH + place, by_q, mask=place >= 0)
                tl.store(row_scores_ptr + WIDTH + new, tl.sum(k_1 * q_1, axis=0))
                tl.store(row_scores_ptr + SLOTS, 1.0)
                tl.store(row_scores_ptr + WIDTH + SLOTS, 1.0)
                decay = _decay(_total(elapsed, new, first, g_1, c, g_row_ptr, K, PER_CHANNEL))
                tl.store(row_kq_ptr + c, k_1 * decay, mask=c_ok)
                tl.store(row_kq_ptr + K + c, q_1 * decay, mask=c_ok)
            else:
                # What decays between a new token and one before them all is split at their border: both factors are
                # at most 1, and the scores are products of matrices. Among the new ones each pair has its exponent.
                k_n, q_n = wide_k * k_scale[:, None], wide_q * q_scale[:, None]
                since = tl.cumsum(g, axis=0)
                if BLOCK_T <= 8:  # pair by pair, which leaves out those that see nothing of each other
                    for i in tl.static_range(BLOCK_T):
                        if t0 + i < count:
                            k_i, q_i = _row(k_n, token, i), _row(q_n, token, i)
                            pair_at = row_scores_ptr + 2 * (t0 + i) * WIDTH + held + t0
                            passed = _row(g, token, i)
                            tl.store(pair_at + WIDTH + i, tl.sum(k_i * q_i, axis=0))
                            for back in tl.static_range(i):
                                other = i - 1 - back
                                decayed = _row(k_n, token, other) * _decay(passed)
                                tl.store(pair_at + other, tl.sum(k_i * decayed, axis=0))
                                tl.store(pair_at + WIDTH + other, tl.sum(q_i * decayed, axis=0))
                                passed += _row(g, token, other)
                else:
                    for i in range(tl.minimum(count - t0, BLOCK_T)):  # (written out it would compile for minutes)
                        # (Summed for each pair: of differences of sums a large decay would leave no digits.)
                        passed = tl.cumsum(tl.where((token > i)[:, None], g, 0.0), axis=0)
                        decayed = _row(k_n, token, i)[None, :] * _decay(passed)
                        by_k, by_q = tl.sum(k_n * decayed, axis=1), tl.sum(q_n * decayed, axis=1)
                        pair_at = row_scores_ptr + 2 * t * WIDTH + held + t0 + i
                        tl.store(pair_at, by_k, mask=real & (token > i))
                        tl.store(pair_at + WIDTH, by_q, mask=real & (token >= i))
                # By way of memory, from which some channels at a time come as they are needed.
                decay = _decay(since)
                kq_at = row_kq_ptr + 2 * t[:, None] * K + c[None, :]
                kq_ok = (t < T)[:, None] & c_ok[None, :]
                tl.store(kq_at, k_n * decay, mask=kq_ok)
                tl.store(kq_at + K, q_n * decay, mask=kq_ok)
                tl.debug_barrier()
                row = 2 * t0 + tl.arange(0, 2 * BLOCK_T)
                row_ok = row < 2 * T
                before = held + tl.minimum(count, t0)  # those of earlier launches lie in the buffer, too
                _channel_scores(row_scores_ptr, row_kq_ptr, row, row_ok, before, first, k_row_ptr, g_row_ptr, K, SLOTS,
                                BLOCK_T, BLOCK_J)  # fmt: skip
    else:
        r = tl.arange(0, BLOCK_R)
        r_ok = r < PER_KEY_HEAD
        h = m * PER_KEY_HEAD + r
        before = held + tl.minimum(count, t0)  # those of earlier launches lie in the buffer, too
        row_g_ptr = g_buffer_ptr + (b * HV + h[:, None]) * SLOTS
        at = g_ptr + b * g_stride_b + t[None, :] * g_stride_t + h[:, None] * g_stride_h
        g = tl.load(at, mask=r_ok[:, None] & (t < T)[None, :], other=0.0).to(tl.float32)  # (R, T)
        g = tl.where(real[None, :], g, 0.0)
        # Where a block spans the buffer its loads are under way before all that follows.
        if SLOTS <= BLOCK_J:
            place = before - 1 - j
            past, next_g = _past(place, before, first, c, c_ok, r_ok, k_row_ptr, row_g_ptr, K, SLOTS)
        oldest_ptr = g_buffer_ptr + (b * HV + h) * SLOTS + first
        oldest_g = tl.load(oldest_ptr, mask=r < tl.where(before > 0, PER_KEY_HEAD, 0), other=0.0)
        tl.store(row_g_ptr + slot[None, :], g, mask=r_ok[:, None] & real[None, :])
        # What decays from each token to each one behind it. (Later ones have no part in the sum, whatever their g is.)
        next_ok = r_ok[:, None] & (real & (token + 1 < BLOCK_T) & (t + 1 < count))[None, :]
        behind = tl.load(at + g_stride_t, mask=next_ok, other=0.0).to(tl.float32)
        before_t = token[None, None, :] < token[None, :, None]  # (1, T, T): the later one, the earlier one
        between = _decay(tl.cumsum(tl.where(before_t, behind[:, None, :], 0.0), axis=2, reverse=True))

        kq = _interleave(k, q, BLOCK_T, BLOCK_K)
        scale = tl.reshape(tl.join(k_scale, q_scale), (2 * BLOCK_T,))
        row = tl.arange(0, 2 * BLOCK_T)
        row_ok = t0 + row // 2 < T
        kq_at = kq_ptr + ((b * HK + m) * (2 * T) + 2 * t[:, None]) * K + c[None, :]
        kq_ok = (t < T)[:, None] & c_ok[None, :]
        tl.store(kq_at, k.to(kq_ptr.dtype.element_ty), mask=kq_ok)
        tl.store(kq_at + K, q.to(kq_ptr.dtype.element_ty), mask=kq_ok)
        row_scores_ptr = scores_ptr + ((b * HV + h[:, None]) * (2 * T) + 2 * t0 + row[None, :]) * WIDTH
        scores_ok = r_ok[:, None] & row_ok[None, :]

        # The new tokens among themselves. (Of those behind a token nothing is read.)
        among = _products(kq, wide_k, k, BLOCK_T) * scale[:, None] * k_scale[None, :]  # (2 T, T)
        seen_by = (row[:, None] // 2 >= token[None, :]) & real[None, :]
        between = tl.permute(tl.join(between, between), (0, 1, 3, 2))  # (R, T, 2, T): for k and for q
        tl.store(
            row_scores_ptr[:, :, None] + (held + t)[None, None, :],
            among[None, :, :] * tl.reshape(between, (BLOCK_R, 2 * BLOCK_T, BLOCK_T)),
            mask=scores_ok[:, :, None] & seen_by[None, :, :],
        )
        # With those before them: what decays in between is split at their border, and both factors are at most 1.
        since = tl.cumsum(g, axis=1)
        by_row = _decay(tl.reshape(tl.join(since, since), (BLOCK_R, 2 * BLOCK_T))) * scale[None, :]
        elapsed = tl.zeros((BLOCK_R,), tl.float32)
        if SLOTS <= BLOCK_J:
            elapsed = _store_scores(row_scores_ptr, kq, by_row, past, next_g, elapsed, place, scores_ok, BLOCK_T)
        else:
            for block in range((before + BLOCK_J - 1) // BLOCK_J):
                place = before - 1 - block * BLOCK_J - j
                past, next_g = _past(place, before, first, c, c_ok, r_ok, k_row_ptr, row_g_ptr, K, SLOTS)
                elapsed = _store_scores(row_scores_ptr, kq, by_row, past, next_g, elapsed, place, scores_ok, BLOCK_T)
        tl.store(row_scores_ptr + SLOTS, _decay(elapsed + oldest_g)[:, None] * by_row, mask=scores_ok)


@triton.jit
def _channel_scores(row_scores_ptr, row_kq_ptr, row, row_ok, before, first, k_row_ptr, g_row_ptr, K: tl.constexpr,
                    SLOTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr):  # fmt: skip
    """
    KDA: stores the scores of rows (2 T,) of `kq`, decayed since their border with the `before` places of the buffer,
    with these places; then decays the rows over all of them, for the product with the state.
    """
    CHANNELS: tl.constexpr = 32  # at a time
    WIDTH: tl.constexpr = SLOTS + 1
    j = tl.arange(0, BLOCK_J)
    kq_at = row_kq_ptr + row[:, None] * K
    for block in range((before + BLOCK_J - 1) // BLOCK_J):
        place = before - 1 - block * BLOCK_J - j
        slot = ring_slot(first, tl.maximum(place, 0), SLOTS)
        products = tl.zeros((2 * BLOCK_T, BLOCK_J), tl.float32)
        squares = tl.zeros((BLOCK_J,), tl.float32)
        for c0 in tl.range(0, K, CHANNELS, num_stages=1):
            c = c0 + tl.arange(0, CHANNELS)
            elapsed = tl.zeros((CHANNELS,), tl.float32)
            for newer in range(block):
                newer_g = _next_g_channels(before - 1 - newer * BLOCK_J - j, before, first, c, g_row_ptr, K, SLOTS)
                elapsed += tl.sum(newer_g, axis=0)
            behind = _next_g_channels(place, before, first, c, g_row_ptr, K, SLOTS)
            past_ok = (place >= 0)[:, None] & (c < K)[None, :]
            past = tl.load(k_row_ptr + slot[:, None] * K + c[None, :], mask=past_ok, other=0.0).to(tl.float32)
            squares += tl.sum(past * past, axis=1)
            past *= _decay(tl.cumsum(behind, axis=0) + elapsed[None, :])
            kq = tl.load(kq_at + c[None, :], mask=row_ok[:, None] & (c < K)[None, :], other=0.0)
            products = dot_float32(kq, tl.trans(past), products)
        inverse = _inverse_length(squares)
        # (A key without a length may have products that are not finite.)
        products = tl.where((inverse == 0)[None, :], 0.0, products * inverse[None, :])
        at = row_scores_ptr + row[:, None] * WIDTH + place[None, :]
        tl.store(at, products, mask=row_ok[:, None] & (place >= 0)[None, :])
    ones = tl.full((2 * BLOCK_T,), 1.0, tl.float32)
    tl.store(row_scores_ptr + row * WIDTH + SLOTS, ones, mask=row_ok)
    tl.debug_barrier()
    for c0 in tl.range(0, K, CHANNELS, num_stages=1):
        c = c0 + tl.arange(0, CHANNELS)
        elapsed = tl.zeros((CHANNELS,), tl.float32)
        for block in range((before + BLOCK_J - 1) // BLOCK_J):
            place = block * BLOCK_J + j
            slot = ring_slot(first, tl.where(place < before, place, 0), SLOTS)
            g_ok = (place < before)[:, None] & (c < K)[None, :]
            elapsed += tl.sum(tl.load(g_row_ptr + slot[:, None] * K + c[None, :], mask=g_ok, other=0.0), axis=0)
        ok = row_ok[:, None] & (c < K)[None, :]
        kq = tl.load(kq_at + c[None, :], mask=ok, other=0.0)
        tl.store(kq_at + c[None, :], kq * _decay(elapsed)[None, :], mask=ok)


@triton.jit
def _row(x, token, i):
    """Row i of (T, K) float32: (K,). (As integers: adding zeros to them is left out where a thread has all tokens.)"""
    bits = tl.where((token == i)[:, None], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _past(place, before, first, c, c_ok, r_ok, k_row_ptr, row_g_ptr, K: tl.constexpr, SLOTS: tl.constexpr):
    """
    Keys (J, K) at some places below `before`, and g (R, J) of the places behind them; zeros where these are not in
    0 .. before-1.
    """
    used = place >= 0
    slot = ring_slot(first, tl.where(used, place, 0), SLOTS)
    past = tl.load(k_row_ptr + slot[:, None] * K + c[None, :], mask=used[:, None] & c_ok[None, :], other=0.0)
    next_used = used & (place + 1 < before)
    next_slot = ring_slot(first, tl.where(next_used, place + 1, 0), SLOTS)
    next_g = tl.load(row_g_ptr + next_slot[None, :], mask=r_ok[:, None] & next_used[None, :], other=0.0)
    return past, next_g


@triton.jit
def _store_scores(row_scores_ptr, kq, by_row, past, next_g, elapsed, place, scores_ok, BLOCK_T: tl.constexpr):
    """
    Of the new tokens with the keys at some places, the newest first, times `by_row` (R, 2 T); returns `elapsed`, the
    sum of g behind these places and before the new tokens, with the g of the next ones.
    """
    wide_past = past.to(tl.float32)
    inverse = _inverse_length(tl.sum(wide_past * wide_past, axis=1))
    by_place = _decay(tl.cumsum(next_g, axis=1) + elapsed[:, None]) * inverse[None, :]  # (R, J)
    products = _products(kq, wide_past, past, BLOCK_T)  # (2 T, J)
    tl.store(
        row_scores_ptr[:, :, None] + place[None, None, :],
        products[None, :, :] * (by_row[:, :, None] * by_place[:, None, :]),
        mask=scores_ok[:, :, None] & (place >= 0)[None, None, :],
    )
    return elapsed + tl.sum(next_g, axis=1)


@triton.jit
def _products(kq, wide_past, past, BLOCK_T: tl.constexpr):
    """(2 T, K) and (J, K) -> (2 T, J) float32; `wide_past` is `past` in float32."""
    if BLOCK_T == 1:
        k, q = tl.split(tl.permute(tl.reshape(kq.to(tl.float32), (1, 2, kq.shape[1])), (0, 2, 1)))  # (1, K)
        by_k = tl.sum(wide_past * k, axis=1)
        by_q = tl.sum(wide_past * q, axis=1)
        result = tl.trans(tl.join(by_k, by_q))
    else:
        result = dot_float32(kq, tl.trans(past), tl.zeros((kq.shape[0], past.shape[0]), tl.float32))
    return result


@triton.jit(do_not_specialize=["batch", "seed"])
def _step_kernel(
    positions_ptr,
    v_ptr,  # (batch, 1, value head, V)
    beta_ptr,  # (batch, 1, value head)
    k_buffer_ptr,
    u_buffer_ptr,
    g_buffer_ptr,
    kq_ptr,  # what _append_kernel has found
    scores_ptr,
    checkpoint_ptr,
    y_ptr,  # (batch, 1, value head, V)
    batch,
    v_stride_b, v_stride_h,
    beta_stride_b, beta_stride_h,
    scale_ptr,  # (batch, value head, V), of a checkpoint of 8 bits; else None
    seed,  # of stochastic rounding; None: to the nearest
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
    WAITS: tl.constexpr,  # for the launch before, which it overlaps with
    STREAM: tl.constexpr,  # the state goes through shared memory, and not into registers at once
    KEEP: tl.constexpr,  # without STREAM: a flush takes the state from the registers, and does not read it again
):  # fmt: skip
    """One token, one tile: BLOCK_V columns of the state of one head."""
    PIECES: tl.constexpr = (K + ROWS - 1) // ROWS
    b, h, m, v = _tile(tl.program_id(0), HV, HK, V, BLOCK_V)
    v_ok = v < V
    c = tl.arange(0, BLOCK_K)
    if PER_CHANNEL:
        c = tl.max_contiguous(c, 4)  # a warp has whole keys
    c_ok = c < K
    # The state first: what follows goes on while it is under way.
    head_state_ptr = checkpoint_ptr + (b * HV + h) * (K * V)
    if not STREAM:
        at = head_state_ptr + c[:, None] * V + v[None, :]
        state = tl.load(at, mask=c_ok[:, None] & v_ok[None, :], other=0.0, eviction_policy=EVICT)
    scale = load_scale(scale_ptr, b * HV + h, v, V)
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    is_new = count > 0
    new_v_ok = v < tl.where(is_new, V, 0)
    new_slot = ring_slot(first, tl.where(is_new, held, 0), SLOTS)
    seen_by = tl.where(is_new, held, 0)
    j = tl.arange(0, BLOCK_J)
    k_row_ptr = k_buffer_ptr + (b * HK + m) * (SLOTS * K)
    u_row_ptr = u_buffer_ptr + (b * HV + h) * (SLOTS * V) + v
    g_row_ptr = g_buffer_ptr + (b * HV + h) * (SLOTS * (K if PER_CHANNEL else 1))
    beta = tl.load(beta_ptr + b * beta_stride_b + h * beta_stride_h).to(tl.float32)
    if SLOTS <= BLOCK_J:
        held_u = _buffered_u(j, seen_by, first, u_row_ptr, v_ok, V, SLOTS)
    if WAITS:
        wait_for_previous()  # for kq, scores and v
    # (Loads that need not wait for the row's positions. What a row without a new token gets nobody reads.)
    new_v = tl.load(v_ptr + b * v_stride_b + h * v_stride_h + v, mask=v_ok, other=0.0).to(tl.float32)
    row_scores_ptr = scores_ptr + (b * HV + h) * (2 * (SLOTS + 1))
    row_kq_ptr = kq_ptr + (b * HV + h if PER_CHANNEL else b * HK + m) * (2 * K)
    k_scale = tl.load(row_scores_ptr + SLOTS)
    q_scale = tl.load(row_scores_ptr + 2 * SLOTS + 1)
    own = tl.load(row_scores_ptr + SLOTS + 1 + held, mask=is_new, other=0.0)
    if SLOTS <= BLOCK_J:
        by_k = tl.load(row_scores_ptr + j, mask=j < seen_by, other=0.0)
        by_q = tl.load(row_scores_ptr + SLOTS + 1 + j, mask=j < seen_by, other=0.0)
    if STREAM:
        # All pieces are under way, into shared memory, before the first is used. Their rows are added to ROWS rows
        # first, and lanes behind the loop.
        k_rows = tl.zeros((ROWS, BLOCK_V), tl.float32)
        q_rows = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for piece in tl.range(0, PIECES, num_stages=PIECES + 1):
            n = piece * ROWS + tl.arange(0, ROWS)
            at = head_state_ptr + n[:, None] * V + v[None, :]
            ok = (n < K)[:, None] & v_ok[None, :]
            part = tl.load(at, mask=ok, other=0.0, eviction_policy=EVICT)
            part = as_float32(part)
            k = tl.load(row_kq_ptr + n, mask=n < K, other=0.0).to(tl.float32)
            q = tl.load(row_kq_ptr + K + n, mask=n < K, other=0.0).to(tl.float32)
            k_rows += part * k[:, None]
            q_rows += part * q[:, None]
        for_k, for_q = _sum_rows(k_rows, q_rows)
    else:
        k = tl.load(row_kq_ptr + c, mask=c_ok, other=0.0).to(tl.float32)
        q = tl.load(row_kq_ptr + K + c, mask=c_ok, other=0.0).to(tl.float32)
        wide = as_float32(state)
        for_k, for_q = _sum_rows(wide * k[:, None], wide * q[:, None])
    for_k *= k_scale
    for_q *= q_scale
    if scale_ptr is not None:
        for_k *= scale
        for_q *= scale
    if SLOTS <= BLOCK_J:
        more_k, more_q = _sum_rows(held_u * by_k[:, None], held_u * by_q[:, None])
        for_k += more_k
        for_q += more_q
    else:
        for block in range((seen_by + BLOCK_J - 1) // BLOCK_J):
            place = block * BLOCK_J + j
            held_u = _buffered_u(place, seen_by, first, u_row_ptr, v_ok, V, SLOTS)
            by_k = tl.load(row_scores_ptr + place, mask=place < seen_by, other=0.0)
            by_q = tl.load(row_scores_ptr + SLOTS + 1 + place, mask=place < seen_by, other=0.0)
            more_k, more_q = _sum_rows(held_u * by_k[:, None], held_u * by_q[:, None])
            for_k += more_k
            for_q += more_q
    u = beta * (new_v - for_k)
    tl.store(u_row_ptr + new_slot * V, u, mask=new_v_ok)
    tl.store(y_ptr + (b * HV + h) * V + v, (for_q + own * u).to(y_ptr.dtype.element_ty), mask=v_ok)
    if fold > 0:
        tl.debug_barrier()  # the token that was just appended may be folded, too
        first_key, second_key = random_keys(seed, positions_ptr, b, batch, fold)
        if KEEP:
            if PER_CHANNEL:
                folded = _folded_in_registers(_scaled(state, scale, scale_ptr), c, fold, first, v_ok, k_row_ptr,
                                              u_row_ptr, g_row_ptr, K, V, SLOTS)  # fmt: skip
            else:
                folded_u, weight, passed = _weighted_u(fold - 1 - j, fold if SLOTS <= BLOCK_J else 0, first,
                                                       tl.zeros((), tl.float32), v_ok, k_row_ptr, u_row_ptr, g_row_ptr,
                                                       K, V, SLOTS, PER_CHANNEL, BLOCK_K)  # fmt: skip
                folded = _folded(state, c, fold, first, folded_u, weight, passed, v_ok, scale, scale_ptr, k_row_ptr,
                                 u_row_ptr, g_row_ptr, K, V, SLOTS, PER_CHANNEL, BLOCK_V, BLOCK_K, BLOCK_J,
                                 BLOCK_K)  # fmt: skip
            _store_columns(head_state_ptr, folded, c, v, scale_ptr, b * HV + h, h, seed, first_key, second_key,
                           K, V)  # fmt: skip
        else:
            _fold(head_state_ptr, head_state_ptr, k_row_ptr, u_row_ptr, g_row_ptr, fold, first, v, scale, scale_ptr,
                  b * HV + h, h, seed, first_key, second_key, K, V, SLOTS, PER_CHANNEL, BLOCK_V, BLOCK_K, BLOCK_J,
                  ROWS, 3)  # fmt: skip


@triton.jit
def _scaled(state, scale, scale_ptr):
    """A state, or rows of it, as the numbers that it stands for."""
    wide = as_float32(state)
    if scale_ptr is not None:
        wide *= scale[None, :]
    return wide


@triton.jit
def _store_rows(out_ptr, folded, c, v, inverse, h, seed, first_key, second_key, K: tl.constexpr, V: tl.constexpr):
    """Rounds and stores rows c, columns v of a head's state; in 8 bits times `inverse` (BLOCK_V,) of the new scales."""
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        folded *= inverse[None, :]
    place = (h * K + c)[:, None] * V + v[None, :]
    tl.store(
        out_ptr + c[:, None] * V + v[None, :],
        rounded(folded, out_ptr.dtype.element_ty, place, first_key, second_key, seed is not None),
        mask=(c < K)[:, None] & (v < V)[None, :],
    )


@triton.jit
def _store_columns(
    head_state_ptr, folded, c, v, scale_ptr, row_head, h, seed, first_key, second_key, K: tl.constexpr, V: tl.constexpr
):
    """Columns v of a head's state, all rows c of them; in 8 bits with their new scales."""
    inverse = tl.full(v.shape, 1.0, tl.float32)
    if scale_ptr is not None:
        greatest = tl.max(absolute_bits(folded), axis=0)
        inverse = store_scale(scale_ptr, row_head, v, greatest, head_state_ptr.dtype.element_ty, V)
    _store_rows(head_state_ptr, folded, c, v, inverse, h, seed, first_key, second_key, K, V)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_rows(a, b):
    """Sums over the rows of both, which share what warps have to wait for each other."""
    return tl.reduce((a, b), 0, _add_both)


@triton.jit
def _buffered_u(place, end, first, u_row_ptr, v_ok, V: tl.constexpr, SLOTS: tl.constexpr):
    """u (J, BLOCK_V) at some places, zeros where these are not in 0 .. end-1."""
    used = (place >= 0) & (place < end)
    slot = ring_slot(first, tl.where(used, place, 0), SLOTS)
    return tl.load(u_row_ptr[None, :] + slot[:, None] * V, mask=used[:, None] & v_ok[None, :], other=0.0)


@triton.jit
def _fold(
    head_state_ptr,  # (K, V)
    out_ptr,  # the same, or float32 elsewhere
    k_row_ptr,  # of the key head, (SLOTS, K)
    u_row_ptr,  # of the value head, (SLOTS, V) at columns v
    g_row_ptr,  # of the value head, (SLOTS,) or (SLOTS, K)
    count,
    first,
    v,
    scale,  # (BLOCK_V,), of a checkpoint of 8 bits
    scale_ptr,
    row_head,
    h,
    seed,
    first_key,
    second_key,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,  # pieces of rows under way and the one in use
):
    """
    Stores the state after the `count` oldest places of the buffer, columns v of it, ROWS rows at a time; the next are
    under way into shared memory, so that no registers hold them. In 8 bits the rows are folded twice: what is greatest
    in a column is known behind the last of them only.
    """
    PIECES: tl.constexpr = (K + ROWS - 1) // ROWS
    TURNS: tl.constexpr = 2 if out_ptr.dtype.element_ty.primitive_bitwidth == 8 else 1
    v_ok = v < V
    # Where BLOCK_J spans the buffer, u and what its tokens decay by are the same for all rows.
    u, weight, elapsed = _weighted_u(count - 1 - tl.arange(0, BLOCK_J), count if SLOTS <= BLOCK_J else 0, first,
                                     tl.zeros((), tl.float32), v_ok, k_row_ptr, u_row_ptr, g_row_ptr, K, V, SLOTS,
                                     PER_CHANNEL, BLOCK_K)  # fmt: skip
    inverse = tl.full((BLOCK_V,), 1.0, tl.float32)
    for turn in tl.static_range(TURNS):
        greatest = tl.zeros((BLOCK_V,), tl.int32)
        for piece in tl.range(0, PIECES, num_stages=STAGES):
            c = piece * ROWS + tl.arange(0, ROWS)
            ok = (c < K)[:, None] & v_ok[None, :]
            state = tl.load(head_state_ptr + c[:, None] * V + v[None, :], mask=ok, other=0.0)
            folded = _folded(state, c, count, first, u, weight, elapsed, v_ok, scale, scale_ptr, k_row_ptr, u_row_ptr,
                             g_row_ptr, K, V, SLOTS, PER_CHANNEL, BLOCK_V, BLOCK_K, BLOCK_J, ROWS)  # fmt: skip
            if turn + 1 < TURNS:
                greatest = tl.maximum(greatest, tl.max(absolute_bits(folded), axis=0))
            else:
                _store_rows(out_ptr, folded, c, v, inverse, h, seed, first_key, second_key, K, V)
        if turn + 1 < TURNS:
            inverse = store_scale(scale_ptr, row_head, v, greatest, out_ptr.dtype.element_ty, V)


@triton.jit
def _folded(state, c, count, first, u, weight, elapsed, v_ok, scale, scale_ptr, k_row_ptr, u_row_ptr, g_row_ptr,
            K: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr, PER_CHANNEL: tl.constexpr, BLOCK_V: tl.constexpr,
            BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """
    Rows c (ROWS,) of a state after the `count` oldest places of the buffer. `u`, `weight` and `elapsed` are those of
    `_weighted_u` for all places, where BLOCK_J spans the buffer.
    """
    j = tl.arange(0, BLOCK_J)
    inputs = tl.zeros((BLOCK_V, ROWS), tl.float32)
    time = tl.zeros((ROWS,), tl.float32)
    if SLOTS <= BLOCK_J:
        inputs, time = _add_inputs(inputs, time, count - 1 - j, count, first, c, u, weight, k_row_ptr, g_row_ptr, K,
                                   SLOTS, PER_CHANNEL)  # fmt: skip
        passed = elapsed
    else:
        passed = tl.zeros((), tl.float32)
        blocks = (count + BLOCK_J - 1) // BLOCK_J
        for block in range(blocks):
            place = count - 1 - block * BLOCK_J - j
            block_u, block_weight, passed = _weighted_u(place, count, first, passed, v_ok, k_row_ptr, u_row_ptr,
                                                        g_row_ptr, K, V, SLOTS, PER_CHANNEL, BLOCK_K)  # fmt: skip
            inputs, time = _add_inputs(inputs, time, place, count, first, c, block_u, block_weight, k_row_ptr,
                                       g_row_ptr, K, SLOTS, PER_CHANNEL)  # fmt: skip
    inputs = tl.trans(inputs)
    if PER_CHANNEL:
        decay = _decay(time + tl.load(g_row_ptr + first * K + c, mask=c < tl.where(count > 0, K, 0), other=0.0))
        folded = decay[:, None] * _scaled(state, scale, scale_ptr) + inputs
    else:
        decay = _decay(passed + tl.load(g_row_ptr + first, mask=count > 0, other=0.0))
        folded = decay * _scaled(state, scale, scale_ptr) + inputs
    return folded


@triton.jit
def _weighted_u(place, count, first, elapsed, v_ok, k_row_ptr, u_row_ptr, g_row_ptr, K: tl.constexpr, V: tl.constexpr,
                SLOTS: tl.constexpr, PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """
    u (J, BLOCK_V) at some places, the newest first, zeros where there is none; what it is to be multiplied by (J,): the
    inverse length of its key, with one decay for all channels that too; and `elapsed` with the g of the places behind
    these.
    """
    _, weight = _keys(place, count, first, tl.arange(0, BLOCK_K), k_row_ptr, K, SLOTS)
    if not PER_CHANNEL:
        behind = _next_g(place, count, first, g_row_ptr, SLOTS)
        weight *= _decay(tl.cumsum(behind, axis=0) + elapsed)
        elapsed += tl.sum(behind, axis=0)
    return _buffered_u(place, count, first, u_row_ptr, v_ok, V, SLOTS), weight, elapsed


@triton.jit
def _add_inputs(inputs, time, place, count, first, c, u, weight, k_row_ptr, g_row_ptr, K: tl.constexpr,
                SLOTS: tl.constexpr, PER_CHANNEL: tl.constexpr):  # fmt: skip
    """`inputs` (BLOCK_V, ROWS) and, for KDA, `time` (ROWS,) with the tokens at some places: rows c of k u^T."""
    k = _buffered_k(place, count, first, c, k_row_ptr, K, SLOTS)
    # (In this order what is split into terms is u, which is the same for all rows.)
    weighted = tl.trans(u * weight[:, None])
    if PER_CHANNEL:
        behind = _next_g_channels(place, count, first, c, g_row_ptr, K, SLOTS)  # (J, ROWS)
        decayed = k.to(tl.float32) * _decay(tl.cumsum(behind, axis=0) + time[None, :])
        inputs = dot_float32(weighted, decayed, inputs)
        time += tl.sum(behind, axis=0)
    elif k.dtype == tl.bfloat16:
        inputs = dot_float32_by_16bit(weighted, k, inputs)
    else:
        inputs = dot_float32(weighted, k, inputs)
    return inputs, time


@triton.jit
def _folded_in_registers(state, c, count, first, v_ok, k_row_ptr, u_row_ptr, g_row_ptr, K: tl.constexpr,
                         V: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """
    KDA: a state (BLOCK_K, BLOCK_V) float32 after the `count` oldest places of the buffer. Token after token is added
    where the numbers are: a product of matrices would want as many registers again, and terms of the decayed keys.
    """
    c_ok = c < K
    total = tl.zeros(c.shape, tl.float32)
    for place in range(count):
        total += tl.load(g_row_ptr + ring_slot(first, place, SLOTS) * K + c, mask=c_ok, other=0.0)
    state *= _decay(total)[:, None]
    back = tl.arange(0, 8)  # from the newest to the oldest
    elapsed = tl.zeros(c.shape, tl.float32)
    for block in range((count + 7) // 8):
        newest = count - 1 - 8 * block
        keys, inverse = _keys(newest - back, count, first, c, k_row_ptr, K, SLOTS)
        behind = _next_g_channels(newest - back, count, first, c, g_row_ptr, K, SLOTS)
        keys *= inverse[:, None] * _decay(tl.cumsum(behind, axis=0) + elapsed[None, :])
        elapsed += tl.sum(behind, axis=0)
        us = ()
        for i in tl.static_range(8):
            slot = ring_slot(first, tl.maximum(newest - i, 0), SLOTS)
            us = us + (tl.load(u_row_ptr + slot * V, mask=v_ok, other=0.0),)
        for i in tl.static_range(8):
            if newest >= i:
                state += _row(keys, back, i)[:, None] * us[i][None, :]
    return state


@triton.jit(do_not_specialize=["batch", "T", "t0", "seed"])
def _window_kernel(
    positions_ptr,
    v_ptr,  # (batch, T, value head, V)
    beta_ptr,  # (batch, T, value head)
    k_buffer_ptr,
    u_buffer_ptr,
    g_buffer_ptr,
    kq_ptr,  # what _append_kernel has found
    scores_ptr,
    checkpoint_ptr,
    y_ptr,  # (batch, T, value head, V)
    batch,
    v_stride_b, v_stride_t, v_stride_h,
    beta_stride_b, beta_stride_t, beta_stride_h,
    T,
    t0,  # the first new token of this launch
    scale_ptr,
    seed,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
    WAITS: tl.constexpr,  # for the launch before, which it overlaps with
    PREFETCHES: tl.constexpr,  # where the device can
    FLUSH: tl.constexpr,  # here; or (windows of several pieces) in a launch of _fold_kernel that follows
):  # fmt: skip
    """A piece of a window, one tile: BLOCK_V columns of the state of one head."""
    PIECES: tl.constexpr = (K + ROWS - 1) // ROWS
    WIDTH: tl.constexpr = SLOTS + 1
    b, h, m, v = _tile(tl.program_id(0), HV, HK, V, BLOCK_V)
    v_ok = v < V
    head_state_ptr = checkpoint_ptr + (b * HV + h) * (K * V)
    if PREFETCHES:
        # Into the L2 cache: the state while the row's positions are waited for, and the launch before.
        _prefetch_rows(head_state_ptr, tl.minimum(tl.arange(0, BLOCK_K), K - 1), V, BLOCK_V)
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    count = tl.minimum(count, T)
    k_row_ptr = k_buffer_ptr + (b * HK + m) * (SLOTS * K)
    u_row_ptr = u_buffer_ptr + (b * HV + h) * (SLOTS * V) + v
    g_row_ptr = g_buffer_ptr + (b * HV + h) * (SLOTS * (K if PER_CHANNEL else 1))
    scale = load_scale(scale_ptr, b * HV + h, v, V)
    start = held + tl.minimum(count, t0)
    if PREFETCHES:
        place = tl.minimum(tl.arange(0, BLOCK_J), tl.maximum(start - 1, 0))
        _prefetch_rows(u_buffer_ptr + (b * HV + h) * (SLOTS * V), ring_slot(first, place, SLOTS), V, BLOCK_V)
    # Rows: k of the tokens, then q of the tokens. A warp has all rows of its columns: it goes through the tokens alone.
    row = tl.arange(0, 2 * BLOCK_T)
    is_k = row < BLOCK_T
    token = row % BLOCK_T
    t = t0 + token
    real = t < count
    beta_at = beta_ptr + b * beta_stride_b + t * beta_stride_t + h * beta_stride_h
    beta = tl.load(beta_at, mask=is_k & real, other=0.0).to(tl.float32)
    if WAITS:
        wait_for_previous()  # for kq, scores and v
    line = 2 * t + row // BLOCK_T  # of kq and scores
    row_kq_ptr = kq_ptr + ((b * HV + h if PER_CHANNEL else b * HK + m) * (2 * T) + line[:, None]) * K
    row_scores_ptr = scores_ptr + ((b * HV + h) * (2 * T) + line) * WIDTH
    v_at = v_ptr + b * v_stride_b + t[:, None] * v_stride_t + h * v_stride_h + v[None, :]
    new_v = tl.load(v_at, mask=(is_k & real)[:, None] & v_ok[None, :], other=0.0)
    decay = tl.load(row_scores_ptr + SLOTS, mask=real, other=0.0)

    # The state goes piece after piece, all of them under way into shared memory before the first product.
    found = tl.zeros((2 * BLOCK_T, BLOCK_V), tl.float32)
    for piece in tl.range(0, PIECES, num_stages=PIECES + 1):
        c = piece * ROWS + tl.arange(0, ROWS)
        ok = (c < K)[:, None] & v_ok[None, :]
        state = tl.load(head_state_ptr + c[:, None] * V + v[None, :], mask=ok, other=0.0, eviction_policy=EVICT)
        kq = tl.load(row_kq_ptr + c[None, :], mask=(t < T)[:, None] & (c < K)[None, :], other=0.0)
        if scale_ptr is not None:  # 8 bits are exact in bfloat16
            state = as_float32(state).to(tl.bfloat16)
        found = dot_float32(kq, state, found)
    if scale_ptr is not None:
        found *= scale[None, :]
    found *= decay[:, None]
    for block in tl.range(0, (start + BLOCK_J - 1) // BLOCK_J, num_stages=1):
        place = block * BLOCK_J + tl.arange(0, BLOCK_J)
        old_u = _buffered_u(place, start, first, u_row_ptr, v_ok, V, SLOTS)
        scores_ok = real[:, None] & (place < start)[None, :]
        scores = tl.load(row_scores_ptr[:, None] + place[None, :], mask=scores_ok, other=0.0)
        found = dot_float32(scores, old_u, found)

    # u_t = beta_t (v_t - ... - sum_{i<t} (scores of k_t)_i u_i) in the rows of k, y_t in those of q: each new token,
    # from the first to the last, is added to the rows behind it.
    found = tl.where(is_k[:, None], beta[:, None] * (new_v.to(tl.float32) - found), found)
    factor = tl.where(is_k, -beta, 1.0)
    behind = tl.where(is_k, token, token + 1)  # tokens before this one are seen by the row
    for i in tl.range(0, tl.minimum(tl.maximum(count - t0, 0), BLOCK_T), num_stages=1):
        sees = real & (i < behind)
        score = tl.load(row_scores_ptr + start + i, mask=sees, other=0.0) * factor
        u_i = tl.sum(tl.where((row == i)[:, None], found, 0.0), axis=0)
        # (A draft that is not finite leaves those before it as they are.)
        found = tl.where(sees[:, None], found + score[:, None] * u_i[None, :], found)
    slot = ring_slot(first, tl.where(real, held + t, 0), SLOTS)
    tl.store(u_row_ptr[None, :] + slot[:, None] * V, found, mask=(is_k & real)[:, None] & v_ok[None, :])
    tl.store(
        y_ptr + (b * (T * HV) + h) * V + t[:, None] * (HV * V) + v[None, :],
        found.to(y_ptr.dtype.element_ty),
        mask=((row >= BLOCK_T) & (t < T))[:, None] & v_ok[None, :],
    )
    if FLUSH:
        if fold > 0:
            tl.debug_barrier()  # tokens of this window may be folded, too
            first_key, second_key = random_keys(seed, positions_ptr, b, batch, fold)
            # (A third stage would take more shared memory than all that comes before.)
            _fold(head_state_ptr, head_state_ptr, k_row_ptr, u_row_ptr, g_row_ptr, fold, first, v, scale, scale_ptr,
                  b * HV + h, h, seed, first_key, second_key, K, V, SLOTS, PER_CHANNEL, BLOCK_V, BLOCK_K, BLOCK_J,
                  ROWS, 2)  # fmt: skip


@triton.jit(do_not_specialize=["batch", "seed"])
def _fold_kernel(
    positions_ptr,
    checkpoint_ptr,
    k_buffer_ptr,
    u_buffer_ptr,
    g_buffer_ptr,
    out_ptr,  # (batch, value head, K, V), or the checkpoint itself
    batch,
    scale_ptr,
    seed,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The states after the FOLD oldest tokens; with INPLACE, of the rows that fold any."""
    b, h, m, v = _tile(tl.program_id(0), HV, HK, V, BLOCK_V)
    fold = tl.minimum(tl.load(positions_ptr + 4 * batch + b), SLOTS)
    if (fold > 0) | (not INPLACE):
        head = (b * HV + h) * (K * V)
        first_key, second_key = random_keys(seed, positions_ptr, b, batch, fold)
        _fold(
            checkpoint_ptr + head, out_ptr + head, k_buffer_ptr + (b * HK + m) * (SLOTS * K),
            u_buffer_ptr + (b * HV + h) * (SLOTS * V) + v,
            g_buffer_ptr + (b * HV + h) * (SLOTS * (K if PER_CHANNEL else 1)), fold, tl.load(positions_ptr + batch + b),
            v, load_scale(scale_ptr, b * HV + h, v, V), scale_ptr, b * HV + h, h, seed, first_key, second_key, K, V,
            SLOTS, PER_CHANNEL, BLOCK_V, BLOCK_K, BLOCK_J, ROWS, 3,
        )  # fmt: skip
