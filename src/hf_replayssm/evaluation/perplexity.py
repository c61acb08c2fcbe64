"""Perplexity of a causal language model, teacher-forced through its cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import forward
from .contexts import Context
from .engine import (
    Progress,
    Run,
    Settings,
    by_position,
    check_finite,
    position_table,
    word_and_byte_counts,
)
from .finished import Finished, digest, weights_digest
from .processes import Processes


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_replayssm.config import ReplayConfig


@dataclass(frozen=True)
class DocumentScore:
    """The score of one document. `nll` is in nats, summed over its scored `tokens`."""

    index: int
    tokens: int
    nll: float
    words: int | None
    bytes: int | None

    @property
    def perplexity(self) -> float:
        """Per token."""
        return exp(self.nll / self.tokens)


@dataclass(frozen=True)
class PerplexityResult:
    """What an evaluation gives. Of a document's tokens each but the first is scored once, in every mode.

    `words` are separated by white space and `bytes` are UTF-8, both of the text that the scored tokens stand for (None
    where token ids were given instead of text). `cache_stats` counts tokens that were fed; where rows of different
    lengths share a window, that includes the filler behind the shorter ones.
    """

    perplexity: float  # per token: exp(nll / tokens)
    word_perplexity: float | None  # exp(nll / words)
    bits_per_byte: float | None  # nll / (bytes ln 2)
    nll: float  # nats, summed over all scored tokens
    tokens: int  # scored
    words: int | None
    bytes: int | None
    documents: int  # scored
    skipped_documents: int  # empty, or a single token
    contexts: int  # runs of tokens that each began on a fresh cache
    mode: str  # step | window | full
    window: int | None  # tokens per forward, in mode "window"
    cache: str  # replayssm | dynamic | none | the name of a function
    carry_state: bool
    max_length: int | None  # tokens per context, None with carried state
    stride: int | None
    batch_size: int
    seconds: float  # in the model's forwards
    tokens_per_second: float  # scored tokens / seconds
    model: str
    dtype: str
    device: str
    replay: dict[str, Any] | None = None  # the fields of the ReplayConfig
    cache_stats: dict[str, float] | None = None  # the cache's own counters, added up over all batches
    processes: int = 1  # that evaluated something; with several, `seconds` are those of the one that took longest
    reduced_batch_size: int | None = None  # to which batches were halved (in this process) when the memory ran out
    # nll (nats, summed) of the `tokens` with at least `start` and fewer than `stop` tokens before them in their context
    by_position: list[dict[str, float]] = field(default_factory=list, repr=False)
    per_document: list[DocumentScore] = field(default_factory=list, repr=False)

    def to_dict(self, per_document: bool = False) -> dict[str, Any]:
        """As plain types; `per_document` adds a list with the score of every document."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "per_document"}
        if per_document:
            values["per_document"] = [vars(score) for score in self.per_document]
        return values

    def to_json(self, path: str | os.PathLike | None = None, per_document: bool = False) -> str:
        """As JSON text, also written to `path` if one is given."""
        return write_json(self.to_dict(per_document), path)


class BatchesFailed(RuntimeError):
    """Some batches could not be evaluated, and the others were. `partial` is the result of the documents that lost no
    part, None if there is none (without `by_position` where others lost one of several batches); `failures` has for
    each failed batch its number, its documents and the error."""

    def __init__(
        self, failures: list[dict[str, Any]], batches: int, partial: PerplexityResult | None, kept: str | None
    ):
        self.failures, self.partial = failures, partial
        shown = [
            f"batch {one['batch']} (documents {', '.join(map(str, one['documents']))}): {one['error'].rstrip('.')}"
            for one in failures[:3]
        ]
        if len(failures) > 3:
            shown.append(f"and {len(failures) - 3} more")
        rest = f" The others are finished and kept in {kept}: run again to try only these." if kept else ""
        super().__init__(f"{len(failures)} of {batches} batches failed: {'; '.join(shown)}.{rest}")


