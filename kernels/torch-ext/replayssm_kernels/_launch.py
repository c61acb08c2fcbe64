"""What every launcher needs: the right device, and sizes that triton accepts."""

from __future__ import annotations

import contextlib

import torch


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device the current one, since triton launches on the current device."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
