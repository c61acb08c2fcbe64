"""
Mamba-2 from a checkpoint and a buffer of the inputs since: decode steps, windows of drafted tokens, and flushes.

For a row and a head, S0 the checkpoint, tokens counted from the oldest in the buffer, pre_t the sum of dt up to t:

    y_t = exp(A pre_t) (S0 C_t)  +  sum_{j<=t} dt_j exp(A (pre_t - pre_j)) (B_j . C_t) x_j  +  D x_t          (output)
    S_f = exp(A pre_f) S0        +  sum_{j<=f} dt_j exp(A (pre_f - pre_j)) x_j B_j^T                           (flush)

The output never needs a state but S0, so a call reads the state once and writes it only in the rows that flush.

Two launches do a call: `_append_kernel` (convolution, append, and B_j . C_t, once for each group of heads) and
`_step_kernel` (one token) or `_window_kernel` (more). For one token and a small batch, `_fused_kernel` does all of it:
a launch saved is worth more there than work done once for a group. A flush takes the state from the registers of the
output (KEEP), which costs registers, and so programs on a multiprocessor, in steps that do not flush too; or reads it
again; behind a window of several pieces it is left to `_fold_kernel`.

Layouts: checkpoint (batch, head, P, N); x (batch, head, slot, P), B (batch, group, slot, N), dt (batch, head, slot)
float32; the ring of raw inputs (batch, ring, channels), channels being x of all heads, B of all groups, C of all
groups. Differences pre_t - pre_j are summed from the newest token backwards: no cancellation, and A times them is never
above 0.

A checkpoint of 8 bits has a float32 scale for each of its rows, (batch, head, P): a product with a row takes it once,
behind the sum. Converted to float32 and multiplied there, one number would cost more instructions than bytes. float16
holds the numbers of either type, and two are converted at a time: with 16-bit activations S0 C_t is a matrix product,
of which a single token uses one column. C then is float16, too, each of its rows times a power of two that takes the
greatest of it near the end of the range (`_append_kernel`): what is lost below is less than float32 rounds. A flush
finds the greatest number of each of its rows first, and then rounds (`_rounding.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._arithmetic import dot_16bit, dot_float32_by_16bit, dot_for_output, final_dt
from ._conv import convolve, record
from ._overlap import may_start_next, prefetch, wait_for_previous
from ._positions import ring_slot, row_positions
from ._rounding import absolute_bits, as_float16, as_float32, load_scale, random_keys, rounded, store_scale


@triton.jit(do_not_specialize=["batch", "T", "t0"])
def _append_kernel(
    positions_ptr,  # (5, batch)
    x_ptr,  # CONV: raw inputs (batch, T, channels); else x (batch, T, head, P)
    b_ptr,  # (batch, T, group, N); unused with CONV
    c_ptr,  # (batch, T, group, N): read, with CONV written
    dt_ptr,  # (batch, T, head)
    dt_bias_ptr,  # (head,) or unused
    dt_low,
    dt_high,
    ring_ptr,  # (batch, RING, channels), with CONV
    weight_ptr,  # (channels, K), with CONV
    conv_bias_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    scores_ptr,  # (batch, group, T, SLOTS): B_j . C_t, j the place in the buffer
    c_float16_ptr,  # (batch, T, group, N), for a checkpoint of 8 bits: C, in units that are
    c_unit_ptr,  # (batch, T, group) powers of two; both None otherwise
    batch,
    x_stride_b, x_stride_t, x_stride_h,
    b_stride_b, b_stride_t, b_stride_g,
    c_stride_b, c_stride_t, c_stride_g,
    dt_stride_b, dt_stride_t, dt_stride_h,
    T,
    t0,  # the first new token of this launch
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    CONV: tl.constexpr,
    RING: tl.constexpr,
    K: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    REUSES_SLOTS: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STARTS: tl.constexpr,  # the next launch early
):  # fmt: skip
    if STARTS:
        may_start_next()
    # Programs 0 .. G-1 of a row: B, C, dt and scores of a group. The others: BLOCK_C channels of x each.
    unit = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    first, held, count, _ = row_positions(positions_ptr, b, batch, SLOTS)
    t = t0 + tl.arange(0, BLOCK_T)
    real = t < count
    slot = ring_slot(first, tl.where(real, held + t, 0), SLOTS)
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    new_ptr = x_ptr + b * x_stride_b
    row_ring_ptr = ring_ptr + b * (RING * CHANNELS)
    seen = tl.load(positions_ptr + b)

    if unit >= G:
        channel = (unit - G) * BLOCK_C + tl.arange(0, BLOCK_C)
        ok = channel < H * P
        h = channel // P
        p = channel % P
        if CONV:
            x = convolve(new_ptr, x_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, channel, ok,
                         CHANNELS, RING, K, HAS_CONV_BIAS, SILU, BLOCK_T, BLOCK_C)  # fmt: skip
            record(new_ptr, x_stride_t, row_ring_ptr, seen, count, t, channel, ok, CHANNELS, RING, REUSES_SLOTS)
        else:
            x = tl.load(
                new_ptr + t[:, None] * x_stride_t + (h * x_stride_h + p)[None, :],
                mask=real[:, None] & ok[None, :],
                other=0.0,
            )
        tl.store(
            x_buffer_ptr + b * (H * SLOTS * P) + (h * (SLOTS * P) + p)[None, :] + slot[:, None] * P,
            x.to(x_buffer_ptr.dtype.element_ty),
            mask=real[:, None] & ok[None, :],
        )
        return

    g = unit
    n = tl.arange(0, BLOCK_N)
    n_ok = n < N
    tile_ok = real[:, None] & n_ok[None, :]
    if CONV:
        # Rounded to the activation dtype, as a convolution that stores its result does.
        dtype = x_ptr.dtype.element_ty
        b_channel = H * P + g * N + n
        c_channel = b_channel + G * N
        B = convolve(new_ptr, x_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, b_channel, n_ok,
                     CHANNELS, RING, K, HAS_CONV_BIAS, SILU, BLOCK_T, BLOCK_N).to(dtype)  # fmt: skip
        C = convolve(new_ptr, x_stride_t, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, c_channel, n_ok,
                     CHANNELS, RING, K, HAS_CONV_BIAS, SILU, BLOCK_T, BLOCK_N).to(dtype)  # fmt: skip
        B = tl.where(n_ok[None, :], B, 0.0)
        C = tl.where(n_ok[None, :], C, 0.0)
        record(new_ptr, x_stride_t, row_ring_ptr, seen, count, t, b_channel, n_ok, CHANNELS, RING, REUSES_SLOTS)
        record(new_ptr, x_stride_t, row_ring_ptr, seen, count, t, c_channel, n_ok, CHANNELS, RING, REUSES_SLOTS)
        if c_float16_ptr is None:
            tl.store(
                c_ptr + b * c_stride_b + t[:, None] * c_stride_t + g * c_stride_g + n[None, :],
                C,
                mask=(t < T)[:, None] & n_ok[None, :],
            )
    else:
        B = tl.load(b_ptr + b * b_stride_b + t[:, None] * b_stride_t + g * b_stride_g + n[None, :], tile_ok, other=0.0)
        C = tl.load(c_ptr + b * c_stride_b + t[:, None] * c_stride_t + g * c_stride_g + n[None, :], tile_ok, other=0.0)
    if c_float16_ptr is not None:
        up, unit = _float16_range(C)
        row = (b * T + t) * G + g
        tl.store(c_unit_ptr + row, unit, mask=t < T)
        tl.store(
            c_float16_ptr + row[:, None] * N + n[None, :],
            (C.to(tl.float32) * up[:, None]).to(tl.float16),
            mask=(t < T)[:, None] & n_ok[None, :],
        )
    row_b_buffer_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N)
    B = B.to(b_buffer_ptr.dtype.element_ty)
    tl.store(row_b_buffer_ptr + slot[:, None] * N + n[None, :], B, mask=tile_ok)

    HEADS_PER_GROUP: tl.constexpr = H // G
    for h0 in tl.static_range(0, HEADS_PER_GROUP, BLOCK_H):
        i = h0 + tl.arange(0, BLOCK_H)
        h = g * HEADS_PER_GROUP + i
        dt_ok = real[:, None] & (i < HEADS_PER_GROUP)[None, :]
        dt = tl.load(
            dt_ptr + b * dt_stride_b + t[:, None] * dt_stride_t + h[None, :] * dt_stride_h, mask=dt_ok, other=0.0
        ).to(tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(dt_bias_ptr + h, mask=i < HEADS_PER_GROUP, other=0.0).to(tl.float32)
            dt = final_dt(dt, bias[None, :], dt_low, dt_high)
        tl.store(dt_buffer_ptr + b * (H * SLOTS) + h[None, :] * SLOTS + slot[:, None], dt, mask=dt_ok)

    row_scores_ptr = scores_ptr + (b * G + g) * (T * SLOTS)
    j = tl.arange(0, BLOCK_J)
    before = held + tl.minimum(count, t0)  # those of earlier launches lie in the buffer, too
    for j0 in range(0, before, BLOCK_J):
        place = j0 + j
        past_slot = ring_slot(first, tl.where(place < before, place, 0), SLOTS)
        past = tl.load(
            row_b_buffer_ptr + past_slot[:, None] * N + n[None, :],
            mask=(place < before)[:, None] & n_ok[None, :],
            other=0.0,
        )
        scores_ok = (t < T)[:, None] & (place < before)[None, :]
        tl.store(row_scores_ptr + t[:, None] * SLOTS + place[None, :], _scores(C, past, BLOCK_T), mask=scores_ok)
    # The new tokens among themselves; B is at hand. (Of those behind t nothing is read.)
    place = held + t
    tl.store(
        row_scores_ptr + t[:, None] * SLOTS + place[None, :], _scores(C, B, BLOCK_T),
        mask=(t < T)[:, None] & real[None, :],
    )  # fmt: skip


@triton.jit
def _scores(C, B, BLOCK_T: tl.constexpr):
    """(BLOCK_T, N) and (J, N) -> (BLOCK_T, J) float32: C_t . B_j."""
    if BLOCK_T == 1:
        return tl.sum(B.to(tl.float32) * C.to(tl.float32), axis=1)[None, :]
    acc = tl.zeros((B.shape[0], BLOCK_T), tl.float32)
    if C.dtype == tl.float32:
        acc = tl.dot(B, tl.trans(C), acc, input_precision="ieee")
    else:
        acc = dot_16bit(B, tl.trans(C), acc)
    return tl.trans(acc)


@triton.jit(do_not_specialize=["batch", "seed"])
def _step_kernel(
    positions_ptr,
    checkpoint_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    scores_ptr,  # (batch, group, 1, SLOTS)
    c_ptr,  # (batch, 1, group, N)
    a_ptr,
    d_ptr,
    y_ptr,  # (batch, 1, head, P)
    batch,
    c_stride_b, c_stride_t, c_stride_g,
    c_unit_ptr,  # (batch, 1, group): C is float16, in these units (_append_kernel); else None
    scale_ptr,  # (batch, head, P), of a checkpoint of 8 bits; else None
    seed,  # of stochastic rounding; None: to the nearest
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
    WAITS: tl.constexpr,  # for the launch before, which it overlaps with
    STREAM: tl.constexpr,  # the state goes through shared memory, and not into registers at once
    PREFETCH: tl.constexpr,  # and is on its way into the L2 cache before that
    KEEP: tl.constexpr,  # it is kept in registers for a flush, and not read again
):  # fmt: skip
    """One token, one tile: BLOCK_P rows of the state of one head. Neighbours in memory are neighbours in the grid."""
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    DOT: tl.constexpr = c_unit_ptr is not None
    b, h, g, p0, p = _tile(tl.program_id(0), H, G, P, BLOCK_P)
    # The state first: what follows goes on while it is under way.
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    head_state_ptr = checkpoint_ptr + (b * H + h) * (P * N)
    if not STREAM:
        state = _load_state(head_state_ptr, p, P, N, COLUMNS, EVICT)
    scale = load_scale(scale_ptr, b * H + h, p, P)
    if WAITS:
        if PREFETCH:
            for n0 in tl.static_range(0, N, 1024 // checkpoint_ptr.dtype.element_ty.primitive_bitwidth):
                prefetch(head_state_ptr + tl.minimum(p, P - 1) * N + n0)
        wait_for_previous()
    A = tl.load(a_ptr + h).to(tl.float32)
    D = tl.load(d_ptr + h).to(tl.float32) if HAS_D else 0.0
    p_ok = p < P
    c_group_ptr = c_ptr + b * c_stride_b + g * c_stride_g
    x_head_ptr = x_buffer_ptr + (b * H + h) * (SLOTS * P)
    x_row_ptr = x_head_ptr + p[None, :]
    b_group_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N)
    dt_row_ptr = dt_buffer_ptr + (b * H + h) * SLOTS
    row_scores_ptr = scores_ptr + (b * G + g) * SLOTS
    if DOT:
        unit = tl.load(c_unit_ptr + b * G + g)
        y_state = tl.zeros((BLOCK_P, 8), tl.float32)
    if not STREAM:
        C = ()  # in parts, as the state
        for part in tl.static_range(PARTS):
            n = part * COLUMNS + tl.arange(0, COLUMNS)
            C_part = tl.load(c_group_ptr + n, mask=n < N, other=0.0)
            C = C + (C_part if DOT else C_part.to(tl.float32),)

    # Parts are added before lanes are: few shuffles.
    if not DOT:
        products = tl.zeros((BLOCK_P, COLUMNS), tl.float32)
    end = held + count
    j = tl.arange(0, BLOCK_J)
    y = tl.zeros((BLOCK_P,), tl.float32)
    elapsed = tl.zeros((), tl.float32)  # time behind the places of the buffer seen so far
    if SLOTS <= BLOCK_J:
        _, x, dt = _buffered(j, end, first, x_row_ptr, dt_row_ptr, p_ok, P, SLOTS)
        scores = tl.load(row_scores_ptr + j, mask=j < end, other=0.0)
    if STREAM:
        # All parts are under way, into shared memory, before the first is used. (Of a loop that is known to run once
        # nothing would be left, and its loads would go into registers.)
        for part in tl.range(0, tl.minimum(batch, 1) if DOT and PARTS == 1 else PARTS, num_stages=PARTS + 1):
            n = part * COLUMNS + tl.arange(0, COLUMNS)
            ok = p_ok[:, None] & (n < N)[None, :]
            state = tl.load(head_state_ptr + p[:, None] * N + n[None, :], mask=ok, other=0.0, eviction_policy=EVICT)
            C = tl.load(c_group_ptr + n, mask=n < N, other=0.0)
            if DOT:
                y_state = _by_one(state, C, y_state)
            else:
                products += as_float32(state) * C.to(tl.float32)[None, :]
    if SLOTS <= BLOCK_J:
        y, elapsed = _add_inputs(y, elapsed, j, end, x, dt, scores, A, D)
    else:
        blocks = (end + BLOCK_J - 1) // BLOCK_J
        for block in range(blocks):  # from the newest to the oldest, since a token decays with the time behind it
            place = (blocks - 1 - block) * BLOCK_J + j
            _, x, dt = _buffered(place, end, first, x_row_ptr, dt_row_ptr, p_ok, P, SLOTS)
            scores = tl.load(row_scores_ptr + place, mask=place < end, other=0.0)
            y, elapsed = _add_inputs(y, elapsed, place, end, x, dt, scores, A, D)
    if not STREAM:
        for part in tl.static_range(PARTS):
            if DOT:
                y_state = _by_one(state[part], C[part], y_state)
            else:
                products += as_float32(state[part]) * C[part][None, :]
    if DOT:
        by_state = tl.sum(y_state, axis=1) * (0.125 * unit)  # eight times the same
    else:
        by_state = tl.sum(products, axis=1)
    y += tl.exp(tl.minimum(A * elapsed, 0.0)) * (by_state * scale)
    tl.store(y_ptr + (b * H + h) * P + p, y.to(y_ptr.dtype.element_ty), mask=p_ok)
    if fold > 0:
        _fold(head_state_ptr, head_state_ptr, 0 if STREAM else state, x_head_ptr, x_row_ptr, b_group_ptr, dt_row_ptr,
              fold, first, A, p0, p, scale, scale_ptr, b * H + h, h, seed, positions_ptr, b, batch, KEEP, P, N, SLOTS,
              BLOCK_P, BLOCK_J, COLUMNS, ROWS)  # fmt: skip


@triton.jit
def _by_one(state, C, acc):
    """acc + state @ C, in each of the eight columns of `acc`, the fewest that a matrix unit takes."""
    return dot_16bit(as_float16(state), tl.broadcast_to(C[:, None], (C.shape[0], 8)), acc)


@triton.jit
def _float16_range(x):
    """The powers of two that take the greatest of each row of `x` to 2^14 or above, below 2^15, and their inverses."""
    exponent = tl.max(absolute_bits(x.to(tl.float32)), axis=1) >> 23
    up = tl.minimum(127 + 127 + 14 - exponent, 253)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_inputs(y, elapsed, place, end, x, dt, scores, A, D):
    """
    `y` (BLOCK_P,) with what the tokens at some places of the buffer add, of which the newest has skip weight D;
    `elapsed`, the time behind them, with theirs.
    """
    weight = dt * tl.exp(tl.minimum(A * (_time_behind(dt) + elapsed), 0.0)) * scores
    weight += tl.where(place == end - 1, D, 0.0)
    x = x.to(tl.float32)
    # Not a bare product, which a compiler may join with the first sum over lanes: each lane would then round its own of
    # the two products, and they store what they have in no certain order.
    weighted = tl.fma(tl.broadcast_to(weight[:, None], x.shape), x, tl.zeros_like(x))
    return y + tl.sum(weighted, axis=0), elapsed + tl.sum(dt, axis=0)


@triton.jit
def _tile(tile, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Row, head, group, first of the rows of the head's state and all of them (BLOCK_P,) of a tile."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row_head = tile // P_BLOCKS
    h = row_head % H
    b, g = (row_head // H).to(tl.int64), h // (H // G)
    p0 = (tile % P_BLOCKS) * BLOCK_P
    return b, h, g, p0, p0 + tl.arange(0, BLOCK_P)


@triton.jit(do_not_specialize=["batch", "seed"])
def _fused_kernel(
    positions_ptr,
    x_ptr,  # these as for _append_kernel
    b_ptr,
    c_ptr,  # unused with CONV
    dt_ptr,
    dt_bias_ptr,
    dt_low,
    dt_high,
    ring_ptr,
    weight_ptr,
    conv_bias_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    checkpoint_ptr,  # these as for _step_kernel
    a_ptr,
    d_ptr,
    y_ptr,
    batch,
    x_stride_b, x_stride_h,
    b_stride_b, b_stride_g,
    c_stride_b, c_stride_g,
    dt_stride_b, dt_stride_h,
    scale_ptr,
    seed,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_D: tl.constexpr,
    CONV: tl.constexpr,
    RING: tl.constexpr,
    K: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """
    One token in one launch: _append_kernel and _step_kernel for a tile. Every program of a group appends the group's
    part of the new token, all of them the same: what a program needs of it for a flush it has written itself, and none
    waits for another.
    """
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    b, h, g, p0, p = _tile(tl.program_id(0), H, G, P, BLOCK_P)
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    head_state_ptr = checkpoint_ptr + (b * H + h) * (P * N)
    state = _load_state(head_state_ptr, p, P, N, COLUMNS, EVICT)
    scale = load_scale(scale_ptr, b * H + h, p, P)
    A = tl.load(a_ptr + h).to(tl.float32)
    x_head_ptr = x_buffer_ptr + (b * H + h) * (SLOTS * P)
    x_row_ptr = x_head_ptr + p[None, :]
    b_group_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N)
    dt_row_ptr = dt_buffer_ptr + (b * H + h) * SLOTS

    new_slot = ring_slot(first, held, SLOTS)
    new_p_ok = p < tl.where(count > 0, P, 0)
    N_if_new = tl.where(count > 0, N, 0)
    dt = tl.load(dt_ptr + b * dt_stride_b + h * dt_stride_h).to(tl.float32)
    if HAS_DT_BIAS:
        dt = final_dt(dt, tl.load(dt_bias_ptr + h).to(tl.float32), dt_low, dt_high)
    dt = tl.where(count > 0, dt, 0.0)
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    row_ring_ptr = ring_ptr + b * (RING * CHANNELS)
    new_ptr = x_ptr + b * x_stride_b
    seen = tl.load(positions_ptr + b)
    dtype = x_buffer_ptr.dtype.element_ty
    t = tl.arange(0, 1)
    if CONV:
        x = tl.reshape(convolve(
            new_ptr, 0, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, h * P + p, p < P,
            CHANNELS, RING, K, HAS_CONV_BIAS, SILU, 1, BLOCK_P,
        ).to(dtype), (BLOCK_P,))  # fmt: skip
        # The slots that others read are those of the K - 1 tokens before: RING >= K keeps this one apart.
        record(new_ptr, 0, row_ring_ptr, seen, count, t, h * P + p, p < P, CHANNELS, RING, False)
    else:
        x = tl.load(new_ptr + h * x_stride_h + p, mask=new_p_ok, other=0.0).to(dtype)
    tl.store(x_buffer_ptr + (b * H + h) * (SLOTS * P) + new_slot * P + p, x, mask=new_p_ok)
    if count > 0:
        tl.store(dt_row_ptr + new_slot, dt)
    C = ()
    B_by_C = tl.zeros((COLUMNS,), tl.float32)
    for part in tl.static_range(PARTS):
        n = part * COLUMNS + tl.arange(0, COLUMNS)
        if CONV:
            b_channel = H * P + g * N + n
            c_channel = b_channel + G * N
            B_part = tl.reshape(convolve(
                new_ptr, 0, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, b_channel, n < N,
                CHANNELS, RING, K, HAS_CONV_BIAS, SILU, 1, COLUMNS,
            ).to(dtype), (COLUMNS,))  # fmt: skip
            C_part = tl.reshape(convolve(
                new_ptr, 0, row_ring_ptr, weight_ptr, conv_bias_ptr, seen, count, t, c_channel, n < N,
                CHANNELS, RING, K, HAS_CONV_BIAS, SILU, 1, COLUMNS,
            ).to(dtype), (COLUMNS,))  # fmt: skip
            record(new_ptr, 0, row_ring_ptr, seen, count, t, b_channel, n < N_if_new, CHANNELS, RING, False)
            record(new_ptr, 0, row_ring_ptr, seen, count, t, c_channel, n < N_if_new, CHANNELS, RING, False)
        else:
            B_part = tl.load(b_ptr + b * b_stride_b + g * b_stride_g + n, mask=n < N_if_new, other=0.0).to(dtype)
            C_part = tl.load(c_ptr + b * c_stride_b + g * c_stride_g + n, mask=n < N_if_new, other=0.0)
        tl.store(b_group_ptr + new_slot * N + n, B_part, mask=n < N_if_new)
        C_part = tl.where(n < N, C_part.to(tl.float32), 0.0)
        B_by_C += tl.where(n < N, B_part.to(tl.float32), 0.0) * C_part
        C = C + (C_part,)
    y = dt * tl.sum(B_by_C, axis=0) * x.to(tl.float32)
    if HAS_D:
        y += tl.load(d_ptr + h).to(tl.float32) * x.to(tl.float32)
    j = tl.arange(0, BLOCK_J)
    blocks = (held + BLOCK_J - 1) // BLOCK_J if SLOTS > BLOCK_J else 1
    elapsed = dt
    for block in range(blocks):
        place = (blocks - 1 - block) * BLOCK_J + j
        slot, x_block, dt_block = _buffered(place, held, first, x_row_ptr, dt_row_ptr, p < P, P, SLOTS)
        products = tl.zeros((BLOCK_J, COLUMNS), tl.float32)
        for part in tl.static_range(PARTS):
            n = part * COLUMNS + tl.arange(0, COLUMNS)
            ok = (place < held)[:, None] & (n < N)[None, :]
            B = tl.load(b_group_ptr + slot[:, None] * N + n[None, :], mask=ok, other=0.0)
            products += B.to(tl.float32) * C[part][None, :]
        # The skip weight is that of the new token, which is in `y` already.
        y, elapsed = _add_inputs(y, elapsed, place, held, x_block, dt_block, tl.sum(products, axis=1), A, 0.0)
    products = tl.zeros((BLOCK_P, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        products += as_float32(state[part]) * C[part][None, :]
    y += tl.exp(tl.minimum(A * elapsed, 0.0)) * (tl.sum(products, axis=1) * scale)
    tl.store(y_ptr + (b * H + h) * P + p, y.to(y_ptr.dtype.element_ty), mask=p < P)
    if fold > 0:
        tl.debug_barrier()  # the token that was just appended may be folded, too
        _fold(head_state_ptr, head_state_ptr, state, x_head_ptr, x_row_ptr, b_group_ptr, dt_row_ptr, fold, first, A,
              p0, p, scale, scale_ptr, b * H + h, h, seed, positions_ptr, b, batch, True, P, N, SLOTS, BLOCK_P, BLOCK_J,
              COLUMNS, ROWS)  # fmt: skip


@triton.jit
def _load_state(head_state_ptr, p, P: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, EVICT: tl.constexpr):
    """Rows p of one head's state (P, N), as a tuple of (BLOCK_P, COLUMNS) parts."""
    state = ()
    for part in tl.static_range((N + COLUMNS - 1) // COLUMNS):
        n = part * COLUMNS + tl.arange(0, COLUMNS)
        ok = (p < P)[:, None] & (n < N)[None, :]
        at = head_state_ptr + p[:, None] * N + n[None, :]
        state = state + (tl.load(at, mask=ok, other=0.0, eviction_policy=EVICT),)
    return state


@triton.jit
def _buffered(place, end, first, x_row_ptr, dt_row_ptr, p_ok, P: tl.constexpr, SLOTS: tl.constexpr):
    """Slots, x (J, BLOCK_P) and dt (J,) of the places below `end`; zeros from there on."""
    used = place < end
    slot = ring_slot(first, tl.where(used, place, 0), SLOTS)
    # Masked loads do not touch memory: whatever unused slots hold (NaN included) is never seen.
    dt = tl.load(dt_row_ptr + slot, mask=used, other=0.0)
    x = tl.load(x_row_ptr + slot[:, None] * P, mask=used[:, None] & p_ok[None, :], other=0.0)
    return slot, x, dt


@triton.jit
def _time_behind(dt):
    """The sum of dt behind each place."""
    return tl.maximum(tl.cumsum(dt, axis=0, reverse=True) - dt, 0.0)


@triton.jit
def _fold(
    head_state_ptr,  # (P, N)
    out_ptr,  # the same, or float32 elsewhere
    state,  # with KEPT: rows p of it, (BLOCK_P, COLUMNS) for each part of the columns
    x_head_ptr,  # (SLOTS, P)
    x_row_ptr,  # the same, at rows p
    b_group_ptr,  # of the group, (SLOTS, N)
    dt_row_ptr,  # of the head, (SLOTS,)
    count,
    first,
    A,
    p0,
    p,
    scale,  # (BLOCK_P,), of a checkpoint of 8 bits
    scale_ptr,
    row_head,
    h,
    seed,
    positions_ptr,
    b,
    batch,
    KEPT: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """
    Stores the state after the `count` oldest places of the buffer. With KEPT it is taken from registers. Otherwise it
    is read (again, where the output has just read it): all parts of its columns are under way into shared memory
    before the first is used, so that no registers hold it. What is stored in 8 bits is always read, by rows: ROWS of
    them at a time stay in registers, whole, until what is greatest in each is known.
    """
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    j = tl.arange(0, BLOCK_J)
    whole = count if SLOTS <= BLOCK_J else 0
    first_key, second_key = random_keys(seed, positions_ptr, b, batch, count)
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        slot = ring_slot(first, tl.where(j < whole, j, 0), SLOTS)
        dt = tl.load(dt_row_ptr + slot, mask=j < whole, other=0.0)
        weight = dt * tl.exp(tl.minimum(A * _time_behind(dt), 0.0))
        time = tl.sum(dt, axis=0)
        B = ()
        for part in tl.static_range(PARTS):
            B = B + (_buffered_B(part, j, count, slot, b_group_ptr, N, SLOTS, BLOCK_J, COLUMNS),)
        for turn in tl.range(0, BLOCK_P // ROWS, num_stages=3):
            _fold_rows(p0 + turn * ROWS + tl.arange(0, ROWS), head_state_ptr, out_ptr, slot, weight, time, B, j, whole,
                       x_head_ptr, b_group_ptr, dt_row_ptr, count, first, A, scale_ptr, row_head, h, seed, first_key,
                       second_key, P, N, SLOTS, ROWS, BLOCK_J, COLUMNS)  # fmt: skip
    else:
        slot, x, dt = _buffered(j, whole, first, x_row_ptr, dt_row_ptr, p < P, P, SLOTS)
        weighted, time = _weighted_inputs(j, count, x, dt, A, 0.0)
        if KEPT:
            B = ()
            for part in tl.static_range(PARTS):  # all of them before the first store, which later loads would wait for
                B = B + (_buffered_B(part, j, count, slot, b_group_ptr, N, SLOTS, BLOCK_J, COLUMNS),)
            for part in tl.static_range(PARTS):
                folded = _folded_part(part, state[part], B[part], weighted, time, x_row_ptr, b_group_ptr, dt_row_ptr,
                                      count, first, A, p, j, scale, P, N, SLOTS, BLOCK_P, BLOCK_J, COLUMNS)  # fmt: skip
                _store_part(part, out_ptr, folded, p, h, seed, first_key, second_key, P, N, COLUMNS)
        else:
            for part in tl.range(0, PARTS, num_stages=PARTS + 1):
                n = part * COLUMNS + tl.arange(0, COLUMNS)
                ok = (p < P)[:, None] & (n < N)[None, :]
                again = tl.load(head_state_ptr + p[:, None] * N + n[None, :], mask=ok, other=0.0)
                B = _buffered_B(part, j, count, slot, b_group_ptr, N, SLOTS, BLOCK_J, COLUMNS)
                folded = _folded_part(part, again, B, weighted, time, x_row_ptr, b_group_ptr, dt_row_ptr, count,
                                      first, A, p, j, scale, P, N, SLOTS, BLOCK_P, BLOCK_J, COLUMNS)  # fmt: skip
                _store_part(part, out_ptr, folded, p, h, seed, first_key, second_key, P, N, COLUMNS)


@triton.jit
def _fold_rows(
    p, head_state_ptr, out_ptr, slot, weight, time, B, j, whole, x_head_ptr, b_group_ptr, dt_row_ptr, count, first, A,
    scale_ptr, row_head, h, seed, first_key, second_key, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_J: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[`_fold`] of some rows of a checkpoint of 8 bits."""
    x_row_ptr = x_head_ptr + p[None, :]
    x = tl.load(x_row_ptr + slot[:, None] * P, mask=(j < whole)[:, None] & (p < P)[None, :], other=0.0)
    weighted = tl.trans(x.to(tl.float32) * weight[:, None])
    scale = load_scale(scale_ptr, row_head, p, P)
    state = _load_state(head_state_ptr, p, P, N, COLUMNS, "")
    folded = ()
    greatest = tl.zeros((ROWS,), tl.int32)
    for part in tl.static_range((N + COLUMNS - 1) // COLUMNS):
        columns = _folded_part(part, state[part], B[part], weighted, time, x_row_ptr, b_group_ptr, dt_row_ptr, count,
                               first, A, p, j, scale, P, N, SLOTS, ROWS, BLOCK_J, COLUMNS)  # fmt: skip
        greatest = tl.maximum(greatest, tl.max(absolute_bits(columns), axis=1))
        folded = folded + (columns,)
    inverse = store_scale(scale_ptr, row_head, p, greatest, out_ptr.dtype.element_ty, P)
    for part in tl.static_range((N + COLUMNS - 1) // COLUMNS):
        _store_part(part, out_ptr, folded[part] * inverse[:, None], p, h, seed, first_key, second_key, P, N, COLUMNS)


@triton.jit
def _store_part(
    part, out_ptr, folded, p, h, seed, first_key, second_key, P: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = part * COLUMNS + tl.arange(0, COLUMNS)
    place = ((h * P + p) * N)[:, None] + n[None, :]
    tl.store(
        out_ptr + p[:, None] * N + n[None, :],
        rounded(folded, out_ptr.dtype.element_ty, place, first_key, second_key, seed is not None),
        mask=(p < P)[:, None] & (n < N)[None, :],
    )


@triton.jit
def _buffered_B(
    part, place, end, slot, b_group_ptr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A part of the columns of B at some places below `end`, (J, COLUMNS); unused where BLOCK_J does not span SLOTS."""
    n = part * COLUMNS + tl.arange(0, COLUMNS)
    ok = (place < (end if SLOTS <= BLOCK_J else 0))[:, None] & (n < N)[None, :]
    return tl.load(b_group_ptr + slot[:, None] * N + n[None, :], mask=ok, other=0.0)


@triton.jit
def _folded_part(
    part, state, B, weighted, time, x_row_ptr, b_group_ptr, dt_row_ptr, count, first, A, p, j, scale,
    P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A part of the columns, float32. `B`, `weighted` and `time` serve where BLOCK_J spans the buffer."""
    n = part * COLUMNS + tl.arange(0, COLUMNS)
    inputs = tl.zeros((BLOCK_P, COLUMNS), tl.float32)
    if SLOTS <= BLOCK_J:
        inputs = dot_float32_by_16bit(weighted, B, inputs)
    else:
        time = tl.zeros((), tl.float32)
        blocks = (count + BLOCK_J - 1) // BLOCK_J
        for block in range(blocks):
            place = (blocks - 1 - block) * BLOCK_J + j
            slot, x, dt = _buffered(place, count, first, x_row_ptr, dt_row_ptr, p < P, P, SLOTS)
            weighted, time = _weighted_inputs(place, count, x, dt, A, time)
            ok = (place < count)[:, None] & (n < N)[None, :]
            B_block = tl.load(b_group_ptr + slot[:, None] * N + n[None, :], mask=ok, other=0.0)
            inputs = dot_float32_by_16bit(weighted, B_block, inputs)
    decay = tl.exp(tl.minimum(A * time, 0.0)) * scale
    return decay[:, None] * as_float32(state, True) + inputs


@triton.jit
def _weighted_inputs(place, count, x, dt, A, after_all):
    """
    dt_j exp(A (time behind j)) x_j, (BLOCK_P, J) float32, of the places below `count` (zeros for the others), when
    `after_all` has passed since the newest of them; and `after_all` with their own time.
    """
    dt = tl.where(place < count, dt, 0.0)
    weight = dt * tl.exp(tl.minimum(A * (_time_behind(dt) + after_all), 0.0))
    return tl.trans(x.to(tl.float32) * weight[:, None]), after_all + tl.sum(dt, axis=0)


@triton.jit(do_not_specialize=["batch", "T", "seed"])
def _window_kernel(
    positions_ptr,
    checkpoint_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    scores_ptr,  # (batch, group, T, SLOTS)
    c_ptr,  # (batch, T, group, N)
    a_ptr,
    d_ptr,
    y_ptr,  # (batch, T, head, P)
    batch,
    c_stride_b, c_stride_t, c_stride_g,
    T,
    c_unit_ptr,  # (batch, T, group), or None
    scale_ptr,
    seed,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVICT: tl.constexpr,
    WAITS: tl.constexpr,  # for the launch before, which it overlaps with
    FLUSH: tl.constexpr,  # here; or (windows of several pieces) in a launch of _fold_kernel that follows
):  # fmt: skip
    """
    A piece of a window, one tile: BLOCK_P rows of the state of one head. All products are (BLOCK_P, .) times (., T): a
    matrix unit takes eight tokens at a time on that side, and no fewer than sixteen on the other.
    """
    PARTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    t0 = tl.program_id(1) * BLOCK_T  # windows beyond BLOCK_T tokens: one pass over the state for each piece
    b, h, g, p0, p = _tile(tl.program_id(0), H, G, P, BLOCK_P)
    p_ok = p < P
    first, held, count, fold = row_positions(positions_ptr, b, batch, SLOTS)
    head_state_ptr = checkpoint_ptr + (b * H + h) * (P * N)
    scale = load_scale(scale_ptr, b * H + h, p, P)
    if WAITS:
        wait_for_previous()
    A = tl.load(a_ptr + h).to(tl.float32)
    D = tl.load(d_ptr + h).to(tl.float32) if HAS_D else 0.0
    x_head_ptr = x_buffer_ptr + (b * H + h) * (SLOTS * P)
    x_row_ptr = x_head_ptr + p[:, None]
    b_group_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N)
    dt_row_ptr = dt_buffer_ptr + (b * H + h) * SLOTS
    t = t0 + tl.arange(0, BLOCK_T)
    t_ok = t < tl.minimum(T, count)
    row_scores_ptr = scores_ptr + (b * G + g) * (T * SLOTS) + t[None, :] * SLOTS

    # Time is counted backwards from the end of the piece: a difference of two such sums is as exact as its exponent
    # needs, since the one that is subtracted is small.
    start = held + tl.minimum(count, t0)
    end = tl.minimum(held + count, start + BLOCK_T)
    dt_t = tl.load(dt_row_ptr + ring_slot(first, tl.where(t_ok, held + t, 0), SLOTS), mask=t_ok, other=0.0)
    behind_t = _time_behind(dt_t)

    # One loop over parts of the state by C and, beside them, over blocks of the buffer by their weights, the piece's
    # own tokens first (time adds up from the newest token to the oldest). The loads of its first turns are all under
    # way, asynchronously into shared memory, before the first product.
    y_state = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
    y = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
    elapsed = tl.zeros((), tl.float32)
    for turn in tl.range(0, tl.maximum(PARTS, (end + BLOCK_J - 1) // BLOCK_J), num_stages=PARTS + 1):
        n = turn * COLUMNS + tl.arange(0, COLUMNS)
        state_ok = p_ok[:, None] & (n < N)[None, :]
        state = tl.load(head_state_ptr + p[:, None] * N + n[None, :], mask=state_ok, other=0.0, eviction_policy=EVICT)
        at = b * c_stride_b + g * c_stride_g + t[None, :] * c_stride_t + n[:, None]
        C = tl.load(c_ptr + at, mask=t_ok[None, :] & (n < N)[:, None], other=0.0)
        if c_unit_ptr is not None:
            state = as_float16(state)
        elif state.dtype.primitive_bitwidth == 8:
            state = as_float32(state)
        y_state = dot_for_output(state.to(tl.float32) if C.dtype == tl.float32 else state, C, y_state)

        place = end - (turn + 1) * BLOCK_J + tl.arange(0, BLOCK_J)
        used = place >= 0
        slot = ring_slot(first, tl.where(used, place, 0), SLOTS)
        dt = tl.load(dt_row_ptr + slot, mask=used, other=0.0)
        x = tl.load(x_row_ptr + slot[None, :] * P, mask=p_ok[:, None] & used[None, :], other=0.0)
        visible = used[:, None] & (place[:, None] <= held + t[None, :]) & t_ok[None, :]
        scores = tl.load(row_scores_ptr + place[:, None], mask=visible, other=0.0)
        exponent = A * ((_time_behind(dt) + elapsed)[:, None] - behind_t[None, :])
        weight = dt[:, None] * tl.exp(tl.where(visible, tl.minimum(exponent, 0.0), float("-inf"))) * scores
        weight += tl.where(place[:, None] == held + t[None, :], D, 0.0)
        y = dot_for_output(x, weight, y)
        elapsed += tl.sum(dt, axis=0)
    if c_unit_ptr is not None:
        y_state *= tl.load(c_unit_ptr + (b * T + t) * G + g, mask=t_ok, other=0.0)[None, :]
    y += tl.exp(tl.minimum(A * (elapsed - behind_t), 0.0))[None, :] * (y_state * scale[:, None])
    tl.store(
        y_ptr + (b * (T * H) + h) * P + t[None, :] * (H * P) + p[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(t < T)[None, :] & p_ok[:, None],
    )

    # In narrow parts: what a flush needs in registers, all windows pay for.
    FOLD_COLUMNS: tl.constexpr = COLUMNS if COLUMNS < 32 else 32
    if FLUSH:
        if fold > 0:
            _fold(head_state_ptr, head_state_ptr, 0, x_head_ptr, tl.trans(x_row_ptr), b_group_ptr, dt_row_ptr, fold,
                  first, A, p0, p, scale, scale_ptr, b * H + h, h, seed, positions_ptr, b, batch, False, P, N, SLOTS,
                  BLOCK_P, BLOCK_J, FOLD_COLUMNS, ROWS)  # fmt: skip


@triton.jit(do_not_specialize=["batch", "seed"])
def _fold_kernel(
    positions_ptr,
    checkpoint_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    a_ptr,
    out_ptr,  # (batch, head, P, N), or the checkpoint itself
    batch,
    scale_ptr,
    seed,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """
    The states after the FOLD oldest tokens; with INPLACE, of the rows that fold any. A few programs go through all
    tiles: some configurations launch this behind every step, and where no row flushes it must not take long.
    """
    most = 0
    for b0 in range(0, batch, 256):
        row = b0 + tl.arange(0, 256)
        most = tl.maximum(most, tl.max(tl.load(positions_ptr + 4 * batch + row, mask=row < batch, other=0), axis=0))
    tiles = batch * H * ((P + BLOCK_P - 1) // BLOCK_P)
    if INPLACE:
        tiles = tl.where(most > 0, tiles, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        b, h, g, p0, p = _tile(tile, H, G, P, BLOCK_P)
        fold = tl.minimum(tl.load(positions_ptr + 4 * batch + b), SLOTS)
        if (fold > 0) | (not INPLACE):
            head = (b * H + h) * (P * N)
            _fold(
                checkpoint_ptr + head, out_ptr + head, 0,
                x_buffer_ptr + (b * H + h) * (SLOTS * P),
                x_buffer_ptr + (b * H + h) * (SLOTS * P) + p[None, :], b_buffer_ptr + (b * G + g) * (SLOTS * N),
                dt_buffer_ptr + (b * H + h) * SLOTS, fold, tl.load(positions_ptr + batch + b),
                tl.load(a_ptr + h).to(tl.float32), p0, p, load_scale(scale_ptr, b * H + h, p, P), scale_ptr, b * H + h,
                h, seed, positions_ptr, b, batch, False, P, N, SLOTS, BLOCK_P, BLOCK_J, COLUMNS, ROWS,
            )  # fmt: skip