@torch.no_grad()
def evaluate_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[str | Sequence[int] | torch.Tensor],
    *,
    mode: str = "step",
    cache: str | Callable[[PreTrainedModel], Any] = "replayssm",
    window: int = 8,
    batch_size: int = 8,
    carry_state: bool = False,
    max_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: str | torch.device | None = None,
    replay: Any = None,
    progress: Progress | None = None,
    processes: Processes | None = None,
    resume: str | os.PathLike | None = None,
) -> PerplexityResult:
    """Perplexity of `model` on `documents`, teacher-forced through a cache.

    What is scored is the same for every mode, cache and batch size: each token of a document but its first (which a
    tokenizer with a beginning-of-sequence token makes that one), once. So the results differ by rounding only, except
    where a cache is not exact.

    Args:
        model: a causal language model of transformers, in any dtype, on any device or several.
        tokenizer: its tokenizer. It may be None where the documents are token ids.
        documents: texts, or token ids (lists, or tensors of shape (length,)). An iterator is read as it goes.
        mode: "step", one token per forward through the cache; "window", `window` tokens per forward through the
            cache; "full", each context in one forward without a cache.
        cache: "replayssm", "dynamic" (transformers' own), or a function that takes the model and returns a fresh
            cache. Without effect in mode "full".
        window: tokens per forward in mode "window".
        batch_size: contexts that are evaluated side by side. It changes the speed, not the result.
        carry_state: never reset the cache within a document, whatever its length. False: independent windows, each
            context of `max_length` tokens on a fresh cache.
        max_length: inputs per context, by default 1024 or the model's positions where those are fewer.
        stride: inputs from the beginning of one context to the next, by default `max_length`. With a smaller one,
            contexts overlap, and a token behind the first context has at least `max_length - stride` tokens before it.
        max_tokens: stop after this many scored tokens, in the order of the documents.
        device: where the inputs go; by default the model's own.
        replay: settings of the replay cache, a `ReplayConfig` or a dict of fields such as `{"buffer_len": 16}`; fields
            left out are those that the model was enabled with. A model that is not enabled is while it is evaluated.
        progress: called after each forward with the tokens scored so far and their number in all (None if unknown); in
            the main process only.
        processes: those that share the work, from `Processes.from_environment()`. Each is given the same arguments and
            returns the same result, which is that of one process to the last bit: the batches are the same ones.
            (Where the memory runs out and a batch is halved, only up to rounding.)
        resume: a folder for finished batches. What is in it already, of a run that was killed, is not evaluated again.

    Returns:
        PerplexityResult: perplexity per token, per word, bits per byte, the counts, and the time.

    Raises:
        ValueError: an argument out of range, nothing to score, a tokenizer that does not fit the model, a model that
            is no causal language model, log probabilities that are not finite, a `resume` folder of another evaluation
            or other data. Unsupported models raise from `hf_replayssm.enable` when `cache="replayssm"`.
        BatchesFailed: with `processes` or `resume`, at the end, if the forwards of some batches raised.
        RuntimeError: another process has died or ended with an error.
    """
    settings = Settings.checked(
        model,
        mode=mode,
        window=window,
        batch_size=batch_size,
        carry_state=carry_state,
        max_length=max_length,
        stride=stride,
        max_tokens=max_tokens,
        device=device,
    )
    if mode == "full":
        cache = forward.NO_CACHE
    elif cache == forward.NO_CACHE:
        raise ValueError(f'mode {mode!r} goes through a cache. Name one, or use mode="full".')
    settings_of_replay = replay_for(model, [cache], replay)
    if processes is not None and not processes.is_main:
        progress = None
    run = Run(model, tokenizer, documents, settings, progress)
    work = _Work(processes, resume)
    with forward.evaluation_mode(model), forward.replay_enabled(model, cache == "replayssm"), work:
        route = forward.make_route(model, cache, settings_of_replay)
        if resume is not None:
            work.open(_what_decides(run, route, settings_of_replay))
        count = 0
        for number, batch in enumerate(run.batches()):
            count += 1
            if work.is_mine(number, batch):
                work.evaluate(number, batch, run, route)
            work.show(run)
        records = work.gather(count, run)
    failures = [record for record in records if "error" in record]
    good = [record for record in records if "error" not in record]
    if not failures:
        return _result_of(run, route, good, settings_of_replay)
    partial = None
    if good:
        # Of the documents that lost a part, the numbers of words and bytes stand for all of it: leave those out.
        broken = {index for one in failures for index in one["documents"]}
        run.documents = {index: counts for index, counts in run.documents.items() if index not in broken}
        partial = _result_of(run, route, good, settings_of_replay) if run.documents else None
    raise BatchesFailed(failures, count, partial, None if resume is None else os.fspath(resume))


