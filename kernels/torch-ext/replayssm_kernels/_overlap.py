"""
Overlap of two launches, where the device can do it (NVIDIA, from compute capability 9.0): the second kernel starts
while the first is still running, loads what the first does not write, and then waits for it. A launch's latency is
saved. Everywhere else `can_overlap` is False, nothing of this is compiled, and launches follow each other as usual.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def may_start_next():
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(at):
    """The lines of 128 bytes with these addresses are on their way into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@functools.cache
def can_overlap(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
    )
