"""What the evaluations and benchmarks of this project write as JSON, read for the report: tables and plots.

perplexity                    `hf-replayssm perplexity --json`, `PerplexityResult.to_json`
comparison of two caches      the same with --compare, `ComparisonResult.to_json`
benchmark of generation       rows of scripts/benchmark_generate.py
benchmark of decoding         scripts/benchmark_decode.py
benchmark of kernels          scripts/benchmark_kernels.py, benchmark_mamba1.py, benchmark_gated_delta.py
benchmark of speculation      scripts/benchmark_speculative.py
benchmark of several GPUs     scripts/benchmark_multigpu.py
study of low precision        scripts/study_precision.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plot import Plot, Point, number


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    title: str = ""


@dataclass
class Section:
    """A part of the page."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    details: list[Table] = field(default_factory=list)  # the figures of the plots, folded away


MOST_SERIES = 12  # that can be told apart in one plot
KINDS = [line.split("  ", 1) for line in __doc__.split("\n\n")[1].strip().splitlines()]


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError says what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give a JSON that an evaluation or a benchmark has written.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, no JSON
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(values, dict) or kind_of(values) is None:
        known = "; ".join(f"{kind} ({source.strip()})" for kind, source in KINDS)
        raise ValueError(f"{path} is none of the results that the report knows: {known}.")
    return values


def kind_of(values: dict[str, Any]) -> str | None:
    rows = values.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if "perplexity" in values and "tokens" in values:
        return "perplexity"
    if {"reference", "other", "kl"} <= values.keys():
        return "comparison"
    if isinstance(values.get("studies"), list):
        return "study"
    if "results" in values and isinstance(values["results"], list):
        return "decode"
    if isinstance(values.get("steps"), list):
        return "kernels"
    if "variant" in first:
        return "generate"
    if "section" in first:
        return "speculation"
    if "what" in first:
        return "multigpu"
    return None


def sections(named: dict[str, dict[str, Any]]) -> list[Section]:
    """The page's parts, of results by name: evaluations side by side, then each benchmark by itself."""
    perplexities: dict[str, dict[str, Any]] = {}
    comparisons: dict[str, dict[str, Any]] = {}
    found = []
    for name, values in named.items():
        kind = kind_of(values)
        if kind == "perplexity":
            perplexities[name] = values
            if isinstance(values.get("comparison"), dict):
                comparisons[name] = values["comparison"]
                add_reference(perplexities, name, {**values["comparison"]["reference"], "model": values["model"]})
        elif kind == "comparison":
            comparisons[name] = values
            perplexities[name] = values["other"]
            add_reference(perplexities, name, values["reference"])
    if perplexities:
        found.append(perplexity_section(perplexities))
    if comparisons:
        found.append(drift_section(comparisons))
    readers: dict[str, Callable[[str, dict[str, Any]], Section]] = {
        "decode": decode_section,
        "kernels": kernels_section,
        "generate": generate_section,
        "speculation": rows_section,
        "multigpu": rows_section,
        "study": study_section,
    }
    found += [readers[kind_of(values)](name, values) for name, values in named.items() if kind_of(values) in readers]
    return found


def add_reference(perplexities: dict[str, dict[str, Any]], name: str, reference: dict[str, Any]) -> None:
    """The other side of a comparison, once for all comparisons with the same."""
    known = {(one["cache"], one["nll"], one["tokens"]) for one in perplexities.values()}
    if (reference["cache"], reference["nll"], reference["tokens"]) not in known:
        perplexities[f"{name}: {reference['cache']}"] = reference


