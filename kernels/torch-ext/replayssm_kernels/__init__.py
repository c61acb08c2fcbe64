"""Triton kernels of ReplaySSM: decode steps of state-space layers from a checkpoint and a buffer of inputs.

They know tensors only (torch and triton). Importing the package works without triton; then `is_available()` is False
and `unavailable_reason()` says why. The layout is the Kernel Hub's, so every import inside is relative.
"""

from __future__ import annotations

from ._availability import is_available, unavailable_reason


__all__ = ["is_available", "unavailable_reason"]

if is_available():
    from ._conv import causal_conv
    from ._norm import rms_norm
    from ._positions import COUNT, FIRST, FOLD, HELD, SEEN
    from .mamba1 import mamba1_fold, mamba1_scan, mamba1_step
    from .mamba2 import mamba2_decode, mamba2_fold, mamba2_step

    __all__ += ["causal_conv", "rms_norm", "mamba2_decode", "mamba2_fold", "mamba2_step"]
    __all__ += ["mamba1_fold", "mamba1_scan", "mamba1_step"]
    __all__ += ["SEEN", "FIRST", "HELD", "COUNT", "FOLD"]
