"""The output-only decode step of Mamba-2, from a checkpoint and the inputs buffered since.

For a batch row b and a head h (B and C are shared by the heads of group g = h // (H / G)), with n = held[b] slots
in use, the newest of which is the current token:

    y = exp(A pre_last) (S0 C)  +  sum_{j<n} dt_j exp(A (pre_last - pre_j)) (B_j . C) x_j  +  D x_{n-1}

where pre_j is the sum of dt over slots 0..j. The state itself is read once and never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import next_power_of_2, on_device_of


@triton.jit
def _replay_step_kernel(
    state_ptr,  # (batch, head, P, N), fp32 or 16 bits
    x_ptr,  # (batch, head, capacity, P)
    b_ptr,  # (batch, group, capacity, N)
    dt_ptr,  # (batch, head, capacity), fp32
    held_ptr,  # (batch,), int32
    a_ptr,  # (head,), fp32
    c_ptr,  # (batch, group, N)
    d_ptr,  # (head,), or anything where HAS_D is false
    y_ptr,  # (batch, head, P)
    s_state_b, s_state_h, s_state_p, s_state_n,
    s_x_b, s_x_h, s_x_j, s_x_p,
    s_b_b, s_b_g, s_b_j, s_b_n,
    s_dt_b, s_dt_h, s_dt_j,
    s_held_b, s_a_h,
    s_c_b, s_c_g, s_c_n,
    s_d_h,
    s_y_b, s_y_h, s_y_p,
    capacity,
    H: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK_P: tl.constexpr,  # rows of the state in a program
    BLOCK_N: tl.constexpr,  # columns of the state at a time
    BLOCK_J: tl.constexpr,  # a power of two >= capacity: all slots at once
):  # fmt: skip
    # One program: one (batch, head), BLOCK_P rows of its state. Every offset is 64 bits wide.
    pid = tl.program_id(0).to(tl.int64)
    b = pid // H
    h = pid % H
    g = h // HEADS_PER_GROUP
    p = tl.program_id(1).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_J).to(tl.int64)

    # A masked load does not touch memory, so whatever unused slots hold (NaN included) is never seen.
    held = tl.load(held_ptr + b * s_held_b)
    used = (j < held) & (j < capacity)
    p_ok = p < P

    # after_j = pre_last - pre_j, summed from the newest slot backwards: no cancellation, and A * after_j <= 0.
    A = tl.load(a_ptr + h * s_a_h).to(tl.float32)
    dt_row = dt_ptr + b * s_dt_b + h * s_dt_h
    dt = tl.load(dt_row + j * s_dt_j, mask=used, other=0.0).to(tl.float32)
    used_next = (j + 1 < held) & (j + 1 < capacity)
    dt_next = tl.load(dt_row + (j + 1) * s_dt_j, mask=used_next, other=0.0).to(tl.float32)
    after = tl.cumsum(dt_next, axis=0, reverse=True)
    decay = tl.exp(tl.where(used, tl.minimum(A * after, 0.0), float("-inf")))  # the exponent is masked, not the result
    pre_last = tl.sum(dt, axis=0)

    # S0 C and B_j . C, over all columns of the state.
    s_c = tl.zeros((BLOCK_P,), tl.float32)
    b_c = tl.zeros((BLOCK_J,), tl.float32)
    for n0 in tl.static_range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N).to(tl.int64)
        n_ok = n < N
        C = tl.load(c_ptr + b * s_c_b + g * s_c_g + n * s_c_n, mask=n_ok, other=0.0).to(tl.float32)
        S0 = tl.load(
            state_ptr + b * s_state_b + h * s_state_h + p[:, None] * s_state_p + n[None, :] * s_state_n,
            mask=p_ok[:, None] & n_ok[None, :],
            other=0.0,
        ).to(tl.float32)
        s_c += tl.sum(S0 * C[None, :], axis=1)
        B = tl.load(
            b_ptr + b * s_b_b + g * s_b_g + j[:, None] * s_b_j + n[None, :] * s_b_n,
            mask=used[:, None] & n_ok[None, :],
            other=0.0,
        ).to(tl.float32)
        b_c += tl.sum(B * C[None, :], axis=1)

    weight = dt * decay * b_c
    if HAS_D:
        D = tl.load(d_ptr + h * s_d_h).to(tl.float32)
        weight += tl.where(j == held - 1, D, 0.0)
    x = tl.load(
        x_ptr + b * s_x_b + h * s_x_h + j[:, None] * s_x_j + p[None, :] * s_x_p,
        mask=used[:, None] & p_ok[None, :],
        other=0.0,
    ).to(tl.float32)
    y = tl.exp(tl.minimum(A * pre_last, 0.0)) * s_c + tl.sum(weight[:, None] * x, axis=0)
    tl.store(y_ptr + b * s_y_b + h * s_y_h + p * s_y_p, y.to(y_ptr.dtype.element_ty), mask=p_ok)


def replay_step(
    state: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    held: torch.Tensor,
    A: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of one Mamba-2 decode step; the current token's x, B and dt are already in slot `held - 1`.

    Args:
        state: checkpoint S0, (batch, head, P, N); fp32, bf16 or fp16. It is only read.
        x: buffered inputs, (batch, head, capacity, P).
        B: buffered input projections, (batch, group, capacity, N).
        dt: buffered final time steps (after bias, softplus and limit), (batch, head, capacity), fp32, >= 0.
        held: slots in use per row, the current token's included, (batch,), int32 on the same device, each between 0
            and capacity (it is not read on the host). A row that holds none gets S0 C, without the D term.
        A: decay rates, (head,), fp32, negative.
        C: output projection of the current token, (batch, group, N).
        D: skip weights, (head,), or None.
        out: where to write, (batch, head, P); by default a new tensor of x's dtype.

    Returns:
        y, (batch, head, P). All sums are fp32. Slots from `held` on are never read. Any strides are accepted.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    batch, heads, head_dim, state_dim = state.shape
    groups, capacity = B.shape[1], B.shape[2]
    if out is None:
        out = torch.empty((batch, heads, head_dim), dtype=x.dtype, device=state.device)
    _check("x", x, (batch, heads, capacity, head_dim), state)
    _check("B", B, (batch, groups, capacity, state_dim), state)
    _check("dt", dt, (batch, heads, capacity), state)
    _check("held", held, (batch,), state)
    _check("A", A, (heads,), state)
    _check("C", C, (batch, groups, state_dim), state)
    _check("out", out, (batch, heads, head_dim), state)
    if D is not None:
        _check("D", D, (heads,), state)
    if held.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"held counts slots: it must be int32 (or int64), not {held.dtype}")
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads cannot be shared out evenly among {groups} groups")
    if out.numel() == 0:
        return out

    # Tiles: about 4096 elements of the state in a program, whole rows where N <= 128.
    block_n = min(next_power_of_2(state_dim), 128)
    block_p = min(next_power_of_2(head_dim), max(4096 // block_n, 16), 64)
    block_j = max(next_power_of_2(capacity), 2)
    largest_tile = max(block_p * block_n, block_j * block_n, block_j * block_p)
    grid = (batch * heads, triton.cdiv(head_dim, block_p))
    with on_device_of(state):
        _replay_step_kernel[grid](
            state, x, B, dt, held, A, C, D if D is not None else A, out,
            *state.stride(), *x.stride(), *B.stride(), *dt.stride(), *held.stride(), *A.stride(), *C.stride(),
            *(D.stride() if D is not None else (0,)), *out.stride(), capacity,
            H=heads, HEADS_PER_GROUP=heads // groups, P=head_dim, N=state_dim, HAS_D=D is not None,
            BLOCK_P=block_p, BLOCK_N=block_n, BLOCK_J=block_j,
            num_warps=1 if largest_tile <= 2048 else 2 if largest_tile <= 4096 else 4,
        )  # fmt: skip
    return out


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], state: torch.Tensor) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with this state and B it must be {shape}")
    if tensor.device != state.device:
        raise ValueError(f"{name} is on {tensor.device}, the state on {state.device}: move it there")
