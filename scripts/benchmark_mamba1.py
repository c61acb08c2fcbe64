"""
Times the Mamba-1 kernels on a GPU: replay, the classic step of mamba_ssm, windows of drafts, and the scan.

    python scripts/benchmark_mamba1.py --mamba-ssm mamba_ssm.whl --json results.json
    python scripts/benchmark_mamba1.py --quick                            # one geometry, batch 32 and 128
    python scripts/benchmark_mamba1.py --sweep --batch 1 32 128 512       # launch configurations, best first
    python scripts/benchmark_mamba1.py --show results.json                # the tables again, no GPU

It measures as benchmark_kernels.py does: whole flush cycles with the write position really advancing, cold L2, random
data, CUDA graphs, the median; outputs are compared with float64 first, and a side that is wrong gets no speed. Each
side gets raw dt, its bias (softplus), D, and the gate z.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark_kernels as harness
import torch
from benchmark_kernels import (
    DTYPES,
    SIZE,
    Bench,
    Step,
    bound_us,
    cell,
    commit_of,
    figure,
    load_classic,
    load_ours,
    mamba_ssm_folder,
    mean_bytes,
    plain_schedule,
    read_bandwidth,
    relative_error,
    rows_to_check,
    table,
    tolerance,
    write_json,
)
from torch.nn import functional as F

from hf_replayssm.ops.mamba1 import BUFFER_LEN


@dataclass(frozen=True)
class Geometry:
    """Sizes of one Mamba-1 layer, as the decode step sees it."""

    name: str
    groups: int  # of channels that share B and C
    channels: int  # of a group
    state: int = 16

    @property
    def inner(self) -> int:
        return self.groups * self.channels


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("Jamba-mini", 1, 8192),  # Falcon-Mamba-7B has the same sizes
        Geometry("Zamba-7B", 2, 3712),
        Geometry("mamba-2.8b", 1, 5120),
    )
}
BATCHES = [1, 8, 32, 128, 512]
# Against the classic step (the second at batch 128 and over), against our own step with buffer_len 1, and of a window
# of five against a plain step.
LEAST_RATIO, LEAST_RATIO_LARGE, LEAST_OWN, MOST_WINDOW = 0.95, 1.5, 1.15, 2.1


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    batch: int
    checkpoint: str
    activation: str

    def row(self) -> dict[str, Any]:
        return {"geometry": self.geometry.name, "batch": self.batch, "checkpoint": self.checkpoint}

    def __str__(self) -> str:
        return f"{self.geometry.name} batch {self.batch} {self.checkpoint}"


# Bytes: each input read once, each output written once.


def state_bytes(case: Case) -> int:
    return case.batch * case.geometry.inner * case.geometry.state * SIZE[case.checkpoint]


def slot_bytes(case: Case) -> int:
    """One buffered token: x, raw dt and B."""
    geometry = case.geometry
    return case.batch * (2 * geometry.inner + geometry.groups * geometry.state) * SIZE[case.activation]


def token_bytes(case: Case) -> int:
    """What comes with a new token and goes: x, raw dt, z, B, C, y."""
    geometry = case.geometry
    return case.batch * (4 * geometry.inner + 2 * geometry.groups * geometry.state) * SIZE[case.activation]


def parameter_bytes(case: Case) -> int:
    """A, D and the bias of dt, float32."""
    return 4 * case.geometry.inner * (case.geometry.state + 2)


def classic_bytes(case: Case) -> int:
    return 2 * state_bytes(case) + token_bytes(case) + parameter_bytes(case)


def step_bytes(case: Case, step: Step) -> int:
    """(Tokens that this call folds are not appended: nobody reads them again.)"""
    appended = step.count - max(step.fold - step.held, 0)
    written = (state_bytes(case) if step.fold else 0) + appended * slot_bytes(case)
    read = state_bytes(case) + step.held * slot_bytes(case) + parameter_bytes(case) + case.batch * len(step) * 4
    return read + written + step.count * token_bytes(case)


def exponentials(case: Case, step: Step) -> int:
    """One for each token that is replayed or new, channel and column."""
    return case.batch * case.geometry.inner * case.geometry.state * (step.held + step.count)


# Tensors.


def parameters(bench: Bench, case: Case) -> types.SimpleNamespace:
    """A = -(1 .. n) and dt around 0.001 to 0.1, as Mamba initialises them; float32."""
    geometry, device = case.geometry, bench.device
    shape = geometry.groups, geometry.channels
    dt = torch.exp(torch.rand(shape, device=device) * math.log(100.0) + math.log(1e-3))
    columns = torch.arange(1, geometry.state + 1, device=device, dtype=torch.float32)
    return types.SimpleNamespace(
        A=-columns[:, None].expand(geometry.groups, -1, geometry.channels).contiguous(),
        dt_bias=dt + torch.log(-torch.expm1(-dt)),  # softplus(dt_bias) = dt
        D=torch.rand(shape, device=device) + 0.5,
    )


def inputs(bench: Bench, case: Case, tokens: int) -> types.SimpleNamespace:
    """x, raw dt, z (b, t, g, p), B and C (b, t, g, n); z as half of a projection of twice the width."""
    geometry, dtype = case.geometry, DTYPES[case.activation]
    size = case.batch, tokens, geometry.groups
    wide = bench.random(*size, 2 * geometry.channels, dtype=dtype)
    return types.SimpleNamespace(
        x=bench.random(*size, geometry.channels, dtype=dtype),
        dt=bench.random(*size, geometry.channels, dtype=dtype),
        B=bench.random(*size, geometry.state, dtype=dtype),
        C=bench.random(*size, geometry.state, dtype=dtype),
        z=wide[..., geometry.channels :],
    )


def tokens_of(all_: types.SimpleNamespace, begin: int, end: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{name: tensor[:, begin:end] for name, tensor in vars(all_).items()})


def make_set(bench: Bench, case: Case, slots: int, window: int, fill: float | None = None) -> types.SimpleNamespace:
    """Everything that one launch touches; `fill`: of the buffers."""
    geometry, dtype, batch = case.geometry, DTYPES[case.activation], case.batch
    sizes = (geometry.channels, geometry.state, geometry.channels)
    buffers = [bench.random(batch, geometry.groups, slots, size, dtype=dtype) for size in sizes]
    state = bench.random(batch, geometry.groups, geometry.state, geometry.channels, dtype=DTYPES[case.checkpoint])
    if fill is not None:
        for buffer in buffers:
            buffer.fill_(fill)
    return types.SimpleNamespace(state=state, buffers=buffers, new=inputs(bench, case, window))


def make_sets(bench: Bench, case: Case, slots: int, window: int = 1) -> list[types.SimpleNamespace]:
    number = bench.number_of_sets(state_bytes(case))
    bench.require_memory(number * (state_bytes(case) + slots * slot_bytes(case) + 2 * window * token_bytes(case)))
    return [make_set(bench, case, slots, window) for _ in range(number)]


# Launches: launch(set, step).


def replay_step(bench: Bench, p, positions):
    def launch(one, step):
        new = one.new
        return bench.kernels.mamba1_step(
            positions[step], new.x, new.B, new.C, new.dt, *one.buffers, p.A, p.D, one.state, dt_bias=p.dt_bias, z=new.z
        )

    return launch


def classic_step(bench: Bench, p):
    """mamba_ssm's step: its state is (b, d, n), or (b, heads, d, n) where there are groups."""
    single = p.A.shape[0] == 1
    squeeze = (lambda tensor, dim: tensor.squeeze(dim)) if single else (lambda tensor, dim: tensor)
    A = squeeze(p.A.mT.contiguous(), 0)
    D, dt_bias = squeeze(p.D, 0), squeeze(p.dt_bias, 0)

    def launch(one, step):
        new = {name: squeeze(tensor[:, 0], 1) for name, tensor in vars(one.new).items()}
        # (The same memory as another shape: of the values of the state only the check knows.)
        state = squeeze(one.state.view(*one.state.shape[:2], one.state.shape[3], one.state.shape[2]), 1)
        y = bench.classic(
            state, new["x"], new["dt"], A, new["B"], new["C"], D, z=new["z"], dt_bias=dt_bias, dt_softplus=True
        )
        return y[:, None, None] if single else y[:, None]

    return launch


