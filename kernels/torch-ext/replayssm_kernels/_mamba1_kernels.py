"""
Mamba-1 from a checkpoint and a buffer of the inputs since: steps, windows of drafted tokens, flushes, and scans.

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t,   y_t = (C_t S_t + D x_t) silu(z_t)

The decay is one of a channel and a column of the state, so an output needs the state before it: a program holds some
channels with all their columns in registers, reads the checkpoint once, and takes its channels through the held tokens
and the new ones. The state is written where the last token is passed that the row folds, and otherwise not at all.

Layouts: a state is (batch, group, N, P), A (group, N, P): the channels of a group lie next to each other, so a thread
has whole channels (dt and what depends on it are computed once a channel, and the sum over columns needs no other
thread). x and dt (batch, group, slot, P), B (batch, group, slot, N).

A tile is N columns by BLOCK_P channels of a group. A step takes it through one row after the other, and A stays in
registers for all of them. The loads of AHEAD tokens are under way before the first is used.

A checkpoint of 8 bits has a float32 scale for each channel, (batch, group, P), which all its columns share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._arithmetic import INTERPRETED, is_cuda, widened
from ._overlap import wait_for_previous
from ._positions import ring_slot, row_positions
from ._rounding import absolute_bits, as_float32, load_scale, random_keys, rounded, store_scale


LOG2_E = tl.constexpr(1.4426950408889634)
UNROLLED = tl.constexpr(6)  # slots of a buffer whose tokens a step asks for all at once


@triton.jit(do_not_specialize=["batch", "rows", "seed"])
def _step_kernel(
    positions_ptr,  # (5, batch)
    x_ptr,  # (batch, 1, group, P)
    dt_ptr,  # likewise
    b_ptr,  # (batch, 1, group, N)
    c_ptr,  # likewise
    z_ptr,  # (batch, 1, group, P), or unused
    dt_bias_ptr,  # (group, P), or unused
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    checkpoint_ptr,
    a_ptr,
    d_ptr,  # (group, P), or unused
    y_ptr,  # (batch, 1, group, P)
    batch,
    rows,  # of a program
    x_stride_b, x_stride_t, x_stride_g, x_stride_p,
    dt_stride_b, dt_stride_t, dt_stride_g, dt_stride_p,
    b_stride_b, b_stride_t, b_stride_g,
    c_stride_b, c_stride_t, c_stride_g,
    z_stride_b, z_stride_t, z_stride_g, z_stride_p,
    scale_ptr,  # (batch, group, P), of a checkpoint of 8 bits; else None
    seed,  # of stochastic rounding; None: to the nearest
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    RAW: tl.constexpr,  # dt still needs its bias and softplus
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICT: tl.constexpr,  # eviction policy of the checkpoint's loads
    SINGLE: tl.constexpr,  # each program has one row
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A new token of each row: appended, its output, and the flush of the rows that fold."""
    if OVERLAPS:
        wait_for_previous()
    tile, row0, g, n, p = _tile(rows, G, P, BLOCK_N, BLOCK_P, VECTOR)
    # Where a row stands is read a row ahead, the first before all else: what is held can be asked for only then.
    next_first, next_held, next_count, next_fold = row_positions(positions_ptr, row0, batch, SLOTS)
    n_ok, p_ok = n < N, p < P
    ok = n_ok[:, None] & p_ok[None, :]
    A, bias, D = _parameters(a_ptr, dt_bias_ptr, d_ptr, g, n, p, ok, p_ok, N, P, RAW, HAS_D)
    appends_B = tile % ((P + BLOCK_P - 1) // BLOCK_P) == 0  # one program of a group does
    # (A loop that is known to have one turn is none: nothing is read ahead, and the state's address comes sooner.)
    begin = 0 if SINGLE else row0
    stop = 1 if SINGLE else tl.minimum(row0 + rows, batch)
    for turn in range(begin, stop):
        row = row0 if SINGLE else turn
        b = tl.cast(row, tl.int64)
        # The state and the new token first: they do not depend on where the row stands.
        state_at = checkpoint_ptr + (b * G + g) * (N * P) + n[:, None] * P + p[None, :]
        S = as_float32(tl.load(state_at, mask=ok, other=0.0, eviction_policy=EVICT))
        S = _with_scale(S, scale_ptr, b * G + g, p, P)
        b_at = b_ptr + b * b_stride_b + g * b_stride_g + n
        x, dt, B, C, z = _load_token(
            x_ptr + b * x_stride_b + g * x_stride_g + p * x_stride_p,
            dt_ptr + b * dt_stride_b + g * dt_stride_g + p * dt_stride_p,
            b_at, c_ptr + b * c_stride_b + g * c_stride_g + n,
            z_ptr + b * z_stride_b + g * z_stride_g + p * z_stride_p, p_ok, n_ok, HAS_Z, RAW,
        )  # fmt: skip
        x_held_ptr = x_buffer_ptr + (b * G + g) * (SLOTS * P) + p
        dt_held_ptr = dt_buffer_ptr + (b * G + g) * (SLOTS * P) + p
        b_held_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N) + n
        first, held, count, fold = next_first, next_held, tl.minimum(next_count, 1), next_fold
        next_row = tl.minimum(row + 1, batch - 1)
        next_first, next_held, next_count, next_fold = row_positions(positions_ptr, next_row, batch, SLOTS)
        end = tl.where(count > 0, held, tl.minimum(held, fold))  # (without new tokens there is no output)
        if SLOTS <= UNROLLED:
            # Beside a new token there are at most SLOTS - 1: only without one may the last place be taken.
            tokens = ()
            for j in tl.static_range(SLOTS - 1):
                slot = ring_slot(first, j, SLOTS)
                token = _load_held(x_held_ptr, dt_held_ptr, b_held_ptr, slot, p < tl.where(j < end, P, 0),
                                   n < tl.where(j < end, N, 0), N, P)  # fmt: skip
                tokens = tokens + (token,)
            for j in tl.static_range(SLOTS):
                if j < end:
                    if j < SLOTS - 1:
                        x_held, dt_held, B_held = tokens[j]
                    else:
                        x_held, dt_held, B_held = _load_held(
                            x_held_ptr, dt_held_ptr, b_held_ptr, ring_slot(first, j, SLOTS), p_ok, n_ok, N, P
                        )
                    S = _advance(S, x_held, dt_held, B_held, A, bias, RAW)
                    if j + 1 == fold:
                        _store_state(S, state_at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G, N, P)
        else:
            S = _replay(S, state_at, x_held_ptr, dt_held_ptr, b_held_ptr, first, end, fold, A, bias, ok, n, p,
                        scale_ptr, seed, positions_ptr, b, batch, g, G, N, P, SLOTS, RAW, AHEAD)  # fmt: skip
        if count > 0:
            slot = ring_slot(first, held, SLOTS)
            _new_token(S, x, dt, B, C, z, held, fold, slot, state_at, y_ptr + (b * G + g) * P + p, x_held_ptr,
                       dt_held_ptr, A, D, bias, ok, p_ok, n, p, scale_ptr, seed, positions_ptr, b, batch, g, G, N, P,
                       HAS_D, HAS_Z, RAW)  # fmt: skip
            if appends_B & (held >= fold):
                tl.store(b_held_ptr + slot * N, tl.load(b_at, mask=n_ok), mask=n_ok)


