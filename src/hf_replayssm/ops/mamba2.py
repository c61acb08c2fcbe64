"""
Mamba-2 with replay: the PyTorch reference, which defines the meaning and is the path of every device without Triton.

A layer keeps a *checkpoint* S0 of its state and a *buffer* with the inputs (x, B, dt) of the tokens since. With `pre_t`
the sum of dt over the buffered tokens up to t,

    S_t = exp(A pre_t) S0 + sum_{j<=t} dt_j exp(A (pre_t - pre_j)) x_j B_j^T            (`fold`)
    y_t = exp(A pre_t) (S0 C_t) + sum_{j<=t} dt_j exp(A (pre_t - pre_j)) (B_j . C_t) x_j + D x_t     (`replay`)

which unrolls S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t (Dao and Gu, "Transformers are SSMs",
2024, section 3). `replay` reads the checkpoint once for a whole window of tokens and writes no state.

Letters in the shapes: b batch, h heads, g groups of heads that share B and C (blocked: head = group * (h / g) + i),
p head_dim, n state, s buffer slots, t new tokens. dt is final everywhere (bias, softplus and limit applied), float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


# Activations that the kernels apply behind the convolution.
FUSED_ACTIVATIONS = ("silu", "swish")


def accumulate_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float32, or float64 when an input already is: the dtype of every sum, whatever the activations are."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def final_dt(dt: torch.Tensor, dt_bias: torch.Tensor, dt_min: float, dt_max: float) -> torch.Tensor:
    """
    The one rule for dt, that of upstream's whole-sequence forward: bias, softplus, limit; in the accumulation dtype.
    dt (b, t, h) as it leaves the projection, dt_bias (h,). (The kernels apply the same rule themselves.)
    """
    dtype = accumulate_dtype(dt)
    return F.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(dt_min, dt_max)


def replay(
    C: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    checkpoint: torch.Tensor,
    start: int | torch.Tensor,
    end: int | torch.Tensor,
) -> torch.Tensor:
    """
    Outputs of the newest tokens of the buffer; reads the checkpoint once and changes nothing.

    Args:
        C (b, t, g, n): of the new tokens.
        x (b, h, s, p), B (b, g, s, n), dt (b, h, s): the buffer, s >= 1. The new tokens are already in it.
        A (h,), D (h,): per head; A is negative.
        checkpoint (b, h, p, n): the state before slot 0.
        start: the slot of the first new token, an integer for all rows or a (b,) tensor; token i is in slot start + i.
        end: one past the newest valid slot, likewise. What lies in or behind it is never used, NaN included: for
            a row in which `start + i >= end` (masked tokens at its end) the output of token i is that of slot end - 1.

    Returns: (b, t, h, p), in the accumulation dtype.
    """
    dtype = accumulate_dtype(C, x, checkpoint)
    batch, tokens, groups, _ = C.shape
    heads, head_dim = x.shape[1], x.shape[3]
    ragged = isinstance(start, torch.Tensor)

    slots = x.shape[2] if ragged else end
    x, B, dt = x[:, :, :slots].to(dtype), B[:, :, :slots].to(dtype), dt[:, :, :slots].to(dtype)
    C, A = C.to(dtype).transpose(1, 2), A.to(dtype)  # (b, g, t, n)
    if ragged:
        slot = torch.arange(slots, device=x.device)
        valid = (slot < end[:, None])[:, None]  # (b, 1, s)
        x, B, dt = mask_slots(valid, x, B, dt)
        newest = (start[:, None] + torch.arange(tokens, device=x.device)).minimum(end[:, None] - 1)  # (b, t)

    pre = dt.cumsum(-1)  # (b, h, s)
    if ragged:
        # `newest` is -1 for a row whose buffer is empty and whose tokens are all masked: it sees the checkpoint only.
        at = newest.clamp(min=0)[:, None].expand(-1, heads, -1)
        pre_t = torch.where(newest[:, None] >= 0, pre.gather(-1, at), 0.0)
        visible = (slot <= newest[..., None])[:, None]  # (b, 1, t, s)
        x_t = x.gather(2, at[..., None].expand(-1, -1, -1, head_dim))
    else:
        pre_t = pre[..., start:]  # (b, h, t)
        # A single token sees every slot up to its own, so there is nothing to hide.
        visible = torch.ones(tokens, slots, dtype=torch.bool, device=x.device).tril(start) if tokens > 1 else None
        x_t = x[:, :, start:]

    # The exponent is masked before exp (behind the token it is positive and may overflow), and clamped: the sums of a
    # parallel scan may differ in the last bit and leave it a little above zero.
    exponent = (A[:, None, None] * (pre_t[..., None] - pre[..., None, :])).clamp(max=0.0)  # (b, h, t, s)
    if visible is not None:
        exponent = exponent.masked_fill(~visible, -torch.inf)
    weight = exponent.exp() * dt[..., None, :]
    scores = C @ B.transpose(-1, -2)  # (b, g, t, s): B_j . C_t is shared by the heads of a group
    weight = weight.view(batch, groups, -1, tokens, slots) * scores[:, :, None]

    y = weight.view(batch, heads, tokens, slots) @ x + D.to(dtype)[:, None, None] * x_t
    from_checkpoint = checkpoint.to(dtype).reshape(batch, groups, -1, C.shape[-1]) @ C.transpose(-1, -2)
    from_checkpoint = from_checkpoint.view(batch, heads, head_dim, tokens).transpose(-1, -2)
    y = y + (A[:, None] * pre_t).exp()[..., None] * from_checkpoint
    return y.transpose(1, 2)


def fold(
    x: torch.Tensor,
    B: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    count: int | torch.Tensor,
) -> torch.Tensor:
    """
    The state after the first `count` slots of the buffer (an integer for all rows, or a (b,) tensor): what a flush
    stores. Shapes as in [`replay`]; slots from `count` on are never used, NaN included.

    Returns: (b, h, p, n), in the accumulation dtype.
    """
    dtype = accumulate_dtype(x, checkpoint)
    slots = x.shape[2] if isinstance(count, torch.Tensor) else count  # (a tensor is not read on the host)
    checkpoint, A = checkpoint.to(dtype), A.to(dtype)
    if slots == 0:
        return checkpoint
    x, B, dt = x[:, :, :slots].to(dtype), B[:, :, :slots].to(dtype), dt[:, :, :slots].to(dtype)
    if isinstance(count, torch.Tensor):
        valid = (torch.arange(slots, device=x.device) < count[:, None])[:, None]
        x, B, dt = mask_slots(valid, x, B, dt)

    batch, heads, _, head_dim = x.shape
    groups, state = B.shape[1], B.shape[-1]
    pre = dt.cumsum(-1)  # (b, h, s)
    total = pre[..., -1:]
    weight = dt * (A[:, None] * (total - pre)).clamp(max=0.0).exp()
    # One product for each group: (heads of the group * p, s) @ (s, n).
    weighted = (x * weight[..., None]).transpose(-1, -2).reshape(batch * groups, -1, slots)
    decayed = checkpoint * (A[:, None] * total).exp()[..., None]
    folded = torch.baddbmm(decayed.view(batch * groups, -1, state), weighted, B.reshape(-1, slots, state))
    return folded.view(batch, heads, head_dim, state)


def read_out(C: torch.Tensor, x: torch.Tensor, D: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """
    y = S C + D x of one token whose state S (b, h, p, n) is at hand, which is so at a flush. C (b, 1, g, n),
    x (b, 1, h, p). Returns (b, 1, h, p) in the accumulation dtype.
    """
    batch, _, heads, head_dim = x.shape
    groups = C.shape[2]
    y = state.view(batch, groups, -1, state.shape[-1]) @ C.to(state.dtype).transpose(1, 2).transpose(-1, -2)
    y = y.view(batch, 1, heads, head_dim)
    return y + D.to(state.dtype)[:, None] * x.to(state.dtype)


def mask_slots(
    valid: torch.Tensor, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeroes the slots that are not `valid` (b, 1, s), by selection: a product would carry a NaN over."""
    zero = x.new_zeros(())
    return (
        torch.where(valid[..., None], x, zero),
        torch.where(valid[..., None], B, zero),
        torch.where(valid, dt, zero),
    )


