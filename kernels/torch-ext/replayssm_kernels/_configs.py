"""
How kernels are launched: rows of the state in a tile, warps, one launch or several. Chosen by shape and device from a
small table that `scripts/tune_kernels.py` makes (folder configs/), with a sound default where it has no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._launch import next_power_of_2


@dataclass(frozen=True)
class Tile:
    """How a kernel goes over the state."""

    block_p: int  # rows of the state of one head in a tile, a power of two >= 16
    warps: int
    columns: int  # of the state in one piece of registers
    evict: str = ""  # eviction policy of the state's loads


@dataclass(frozen=True)
class Config:
    tile: Tile
    fused: bool = False  # one token: all in one launch (rows that flush too)
    flush: Tile | None = None  # rows that flush are left to a launch of their own; None: they go with the others
    flush_programs: int = 8  # of that launch, for each multiprocessor
    block_j: int = 64  # slots at a time; where it spans the buffer, a flush needs no second look at it
    append_block: int = 256  # channels of x in a program of the append kernel
    append_warps: int = 1
    overlap: bool = True  # of consecutive launches, where the device can


OVERRIDE: Config | None = None  # for tuning


def choose(checkpoint: torch.Tensor, x_buffer: torch.Tensor, B_buffer: torch.Tensor, tokens: int) -> Config:
    """
    The configuration for a call. `tokens` 0 asks for that of a flush alone. (The device is that of the checkpoint; the
    buffers' dtype matters too.)
    """
    if OVERRIDE is not None:
        return OVERRIDE
    batch, heads, head_dim, state = checkpoint.shape
    return default(batch * heads, head_dim, state, checkpoint.element_size(), tokens)


def default(rows: int, head_dim: int, state: int, state_bytes: int, tokens: int) -> Config:
    """
    Without an entry in the table. About 4096 elements of the state in a tile and 128 a thread keep enough loads under
    way; small batches are short of programs and of everything but latency.
    """
    block_n = max(next_power_of_2(state), 16)
    block_p = max(16, min(next_power_of_2(head_dim), 4096 // block_n, 64))
    while block_p > 16 and head_dim % block_p:
        block_p //= 2
    warps = max(1, min(4, block_p * block_n // 4096))
    tile = Tile(block_p, warps, 64, "evict_first" if rows < 4096 else "")
    if rows < 4096:
        return Config(tile, fused=rows < 512)
    return Config(tile, flush=Tile(block_p, warps, 64))
