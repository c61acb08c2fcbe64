"""
What bounds the kernels: Nsight Compute's counters for the launches of a decode step and of a window, as a table.

    PYTHONPATH=src:kernels/torch-ext python scripts/profile_kernels.py [--output profile.txt]

`ncu` must be on the PATH. Caches are cold at every launch (ncu flushes them), clocks are the GPU's own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import subprocess
import sys

import benchmark_kernels as benchmark
import torch
from benchmark_kernels import GEOMETRIES, Bench, Case, Step


CASES = {
    f"{name}, {checkpoint} checkpoint, batch {batch}": (checkpoint, batch, slots, step)
    for (name, slots, step), checkpoint, batch in itertools.product(
        (
            ("step", 16, Step(64, 0, 8, 1, 0)),
            ("step that flushes", 16, Step(64, 0, 15, 1, 16)),
            ("window of 8", 64, Step(64, 0, 24, 8, 0)),
        ),
        ("fp32", "bf16"),
        (8, 128),
    )
}
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


def launch_cases() -> None:
    """In the profiled process: every case three times, the last one under the profiler."""
    bench = Bench(benchmark.load_ours(), None, "cuda", 1.0, torch.cuda.get_device_properties(0).L2_cache_size)
    for checkpoint, batch, slots, step in CASES.values():
        case = Case(GEOMETRIES["Nemotron-H-8B"], batch, checkpoint, "bf16")
        launch = bench.step(case, bench.parameters(case), bench.positions(case, [step]))
        one = bench.make_set(case, slots, step.count)
        for turn in range(3):
            torch.cuda.synchronize()
            if turn == 2:
                torch.cuda.profiler.start()
            launch(one, step)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile() -> list[dict[str, str]]:
    """One row of ncu's counters for each launch."""
    metrics = [metric for metric, _ in METRICS.values()] + [stall_metric(stall) for stall in STALLS]
    command = [
        "ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units",
        "base", "--metrics", ",".join(metrics), sys.executable, __file__, "--launch",
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


def table(rows: list[dict[str, str]]) -> str:
    """The launches of each case, in order. A case is one append launch and what follows it."""
    lines, names = [], iter(CASES)
    for row in rows:
        kernel = row["Kernel Name"].split("(")[0]
        if kernel in ("_append_kernel", "_fused_kernel"):
            lines.append(f"\n{next(names)}")
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
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_kernels: needs an NVIDIA GPU.")
    if args.launch:
        launch_cases()
        return
    text = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, 128 heads x 64 x 128\n"
    text += table(profile()) + "\n"
    print(text)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
