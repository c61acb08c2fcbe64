"""
Times decoding through `generate`: upstream's caches and replay, eager, captured and compiled, against the floor.

    python scripts/benchmark_generate.py --device cuda --mamba-ssm mamba_ssm.whl --json results.json --plot results.svg
    python scripts/benchmark_generate.py --geometry Bamba-9B --batch 1 64 --variants upstream-dynamic replay-eager
    python scripts/benchmark_generate.py --geometry tiny --device cpu --dtype float32 --batch 1 2
    python scripts/benchmark_generate.py --show results.json

Each row is one variant at one batch. A first call of `generate` compiles, captures and warms up, and its tokens and
logits are compared with those of the first variant that ran at this batch; where they differ there is no speed. A
second call of the same shape is timed: the time to the first token, and from each token to the next over whole flush
cycles, taken where `generate` asks its stopping criteria. (On CUDA by events in the stream, so that nothing waits.)

- *floor*: all weights read once at the bandwidth of a read-only pass measured in the same run, or the matrix products
  (nn.Linear) alone if these take longer, and the state read once. *fraction*: floor / mean step of the flush cycle.
- *first call*: seconds of the first call beyond what the second takes for as many tokens: compiling and capturing.
- *peak*: the most memory allocated in the second call, weights included.

Variants: upstream-dynamic, upstream-static (compiled by `generate`), upstream-captured (the call that `generate` would
compile, captured by hand in a CUDA graph; the steps up to the capture, the second, are not counted), replay-eager,
replay-captured, replay-static. What compiles takes about a minute a batch: --compiled-batch says for which. Weights are
random (see geometries.py) and built once, on the device. With --turns the two eager variants are compared once more,
in short calls that alternate: the host bounds both, and its speed drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from benchmark_kernels import table
from geometries import build, named, random_prompt, short_name, state_bytes, state_share, weight_bytes
from model_timing import (
    DTYPES,
    LogitsLog,
    Record,
    StepClock,
    about,
    bandwidth,
    captured_settings,
    cell,
    compare,
    graph_of,
    now,
    products_of,
    say,
    summary,
    time_products,
    use_mamba_ssm,
)

import hf_replayssm


@dataclass(frozen=True)
class Variant:
    replay: bool  # on the enabled model
    settings: Callable[[], dict[str, Any]]  # arguments of generate
    compiles: bool = False  # for a minute or so
    by_hand: bool = False  # the call that generate would compile is captured instead


VARIANTS = {
    "upstream-dynamic": Variant(False, lambda: {"cache_implementation": "dynamic"}),
    "upstream-captured": Variant(False, lambda: {"cache_implementation": "static"}, by_hand=True),
    "upstream-static": Variant(False, lambda: {"cache_implementation": "static"}, compiles=True),
    "replay-eager": Variant(True, lambda: {"cache_implementation": "replayssm"}),
    "replay-captured": Variant(True, captured_settings),
    "replay-static": Variant(True, lambda: {"cache_implementation": "replayssm_static"}, compiles=True),
}


CAPTURED_BY = 2  # steps of a call until `CapturedCall` has its graph


class CapturedCall:
    """
    A model's call as a CUDA graph, in the place of the compiled call of `generate`, whose inputs keep their shapes. The
    first call runs as it is, so that everything is allocated; the second is captured.
    """

    def __init__(self, model):
        self.model, self.calls = model, 0
        self.graph: Any = None
        self.inputs: dict[str, Any] = {}
        self.output: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.model(**inputs)
        if self.graph is None:
            # The cache is not among the tensors: its own stay where they are.
            self.inputs = {
                name: {key: copied(mask) for key, mask in value.items()} if isinstance(value, dict) else copied(value)
                for name, value in inputs.items()
            }
            self.graph = graph_of(lambda: setattr(self, "output", self.model(**self.inputs)))
        else:
            for own, new in zip(tensors(self.inputs), tensors(inputs), strict=True):
                own.copy_(new)
        self.graph.replay()
        return self.output


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def tensors(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a model, those of a dict of masks too."""
    found = []
    for value in inputs.values():
        found += [x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, torch.Tensor)]
    return found


