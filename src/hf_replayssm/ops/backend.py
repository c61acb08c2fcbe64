"""Which implementation an op uses: Triton on a device that has it, the PyTorch reference everywhere else."""

from __future__ import annotations

import functools

import torch


OPS = ("mamba2 replay (decode step)", "mamba2 replay (window)", "mamba2 fold (flush)", "causal convolution")


@functools.cache
def triton_unavailable() -> str | None:
    """Why Triton kernels cannot be used at all; None when they can."""
    return "this release computes replay with PyTorch ops on every device"


def resolve(backend: str, device: torch.device) -> str:
    """
    `"torch"` or `"triton"` for tensors on `device`. `ValueError` when `backend="triton"` was asked for and cannot be had.
    """
    reason = triton_unavailable()
    if backend == "triton" and reason is not None:
        raise ValueError(f"`backend='triton'` is not available: {reason}. Use `backend='auto'` or 'torch'.")
    if backend != "torch" and reason is None and device.type == "cuda":
        return "triton"
    return "torch"


def explain(device: torch.device | str, backend: str = "auto") -> list[tuple[str, str, str]]:
    """(op, backend, reason) for each op on `device`."""
    device = torch.device(device)
    chosen = resolve(backend, device)
    if backend == "torch":
        reason = "asked for"
    elif chosen == "triton":
        reason = f"Triton serves {device.type}"
    else:
        reason = triton_unavailable() or f"no Triton kernels for {device.type}"
    return [(op, chosen, reason) for op in OPS]