# Tokens of a chunk of [`scan`], and how many elements of decays between two tokens of a chunk it holds at a time.
SCAN_CHUNK = 64
SCAN_ELEMENTS = 1 << 26


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A whole sequence, chunk by chunk: the tokens of a chunk see each other as in [`replay`], all chunks at once, and the
    state is carried from one chunk to the next (Dao and Gu 2024, section 6). For a prefill where no package is
    installed that has kernels for it. Memory is bounded whatever the sequence's length.

    Args:
        x (b, t, h, p), B and C (b, t, g, n), dt (b, t, h).
        initial_state (b, h, p, n): zeros when None.

    Returns: y (b, t, h, p) and the state (b, h, p, n), both in the accumulation dtype.
    """
    dtype = accumulate_dtype(x, dt) if initial_state is None else accumulate_dtype(x, dt, initial_state)
    (batch, tokens, heads, head_dim), state_size = x.shape, B.shape[3]
    A, D = A.to(dtype), D.to(dtype)
    if initial_state is None:
        state = x.new_zeros((batch, heads, head_dim, state_size), dtype=dtype)
    else:
        state = initial_state.to(dtype)
    chunk = min(SCAN_CHUNK, max(tokens, 1))
    part = max(1, SCAN_ELEMENTS // (batch * heads * chunk * chunk)) * chunk
    y = x.new_empty(x.shape, dtype=dtype)
    for begin in range(0, tokens, part):
        new = (tensor[:, begin : begin + part].to(dtype) for tensor in (x, dt, B, C))
        y[:, begin : begin + part], state = _scan_part(*new, A, D, state, chunk)
    return y, state


def _scan_part(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`scan`] of a few chunks: c of them, of l tokens."""
    (batch, tokens, heads, head_dim), groups, state_size = x.shape, B.shape[2], B.shape[3]
    missing = -tokens % chunk  # tokens with dt = 0, which change nothing

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """(b, t, ...) -> (b, c, l, ...)"""
        if missing:
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        return tensor.unflatten(1, (-1, chunk))

    x, dt = chunks(x).permute(0, 1, 3, 4, 2).contiguous(), chunks(dt).transpose(2, 3)  # (b, c, h, p, l), (b, c, h, l)
    B, C = chunks(B).transpose(2, 3), chunks(C).permute(0, 1, 3, 4, 2)  # (b, c, g, l, n), (b, c, g, n, l)
    count = x.shape[1]
    decay = A[:, None] * dt  # (b, c, h, l): the logarithm of each token's
    by_group = (batch, count, groups, -1)  # heads of a group, times head_dim

    # In a chunk: token i sees token j <= i, decayed by the tokens j + 1 to i. (Summed for each pair: the difference of
    # two long sums would lose what a token before them decayed by. Masked before exp, see `replay`.)
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device)  # (l_j, l_i)
    weight = torch.where(ones.triu(1), decay[..., None, :], 0.0).cumsum_(-1)  # (b, c, h, l_j, l_i)
    to_end = weight[..., -1].exp().mul_(dt)  # (b, c, h, l)
    weight.masked_fill_(ones.tril(-1), -torch.inf).exp_().mul_(dt[..., None])
    scores = B @ C  # (b, c, g, l_j, l_i): shared by the heads of a group
    weight.view(*by_group, chunk, chunk).mul_(scores[:, :, :, None])
    y = x @ weight  # (b, c, h, p, l_i)

    # From chunk to chunk: what a chunk adds to the state, and the state that each begins with.
    added = ((x * to_end[..., None, :]).view(*by_group, chunk) @ B).view(batch, count, heads, head_dim, state_size)
    from_start = decay.cumsum(-1).exp_()  # (b, c, h, l)
    whole = from_start[..., -1, None, None]
    states = x.new_empty((batch, count + 1, heads, head_dim, state_size))
    states[:, 0] = state
    for number in range(count):
        torch.addcmul(added[:, number], states[:, number], whole[:, number], out=states[:, number + 1])
    carried = states[:, :-1].reshape(*by_group, state_size) @ C  # (b, c, g, heads of the group * p, l_i)
    y.addcmul_(carried.view_as(y), from_start[..., None, :]).addcmul_(x, D[:, None, None])
    return y.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :tokens], states[:, -1]