class Bounds:
    """The floor of a step, from what was measured in this run; None on the CPU."""

    def __init__(self, model, bytes_per_s: float | None):
        self.model, self.bytes_per_s = model, bytes_per_s
        self.linears = products_of(model) if bytes_per_s else []
        self.weights, self.state = weight_bytes(model), state_bytes(model.config)

    @functools.cache  # noqa: B019  (lives as long as the run)
    def floor(self, batch: int) -> dict[str, float] | None:
        if self.bytes_per_s is None:
            return None
        weights, state = (count / self.bytes_per_s * 1e3 for count in (self.weights, batch * self.state))
        products = time_products(self.linears, batch)
        return {"weights_ms": weights, "products_ms": products, "state_ms": state, "ms": max(weights, products) + state}


class Bench:
    def __init__(self, model, args: argparse.Namespace, bounds: Bounds):
        self.model, self.args, self.bounds = model, args, bounds
        self.references: dict[int, tuple[str, torch.Tensor, LogitsLog]] = {}
        self.cycle = args.buffer_len

    def switch(self, replay: bool) -> None:
        """Upstream's own model or the enabled one; nothing compiled before is left."""
        hf_replayssm.disable(self.model)
        for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length", "get_compiled_call"):
            self.model.__dict__.pop(name, None)
        torch._dynamo.reset()
        gc.collect()
        if replay:
            # Upstream's cached step has no limit on dt, so here replay has none.
            limit = (0.0, float("inf"))
            hf_replayssm.enable(self.model, buffer_len=self.args.buffer_len, time_step_limit=limit)

    def call(self, ids: torch.Tensor, tokens: int, settings: dict[str, Any], **kwargs: Any):
        """New tokens up to `tokens`, of a call that allows for `self.tokens`, and the clock."""
        clock = StepClock(self.args.device, tokens)
        sequences = self.model.generate(
            ids, max_new_tokens=self.tokens, do_sample=False, stopping_criteria=[clock], **settings, **kwargs
        )
        return sequences, clock, now(self.args.device) - clock.begin

    @property
    def tokens(self) -> int:
        return 1 + self.args.cycles * self.cycle

    def measure(self, variant: str, batch: int) -> dict[str, Any]:
        settings = VARIANTS[variant].settings()
        self.switch(VARIANTS[variant].replay)
        if VARIANTS[variant].by_hand:
            self.model.get_compiled_call = lambda config: CapturedCall(self.model)
        ids = random_prompt(self.model, batch, self.args.prompt)
        # As many tokens as are timed: with a growing cache, cuDNN's attention makes a plan for every length that is new
        # to it, which takes it some ten milliseconds.
        log, checked = LogitsLog(), self.tokens
        sequences, _, first_s = self.call(ids, checked, settings, logits_processor=[log])
        row: dict[str, Any] = {}
        name, reference, reference_log = self.references.setdefault(batch, (variant, sequences, log))
        if name != variant:
            row["compared_with"] = name
            dtype = DTYPES[self.args.dtype]
            row["difference"], wrong = compare(sequences, log, reference, reference_log, dtype)
            if wrong is not None:
                return row | {"wrong": f"{wrong} from {name}"}
        cuda = self.args.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        timed, clock, seconds = self.call(ids, self.tokens, settings)
        if not torch.equal(timed[:, : sequences.shape[1]], sequences):
            return row | {"wrong": "the timed call gives other tokens than the first"}
        steps = clock.steps()
        if VARIANTS[variant].by_hand:  # every call has a cache of its own, so this one was captured, too: in step two
            steps = steps[CAPTURED_BY:]
        row |= {"first_token_ms": clock.first_token_s * 1e3, **summary(steps, self.cycle)}
        row["tokens_per_s"] = batch * 1e3 / row["cycle_mean_ms"]
        row["first_call_s"] = max(0.0, first_s - clock.first_token_s - (checked - 1) * row["median_ms"] / 1e3)
        row["steps_ms"] = steps
        if cuda:
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        with contextlib.suppress(torch.OutOfMemoryError):  # the speed is there without it
            floor = self.bounds.floor(batch)
            if floor is not None:
                row |= {"floor": floor, "fraction": floor["ms"] / row["cycle_mean_ms"]}
        return row

    def measure_in_turns(self, batch: int) -> dict[str, Any]:
        """
        The two eager variants in turns, short call after short call, on one model: what a step of upstream's takes over
        what the replay step beside it takes. (The host, which bounds both, may be half as fast a minute later.)
        """
        self.switch(True)  # with a dynamic cache an enabled model's forward is upstream's
        ids, ratios = random_prompt(self.model, batch, self.args.prompt), []
        times: dict[str, list[float]] = {"upstream-dynamic": [], "replay-eager": []}
        for turn in range(self.args.turns + 1):  # the first warms up
            medians = {}
            for name in sorted(times, reverse=bool(turn % 2)):
                steps = self.call(ids, 1 + self.cycle, VARIANTS[name].settings())[1].steps()
                medians[name] = statistics.median(steps)
            if turn:
                ratios.append(medians["upstream-dynamic"] / medians["replay-eager"])
                for name, value in medians.items():
                    times[name].append(value)
        quarters = statistics.quantiles(ratios, n=4)
        return {"ratio": statistics.median(ratios), "quartiles": [quarters[0], quarters[2]], "ratios": ratios,
                "median_ms": {name: statistics.median(values) for name, values in times.items()}}  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[args.dtype]
    mamba_ssm = None if args.mamba_ssm is None else use_mamba_ssm(args.mamba_ssm, args.mamba_ssm_scan)
    begin = now(args.device)
    model = build(named(args.geometry), args.device, dtype)
    # The scan of a prefill in PyTorch pads to whole chunks: no longer ones than the prompt needs, for every variant.
    for module in model.modules():
        if hasattr(module, "A_log") and hasattr(module, "chunk_size") and not args.mamba_ssm_scan:
            module.chunk_size = min(module.chunk_size, max(16, 1 << (args.prompt - 1).bit_length()))
    size = {
        "geometry": short_name(args.geometry),
        "parameters": model.num_parameters(),
        "weight_bytes": weight_bytes(model),
        "state_bytes_per_row": state_bytes(model.config),
        "build_seconds": now(args.device) - begin,
        "mamba_ssm": mamba_ssm,
        "state_share": state_share(model),
    }
    options = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "show", "geometry")}
    record = Record(about(args.device, dtype, **size, options=options), args.json, args.time_limit)
    say(
        f"{size['geometry']}: {size['parameters'] / 1e9:.2f} G parameters, {args.dtype}, built in "
        f"{size['build_seconds']:.1f} s on {record.result['about']['device']}, mamba_ssm {mamba_ssm or 'absent'}"
    )
    measured = None
    with contextlib.suppress(Exception):  # without it there is no floor
        measured = bandwidth(args.device)
        record.note(bandwidth=measured)
    bench = Bench(model, args, Bounds(model, measured and measured["bytes_per_s"]))

    plain = [name for name in args.variants if not VARIANTS[name].compiles]
    jobs = [(name, batch) for batch in args.batch for name in plain]
    jobs += [(name, batch) for batch in args.compiled_batch for name in args.variants if VARIANTS[name].compiles]
    for variant, batch in jobs:
        row = record.add({"variant": variant, "batch": batch}, functools.partial(bench.measure, variant, batch))
        what = trouble(row) or f"{row['median_ms']:.2f} ms a step, {row['tokens_per_s']:.0f} tokens/s"
        say(f"  batch {batch}, {variant}: {what} ({row.get('row_seconds', 0.0):.0f} s)")
    for batch in args.batch if args.turns else ():
        row = record.add({"variant": "in-turns", "batch": batch}, functools.partial(bench.measure_in_turns, batch))
        say(f"  batch {batch}, in turns: {trouble(row) or in_turns(row)}")
    bench.switch(False)
    return record.result


