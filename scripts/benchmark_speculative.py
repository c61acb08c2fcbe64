"""
Times speculative decoding: the verifying forward, tokens per second at a forced acceptance, and the loop around it.

    python scripts/benchmark_speculative.py --device cuda --json results.json           # Nemotron-H-8B, batch 1 and 32
    python scripts/benchmark_speculative.py --geometry tiny --device cpu --dtype float32
    python scripts/benchmark_speculative.py --geometry ID_OR_FOLDER                     # any config, random weights

What it measures (see geometries.py for the weights):
- `forwards`: a forward of 1 token and of the window, over whole flush cycles, the write positions really advancing.
  *eager* is a call of the model; *captured* is the same call as a CUDA graph, one for each position of the cycle, whose
  outputs are compared with the eager ones first; *static* is one graph over the static cache, which advances by itself;
  *products* are the matrix products (nn.Linear) of the model alone.
- `decoding`: the greedy continuation is recorded first; the candidates are its next tokens, with one replaced by
  another token, so that acceptance is known: 3 of 4 (`even`: always the fourth; `ragged`: the rows accept 2, 3 or 4 in
  turns). Sequences and logits are compared with plain replay decoding first, and where they differ there is no speed.
  Tokens per second are the difference of two lengths, so that prompt and setup drop out. `upstream` is the assisted
  decoding of generate (one row) with the same candidates, on the same model and cache.
- `overhead`: per round, all but the models' forwards: the host is made to wait for the device before and after each
  forward, and what lies between counts. With prompt lookup that finds its drafts, and with a small draft model.
  *waits*: how often the host waits for the device in a round when it is left to itself, forwards included.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from benchmark_kernels import table
from geometries import build, draft_of, named, random_prompt, short_name, state_bytes, state_share, weight_bytes
from model_timing import (
    BOUNDS,
    DTYPES,
    LogitsLog,
    Record,
    about,
    bandwidth,
    captured_settings,
    cell,
    compare,
    distance,
    graph_of,
    now,
    one_line,
    patched,
    products_of,
    say,
    time_products,
    time_replays,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GenerationMixin

import hf_replayssm
from hf_replayssm import ReplayCache, speculative_generate
from hf_replayssm.speculative import loop as speculation


SECTIONS = ("forwards", "decoding", "overhead")


# ------------------------------------------------------------------------------------------------------------ forwards


class Uploads:
    """
    The plain cache decides positions on the host and sends them to the device, which a graph cannot hold. Here one
    forward runs with these tensors recorded; while the same forward is captured they are given out again. So a graph
    is right for this position of the flush cycle, and for no other.
    """

    def __init__(self):
        self.sent: list[torch.Tensor] = []
        self.modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name.split(".")[0] == "hf_replayssm" and hasattr(module, "upload")
        ]

    @contextlib.contextmanager
    def _replaced(self, function: Callable) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(patched(module, upload=function))
            yield

    def recorded(self) -> contextlib.AbstractContextManager:
        upload = sys.modules["hf_replayssm.positions"].upload
        self.sent = []

        def record(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            self.sent.append(upload(tensor, device))
            return self.sent[-1]

        return self._replaced(record)

    def given_again(self) -> contextlib.AbstractContextManager:
        left = iter(self.sent)

        def give(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            sent = next(left)
            if sent.shape != tensor.shape or sent.dtype != tensor.dtype:
                raise RuntimeError("the captured forward sends something else than the recorded one")
            return sent

        return self._replaced(give)


class Forwards:
    """Forwards of `tokens` tokens through a warm cache; of a window one token is taken back each time."""

    def __init__(self, model, batch: int, tokens: int, prompt: int):
        self.model, self.tokens = model, tokens
        self.cache = ReplayCache(config=model.config, max_window=max(tokens, 1))
        self.window = random_prompt(model, batch, tokens, seed=1)
        self.call(random_prompt(model, batch, prompt))
        self.cache.record_past = tokens > 1

    def call(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=self.tokens).logits

    def advance(self) -> torch.Tensor:
        logits = self.call(self.window)
        if self.tokens > 1:
            self.cache.crop(-1)
        return logits

    def flushes(self) -> int:
        return self.cache.stats.checkpoint_writes

    def eager(self, count: int) -> dict[str, Any]:
        times, flushed = [], []
        for _ in range(count):
            writes, begin = self.flushes(), now(self.model.device)
            self.call(self.window)
            times.append((now(self.model.device) - begin) * 1e3)
            flushed.append(self.flushes() > writes)
            if self.tokens > 1:
                self.cache.crop(-1)
        return over_cycles(times, flushed)

    def captured(self, count: int) -> dict[str, Any]:
        times, flushed, differences, uploads = [], [], [], Uploads()
        for _ in range(count):
            before, writes, held = self.cache.snapshot(), self.flushes(), {}
            with uploads.recorded():
                expected = self.call(self.window)
            flushed.append(self.flushes() > writes)
            self.cache.restore(before)
            with uploads.given_again():
                graph = graph_of(lambda held=held: held.update(logits=self.call(self.window)))
            graph.replay()
            differences.append(distance(held["logits"], expected))
            times.append(time_replays(graph))
            graph.reset()
            self.cache.restore(before)
            self.advance()
        result = over_cycles(times, flushed) | {"difference": max(differences)}
        if result["difference"] > 0.05:  # the same kernels on the same numbers
            return {"difference": result["difference"], "error": "the captured forward gives other logits"}
        return result


def static_forwards(model, batch: int, tokens: int, prompt: int, count: int) -> dict[str, Any]:
    """One captured forward through the static cache, run `count` times, all tokens accepted."""
    settings = model._replay_config.replace(max_window=max(tokens, 1))
    length = prompt + tokens * (count + 8)
    caches = {
        "plain": ReplayCache(config=model.config, replay_config=settings),
        "static": hf_replayssm.StaticReplayCache(config=model.config, max_cache_len=length, replay_config=settings),
    }
    ids, window = random_prompt(model, batch, prompt), random_prompt(model, batch, tokens, seed=1)
    logits = {}
    for name, cache in caches.items():
        cache.record_past = tokens > 1
        for inputs in (ids, window, window, window):  # warm, and right: as the plain cache has it
            logits[name] = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=tokens).logits
    difference = distance(logits["static"], logits["plain"])
    if difference > BOUNDS[model.dtype]:
        return {"difference": difference, "error": "the static cache gives other logits"}
    cache = caches.pop("static")
    caches.clear()
    graph = graph_of(lambda: model(input_ids=window, cache=cache, use_cache=True, logits_to_keep=tokens))
    times = []
    for _ in range(count):
        begin = now(model.device)
        graph.replay()
        times.append((now(model.device) - begin) * 1e3)
    return {"cycle_mean_ms": statistics.fmean(times), "difference": difference} | spread(times)


def spread(times: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(times), "worst_ms": max(times), "forwards": len(times)}


def over_cycles(times: list[float], flushed: list[bool]) -> dict[str, Any]:
    """Median, worst, and the mean over whole flush cycles: from behind one flush to the end of another."""
    ends = [i for i, flush in enumerate(flushed) if flush]
    whole = times[ends[0] + 1 : ends[-1] + 1] if len(ends) > 1 else times
    return {"cycle_mean_ms": statistics.fmean(whole), "flushes": len(ends)} | spread(times)


def measure_forwards(model, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {}
    cycle = hf_replayssm.ReplayCache(config=model.config, replay_config=model._replay_config).replay_config.buffer_len
    linears = products_of(model)
    for name, tokens in (("one", 1), ("window", args.drafts + 1)):
        forwards = Forwards(model, batch, tokens, args.prompt)
        steps = 2 * cycle // max(1, tokens - 1) + 4 if tokens > 1 else cycle + 2
        for _ in range(steps if tokens > 1 else 3):  # warm, and in a steady cycle
            forwards.advance()
        part = row[name] = {"tokens": tokens, "eager": forwards.eager(max(steps, 2 * cycle if tokens == 1 else steps))}
        part["products_ms"] = time_products(linears, batch * tokens)
        if args.device == "cuda":
            try:
                part["captured"] = forwards.captured(cycle if tokens == 1 else steps)
            except Exception as error:  # what remains is still worth having
                part["captured"] = {"error": one_line(error)}
            try:
                part["static"] = static_forwards(model, batch, tokens, args.prompt, 2 * cycle)
            except Exception as error:
                part["static"] = {"error": one_line(error)}
    row["ratios"] = {"products": row["window"]["products_ms"] / row["one"]["products_ms"]}
    row["more_ms"] = {"products": row["window"]["products_ms"] - row["one"]["products_ms"]}
    for how in ("eager", "captured", "static"):
        pair = [row[name].get(how, {}).get("cycle_mean_ms") for name in ("window", "one")]
        if None not in pair:
            row["ratios"][how], row["more_ms"][how] = pair[0] / pair[1], pair[0] - pair[1]
    return row


# ------------------------------------------------------------------------------------------------------------ decoding


class Replayed:
    """
    In the place of `PromptLookup`: the drafts are the row's recorded tokens, of which the one behind the accepted ones
    is replaced by another. `accepted` are the counts of the rounds, in turns.
    """

    def __init__(self, tokens: list[int], prompt: int, vocab: int, accepted: list[int]):
        self.recorded, self.vocab, self.accepted = tokens, vocab, accepted
        self.length, self.round = -prompt, 0

    def extend(self, tokens: list[int]) -> None:
        self.length += len(tokens)

    def drafts(self, count: int) -> list[int]:
        drafts = self.recorded[self.length : self.length + count]
        wrong = self.accepted[self.round % len(self.accepted)]
        self.round += 1
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + self.vocab // 2) % self.vocab
        return drafts


def replayed_rows(recorded: torch.Tensor, prompt: int, vocab: int, drafts: int, ragged: bool) -> Callable:
    """A factory of [`Replayed`], called once for each row in turn."""
    rows = iter(enumerate(recorded.tolist()))

    def make(ngram: int) -> Replayed:
        number, tokens = next(rows)
        turns = [drafts - 1, drafts - 2, drafts] if ragged and drafts > 1 else [drafts - 1]
        turns = turns[number % len(turns) :] + turns[: number % len(turns)]
        return Replayed(tokens, prompt, vocab, turns)

    return make


class ReplayedCandidates(CandidateGenerator):
    """The same for upstream's loop."""

    def __init__(self, replayed: Replayed, drafts: int):
        self.replayed, self.num_output_tokens = replayed, drafts
        self.prompt, self.rounds = -replayed.length, 0

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs):
        self.replayed.length = input_ids.shape[1] - self.prompt
        room = len(self.replayed.recorded) - self.replayed.length - 1
        drafts = self.replayed.drafts(max(0, min(self.num_output_tokens, room)))
        self.rounds += 1
        new = torch.tensor([drafts], dtype=torch.long, device=input_ids.device)
        return torch.cat([input_ids, new], dim=1), None


