"""
What bounds the kernels: Nsight Compute's counters for the launches of decode steps and windows, as a table.

    PYTHONPATH=src:kernels/torch-ext python scripts/profile_kernels.py [--output profile.txt]

`ncu` must be on the PATH. Caches are cold at every launch (ncu flushes them), clocks are the GPU's own.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import benchmark_gated_delta
import benchmark_kernels as benchmark
import benchmark_mamba1
import torch
from benchmark_kernels import GEOMETRIES, Bench, Case, Step


def mamba2(bench: Bench, checkpoint: str, batch: int, slots: int, step: Step) -> Callable[[], Any]:
    case = Case(GEOMETRIES["Nemotron-H-8B"], batch, checkpoint, "bf16")
    launch = bench.step(case, bench.parameters(case), bench.positions(case, [step]))
    return functools.partial(launch, bench.make_set(case, slots, step.count), step)


def delta(bench: Bench, geometry: str, batch: int, slots: int, step: Step) -> Callable[[], Any]:
    case = dataclasses.replace(benchmark_gated_delta.GEOMETRIES[geometry], batch=batch)
    launch = benchmark_gated_delta.replay(bench, bench.positions(case, [step]))
    return functools.partial(launch, benchmark_gated_delta.make_set(bench, case, slots, step.count), step)


def mamba1(bench: Bench, geometry: str, batch: int, slots: int, step: Step) -> Callable[[], Any]:
    case = benchmark_mamba1.Case(benchmark_mamba1.GEOMETRIES[geometry], batch, "fp32", "bf16")
    p, positions = benchmark_mamba1.parameters(bench, case), bench.positions(case, [step])
    launch = benchmark_mamba1.replay_step(bench, p, positions)
    return functools.partial(launch, benchmark_mamba1.make_set(bench, case, slots, step.count), step)


def cases() -> dict[str, tuple]:
    """Name: (its kind, dtype of the checkpoint or geometry, batch, slots, step)."""
    kinds = {
        mamba2: {
            "step": (16, Step(64, 0, 8, 1, 0)),
            "step that flushes": (16, Step(64, 0, 15, 1, 16)),
            "window of 8": (64, Step(64, 0, 24, 8, 0)),
        },
        delta: {
            "step": (16, Step(64, 0, 8, 1, 0)),
            "step that flushes": (16, Step(64, 0, 15, 1, 16)),
            "window of 5": (32, Step(64, 0, 12, 5, 0)),
        },
        mamba1: {
            "step": (4, Step(64, 0, 2, 1, 0)),
            "step that flushes": (4, Step(64, 0, 3, 1, 4)),
            "window of 5": (16, Step(64, 0, 4, 5, 0)),
        },
    }
    of = {mamba2: ("fp32", "bf16"), delta: ("Qwen3-Next", "Kimi-Linear"), mamba1: ("Jamba-mini",)}
    return {
        f"{kind.__name__} {what}, {name}, batch {batch}": (kind, what, batch, slots, step)
        for kind, steps in kinds.items()
        for (name, (slots, step)), what, batch in itertools.product(steps.items(), of[kind], (8, 128))
    }


KINDS = ["mamba2", "delta", "mamba1"]
STALLS = {
    "long scoreboard": "loads from memory",
    "short scoreboard": "shared memory",
    "barrier": "barriers",
    "wait": "fixed latencies",
    "mio_throttle": "queue to shared memory",
    "math_pipe_throttle": "arithmetic units",
    "not_selected": "another warp went first",
}
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "GB/s read": ("dram__bytes_read.sum.per_second", 1e-9),
    "GB/s written": ("dram__bytes_write.sum.per_second", 1e-9),
    "registers": ("launch__registers_per_thread", 1),
    "warps active %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "issue slots %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
}


def stall_metric(stall: str) -> str:
    return f"smsp__average_warps_issue_stalled_{stall.replace(' ', '_')}_per_issue_active.ratio"


def launch_cases(kinds: list[str]) -> None:
    """
    In the profiled process: every case three times, the last one under the profiler, between two fills of a number,
    by which its launches are found.
    """
    bench = Bench(benchmark.load_ours(), None, "cuda", 1.0, torch.cuda.get_device_properties(0).L2_cache_size)
    mark = torch.zeros(1, device="cuda")
    for kind, *arguments in chosen(kinds).values():
        launch = kind(bench, *arguments)
        launch(), launch()
        mark.fill_(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        mark.fill_(1)
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def chosen(kinds: list[str]) -> dict[str, tuple]:
    return {name: case for name, case in cases().items() if case[0].__name__ in kinds}


def profile(kinds: list[str]) -> list[dict[str, str]]:
    """One row of ncu's counters for each launch."""
    metrics = [metric for metric, _ in METRICS.values()] + [stall_metric(stall) for stall in STALLS]
    command = [
        "ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units",
        "base", "--metrics", ",".join(metrics), sys.executable, __file__, "--launch", "--kind", *kinds,
    ]  # fmt: skip
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SystemExit("profile_kernels: `ncu` (Nsight Compute) is not on the PATH.") from error
    lines = [line for line in found.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise SystemExit(f"profile_kernels: ncu counted nothing.\n{found.stdout[-2000:]}\n{found.stderr[-2000:]}")
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row["ID"]]  # without the row of units


def number(row: dict[str, str], metric: str) -> float:
    return float((row.get(metric) or "nan").replace(",", ""))


def table(rows: list[dict[str, str]], kinds: list[str]) -> str:
    """The launches of each case, in order."""
    lines, names = [], iter(chosen(kinds))
    for row in rows:
        kernel = row["Kernel Name"].split("(")[0]
        if not kernel.endswith("_kernel") or "elementwise" in kernel:  # the fill ahead of a case
            lines.append(f"\n{next(names)}")
            continue
        figures = [f"{number(row, metric) * scale:.4g} {name}" for name, (metric, scale) in METRICS.items()]
        stalls = {stall: number(row, stall_metric(stall)) for stall in STALLS}
        whole = sum(stalls.values())
        worst = sorted(stalls, key=stalls.get, reverse=True)[:3]
        figures.append("waits: " + ", ".join(f"{STALLS[stall]} {stalls[stall] / whole:.0%}" for stall in worst))
        lines.append(f"  {kernel:16} {'; '.join(figures)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write the table to this file")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_kernels: needs an NVIDIA GPU.")
    if args.launch:
        launch_cases(args.kind)
        return
    text = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}\n"
    text += table(profile(args.kind), args.kind) + "\n"
    print(text)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