# ------------------------------------------------------------------------------------------------------- evaluations
def perplexity_section(results: dict[str, dict[str, Any]]) -> Section:
    section = Section("Perplexity")
    rows = []
    for name, one in results.items():
        replay = one.get("replay") or {}
        how = {"window": f"{one.get('window')} tokens at a time", "step": "a token at a time", "full": "one forward"}
        rows.append(
            [
                name,
                str(one.get("model", "")),
                f"{one['cache']}, {how.get(one['mode'], one['mode'])}",
                f"{replay['checkpoint_dtype']}, buffer {replay['buffer_len']}" if replay else "",
                number(one["perplexity"]),
                number(one.get("word_perplexity")),
                number(one.get("bits_per_byte")),
                f"{one['tokens']:,}",
                number(one.get("tokens_per_second")),
            ]
        )
        if one.get("failed_batches"):
            section.notes.append(f"{name}: {len(one['failed_batches'])} batches failed and are left out.")
    head = ["", "model", "cache", "checkpoint", "per token", "per word", "bits per byte", "tokens", "tokens/s"]
    section.tables.append(Table(head, rows))
    series, details = {}, []
    for name, one in results.items():
        points = []
        for row in one.get("by_position") or []:
            value = exp(row["nll"] / row["tokens"])
            points.append(Point(middle(row), value, f"{span(row)}: {number(value)} ({row['tokens']:,} tokens)"))
            details.append([name, span(row), f"{row['tokens']:,}", number(value)])
        series[name] = points
    without = [name for name, points in series.items() if not points]
    if without:
        section.notes.append(f"No figures by position: {', '.join(without)}.")
    plot = Plot("Perplexity against position", "tokens before it in its context", "perplexity per token", series)
    section.plots.append(plot)
    section.details.append(Table(["", "tokens before it", "tokens", "perplexity"], details, plot.title))
    return section


def drift_section(results: dict[str, dict[str, Any]]) -> Section:
    section = Section("Drift")
    section.notes.append(
        "Two caches over the same tokens. Where a cache drifts from its reference, these grow with the position."
    )
    rows, details = [], []
    kl: dict[str, list[Point]] = {}
    change: dict[str, list[Point]] = {}
    for name, one in results.items():
        error = one.get("delta_logprob_se")
        rows.append(
            [
                name,
                f"{one['other']['cache']} against {one['reference']['cache']}",
                f"{one['relative_perplexity']:+.2e}",
                f"{one['delta_logprob']:+.2e}" + (f" ± {error:.1e}" if error is not None else ""),
                number(one["max_abs_delta_logprob"]),
                number(one["kl"]),
                number(one["max_kl"]),
                f"{one['argmax_agreement']:.4%}",
                f"{one['tokens']:,}",
            ]
        )
        for row in one.get("by_position") or []:
            tokens = row["tokens"]
            for series, key in ((kl, "kl"), (change, "abs_delta_logprob")):
                value = row[key] / tokens
                about = f"{span(row)}: {number(value)} ({tokens:,} tokens)"
                series.setdefault(name, []).append(Point(middle(row), value, about))
            values = [number(row[key] / tokens) for key in ("kl", "abs_delta_logprob", "delta_logprob")]
            details.append([name, span(row), f"{tokens:,}", *values, number(row["disagreements"])])
    head = [
        "",
        "caches",
        "perplexity",
        "mean Δ log p",
        "largest |Δ log p|",
        "KL",
        "largest KL",
        "same argmax",
        "tokens",
    ]
    section.tables.append(Table(head, rows))
    before = "tokens before it in its context"
    section.plots.append(Plot("KL(reference || cache) against position", before, "KL, nats", kl, y_log=True))
    section.plots.append(Plot("|Δ log p| against position", before, "mean |Δ log p|, nats", change, y_log=True))
    head = ["", "tokens before it", "tokens", "KL", "|Δ log p|", "Δ log p", "other argmax"]
    section.details.append(Table(head, details, "Drift by position"))
    return section


def span(row: dict[str, float]) -> str:
    last = row["stop"] - 1
    return f"{row['start']:,}" if last == row["start"] else f"{row['start']:,} to {last:,}"


def middle(row: dict[str, float]) -> float:
    return math.sqrt(row["start"] * max(row["start"], row["stop"] - 1))


def exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def study_section(name: str, values: dict[str, Any]) -> Section:
    """What checkpoints in fewer bits cost, by precision, tokens between two flushes, and rounding."""
    section = Section(name, notes=[about_note(values["about"])])
    head = ["checkpoint", "rounding", "buffer_len", "state error", "KL", "same argmax", "perplexity"]
    for study in values["studies"]:
        rows: dict[tuple, list[str]] = {}
        for part, keys in (("states", ["relative_mse"]), ("logits", ["kl", "argmax_agreement", "relative_perplexity"])):
            drift: dict[str, list[Point]] = {}
            runs = (study.get(part) or {}).get("runs", [])
            lengths = sorted({run["buffer_len"] for run in runs})
            shown = {lengths[0], 16 if 16 in lengths else lengths[-1]} if lengths else set()
            for run in runs:
                which = run["checkpoint"], run["rounding"], run["buffer_len"]
                row = rows.setdefault(which, [*map(str, which), "", "", "", ""])
                for key in keys:
                    row[STUDIED[key][0]] = STUDIED[key][1](run[key])
                if run["checkpoint"] != "fp32" and run["rounding"] == "nearest" and run["buffer_len"] in shown:
                    every = "at every token" if run["buffer_len"] == 1 else f"once in {run['buffer_len']}"
                    drift[f"{run['checkpoint']}, {every}"] = [
                        Point(tokens, value, f"{number(tokens)} tokens: {number(value)}")
                        for tokens, value in run["drift"]
                    ]
            if drift:
                what, unit = {"states": ("Error of the states", "relative squared error"),
                              "logits": ("KL(float64 || replay)", "KL, nats")}[part]  # fmt: skip
                title = f"{what} against tokens, {study['model']}"
                section.plots.append(Plot(title, "tokens", unit, drift, x_log=False, y_log=True))
        section.tables.append(Table(head, list(rows.values()), str(study["model"])))
    return section


# Figures of a study: the column, and how they are written.
STUDIED: dict[str, tuple[int, Callable[[float], str]]] = {
    "relative_mse": (3, lambda value: f"{value:.1e}"),
    "kl": (4, lambda value: f"{value:.1e}"),
    "argmax_agreement": (5, lambda value: f"{value:.3%}"),
    "relative_perplexity": (6, lambda value: f"{value:+.4%}"),
}


# ------------------------------------------------------------------------------------------------------- benchmarks
def about_note(about: dict[str, Any]) -> str:
    """Where and with what a benchmark ran: what is short enough to read."""
    plain = {key: value for key, value in about.items() if isinstance(value, (str, int, float)) and key != "seconds"}
    return " · ".join(
        f"{key.replace('_', ' ')} {number(value) if isinstance(value, float) else value}"
        for key, value in plain.items()
    )