# Right, first.


def reference(p, state, new: types.SimpleNamespace) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The recurrence in float64: y (b, t, g, p), and the states behind each token."""
    x, B, C, z = (tensor.double() for tensor in (new.x, new.B, new.C, new.z))
    dt = F.softplus(new.dt.double() + p.dt_bias.double())
    A, D, S, y, states = p.A.double(), p.D.double(), state.double(), [], []
    for t in range(x.shape[1]):
        S = torch.exp(A * dt[:, t, :, None]) * S + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, :, :, None]
        y.append(((S * C[:, t, :, :, None]).sum(2) + D * x[:, t]) * F.silu(z[:, t]))
        states.append(S)
    return torch.stack(y, 1), states


class Check:
    """Runs launches over a schedule from one state and one sequence of tokens, and compares with float64."""

    def __init__(self, bench: Bench, case: Case, p, tokens: int):
        self.bench, self.case = bench, case
        self.start = make_set(bench, case, 1, 1).state
        self.new = inputs(bench, case, tokens)
        self.rows = rows_to_check(case.batch, bench.device)
        few = types.SimpleNamespace(**{name: tensor[self.rows] for name, tensor in vars(self.new).items()})
        self.y, self.states = reference(p, self.start[self.rows], few)

    def error(self, launch, slots: int, schedule: list[Step], *, classic: bool = False) -> float:
        """Largest relative error of the outputs and of the state that was written."""
        one = make_set(self.bench, self.case, slots, 1, math.nan)
        # The classic state has the columns last.
        one.state = (self.start.mT if classic else self.start).contiguous().view_as(self.start).clone()
        outputs = []
        for step in schedule:
            one.new = tokens_of(self.new, step.seen, step.seen + step.count)
            outputs.append(launch(one, step))
        y = torch.cat(outputs, dim=1)[self.rows]
        state, folded = one.state, sum(step.fold for step in schedule)
        if classic:
            state, folded = state.view(*state.shape[:2], state.shape[3], state.shape[2]).mT, y.shape[1]
        error = relative_error(y, self.y[:, : y.shape[1]], (1, 3))
        if folded:
            error = max(error, relative_error(state[self.rows], self.states[folded - 1], (2, 3)))
        return error


# Rows.


def figures(bench: Bench, case: Case, launch, sets, cycle: list[Step]) -> dict[str, Any]:
    """Times, bytes, bound and fraction of a schedule: the whole cycle, its steps between flushes, its flush steps."""
    parts = {
        "cycle": cycle,
        "nonflush": [step for step in cycle if not step.fold],
        "flush": [step for step in cycle if step.fold],
    }
    result = {}
    for name, schedule in parts.items():
        if schedule:
            count = mean_bytes(case, schedule, step_bytes)
            us = bench.time(launch, sets, schedule, bench.expected_us(count))
            result[name] = figure(us, count, bench.bandwidth)
            result[name]["exponentials"] = sum(exponentials(case, step) for step in schedule) / len(schedule)
    return result


def measure_step(bench: Bench, case: Case, lengths: list[int]) -> dict[str, Any]:
    """The classic step, and ours with each buffer length; 1 is among them."""
    row = {**case.row(), "errors": {}, "wrong": [], "replay": {}}
    p = parameters(bench, case)
    check = Check(bench, case, p, 2 * max(lengths))
    launches = {}
    for length in lengths:
        schedule = plain_schedule(length, 2)
        positions = bench.positions(case, [*schedule, *plain_schedule(length, seen=64)])
        launches[length] = replay_step(bench, p, positions)
        row["errors"][f"replay {length}"] = check.error(launches[length], length, schedule)
    if bench.classic is not None:
        schedule = plain_schedule(1, 2 * max(lengths))
        row["errors"]["classic"] = check.error(classic_step(bench, p), 1, schedule, classic=True)
    del check
    row["wrong"] = [name for name, error in row["errors"].items() if error > tolerance(case)]
    for length, launch in launches.items():
        if f"replay {length}" not in row["wrong"]:
            cycle = plain_schedule(length, seen=64)
            row["replay"][str(length)] = figures(bench, case, launch, make_sets(bench, case, length), cycle)
    if bench.classic is not None and "classic" not in row["wrong"]:
        count = classic_bytes(case)
        launch = classic_step(bench, p)
        us = bench.time(launch, make_sets(bench, case, 1), plain_schedule(1), bench.expected_us(count))
        row["classic"] = figure(us, count, bench.bandwidth)
    return row


def measure_window(bench: Bench, case: Case, window: int) -> dict[str, Any]:
    """
    Windows of T drafted tokens, all accepted, as a static cache sees them that can take back as many: each call replays
    the window before it, and folds it.
    """
    row = {**case.row(), "window": window}
    p = parameters(bench, case)
    schedule = window_schedule(1, window)
    sets = make_sets(bench, case, 2 * window, window)
    launch = replay_step(bench, p, bench.positions(case, schedule))
    return row | {"held": [step.held for step in schedule]} | figures(bench, case, launch, sets, schedule)


def measure_scan(bench: Bench, case: Case, tokens: int) -> dict[str, Any]:
    """A whole sequence, one launch."""
    p = parameters(bench, case)
    one = types.SimpleNamespace(state=make_set(bench, case, 1, 1).state, new=inputs(bench, case, tokens))
    new = one.new
    check = tokens_of(new, 0, min(tokens, 300))

    def launch(one, step):
        return bench.kernels.mamba1_scan(new.x, new.B, new.C, new.dt, p.A, p.D, one.state, dt_bias=p.dt_bias, z=new.z)

    y, states = reference(p, one.state, check)
    got = bench.kernels.mamba1_scan(check.x, check.B, check.C, check.dt, p.A, p.D, one.state, dt_bias=p.dt_bias,
                                    z=check.z)  # fmt: skip
    error = max(relative_error(got[0], y, (1, 3)), relative_error(got[1], states[-1], (2, 3)))
    row = {**case.row(), "tokens": tokens, "error": error}
    del y, states
    if error <= tolerance(case):
        count = tokens * token_bytes(case) + 2 * state_bytes(case)
        us = bench.time(launch, [one], [Step(0, 0, 0, 0, 0)], bench.expected_us(count))
        row["scan"] = figure(us, count, bench.bandwidth)
    return row


def tiles(batch: int, tokens: int) -> list:
    """Launch configurations worth a try: few, for each is compiled (for its rows only whether it has several)."""
    from replayssm_kernels.mamba1 import Tile

    product = itertools.product
    if tokens > 1:
        shapes = (((64, 2), {"registers": 128}), ((256, 2), {"registers": 128, "warps": 4}), ((128, 4), {}))
        programs = [
            Tile(*shape, 2, stages=stages, overlap=overlap, **more)
            for (shape, more), stages, overlap in product(shapes, (2, 3, 4), (False, True))
        ]
        rows = (1,)
    elif batch <= 8:
        shapes = ((16, 2, 1), (32, 2, 1), (64, 2, 1), (128, 2, 2))
        programs = [
            Tile(block_p, vector, 3, warps, overlap=overlap)
            for (block_p, vector, warps), overlap in product(shapes, (False, True))
        ]
        rows = (1,)
    else:
        programs = [
            Tile(64, 2, 3, registers=r, overlap=overlap) for r, overlap in product((112, 128, 144), (False, True))
        ]
        programs += [Tile(128, 4, 3, registers=r) for r in (168, 200)]
        rows = (1, 2, 4) if batch <= 32 else (2, 4, 8)
    return [dataclasses.replace(one, rows=r) for one in programs for r in rows if r <= batch]


def window_schedule(length: int, window: int) -> list[Step]:
    """
    The steady calls of a cache that records its past, can take back as many tokens as a window has, and folds whatever
    is older: each call replays the window before it, and folds that. With `length` over 1 it first waits: then calls
    hold up to `length` windows, and the last one folds all but the newest.
    """
    calls = [Step(64, 0, (i + 1) * window, window, 0) for i in range(length)]
    return [*calls[:-1], calls[-1]._replace(fold=length * window)]


def slots_of(length: int, tokens: int) -> int:
    return length if tokens == 1 else (length + 1) * tokens


def compile_tile(case: Case, length: int, tokens: int, tile) -> None:
    """In a worker: launches a step once, so that it lies in triton's cache."""
    from replayssm_kernels import mamba1

    bench, case, step = harness._worker_bench, dataclasses.replace(case, batch=2), plain_schedule(1)[0]
    mamba1.OVERRIDE = tile
    one = make_set(bench, case, slots_of(length, tokens), tokens)
    replay_step(bench, parameters(bench, case), bench.positions(case, [step]))(one, step)
    torch.cuda.synchronize()