@triton.jit(do_not_specialize=["batch", "T", "seed"])
def _window_kernel(
    positions_ptr,  # these as for _step_kernel
    x_ptr,  # (batch, T, group, P)
    dt_ptr,
    b_ptr,
    c_ptr,
    z_ptr,
    dt_bias_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    checkpoint_ptr,
    a_ptr,
    d_ptr,
    y_ptr,  # (batch, T, group, P)
    batch,
    T,
    x_stride_b, x_stride_t, x_stride_g, x_stride_p,
    dt_stride_b, dt_stride_t, dt_stride_g, dt_stride_p,
    b_stride_b, b_stride_t, b_stride_g,
    c_stride_b, c_stride_t, c_stride_g,
    z_stride_b, z_stride_t, z_stride_g, z_stride_p,
    scale_ptr,
    seed,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VECTOR: tl.constexpr,
    EVICT: tl.constexpr,
    STAGES: tl.constexpr,  # tokens whose loads are under way while one is computed, and that one
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """New tokens of a row: appended, their outputs, and the flush if the row folds."""
    if OVERLAPS:
        wait_for_previous()
    tile, row, g, n, p = _tile(1, G, P, BLOCK_N, BLOCK_P, VECTOR)
    b = tl.cast(row, tl.int64)
    n_ok, p_ok = n < N, p < P
    ok = n_ok[:, None] & p_ok[None, :]
    # What does not depend on where the row stands is asked for first. Without the barrier, the compiler would have the
    # positions waited for in front of these loads.
    state_at = checkpoint_ptr + (b * G + g) * (N * P) + n[:, None] * P + p[None, :]
    stored = tl.load(state_at, mask=ok, other=0.0, eviction_policy=EVICT)
    A, bias, D = _parameters(a_ptr, dt_bias_ptr, d_ptr, g, n, p, ok, p_ok, N, P, RAW, HAS_D)
    tl.debug_barrier()
    first, held, count, fold = row_positions(positions_ptr, row, batch, SLOTS)
    count = tl.minimum(count, T)
    S = _with_scale(as_float32(stored), scale_ptr, b * G + g, p, P)
    appends_B = tile % ((P + BLOCK_P - 1) // BLOCK_P) == 0  # one program of a group does
    x_row_ptr = x_ptr + b * x_stride_b + g * x_stride_g + p * x_stride_p
    dt_row_ptr = dt_ptr + b * dt_stride_b + g * dt_stride_g + p * dt_stride_p
    b_row_ptr = b_ptr + b * b_stride_b + g * b_stride_g + n
    c_row_ptr = c_ptr + b * c_stride_b + g * c_stride_g + n
    z_row_ptr = z_ptr + b * z_stride_b + g * z_stride_g + p * z_stride_p
    y_row_ptr = y_ptr + (b * (T * G) + g) * P + p
    x_held_ptr = x_buffer_ptr + (b * G + g) * (SLOTS * P) + p
    dt_held_ptr = dt_buffer_ptr + (b * G + g) * (SLOTS * P) + p
    b_held_ptr = b_buffer_ptr + (b * G + g) * (SLOTS * N) + n
    end = tl.where(count > 0, held, tl.minimum(held, fold))  # (without new tokens there is no output)

    # The next tokens are under way, into shared memory, while one is computed.
    for j in tl.range(0, end, num_stages=STAGES):
        x, dt, B = _load_held(x_held_ptr, dt_held_ptr, b_held_ptr, ring_slot(first, j, SLOTS), p_ok, n_ok, N, P)
        S = _advance(S, x, dt, B, A, bias, RAW)
        if j + 1 == fold:
            _store_state(S, state_at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G, N, P)
    for t in tl.range(0, count, num_stages=STAGES):
        x, dt, B, C, z = _load_token(
            x_row_ptr + _far(t, x_stride_t), dt_row_ptr + _far(t, dt_stride_t), b_row_ptr + _far(t, b_stride_t),
            c_row_ptr + _far(t, c_stride_t), z_row_ptr + _far(t, z_stride_t), p_ok, n_ok, HAS_Z, RAW,
        )  # fmt: skip
        S = _new_token(S, x, dt, B, C, z, held + t, fold, ring_slot(first, held + t, SLOTS), state_at,
                       y_row_ptr + t * (G * P), x_held_ptr, dt_held_ptr, A, D, bias, ok, p_ok, n, p, scale_ptr, seed,
                       positions_ptr, b, batch, g, G, N, P, HAS_D, HAS_Z, RAW)  # fmt: skip
    # (Apart from the rest: there every program would have each token's B in a store's layout.)
    if appends_B:
        for t in range(tl.maximum(fold - held, 0), count):
            B = tl.load(b_row_ptr + _far(t, b_stride_t), mask=n_ok)
            tl.store(b_held_ptr + ring_slot(first, held + t, SLOTS) * N, B, mask=n_ok)


@triton.jit
def _far(t, stride):
    """t times a stride, neither of which is negative, in 64 bits. (Signed, the product would be three.)"""
    if (t * stride).dtype == tl.int32:
        return (tl.cast(t, tl.uint32).to(tl.uint64) * tl.cast(stride, tl.uint32).to(tl.uint64)).to(tl.int64)
    else:
        return tl.cast(t, tl.int64) * stride


@triton.jit
def _new_token(
    S, x, dt, B, C, z, place, fold, slot, state_at, y_at, x_held_ptr, dt_held_ptr, A, D, bias, ok, p_ok, n, p,
    scale_ptr, seed, positions_ptr, b, batch, g, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """
    The state behind a new token, whose output is stored, and whose x and dt are appended at its place in the buffer:
    unless this call folds it, for then nobody reads it again.
    """
    S = _advance(S, x, dt, B, A, bias, RAW)
    y = _output(S, x, C, z, D, HAS_D, HAS_Z)
    tl.store(y_at, y.to(y_at.dtype.element_ty), mask=p_ok)
    if place >= fold:
        tl.store(x_held_ptr + slot * P, x, mask=p_ok)
        tl.store(dt_held_ptr + slot * P, dt, mask=p_ok)
    if place + 1 == fold:
        _store_state(S, state_at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G, N, P)
    return S


@triton.jit
def _with_scale(S, scale_ptr, row_group, p, P: tl.constexpr):
    """What was stored of channels p, with their scales where it has some."""
    if scale_ptr is not None:
        S *= load_scale(scale_ptr, row_group, p, P)[None, :]
    return S


@triton.jit
def _store_state(
    S, state_at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """The state behind `fold` tokens as the checkpoint stores it."""
    dtype = state_at.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        greatest = tl.max(absolute_bits(S), axis=0)
        S *= store_scale(scale_ptr, b * G + g, p, greatest, dtype, P)[None, :]
    first_key, second_key = random_keys(seed, positions_ptr, b, batch, fold)
    place = (g * N + n)[:, None] * P + p[None, :]
    tl.store(state_at, rounded(S, dtype, place, first_key, second_key, seed is not None), mask=ok)


@triton.jit(do_not_specialize=["batch", "rows", "seed"])
def _fold_kernel(
    positions_ptr,
    x_buffer_ptr,
    b_buffer_ptr,
    dt_buffer_ptr,
    dt_bias_ptr,
    checkpoint_ptr,
    a_ptr,
    out_ptr,  # (batch, group, N, P), or the checkpoint itself
    batch,
    rows,
    scale_ptr,
    seed,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    SLOTS: tl.constexpr,
    INPLACE: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The states after the FOLD oldest tokens; with INPLACE, of the rows that fold any."""
    _, row0, g, n, p = _tile(rows, G, P, BLOCK_N, BLOCK_P, VECTOR)
    n_ok, p_ok = n < N, p < P
    ok = n_ok[:, None] & p_ok[None, :]
    A, bias = _rates(a_ptr, dt_bias_ptr, g, n, p, ok, p_ok, N, P, RAW)
    for row in range(row0, tl.minimum(row0 + rows, batch)):
        b = tl.cast(row, tl.int64)
        fold = tl.minimum(tl.load(positions_ptr + 4 * batch + b), SLOTS)
        if (fold > 0) | (not INPLACE):
            at = (b * G + g) * (N * P) + n[:, None] * P + p[None, :]
            S = as_float32(tl.load(checkpoint_ptr + at, mask=ok, other=0.0))
            S = _with_scale(S, scale_ptr, b * G + g, p, P)
            S = _replay(
                S, checkpoint_ptr + at, x_buffer_ptr + (b * G + g) * (SLOTS * P) + p,
                dt_buffer_ptr + (b * G + g) * (SLOTS * P) + p, b_buffer_ptr + (b * G + g) * (SLOTS * N) + n,
                tl.load(positions_ptr + batch + b), fold, 0, A, bias, ok, n, p, scale_ptr, seed, positions_ptr, b,
                batch, g, G, N, P, SLOTS, RAW, AHEAD,
            )  # fmt: skip
            _store_state(S, out_ptr + at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G, N, P)


@triton.jit(do_not_specialize=["batch", "T"])
def _scan_kernel(
    x_ptr,  # these as for _step_kernel
    dt_ptr,
    b_ptr,
    c_ptr,
    z_ptr,
    dt_bias_ptr,
    initial_ptr,  # (batch, group, N, P), or unused
    a_ptr,
    d_ptr,
    y_ptr,
    out_ptr,  # the state behind the last token, (batch, group, N, P)
    batch,
    T,
    x_stride_b, x_stride_t, x_stride_g, x_stride_p,
    dt_stride_b, dt_stride_t, dt_stride_g, dt_stride_p,
    b_stride_b, b_stride_t, b_stride_g,
    c_stride_b, c_stride_t, c_stride_g,
    z_stride_b, z_stride_t, z_stride_g, z_stride_p,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """A whole sequence, one tile of one row: token after token, the state in registers."""
    _, row, g, n, p = _tile(1, G, P, BLOCK_N, BLOCK_P, VECTOR)
    n_ok, p_ok = n < N, p < P
    ok = n_ok[:, None] & p_ok[None, :]
    A, bias, D = _parameters(a_ptr, dt_bias_ptr, d_ptr, g, n, p, ok, p_ok, N, P, RAW, HAS_D)
    b = tl.cast(row, tl.int64)
    at = (b * G + g) * (N * P) + n[:, None] * P + p[None, :]
    if HAS_INITIAL:
        S = tl.load(initial_ptr + at, mask=ok, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    x_ptr += b * x_stride_b + g * x_stride_g
    dt_ptr += b * dt_stride_b + g * dt_stride_g
    b_ptr += b * b_stride_b + g * b_stride_g
    c_ptr += b * c_stride_b + g * c_stride_g
    z_ptr += b * z_stride_b + g * z_stride_g
    y_ptr += b * T * (G * P) + g * P
    x_ptr += p * x_stride_p
    dt_ptr += p * dt_stride_p
    z_ptr += p * z_stride_p
    tokens = _load_tokens(0, T, x_ptr, dt_ptr, b_ptr + n, c_ptr + n, z_ptr, x_stride_t, dt_stride_t, b_stride_t,
                          c_stride_t, z_stride_t, n, p, N, P, HAS_Z, RAW, AHEAD)  # fmt: skip
    for t0 in range(0, T, AHEAD):
        next_tokens = _load_tokens(
            t0 + AHEAD, T, x_ptr, dt_ptr, b_ptr + n, c_ptr + n, z_ptr, x_stride_t, dt_stride_t, b_stride_t, c_stride_t,
            z_stride_t, n, p, N, P, HAS_Z, RAW, AHEAD,
        )  # fmt: skip
        for u in tl.static_range(AHEAD):
            x, dt, B, C, z = tokens[u]
            t = tl.cast(t0 + u, tl.int64)
            S = _advance(S, x, dt, B, A, bias, RAW)
            y = _output(S, x, C, z, D, HAS_D, HAS_Z)
            tl.store(y_ptr + t * (G * P) + p, y.to(y_ptr.dtype.element_ty), mask=p < tl.where(t < T, P, 0))
        tokens = next_tokens
    tl.store(out_ptr + at, S, mask=ok)


@triton.jit
def _tile(rows, G: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
          VECTOR: tl.constexpr):  # fmt: skip
    """
    Number of this program's tile, its first row, its group, columns (BLOCK_N,) and channels of the group (BLOCK_P,).
    Neighbours in memory are neighbours in the grid. A thread gets VECTOR channels that lie next to each other, and all
    the columns of these where a warp has 32 VECTOR channels.
    """
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    TILES: tl.constexpr = G * P_BLOCKS
    tile = tl.program_id(0) % TILES
    p = (tile % P_BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    p = tl.max_contiguous(tl.multiple_of(p, VECTOR), VECTOR)
    return tile, (tl.program_id(0) // TILES) * rows, tile // P_BLOCKS, tl.arange(0, BLOCK_N), p


@triton.jit
def _rates(a_ptr, dt_bias_ptr, g, n, p, ok, p_ok, N: tl.constexpr, P: tl.constexpr, RAW: tl.constexpr):
    """A (BLOCK_N, BLOCK_P) and the bias of dt (BLOCK_P,)."""
    A = tl.load(a_ptr + g * (N * P) + n[:, None] * P + p[None, :], mask=ok, other=0.0).to(tl.float32)
    bias = 0.0
    if RAW:
        bias = tl.load(dt_bias_ptr + g * P + p, mask=p_ok, other=0.0).to(tl.float32)
    return A, bias


@triton.jit
def _parameters(
    a_ptr, dt_bias_ptr, d_ptr, g, n, p, ok, p_ok, N: tl.constexpr, P: tl.constexpr, RAW: tl.constexpr,
    HAS_D: tl.constexpr,
):  # fmt: skip
    """What `_rates` gives, and D (BLOCK_P,)."""
    A, bias = _rates(a_ptr, dt_bias_ptr, g, n, p, ok, p_ok, N, P, RAW)
    D = tl.load(d_ptr + g * P + p, mask=p_ok, other=0.0).to(tl.float32) if HAS_D else 0.0
    return A, bias, D


@triton.jit
def _load_token(x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, p_ok, n_ok, HAS_Z: tl.constexpr, RAW: tl.constexpr):
    """x, dt, B, C and z of a token. Masked, it has no effect: zeros, and a raw dt of minus infinity."""
    x = tl.load(x_ptr, mask=p_ok, other=0.0)
    dt = tl.load(dt_ptr, mask=p_ok, other=float("-inf") if RAW else 0.0)
    B = tl.load(b_ptr, mask=n_ok, other=0.0)
    C = tl.load(c_ptr, mask=n_ok, other=0.0)
    z = tl.load(z_ptr, mask=p_ok, other=0.0) if HAS_Z else x
    return x, dt, B, C, z


@triton.jit
def _load_tokens(
    t0, end, x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, x_stride_t, dt_stride_t, b_stride_t, c_stride_t, z_stride_t, n, p,
    N: tl.constexpr, P: tl.constexpr, HAS_Z: tl.constexpr, RAW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AHEAD tokens from t0 on; those from `end` on have no effect."""
    tokens = ()
    for u in tl.static_range(AHEAD):
        t = tl.cast(t0 + u, tl.int64)
        tokens = tokens + (_load_token(
            x_ptr + t * x_stride_t, dt_ptr + t * dt_stride_t, b_ptr + t * b_stride_t, c_ptr + t * c_stride_t,
            z_ptr + t * z_stride_t, p < tl.where(t < end, P, 0), n < tl.where(t < end, N, 0), HAS_Z, RAW,
        ),)  # fmt: skip
    return tokens


@triton.jit
def _load_held(x_held_ptr, dt_held_ptr, b_held_ptr, slot, p_ok, n_ok, N: tl.constexpr, P: tl.constexpr):
    """x, dt and B of the token in a slot of the buffer."""
    x = tl.load(x_held_ptr + slot * P, mask=p_ok, other=0.0)
    dt = tl.load(dt_held_ptr + slot * P, mask=p_ok, other=0.0)
    return x, dt, tl.load(b_held_ptr + slot * N, mask=n_ok, other=0.0)


@triton.jit
def _softplus(x):
    """
    log(1 + exp(x)) in float32, accurate for very negative x too. Every channel and token that is replayed needs one, so
    it has to be cheap, and above all in the unit that computes exponentials and reciprocals: with e = exp(-|x|) <= 1 it
    is max(x, 0) + log(1 + e), and log(1 + e) / e a polynomial (a minimax fit on [0, 1], relative error 5e-9).
    """
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    q = -0.003244023071601987 * e + 0.019851453602313995
    q = q * e - 0.05695951730012894
    q = q * e + 0.10603652894496918
    q = q * e - 0.15305592119693756
    q = q * e + 0.1967593878507614
    q = q * e - 0.24954134225845337
    q = q * e + 0.3332996368408203
    q = q * e - 0.4999990165233612
    q = q * e + 1.0
    return tl.maximum(x, 0.0) + e * q


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)); the denominator is at least 1, so that the reciprocal needs no care for small numbers."""
    denominator = 1.0 + tl.exp2(-x * LOG2_E)
    if not INTERPRETED:
        if is_cuda():
            return x * tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=r,r", [denominator], tl.float32, is_pure=True, pack=1
            )
    return x / denominator


@triton.jit
def _advance(S, x, dt, B, A, bias, RAW: tl.constexpr):
    """The state (BLOCK_N, BLOCK_P) one token later. The same for a new token as for one that is replayed."""
    dt = widened(dt)
    if RAW:
        dt = _softplus(dt + bias)
    new = widened(B)[:, None] * (dt * widened(x))[None, :]
    return S * tl.exp2(A * (dt * LOG2_E)[None, :]) + new


@triton.jit
def _output(S, x, C, z, D, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """y (BLOCK_P,) float32."""
    y = tl.sum(S * widened(C)[:, None], axis=0)
    if HAS_D:
        y += D * widened(x)
    if HAS_Z:
        y *= _silu(widened(z))
    return y


@triton.jit
def _replay(
    S,
    state_at,  # where the state after `fold` tokens is stored; nowhere with `fold` = 0
    x_held_ptr,  # of the row and group, at channels p
    dt_held_ptr,
    b_held_ptr,  # at columns n
    first,
    end,
    fold,
    A,
    bias,
    ok,
    n,
    p,
    scale_ptr,  # these as for `_store_state`
    seed,
    positions_ptr,
    b,
    batch,
    g,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    SLOTS: tl.constexpr,
    RAW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The state after the `end` oldest tokens of the buffer, from the one before them."""
    for j0 in range(0, end, AHEAD):
        tokens = ()
        for u in tl.static_range(AHEAD):
            used = j0 + u < end
            slot = ring_slot(first, tl.where(used, j0 + u, 0), SLOTS)
            tokens = tokens + (_load_held(x_held_ptr, dt_held_ptr, b_held_ptr, slot, p < tl.where(used, P, 0),
                                          n < tl.where(used, N, 0), N, P),)  # fmt: skip
        for u in tl.static_range(AHEAD):
            if j0 + u < end:
                x, dt, B = tokens[u]
                S = _advance(S, x, dt, B, A, bias, RAW)
                if j0 + u + 1 == fold:
                    _store_state(S, state_at, ok, n, p, scale_ptr, seed, positions_ptr, b, batch, fold, g, G, N, P)
    return S