class Decoding:
    """Decoding at one batch, eager or captured: the plain continuation, and speculation with it as candidates."""

    def __init__(self, model, batch: int, captured: bool, args: argparse.Namespace):
        self.model, self.batch, self.args = model, batch, args
        self.captured = captured
        self.ids = random_prompt(model, batch, args.prompt)
        self.short, self.long = args.drafts, args.drafts * (1 + args.rounds)
        self.rounds = 0

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        if not self.captured:
            return {"cache_implementation": "replayssm"}
        return json.loads(self.args.captured_settings) if self.args.captured_settings else captured_settings()

    def plain(self, tokens: int, **kwargs: Any) -> torch.Tensor:
        return self.model.generate(self.ids, max_new_tokens=tokens, do_sample=False, **self.settings, **kwargs)

    @functools.cached_property
    def reference(self) -> tuple[torch.Tensor, LogitsLog]:
        log = LogitsLog()
        return self.plain(self.long, logits_processor=[log]), log

    @functools.cached_property
    def plain_seconds(self) -> float:
        return self.seconds(self.plain)

    def speculated(self, mode: str, tokens: int, **kwargs: Any) -> torch.Tensor:
        """`mode`: "even" or "ragged" by speculative_generate, or "upstream" (even). Sets `rounds`, given a log."""
        prompt, drafts = self.args.prompt, self.args.drafts
        vocab = self.model.config.get_text_config(decoder=True).vocab_size
        recorded = self.reference[0][:, prompt : prompt + tokens]
        make = replayed_rows(recorded, prompt, vocab, drafts, mode == "ragged")
        arguments = self.settings | kwargs | {"max_new_tokens": tokens, "prompt_lookup_num_tokens": drafts}
        if mode == "upstream":
            candidates = ReplayedCandidates(make(1), drafts)
            with patched(GenerationMixin, _get_candidate_generator=lambda *a, **kw: candidates):
                sequences = self.model.generate(self.ids, do_sample=False, **arguments)
            self.rounds = candidates.rounds
            return sequences
        # Statistics come with the cache, which then is the caller's: the next call makes and captures one of its own.
        # So they are for the call that is checked, not for those that are timed.
        counted = "logits_processor" in kwargs
        with patched(speculation, PromptLookup=make):
            output = speculative_generate(
                self.model, self.ids, do_sample=False, return_dict_in_generate=counted, **arguments
            )
        if not counted:
            return output
        self.rounds = output.statistics.rounds
        return output.sequences

    def seconds(self, run: Callable[[int], Any]) -> float:
        """What the tokens between the two lengths take."""
        if self.captured:  # with drafts and without in turns, each has to be captured again
            run(self.long)
        times: dict[int, list[float]] = {self.short: [], self.long: []}
        for _ in range(self.args.repeats):
            for tokens in times:
                begin = now(self.model.device)
                run(tokens)
                times[tokens].append(now(self.model.device) - begin)
        return statistics.median(times[self.long]) - statistics.median(times[self.short])

    def measure(self, mode: str) -> dict[str, Any]:
        reference, reference_log = self.reference
        log = LogitsLog()
        sequences = self.speculated(mode, self.long, logits_processor=[log])
        if mode == "ragged":  # rows are at lengths of their own, so the log mixes them
            log = reference_log
        difference, trouble = compare(sequences, log, reference, reference_log, DTYPES[self.args.dtype])
        # The run that is timed has no log, and must be right as well.
        if trouble is None and not torch.equal(self.speculated(mode, self.long), reference):
            trouble = "tokens differ"
        row = {"drafts": self.args.drafts, "new_tokens": self.long, "rounds": self.rounds}
        row |= {"difference": None if mode == "ragged" else difference}
        row |= {"accepted_per_round": self.long / self.rounds - 1}
        if trouble is not None:
            return row | {"wrong": trouble}
        rounds = self.rounds
        seconds = self.seconds(functools.partial(self.speculated, mode))
        tokens = self.long - self.short
        return row | {
            "plain_tokens_per_s": self.batch * tokens / self.plain_seconds,
            "plain_ms_per_step": self.plain_seconds / tokens * 1e3,
            "tokens_per_s": self.batch * tokens / seconds,
            "rounds_per_s": (rounds - 1) / seconds,
            "ms_per_round": seconds / (rounds - 1) * 1e3,
            "ratio": self.plain_seconds / seconds,
        }


