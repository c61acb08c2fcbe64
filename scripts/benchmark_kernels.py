"""
Times the Mamba-2 kernels on a GPU: replay, the classic step of mamba_ssm, draft windows, the convolution, the flush.

    python scripts/benchmark_kernels.py --mamba-ssm mamba_ssm.whl --json results.json       # everything
    python scripts/benchmark_kernels.py --quick                                             # under a minute
    python scripts/benchmark_kernels.py --show results.json                                 # the tables again, no GPU
    python scripts/plot_kernels.py results.json out.svg

How it measures:
- The unit is a whole flush cycle, the write position really advancing: with a buffer of L tokens, L steps that find
  0 .. L-1 tokens held, the last of which folds all L into the checkpoint. Beside the cycle average stand the steps
  between flushes (mean over the phases) and the flush step.
- CUDA graphs of many launches that rotate over sets of tensors, together several times the L2 cache: each launch finds
  its data cold. Random data. The figure is the median over replays, in microseconds per launch.
- Outputs first: two cycles of each side, from the same state and the same inputs, against float64. A side that is wrong
  gets no speed.
- Bytes: what must move, each input read once and each output written once. Bound: bytes / the read-only bandwidth that
  was measured in the same run. Fraction: bound / measured.
- Each side gets raw dt, its bias (softplus) and D, and a state of the checkpoint's dtype.

Sections: `steps` (every geometry), `convs`, and `windows` (the geometries of --full), `layers` (computed).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


# --------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Geometry:
    """Sizes of one Mamba-2 layer, as the decode step sees it."""

    name: str
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_kernel: int = 4

    @property
    def inner(self) -> int:
        """Elements of x and of y per token."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("Nemotron-H-8B", 128, 64, 128, 8),
        Geometry("Nemotron-3-Nano-4B", 96, 80, 128, 8),
        Geometry("Bamba-9B", 128, 64, 128, 1),  # Granite-4 small has the same sizes
        Geometry("mamba2-2.7b", 80, 64, 128, 1),
        Geometry("Zamba2-7B", 112, 64, 64, 2),
        Geometry("Falcon-H1-34B", 32, 128, 256, 2),
    )
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALED = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}  # of a checkpoint: dtype, greatest number
CHECKPOINTS = (*DTYPES, *SCALED)
SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}  # bytes


@dataclass(frozen=True)
class Case:
    """One row of a table: a layer, how many sequences, and the dtypes."""

    geometry: Geometry
    batch: int
    checkpoint: str  # dtype of the checkpoint, and of the classic step's state (of 8 bits: the classic has float32)
    activation: str  # dtype of x, B, C, raw dt and y

    def row(self) -> dict[str, Any]:
        return {
            "geometry": self.geometry.name,
            "batch": self.batch,
            "checkpoint": self.checkpoint,
            "activation": self.activation,
        }

    @property
    def classic(self) -> Case:
        """What the classic step is timed with: mamba_ssm's has no state of 8 bits."""
        return replace(self, checkpoint="fp32") if self.checkpoint in SCALED else self

    def __str__(self) -> str:
        return f"{self.geometry.name} batch {self.batch} {self.checkpoint}"


class Step(NamedTuple):
    """One call, as the rows of `positions` say it; all rows of a batch are in the same phase."""

    seen: int  # tokens seen before the call
    first: int  # slot of the oldest held token
    held: int  # tokens held
    count: int  # new tokens
    fold: int  # tokens that this call folds into the checkpoint


def plain_schedule(buffer_len: int, cycles: int = 1, seen: int = 0) -> list[Step]:
    """Whole flush cycles of single tokens: held 0 .. L-1, the last step folds all L. L = 1 is the classic step."""
    return [
        Step(seen + i, 0, i % buffer_len, 1, buffer_len if (i + 1) % buffer_len == 0 else 0)
        for i in range(cycles * buffer_len)
    ]


def window_schedule(buffer_len: int, window: int, slots: int, folds: int) -> list[Step]:
    """
    Windows of drafts, all accepted, from an empty buffer to the `folds`-th flush: when held + window would exceed
    buffer_len + window, all but the newest `window` held tokens are folded. The buffer is a ring of `slots`.
    """
    steps: list[Step] = []
    seen = first = held = 0
    while sum(step.fold > 0 for step in steps) < folds:
        fold = held - window if held + window > buffer_len + window else 0
        steps.append(Step(seen, first, held, window, fold))
        seen, first, held = seen + window, (first + fold) % slots, held + window - fold
    return steps


def window_cycle(buffer_len: int, window: int, slots: int) -> list[Step]:
    """One steady cycle: the calls after a flush, up to and with the next one."""
    warm_in = len(window_schedule(buffer_len, window, slots, 1))
    return window_schedule(buffer_len, window, slots, 2)[warm_in:]


def window_sizes(window: int, slots: int) -> tuple[int, int]:
    """(buffer_len, slots) of a buffer of at least `slots` slots, and of a buffer_len of at least 16."""
    buffer_len = max(16, slots - 2 * window - 1)
    return buffer_len, buffer_len + 2 * window + 1


# ------------------------------------------------------------------------------------------------------ bytes, bounds


def state_bytes(case: Case) -> int:
    """The checkpoint, in 8 bits with a float32 scale for each row of a head's state."""
    geometry = case.geometry
    scale = 4 if case.checkpoint in SCALED else 0
    return case.batch * geometry.inner * (geometry.state * SIZE[case.checkpoint] + scale)


def slot_bytes(case: Case) -> int:
    """One buffered token: x, B and the final dt (fp32)."""
    geometry, size = case.geometry, SIZE[case.activation]
    return case.batch * (geometry.inner * size + geometry.groups * geometry.state * size + geometry.heads * 4)


def token_bytes(case: Case) -> int:
    """What comes with one new token and goes: x, B, C, raw dt, y."""
    geometry = case.geometry
    return case.batch * (geometry.conv_dim + geometry.heads + geometry.inner) * SIZE[case.activation]


def parameter_bytes(case: Case) -> int:
    """A, D and the bias of dt, fp32."""
    return 3 * 4 * case.geometry.heads


def classic_bytes(case: Case) -> int:
    """The classic step: the state is read and written."""
    return 2 * state_bytes(case.classic) + token_bytes(case) + parameter_bytes(case)


def step_bytes(case: Case, step: Step) -> int:
    """
    A replay step or window: the checkpoint and the held slots are read, the new tokens appended (but for those that
    this call folds: nobody reads them again), and the checkpoint is written where something is folded.
    """
    appended = step.count - max(step.fold - step.held, 0)
    written = (state_bytes(case) if step.fold else 0) + appended * slot_bytes(case)
    read = state_bytes(case) + step.held * slot_bytes(case) + parameter_bytes(case) + case.batch * len(step) * 4
    return read + written + step.count * token_bytes(case)


def conv_bytes(case: Case, tokens: int = 1) -> int:
    """The convolution alone: raw inputs and history read, outputs and the raw inputs written, weights and bias once."""
    channels, kernel, size = case.geometry.conv_dim, case.geometry.conv_kernel, SIZE[case.activation]
    return (case.batch * (3 * tokens + kernel - 1) + kernel + 1) * channels * size


def decode_bytes(case: Case, step: Step) -> int:
    """Convolution and recurrence together: the convolved x, B, C need not touch memory between them."""
    intermediate = 2 * step.count * case.batch * case.geometry.conv_dim * SIZE[case.activation]
    return step_bytes(case, step) + conv_bytes(case, step.count) - intermediate