def speed_plots(section: Section, unit: str, times: dict[str, dict[float, float]], reference: str | None) -> None:
    """Time of a step against batch, tokens per second, and the ratio to `reference`, where it was measured."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    sign, names = {"ms": "ms", "us": "µs"}[unit], list(times)
    series = {
        name: [Point(batch, value, f"batch {number(batch)}: {number(value)} {sign}") for batch, value in each.items()]
        for name, each in times.items()
    }
    section.plots.append(
        Plot("Time of a step against batch", "batch", f"{sign} per step", series, y_log=True, palette=names)
    )
    series = {
        name: [
            Point(batch, batch * scale / value, f"batch {number(batch)}: {number(batch * scale / value)} tokens/s")
            for batch, value in each.items()
        ]
        for name, each in times.items()
    }
    if unit == "ms":
        section.plots.append(
            Plot("Speed against batch", "batch", "tokens per second", series, y_log=True, palette=names)
        )
    if reference in times:
        ratios = {
            name: [
                Point(
                    batch,
                    times[reference][batch] / value,
                    f"batch {number(batch)}: {times[reference][batch] / value:.2f}",
                )
                for batch, value in each.items()
                if batch in times[reference]
            ]
            for name, each in times.items()
            if name != reference
        }
        title = f"How many times as fast as {reference}"
        section.plots.append(Plot(title, "batch", f"{reference} / it", ratios, lines=[1.0], palette=names))
    batches = sorted({batch for each in times.values() for batch in each})
    rows = [[name, *(number(each.get(batch)) for batch in batches)] for name, each in times.items()]
    section.tables.append(Table([f"{sign} per step, at batch", *map(number, batches)], rows))


def generate_section(name: str, values: dict[str, Any]) -> Section:
    section = Section(name, notes=[about_note(values.get("about", {}))])
    times: dict[str, dict[float, float]] = {}
    for row in values["rows"]:
        if row.get("cycle_mean_ms"):
            times.setdefault(row["variant"], {})[row["batch"]] = row["cycle_mean_ms"]
            if row.get("floor"):
                times.setdefault("floor: weights and state read once", {})[row["batch"]] = row["floor"]["ms"]
        elif row.get("quartiles"):
            low, high = row["quartiles"]
            section.notes.append(
                f"Eager steps in turns at batch {row['batch']}: upstream's take {row['ratio']:.2f} times as long as "
                f"replay's (half of the pairs within {low:.2f} to {high:.2f})."
            )
        else:
            reason = row.get("error") or row.get("wrong") or row.get("skipped") or "no reason given"
            section.notes.append(f"{row['variant']}, batch {row['batch']}: no speed ({reason}).")
    upstream = [variant for variant in times if variant.startswith("upstream")]
    # Of upstream's paths the fastest that was measured at the largest batch is the one to hold replay against.
    largest = {variant: (max(times[variant]), -times[variant][max(times[variant])]) for variant in upstream}
    speed_plots(section, "ms", times, max(largest, key=largest.get) if largest else None)
    return section


def decode_section(name: str, values: dict[str, Any]) -> Section:
    section = Section(name, notes=[about_note(values)])
    times: dict[str, dict[float, float]] = {}
    for row in values["results"]:
        for side in ("upstream", "replay"):
            times.setdefault(side, {})[row["batch"]] = row[side]["cycle_mean_ms"]
    speed_plots(section, "ms", times, "upstream")
    return section


def kernels_section(name: str, values: dict[str, Any]) -> Section:
    section = Section(name, notes=[about_note(values.get("about", {}))])
    times: dict[str, dict[float, float]] = {}
    ratios: dict[str, list[Point]] = {}
    for row in values["steps"]:
        where = f"{row['geometry']}, {row['checkpoint']}"
        found = dict(step_times(row))
        for what, us in found.items():
            times.setdefault(f"{what}, {where}", {})[row["batch"]] = us
        baseline = next((found[what] for what in ("classic", "fla and copy", "fla") if what in found), None)
        replay = [us for what, us in found.items() if what.startswith("replay")]
        if baseline is not None and replay:
            ratio = baseline / min(replay)
            about = f"batch {row['batch']}: {ratio:.2f}"
            ratios.setdefault(where, []).append(Point(row["batch"], ratio, about))
        if row.get("wrong"):
            section.notes.append(
                f"{where}, batch {row['batch']}: no speed of what is wrong: {', '.join(row['wrong'])}."
            )
    speed_plots(section, "us", times, None)
    if len(times) > MOST_SERIES:
        section.plots.clear()  # the table has them
    if ratios:
        title = "How many times as fast as the classic step"
        section.plots.append(Plot(title, "batch", "classic / replay", ratios, lines=[1.0]))
    return section


def step_times(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Microseconds of a step of each side of a row of a kernel benchmark."""
    replay = row.get("replay") or {}
    if "cycle" in replay:
        yield "replay", replay["cycle"]["us"]
    else:  # by buffer length
        for length, figures in replay.items():
            yield f"replay L={length}", figures["cycle"]["us"]
    for key, what in (("classic", "classic"), ("fla_copied", "fla and copy"), ("fla", "fla")):
        if isinstance(row.get(key), dict) and row[key].get("us") is not None:
            yield what, row[key]["us"]


def rows_section(name: str, values: dict[str, Any]) -> Section:
    """Rows of several kinds: a table each, of the figures that are numbers or words."""
    section = Section(name, notes=[about_note(values.get("about", {}))])
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in values["rows"]:
        kinds.setdefault(str(row.get("section", row.get("what"))), []).append(flat(row))
    for kind, rows in kinds.items():
        head = list(dict.fromkeys(key for row in rows for key in row if key not in ("section", "what")))
        cells = [[cell(row.get(key)) for key in head] for row in rows]
        section.tables.append(Table([key.replace("_", " ") for key in head], cells, kind))
    speeds: dict[str, list[Point]] = {}
    for row in values["rows"]:
        if row.get("section") == "decoding" and row.get("tokens_per_s"):
            what = f"{row.get('path')}, {row.get('candidates')}"
            speeds.setdefault(what, []).append(Point(row["batch"], row["tokens_per_s"]))
            if row.get("plain_tokens_per_s"):
                speeds.setdefault(f"{row.get('path')}, without drafts", []).append(
                    Point(row["batch"], row["plain_tokens_per_s"])
                )
    if speeds:
        section.plots.append(Plot("Speed against batch", "batch", "tokens per second", speeds, y_log=True))
    return section


def cell(value: Any) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as `outer inner`; lists are left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            found[prefix + key] = value
    return found