# ------------------------------------------------------------------------------------------------------------ overhead


class Gaps:
    """
    Milliseconds between a forward of the target and the next, less what the draft's forwards took in between. The host
    waits for the device at both ends of every forward.
    """

    def __init__(self, target, draft=None):
        self.target, self.begun, self.end, self.drafts_ms = target, 0.0, None, 0.0
        self.rounds: list[float] = []
        self.handles = []
        for model in (target, draft):
            if model is not None:
                self.handles += [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after)]

    def before(self, module, args) -> None:
        self.begun = now(module.device)
        if module is self.target and self.end is not None:
            self.rounds.append((self.begun - self.end) * 1e3 - self.drafts_ms)

    def after(self, module, args, output) -> None:
        end = now(module.device)
        if module is self.target:
            self.end, self.drafts_ms = end, 0.0
        else:
            self.drafts_ms += (end - self.begun) * 1e3

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def text_that_repeats(model, batch: int, columns: int) -> torch.Tensor:
    """Prompts (batch, columns + 2) that hold what the model is going to say: the token after v is v + 1."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    begin = random_prompt(model, batch, 1, seed=2)
    ids = (begin + torch.arange(columns, device=model.device)) % vocab
    return torch.cat([ids, (begin + vocab // 2) % vocab, begin], dim=1)


def measure_overhead(model, draft, batch: int, upstream: bool, args: argparse.Namespace) -> dict[str, Any]:
    new = min(args.rounds * (args.drafts + 1), model.config.get_text_config(decoder=True).vocab_size // 2)
    ids = text_that_repeats(model, batch, new + 2 * args.drafts)
    kwargs: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    if draft is None:
        kwargs["prompt_lookup_num_tokens"] = args.drafts
    else:
        kwargs["assistant_model"] = draft
        draft.generation_config.num_assistant_tokens = args.drafts
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    run = model.generate if upstream else lambda *a, **kw: speculative_generate(model, *a, **kw)
    expected = model.generate(ids, max_new_tokens=new, do_sample=False)
    run(ids, **kwargs)
    gaps = Gaps(model, draft)
    try:
        sequences = run(ids, **kwargs)
    finally:
        gaps.close()
    rounds = gaps.rounds[1:]  # behind the prompt
    row = {"rounds": len(rounds), "new_tokens_per_round": new / max(1, len(rounds))}
    if not torch.equal(sequences, expected):
        return row | {"wrong": "tokens differ"}
    row |= {"median_ms": statistics.median(rounds), "worst_ms": max(rounds)}
    if args.device == "cuda":
        row["waits_per_round"] = count_waits(lambda: run(ids, **kwargs)) / max(1, len(rounds))
    return row


def count_waits(call: Callable[[], Any]) -> int:
    """How often the host waits for the device during a call, as torch warns of it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing" in str(warning.message) for warning in caught)


