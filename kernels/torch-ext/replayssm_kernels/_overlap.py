"""
Overlap of two launches, where the device can do it (NVIDIA, from compute capability 9.0): the second kernel starts
while the first is still running, loads what the first does not write, and then waits for it. A launch's latency is
saved. On the same devices a kernel can ask for memory that a later one will read. Everywhere else `can_overlap` is
False, nothing of this is compiled, and launches follow each other as usual.
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
def prefetch(address, size):
    """
    Starts to bring `size` bytes at `address` (int64; multiples of 16, both) into the second-level cache. One instruction
    of one thread: unlike a load, it holds no registers while the data are under way.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def can_overlap(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
    )
