"""Two caches over the same tokens, with paired statistics.

Greedy agreement is a weak measure in low precision (a percent of steps are exact ties), and a difference of two
perplexities hides what happened to the single token. So both caches see the same tokens in step, and every statistic is
taken per token between the two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import forward
from .engine import Progress, Run, Settings, by_position, check_finite, position_table
from .perplexity import PerplexityResult, build_result, replay_for, write_json


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The clusters of the standard error are documents, or blocks of this many tokens where there are few documents: an
# error estimated from a handful of clusters means little.
BLOCK_TOKENS = 64
MIN_DOCUMENTS = 10


@dataclass(frozen=True)
class ComparisonResult:
    """`other` against `reference` over the same scored tokens. Log probabilities are in nats.

    delta log p is log p(other) - log p(reference) of the token that came next: positive where the other is better.
    """

    reference: PerplexityResult
    other: PerplexityResult
    tokens: int
    delta_logprob: float  # mean over tokens
    delta_logprob_se: float | None  # standard error of that mean, from clusters (below); None with a single cluster
    delta_logprob_se_per_token: float | None  # the same as if tokens were independent, which they are not
    max_abs_delta_logprob: float
    kl: float  # mean over tokens of KL(reference || other), over the whole vocabulary
    max_kl: float
    argmax_agreement: float  # share of tokens at which both would be greedy with the same token
    argmax_disagreements: int
    relative_perplexity: float  # perplexity(other) / perplexity(reference) - 1
    cluster: str  # what the clusters of the standard error are: "document", or "block of 64 tokens" of a document
    clusters: int
    # Sums over the `tokens` with at least `start` and fewer than `stop` tokens before them in their context: `kl`,
    # `delta_logprob`, `abs_delta_logprob`, and `disagreements` of the greedy token. Where a cache drifts, these grow.
    by_position: list[dict[str, float]] = field(default_factory=list, repr=False)

    def to_dict(self, per_document: bool = False) -> dict[str, Any]:
        """As plain types, the two results nested."""
        values = dict(vars(self))
        values["reference"] = self.reference.to_dict(per_document)
        values["other"] = self.other.to_dict(per_document)
        return values

    def to_json(self, path: str | os.PathLike | None = None, per_document: bool = False) -> str:
        """As JSON text, also written to `path` if one is given."""
        return write_json(self.to_dict(per_document), path)


@torch.no_grad()
def compare_caches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[str | Sequence[int] | torch.Tensor],
    *,
    cache: str | Callable[[PreTrainedModel], Any] = "replayssm",
    reference: str | Callable[[PreTrainedModel], Any] = "dynamic",
    mode: str = "step",
    window: int = 8,
    batch_size: int = 8,
    carry_state: bool = False,
    max_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: str | torch.device | None = None,
    replay: Any = None,
    progress: Progress | None = None,
) -> ComparisonResult:
    """Evaluate `cache` against `reference` over the same tokens, both fed in step.

    Args:
        cache: "replayssm", "dynamic", or a function that takes the model and returns a fresh cache.
        reference: the same, or "none": one forward without a cache, the definition of the model's answers.
        mode: "step" or "window".

    The other arguments are those of `evaluate_perplexity`.

    Returns:
        ComparisonResult: both perplexities, mean delta log p with its paired standard error, KL(reference || cache)
        mean and max, argmax agreement, and the largest |delta log p|. The standard error is cluster robust, since
        neighbouring tokens err together: per document, or per block of 64 tokens where there are fewer than 10.

    Raises:
        ValueError: as `evaluate_perplexity`, and in mode "full", which has no cache to compare.
    """
    if mode == "full":
        raise ValueError('A comparison of caches goes through them: use mode "step" or "window".')
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
    if cache == forward.NO_CACHE:
        raise ValueError('cache must be a cache. To hold it against a forward without one, use reference="none".')
    caches = [reference, cache]
    settings_of_replay = replay_for(model, caches, replay)
    run = Run(model, tokenizer, documents, settings, progress)
    # Per document, its contexts' measurements by the position of the first token scored.
    measured: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    with forward.evaluation_mode(model), forward.replay_enabled(model, "replayssm" in caches):
        routes = [forward.make_route(model, one, settings_of_replay) for one in caches]
        for batch in run.batches():
            for context, values in run.measurements(batch, routes, _measure):
                check_finite(context, values["reference"])
                check_finite(context, values["other"])
                values["position"] = context.positions
                measured.setdefault(context.document, {})[context.start + context.first_scored] = values

    def tokens_of(name: str, index: int) -> torch.Tensor:
        parts = measured[index]
        return torch.cat([parts[start][name] for start in sorted(parts)])

    order = sorted(measured)
    positions = torch.cat([tokens_of("position", index) for index in order])
    results = []
    for route, name in zip(routes, ("reference", "other"), strict=True):
        nll = {index: -math.fsum(tokens_of(name, index).tolist()) for index in order}
        result = build_result(run, route, nll, settings_of_replay)
        lost = {"nll": -torch.cat([tokens_of(name, index) for index in order])}
        results.append(replace(result, by_position=position_table(by_position(positions, lost))))
    deltas = [tokens_of("other", index) - tokens_of("reference", index) for index in order]
    if len(deltas) >= MIN_DOCUMENTS:
        cluster, clusters = "document", deltas
    else:
        cluster, clusters = f"block of {BLOCK_TOKENS} tokens", [b for d in deltas for b in d.split(BLOCK_TOKENS)]
    delta = torch.cat(deltas)
    kl = torch.cat([tokens_of("kl", index) for index in order])
    agree = torch.cat([tokens_of("agree", index) for index in order])
    mean = math.fsum(delta.tolist()) / len(delta)
    return ComparisonResult(
        reference=results[0],
        other=results[1],
        tokens=len(delta),
        delta_logprob=mean,
        delta_logprob_se=cluster_standard_error(clusters, mean),
        delta_logprob_se_per_token=cluster_standard_error(list(delta.split(1)), mean),
        max_abs_delta_logprob=delta.abs().max().item(),
        kl=math.fsum(kl.tolist()) / len(kl),
        max_kl=kl.max().item(),
        argmax_agreement=agree.mean().item(),
        argmax_disagreements=int((agree == 0).sum()),
        relative_perplexity=math.expm1(min(-mean, 709.0)),
        cluster=cluster,
        clusters=len(clusters),
        by_position=position_table(
            by_position(
                positions,
                {"kl": kl, "delta_logprob": delta, "abs_delta_logprob": delta.abs(), "disagreements": 1 - agree},
            )
        ),
    )


def cluster_standard_error(clusters: list[torch.Tensor], mean: float) -> float | None:
    """Standard error of the mean over all tokens, when the clusters (each (tokens,)) are independent of one another.

    sqrt(G / (G - 1) * sum_g (sum_{t in g} (d_t - mean))^2) / N, for G clusters and N tokens; with clusters of one token
    this is the usual s / sqrt(N).
    """
    count = len(clusters)
    if count < 2:
        return None
    sums = torch.stack([(cluster - mean).sum() for cluster in clusters])
    tokens = sum(len(cluster) for cluster in clusters)
    return math.sqrt(count / (count - 1) * sums.square().sum().item()) / tokens


def _measure(logits: list[torch.Tensor], targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per token, from the two logits (batch, T, vocab) and the targets (batch, T): (batch, T) each."""
    reference, other = (forward.log_softmax(one) for one in logits)
    gap = torch.where(reference.isneginf(), torch.zeros_like(reference), reference - other)  # 0 * inf is no KL
    return {
        "reference": reference.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        "other": other.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        "kl": (reference.exp() * gap).sum(-1).clamp(min=0.0),  # below 0 by rounding only
        "agree": (reference.argmax(-1) == other.argmax(-1)).to(reference.dtype),
    }