# ----------------------------------------------------------------------------------------------------------------- run


def run(args: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[args.dtype]
    began = now(args.device)
    model = hf_replayssm.enable(build(named(args.geometry), args.device, dtype))
    draft_config = draft_of(args.geometry)
    draft = None if draft_config is None else build(draft_config, args.device, dtype, seed=1)
    size = {
        "geometry": short_name(args.geometry),
        "parameters": model.num_parameters(),
        "weight_bytes": weight_bytes(model),
        "state_bytes_per_row": state_bytes(model.config),
        "state_share": state_share(model),
        "build_seconds": now(args.device) - began,
    }
    options = {name: value for name, value in vars(args).items() if name not in ("json", "geometry")}
    record = Record(about(args.device, dtype, **size, options=options), args.json, args.time_limit)
    say(
        f"{size['geometry']}: {size['parameters'] / 1e9:.2f} G parameters, {args.dtype}, built in "
        f"{size['build_seconds']:.1f} s on {record.result['about']['device']}"
    )
    with contextlib.suppress(Exception):
        record.note(bandwidth=bandwidth(args.device))

    def add(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        row = record.add(row, measure)
        say("  " + ", ".join(f"{k} {v}" for k, v in row.items() if not isinstance(v, dict | float)) + shown(row))

    for batch in args.batch:
        if "forwards" in args.sections:
            add({"section": "forwards", "batch": batch}, functools.partial(measure_forwards, model, batch, args))
        for path in ("eager", "captured") if "decoding" in args.sections else ():
            decoding = Decoding(model, batch, path == "captured", args)
            for mode in ("even", "ragged" if batch > 1 else "upstream"):
                row = {"section": "decoding", "batch": batch, "path": path, "candidates": mode}
                add(row, functools.partial(decoding.measure, mode))
        for source, drafter in (("prompt lookup", None), ("draft model", draft)) if "overhead" in args.sections else ():
            for loop in ("speculative_generate", "generate"):
                if (source == "draft model" and draft is None) or (loop == "generate" and batch > 1):
                    continue
                row = {"section": "overhead", "batch": batch, "drafts_from": source, "loop": loop}
                add(row, functools.partial(measure_overhead, model, drafter, batch, loop == "generate", args))
    if args.sections == list(SECTIONS):
        record.note(computed=computed(record.rows, args.drafts))
    return record.result


def shown(row: dict[str, Any]) -> str:
    names = ("median_ms", "ratio", "tokens_per_s", "ms_per_round")
    return "".join(f", {name} {row[name]:.3f}" for name in names if name in row)


def computed(rows: list[dict[str, Any]], drafts: int) -> list[dict[str, Any]]:
    """
    What captured decoding would give with the forwards and the overhead measured above, at an acceptance of all drafts
    but one, where it was not run.
    """
    found = []
    for row in rows:
        if row["section"] != "forwards" or "captured" not in row.get("ratios", {}):
            continue
        same_batch = [r for r in rows if r.get("batch") == row["batch"]]
        if any(r["section"] == "decoding" and r["path"] == "captured" and "ratio" in r for r in same_batch):
            continue
        for other in same_batch:
            if other["section"] == "overhead" and other["loop"] == "speculative_generate" and "median_ms" in other:
                one, window = (row[name]["captured"]["cycle_mean_ms"] for name in ("one", "window"))
                ratio = drafts * one / (window + other["median_ms"])
                found.append({"batch": row["batch"], "ratio": ratio, "overhead_ms": other["median_ms"]})
                break
    return found


def report(result: dict[str, Any]) -> str:
    info, rows = result["about"], result["rows"]
    lines = [
        f"{info['geometry']}, {info['dtype']}, {info['device']}, {info['date']}, torch {info['torch']}, "
        f"transformers {info['transformers']}",
        "",
    ]

    def of(section: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["section"] == section]

    def why(row: dict[str, Any]) -> str:
        return row.get("wrong") or row.get("error") or row.get("skipped") or ""

    cells, notes = [], []
    for row in of("forwards"):
        if why(row):
            notes.append(f"batch {row['batch']}: {why(row)}")
            continue
        for how in ("eager", "captured", "static", "products"):
            if how == "products":
                pair = [row[name]["products_ms"] for name in ("one", "window")]
            else:
                parts = {name: row[name].get(how, {}) for name in ("one", "window")}
                notes += [f"batch {row['batch']}, {how}, {n}: {p['error']}" for n, p in parts.items() if "error" in p]
                pair = [part.get("cycle_mean_ms") for part in parts.values()]
            if pair != [None, None]:
                more = row["more_ms"].get(how)
                values = [*pair, row["ratios"].get(how), more]
                cells.append([str(row["batch"]), how, *(cell(value, 3) for value in values)])
    head = ["batch", "forward", "1 token, ms", "window, ms", "ratio", "more, ms"]
    lines.append(table("Forwards, mean over flush cycles", head, cells))
    lines += [*notes, ""] if notes else []

    def section(title: str, name: str, about: list[str], columns: dict[str, tuple[str, int]]) -> None:
        """A table: what a row is about, and its figures (name of the field, digits) under their headings."""
        found = of(name)
        cells = [
            [str(row["batch"]), *(row[field] for field in about)]
            + [cell(row.get(field), digits) for field, digits in columns.values()]
            for row in found
            if not why(row)
        ]
        lines.append(table(title, ["batch", *(field.replace("_", " ") for field in about), *columns], cells))
        notes = [f"{', '.join(row[f] for f in about)}, batch {row['batch']}: {why(row)}" for row in found if why(row)]
        lines.extend([*notes, ""] if notes else [])

    section(
        f"Decoding, {info['options']['drafts']} drafts a round",
        "decoding",
        ["path", "candidates"],
        {
            "accepted/round": ("accepted_per_round", 2),
            "rounds/s": ("rounds_per_s", 1),
            "ms/round": ("ms_per_round", 2),
            "tokens/s": ("tokens_per_s", 1),
            "plain tokens/s": ("plain_tokens_per_s", 1),
            "ratio": ("ratio", 2),
        },
    )
    section(
        "Overhead of a round: all but the models' forwards",
        "overhead",
        ["drafts_from", "loop"],
        {"median, ms": ("median_ms", 3), "worst, ms": ("worst_ms", 3), "waits/round": ("waits_per_round", 1)},
    )
    for row in info.get("computed", ()):
        lines.append(
            f"Computed, not run: batch {row['batch']}, captured forwards and {row['overhead_ms']:.2f} ms of overhead a "
            f"round would give {row['ratio']:.2f} times plain captured decoding."
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", default="Nemotron-H-8B", help="a named geometry, an id on the Hub or a folder")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--batch", type=int, nargs="+", default=[1, 32])
    add("--drafts", type=int, default=4, help="drafts of a round; of the replayed ones, all but one are accepted")
    add("--rounds", type=int, default=24, help="rounds that are timed")
    add("--repeats", type=int, default=3, help="of each timed call; the median counts")
    add("--prompt", type=int, default=32, help="columns of the prompt")
    add("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    add(
        "--captured-settings",
        metavar="JSON",
        help="the arguments of generate for captured decoding (default: the static cache with its capture switched on)",
    )
    add("--time-limit", type=float, help="seconds after which no further row is begun")
    add("--json", help="file for the results, written after every row")
    add("--show", help="print the tables of such a file and exit")
    args = parser.parse_args(arguments)
    if args.drafts < 2:
        parser.error("--drafts: 2 or more, of which all but one are accepted")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.show:
        with open(args.show) as file:
            say(report(json.load(file)))
        return
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        say(report(run(args)))


if __name__ == "__main__":
    main()
