"""
The RMS norms of a model, of one row y (d,), group by group: between layers, and behind a recurrence with a gate (d,):

    out = weight y / sqrt(mean(y^2) + eps)
    out = weight x / sqrt(mean(x^2) + eps),  x = y silu(gate)
    out = weight x / sqrt(mean(x^2) + eps) silu(gate),  x = y       (`norm_before_gate`)

The reference is upstream's module, which is called wherever the kernel does not stand for it. Upstream takes seven to
ten launches for a decode step, the kernel one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import backend as backends


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RMSNorm(NamedTuple):
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
    # (Comparisons alone: a model asks dozens of times a step, and in eager mode the device may wait for it.)
    weight, device, shape = norm.weight, y.device, y.shape
    if type(y) is not torch.Tensor or type(weight) is not torch.nn.Parameter or weight.device != device:
        return False
    if y.dtype not in DTYPES or weight.dtype not in DTYPES or out_dtype not in DTYPES:
        return False
    if weight.shape != shape[-1:] or shape[-1] % norm.group_size:
        return False  # upstream's own error, or its broadcasting
    if gate is not None:
        if type(gate) is not torch.Tensor or gate.shape != shape or gate.device != device or gate.dtype not in DTYPES:
            return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (y, weight, gate)):
        return False
    return not torch.is_autocast_enabled(device.type) and backends.resolve(backend, device) == "triton"


def rms_norm_triton(norm: RMSNorm, y: torch.Tensor, gate: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """y (..., d) and gate of its shape, or None -> what the module returns, in `out_dtype`."""
    import replayssm_kernels

    return replayssm_kernels.rms_norm(
        y,
        gate,
        norm.weight,
        norm.eps,
        norm.group_size,
        weight_in_float32=norm.weight_in_float32,
        norm_before_gate=norm.norm_before_gate,
        out_dtype=out_dtype,
    )
