"""Perplexity of a causal language model, teacher-forced through its cache."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import forward
from .engine import Progress, Run, Settings, check_finite, word_and_byte_counts


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
        progress: called after each forward with the tokens scored so far and their number in all (None if unknown).

    Returns:
        PerplexityResult: perplexity per token, per word, bits per byte, the counts, and the time.

    Raises:
        ValueError: an argument out of range, nothing to score, a tokenizer that does not fit the model, a model that
            is no causal language model, log probabilities that are not finite. Unsupported models raise from
            `hf_replayssm.enable` when `cache="replayssm"`.
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
    run = Run(model, tokenizer, documents, settings, progress)
    sums: dict[int, list[float]] = {}
    with forward.evaluation_mode(model), forward.replay_enabled(model, cache == "replayssm"):
        route = forward.make_route(model, cache, settings_of_replay)
        for context, measured in run.measurements([route], logprob_of_targets):
            check_finite(context, measured["logprob"])
            sums.setdefault(context.document, []).append(-math.fsum(measured["logprob"].tolist()))
    return build_result(run, route, {index: math.fsum(parts) for index, parts in sums.items()}, settings_of_replay)


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
