"""What every launcher needs: the right device, checks of arguments on the host, and sizes that triton accepts."""

from __future__ import annotations

import contextlib
import functools

import torch

from ._positions import ROWS


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)  # of a checkpoint alone, with scales


_HERE = contextlib.nullcontext()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device the current one, since triton launches on the current device."""
    device = tensor.device
    if device.type == "cpu":
        return _HERE
    module = torch.get_device_module(device)
    return _HERE if module.current_device() == device.index else module.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many units the device runs programs on (an estimate where it does not say)."""
    if device.type == "cpu":  # triton's interpreter: few, so that each has several tiles to do
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "multi_processor_count", None) or getattr(properties, "gpu_eu_count", 512) // 8


@functools.cache
def can_limit_registers(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def launch_options(tile, device: torch.device, overlaps: bool = False) -> dict:
    """
    triton's options for a launch with a `tile` of any recurrence (`warps`, `registers`); those that only some devices
    know are named only there. `overlaps`: the launch begins before the one in front of it has ended.
    """
    options = {"num_warps": tile.warps, "num_stages": 1}
    if overlaps:
        options["launch_pdl"] = True
    if tile.registers and can_limit_registers(device):
        options["maxnreg"] = tile.registers
    return options


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (`triton.cdiv` is made for kernels, and slow on the host.)"""
    return -(-a // b)


def rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous (as every projection gives it; else a copy)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor) -> None:
    """Shape (None: any size) and device, and that it is one of the dtypes the kernels serve."""
    # (At once where all is as it should be: every call checks a dozen tensors, and in eager mode the device may wait.)
    if tensor.dtype in DTYPES and tensor.device == like.device and _fits(tensor.shape, shape):
        return
    _check_shape(name, tensor, shape, like)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}; the kernels take float32, bfloat16 and float16: cast it.")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor) -> None:
    if not _fits(tensor.shape, shape):
        wanted = tuple(shape)
        if tensor.dim() == len(shape):
            wanted = tuple(actual if size is None else size for size, actual in zip(shape, tensor.shape))
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with the other arguments it must be {wanted}.")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, others are on {like.device}: move it there.")


def _fits(actual: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if actual == shape:
        return True
    if len(actual) != len(shape):
        return False
    for size, expected in zip(actual, shape):
        if expected is not None and size != expected:
            return False
    return True


def check_same_dtype(name: str, tensor: torch.Tensor, other: torch.Tensor, of: str) -> None:
    if tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} and {of} is {other.dtype}: cast one, digits would be lost silently."
        )


def check_owned(name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """A tensor of the cache, which is written in place."""
    check(name, tensor, shape, like)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous (it is written in place): allocate it so.")


def check_checkpoint(
    checkpoint: torch.Tensor, dims: int, scale_dim: int, scale: torch.Tensor | None, seed: int | None
) -> torch.Size:
    """
    The checkpoint, its scales, and the seed of stochastic rounding; returns the checkpoint's shape. `scale_dim` is the
    dimension of those numbers that share a scale.
    """
    scaled = checkpoint.dtype in SCALED_DTYPES
    if scaled:
        _check_shape("checkpoint", checkpoint, (None,) * dims, checkpoint)
    else:
        check("checkpoint", checkpoint, (None,) * dims, checkpoint)
    if not checkpoint.is_contiguous():
        raise ValueError("checkpoint must be contiguous (it is written in place): allocate it so.")
    if scaled != (scale is not None):
        raise ValueError(
            f"`scale` belongs to a checkpoint in int8 or float8_e4m3fn: {'pass' if scaled else 'leave out'} it with "
            f"{checkpoint.dtype}."
        )
    if scaled:
        if checkpoint.dtype == torch.float8_e4m3fn and not has_float8(checkpoint.device):
            raise ValueError(f"{checkpoint.device} has no float8_e4m3fn: store the checkpoint in int8.")
        shape = list(checkpoint.shape)
        shape[scale_dim] = 1
        check_owned("scale", scale, tuple(shape), checkpoint)
        if scale.dtype != torch.float32:
            raise ValueError(f"scale must be float32, not {scale.dtype}.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
        raise ValueError(f"`seed` is an integer from 0 to 2^32 - 1, or None to round to the nearest, not {seed!r}.")
    return checkpoint.shape


@functools.cache
def has_float8(device: torch.device) -> bool:
    """Whether kernels on the device read and write float8_e4m3fn."""
    if device.type != "cuda":
        return True
    if torch.version.hip is not None:
        return "gfx950" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device) >= (8, 9)


def as_int32(seed: int | None) -> int | None:
    """A seed below 2^32 with the same bits as a signed number: one type of argument for all of them."""
    return seed if seed is None or seed < 2**31 else seed - 2**32


def check_options(tokens: int, out_dtype: torch.dtype | None, fused: bool | None = None) -> None:
    if fused and tokens != 1:
        raise ValueError(f"`fused=True` serves one token, not {tokens}: pass None or False.")
    if out_dtype not in (None, *DTYPES):
        raise ValueError(f"`out_dtype` is float32, bfloat16 or float16, not {out_dtype}.")


def check_positions(positions: torch.Tensor, batch: int, like: torch.Tensor) -> None:
    _check_shape("positions", positions, (ROWS, batch), like)
    if positions.dtype != torch.int32:
        raise ValueError(f"positions must be int32, not {positions.dtype}.")
    if not positions.is_contiguous():
        raise ValueError("positions must be contiguous: call `.contiguous()`.")
