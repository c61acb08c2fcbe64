"""Triton kernels of ReplaySSM: decode steps of state-space layers from a checkpoint and a buffer of inputs.

They know tensors only (torch and triton). Importing the package works without triton; then `is_available()` is False
and `unavailable_reason()` says why. The layout is the Kernel Hub's, so every import inside is relative.
"""

from __future__ import annotations

from ._availability import is_available, unavailable_reason


__all__ = ["is_available", "unavailable_reason"]

if is_available():
    from . import mamba2_step
    from .mamba2_step import replay_step

    __all__ += ["mamba2_step", "replay_step"]