class _Work:
    """Who evaluates which batch, and what is finished. Batches are numbered, and the same for all processes."""

    def __init__(self, processes: Processes | None, resume: str | os.PathLike | None):
        self.processes, self.resume = processes, resume
        self.is_main = processes is None or processes.is_main
        self.finished: Finished | None = None
        self.records: dict[int, dict[str, Any] | None] = {}  # of batches that are done; None: another process knows
        self.tokens = 0  # of them, where there is one process
        self.claimed = -1
        self.run = uuid.uuid4().hex[:8]
        if processes is not None:
            processes.begin()
            if self.is_main:
                processes.publish("run", self.run.encode())
            else:
                self.run = processes.fetch("run").decode()

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.finished is not None:
            self.finished.close()

    def open(self, settings: dict[str, Any]) -> None:
        """Take up what is in the folder; the main process does, and tells the others which batches are done."""
        self.finished = Finished(self.resume, settings, main=self.is_main)
        done = self.finished.records
        if self.processes is not None:
            if self.is_main:
                for number, record in done.items():
                    self.processes.publish(f"batch/{number}", json.dumps(record).encode())
                self.processes.count_tokens(sum(record["tokens"] for record in done.values()))
                self.processes.publish("done", json.dumps(sorted(done)).encode())
            else:
                done = dict.fromkeys(json.loads(self.processes.fetch("done")))
        self.records = dict(done)
        if self.processes is None:
            self.tokens = sum(record["tokens"] for record in done.values())

    def is_mine(self, number: int, batch: list[Context]) -> bool:
        if self.finished is not None:
            self.finished.check(number, batch)
        if number in self.records:
            return False
        if self.processes is None:
            return True
        while self.claimed < number:
            self.claimed = self.processes.claim()
        return self.claimed == number

    def evaluate(self, number: int, batch: list[Context], run: Run, route: forward.Route) -> None:
        """Evaluate a batch and make the outcome known. An error is an outcome where the other batches are of use."""
        try:
            record = _score(run, route, batch)
        except Exception as error:
            if self.processes is None and self.resume is None:
                raise
            message = " ".join(f"{type(error).__name__}: {error}".split())
            record = {"error": message, "documents": sorted({context.document for context in batch})}
            route.drop()
        rank = 0 if self.processes is None else self.processes.rank
        record = self.records[number] = {"batch": number, "run": self.run, "process": rank, **record}
        if self.finished is not None and "error" not in record:
            self.finished.add(record)
        if self.processes is None:
            self.tokens += record.get("tokens", 0)
        else:
            self.processes.count_tokens(record.get("tokens", 0))
            self.processes.publish(f"batch/{number}", json.dumps(record).encode())

    def show(self, run: Run) -> None:
        """The progress: the tokens of all processes."""
        if run.progress is not None:
            run.done = self.tokens if self.processes is None else self.processes.count_tokens(0)
            run.progress(run.done, run.total)

    def gather(self, count: int, run: Run) -> list[dict[str, Any]]:
        """The records of all batches, in their order; those of other processes are waited for."""
        for number in range(count):
            if self.records.get(number) is None:
                self.records[number] = json.loads(self.processes.fetch(f"batch/{number}"))
                self.show(run)
        return [self.records[number] for number in range(count)]


def _score(run: Run, route: forward.Route, batch: list[Context]) -> dict[str, Any]:
    """What there is to know of a batch, as JSON has it. Every float comes back from JSON as it was."""
    route.seconds, route.stats = 0.0, None
    contexts, positions, logprobs = [], [], []
    for context, measured in run.measurements(batch, [route], logprob_of_targets):
        check_finite(context, measured["logprob"])
        contexts.append([context.document, -math.fsum(measured["logprob"].tolist())])
        positions.append(context.positions)
        logprobs.append(measured["logprob"])
    return {
        "inputs": digest(batch),
        "tokens": sum(context.scored for context in batch),
        "contexts": contexts,
        "by_position": by_position(torch.cat(positions), {"nll": -torch.cat(logprobs)}),
        "seconds": route.seconds,
        "stats": route.stats,
    }


