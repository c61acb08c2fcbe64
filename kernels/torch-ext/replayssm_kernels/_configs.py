"""
How kernels are launched: rows of the state in a tile, warps, one launch or several. Chosen by shape and device from a
small table that `scripts/tune_kernels.py` makes (configs.json), with a sound default where the table does not know the
device. Nothing is tuned while a model runs; to use a table of one's own, name it in REPLAYSSM_KERNEL_CONFIGS.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ._launch import next_power_of_2


@dataclass(frozen=True)
class Tile:
    """How a kernel goes over the state."""

    block_p: int  # rows of the state of one head in a tile, a power of two >= 16
    warps: int
    columns: int  # of the state in one piece of registers
    evict: str = ""  # eviction policy of the state's loads
    slots: int = 16  # of the buffer at a time, a power of two >= 16
    # One token: how a row that flushes comes by the state. "keep": it stays in registers; "again": it is read once
    # more; "stream": the same, and neither time into registers as a whole, but through shared memory; "prefetch": as
    # "stream", and already on its way into the L2 cache while the launch in front goes on (a small batch gains by it).
    # In 8 bits a flush of a row that "keep" names reads it again, too.
    state: str = "again"
    # Registers of a thread, at most (0: what the compiler takes; NVIDIA only). The branch of a flush needs many: what
    # it spills costs the rows that flush, and more programs are under way in all the others.
    registers: int = 0


@dataclass(frozen=True)
class Config:
    tile: Tile
    fused: bool = False  # one token: all in one launch
    overlap: bool = True  # of the append kernel with the next one, where the device can
    append_block: int = 256  # channels of x in a program of the append kernel
    append_warps: int = 1
    ahead: int = 0  # bytes of the state that the append kernel asks the L2 cache for (delta rules)


OVERRIDE: Config | None = None  # for tuning


def choose(checkpoint: torch.Tensor, tokens: int) -> Config:
    """The configuration of a call with `tokens` new tokens."""
    if OVERRIDE is not None:
        return OVERRIDE
    batch, heads, head_dim, state = checkpoint.shape
    return _choose(_device_name(checkpoint.device), batch * heads, head_dim, state, checkpoint.element_size(), tokens)


@functools.cache
def _choose(device: str, heads: int, head_dim: int, state: int, state_bytes: int, tokens: int) -> Config:
    """`heads`: of the whole batch, which is what the work is proportional to."""
    work = heads * head_dim * state
    entries = [
        entry
        for entry in _table()
        if entry["device"] == device and entry["state_bytes"] == state_bytes and (entry["tokens"] > 1) == (tokens > 1)
    ]
    if not entries:
        return _default(heads, head_dim, state, state_bytes, tokens)

    def distance(entry: dict) -> tuple:
        other = entry["heads"] * entry["head_dim"] * entry["state"]
        return entry["state"] != state, entry["head_dim"] != head_dim, abs(math.log(work / other))

    nearest = min(entries, key=distance)
    config = nearest["config"]
    if (nearest["head_dim"], nearest["state"]) == (head_dim, state):
        return config
    return replace(config, tile=fit(config.tile, head_dim, state, tuned_for=nearest["state"]))


def fit(tile: Tile, head_dim: int, state: int, tuned_for: int) -> Tile:
    """
    The tile for another head_dim and state: as many elements, and no row beyond the head's where that can be. A warp
    takes 4096 elements at most, or as many as it was tuned with if its rows get no longer: a flush in 8 bits keeps
    whole rows in registers.
    """
    block_p = max(16, tile.block_p * tuned_for // max(next_power_of_2(state), 16))
    block_p = min(block_p, max(next_power_of_2(head_dim), 16))
    while block_p > 16 and head_dim % block_p:
        block_p //= 2
    elements = block_p * next_power_of_2(state)
    most = 128 * 32
    if state <= tuned_for:
        most = max(most, tile.block_p * next_power_of_2(tuned_for) // tile.warps)
    warps = tile.warps
    while warps > 1 and elements < 16 * 32 * warps:
        warps //= 2
    while warps < 8 and elements > most * warps:
        warps *= 2
    alike = elements * tile.warps == tile.block_p * next_power_of_2(tuned_for) * warps  # in a thread
    return replace(tile, block_p=block_p, warps=warps, registers=tile.registers if alike else 0)


def _default(heads: int, head_dim: int, state: int, state_bytes: int, tokens: int) -> Config:
    """
    For a device that was not tuned for: 4096 elements of the state a warp keep enough loads under way, 8192 where they
    are bytes. A small batch has latency to save, hence one launch.
    """
    fused = heads < 512
    tile = Tile(32, 1, 64)
    if state_bytes == 1 and tokens == 1 and not fused:
        tile = Tile(64, 1, 64, state="stream")
    return Config(fit(tile, head_dim, state, tuned_for=128), fused=fused)


@functools.cache
def fold_tile(head_dim: int, state: int) -> Tile:
    """For a flush alone."""
    return fit(Tile(64, 4, 32), head_dim, state, tuned_for=128)


@functools.cache
def _table() -> list[dict]:
    path = Path(os.environ.get("REPLAYSSM_KERNEL_CONFIGS") or Path(__file__).with_name("configs.json"))
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [{**entry, "config": _config_of(entry["config"])} for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of launch configurations ({type(error).__name__}: {error}). Unset "
            "REPLAYSSM_KERNEL_CONFIGS, or make one with scripts/tune_kernels.py."
        ) from error


def _config_of(fields: dict) -> Config:
    return Config(**{**fields, "tile": Tile(**fields["tile"])})


@functools.cache
def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
