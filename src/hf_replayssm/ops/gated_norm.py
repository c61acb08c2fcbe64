"""
The gated RMS norm behind a recurrence, of one row y (d,) with its gate (d,), group by group:

    out = weight x / sqrt(mean(x^2) + eps),  x = y silu(gate)
    out = weight x / sqrt(mean(x^2) + eps) silu(gate),  x = y       (`norm_before_gate`)

The reference is upstream's module, which a mixer calls wherever the kernel does not stand for it. Upstream takes ten
launches for a decode step, the kernel one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import backend as backends


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GatedNorm:
    """What a gated norm module computes; the fields are arguments of `replayssm_kernels.gated_rms_norm`."""

    weight: torch.Tensor
    eps: float
    group_size: int
    weight_in_float32: bool = False
    norm_before_gate: bool = False


def uses_kernel(norm: GatedNorm, y: torch.Tensor, gate: torch.Tensor, out_dtype: torch.dtype, backend: str) -> bool:
    """
    Whether the Triton kernel gives what the module would: for plain tensors on one device (no DTensor, nothing
    quantised, nothing that is still to be loaded), without a gradient and outside of autocast.
    """
    tensors = y, gate, norm.weight
    if type(y) is not torch.Tensor or type(gate) is not torch.Tensor or type(norm.weight) is not torch.nn.Parameter:
        return False
    if out_dtype not in DTYPES or any(tensor.dtype not in DTYPES or tensor.device != y.device for tensor in tensors):
        return False
    if y.shape != gate.shape or norm.weight.shape != y.shape[-1:] or y.shape[-1] % norm.group_size:
        return False  # upstream's own error, or its broadcasting
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if torch.is_autocast_enabled(y.device.type):
        return False
    return backends.resolve(backend, y.device) == "triton"


def gated_norm_triton(norm: GatedNorm, y: torch.Tensor, gate: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """y (..., d) and gate of its shape -> what the module returns, in `out_dtype`."""
    from replayssm_kernels import gated_rms_norm

    return gated_rms_norm(
        y,
        gate,
        norm.weight,
        norm.eps,
        norm.group_size,
        weight_in_float32=norm.weight_in_float32,
        norm_before_gate=norm.norm_before_gate,
        out_dtype=out_dtype,
    )