def in_turns(row: dict[str, Any]) -> str:
    upstream, replay = (row["median_ms"][name] for name in ("upstream-dynamic", "replay-eager"))
    low, high = row["quartiles"]
    return (
        f"eager steps in turns: upstream {upstream:.2f} ms, replay {replay:.2f} ms, upstream / replay "
        f"{row['ratio']:.2f} (half of {len(row['ratios'])} pairs within {low:.2f} to {high:.2f})"
    )


def trouble(row: dict[str, Any]) -> str | None:
    """Why a row has no speed."""
    if row.get("wrong"):
        return f"no speed: {row['wrong']}"
    if row.get("error"):
        return f"failed: {row['error']}"
    return f"skipped: {row['skipped']}" if row.get("skipped") else None


def report(result: dict[str, Any]) -> str:
    info = result.get("about", {})
    if "mamba_ssm" not in info:
        raise SystemExit("benchmark_generate: this file is not one that this script has written.")
    on_cpu = info["options"]["device"] == "cpu"
    lines = [
        f"{info['geometry']}, {info['dtype']}, {info['device']}, {info['date']}, torch {info['torch']}, "
        f"transformers {info['transformers']}, mamba_ssm {info['mamba_ssm'] or 'absent'}, "
        f"prompt of {info['options']['prompt']}, buffer_len {info['options']['buffer_len']}",
        *(["On the CPU nothing is captured or compiled: those rows compare tokens."] if on_cpu else []),
        "",
    ]
    rows, notes = [], []
    notes += [
        f"batch {row['batch']}: {trouble(row) or in_turns(row)}"
        for row in result["rows"]
        if row["variant"] == "in-turns"
    ]
    steps = [row for row in result["rows"] if row["variant"] in VARIANTS]
    for row in sorted(steps, key=lambda row: (row["batch"], list(VARIANTS).index(row["variant"]))):
        cells = [row["variant"], str(row["batch"])]
        if trouble(row):
            notes.append(f"{row['variant']}, batch {row['batch']}: {trouble(row)}")
            continue
        floor = row.get("floor") or {}
        peak = row.get("peak_bytes")
        cells += [cell(row[name]) for name in ("first_token_ms", "median_ms", "cycle_mean_ms", "worst_ms")]
        cells += [cell(row["tokens_per_s"], 0), cell(floor.get("ms")), cell(row.get("fraction"))]
        cells += [cell(None if peak is None else peak / 1e9, 1), cell(row["first_call_s"], 1)]
        rows.append(cells)
    head = [
        "variant", "batch", "first token, ms", "median, ms", "cycle mean, ms", "worst, ms", "tokens/s", "floor, ms",
        "fraction", "peak, GB", "first call, s",
    ]  # fmt: skip
    lines.append(table("Decoding through generate", head, rows))
    return "\n".join(lines + notes)