def fold_bytes(case: Case, tokens: int) -> int:
    """A flush alone: checkpoint read and written, `tokens` slots read."""
    return 2 * state_bytes(case) + tokens * slot_bytes(case) + 4 * case.geometry.heads + case.batch * 20


def mean_bytes(case: Case, schedule: list[Step], count: Callable[[Case, Step], int] = step_bytes) -> float:
    """Bytes per call of a schedule."""
    return statistics.fmean(count(case, step) for step in schedule)


def cycle_average(nonflush: float, flush: float, buffer_len: int) -> float:
    """Mean over a flush cycle of one flush and buffer_len - 1 other steps."""
    return ((buffer_len - 1) * nonflush + flush) / buffer_len


def bound_us(count: float, bandwidth: float) -> float:
    """Microseconds to move `count` bytes at `bandwidth` bytes per second."""
    return count / bandwidth * 1e6


def layers_at_once(layers: int, buffer_len: int, nonflush: float, flush: float, staggered: bool) -> dict[str, float]:
    """
    Worst and mean time of a model's step in its `layers` recurrent layers, from one layer's times: either all layers
    flush at the same step, or layer i is i steps ahead, so that ceil(layers / buffer_len) flush at once at most.
    """
    times = []
    for step in range(buffer_len):
        flushing = sum((step + (layer if staggered else 0)) % buffer_len == buffer_len - 1 for layer in range(layers))
        times.append(flushing * flush + (layers - flushing) * nonflush)
    return {"worst": max(times), "mean": statistics.fmean(times)}


# ------------------------------------------------------------------------------------------- the two sides, the device


_unpacked: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def mamba_ssm_folder(path: str | None) -> Path:
    """The folder `mamba_ssm` itself: in a wheel (unpacked to a temporary folder), a folder, or installed."""
    if path is None:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("mamba_ssm is not installed, and --mamba-ssm names no wheel or folder")
        return Path(next(iter(spec.submodule_search_locations)))
    given = Path(path)
    wheels = [given] if given.suffix == ".whl" else sorted(given.glob("mamba_ssm-*.whl"))
    if wheels:
        _unpacked.append(tempfile.TemporaryDirectory(prefix="mamba_ssm_"))
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(_unpacked[-1].name)
        return Path(_unpacked[-1].name) / "mamba_ssm"
    for folder in (given, given / "mamba_ssm"):
        if (folder / "ops/triton/selective_state_update.py").exists():
            return folder
    raise FileNotFoundError(f"{path} holds neither mamba_ssm nor a wheel of it")


def load_classic(folder: Path) -> tuple[Callable, str]:
    """
    `selective_state_update` of the package in `folder`, and its version. The package needs a CUDA extension
    to import, the kernel does not: empty packages stand in for those above the module, and for einops, which only
    the module's reference uses.
    """
    version = re.search(r'__version__ = "(.+?)"', (folder / "__init__.py").read_text())
    for name, where in (("mamba_ssm", "."), ("mamba_ssm.ops", "ops"), ("mamba_ssm.ops.triton", "ops/triton")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / where)]
        sys.modules[name] = package
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].rearrange = sys.modules["einops"].repeat = None
    if importlib.util.find_spec("packaging") is None:
        sys.modules["packaging"] = types.ModuleType("packaging")
        sys.modules["packaging"].version = types.SimpleNamespace(parse=lambda text: int(text.split(".")[0]))
    module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    return module.selective_state_update, version[1] if version else "unknown"


def load_ours():
    """The module `replayssm_kernels`, or SystemExit that says what is missing."""
    if triton is None:
        raise SystemExit("triton cannot be imported: the kernels need it")
    try:
        kernels = importlib.import_module("replayssm_kernels")
    except ImportError as error:
        raise SystemExit(
            f"replayssm_kernels cannot be imported ({error}): put kernels/torch-ext on PYTHONPATH"
        ) from None
    names = ("mamba2_step", "mamba2_decode", "causal_conv", "mamba2_fold")
    missing = [name for name in names if not callable(getattr(kernels, name, None))]
    if missing:
        raise SystemExit(f"replayssm_kernels has no function {', '.join(missing)}")
    return kernels


if triton is not None:

    @triton.jit
    def _read_kernel(source, sums, BLOCK: tl.constexpr):
        """Reads BLOCK elements and writes one."""
        block = tl.program_id(0).to(tl.int64)
        values = tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
        tl.store(sums + block, tl.sum(values, axis=0))


