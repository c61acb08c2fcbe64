"""
Gated DeltaNet and Kimi Delta Attention (KDA) with replay: the PyTorch reference, which defines the meaning and is the
path of every device without Triton.

The recurrence (Yang et al., "Gated Delta Networks", 2024; Kimi Team, "Kimi Linear", 2025), S being K x V, k and q of
unit length, q scaled by K^-1/2, and the log decay g_t <= 0 a scalar (Gated DeltaNet) or a number per key channel (KDA):

    u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)
    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    y_t = S_t^T q_t

A layer keeps a *checkpoint* S0 of its state and a *buffer* with (k, u, g) of the tokens since. With G_t the sum of g
over the buffered tokens up to t,

    S_t = exp(G_t) S0 + sum_{j<=t} (exp(G_t - G_j) k_j) u_j^T                                             (`fold`)
    y_t = S0^T (exp(G_t) q_t) + sum_{j<=t} (k_j . exp(G_t - G_j) q_t) u_j                                 (`replay`)
    u_t = beta_t (v_t - S0^T (exp(G_t) k_t) - sum_{j<t} (k_j . exp(G_t - G_j) k_t) u_j)

so one read of S0, against the k and the q of all new tokens, gives both the outputs and, by a unit lower triangular
solve among the new tokens, the u that the buffer keeps. u depends on the state: it is stored in float32, since what is
rounded there stays in the state. k is stored raw, as it leaves the convolution, and normalised whenever it is read.
(A continuation of more tokens than a buffer holds is upstream's chunk function, from the folded state.)

Letters in the shapes: b batch, h value heads, m key heads (each serves h / m value heads, blocked: key head = head //
(h / m)), c channels of a key (K above), d channels of a value (V above), s buffer slots, t new tokens. g and beta are
final (softplus, sigmoid and a factor of a family applied). A token with g = 0 and beta = 0 changes nothing.
"""

from __future__ import annotations

import torch

from .mamba2 import accumulate_dtype


NORM_EPS = 1e-6  # inside the root, as in upstream's modules and in flash-linear-attention


