"""Which implementation an op uses: Triton on a device that has it, the PyTorch reference everywhere else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch


# Each has a kernel in `replayssm_kernels` (the folder kernels/ of the repository); in a mixer they are one call, and
# the norm is one. A prefill's long convolution is upstream's, and so is its scan where upstream has kernels for it.
OPS = (
    "mamba2 replay, one token",
    "mamba2 replay, window",
    "mamba2 fold (flush)",
    "gated delta rule and KDA replay, one token",
    "gated delta rule and KDA replay, window",
    "gated delta rule and KDA fold (flush)",
    "causal convolution",
    "RMS norms of the layers and behind the recurrence",
    "mamba1 replay, one token or a window",
    "mamba1 fold (flush)",
    "mamba1 scan",
)


def triton_unavailable(device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> str | None:
    """
    Why the Triton kernels cannot run on `device`, with activations and checkpoints of these `dtypes`; None when they
    can (on the CPU: in Triton's interpreter only).
    """
    if torch.float64 in dtypes:
        return "the kernels compute in float32, and the model or its checkpoint is float64"
    if torch.float8_e4m3fn in dtypes and (reason := _float8_unavailable(device)) is not None:
        return reason
    return _kernels_unavailable(device.type)


@functools.cache  # what can be imported and run stays so, and every layer asks at every step
def _kernels_unavailable(device_type: str) -> str | None:
    """Why the kernels cannot run on devices of this type."""
    try:
        import replayssm_kernels
    except ImportError as error:
        return f"the package replayssm_kernels cannot be imported ({error})"
    return replayssm_kernels.unavailable_reason(device_type)


@functools.cache
def _float8_unavailable(device: torch.device) -> str | None:
    """Why kernels on `device` cannot read float8_e4m3fn; int8 they can read everywhere."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        known = "gfx950" in torch.cuda.get_device_properties(device).gcnArchName
    else:
        known = torch.cuda.get_device_capability(device) >= (8, 9)
    return None if known else f"{torch.cuda.get_device_name(device)} has no float8_e4m3fn: a checkpoint in int8 it has"


def new_checkpoint(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. `ValueError` where the device has no such dtype."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (TypeError, RuntimeError) as error:
        if dtype != torch.float8_e4m3fn or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"Devices of type {device.type!r} do not hold {dtype}: use `checkpoint_dtype='int8'`. ({error})"
        ) from error


def resolve(backend: str, device: torch.device, dtypes: Iterable[torch.dtype] = ()) -> str:
    """
    `"triton"` or `"torch"` for tensors on `device`, activations and checkpoints being of these `dtypes`.

    Raises:
        ValueError: `backend="triton"` was asked for and cannot be had on this device or for these dtypes.
    """
    # For the CPU and for float64 the PyTorch ops are what is meant to run: nothing to warn of.
    if backend == "torch" or (backend == "auto" and (device.type == "cpu" or torch.float64 in dtypes)):
        return "torch"
    reason = triton_unavailable(device, dtypes)
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
    for op in OPS:
        if backend == "torch":
            rows.append((op, "torch", "asked for"))
        elif chosen == "torch":
            rows.append((op, "torch", triton_unavailable(device) or "the CPU path"))
        else:
            rows.append((op, "triton", f"kernel for {device.type} tensors"))
    return rows