def _result_of(
    run: Run, route: forward.Route, records: list[dict[str, Any]], replay: ReplayConfig | None
) -> PerplexityResult:
    """The result of all batches. fsum rounds once, so it is the same in whichever order they were evaluated."""
    parts: dict[int, list[float]] = {index: [] for index in run.documents}
    positions: dict[int, list[dict[str, float]]] = {}
    stats: dict[str, float] = {}
    for record in records:
        for document, nll in record["contexts"]:
            if document in parts:
                parts[document].append(nll)
        for index, sums in record["by_position"].items():
            positions.setdefault(int(index), []).append(sums)
        for name, value in (record["stats"] or {}).items():
            stats[name] = stats.get(name, 0) + value
    of_kept = [document in parts for record in records for document, _ in record["contexts"]]
    run.contexts = sum(of_kept)
    times: dict[str, dict[int, float]] = {}  # of each run of each process
    for record in records:
        run_of = times.setdefault(record["run"], {})
        run_of[record["process"]] = run_of.get(record["process"], 0.0) + record["seconds"]
    route.seconds = sum(max(of_processes.values()) for of_processes in times.values())
    route.stats = stats or None
    # The sums by position are of whole batches: with contexts of a document that is left out they would not be those of
    # `tokens`.
    table = position_table(
        {
            index: {
                "tokens": sum(one["tokens"] for one in each),
                "nll": math.fsum(one["nll"] for one in each),
            }
            for index, each in positions.items()
            if all(of_kept)
        }
    )
    result = build_result(run, route, {index: math.fsum(each) for index, each in parts.items()}, replay)
    return replace(result, processes=max(len(of_processes) for of_processes in times.values()), by_position=table)


def _what_decides(run: Run, route: forward.Route, replay: ReplayConfig | None) -> dict[str, Any]:
    """All that the result depends on but the documents, for a folder of finished batches."""
    import transformers

    from hf_replayssm.versions import __version__

    config = run.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    settings = {name: value for name, value in vars(run.settings).items() if name != "device"}
    return plain(
        {
            **settings,
            "cache": route.name,
            "replay": replay.to_dict() if replay is not None else None,
            "streaming": run.look_ahead is not None,  # what is sorted at a time
            "model": type(run.model).__name__,
            "config": hashlib.sha256(json.dumps(plain(config), sort_keys=True).encode()).hexdigest()[:20],
            "weights": weights_digest(run.model),
            "device": run.settings.device.type,
            "versions": {
                "hf_replayssm": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
    )


def logprob_of_targets(logits: list[torch.Tensor], targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Natural log of the probability of each target: logits [(batch, T, vocab)], targets (batch, T)."""
    return {"logprob": forward.log_softmax(logits[0]).gather(-1, targets.unsqueeze(-1)).squeeze(-1)}


def build_result(
    run: Run, route: forward.Route, nll: dict[int, float], replay: ReplayConfig | None
) -> PerplexityResult:
    """The result of one route, from the negative log likelihood (nats) of each document."""
    # In the order of the documents and with an exact sum, so that the batch size leaves no trace here.
    scores = [
        DocumentScore(index, document.tokens, nll[index], document.words, document.bytes)
        for index, document in sorted(run.documents.items())
    ]
    total, tokens = math.fsum(score.nll for score in scores), sum(score.tokens for score in scores)
    words, size = word_and_byte_counts(run.documents.values())
    settings, model = run.settings, run.model
    return PerplexityResult(
        perplexity=exp(total / tokens),
        word_perplexity=exp(total / words) if words else None,
        bits_per_byte=total / (size * math.log(2)) if size else None,
        nll=total,
        tokens=tokens,
        words=words,
        bytes=size,
        documents=len(scores),
        skipped_documents=run.skipped.count,
        contexts=run.contexts,
        mode="full" if route.name == forward.NO_CACHE else settings.mode,
        window=None if route.name == forward.NO_CACHE else settings.window,
        cache=route.name,
        carry_state=settings.carry_state,
        max_length=settings.max_length,
        stride=settings.stride,
        batch_size=settings.batch_size,
        seconds=route.seconds,
        tokens_per_second=tokens / route.seconds if route.seconds > 0 else 0.0,
        model=getattr(model.config, "name_or_path", "") or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(settings.device),
        replay=replay.to_dict() if route.name == "replayssm" else None,
        cache_stats=route.stats,
        reduced_batch_size=run.batch_limit,
        per_document=scores,
    )


def replay_for(model, caches: list[Any], replay: Any) -> ReplayConfig | None:
    """Settings of the replay cache, checked; an error if some are given and no replay cache is asked for."""
    if any(cache == "replayssm" for cache in caches):
        return forward.replay_settings(model, replay)
    if replay:
        raise ValueError('Settings of the replay cache have an effect with cache="replayssm" only.')
    return None


def exp(value: float) -> float:
    """exp, infinite where it would overflow."""
    return math.exp(value) if value < 709 else math.inf


def plain(value: Any) -> Any:
    """As JSON takes it: dtypes as strings, infinities and NaN as null."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value).removeprefix("torch.")


def write_json(values: dict[str, Any], path: str | os.PathLike | None) -> str:
    text = json.dumps(plain(values), indent=2)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text