class Bench:
    """
    The device, the two sides, and how a figure is taken. `time` is replaced by `warm` where things are only compiled,
    and by tests.
    """

    def __init__(self, kernels, classic: Callable | None, device: str, budget_ms: float, l2_bytes: int):
        self.kernels = kernels
        self.classic = classic
        self.device = device
        self.budget_ms = budget_ms  # GPU time per figure
        self.l2_bytes = l2_bytes
        self.bandwidth = math.nan  # bytes per second, read only
        self.compile_only = False
        self.stream: torch.cuda.Stream | None = None

    # ---- memory

    def number_of_sets(self, set_bytes: int) -> int:
        """So many sets that the launches before a set comes round again have touched four times the L2."""
        return 1 if self.compile_only else max(2, math.ceil(4 * self.l2_bytes / set_bytes))

    def require_memory(self, needed: int) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            if needed > 0.9 * free:
                raise MemoryError(f"skipped: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")

    def random(self, *size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        if self.compile_only:
            return torch.zeros(size, dtype=dtype, device=self.device)
        values = torch.randn(size, dtype=dtype, device=self.device)
        return values if scale == 1 else values.mul_(scale)

    def parameters(self, case: Case) -> types.SimpleNamespace:
        """A in [-16, -1] and dt around 0.001 to 0.1, as Mamba-2 initialises them; fp32. conv: the activation dtype."""
        geometry, dtype = case.geometry, DTYPES[case.activation]
        uniform = torch.rand(3, geometry.heads, device=self.device)
        dt = torch.exp(uniform[1] * math.log(100.0) + math.log(1e-3))
        return types.SimpleNamespace(
            A=-(1 + 15 * uniform[0]),
            dt_bias=dt + torch.log(-torch.expm1(-dt)),  # softplus(dt_bias) = dt
            D=0.5 + uniform[2],
            conv_weight=self.random(geometry.conv_dim, geometry.conv_kernel, dtype=dtype, scale=0.5),
            conv_bias=self.random(geometry.conv_dim, dtype=dtype, scale=0.1),
        )

    def inputs(self, case: Case, tokens: int) -> types.SimpleNamespace:
        """xBC (b, t, conv_dim) and raw dt (b, t, h)."""
        dtype = DTYPES[case.activation]
        return types.SimpleNamespace(
            xBC=self.random(case.batch, tokens, case.geometry.conv_dim, dtype=dtype),
            dt=self.random(case.batch, tokens, case.geometry.heads, dtype=dtype),
        )

    def state(self, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A checkpoint, and its scales (b, h, p, 1)."""
        geometry = case.geometry
        size = (case.batch, geometry.heads, geometry.head_dim, geometry.state)
        if case.checkpoint not in SCALED:
            return self.random(*size, dtype=DTYPES[case.checkpoint]), None
        dtype, greatest = SCALED[case.checkpoint]
        values = self.random(*size, dtype=torch.float32)
        scale = values.abs().amax(-1, keepdim=True).clamp_(min=1e-3) / greatest
        values = values.div_(scale)
        return (values.round_() if dtype == torch.int8 else values).to(dtype), scale

    def buffers(self, case: Case, slots: int, fill: float | None = None) -> types.SimpleNamespace:
        """x, B and dt of `slots` tokens: random, or `fill` (NaN: the slots that nobody wrote yet)."""
        geometry, dtype, batch = case.geometry, DTYPES[case.activation], case.batch
        buffers = types.SimpleNamespace(
            x=self.random(batch, geometry.heads, slots, geometry.head_dim, dtype=dtype),
            B=self.random(batch, geometry.groups, slots, geometry.state, dtype=dtype),
            dt=self.random(batch, geometry.heads, slots, dtype=torch.float32).abs_().mul_(0.03),
        )
        if fill is not None:
            for tensor in vars(buffers).values():
                tensor.fill_(fill)
        return buffers

    def ring(self, case: Case, window: int = 1, fill: float | None = None) -> torch.Tensor:
        """Raw inputs of the convolution: its history and one window."""
        size = (case.batch, case.geometry.conv_kernel - 1 + window, case.geometry.conv_dim)
        ring = self.random(*size, dtype=DTYPES[case.activation])
        return ring if fill is None else ring.fill_(fill)

    def make_set(self, case: Case, slots: int, window: int = 1) -> types.SimpleNamespace:
        """Everything that one launch touches, with its own checkpoint, buffers and inputs."""
        inputs = self.inputs(case, window)
        state, scale = self.state(case)
        return types.SimpleNamespace(
            state=state,
            scale=scale,
            buffers=self.buffers(case, slots),
            ring=self.ring(case, window),
            xBC=inputs.xBC,
            dt=inputs.dt,
        )

    def make_sets(self, case: Case, slots: int, window: int = 1) -> list[types.SimpleNamespace]:
        number = self.number_of_sets(state_bytes(case))
        rest = (slots + window) * slot_bytes(case) + (window + 2) * conv_bytes(case, window)
        in_between = 8 * case.batch * case.geometry.inner * case.geometry.state if case.checkpoint in SCALED else 0
        self.require_memory(number * (state_bytes(case) + rest) + in_between)
        return [self.make_set(case, slots, window) for _ in range(number)]

    def positions(self, case: Case, schedule: list[Step]) -> dict[Step, torch.Tensor]:
        """One (5, batch) int32 tensor per step, on the device before anything is timed; each aligned by itself."""
        return {
            step: torch.tensor(step, dtype=torch.int32, device=self.device)[:, None].repeat(1, case.batch)
            for step in schedule
        }

    # ---- time

    def time(self, launch: Callable, sets: list, schedule: list[Step], expected_us: float) -> float:
        """
        Microseconds per `launch(set, step)`: median over replays of a CUDA graph of whole schedules over all sets,
        as many as take two milliseconds. The sets are the inner loop.
        """
        self.stream = self.stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.warm(launch, sets, schedule)
            per_round = len(sets) * len(schedule)
            rounds = max(1, math.ceil(2000 / (per_round * max(expected_us, 2.5))))
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(rounds):
                    for step in schedule:
                        for one in sets:
                            launch(one, step)
            except Exception:
                with contextlib.suppress(Exception):  # the first error is the one to see
                    graph.capture_end()
                raise
            graph.capture_end()
            replays: list[float] = []
            graph.replay()
            while len(replays) < 5 or (sum(replays) < self.budget_ms and len(replays) < 100):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                replays.append(start.elapsed_time(end))
        graph.reset()
        return statistics.median(replays) * 1e3 / (rounds * per_round)

    def warm(self, launch: Callable, sets: list, schedule: list[Step], expected_us: float = 0.0) -> float:
        """Launches each step once: everything is compiled then."""
        for step in schedule:
            launch(sets[0], step)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return math.nan

    def expected_us(self, count: float) -> float:
        return bound_us(count, 4e12)

    # ---- launches

    def step(self, case: Case, parameters, positions, *, fused: bool | None = None) -> Callable:
        """launch(set, step): our recurrence alone, from convolved x, B and C."""
        p, geometry = parameters, case.geometry

        def launch(one, step):
            x, B, C = split(geometry, one.xBC)
            buffers = one.buffers
            return self.kernels.mamba2_step(
                positions[step], x, B, C, one.dt, buffers.x, buffers.B, buffers.dt, p.A, p.D, one.state,
                dt_bias=p.dt_bias, fused=fused, **storage(one),
            )  # fmt: skip

        return launch

    def decode(self, case: Case, parameters, positions, *, fused: bool | None = None) -> Callable:
        """launch(set, step): convolution and recurrence, from raw x, B and C."""
        p = parameters

        def launch(one, step):
            buffers = one.buffers
            return self.kernels.mamba2_decode(
                positions[step], one.xBC, one.dt, one.ring, p.conv_weight, p.conv_bias,
                buffers.x, buffers.B, buffers.dt, p.A, p.D, one.state,
                activation="silu", dt_bias=p.dt_bias, fused=fused, **storage(one),
            )  # fmt: skip

        return launch

    def conv(self, case: Case, parameters, positions) -> Callable:
        p = parameters

        def launch(one, step):
            return self.kernels.causal_conv(positions[step], one.xBC, one.ring, p.conv_weight, p.conv_bias, "silu")

        return launch

    def fold(self, case: Case, parameters, positions) -> Callable:
        def launch(one, step):
            buffers = one.buffers
            return self.kernels.mamba2_fold(
                positions[step],
                buffers.x,
                buffers.B,
                buffers.dt,
                parameters.A,
                one.state,
                inplace=True,
                **storage(one),
            )

        return launch

    def classic_step(self, case: Case, parameters) -> Callable:
        """launch(set, step): mamba_ssm's step, called as its users call it (dt, A, D of stride 0 inside a head)."""
        p, geometry = parameters, case.geometry
        head = (geometry.heads, geometry.head_dim)
        A = p.A[:, None, None].expand(*head, geometry.state)
        D, dt_bias = p.D[:, None].expand(head), p.dt_bias[:, None].expand(head)

        def launch(one, step):
            x, B, C = (part[:, 0] for part in split(geometry, one.xBC))
            dt = one.dt[:, 0, :, None].expand(-1, *head)
            return self.classic(one.state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)[:, None]

        return launch


def split(geometry: Geometry, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views x (b, t, h, p), B and C (b, t, g, n) of (b, t, conv_dim)."""
    shared = geometry.groups * geometry.state
    x, B, C = xBC.split([geometry.inner, shared, shared], dim=-1)
    shape = (geometry.groups, geometry.state)
    return x.unflatten(-1, (geometry.heads, geometry.head_dim)), B.unflatten(-1, shape), C.unflatten(-1, shape)


def read_bandwidth(bench: Bench) -> dict[str, Any]:
    """Bytes per second of the fastest of a few ways to read 4 GiB and write next to nothing."""
    elements = 1 << 30
    source = torch.randn(elements, device=bench.device)
    sums = torch.empty(elements // 1024, device=bench.device)
    ways = {"torch.sum": lambda *_: source.sum(), "torch.amax": lambda *_: source.amax()}
    for block, warps in ((2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (16384, 8)):

        def read(*_, block=block, warps=warps):
            _read_kernel[(elements // block,)](source, sums, BLOCK=block, num_warps=warps)

        ways[f"triton, blocks of {block}, {warps} warps"] = read
    found = {}
    for name, read in ways.items():
        us = bench.time(read, [None], [Step(0, 0, 0, 0, 0)], 1000.0)
        found[name] = elements * 4 / us * 1e6
    best = max(found, key=found.get)
    return {"bytes_per_s": found[best], "how": best, "all": found}


# ------------------------------------------------------------------------------------------------------- right, first


def tolerance(case: Case) -> float:
    """
    Relative error that rounding explains: of the inputs buffered and of y in the activation dtype, and of the state in
    the checkpoint's dtype (by the classic step at every token).
    """
    checkpoint = {"fp32": 0.0, "fp16": 4e-3, "bf16": 3e-2, "int8": 1e-1, "fp8": 3e-1}[case.checkpoint]
    return {"fp32": 1e-4, "fp16": 2e-3, "bf16": 8e-3}[case.activation] + checkpoint


def relative_error(values: torch.Tensor, expected: torch.Tensor, dims: tuple[int, ...]) -> float:
    """Largest ratio of root mean squares over `dims`: of the error and of what is expected. NaN counts as infinite."""
    error = (values.double() - expected).square().mean(dims).sqrt()
    scale = expected.square().mean(dims).sqrt()
    worst = float((error / torch.maximum(scale, 0.1 * scale.mean())).max())
    return worst if math.isfinite(worst) else math.inf


def storage(one: types.SimpleNamespace) -> dict[str, torch.Tensor]:
    """What kernels are told of how a set's checkpoint is stored."""
    return {} if one.scale is None else {"scale": one.scale}


def stored(state: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """What some rows of a checkpoint hold, float64."""
    bytes_ = state.view(torch.int8) if state.element_size() == 1 else state  # (torch does not index float8)
    values = bytes_[rows].view(state.dtype).float().double()
    return values if scale is None else values * scale[rows].double()


def rows_to_check(batch: int, device: str) -> torch.Tensor:
    """At most 64 rows of a batch, the first and the last among them."""
    return torch.linspace(0, batch - 1, min(batch, 64), dtype=torch.float64, device=device).round().long()


def reference_conv(case: Case, p, xBC: torch.Tensor) -> torch.Tensor:
    """Causal convolution and silu in float64, from an empty history; xBC (b, t, c)."""
    kernel, tokens = case.geometry.conv_kernel, xBC.shape[1]
    padded = torch.nn.functional.pad(xBC.double(), (0, 0, kernel - 1, 0))
    taps = [padded[:, k : k + tokens] * p.conv_weight[:, k].double() for k in range(kernel)]
    return torch.nn.functional.silu(sum(taps) + p.conv_bias.double())


def reference(case: Case, p, state: torch.Tensor, xBC: torch.Tensor, dt: torch.Tensor, folded: int):
    """
    The recurrence, token by token, in float64: y (b, t, h, p), and the state after `folded` tokens.
    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t.
    """
    x, B, C = (part.double() for part in split(case.geometry, xBC))
    dt = torch.nn.functional.softplus(dt.double() + p.dt_bias.double())
    A, D = p.A.double(), p.D.double()
    heads_per_group = case.geometry.heads // case.geometry.groups
    S = state.double()
    after = S if folded == 0 else None
    y = []
    for t in range(x.shape[1]):
        B_t, C_t = (part[:, t].repeat_interleave(heads_per_group, dim=1)[:, :, None, :] for part in (B, C))
        S = torch.exp(A * dt[:, t])[..., None, None] * S + (dt[:, t, :, None] * x[:, t])[..., None] * B_t
        y.append((S * C_t).sum(-1) + D[:, None] * x[:, t])
        if t + 1 == folded:
            after = S
    return torch.stack(y, dim=1), after


class Check:
    """Runs launches over a schedule from one state and one sequence of tokens, and compares with float64."""

    def __init__(self, bench: Bench, case: Case, parameters, schedule: list[Step], *, convolved=False, folded=None):
        """`folded`: how many tokens end up in the checkpoint, where the schedule does not say it."""
        self.bench, self.case, self.schedule = bench, case, schedule
        self.inputs = bench.inputs(case, schedule[-1].seen + schedule[-1].count)
        self.state, self.scale = bench.state(case)
        self.rows = rows_to_check(case.batch, bench.device)
        if not bench.compile_only:
            xBC, dt = self.inputs.xBC[self.rows], self.inputs.dt[self.rows]
            self.xBC = reference_conv(case, parameters, xBC) if convolved else xBC.double()
            folded = sum(step.fold for step in schedule) if folded is None else folded
            state = stored(self.state, self.scale, self.rows)
            self.y, self.after = reference(case, parameters, state, self.xBC, dt, folded)

    def run(self, launch: Callable, slots: int, window: int = 1) -> tuple[torch.Tensor, types.SimpleNamespace]:
        """Outputs (b, tokens, ...) and the set as the launches left it. Unwritten slots and history are NaN."""
        one = types.SimpleNamespace(
            state=self.state.clone(),
            scale=None if self.scale is None else self.scale.clone(),
            buffers=self.bench.buffers(self.case, slots, math.nan),
            ring=self.bench.ring(self.case, window, math.nan),
        )
        outputs = []
        for step in [self.schedule[0], self.schedule[-1]] if self.bench.compile_only else self.schedule:
            tokens = slice(step.seen, step.seen + step.count)
            one.xBC, one.dt = (part[:, tokens].contiguous() for part in (self.inputs.xBC, self.inputs.dt))
            outputs.append(launch(one, step))
        return torch.cat(outputs, dim=1), one

    def error(self, launch: Callable, slots: int, window: int = 1, *, classic: bool = False) -> float:
        """Largest relative error of the outputs and of the state that was written."""
        y, one = self.run(launch, slots, window)
        if self.bench.compile_only:
            return 0.0
        error = relative_error(y[self.rows], self.y, (1, 3))
        if not classic:
            error = max(error, relative_error(stored(one.state, one.scale, self.rows), self.after, (2, 3)))
        return error


# ------------------------------------------------------------------------------------------------------------ the rows


def figures(bench: Bench, case: Case, launch: Callable, sets: list, cycle: list[Step]) -> dict[str, Any]:
    """Times, bytes, bound and fraction of a schedule: the whole cycle, its steps between flushes, its flush steps."""
    result: dict[str, Any] = {}
    parts = {
        "cycle": cycle,
        "nonflush": [step for step in cycle if not step.fold],
        "flush": [step for step in cycle if step.fold],
    }
    for name, schedule in parts.items():
        if schedule:
            count = mean_bytes(case, schedule)
            us = bench.time(launch, sets, schedule, bench.expected_us(count))
            result[name] = figure(us, count, bench.bandwidth)
        else:
            result[name] = None
    return result


def figure(us: float, count: float, bandwidth: float) -> dict[str, float]:
    bound = bound_us(count, bandwidth)
    return {"us": us, "bytes": count, "bound_us": bound, "fraction": bound / us}


def measure_step(bench: Bench, case: Case, *, buffer_len: int, full: bool) -> dict[str, Any]:
    """One row of `steps`: classic, ours with buffer_len and with 1; where `full`: fused and apart, the flush alone."""
    row = {**case.row(), "buffer_len": buffer_len, "tolerance": tolerance(case)}
    p = bench.parameters(case)
    two_cycles = plain_schedule(buffer_len, 2)
    ones = plain_schedule(1, 2 * buffer_len)
    positions = bench.positions(case, [*two_cycles, *ones])

    check = Check(bench, case, p, two_cycles)
    launches = {"replay": bench.step(case, p, positions)}
    errors = {"replay": check.error(launches["replay"], buffer_len)}
    if bench.classic is not None:
        launches["classic"] = bench.classic_step(case, p)
        classic = check if case.classic == case else Check(bench, case.classic, p, two_cycles)
        errors["classic"] = classic.error(launches["classic"], 1, classic=True)
        del classic
    check.schedule = ones
    launches["buffer_len_1"] = bench.step(case, p, positions)
    errors["buffer_len_1"] = check.error(launches["buffer_len_1"], 1)
    variants = {"fused": True, "apart": False} if full else {}
    check.schedule = two_cycles
    for name, fused in variants.items():
        launches[name] = bench.step(case, p, positions, fused=fused)
        errors[name] = check.error(launches[name], buffer_len)
    if full:
        launches["fold"] = bench.fold(case, p, bench.positions(case, [fold_step(buffer_len)]))
        errors["fold"] = check_fold(bench, case, p, launches["fold"], buffer_len)
    del check
    row["errors"] = errors
    row["wrong"] = [name for name, error in errors.items() if error > tolerance(case)]
    right = [name for name in errors if name not in row["wrong"]]

    cycle = plain_schedule(buffer_len, seen=64)
    positions.update(bench.positions(case, [*cycle, *plain_schedule(1, seen=64)]))
    sets = bench.make_sets(case, buffer_len)
    if "replay" in right:
        row["replay"] = figures(bench, case, launches["replay"], sets, cycle)
    if "classic" in right:
        count = classic_bytes(case)
        classic_sets = sets if case.classic == case else bench.make_sets(case.classic, 1)
        us = bench.time(launches["classic"], classic_sets, cycle[:1], bench.expected_us(count))
        row["classic"] = figure(us, count, bench.bandwidth)
        del classic_sets
    row["variants"] = {}
    for name in variants:
        if name in right:
            count = mean_bytes(case, cycle)
            us = bench.time(launches[name], sets, cycle, bench.expected_us(count))
            row["variants"][name] = figure(us, count, bench.bandwidth)
    if "fold" in right:
        count = fold_bytes(case, buffer_len)
        us = bench.time(launches["fold"], sets, [fold_step(buffer_len)], bench.expected_us(count))
        row["fold"] = figure(us, count, bench.bandwidth)
    if "buffer_len_1" in right:
        for one in sets:
            one.buffers = bench.buffers(case, 1)
        (step,) = plain_schedule(1, seen=64)
        count = step_bytes(case, step)
        us = bench.time(launches["buffer_len_1"], sets, [step], bench.expected_us(count))
        row["buffer_len_1"] = figure(us, count, bench.bandwidth)
    return row


def fold_step(buffer_len: int) -> Step:
    return Step(64, 0, buffer_len, 0, buffer_len)


def check_fold(bench: Bench, case: Case, p, fold: Callable, buffer_len: int) -> float:
    """buffer_len tokens are held, then folded by the flush alone: the error of the state."""
    schedule = [step._replace(fold=0) for step in plain_schedule(buffer_len)]
    check = Check(bench, case, p, schedule, folded=buffer_len)
    _, one = check.run(bench.step(case, p, bench.positions(case, schedule)), buffer_len)
    fold(one, fold_step(buffer_len))
    return 0.0 if bench.compile_only else relative_error(stored(one.state, one.scale, check.rows), check.after, (2, 3))


def measure_conv(bench: Bench, case: Case, *, buffer_len: int) -> dict[str, Any]:
    """One row of `convs`: convolution and recurrence by one function (fused, apart, by its table), and it alone."""
    row = {**case.row(), "buffer_len": buffer_len, "tolerance": tolerance(case), "errors": {}, "wrong": []}
    p = bench.parameters(case)
    cycle, two_cycles = plain_schedule(buffer_len, seen=64), plain_schedule(buffer_len, 2)
    positions = bench.positions(case, [*cycle, *two_cycles])
    check = Check(bench, case, p, two_cycles, convolved=True)
    row["decode"] = {}
    launches = {}
    for name, fused in {"default": None, "fused": True, "apart": False}.items():
        launch = bench.decode(case, p, positions, fused=fused)
        row["errors"][name] = check.error(launch, buffer_len)
        launches[name] = launch
    conv = bench.conv(case, p, positions)
    if not bench.compile_only:
        outputs, _ = check.run(conv, buffer_len)
        row["errors"]["conv"] = relative_error(outputs[check.rows], check.xBC, (1, 2))
    del check
    row["wrong"] = [name for name, error in row["errors"].items() if error > tolerance(case)]

    sets = bench.make_sets(case, buffer_len)
    for name, launch in launches.items():
        if name not in row["wrong"]:
            count = mean_bytes(case, cycle, decode_bytes)
            us = bench.time(launch, sets, cycle, bench.expected_us(count))
            row["decode"][name] = figure(us, count, bench.bandwidth)
    del sets
    if "conv" not in row["wrong"]:
        count = conv_bytes(case)
        number = bench.number_of_sets(count)
        sets = [
            types.SimpleNamespace(xBC=bench.inputs(case, 1).xBC, ring=bench.ring(case))
            for _ in range(min(number, 1024))
        ]
        us = bench.time(conv, sets, cycle[:1], bench.expected_us(count))
        row["conv"] = figure(us, count, bench.bandwidth)
    return row


def measure_window(bench: Bench, case: Case, *, window: int, slots: int) -> dict[str, Any]:
    """One row of `windows`: T drafted tokens at a time, all accepted, in the steady cycle of a recording cache."""
    buffer_len, slots = window_sizes(window, slots)
    row = {**case.row(), "window": window, "slots": slots, "buffer_len": buffer_len, "tolerance": tolerance(case)}
    p = bench.parameters(case)
    cycle = window_cycle(buffer_len, window, slots)
    to_check = window_schedule(buffer_len, window, slots, 2)
    positions = bench.positions(case, [*cycle, *to_check])
    launch = bench.step(case, p, positions)
    row["errors"] = {"window": Check(bench, case, p, to_check).error(launch, slots, window)}
    row["wrong"] = [name for name, error in row["errors"].items() if error > tolerance(case)]
    row["calls"], row["tokens_folded"] = len(cycle), sum(step.fold for step in cycle)
    if not row["wrong"]:
        row.update(figures(bench, case, launch, bench.make_sets(case, slots, window), cycle))
    return row


# --------------------------------------------------------------------------------------------------- targets, tables

RATIO_TARGETS = {
    "fp32": {1: 0.95, 8: 1.85, 32: 2.0, 128: 2.1, 512: 2.15},
    "bf16": {1: 0.95, 8: 2.4, 32: 3.2, 128: 3.5, 512: 3.6},
    # Against the classic step in float32.
    "int8": {128: 5.0, 512: 5.0},
    "fp8": {128: 5.0, 512: 5.0},
}
TARGET_GEOMETRY = "Nemotron-H-8B"  # the ratios above; its numbers hold for buffer_len 16
OWN_TARGETS = {"fp32": 1.65, "bf16": 1.6}  # against our own buffer_len=1 step, batch 128 and over
FRACTION_TARGETS = {"fp32": 0.92, "bf16": 0.88}  # batch 128 and over, every geometry
WINDOW_TARGETS = {5: (1.15, 1.3), 8: (1.25, 1.5)}  # between flushes, over the cycle; batch 32 and over
CONV_TARGET = 0.05  # of the recurrence, batch 128
FLUSH_CLASSIC_TARGET = 1.08  # fp32
FLUSH_PLAIN_TARGET = 2.5


def us_of(row: dict, *path: str) -> float | None:
    """row["replay"]["cycle"]["us"] for ("replay", "cycle"), or None where there is no such figure."""
    return value_of(row, *path, "us")


def value_of(row: dict, *path: str) -> float | None:
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def plain_row(result: dict, row: dict) -> dict:
    """The row of `steps` of the same case."""
    same = ("geometry", "batch", "checkpoint", "activation")
    return next((step for step in result["steps"] if all(step[name] == row[name] for name in same)), {})


def step_ratios(row: dict) -> dict[str, float | None]:
    """Everything that is derived from one row of `steps`, with names as in the tables."""
    cycle, classic = us_of(row, "replay", "cycle"), us_of(row, "classic")
    nonflush, flush = us_of(row, "replay", "nonflush"), us_of(row, "replay", "flush")
    return {
        "ratio": ratio(classic, cycle),
        "possible": ratio(classic, value_of(row, "replay", "cycle", "bound_us")),
        "own": ratio(us_of(row, "buffer_len_1"), cycle),
        "fraction": value_of(row, "replay", "cycle", "fraction"),
        "flush_classic": ratio(flush, classic),
        "flush_plain": ratio(flush, nonflush),
        "fold_classic": ratio(us_of(row, "fold"), classic),
    }


def step_targets(row: dict) -> dict[str, tuple[float, bool]]:
    """Targets of a row of `steps`: name -> (target, at least?)."""
    checkpoint, batch = row["checkpoint"], row["batch"]
    targets: dict[str, tuple[float, bool]] = {}
    if row["activation"] != "bf16" or row.get("buffer_len") != 16:
        return targets
    if row["geometry"] == TARGET_GEOMETRY:
        if batch in RATIO_TARGETS.get(checkpoint, {}):
            targets["ratio"] = (RATIO_TARGETS[checkpoint][batch], True)
        if batch >= 128 and checkpoint in OWN_TARGETS:
            targets["own"] = (OWN_TARGETS[checkpoint], True)
        if checkpoint == "fp32":
            targets["flush_classic"] = (FLUSH_CLASSIC_TARGET, False)
        targets["flush_plain"] = (FLUSH_PLAIN_TARGET, False)
    if batch >= 128 and checkpoint in FRACTION_TARGETS:
        targets["fraction"] = (FRACTION_TARGETS[checkpoint], True)
    return targets


def window_ratios(result: dict, row: dict) -> dict[str, float | None]:
    plain = plain_row(result, row)
    return {
        "nonflush": ratio(us_of(row, "nonflush"), us_of(plain, "replay", "nonflush")),
        "cycle": ratio(us_of(row, "cycle"), us_of(plain, "replay", "cycle")),
    }


def window_targets(row: dict) -> dict[str, tuple[float, bool]]:
    if row["batch"] < 32 or row["window"] not in WINDOW_TARGETS:
        return {}
    nonflush, cycle = WINDOW_TARGETS[row["window"]]
    return {"nonflush": (nonflush, False), "cycle": (cycle, False)}


def conv_share(result: dict, row: dict) -> float | None:
    """The convolution alone, of the recurrence alone (cycle average)."""
    return ratio(us_of(row, "conv"), us_of(plain_row(result, row), "replay", "cycle"))


def met(value: float, target: float, at_least: bool) -> bool:
    return value >= target if at_least else value <= target


def verdict(value: float | None, target: tuple[float, bool] | None, digits: int = 2) -> str:
    """'2.19 >=2.15 met', or the value alone where there is no target."""
    if target is None:
        return cell(value, digits)
    sign, word = (">=" if target[1] else "<="), "-"
    if value is not None:
        word = "met" if met(value, *target) else "missed"
    return f"{cell(value, digits)} {sign}{target[0]:.{digits}f} {word}"


def cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def all_targets(result: dict) -> list[dict[str, Any]]:
    """Every target that the result has a row for: what, where, value, target, met (None: not measured)."""
    found = []

    def add(what: str, row: dict, value: float | None, target: tuple[float, bool]) -> None:
        where = f"{row['geometry']} batch {row['batch']} {row['checkpoint']}"
        reached = None if value is None else met(value, *target)
        found.append({"what": what, "where": where, "value": value, "target": target[0], "met": reached})

    for row in result["steps"]:
        ratios = step_ratios(row)
        for name, target in step_targets(row).items():
            add(name, row, ratios[name], target)
    for row in result["convs"]:
        if row["batch"] == 128:
            add("conv share", row, conv_share(result, row), (CONV_TARGET, False))
    best: dict[tuple, tuple[dict, dict]] = {}  # "a capacity of 32 or more": the best of those that were measured
    for row in result["windows"]:
        key = (row["geometry"], row["batch"], row["checkpoint"], row["window"])
        ratios = window_ratios(result, row)
        if key not in best or (ratios["cycle"] or math.inf) < (best[key][1]["cycle"] or math.inf):
            best[key] = (row, ratios)
    for row, ratios in best.values():
        for name, target in window_targets(row).items():
            add(f"window {row['window']} of {row['slots']} slots, {name}", row, ratios[name], target)
    return found


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    if not rows:
        return ""
    cells = [head, *rows]
    widths = [max(len(line[i]) for line in cells if i < len(line)) for i in range(len(head))]
    lines = []
    for line in cells:
        padded = [
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([title, *lines, ""])


def trouble(row: dict) -> str | None:
    """Why a row has no figures: an error, or a wrong output."""
    if row.get("error"):
        return row["error"]
    if row.get("wrong"):
        off = ", ".join(f"{name} is off by {row['errors'][name] or math.inf:.1e}" for name in row["wrong"])
        return f"{off} (allowed {row['tolerance']:.1e}): no speed of it"
    return None


def memory_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """
    The section `memory`: bytes that a sequence takes in `--layers` recurrent layers (state with its scales, buffer,
    ring of the convolution), and how many sequences fit into `--memory` GB beside nothing else. First the classic
    state in float32.
    """
    rows = []
    for name in args.geometry:
        for checkpoint in ("classic", *args.checkpoint):
            dtype = "fp32" if checkpoint == "classic" else checkpoint
            case = Case(GEOMETRIES[name], 1, dtype, args.activation)
            slots = 0 if checkpoint == "classic" else args.buffer_len
            ring = case.geometry.conv_kernel * case.geometry.conv_dim * SIZE[args.activation]
            row = {
                "geometry": name,
                "checkpoint": checkpoint,
                "state_bytes": args.layers * state_bytes(case),
                "buffer_bytes": args.layers * slots * slot_bytes(case),
                "ring_bytes": args.layers * ring,
                "layers": args.layers,
                "memory_gb": args.memory,
            }
            row["bytes"] = row["state_bytes"] + row["buffer_bytes"] + row["ring_bytes"]
            row["sequences"] = int(args.memory * 1e9 // row["bytes"])
            rows.append(row)
    return rows


def layer_rows(steps: list[dict], layers: int) -> list[dict[str, Any]]:
    """The section `layers`: worst and mean step of a model whose layers flush together, or spread over the cycle."""
    rows = []
    for row in steps:
        nonflush, flush = us_of(row, "replay", "nonflush"), us_of(row, "replay", "flush")
        if nonflush is not None and flush is not None and row["geometry"] == TARGET_GEOMETRY:
            times = {
                name: layers_at_once(layers, row["buffer_len"], nonflush, flush, staggered)
                for name, staggered in (("together", False), ("staggered", True))
            }
            names = ("geometry", "batch", "checkpoint", "activation")
            rows.append({**{name: row[name] for name in names}, "layers": layers, **times})
    return rows


def report(result: dict) -> str:
    """All tables of a result, as text."""
    about = result["about"]
    mamba_ssm = about.get("mamba_ssm")
    lines = [
        f"{about['device']}, {about['date']}, torch {about['torch']}, triton {about['triton']}, "
        f"mamba_ssm {mamba_ssm or 'absent: no ratio to the classic step'}, commit {about.get('commit') or 'unknown'}",
        f"read-only bandwidth {about['bandwidth']['bytes_per_s'] / 1e12:.3f} TB/s ({about['bandwidth']['how']}); "
        f"{about['activation']} activations, times in us, L2 cold; {about.get('seconds', 0):.0f} s in all",
        *([about["note"]] if "note" in about else []),
        "",
    ]

    def name(row: dict) -> list[str]:
        return [row["geometry"], row["checkpoint"], str(row["batch"])]

    rows, flushes, variants = [], [], []
    for row in result["steps"]:
        ratios, targets = step_ratios(row), step_targets(row)
        if "replay" in row or "classic" in row:
            rows.append(
                [
                    *name(row),
                    cell(us_of(row, "classic")),
                    *(cell(us_of(row, "replay", part)) for part in ("nonflush", "flush", "cycle")),
                    verdict(ratios["ratio"], targets.get("ratio")),
                    cell(ratios["possible"], 2),
                    verdict(ratios["own"], targets.get("own")),
                    cell(value_of(row, "replay", "cycle", "bound_us")),
                    verdict(ratios["fraction"], targets.get("fraction")),
                    *(cell(value_of(row, *part, "fraction"), 2) for part in (("replay", "nonflush"), ("classic",))),
                ]
            )
        if "fold" in row or row.get("variants"):
            flushes.append(
                [
                    *name(row),
                    verdict(ratios["flush_classic"], targets.get("flush_classic")),
                    verdict(ratios["flush_plain"], targets.get("flush_plain")),
                    cell(value_of(row, "replay", "flush", "fraction"), 2),
                    cell(us_of(row, "fold")),
                    cell(ratios["fold_classic"], 2),
                    cell(value_of(row, "fold", "fraction"), 2),
                ]
            )
            times = [us_of(row, "replay", "cycle"), *(us_of(row, "variants", part) for part in ("fused", "apart"))]
            variants.append([*name(row), *map(cell, times)])
    case = ["geometry", "state", "batch"]
    lines.append(
        table(
            "One step. ratio: classic / cycle average; possible: classic / bound; own: our buffer_len=1 step / cycle; "
            "reached: bound / cycle, (plain step), (classic)",
            [*case, *"classic plain flush cycle ratio possible own bound reached (plain) (classic)".split()],
            rows,
        )
    )
    lines.append(
        table(
            "Flush step against the classic and a plain step; the flush alone",
            [*case, "flush / classic", "flush / plain", "reached", "alone", "alone / classic", "reached"],
            flushes,
        )
    )
    lines.append(
        table("Recurrence, cycle average, in one launch or two", [*case, "default", "fused", "apart"], variants)
    )
    rows = []
    for row in result["convs"]:
        share = conv_share(result, row)
        rows.append(
            [
                *name(row),
                *(cell(us_of(row, "decode", part)) for part in ("default", "fused", "apart")),
                cell(value_of(row, "decode", "default", "fraction"), 2),
                cell(us_of(row, "conv")),
                verdict(share, (CONV_TARGET, False) if row["batch"] == 128 else None, 3),
            ]
        )
    lines.append(
        table(
            "With the convolution (cycle average), and the convolution alone as a share of the recurrence alone",
            [*case, "default", "fused", "apart", "reached", "conv", "share"],
            rows,
        )
    )
    rows = []
    for row in result["windows"]:
        if row.get("cycle"):
            ratios, targets = window_ratios(result, row), window_targets(row)
            rows.append(
                [
                    *name(row),
                    *(str(row[part]) for part in ("window", "slots", "calls")),
                    *(cell(us_of(row, part)) for part in ("nonflush", "flush", "cycle")),
                    verdict(ratios["nonflush"], targets.get("nonflush")),
                    verdict(ratios["cycle"], targets.get("cycle")),
                    cell(value_of(row, "cycle", "fraction"), 2),
                ]
            )
    lines.append(
        table(
            "Windows of T drafts, all accepted; against a plain step (between flushes) and its cycle average",
            [*case, "T", "slots", "calls", "nonflush", "flush", "cycle", "/plain", "/plain cycle", "reached"],
            rows,
        )
    )
    rows = []
    for row in result["layers"]:
        times = [row[how][what] for how in ("together", "staggered") for what in ("worst", "mean")]
        rows.append([*name(row), str(row["layers"]), *(cell(us) for us in times), cell(times[0] / times[2], 2)])
    lines.append(
        table(
            "Steps of a model, recurrent layers only, computed from one layer's times: flushing together, or staggered",
            [*case, "layers", "worst", "mean", "staggered worst", "mean", "worst / staggered"],
            rows,
        )
    )
    rows = []
    for row in result.get("memory", ()):
        sizes = [row[part] / 2**20 for part in ("state_bytes", "buffer_bytes", "ring_bytes", "bytes")]
        rows.append([row["geometry"], row["checkpoint"], *(cell(size, 2) for size in sizes), str(row["sequences"])])
    if rows:
        layers, memory = result["memory"][0]["layers"], result["memory"][0]["memory_gb"]
        title = f"MiB of a sequence in {layers} recurrent layers, and the sequences that {memory:g} GB hold"
        lines.append(table(title, ["geometry", "state", "checkpoint", "buffer", "conv", "all", "sequences"], rows))
    for section in ("steps", "convs", "windows"):
        for row in result[section]:
            reason = trouble(row)
            if reason:
                extra = f" T={row['window']}" if "window" in row else ""
                lines.append(f"{section}: {row['geometry']} {row['checkpoint']} batch {row['batch']}{extra}: {reason}")
    targets = all_targets(result)
    reached = sum(bool(target["met"]) for target in targets)
    lines.append(f"targets: {reached} of {len(targets)} met")
    for target in targets:
        if not target["met"]:
            word = "not measured" if target["met"] is None else "missed"
            lines.append(
                f"  {word}: {target['what']}, {target['where']}: {cell(target['value'], 3)} (target {target['target']})"
            )
    return "\n".join(lines)


def write_json(result: dict, path: str | None) -> None:
    """Whole or not at all: a run that is killed leaves the last complete file. NaN and infinity become null."""
    if path is None:
        return

    def finite(value):
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    partial = f"{path}.partial"
    with open(partial, "w") as file:
        json.dump(finite(result), file, indent=1)
    os.replace(partial, path)


# ----------------------------------------------------------------------------------------------------------------- run


class Job(NamedTuple):
    """One row to measure: a section's name, the case, and what its function takes besides."""

    section: str
    case: Case
    options: tuple[tuple[str, Any], ...]

    def measure(self, bench: Bench) -> dict[str, Any]:
        function = {"steps": measure_step, "convs": measure_conv, "windows": measure_window}[self.section]
        return function(bench, self.case, **dict(self.options))


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All rows, in the order of the tables."""

    def cases(names: list[str], batches: list[int]) -> list[Case]:
        dtypes = args.checkpoint
        return [
            Case(GEOMETRIES[n], batch, dtype, args.activation) for n in names for dtype in dtypes for batch in batches
        ]

    jobs = []
    full = [name for name in args.geometry if name in args.full]
    for case in cases(full, args.batch):
        jobs.append(Job("steps", case, (("buffer_len", args.buffer_len), ("full", not args.quick))))
    for case in cases(full, args.batch if not args.quick else []):
        jobs.append(Job("convs", case, (("buffer_len", args.buffer_len),)))
    for case in cases(full, args.window_batch):
        for window in args.windows:
            size, _, slots = window.partition(":")
            jobs.append(Job("windows", case, (("window", int(size)), ("slots", int(slots or 32)))))
    for case in cases([name for name in args.geometry if name not in args.full], args.batch):
        jobs.append(Job("steps", case, (("buffer_len", args.buffer_len), ("full", False))))
    return jobs


_worker_bench: Bench | None = None


def start_worker(mamba_ssm: Path | None) -> None:
    global _worker_bench
    classic = load_classic(mamba_ssm)[0] if mamba_ssm else None
    _worker_bench = Bench(load_ours(), classic, "cuda", 0.0, 0)
    _worker_bench.compile_only = True
    _worker_bench.time = _worker_bench.warm


@torch.no_grad()
def compile_job(job: Job) -> str | None:
    """In a worker: launches all that the job launches, once each. The compiled kernels land in triton's cache."""
    try:
        job.measure(_worker_bench)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # it will be seen, and reported, where it is measured
        return f"{job.section} {job.case}: {type(error).__name__}: {error}"
    return None


def in_workers(function: Callable, arguments: list[tuple], workers: int) -> None:
    """Calls `function(*arguments)` for each in processes that share the GPU, each with a `_worker_bench`."""
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(None,)
    )
    with pool:
        list(pool.map(function, *zip(*arguments), chunksize=2))


def precompile(jobs: list[Job], workers: int, mamba_ssm: Path | None, timeout: float) -> None:
    """
    Compiles in `workers` processes of the same GPU. Hundreds of variants at a second or more each would otherwise take
    most of the run. Jobs that differ in more than their batch come first: they compile different things.
    """
    order = {batch: i for i, batch in enumerate(sorted({job.case.batch for job in jobs}, key=lambda b: abs(b - 128)))}
    jobs = sorted(jobs, key=lambda job: order[job.case.batch])
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(mamba_ssm,)
    )
    try:
        futures = [pool.submit(compile_job, job) for job in jobs]
        done, pending = concurrent.futures.wait(futures, timeout=timeout)
        for problem in sorted({str(future.exception() or future.result() or "") for future in done} - {""})[:5]:
            print(f"precompiling: {problem[:300]}", file=sys.stderr)
        if pending:
            print(f"precompiling: {len(pending)} of {len(jobs)} rows not reached in {timeout:.0f} s", file=sys.stderr)
    except Exception as error:  # without it, the run is only slower
        print(f"precompiling stopped: {error}", file=sys.stderr)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def commit_of(folder: Path) -> str | None:
    """The checkout's commit, with '+' where files were changed; None without git."""
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()[:12] + ("+" if changed.stdout.strip() else "")


@torch.no_grad()
def run_jobs(bench: Bench, jobs: list[Job], result: dict, args: argparse.Namespace, began: float) -> None:
    """Measures row after row; a row that fails says so, and the rest goes on. The JSON is written after each."""
    for number, job in enumerate(jobs, 1):
        start = time.perf_counter()
        row: dict[str, Any] = {**job.case.row(), **dict(job.options)}
        broken = False
        if args.time_limit and start - began > args.time_limit:
            row["error"] = f"skipped: the limit of {args.time_limit:.0f} s is reached"
        else:
            try:
                row = job.measure(bench)
            except MemoryError as error:
                row["error"] = str(error)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
                try:
                    if bench.device == "cuda":
                        torch.cuda.synchronize()
                        torch.cuda.empty_cache()
                except Exception:
                    broken = True
        if job.section == "steps":
            row["ratios"] = step_ratios(row)
        result[job.section].append(row)
        result["layers"] = layer_rows(result["steps"], args.layers)
        result["targets"] = all_targets(result)
        result["about"]["seconds"] = time.perf_counter() - began
        write_json(result, args.json)
        what = f" T={row['window']}" if job.section == "windows" else ""
        seconds = time.perf_counter() - start
        note = trouble(row) or ""
        print(f"{number}/{len(jobs)} {job.section} {job.case}{what} {seconds:.1f} s {note[:200]}", file=sys.stderr)
        if broken:
            print("the device no longer answers: the rest is left out", file=sys.stderr)
            return


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", nargs="+", choices=[*GEOMETRIES], default=[*GEOMETRIES])
    add("--full", nargs="*", choices=[*GEOMETRIES], default=[TARGET_GEOMETRY], help="geometries with every section")
    add("--batch", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    add("--checkpoint", nargs="+", choices=CHECKPOINTS, default=["fp32", "bf16"])
    add("--activation", choices=[*DTYPES], default="bf16")
    add("--buffer-len", type=int, default=16)
    add(
        "--windows",
        nargs="*",
        default=["2", "4", "5", "8", "16", "5:64", "8:64", "16:96"],
        help="window sizes T, or T:slots; slots is raised to 16 + 2T + 1 where it is less (default 32)",
    )
    add("--window-batch", type=int, nargs="+", default=[32, 128, 512])
    add("--layers", type=int, default=24, help="recurrent layers of the model in the section on staggered flushes")
    add("--memory", type=float, default=100.0, help="GB for the caches, in the section on memory")
    add("--budget-ms", type=float, default=60.0, help="GPU time per figure, in ms")
    add("--mamba-ssm", help="a wheel of mamba_ssm, or a folder that holds it or its wheel; default: the installed one")
    add("--precompile", type=int, help="compiling processes; default 8 where there are 8 cores or more, otherwise none")
    add("--time-limit", type=float, default=0.0, help="start no further row after so many seconds")
    add("--json", help="where to write the figures")
    add("--commit", help="what to call the code's version, where there is no git")
    add("--quick", action="store_true", help="one geometry, batch 8 and 128, a window of 5")
    add("--show", metavar="JSON", help="print the tables of an earlier run, and measure nothing")
    args = parser.parse_args(arguments)
    if args.quick:
        args.geometry, args.batch, args.budget_ms = [TARGET_GEOMETRY], [8, 128], min(args.budget_ms, 30.0)
        args.full, args.windows, args.window_batch = [TARGET_GEOMETRY], ["5"], [128]
    if args.precompile is None:
        cores = os.cpu_count() or 1
        args.precompile = min(8, cores) if cores >= 8 else 0
    return args


def main() -> None:
    args = parse()
    if args.show:
        print(report(json.loads(Path(args.show).read_text())))
        return
    began = time.perf_counter()
    kernels = load_ours()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA (or ROCm) device: times are taken on a GPU only")
    classic = mamba_ssm = folder = None
    try:
        folder = mamba_ssm_folder(args.mamba_ssm)
        classic, mamba_ssm = load_classic(folder)
    except Exception as error:
        print(f"mamba_ssm cannot be used, so there will be no ratio to it: {error}", file=sys.stderr)
    jobs = jobs_of(args)
    seconds_compiling = 0.0
    if args.precompile:
        precompile(jobs, args.precompile, folder if classic else None, timeout=60.0 if args.quick else 240.0)
        seconds_compiling = time.perf_counter() - began
        print(f"compiled in {args.precompile} processes, {seconds_compiling:.0f} s", file=sys.stderr)

    torch.manual_seed(0)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    bench = Bench(kernels, classic, "cuda", args.budget_ms, l2_bytes)
    bandwidth = read_bandwidth(bench)
    bench.bandwidth = bandwidth["bytes_per_s"]
    result = {
        "about": {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "mamba_ssm": mamba_ssm,
            "commit": args.commit or commit_of(Path(__file__).parent),
            "activation": args.activation,
            "buffer_len": args.buffer_len,
            "l2_bytes": l2_bytes,
            "bandwidth": bandwidth,
            "budget_ms": args.budget_ms,
            "seconds_compiling": seconds_compiling,
        },
        "steps": [],
        "convs": [],
        "windows": [],
        "layers": [],
        "memory": memory_rows(args),
        "targets": [],
    }
    run_jobs(bench, jobs, result, args, began)
    print(report(result))


if __name__ == "__main__":
    main()