def plot(result: dict[str, Any], path: str) -> None:
    """Milliseconds per step against the batch, one line a variant, and the floor. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    info = result["about"]
    figure, axis = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    floor = {row["batch"]: row["floor"]["ms"] for row in result["rows"] if row.get("floor")}
    for number, variant in enumerate(VARIANTS):
        points = sorted(
            (row["batch"], row["cycle_mean_ms"])
            for row in result["rows"]
            if row["variant"] == variant and not trouble(row)
        )
        if points:
            axis.plot(*zip(*points), marker="o", markersize=3, color=f"C{number}", label=variant)
    if floor:
        axis.plot(*zip(*sorted(floor.items())), color="0.5", linestyle="--", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("batch")
    axis.set_ylabel("ms per step")
    axis.set_title(f"{info['geometry']}, {info['dtype']}, {info['device']}, {info['date']}", fontsize=10)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", default="Nemotron-H-8B", help="a named geometry, an id on the Hub or a folder")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="the first is what others must equal")
    add("--batch", type=int, nargs="+", default=[1, 8, 32, 128, 256, 512])
    add("--compiled-batch", type=int, nargs="*", help="batches for what compiles (default: 1 and 256, if in --batch)")
    add("--prompt", type=int, default=64, help="columns of the prompt")
    add("--buffer-len", type=int, default=16)
    add("--turns", type=int, default=0, help="also: pairs of short eager calls, upstream's and replay's in turns")
    add("--cycles", type=int, default=2, help="flush cycles that are timed")
    add("--mamba-ssm", metavar="PATH", help="a wheel or folder of mamba_ssm, whose kernels upstream then uses")
    add("--mamba-ssm-scan", action="store_true", help="its scan of a prefill too, which tunes itself for a minute")
    add("--time-limit", type=float, help="seconds after which no further row is begun")
    add("--json", help="file for the results, written after every row")
    add("--plot", metavar="FILE", help="picture of the results, .svg or .png; needs matplotlib")
    add("--show", metavar="FILE", help="print the table of such a JSON file (and draw --plot) and exit")
    args = parser.parse_args(arguments)
    if args.compiled_batch is None:
        args.compiled_batch = [batch for batch in args.batch if batch in (1, 256)]
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.show:
        with open(args.show) as file:
            result = json.load(file)
    else:
        transformers.logging.set_verbosity_error()
        with torch.no_grad():
            result = run(args)
    say(report(result))
    if args.plot:
        try:
            plot(result, args.plot)
        except ImportError:
            say("matplotlib is not installed: no plot. (With --json, --show draws it later.)")


if __name__ == "__main__":
    main()