def unit(x: torch.Tensor) -> torch.Tensor:
    """`x` at length one along its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def replay(
    q: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    checkpoint: torch.Tensor,
    start: int | torch.Tensor,
    end: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Outputs and `u` of the newest tokens of the buffer; reads the checkpoint once and changes nothing.

    Args:
        q (b, t, m, c), v (b, t, h, d), beta (b, t, h): of the new tokens; q raw, as it leaves the convolution.
        k (b, m, s, c) raw, u (b, h, s, d), g (b, h, s) or for KDA (b, h, s, c): the buffer, s >= 1. k and g of the new
            tokens are already in it; u is read in front of them only, since it is what this function finds.
        checkpoint (b, h, c, d): the state before slot 0.
        start: the slot of the first new token, an integer for all rows or a (b,) tensor; token i is in slot start + i.
        end: one past the newest valid slot, likewise. What lies in or behind it is never used, NaN included. Where
            `start + i >= end` (masked tokens at a row's end) the output and the u of token i are zero, or NaN behind a
            token that is not finite.

    Returns: y (b, t, h, d) and u of the new tokens (b, t, h, d), in the accumulation dtype.
    """
    dtype = accumulate_dtype(q, k, checkpoint)
    tokens, ragged = q.shape[1], isinstance(start, torch.Tensor)
    slots = k.shape[2] if ragged else end
    k, g = k[:, :, :slots].to(dtype), g[:, :, :slots].to(dtype)
    q, v, beta = (new.to(dtype).transpose(1, 2) for new in (q, v, beta))
    g = g.unsqueeze(-1) if g.dim() == 3 else g  # (b, h, s, 1) or (b, h, s, c)
    if ragged:
        slot = torch.arange(slots, device=k.device)
        token = start[:, None] + torch.arange(tokens, device=k.device)  # (b, t), a slot
        valid, real = slot < end[:, None], token < end[:, None]
        k, g = where(valid, k), where(valid, g)
        q, v, beta = where(real, q), where(real, v), where(real, beta)
        at = token.clamp(max=slots - 1)[:, None, :, None]
        new_k = where(real, k.gather(2, at.expand(-1, k.shape[1], -1, k.shape[3])))
        new_g = where(real, g.gather(2, at.expand(-1, g.shape[1], -1, g.shape[3])))
        k, u, g = (where(slot < start[:, None], x) for x in (k, u[:, :, :slots].to(dtype), g))
    else:
        new_k, new_g = k[:, :, start:], g[:, :, start:]
        k, u, g = k[:, :, :start], u[:, :, :start].to(dtype), g[:, :, :start]

    # What decays between an old and a new token is counted from their border in both directions, between two new ones
    # for the pair: nothing is subtracted, and a later draft has no part in it, whatever its g is.
    since = new_g.cumsum(2)  # (b, h, t, 1 or c), the token itself included
    total, behind = backwards(g)

    # k and q of the new tokens meet the same things: they are stacked, k first.
    new_k = unit(new_k)
    new = torch.cat([new_k, unit(q) * q.shape[-1] ** -0.5], 2)  # (b, m, 2 t, c)
    from_buffer = decayed_products(new, unit(k), since[:, :, :, None] + behind[:, :, None]) @ u
    from_checkpoint = (per_head(new, g.shape[1]) * (since + total).exp().repeat(1, 1, 2, 1)) @ checkpoint.to(dtype)
    for_k, for_q = (from_checkpoint + from_buffer).chunk(2, dim=2)  # (b, h, t, d)

    new_u = beta[..., None] * (v - for_k)
    if tokens == 1:
        by_q = per_head(new[:, :, 1:] @ new_k.transpose(-1, -2), g.shape[1])
        y = for_q + by_q * new_u
    else:
        among = torch.ones(tokens, tokens, dtype=torch.bool, device=k.device).tril()  # (t, t): the later, the earlier
        _, between = backwards(torch.where(among[..., None], new_g[:, :, None], 0.0))  # (b, h, t, t, 1 or c)
        by_k, by_q = decayed_products(new, new_k, between).masked_fill(~among.repeat(2, 1), 0.0).chunk(2, dim=2)
        # u_t + beta_t sum_{i<t} (k_i . exp(G_t - G_i) k_t) u_i; the diagonal is taken as ones.
        new_u = torch.linalg.solve_triangular(beta[..., None] * by_k, new_u, upper=False, unitriangular=True)
        # (A draft that is not finite leaves those before it as they are: 0 times NaN is not 0.)
        finite = new_u.isfinite()
        y = for_q + by_q @ torch.where(finite, new_u, 0.0)
        y = y.masked_fill((~finite).cumsum(2) > 0, torch.nan)
    return y.transpose(1, 2), new_u.transpose(1, 2)


def fold(
    k: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    checkpoint: torch.Tensor,
    count: int | torch.Tensor,
) -> torch.Tensor:
    """
    The state after the first `count` slots of the buffer (an integer for all rows, or a (b,) tensor): what a flush
    stores, with the very u that gave the tokens' outputs. Shapes as in [`replay`]; slots from `count` on are never
    used, NaN included.

    Returns: (b, h, c, d), in the accumulation dtype.
    """
    dtype = accumulate_dtype(k, checkpoint)
    slots = k.shape[2] if isinstance(count, torch.Tensor) else count  # (a tensor is not read on the host)
    checkpoint = checkpoint.to(dtype)
    if slots == 0:
        return checkpoint
    k, u, g = (buffer[:, :, :slots].to(dtype) for buffer in (k, u, g))
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    if isinstance(count, torch.Tensor):
        valid = torch.arange(slots, device=k.device) < count[:, None]
        k, u, g = where(valid, k), where(valid, u), where(valid, g)
    total, behind = backwards(g)
    decayed = per_head(unit(k), g.shape[1]) * behind.exp()  # (b, h, s, c)
    kept = checkpoint * total[:, :, 0, :, None].exp()  # (b, h, c, d)
    folded = torch.baddbmm(kept.flatten(0, 1), decayed.flatten(0, 1).transpose(1, 2), u.flatten(0, 1))
    return folded.view(checkpoint.shape)


