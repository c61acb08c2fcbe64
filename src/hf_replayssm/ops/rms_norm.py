"""
The RMS norms of a model, of one row y (d,), group by group: between layers, and behind a recurrence with a gate (d,):

    out = weight y / sqrt(mean(y^2) + eps)
    out = weight x / sqrt(mean(x^2) + eps),  x = y silu(gate)
    out = weight x / sqrt(mean(x^2) + eps) silu(gate),  x = y       (`norm_before_gate`)

The reference is upstream's module, which is called wherever the kernel does not stand for it. Upstream takes seven to
ten launches for a decode step, the kernel one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import backend as backends


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RMSNorm:
    """What a norm module computes; the fields are arguments of `replayssm_kernels.rms_norm`."""

    weight: torch.Tensor
    eps: float
    group_size: int
    weight_in_float32: bool = False
    norm_before_gate: bool = False


def uses_kernel(
    norm: RMSNorm, y: torch.Tensor, gate: torch.Tensor | None, out_dtype: torch.dtype, backend: str
) -> bool:
    """
    Whether the Triton kernel gives what the module would: for plain tensors on one device (no DTensor, nothing
    quantised, nothing that is still to be loaded), without a gradient and outside of autocast.
    """
    # (Plain loops: a model asks dozens of times a step, and in eager mode the device may wait for it.)
    if type(norm.weight) is not torch.nn.Parameter or out_dtype not in DTYPES:
        return False
    gradients, shape = torch.is_grad_enabled(), y.shape
    for tensor in (y, norm.weight) if gate is None else (y, norm.weight, gate):
        if tensor.dtype not in DTYPES or tensor.device != y.device or (gradients and tensor.requires_grad):
            return False
        if tensor is not norm.weight and (type(tensor) is not torch.Tensor or tensor.shape != shape):
            return False
    if norm.weight.shape != shape[-1:] or shape[-1] % norm.group_size:
        return False  # upstream's own error, or its broadcasting
    if torch.is_autocast_enabled(y.device.type):
        return False
    return backends.resolve(backend, y.device) == "triton"


def rms_norm_triton(norm: RMSNorm, y: torch.Tensor, gate: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """y (..., d) and gate of its shape, or None -> what the module returns, in `out_dtype`."""
    from replayssm_kernels import rms_norm

    return rms_norm(
        y,
        gate,
        norm.weight,
        norm.eps,
        norm.group_size,
        weight_in_float32=norm.weight_in_float32,
        norm_before_gate=norm.norm_before_gate,
        out_dtype=out_dtype,
    )
