"""
Which drafts are accepted: for all rows at once, on the device.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def accept_greedy(
    scores: torch.Tensor, drafts: torch.Tensor, available: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Accepts the drafts that are the target's best tokens, up to the first that is not.

    Args:
        scores (b, k + 1, vocab): the target's, at each draft and after the last.
        drafts (b, k) int64.
        available (b,) int64: how many of a row's drafts there are; the others count as rejected.

    Returns:
        accepted (b,) int64, 0 to k, and the token (b,) int64 that the target puts after them.
    """
    best = scores.argmax(-1)
    accepted = _run_length(best[:, :-1] == drafts, available)
    return accepted, _at(best, accepted)


def accept_sampled(
    target: torch.Tensor, proposal: torch.Tensor, drafts: torch.Tensor, available: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Speculative sampling (Leviathan et al. 2023, algorithm 1): a draft x is accepted with probability min(1, p(x) /
    q(x)); after the first that is not, the next token is drawn from the [`residual`] of p and q; after the last, from
    p. The tokens are then distributed as if each had been drawn from p.

    Args:
        target (b, k + 1, vocab): p, the target's probabilities at each draft and after the last.
        proposal (b, k, vocab): q, the probabilities that the drafts were drawn from.
        drafts (b, k) int64: draws from q.
        available (b,) int64: how many of a row's drafts there are; the others count as rejected, but the token in
            place of the first of them is drawn from p: nothing was drawn from q there.

    Returns:
        accepted (b,) int64, 0 to k, and the token (b,) int64 after them.
    """
    p, q = (x.gather(-1, drafts[..., None]).squeeze(-1) for x in (target[:, :-1], proposal))
    accepted = _run_length(torch.rand_like(p) * q < p, available)
    proposed = _at(F.pad(proposal, (0, 0, 0, 1)), accepted).where((accepted < available)[:, None], 0.0)
    return accepted, draw(residual(_at(target, accepted), proposed))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    max(0, p - q) (b, vocab), not normalised: what the target has beyond the draft. It is p where q is 0; where p and q
    are the same up to rounding, so that nothing is left, it is p as well.
    """
    rest = (p - q).clamp(min=0)
    return rest.where(rest.sum(-1, keepdim=True) > 0, p)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """
    One index (b,) from each row of `weights` (b, vocab) >= 0, with probability in proportion: the first of independent
    exponential waiting times with these rates. (`torch.multinomial` waits for the device to check its input.)
    """
    waiting = torch.empty_like(weights).exponential_()
    return (weights / waiting).argmax(-1)


def _run_length(accept: torch.Tensor, available: torch.Tensor) -> torch.Tensor:
    """(b, k) bool -> (b,): how many of the first `available` are True before the first that is not."""
    there = torch.arange(accept.shape[1], device=accept.device) < available[:, None]
    return (accept & there).long().cumprod(1).sum(1)


def _at(tensor: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """(b, t, ...) -> (b, ...) at each row's position (b,)."""
    return tensor[torch.arange(len(tensor), device=tensor.device), position]