def backwards(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `g` (..., s, 1 or c): over all slots (..., 1, 1 or c), and over those behind each (..., s, 1 or c)."""
    none = g.new_zeros((*g.shape[:-2], 1, g.shape[-1]))
    # (From the newest on: what is recent decays exactly.)
    sums = torch.cat([g.flip(-2).cumsum(-2).flip(-2), none], -2)
    return sums[..., :1, :], sums[..., 1:, :]


def decayed_products(new: torch.Tensor, k: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """
    k_j . exp(G_t - G_j) x_t for the t tokens of `new` (b, m, 2 t, c), k and q, and slots j of `k` (b, m, s, c), per
    value head; `exponent` (b, h, t, s, 1 or c) is G_t - G_j. (Of KDA these are t s c numbers: exp(-G_j) alone
    overflows.) Returns (b, h, 2 t, s).
    """
    heads, decay = exponent.shape[1], exponent.exp().repeat(1, 1, 2, 1, 1)
    if decay.shape[-1] == 1:
        return per_head(new @ k.transpose(-1, -2), heads) * decay.squeeze(-1)
    return (per_head(new, heads)[:, :, :, None] * per_head(k, heads)[:, :, None] * decay).sum(-1)


def per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, m, ...) of the key heads as (b, h, ...) of the value heads that they serve."""
    repeats = heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def where(valid: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` (b, h, s, ...) with zeros where `valid` (b, s) is False, by selection: a product would carry a NaN over."""
    return torch.where(valid.view(valid.shape[0], 1, valid.shape[1], *[1] * (x.dim() - 3)), x, x.new_zeros(()))


# The same as Triton kernels (package `replayssm_kernels`; shapes and conditions are there). They take a cache's tensors
# as they lie in memory, append k, u and g to the buffers and flush in the same call, and read where the rows stand on
# the device: `positions` (5, b) are `Segment.kernel_positions`. `storage` is how the checkpoint is stored: `scale`, and
# `seed` of stochastic rounding.


def decode_triton(
    positions: torch.Tensor,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_inputs: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    checkpoint: torch.Tensor,
    activation: str,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """
    Convolution, append, output and flush of raw qkv (b, t, 2 m c + h d) in one call. `activation` is one of
    `mamba2.FUSED_ACTIVATIONS`. Returns (b, t, h, d), float32.
    """
    from replayssm_kernels import gated_delta_decode

    return gated_delta_decode(
        positions,
        qkv,
        g,
        beta,
        conv_inputs,
        conv_weight,
        conv_bias,
        *buffers,
        checkpoint,
        activation=activation,
        out_dtype=torch.float32,
        **storage,
    )


def step_triton(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    checkpoint: torch.Tensor,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """[`decode_triton`] behind a convolution: q, k (b, t, m, c), v (b, t, h, d). Returns (b, t, h, d), float32."""
    from replayssm_kernels import gated_delta_step

    return gated_delta_step(positions, q, k, v, g, beta, *buffers, checkpoint, out_dtype=torch.float32, **storage)


def fold_triton(
    positions: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    checkpoint: torch.Tensor,
    **storage: torch.Tensor | int | None,
) -> torch.Tensor:
    """[`fold`] of as many tokens as `positions` say. Returns (b, h, c, d), float32; the checkpoint stays as it is."""
    from replayssm_kernels import gated_delta_fold

    return gated_delta_fold(positions, *buffers, checkpoint, **storage)
