"""Which implementation an op uses: Triton on a device that has it, the PyTorch reference everywhere else."""

from __future__ import annotations

import functools
import warnings

import torch


# Which ops have a kernel in `replayssm_kernels` (the folder kernels/ of the repository).
OPS = {
    "mamba2 replay, one token": True,
    "mamba2 replay, window": False,
    "mamba2 fold (flush)": False,
    "causal convolution": False,
}


def triton_unavailable(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`; None when they can (on the CPU: in Triton's interpreter only)."""
    try:
        import replayssm_kernels
    except ImportError as error:
        return f"the package replayssm_kernels cannot be imported ({error})"
    return replayssm_kernels.unavailable_reason(device)


def resolve(backend: str, device: torch.device) -> str:
    """
    `"triton"` or `"torch"` for tensors on `device`, where the op has a kernel.

    Raises:
        ValueError: `backend="triton"` was asked for and cannot be had on this device.
    """
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return "torch"
    reason = triton_unavailable(device)
    if backend == "triton" and reason is not None:
        raise ValueError(f"`backend='triton'` is not available: {reason}. Use `backend='auto'` or 'torch'.")
    if reason is not None:
        _warn_once(f"Replay runs as PyTorch ops on {device.type}, which is slower than its Triton kernels: {reason}.")
        return "torch"
    return "triton"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def explain(device: torch.device | str, backend: str = "auto") -> list[tuple[str, str, str]]:
    """(op, backend, reason) for each op on `device`."""
    device = torch.device(device)
    chosen = resolve(backend, device)
    rows = []
    for op, has_kernel in OPS.items():
        if backend == "torch":
            rows.append((op, "torch", "asked for"))
        elif chosen == "torch":
            rows.append((op, "torch", triton_unavailable(device) or "the CPU path"))
        elif not has_kernel:
            rows.append((op, "torch", "no kernel for this op yet"))
        else:
            rows.append((op, "triton", f"kernel for {device.type} tensors"))
    return rows