# The same as Triton kernels (package `replayssm_kernels`; shapes and conditions are there). They take a cache's tensors
# as they lie in memory, append to the buffers and flush in the same call, and read where the rows stand on the device:
# `positions` (5, b) are `Segment.kernel_positions`. dt is raw; `options` are the further arguments of `final_dt`, and
# how the checkpoint is stored: `scale`, and `seed` of stochastic rounding.


def decode_triton(
    positions: torch.Tensor,
    xBC: torch.Tensor,
    dt: torch.Tensor,
    conv_inputs: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    A: torch.Tensor,
    D: torch.Tensor,
    checkpoint: torch.Tensor,
    activation: str,
    **options: torch.Tensor | float | None,
) -> torch.Tensor:
    """
    Convolution, append, output and flush of raw xBC (b, t, conv_dim) in one call. `activation` is one of
    `FUSED_ACTIVATIONS`. Returns (b, t, h, p), float32.
    """
    from replayssm_kernels import mamba2_decode

    return mamba2_decode(
        positions,
        xBC,
        dt,
        conv_inputs,
        conv_weight,
        conv_bias,
        *buffers,
        A,
        D,
        checkpoint,
        activation=activation,
        out_dtype=torch.float32,
        **options,
    )


def step_triton(
    positions: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    A: torch.Tensor,
    D: torch.Tensor,
    checkpoint: torch.Tensor,
    **options: torch.Tensor | float | None,
) -> torch.Tensor:
    """[`decode_triton`] behind a convolution: x (b, t, h, p), B and C (b, t, g, n). Returns (b, t, h, p), float32."""
    from replayssm_kernels import mamba2_step

    return mamba2_step(positions, x, B, C, dt, *buffers, A, D, checkpoint, out_dtype=torch.float32, **options)


def fold_triton(
    positions: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """[`fold`] of as many tokens as `positions` say. Returns (b, h, p, n), float32; the checkpoint stays as it is."""
    from replayssm_kernels import mamba2_fold

    return mamba2_fold(positions, *buffers, A, checkpoint, **storage)
