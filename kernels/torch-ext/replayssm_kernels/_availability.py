"""Whether the kernels can run here, and if not, why. Importing this never needs triton."""

from __future__ import annotations

import os

import torch


try:
    import triton as _triton
except Exception as error:  # not ImportError alone: a broken installation must not break callers that have a fallback
    _triton = None
    _IMPORT_ERROR = f"triton cannot be imported ({type(error).__name__}: {error})"
else:
    _IMPORT_ERROR = None

# Device types that triton compiles for. ROCm builds of torch report "cuda".
_DEVICE_TYPES = ("cuda", "xpu")


def interpreted() -> bool:
    """True where TRITON_INTERPRET=1 makes triton run kernels in Python, on tensors of the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def unavailable_reason(device: torch.device | str | int | None = None) -> str | None:
    """Why the kernels cannot run, in words, or None where they can.

    Without `device` the question is only whether triton can be imported; with one, also whether triton
    serves devices of that type (the CPU only under TRITON_INTERPRET=1).
    """
    if _IMPORT_ERROR is not None:
        return _IMPORT_ERROR
    if device is None:
        return None
    kind = torch.device(device).type
    if kind in _DEVICE_TYPES or (kind == "cpu" and interpreted()):
        return None
    return f"triton does not run on devices of type {kind!r}"


def is_available(device: torch.device | str | int | None = None) -> bool:
    """Whether the kernels can run (on `device`, where one is given). See `unavailable_reason`."""
    return unavailable_reason(device) is None