def sweep(bench: Bench, case: Case, lengths: list[int], window: int) -> list[dict[str, Any]]:
    """Launch configurations of the cycles of steps and of windows, best first."""
    from replayssm_kernels import mamba1

    p = parameters(bench, case)
    found = []
    kinds = [(1, length) for length in lengths]
    if case.batch > 1:
        kinds += [(window, length) for length in (1, 2)]
    for tokens, length in kinds:
        slots = slots_of(length, tokens)
        schedule = plain_schedule(length) if tokens == 1 else window_schedule(length, tokens)
        launch = replay_step(bench, p, bench.positions(case, schedule))
        sets = make_sets(bench, case, slots, tokens)
        count = mean_bytes(case, schedule, step_bytes)
        for tile in (*tiles(case.batch, tokens), None):
            mamba1.OVERRIDE = tile
            us = bench.time(launch, sets, schedule, bench.expected_us(count))
            row = {**case.row(), "tokens": tokens, "length": length, "tile": str(tile or "the default"), "us": us}
            found.append(row | {"bound": bound_us(count, bench.bandwidth)})
    return sorted(found, key=lambda row: (row["tokens"], row["length"], row["us"]))


# Tables.


def shipped_length(row: dict) -> str | None:
    """The buffer length that caches have by default; if it was not measured, the one (but 1) with the least time."""
    lengths = [length for length in row.get("replay", {}) if length != "1"]
    if str(BUFFER_LEN) in lengths:
        return str(BUFFER_LEN)
    return min(lengths, key=lambda length: row["replay"][length]["cycle"]["us"], default=None)


