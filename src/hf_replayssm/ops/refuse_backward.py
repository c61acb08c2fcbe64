"""A cache carries no gradients; asking for one raises, instead of losing it without a word."""

from __future__ import annotations

import torch


class RefuseBackward(torch.autograd.Function):
    """`apply(y, *inputs)` passes `y` on; a gradient that comes back for one of `inputs` is refused."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        raise RuntimeError(
            "A gradient cannot go back through a ReplayCache: its buffers carry none. Call the model without a cache "
            "(`use_cache=False`)."
        )
