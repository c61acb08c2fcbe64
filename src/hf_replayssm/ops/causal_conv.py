"""
The short causal convolution in front of the recurrence, over a history of earlier inputs: the PyTorch reference.

    out_t = activation(bias + sum_{k<K} weight_k input_{t - K + 1 + k})

Depthwise, so everything is elementwise in the channels (letter c); K is the kernel size (3 or 4 in practice).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .mamba2 import accumulate_dtype


def causal_conv(
    history: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """
    Convolves a few new tokens behind their history.

    Args:
        history (b, K - 1, c): the inputs just before the new ones, zeros where the sequence had not begun.
        inputs (b, t, c): the new inputs.
        weight (c, K), bias (c,) or None: of the depthwise convolution.

    Returns: (b, t, c) in the dtype of `inputs`; sums are float32 or better.
    """
    tokens, kernel = inputs.shape[1], weight.shape[1]
    dtype = accumulate_dtype(inputs)
    window = torch.cat([history.to(inputs.dtype), inputs], dim=1).to(dtype)  # (b, K - 1 + t, c)
    taps = weight.to(dtype).t()  # (K, c)
    if tokens == 1:
        out = (window * taps).sum(1, keepdim=True)
    else:
        out = window[:, :tokens] * taps[0]
        for k in range(1, kernel):
            out = torch.addcmul(out, window[:, k : k + tokens], taps[k])
    if bias is not None:
        out = out + bias.to(dtype)
    return activation(out).to(inputs.dtype)


def causal_conv_triton(
    positions: torch.Tensor,
    inputs: torch.Tensor,
    ring: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """
    The same behind a ring (b, r, c) of earlier inputs, into which the new ones are written; `positions` (5, b) are
    `Segment.kernel_positions`.
    """
    from replayssm_kernels import causal_conv

    return causal_conv(positions, inputs, ring, weight, bias, activation)
