"""
How kernels are launched: rows of the state in a program, warps, one launch or two. Chosen by shape and device from a
small table that `scripts/tune_kernels.py` makes (folder configs/), with a sound default where it has no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._launch import next_power_of_2


@dataclass(frozen=True)
class Config:
    block_p: int  # rows of the state in a program
    warps: int
    columns: int = 32  # of the state at a time
    block_j: int = 64  # slots at a time; where it spans the buffer, a flush needs no second look at it
    fused: bool = False  # one token in one launch
    append_block: int = 256  # channels of x in a program of the append kernel
    append_warps: int = 1
    registers: int | None = None
    evict: str = ""
    overlap: bool = True  # of the two launches, where the device can


OVERRIDE: Config | None = None


def choose(checkpoint: torch.Tensor, x_buffer: torch.Tensor, B_buffer: torch.Tensor, tokens: int, conv: bool) -> Config:
    if OVERRIDE is not None:
        return OVERRIDE
    batch, heads, head_dim, state = checkpoint.shape
    block_n = next_power_of_2(state)
    block_p = min(next_power_of_2(head_dim), max(16, 4096 // block_n), 64)
    if head_dim % block_p:
        block_p = 16
    return Config(block_p=max(block_p, 16), warps=1 if block_p * block_n <= 4096 else 2 , fused=batch * heads < 1024)
