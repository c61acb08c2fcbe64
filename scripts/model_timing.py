"""What the benchmarks of whole models share: clocks, bounds, the comparison of logits, and the record of a run."""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_kernels import Bench, commit_of, load_classic, mamba_ssm_folder, read_bandwidth, write_json
from transformers import LogitsProcessor, StoppingCriteria


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# How far the logits of two right implementations may lie apart: root mean square of the difference over that of the
# logits. Rounding in bfloat16 makes 0.03 to 0.2 of it through the 50 to 80 layers of these models; a lost state makes
# about 1 (`geometries.state_share`).
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}


# Clocks.


def synchronize(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def now(device: str | torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    synchronize(device)
    return time.perf_counter()


_capturing: list[torch.cuda.Stream] = []  # one stream for all captures: the libraries keep a workspace for each


def graph_of(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """One call of `launch` as a CUDA graph. Everything must have been compiled and allocated by a call before."""
    if not _capturing:
        _capturing.append(torch.cuda.Stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_capturing[0]):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to see
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, replays: int = 10) -> float:
    """Median milliseconds of a replay."""
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_calls(launch: Callable[[], Any], device: str | torch.device, calls: int = 5) -> float:
    """Median milliseconds of a call, the host's part included."""
    launch()
    times = []
    for _ in range(calls):
        begin = now(device)
        launch()
        times.append((now(device) - begin) * 1e3)
    return statistics.median(times)


def best_time(launch: Callable[[], Any], device: str | torch.device) -> float:
    """Median milliseconds without the host's part where there are CUDA graphs, else of a call."""
    if torch.device(device).type != "cuda":
        return time_calls(launch, device)
    launch()
    graph = graph_of(launch)
    ms = time_replays(graph)
    graph.reset()
    return ms


class StepClock(StoppingCriteria):
    """
    Takes the time at every token that `generate` has made, without waiting for the device, and ends the text after
    `tokens`. (generate asks its stopping criteria once a token, whichever cache and compiled call it uses.)
    """

    def __init__(self, device: str | torch.device, tokens: int):
        self.device, self.tokens = torch.device(device), tokens
        self.marks: list[Any] = []
        self.begin = now(device)
        self.first_token_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self.marks.append(mark)
        if self.first_token_s is None:
            self.first_token_s = now(self.device) - self.begin
        ends = len(self.marks) >= self.tokens
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)

    def steps(self) -> list[float]:
        """Milliseconds from each token to the next."""
        synchronize(self.device)
        if self.device.type == "cuda":
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:])]


def summary(steps: list[float], cycle: int) -> dict[str, float]:
    """Median, worst, and the mean over the last whole flush cycles, of milliseconds per step."""
    whole = len(steps) // cycle * cycle
    return {
        "median_ms": statistics.median(steps),
        "worst_ms": max(steps),
        "cycle_mean_ms": statistics.fmean(steps[-whole:] if whole else steps),
    }


# Right, first.


class LogitsLog(LogitsProcessor):
    """
    Keeps the logits of the first `rows` rows behind every length of the text, (rows, vocab) float32, and changes
    nothing. Where a length comes twice, behind a draft that was refused, the later one counts.
    """

    def __init__(self, rows: int = 4):
        self.rows = rows
        self.logits: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits[input_ids.shape[1]] = scores[: self.rows].float().clone()
        return scores


def distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference; infinite where anything is not finite."""
    difference = (logits.float() - reference.float()).square().mean().sqrt()
    value = float(difference / reference.float().square().mean().sqrt())
    return value if value == value else float("inf")


def compare(
    tokens: torch.Tensor,
    log: LogitsLog,
    reference_tokens: torch.Tensor,
    reference_log: LogitsLog,
    dtype: torch.dtype,
) -> tuple[float | None, str | None]:
    """The largest distance of the logits, and what is wrong, in words (None: nothing)."""
    columns = min(tokens.shape[1], reference_tokens.shape[1])
    same = tokens[:, :columns] == reference_tokens[:, :columns]
    if not bool(same.all()):
        return None, f"{1 - float(same.float().mean()):.1%} of the tokens differ"
    lengths = sorted(set(log.logits) & set(reference_log.logits))
    if not lengths:
        return None, "there are no logits to compare"
    largest = max(distance(log.logits[length], reference_log.logits[length]) for length in lengths)
    if largest > BOUNDS[dtype]:
        return largest, f"the logits differ by {largest:.1e} of their size (bound {BOUNDS[dtype]:.0e})"
    return largest, None


# Bounds.


def products_of(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The `nn.Linear` modules in the order in which a forward calls them, shared ones as often as it does."""
    called: list[torch.nn.Linear] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: called.append(module))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        model(input_ids=torch.ones((1, 2), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return called


def time_products(linears: list[torch.nn.Linear], rows: int) -> float:
    """Milliseconds of these matrix products alone, for `rows` rows, on random data."""
    weight = linears[0].weight
    sizes = sorted({linear.in_features for linear in linears})
    inputs = {size: torch.randn(rows, size, dtype=weight.dtype, device=weight.device) for size in sizes}

    def launch() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    return best_time(launch, weight.device)


def bandwidth(device: str) -> dict[str, Any] | None:
    """Bytes per second of a read-only pass, measured now; None on the CPU."""
    if torch.device(device).type != "cuda":
        return None
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return read_bandwidth(Bench(None, None, "cuda", 5.0, l2_bytes))


# The run and its record.


def captured_settings() -> dict[str, Any]:
    """The arguments of generate for the static cache, captured without a compiler."""
    return {"cache_implementation": "replayssm_static", "cache_config": {"capture": True}}


def use_mamba_ssm(path: str, scan: bool) -> str:
    """
    Gives transformers mamba_ssm's `selective_state_update` from a wheel or folder; call it before a modeling file is
    imported. With `scan` its chunked scan for prefills too (whose kernels tune themselves for a minute at first use).
    Returns the version.
    """
    modeling = sorted(name for name in sys.modules if name.startswith("transformers.models.") and "modeling_" in name)
    if any(name.split(".")[2] in ("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1") for name in modeling):
        raise RuntimeError("mamba_ssm must be given before the model's modeling file is imported")
    _, version = load_classic(mamba_ssm_folder(path))
    einops = sys.modules["einops"]
    if einops.rearrange is None:  # a stand-in: the scan's forward merges and splits the last two dimensions
        einops.rearrange = _rearrange_last_two
    if not scan:
        sys.modules["mamba_ssm.ops.triton.ssd_combined"] = None  # not importable: transformers' own scan
    return version


def _rearrange_last_two(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    if pattern == "... p n -> ... (p n)":
        return tensor.flatten(-2)
    if pattern == "... (p n) -> ... p n":
        return tensor.unflatten(-1, (-1, sizes["n"]))
    raise ValueError(f"The stand-in for einops does not know {pattern!r}: install einops.")


def about(device: str, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    """Date, hardware and versions of a run."""
    versions: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": None}
    with contextlib.suppress(ImportError):
        import triton

        versions["triton"] = triton.__version__
    cuda = torch.device(device).type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
        "commit": commit_of(Path(__file__).parent),
        "dtype": str(dtype).removeprefix("torch."),
        **more,
    }


class Record:
    """
    The rows of a run, written as JSON after each, so that a run that is cut short leaves what it had. Rows are started
    only within the time limit.
    """

    def __init__(self, about: dict[str, Any], path: str | None, time_limit: float | None):
        self.result: dict[str, Any] = {"about": about, "rows": []}
        self.path, self.time_limit, self.began = path, time_limit, time.perf_counter()
        self.note()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.result["rows"]

    def note(self, **about: Any) -> None:
        self.result["about"] |= about
        self.result["about"]["seconds"] = time.perf_counter() - self.began
        write_json(self.result, self.path)

    def add(self, row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Completes `row` with what `measure` returns, or with why there is nothing."""
        began = time.perf_counter()
        if self.time_limit is not None and began - self.began > self.time_limit:
            row["skipped"] = "the time limit was reached"
        else:
            try:
                row |= measure()
            except Exception as error:  # a row that fails must not cost the others
                row["error"] = one_line(error)
            row["row_seconds"] = time.perf_counter() - began
        self.rows.append(row)
        self.note()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return row


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def say(text: str = "") -> None:
    print(text, flush=True)


@contextlib.contextmanager
def patched(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of a module or class for a while."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def cell(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