def judged(value: float | None, bound: float, more_is_better: bool = True) -> str:
    if value is None:
        return "-"
    good = value >= bound if more_is_better else value <= bound
    return f"{value:.2f} {'>=' if more_is_better else '<='}{bound:.2f} {'met' if good else 'missed'}"


def report(result: dict) -> str:
    about = result["about"]
    lines = [
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, mamba_ssm {about['mamba_ssm']}, commit "
        f"{about['commit']}, read-only {about['bandwidth']['bytes_per_s'] / 1e12:.2f} TB/s; microseconds",
        "",
    ]
    rows, plain = [], {}
    for row in result["steps"]:
        best = shipped_length(row)
        replay = row["replay"]
        us = lambda length, part="cycle", row=row: row["replay"].get(length, {}).get(part, {}).get("us")  # noqa: E731
        classic = row.get("classic", {}).get("us")
        key = row["geometry"], row["checkpoint"], row["batch"]
        plain[key] = us(best) if best else None
        least = LEAST_RATIO_LARGE if row["batch"] >= 128 else LEAST_RATIO
        rows.append([
            row["geometry"], row["checkpoint"], str(row["batch"]), cell(classic),
            *(cell(us(length)) for length in replay), best or "-",
            judged(classic / us(best) if classic and best else None, least),
            judged(us("1") / us(best) if best and us("1") else None, LEAST_OWN if row["batch"] >= 128 else LEAST_RATIO),
            cell(replay[best]["cycle"]["fraction"] if best else None, 2), ", ".join(row["wrong"]),
        ])  # fmt: skip
    if rows:
        lengths = [f"L={length}" for length in result["steps"][0]["replay"]]
        head = [
            "layer",
            "state",
            "batch",
            "classic",
            *lengths,
            "shipped",
            "classic / shipped",
            "L=1 / shipped",
            "of bound",
            "wrong",
        ]
        lines.append(table("Steps: cycle averages", head, rows))
    rows = []
    for row in result["windows"]:
        us = row.get("cycle", {}).get("us")
        step = plain.get((row["geometry"], row["checkpoint"], row["batch"]))
        ratio = us / step if us and step else None
        rows.append([row["geometry"], row["checkpoint"], str(row["batch"]), str(row["window"]), str(row["held"]),
                     cell(us), judged(ratio, MOST_WINDOW, False)])  # fmt: skip
    head = ["layer", "state", "batch", "T", "held", "us", "/ step"]
    lines.append(table("Windows of T drafts, all accepted", head, rows))
    rows = [
        [row["geometry"], row["checkpoint"], str(row["batch"]), str(row["tokens"]),
         cell(row.get("scan", {}).get("us")), cell(row.get("scan", {}).get("fraction"), 2)]
        for row in result["scans"]
    ]  # fmt: skip
    lines.append(table("Scans", ["layer", "state", "batch", "tokens", "us", "of bound"], rows))
    for (geometry, batch, tokens, length), group in itertools.groupby(
        result["sweeps"], key=lambda row: (row["geometry"], row["batch"], row["tokens"], row["length"])
    ):
        group = list(group)
        default = next(row["us"] for row in group if row["tile"] == "the default")
        shown = [[row["tile"], cell(row["us"], 2)] for row in [*group[:10], group[-1]]]
        title = f"{geometry}, batch {batch}, T={tokens}, L={length}: the default {default:.2f}, the bound by bytes "
        lines.append(table(f"{title}{group[0]['bound']:.2f}", ["tile", "us"], shown))
    return "\n".join(line for line in lines if line is not None)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", nargs="+", choices=[*GEOMETRIES], default=[*GEOMETRIES])
    add("--batch", type=int, nargs="+", default=BATCHES)
    add("--checkpoint", nargs="+", choices=[*DTYPES], default=["fp32", "bf16"])
    add("--activation", choices=[*DTYPES], default="bf16")
    add("--buffer-len", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    add("--windows", type=int, nargs="*", default=[2, 5, 8])
    add("--scan-tokens", type=int, nargs="*", default=[4096])
    add("--sweep", action="store_true", help="only: launch configurations of the first geometry and dtype")
    add("--workers", type=int, default=0, help="processes that compile before --sweep times")
    add("--budget-ms", type=float, default=60.0, help="GPU time per figure, in ms")
    add("--mamba-ssm", help="a wheel of mamba_ssm, or a folder that holds it or its wheel; default: the installed one")
    add("--time-limit", type=float, default=0.0, help="start no further row after so many seconds")
    add("--json", help="where to write the figures")
    add("--commit", help="what to call the code's version, where there is no git")
    add("--quick", action="store_true", help="one geometry, float32, batch 32 and 128")
    add("--show", metavar="JSON", help="print the tables of an earlier run, and measure nothing")
    args = parser.parse_args(arguments)
    if args.quick:
        args.geometry, args.batch, args.checkpoint = ["Jamba-mini"], [32, 128], ["fp32"]
        args.buffer_len, args.windows, args.budget_ms = [1, 3, 4, 5, 6], [5], min(args.budget_ms, 20.0)
    if 1 not in args.buffer_len:
        args.buffer_len = [1, *args.buffer_len]
    return args


def sweep_lengths(case: Case, args: argparse.Namespace) -> list[int]:
    """The lengths that may be the best for a batch."""
    return [length for length in args.buffer_len if length <= 4 and (length <= 2 if case.batch <= 8 else length >= 2)]


@torch.no_grad()
def run(bench: Bench, args: argparse.Namespace, result: dict, began: float) -> None:
    """Measures row after row; a row that fails says so, and the rest goes on. The JSON is written after each."""
    cases = [
        Case(GEOMETRIES[name], batch, dtype, args.activation)
        for name in args.geometry for dtype in args.checkpoint for batch in args.batch
    ]  # fmt: skip
    jobs = []
    if args.sweep:
        few = [
            case for case in cases if case.geometry.name == args.geometry[0] and case.checkpoint == args.checkpoint[0]
        ]
        if args.workers:
            todo = {
                (few[0], length, tokens, dataclasses.replace(tile, rows=min(tile.rows, 2)))
                for case in few
                for tokens, length in [*((1, length) for length in sweep_lengths(case, args)), (5, 1), (5, 2)]
                for tile in tiles(case.batch, tokens)
            }  # fmt: skip
            harness.in_workers(compile_tile, sorted(todo, key=str), args.workers)
        jobs = [("sweeps", case, lambda case: sweep(bench, case, sweep_lengths(case, args), 5)) for case in few]
    else:
        jobs += [("steps", case, lambda case: measure_step(bench, case, args.buffer_len)) for case in cases]
        for window in args.windows:
            measure = lambda case, window=window: measure_window(bench, case, window)  # noqa: E731
            jobs += [("windows", case, measure) for case in cases if case.batch >= 8]
        for tokens in args.scan_tokens:
            measure = lambda case, tokens=tokens: measure_scan(bench, case, tokens)  # noqa: E731
            jobs += [("scans", case, measure) for case in cases if case.batch <= 8 and case.checkpoint == "fp32"]
    for number, (section, case, measure) in enumerate(jobs, 1):
        if args.time_limit and time.perf_counter() - began > args.time_limit:
            print(f"the limit of {args.time_limit:.0f} s is reached: {len(jobs) - number + 1} rows are left out")
            return
        start, note = time.perf_counter(), ""
        try:
            row = measure(case)
            result[section] += row if isinstance(row, list) else [row]
        except (MemoryError, RuntimeError) as error:
            note = f"{type(error).__name__}: {str(error).strip()[:300]}"
            result["failed"].append({**case.row(), "section": section, "error": note})
        write_json(result, args.json)
        print(f"{number}/{len(jobs)} {section} {case} {time.perf_counter() - start:.1f} s {note}", file=sys.stderr)


def main() -> None:
    args = parse()
    if args.show:
        print(report(json.loads(Path(args.show).read_text())))
        return
    began = time.perf_counter()
    kernels = load_ours()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA (or ROCm) device: times are taken on a GPU only")
    classic = version = None
    try:
        classic, version = load_classic(mamba_ssm_folder(args.mamba_ssm))
    except Exception as error:
        print(f"mamba_ssm cannot be used, so there will be no ratio to it: {error}", file=sys.stderr)
    import triton

    torch.manual_seed(0)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    bench = Bench(kernels, classic, "cuda", args.budget_ms, l2_bytes)
    bandwidth = read_bandwidth(bench)
    bench.bandwidth = bandwidth["bytes_per_s"]
    about = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "mamba_ssm": version, "commit": args.commit or commit_of(Path(__file__).parent),
        "activation": args.activation, "bandwidth": bandwidth, "l2_bytes": l2_bytes,
    }  # fmt: skip
    result = {"about": about, "steps": [], "windows": [], "scans": [], "sweeps": [], "failed": []}
    run(bench, args, result, began)
    print(report(result))


if __name__ == "__main__":
    main()
