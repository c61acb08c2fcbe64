"""
Times the kernels of Gated DeltaNet and Kimi Delta Attention on a GPU: replay, windows of drafts, and the classic step
of flash-linear-attention, alone and with the copy into a cache that transformers makes behind it.

    python scripts/benchmark_gated_delta.py --fla fla_core.whl --json results.json
    python scripts/benchmark_gated_delta.py --tune --batch 32 128          # launch configurations

It measures as `benchmark_kernels.py` does (whole flush cycles in CUDA graphs, L2 cold, outputs compared with float64
first), whose harness it uses. Where an output is wrong there is no speed of it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import benchmark_kernels as harness
import torch
from benchmark_kernels import DTYPES, SIZE, Bench, Step, cell, figure, plain_schedule, table


@dataclass(frozen=True)
class Case:
    """A layer, how many sequences, and the dtypes of checkpoint and activations."""

    geometry: str
    heads: int  # of values
    key_heads: int
    key_dim: int
    value_dim: int
    kda: bool
    buffer_len: int = 16  # that caches have by default
    batch: int = 1
    checkpoint: str = "fp32"
    activation: str = "bf16"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def gates(self) -> tuple[int, ...]:
        return (self.key_dim,) if self.kda else ()

    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("geometry", "batch", "checkpoint", "activation")}


GEOMETRIES = {
    case.geometry: case
    for case in (
        Case("Qwen3-Next", 32, 16, 128, 128, False),  # Qwen3.5 has layers of these sizes too
        Case("Kimi-Linear", 32, 32, 128, 128, True, 10),
    )
}


# ------------------------------------------------------------------------------------------------------------- bytes


def state_bytes(case: Case) -> int:
    return case.batch * case.heads * case.key_dim * case.value_dim * SIZE[case.checkpoint]


def slot_bytes(case: Case) -> int:
    """One buffered token: raw k, and u and g in float32."""
    k = case.key_heads * case.key_dim * SIZE[case.activation]
    return case.batch * (k + 4 * case.heads * (case.value_dim + math.prod(case.gates)))


def token_bytes(case: Case) -> int:
    """What comes with one new token and goes: q, k, v, y, beta in the activation dtype, g in float32."""
    size = SIZE[case.activation]
    new = case.channels + case.heads * case.value_dim + case.heads
    return case.batch * (new * size + 4 * case.heads * math.prod(case.gates))


def classic_bytes(case: Case) -> int:
    return 2 * state_bytes(case) + token_bytes(case)


def step_bytes(case: Case, step: Step) -> int:
    """As in `benchmark_kernels.step_bytes`: tokens that the call itself folds need not be appended."""
    appended = step.count - max(step.fold - step.held, 0)
    written = (state_bytes(case) if step.fold else 0) + appended * slot_bytes(case)
    return state_bytes(case) + step.held * slot_bytes(case) + written + step.count * token_bytes(case)


def mean_bytes(case: Case, schedule: list[Step]) -> float:
    return statistics.fmean(step_bytes(case, step) for step in schedule)


# ----------------------------------------------------------------------------------------------------------- two sides


def load_fla(path: str) -> tuple[Callable, Callable, str]:
    """`fused_recurrent_gated_delta_rule`, `fused_recurrent_kda` and the version, of a wheel or a folder with `fla`."""
    rule = fla_module(path, "fla.ops.gated_delta_rule.fused_recurrent").fused_recurrent_gated_delta_rule
    kda = fla_module(path, "fla.ops.kda.fused_recurrent").fused_recurrent_kda
    return rule, kda, sys.modules["fla"].__version__


def unpacked(path: str) -> Path:
    """The folder that holds `fla`: `path`, or what is in the wheel `path`."""
    if Path(path).suffix != ".whl":
        return Path(path)
    folder = Path(tempfile.mkdtemp(prefix="fla_"))
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder)
    return folder


def fla_module(path: str, name: str) -> types.ModuleType:
    """
    A module of flash-linear-attention. The package imports all it has; empty packages stand in for those above the
    module.
    """
    if "fla" in sys.modules:
        folder = Path(sys.modules["fla"].__path__[0]).parent
    else:
        folder = unpacked(path)
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        if above not in sys.modules and above != "fla.ops.utils":
            package = types.ModuleType(above)
            package.__path__ = [str(folder.joinpath(*parts[:depth]))]
            sys.modules[above] = package
    lines = (folder / "fla/__init__.py").read_text().splitlines()
    sys.modules["fla"].__version__ = next(
        (line.partition("=")[2].strip(" \"'") for line in lines if line.startswith("__version__")), "unknown"
    )
    return importlib.import_module(name)


def make_inputs(bench: Bench, case: Case, tokens: int) -> types.SimpleNamespace:
    """q, k, v contiguous (flash-linear-attention would copy views); beta in the activation dtype, g in float32."""
    dtype, device = DTYPES[case.activation], bench.device
    return types.SimpleNamespace(
        q=bench.random(case.batch, tokens, case.key_heads, case.key_dim, dtype=dtype),
        k=bench.random(case.batch, tokens, case.key_heads, case.key_dim, dtype=dtype),
        v=bench.random(case.batch, tokens, case.heads, case.value_dim, dtype=dtype),
        g=-0.2 * torch.rand(case.batch, tokens, case.heads, *case.gates, device=device),
        beta=torch.rand(case.batch, tokens, case.heads, device=device).to(dtype),
    )


def make_set(bench: Bench, case: Case, slots: int, tokens: int = 1, fill: float | None = None) -> types.SimpleNamespace:
    """Everything that one launch touches; `fill` (NaN) for slots that nobody wrote yet."""
    dtype, f32 = DTYPES[case.activation], torch.float32
    one = make_inputs(bench, case, tokens)
    one.k_buffer = bench.random(case.batch, case.key_heads, slots, case.key_dim, dtype=dtype)
    one.u_buffer = bench.random(case.batch, case.heads, slots, case.value_dim, dtype=f32)
    one.g_buffer = bench.random(case.batch, case.heads, slots, *case.gates, dtype=f32).abs_().mul_(-0.1)
    if fill is not None:
        for buffer in (one.k_buffer, one.u_buffer, one.g_buffer):
            buffer.fill_(fill)
    size = (case.batch, case.heads, case.key_dim, case.value_dim)
    one.state = bench.random(*size, dtype=DTYPES[case.checkpoint])
    return one


def make_sets(bench: Bench, case: Case, slots: int, tokens: int = 1) -> list[types.SimpleNamespace]:
    number = bench.number_of_sets(state_bytes(case))
    bench.require_memory(number * (state_bytes(case) + slots * slot_bytes(case) + tokens * token_bytes(case)))
    return [make_set(bench, case, slots, tokens) for _ in range(number)]


def replay(bench: Bench, positions: dict[Step, torch.Tensor]) -> Callable:
    """launch(set, step): our recurrence, behind the convolution."""

    def launch(one, step):
        return bench.kernels.gated_delta_step(
            positions[step], one.q, one.k, one.v, one.g, one.beta, one.k_buffer, one.u_buffer, one.g_buffer, one.state,
        )  # fmt: skip

    return launch


def classic(function: Callable, copies: bool) -> Callable:
    """launch(set, step): flash-linear-attention's step, which returns a new state; `copies` it into the cache."""

    def launch(one, step):
        y, state = function(one.q, one.k, one.v, one.g, beta=one.beta, initial_state=one.state,
                            output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
        if copies:
            one.state.copy_(state)
        return y

    return launch


# ------------------------------------------------------------------------------------------------------- right, first


def reference(case: Case, state: torch.Tensor, inputs: types.SimpleNamespace) -> torch.Tensor:
    """The recurrence, token by token, in float64: y (b, t, h, V)."""
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (inputs.q, inputs.k))
    q, k = (x.repeat_interleave(case.heads // case.key_heads, 2) for x in (q * case.key_dim**-0.5, k))
    g = inputs.g.double() if case.kda else inputs.g.double()[..., None]
    S, y = state.double(), []
    for t in range(k.shape[1]):
        S = g[:, t, :, :, None].exp() * S
        u = inputs.beta[:, t, :, None].double() * (inputs.v[:, t].double() - (S * k[:, t, :, :, None]).sum(2))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        y.append((S * q[:, t, :, :, None]).sum(2))
    return torch.stack(y, 1)


def error_of(bench: Bench, case: Case, launch: Callable, schedule: list[Step], slots: int) -> float:
    """Largest relative error of the outputs of a schedule, from NaN in all unwritten slots."""
    tokens = schedule[-1].seen + schedule[-1].count
    torch.manual_seed(1)
    inputs = make_inputs(bench, case, tokens)
    one = make_set(bench, case, slots, fill=math.nan)
    rows = harness.rows_to_check(case.batch, bench.device)
    few = types.SimpleNamespace(**{name: tensor[rows] for name, tensor in vars(inputs).items()})
    expected = reference(case, one.state[rows], few)
    outputs = []
    for step in schedule:
        new = slice(step.seen, step.seen + step.count)
        for name, tensor in vars(inputs).items():
            setattr(one, name, tensor[:, new])
        outputs.append(launch(one, step))
    return harness.relative_error(torch.cat(outputs, 1)[rows], expected, (1, 3))


def tolerance(case: Case) -> float:
    """What rounding explains: of y, and of the checkpoint once in a cycle (of a classic state at every token)."""
    rounding = {"fp32": 0.0, "fp16": 4e-3, "bf16": 3e-2}[case.checkpoint]
    return {"fp32": 1e-4, "fp16": 2e-3, "bf16": 8e-3}[case.activation] + rounding


# ------------------------------------------------------------------------------------------------------------ the rows


def timed(bench: Bench, case: Case, launch: Callable, sets: list, schedule: list[Step]) -> dict[str, float]:
    count = mean_bytes(case, schedule)
    return figure(bench.time(launch, sets, schedule, bench.expected_us(count)), count, bench.bandwidth)


def measure_step(bench: Bench, case: Case, buffer_len: int, fla: Callable | None) -> dict[str, Any]:
    row = {**case.row(), "buffer_len": buffer_len, "errors": {}}
    cycle, two_cycles = plain_schedule(buffer_len, seen=64), plain_schedule(buffer_len, 2)
    ones = plain_schedule(1, 2 * buffer_len)
    positions = bench.positions(case, [*cycle, *two_cycles, *ones, *plain_schedule(1, seen=64)])
    launch = replay(bench, positions)
    row["errors"]["replay"] = error_of(bench, case, launch, two_cycles, buffer_len)
    row["errors"]["buffer_len_1"] = error_of(bench, case, launch, ones, 1)
    if fla is not None:
        row["errors"]["fla"] = error_of(bench, case, classic(fla, True), ones, 1)
    right = {name for name, error in row["errors"].items() if error <= tolerance(case)}

    sets = make_sets(bench, case, buffer_len)
    parts = {"cycle": cycle, "nonflush": cycle[:-1], "flush": cycle[-1:]}
    if "replay" in right:
        row["replay"] = {
            part: timed(bench, case, launch, sets, schedule) for part, schedule in parts.items() if schedule
        }
    if fla is not None and "fla" in right:
        expected = bench.expected_us(classic_bytes(case))
        for name, copies in {"fla": False, "fla_copied": True}.items():
            us = bench.time(classic(fla, copies), sets, cycle[:1], expected)
            row[name] = figure(us, classic_bytes(case), bench.bandwidth)
    del sets
    if "buffer_len_1" in right:
        schedule = plain_schedule(1, seen=64)
        row["buffer_len_1"] = timed(bench, case, launch, make_sets(bench, case, 1), schedule)
    return row


def measure_window(bench: Bench, case: Case, window: int, slots: int) -> dict[str, Any]:
    buffer_len, slots = harness.window_sizes(window, slots)
    row = {**case.row(), "window": window, "slots": slots, "errors": {}}
    cycle, to_check = (make(buffer_len, window, slots, *more) for make, more in
                       ((harness.window_cycle, ()), (harness.window_schedule, (2,))))  # fmt: skip
    launch = replay(bench, bench.positions(case, [*cycle, *to_check]))
    row["errors"]["window"] = error_of(bench, case, launch, to_check, slots)
    if row["errors"]["window"] <= tolerance(case):
        sets = make_sets(bench, case, slots, window)
        parts = {"cycle": cycle, "nonflush": [step for step in cycle if not step.fold]}
        row |= {part: timed(bench, case, launch, sets, schedule) for part, schedule in parts.items()}
    return row


def candidates(window: bool) -> list:
    """Launch configurations worth a try."""
    from replayssm_kernels._configs import Config, Tile

    if window:
        sizes = [(32, 2, 32), (32, 1, 32), (16, 1, 32), (64, 4, 32), (64, 2, 32), (32, 2, 64), (32, 2, 16)]
        tiles = [*(Tile(*size, slots=32) for size in sizes), Tile(64, 2, 32, slots=16), Tile(64, 4, 32, slots=16)]
        return [Config(tile, append_warps=warps) for tile, warps in itertools.product(tiles, (1, 2, 4))]
    again = [Tile(*size, 32) for size in ((16, 1), (32, 1), (32, 2), (64, 4))]
    keep = [Tile(*size, 32, state="keep", registers=registers) for size, registers in
            (((16, 1), 0), ((32, 1), 0), ((32, 2), 0), ((32, 2), 128), ((64, 4), 128))]  # fmt: skip
    evicting = [replace(tile, evict="evict_first") for tile in (again[1], keep[1], keep[3])]
    tiles = [*again, *keep, *evicting, Tile(16, 1, 64, state="stream")]
    found = [Config(tile, append_warps=warps) for tile, warps in itertools.product(tiles, (1, 2, 4))]
    found += [Config(tile, overlap=False) for tile in (again[1], keep[3])]
    found += [Config(evicting[2], ahead=ahead << 20) for ahead in (8, 16, 32)]
    return found


@dataclass(frozen=True)
class Tuned:
    """What configurations are timed for: one token with `window` None, else windows of so many drafts."""

    case: Case
    window: int | None
    buffer_len: int
    slots: int

    @classmethod
    def of(cls, case: Case, window: int | None, buffer_len: int, slots: int) -> Tuned:
        if window:
            return cls(case, window, *harness.window_sizes(window, slots))
        return cls(case, None, buffer_len, buffer_len)

    @property
    def cycle(self) -> list[Step]:
        if self.window:
            return harness.window_cycle(self.buffer_len, self.window, self.slots)
        return plain_schedule(self.buffer_len, seen=64)

    @property
    def to_check(self) -> list[Step]:
        if self.window:
            return harness.window_schedule(self.buffer_len, self.window, self.slots, 1)
        return plain_schedule(self.buffer_len)


def compile_candidate(tuned: Tuned, config) -> None:
    """In a worker: launches what `config` launches once, so that it lies in triton's cache."""
    from replayssm_kernels import gated_delta

    bench, case = harness._worker_bench, Case(**{**vars(tuned.case), "batch": 2})
    step = tuned.cycle[0]
    gated_delta.OVERRIDE = config
    try:
        replay(bench, bench.positions(case, [step]))(make_set(bench, case, tuned.slots, tuned.window or 1), step)
        torch.cuda.synchronize()
    except Exception:  # it will be seen, and reported, where it is measured
        pass


def tune(bench: Bench, tuned: Tuned) -> list[tuple[float, str]]:
    """(microseconds of a cycle, configuration), the fastest first; wrong ones and those that do not compile are not."""
    from replayssm_kernels import gated_delta

    case, cycle, to_check = tuned.case, tuned.cycle, tuned.to_check
    launch = replay(bench, bench.positions(case, [*cycle, *to_check]))
    sets, found = make_sets(bench, case, tuned.slots, tuned.window or 1), []
    for config in candidates(bool(tuned.window)):
        gated_delta.OVERRIDE = config
        try:
            if error_of(bench, case, launch, to_check, tuned.slots) <= tolerance(case):
                us = bench.time(launch, sets, cycle, bench.expected_us(mean_bytes(case, cycle)))
                found.append((us, str(config)))
        except Exception as error:  # more shared memory or registers than there are
            print(f"{config}: {type(error).__name__}", file=sys.stderr)
    gated_delta.OVERRIDE = None
    return sorted(found)


# ------------------------------------------------------------------------------------------------------------- tables


def us(row: dict, *path: str) -> float | None:
    return harness.us_of(row, *path)


def report(result: dict) -> str:
    about = result["about"]
    lines = [
        f"{about['device']}, {about['date']}, torch {about['torch']}, triton {about['triton']}, flash-linear-attention "
        f"{about['fla'] or 'absent'}, commit {about['commit'] or 'unknown'}",
        f"read-only bandwidth {about['bandwidth'] / 1e12:.3f} TB/s; times in us, L2 cold",
        "",
    ]
    rows, plain = [], {}
    for row in result["steps"]:
        cycle = us(row, "replay", "cycle")
        plain[row["geometry"], row["checkpoint"], row["batch"]] = row
        rows.append([
            row["geometry"], row["checkpoint"], str(row["batch"]), cell(us(row, "fla")), cell(us(row, "fla_copied")),
            *(cell(us(row, "replay", part)) for part in ("nonflush", "flush", "cycle")),
            cell(us(row, "buffer_len_1")),
            *(cell(harness.ratio(us(row, name), cycle), 2) for name in ("fla", "fla_copied")),
            cell(harness.value_of(row, "replay", "cycle", "bound_us")),
            cell(harness.value_of(row, "replay", "cycle", "fraction"), 2),
        ])  # fmt: skip
    head = ["geometry", "state", "batch", "fla", "+copy", "plain", "flush", "cycle", "own 1",
            "fla/", "+copy/", "bound", "reached"]  # fmt: skip
    lines.append(table("One step; fla/ and +copy/ are ratios to the cycle average", head, rows))
    rows = []
    for row in result["windows"]:
        step = plain.get((row["geometry"], row["checkpoint"], row["batch"]), {})
        rows.append([
            row["geometry"], row["checkpoint"], str(row["batch"]), str(row["window"]), str(row["slots"]),
            *(cell(us(row, part)) for part in ("nonflush", "cycle")),
            *(cell(harness.ratio(us(row, part), us(step, "replay", part)), 2) for part in ("nonflush", "cycle")),
            cell(harness.value_of(row, "cycle", "fraction"), 2),
        ])  # fmt: skip
    head = ["geometry", "state", "batch", "T", "slots", "nonflush", "cycle", "/plain", "/plain cycle", "reached"]
    lines.append(table("Windows of T drafts, all accepted, against plain steps", head, rows))
    for row in [*result["steps"], *result["windows"]]:
        wrong = {name: error for name, error in row["errors"].items() if not error <= row["tolerance"]}
        if wrong:
            lines.append(
                f"{row['geometry']} {row['checkpoint']} batch {row['batch']}, no speed of what is wrong: {wrong}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", help="wheel of fla-core, or a folder that holds `fla`")
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128, 512])
    parser.add_argument("--checkpoint", nargs="+", default=["fp32"], choices=list(DTYPES))
    parser.add_argument("--buffer-len", type=int, help="default: that of a cache for the geometry")
    parser.add_argument("--window", nargs="*", type=int, default=[5, 8])
    parser.add_argument("--slots", type=int, default=32, help="of the buffer that windows are timed with")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="GPU time per figure")
    parser.add_argument("--tune", action="store_true", help="time launch configurations instead")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile before --tune times")
    parser.add_argument("--commit", help="what to write down as the commit")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()

    kernels = harness.load_ours()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA (or ROCm) device: times are taken on a GPU only")
    functions, version = (None, None), None
    if args.fla:
        *functions, version = load_fla(args.fla)
    torch.manual_seed(0)
    bench = Bench(kernels, None, "cuda", args.budget_ms, torch.cuda.get_device_properties(0).L2_cache_size)
    bench.bandwidth = harness.read_bandwidth(bench)["bytes_per_s"]
    about = {
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
        "triton": harness.triton.__version__, "fla": version, "bandwidth": bench.bandwidth,
        "commit": args.commit or harness.commit_of(Path(__file__).parent),
    }  # fmt: skip
    result = {"about": about, "steps": [], "windows": [], "tuned": []}
    if args.tune and args.workers:
        todo = [
            (Tuned.of(GEOMETRIES[name], window, args.buffer_len or GEOMETRIES[name].buffer_len, args.slots), config)
            for name in args.geometry for window in (None, *args.window) for config in candidates(bool(window))
        ]  # fmt: skip
        harness.in_workers(compile_candidate, todo, args.workers)
    for name, checkpoint, batch in itertools.product(args.geometry, args.checkpoint, args.batch):
        base = GEOMETRIES[name]
        case = Case(**{**vars(base), "batch": batch, "checkpoint": checkpoint})
        print(f"{name} {checkpoint} batch {batch}", file=sys.stderr)
        if args.tune:
            for window in (None, *args.window):
                found = tune(bench, Tuned.of(case, window, args.buffer_len or case.buffer_len, args.slots))
                result["tuned"].append({**case.row(), "window": window, "found": found})
                print(f"{name} {checkpoint} batch {batch} window {window}")
                print("\n".join(f"  {us:8.2f}  {config}" for us, config in found[:8]), flush=True)
        else:
            step = measure_step(bench, case, args.buffer_len or case.buffer_len, functions[int(case.kda)])
            result["steps"].append({**step, "tolerance": tolerance(case)})
            for window in args.window if batch > 1 else ():
                row = measure_window(bench, case, window, args.slots)
                result["windows"].append({**row, "tolerance": tolerance(case)})
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))
    if not args.tune:
        print(report(result))


if __name__ == "__main__":
    main()
