"""
`speculative_generate`: speculative decoding of a whole batch, which `generate` has for one row only.

A *draft* proposes k tokens for each row, the *target* scores them in one forward, and each row keeps its accepted
drafts and one token of the target's own. One round, top to bottom, is `_Speculation._round`:

    draft       the draft model runs k small forwards, or each row looks up its last tokens in its own text
    verify      one forward of the target over k + 1 columns: the newest token of each row and its drafts
    accept      for all rows at once: the drafts up to the first that the target refuses, and the token after them
    roll back   both caches drop each row's rejected columns; the one transfer to the host tells them how many

The tokens of all rows are kept on the host: one small transfer per round takes to the device what the models have not
seen, one brings back what was found, and between them the host waits for nothing.

Between rounds the target's cache has seen all tokens of a row but the newest, the draft's cache all but the newest two
(it never saw its own last proposal). So each round adds k + 1 columns to both, and both drop the same number of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .cache import RIGHT_PADDING, ReplayCache, ReplayStats
from .config import ReplayConfig
from .families import FAMILIES, signature, supported_families
from .integration import (
    REPLAY_IMPLEMENTATIONS,
    is_enabled,
    keep_static_cache,
    lend_static_cache,
    refuse_short_static_cache,
)
from .positions import upload
from .static import StaticReplayCache


NUM_ASSISTANT_TOKENS = 5
MAX_MATCHING_NGRAM_SIZE = 2

# Finished rows leave the caches when they are this share of the rows in them. Leaving copies the rows that stay, so
# with rows that finish one by one all copies together are at most 8 times the first batch; a carried row costs no more
# than an eighth of a round.
LEAVING_SHARE = 1 / 8

# What `generate` serves and a batch of drafts does not, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "token_healing": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, *REPLAY_IMPLEMENTATIONS),
}

# Processors that look at the scores of a token alone, not at the tokens before it: one call serves a whole window.
MEMORYLESS = {
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
}


@dataclass(frozen=True)
class SpeculationStatistics:
    """
    What speculation did. Tuples `..._per_row` have an entry for each row of the output, `..._per_round` for each round.

    Attributes:
        rounds: draft, verify, accept, roll back.
        new_tokens_per_row: tokens in the output, without the prompt and the padding.
        drafted_per_row: drafts that the target verified. Not counted are those that a row had no room for, and the
            columns of a row for which prompt lookup found fewer drafts than for another.
        accepted_per_row: drafts that are in the output.
        drafted_per_round, accepted_per_round: the same, over all rows; empty in [`from_generate`].
        target_forwards: of the target, for the prompt too. The batch goes through each together.
        draft_forwards: of the draft model, for the prompt too; 0 with prompt lookup; None in [`from_generate`].
        seconds: from the first forward to the last token, prompt included.
    """

    rounds: int
    new_tokens_per_row: tuple[int, ...]
    drafted_per_row: tuple[int, ...]
    accepted_per_row: tuple[int, ...]
    drafted_per_round: tuple[int, ...]
    accepted_per_round: tuple[int, ...]
    target_forwards: int
    draft_forwards: int | None
    seconds: float

    @classmethod
    def from_generate(cls, stats: ReplayStats, new_tokens: int, seconds: float) -> SpeculationStatistics:
        """
        The same of one call of `generate` with drafts, from what its (fresh) cache has counted: each round is one
        forward, which yields a token of the target's own and the accepted drafts, and a crop of the others.

        Args:
            stats: `output.cache.stats`, with `return_dict_in_generate=True`.
            new_tokens: of the one row that `generate` takes with drafts.
            seconds: of the call.
        """
        rounds, accepted = stats.forwards, max(0, new_tokens - stats.forwards)
        return cls(
            rounds=rounds,
            new_tokens_per_row=(new_tokens,),
            drafted_per_row=(accepted + stats.tokens_cropped,),
            accepted_per_row=(accepted,),
            drafted_per_round=(),
            accepted_per_round=(),
            target_forwards=rounds,
            draft_forwards=None,
            seconds=seconds,
        )

    @property
    def new_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.new_tokens_per_row)

    @property
    def drafted(self) -> int:
        """Verified drafts of all rows."""
        return sum(self.drafted_per_row)

    @property
    def accepted(self) -> int:
        """Accepted drafts of all rows."""
        return sum(self.accepted_per_row)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per verified one, 0 to 1; 0 if there were none."""
        return self.accepted / max(1, self.drafted)

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per round, of all rows together."""
        return self.accepted / max(1, self.rounds)

    @property
    def forwards_saved(self) -> int:
        """Fewer forwards of the target than `generate` without drafts takes: one for each token of the longest row."""
        return max(self.new_tokens_per_row) - self.target_forwards

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second."""
        return self.new_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Fields and totals, as JSON can hold them."""
        totals = ("new_tokens", "drafted", "accepted", "acceptance_rate", "mean_accepted")
        totals += ("forwards_saved", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}


@dataclass
class SpeculativeOutput(ModelOutput):
    """
    Output of [`speculative_generate`] with `return_dict_in_generate=True`.

    Args:
        sequences (`torch.LongTensor` of shape `(batch, columns)`): prompts and new tokens, padded on the right.
        statistics ([`SpeculationStatistics`]): what speculation did.
        cache ([`ReplayCache`]): the target's. A `cache=` that was passed in has seen each row but its newest token; in
            one made here only the rows that ran longest may be left.
    """

    sequences: torch.LongTensor | None = None
    statistics: SpeculationStatistics | None = None
    cache: ReplayCache | None = None


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    assistant_model: PreTrainedModel | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    cache: ReplayCache | None = None,
    **kwargs: Any,
) -> torch.LongTensor | SpeculativeOutput:
    """
    Speculative decoding of a batch. Greedy decoding gives the tokens of `model.generate` without drafts; sampling draws
    from the same distribution, by the rule of Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding" (2023), but not the same tokens for a seed.

    Args:
        model: the target, with replay enabled.
        input_ids (batch, columns) int64: prompts, padded on the left.
        attention_mask (batch, columns): 0 where `input_ids` is padding. Left out, it is told by `pad_token_id` as in
            `generate`.
        assistant_model: the draft: a model of a supported family (enabled here if it is not), or one of attention
            layers only, with the target's vocabulary.
        generation_config: as for `generate`.
        logits_processor: as for `generate`. A processor is called with rows of equal length at a time, which may be
            any rows of the batch, for rejected tokens too; it must not remember anything of a row.
        stopping_criteria: as for `generate`. They are called for each token of the output and the rows that got
            it, with `scores=None`; a row ends at the first token for which one holds.
        streamer: for a batch of one row. It gets the tokens of a round at once.
        tokenizer: for `stop_strings`.
        cache: a [`ReplayCache`] that has seen the first columns of `input_ids`; at least the last must be new to it.
            (A [`StaticReplayCache`] needs room for `max_length` tokens.)
        **kwargs: fields of a `GenerationConfig`, as `generate` takes them: `max_new_tokens`, `max_length`, `do_sample`,
            `temperature`, `eos_token_id`, `num_return_sequences`, ... Of speculation:

            - `num_assistant_tokens` (5, unless the target's or the assistant's generation config says more): drafts
              per round, k.
            - `num_assistant_tokens_schedule`: `"constant"`, or `"heuristic"` (and `"heuristic_transient"`, the same
              here): 2 more after a round in which at least half of the rows accepted all drafts, else 1 fewer.
            - `prompt_lookup_num_tokens`: drafts per round from the row's own tokens, in place of an assistant: what
              followed the earliest of the longest matches, of up to `max_matching_ngram_size` (2) tokens.
            - `cache_implementation="replayssm_static"`: static caches for the target and a draft that replays, whose
              forwards are compiled or captured as in `generate`. All windows have one length then (schedules do not
              apply), and finished rows stay in the caches to the end.

    Returns:
        (batch, columns + new tokens) int64 on the device of `input_ids`: prompt and new tokens of each row, then
        `pad_token_id`. With `return_dict_in_generate=True` a [`SpeculativeOutput`], which has the statistics too.

    Raises:
        ValueError: what cannot be served, with the remedy, before anything is changed.

    Example:

    ```python
    output = hf_replayssm.speculative_generate(
        model, **tokenizer(prompts, padding=True, return_tensors="pt"), assistant_model=draft, max_new_tokens=200,
        return_dict_in_generate=True,
    )
    output.statistics.acceptance_rate, output.statistics.tokens_per_second
    ```
    """
    _check_arguments(model, input_ids, attention_mask, kwargs)
    drafts = _drafts_per_round(model, assistant_model, generation_config, kwargs)
    ids = input_ids.to(model.device)
    config, mask = _prepare(model, ids, attention_mask, generation_config, assistant_model, kwargs)
    ids = ids.repeat_interleave(config.num_return_sequences, dim=0)
    mask = None if mask is None else mask.repeat_interleave(config.num_return_sequences, dim=0)
    if streamer is not None and len(ids) > 1:
        raise ValueError(
            f"A streamer shows one row and this is a batch of {len(ids)}: leave `streamer` out, or call "
            "`speculative_generate` row by row."
        )
    criteria = _own_criteria(model, config, stopping_criteria, tokenizer)
    if criteria and len(ids) > 1 and config._pad_token_tensor is None:
        raise ValueError("Rows that a stopping criterion ends early are padded: set `pad_token_id`.")
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=None,
        logits_processor=LogitsProcessorList(logits_processor or []),
        device=ids.device,
        model_kwargs={"attention_mask": None if mask is None else mask.to(ids.device)},
    )
    given = cache is not None
    if cache is None:
        cache = _new_cache(model, model._replay_settings(config), config, drafts, len(ids))
    else:
        _check_cache(cache, model, ids, mask)
        refuse_short_static_cache(cache, config.max_length - 1)
    if assistant_model is not None:
        model._validate_assistant(config, assistant_model)  # enables it: the last thing that can be refused

    cache.max_window = max(cache.max_window, drafts + 1)
    recorded = cache.record_past
    draft = None if assistant_model is None else _draft_decoder(assistant_model, config, drafts, ids)
    speculation = _Speculation(
        target=_ReplayDecoder(model, cache, config, ids.device),
        draft=draft,
        ids=ids,
        mask=mask,
        config=config,
        drafts=drafts,
        processors=processors,
        criteria=criteria,
        streamer=streamer,
        rows_may_leave=not given,
    )
    try:
        sequences, statistics = speculation.run()
    finally:
        cache.record_past = recorded
    if isinstance(cache, StaticReplayCache) and not given and not config.return_dict_in_generate:
        keep_static_cache(model, cache)
    if draft is not None and isinstance(draft.cache, StaticReplayCache):
        keep_static_cache(assistant_model, draft.cache)
    sequences = sequences.to(input_ids.device)
    return SpeculativeOutput(sequences, statistics, cache) if config.return_dict_in_generate else sequences


# Acceptance.


def accept_greedy(
    scores: torch.Tensor, drafts: torch.Tensor, available: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Accepts the drafts that are the target's best tokens, up to the first that is not.

    Args:
        scores (b, k + 1, vocab): the target's, at each draft and after the last.
        drafts (b, k) int64.
        available (b,) int64: how many of a row's drafts there are; the others count as rejected.

    Returns:
        accepted (b,) int64, 0 to k, and the token (b,) int64 that the target puts after them.
    """
    best = scores.argmax(-1)
    accepted = _run_length(best[:, :-1] == drafts, available)
    return accepted, _at(best, accepted)


def accept_sampled(
    target: torch.Tensor, proposal: torch.Tensor, drafts: torch.Tensor, available: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Speculative sampling (Leviathan et al. 2023, algorithm 1): a draft x is accepted with probability min(1, p(x) /
    q(x)); after the first that is not, the next token is drawn from the [`residual`] of p and q; after the last, from
    p. The tokens are then distributed as if each had been drawn from p.

    Args:
        target (b, k + 1, vocab): p, the target's probabilities at each draft and after the last.
        proposal (b, k, vocab): q, the probabilities that the drafts were drawn from.
        drafts (b, k) int64: draws from q.
        available (b,) int64: how many of a row's drafts there are; the others count as rejected, but the token in
            place of the first of them is drawn from p: nothing was drawn from q there.

    Returns:
        accepted (b,) int64, 0 to k, and the token (b,) int64 after them.
    """
    p, q = (x.gather(-1, drafts[..., None]).squeeze(-1) for x in (target[:, :-1], proposal))
    accepted = _run_length(torch.rand_like(p) * q < p, available)
    proposed = _at(F.pad(proposal, (0, 0, 0, 1)), accepted).where((accepted < available)[:, None], 0.0)
    return accepted, draw(residual(_at(target, accepted), proposed))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    max(0, p - q) (b, vocab), not normalised: what the target has beyond the draft. It is p where q is 0; where p and q
    are the same up to rounding, so that nothing is left, it is p as well.
    """
    rest = (p - q).clamp(min=0)
    return rest.where(rest.sum(-1, keepdim=True) > 0, p)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """
    One index (b,) from each row of `weights` (b, vocab) >= 0, with probability in proportion: the first of independent
    exponential waiting times with these rates. (`torch.multinomial` waits for the device to check its input.)
    """
    waiting = torch.empty_like(weights).exponential_()
    return (weights / waiting).argmax(-1)


def _run_length(accept: torch.Tensor, available: torch.Tensor) -> torch.Tensor:
    """(b, k) bool -> (b,): how many of the first `available` are True before the first that is not."""
    there = torch.arange(accept.shape[1], device=accept.device) < available[:, None]
    return (accept & there).long().cumprod(1).sum(1)


def _at(tensor: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """(b, t, ...) -> (b, ...) at each row's position (b,)."""
    return tensor[torch.arange(len(tensor), device=tensor.device), position]


class PromptLookup:
    """
    Prompt lookup in one row: what followed in its own tokens where they were as its newest ones are. It remembers where
    every run of up to `ngram` tokens ended first, so that a round costs as much as its new tokens, however long the
    text is.

    Args:
        ngram: the longest match that is looked for.
    """

    def __init__(self, ngram: int):
        self.ngram = ngram
        self.tokens: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # where the tokens behind the earliest such run begin

    def extend(self, tokens: list[int]) -> None:
        """Takes in the row's next tokens."""
        for token in tokens:
            # Runs that end in the newest token are not in yet: it must not be found as its own match.
            end = len(self.tokens)
            for size in range(1, min(self.ngram, end) + 1):
                self.behind.setdefault(tuple(self.tokens[end - size :]), end)
            self.tokens.append(token)

    def drafts(self, count: int) -> list[int]:
        """
        Up to `count` tokens, as many as there are. The longest match counts; of several the earliest, of which most
        tokens follow.
        """
        for size in range(min(self.ngram, len(self.tokens)), 0, -1):
            begin = self.behind.get(tuple(self.tokens[-size:]))
            if begin is not None:
                return self.tokens[begin : begin + count]
        return []


# Models with their caches.


class _ReplayDecoder:
    """A model of a supported family and the ReplayCache that it decodes through."""

    def __init__(self, model: PreTrainedModel, cache: Any, config: GenerationConfig, device: torch.device):
        self.model, self.cache, self.device = model, cache, device
        self.forwards = 0
        self.is_static = isinstance(cache, StaticReplayCache)
        # As `generate` does it: a static cache's forwards are compiled or captured where they can be, but for prompts.
        self._decode: Any = model
        if self.is_static and model._valid_auto_compile_criteria({"cache": cache}, config):
            self._decode = model.get_compiled_call(config.compile_config)
        self._keeps_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor | None, chunk: int | None) -> None:
        """Prompt tokens (b, columns), of which none will be rolled back, so they go straight into the state."""
        chunk = chunk or ids.shape[1]
        for start in range(0, ids.shape[1], chunk):
            columns = slice(start, start + chunk)
            self.forward(ids[:, columns], None if mask is None else mask[:, columns], last_only=True, call=self.model)

    def start_recording(self) -> None:
        """From here on tokens are rolled back."""
        self.cache.record_past = True

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, last_only: bool = False, call: Any = None
    ) -> torch.Tensor:
        """
        New tokens (b, t), and which of them are no padding (CPU) -> logits (b, t or 1, vocab) float32; `call` runs the
        model.
        """
        inputs = self._inputs(ids.shape, mask) | (self._keeps_last if last_only else {})
        if call is None:
            call = self._decode if mask is None and not (self.is_static and self.cache.is_fresh) else self.model
        output = call(input_ids=ids.to(self.model.device), cache=self.cache, use_cache=True, **inputs)
        self.forwards += 1
        logits = output.logits[:, -1:] if last_only else output.logits
        return logits.to(self.device, torch.float32)

    def _inputs(self, shape: torch.Size, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        # An enabled model knows the rest from its cache.
        return {} if mask is None else {"attention_mask": mask.to(self.model.device, torch.long)}

    def crop(self, counts: torch.Tensor) -> None:
        """Drops each row's newest -counts (b,) columns."""
        # A static cache on another device takes them there, and nobody waits for it.
        self.cache.crop(upload(counts, self.cache.seen.device) if self.is_static else counts)

    def keep_rows(self, index: torch.Tensor) -> None:
        self.cache.batch_select_indices(index)


class _AttentionDecoder(_ReplayDecoder):
    """
    A draft model of attention layers only. transformers' cache has one length for all rows, so after a round the keys
    and values of each row are moved to the right end: to the model it is a batch padded on the left like any other.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, device: torch.device):
        # Without a config every layer keeps all columns. The model masks what a sliding window does not see.
        super().__init__(model, DynamicCache(), config, device)
        self.columns = 0
        self.mask: torch.Tensor | None = None  # (b, columns) int64, on the model's device: which are tokens; None: all
        self.holes: torch.Tensor | None = None  # (b,) CPU: columns on the left that are there for longer rows
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def start_recording(self) -> None:
        pass  # keys and values are all kept

    def _inputs(self, shape: torch.Size, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if self.holes is None:
            self.holes = torch.zeros(shape[0], dtype=torch.long, device="cpu")
        if self.mask is None and mask is not None and not bool(mask.all()):
            self.mask = self._all_tokens(self.columns)
        self.columns += shape[1]
        # Without padding no mask is given: transformers would wait for the device to see whether it is all ones.
        if self.mask is None:
            return {}
        new = self._all_tokens(shape[1]) if mask is None else upload(mask.long(), self.model.device)
        self.mask = torch.cat([self.mask, new], dim=1)
        inputs = {"attention_mask": self.mask}
        if self._takes_positions:
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -shape[1] :]
        return inputs

    def _all_tokens(self, columns: int) -> torch.Tensor:
        return torch.ones((len(self.holes), columns), dtype=torch.long, device=self.model.device)

    def crop(self, counts: torch.Tensor) -> None:
        end = self.columns + counts
        lengths = end - self.holes
        self.columns = columns = int(lengths.max())
        self.holes = columns - lengths
        shift = end - columns
        if not bool(shift.any()):  # all rows end alike (one row always does): nothing moves
            self.mask = None if self.mask is None else self.mask[:, :columns]
            for layer in self._layers():
                layer.keys, layer.values = layer.keys[..., :columns, :], layer.values[..., :columns, :]
            return
        source = torch.arange(columns, device="cpu") + shift[:, None]
        source = upload(source, self.model.device)
        there, source = source >= 0, source.clamp(min=0)  # (b, columns)
        # What one row takes back may be there for another: every column up to the end of the forward counts here.
        mask = self._all_tokens(int(end.max())) if self.mask is None else self.mask
        self.mask = mask.gather(1, source).where(there, 0)
        source = source[:, None, :, None]
        for layer in self._layers():
            layer.keys, layer.values = (
                states.gather(-2, source.to(states.device).expand(-1, states.shape[1], -1, states.shape[-1]))
                for states in (layer.keys, layer.values)
            )

    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if layer.is_initialized]

    def keep_rows(self, index: torch.Tensor) -> None:
        self.holes = self.holes[index]
        index = upload(index, self.model.device)
        self.mask = None if self.mask is None else self.mask[index]
        # (The cache's own `batch_select_indices` leaves layers without a column as they are.)
        for layer in self._layers():
            layer.keys, layer.values = (states[index.to(states.device)] for states in (layer.keys, layer.values))


def _new_cache(
    model: PreTrainedModel, settings: ReplayConfig, config: GenerationConfig, drafts: int, rows: int
) -> ReplayCache:
    settings = settings.replace(max_window=drafts + 1)
    if config.cache_implementation != "replayssm_static":
        return ReplayCache(config=model.config, replay_config=settings)
    length = max(config.max_length - 1, config.max_cache_len or 1)
    cache = lend_static_cache(model, settings, rows, length, recording=True)
    cache.record_past = True  # from the start: its memory is laid out once
    return cache


def _draft_decoder(model: PreTrainedModel, config: GenerationConfig, drafts: int, ids: torch.Tensor) -> _ReplayDecoder:
    if not is_enabled(model):
        return _AttentionDecoder(model, config, ids.device)
    cache_config = config.cache_config or {}
    captures = cache_config.capture if isinstance(cache_config, ReplayConfig) else cache_config.get("capture")
    settings = model._replay_config if captures is None else model._replay_config.replace(capture=captures)
    return _ReplayDecoder(model, _new_cache(model, settings, config, drafts, len(ids)), config, ids.device)


# The loop.


class _Speculation:
    """
    The state of one call. Tokens and counts are on the CPU: `sequences` (B, max_length + 1) holds all rows of the
    output, `rows` says which of them the caches hold; by these the tensors of a round, (b, ...), are ordered.
    """

    def __init__(
        self,
        target: _ReplayDecoder,
        draft: _ReplayDecoder | None,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        config: GenerationConfig,
        drafts: int,
        processors: LogitsProcessorList,
        criteria: list[StoppingCriteria],
        streamer: BaseStreamer | None,
        rows_may_leave: bool,
    ):
        self.target, self.draft, self.config = target, draft, config
        self.drafts, self.processors, self.criteria, self.streamer = drafts, processors, criteria, streamer
        self.memoryless = all(type(processor) in MEMORYLESS for processor in processors)
        # A static cache keeps its rows and its windows as they are, for which its forwards are compiled.
        self.fixed = target.is_static
        self.rows_may_leave = rows_may_leave and not self.fixed
        self.device, self.mask = ids.device, mask
        batch, self.prompt = ids.shape
        # The last column takes drafts that have no room, so that a window has the same width for every row.
        self.sequences = F.pad(ids.cpu(), (0, config.max_length + 1 - self.prompt))
        # Processors and criteria of the caller's choice look at tokens on the device. The loop itself does not.
        self.mirror = None if self.memoryless and not criteria else upload(self.sequences, self.device)
        self.end_tokens = None if config._eos_token_tensor is None else config._eos_token_tensor.cpu()
        first = torch.zeros(batch, dtype=torch.long, device="cpu") if mask is None else mask.long().argmax(1)
        self.lookups = [PromptLookup(config.max_matching_ngram_size or MAX_MATCHING_NGRAM_SIZE) for _ in range(batch)]
        if draft is None:
            for lookup, tokens, begin in zip(self.lookups, self.sequences[:, : self.prompt].tolist(), first.tolist()):
                lookup.extend(tokens[begin:])
        self.lengths = torch.full((batch,), self.prompt, device="cpu")  # tokens of each row, left padding included
        self.finished = torch.zeros(batch, dtype=torch.bool, device="cpu")
        self._set_rows(torch.arange(batch, device="cpu"))
        self.drafted_per_row, self.accepted_per_row = (torch.zeros_like(self.lengths) for _ in range(2))
        self.drafted_per_round: list[int] = []
        self.accepted_per_round: list[int] = []

    def run(self) -> tuple[torch.Tensor, SpeculationStatistics]:
        begin = time.perf_counter()
        if self.streamer is not None:
            self.streamer.put(self.sequences[:, : self.prompt])
        self._prefill(self.target, self.prompt - 1)
        if self.draft is not None:
            self._prefill(self.draft, self.prompt - 2)
        with contextlib.ExitStack() as stack:
            for decoder in (self.target, self.draft):
                if decoder is not None:  # as `generate` does it: mixtures of experts
                    stack.enter_context(decoder.model._optimize_model_for_decode())
            while not bool(self.finished.all()):
                self._round()
                self._let_rows_leave()
        if self.streamer is not None:
            self.streamer.end()
        return self._padded(), self._statistics(time.perf_counter() - begin)

    def _prefill(self, decoder: _ReplayDecoder, columns: int) -> None:
        """The prompt's first `columns`, of which the cache may have seen some."""
        seen = int(decoder.cache.get_seq_length())
        if columns > seen:
            mask = None if self.mask is None else self.mask[:, seen:columns]
            ids = upload(self.sequences[:, seen:columns], self.device)
            decoder.prefill(ids, mask, self.config.prefill_chunk_size)
        decoder.start_recording()

    def _round(self) -> None:
        begin = self.lengths[self.rows]  # (b,) where each row's next token goes
        room = self.config.max_length - begin
        unfinished = ~self.finished[self.rows]
        k = self.drafts if self.fixed else min(self.drafts, int(room[unfinished].max()) - 1)

        # Draft. Verify: the newest token and the drafts.
        window, available, proposal = self._draft(k, begin, room, unfinished)
        drafts, k = window[:, 1:], window.shape[1] - 1
        self._show(drafts, begin)
        scores = self._scores(self.target.forward(window))

        # Accept.
        if self.config.do_sample:
            accepted, token = accept_sampled(scores.softmax(-1), proposal, drafts, available)
        else:
            accepted, token = accept_greedy(scores, drafts, available)
        # The one transfer to the host.
        found = torch.cat([available[:, None], accepted[:, None], token[:, None], drafts], dim=1).cpu()
        available, accepted, drafts = found[:, 0], found[:, 1], found[:, 3:]
        tokens = F.pad(drafts, (0, 1)).scatter(1, accepted[:, None], found[:, 2:3])  # (b, k + 1)
        self.sequences[self.rows[:, None], self._columns(begin, k + 1)] = tokens
        self._show(tokens, begin)
        kept, ended = self._until_end_token(tokens, accepted)
        kept, accepted, available = (x.where(unfinished, 0) for x in (kept, accepted, available))
        if self.criteria:
            kept, stopped = self._until_criterion(kept)
            ended = ended | stopped

        # Roll back. (A finished row that is still in the caches stays where it is.)
        rejected = kept - (k + 1)
        self.target.crop(rejected)
        if self.draft is not None and k > 0:
            self.draft.crop(rejected)

        if self.streamer is not None:
            self.streamer.put(tokens[0, : int(kept)])
        if self.draft is None:
            for row, new, count in zip(self.rows.tolist(), tokens.tolist(), kept.tolist()):
                self.lookups[row].extend(new[:count])
        self._advance(kept, ended, accepted.minimum(kept), available)

    def _draft(
        self, k: int, begin: torch.Tensor, room: torch.Tensor, unfinished: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        The window: each row's newest token and its drafts, (b, k + 1) or fewer columns; how many (b,) of the drafts
        there are; and the probabilities (b, drafts, vocab) that they were drawn from (None when greedy). All on the
        device.
        """
        rows, room = self.rows[:, None], (room - 1)[:, None]
        if self.draft is not None and k > 0:
            # The newest two tokens are new to the draft model. Of the first round's, one may be padding, or not there.
            new = min(2, int(self.lengths.min()))
            ids = self.sequences[rows, begin[:, None] + torch.arange(-new, 0, device="cpu")]
            given = upload(torch.cat([room.clamp(max=k), ids], dim=1), self.device)
            drafts, proposal = self._draft_by_model(k, given[:, 1:], begin)
            return torch.cat([given[:, -1:], drafts], dim=1), given[:, 0], proposal
        found = [[] for _ in self.rows]
        if self.draft is None:
            found = [
                self.lookups[row].drafts(k) if wanted else []
                for row, wanted in zip(self.rows.tolist(), unfinished.tolist())
            ]
        if not self.fixed:
            k = max(len(tokens) for tokens in found)  # no columns for drafts that no row has
        drafts = torch.tensor([tokens + [0] * (k - len(tokens)) for tokens in found], device="cpu").view(len(found), k)
        available = torch.tensor([[len(tokens)] for tokens in found], device="cpu").minimum(room)
        newest = self.sequences[rows, begin[:, None] - 1]
        given = upload(torch.cat([available, newest, drafts.long()], dim=1), self.device)
        proposal = None
        if self.config.do_sample:  # a lookup proposes its token for certain
            vocab = self.target.model.config.get_text_config(decoder=True).vocab_size
            proposal = F.one_hot(given[:, 2:], vocab).float()
        return given[:, 1:], given[:, 0], proposal

    def _draft_by_model(
        self, k: int, ids: torch.Tensor, begin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts (b, k) behind the tokens `ids` (b, 1 or 2), and the probabilities (b, k, vocab) or None."""
        first_round = not self.drafted_per_round
        mask = self.mask[:, -ids.shape[1] :] if first_round and self.mask is not None else None
        drafts, proposals = [], []
        for number in range(k):
            scores = self._scores(self.draft.forward(ids, mask, last_only=True), number)[:, 0]
            if self.config.do_sample:
                proposals.append(scores.softmax(-1))
                drafts.append(draw(proposals[-1]))
            else:
                drafts.append(scores.argmax(-1))
            ids, mask = drafts[-1][:, None], None
            self._show(ids, begin + number)
        proposal = torch.stack(proposals, 1) if self.config.do_sample else None
        return torch.stack(drafts, 1), proposal

    def _scores(self, logits: torch.Tensor, drafted: int = 0) -> torch.Tensor:
        """
        What `generate` takes the best of, or samples from: logits (b, t, vocab) after its processors. Position i of a
        row comes after its tokens and its first `drafted + i` drafts.
        """
        if not self.processors:
            return logits
        if self.memoryless:
            flat = logits.flatten(0, 1)
            no_tokens = torch.empty((len(flat), 0), dtype=torch.long, device=self.device)
            return self.processors(no_tokens, flat).view_as(logits)
        # Processors take rows of one length, as they are in `generate`.
        scores = logits.clone()
        before = self.lengths[self.rows, None] + drafted + torch.arange(logits.shape[1], device="cpu")
        before = before.where(~self.finished[self.rows, None], self.config.max_length)
        for length in before[before < self.config.max_length].unique().tolist():
            row, position = upload((before == length).nonzero(), self.device).unbind(1)
            ids, processors = self.mirror[self.rows_on_device[row], :length], self._processors_of(row)
            scores[row, position] = processors(ids, logits[row, position])
        return scores

    def _processors_of(self, row: torch.Tensor) -> LogitsProcessorList:
        """The processors for some rows: the repetition penalty knows of each row how long its padding is."""
        processors = LogitsProcessorList()
        for processor in self.processors:
            padding = getattr(processor, "prompt_ignore_length", None)
            if isinstance(padding, torch.Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = padding.to(self.device)[self.rows_on_device[row]]
            processors.append(processor)
        return processors

    # Ends.

    def _until_end_token(self, tokens: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many (b,) of the accepted tokens and the one after them go into the output, and which rows end there."""
        if self.end_tokens is None:
            return accepted + 1, torch.zeros_like(accepted, dtype=torch.bool)
        ends = torch.isin(tokens, self.end_tokens) & (torch.arange(tokens.shape[1], device="cpu") <= accepted[:, None])
        ended = ends.any(1)
        return (ends.long().argmax(1) + 1).where(ended, accepted + 1), ended

    def _until_criterion(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for the caller's criteria, which are asked as in `generate`: token after token."""
        begin, kept = self.lengths[self.rows], kept.clone()
        stopped = torch.zeros_like(kept, dtype=torch.bool)
        for length in range(int(begin.min()) + 1, int((begin + kept).max()) + 1):
            asked = ((begin < length) & (length <= begin + kept)).nonzero().squeeze(1)
            if len(asked) > 0:
                ids = self.mirror[upload(self.rows[asked], self.device), :length]
                ending = asked[StoppingCriteriaList(self.criteria)(ids, None).cpu()]
                kept[ending], stopped[ending] = length - begin[ending], True
        return kept, stopped

    def _advance(self, kept: torch.Tensor, ended: torch.Tensor, accepted: torch.Tensor, drafted: torch.Tensor) -> None:
        """Counts the round, and sets the length of the next drafts."""
        unfinished = ~self.finished[self.rows]
        self.lengths[self.rows] += kept
        self.finished[self.rows] |= ended | (self.lengths[self.rows] >= self.config.max_length)
        self.drafted_per_row[self.rows] += drafted
        self.accepted_per_row[self.rows] += accepted
        self.drafted_per_round.append(int(drafted.sum()))
        self.accepted_per_round.append(int(accepted.sum()))
        if self.draft is not None and not self.fixed and self.config.num_assistant_tokens_schedule != "constant":
            full = (accepted == drafted)[unfinished].float().mean() >= 0.5
            self.drafts = self.drafts + 2 if full else max(1, self.drafts - 1)

    def _let_rows_leave(self) -> None:
        """Finished rows leave the caches, once there are enough of them."""
        finished = self.finished[self.rows]
        leaving = int(finished.sum())
        if self.rows_may_leave and len(self.rows) * LEAVING_SHARE <= leaving < len(self.rows) and leaving > 0:
            index = (~finished).nonzero().squeeze(1)
            for decoder in (self.target, self.draft):
                if decoder is not None:
                    decoder.keep_rows(index)
            self._set_rows(self.rows[index])

    # Rows and columns.

    def _set_rows(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.rows_on_device = None if self.mirror is None else upload(rows, self.device)

    def _columns(self, begin: torch.Tensor, count: int) -> torch.Tensor:
        """(b, count) of `sequences`, from each row's `begin` (b,) on."""
        return (begin[:, None] + torch.arange(count, device="cpu")).clamp(max=self.sequences.shape[1] - 1)

    def _show(self, tokens: torch.Tensor, begin: torch.Tensor) -> None:
        """Puts tokens (b, t) from each row's `begin` on where processors and criteria see them, if there are any."""
        if self.mirror is not None:
            columns = upload(self._columns(begin, tokens.shape[1]), self.device)
            self.mirror[self.rows_on_device[:, None], columns] = tokens.to(self.device)

    def _padded(self) -> torch.Tensor:
        """The output: what drafts have left behind a row's end becomes padding."""
        columns = int(self.lengths.max())
        padding = torch.arange(columns, device="cpu") >= self.lengths[:, None]
        pad = self.config._pad_token_tensor
        return self.sequences[:, :columns].masked_fill(padding, 0 if pad is None else int(pad))

    def _statistics(self, seconds: float) -> SpeculationStatistics:
        return SpeculationStatistics(
            rounds=len(self.drafted_per_round),
            new_tokens_per_row=tuple((self.lengths - self.prompt).tolist()),
            drafted_per_row=tuple(self.drafted_per_row.tolist()),
            accepted_per_row=tuple(self.accepted_per_row.tolist()),
            drafted_per_round=tuple(self.drafted_per_round),
            accepted_per_round=tuple(self.accepted_per_round),
            target_forwards=self.target.forwards,
            draft_forwards=0 if self.draft is None else self.draft.forwards,
            seconds=seconds,
        )


# What `generate` does before its loop, and what cannot be served.


def _check_arguments(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError("An encoder-decoder model has no replay cache: use `model.generate(...)`.")
    if not is_enabled(model):
        raise ValueError(
            f"{type(model).__name__} does not replay: call `hf_replayssm.enable(model)` first (supported families: "
            f"{supported_families()})."
        )
    for name in ("past_key_values", "cache_params"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` is called `cache` here: pass `cache=`, a ReplayCache.")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` have no tokens to draft from: pass `input_ids`, or use `model.generate`.")
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "Drafts of another tokenizer are not served here: use `model.generate(..., assistant_model=..., "
            "tokenizer=..., assistant_tokenizer=...)`, or a draft with the target's vocabulary."
        )
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError("Pass `input_ids`, an integer tensor (batch, columns) of prompts padded on the left.")
    if 0 in input_ids.shape:
        raise ValueError(f"`input_ids` {tuple(input_ids.shape)} holds no token to go on from.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` {tuple(attention_mask.shape)} says for each of `input_ids` {tuple(input_ids.shape)} "
            "whether it is a token (of those in the cache too): pass one of the same shape."
        )


def _check_served(model: PreTrainedModel, config: GenerationConfig, assistant: PreTrainedModel | None) -> None:
    for name, neutral in NOT_SERVED.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(
                f"`speculative_generate` does not serve `{name}={value!r}`: leave it out, or use `model.generate` "
                "without a batch of drafts."
            )
    if (assistant is None) == (config.prompt_lookup_num_tokens is None):
        raise ValueError(
            "Drafts come from one source: pass `assistant_model`, or `prompt_lookup_num_tokens`, and not "
            f"{'none of them' if assistant is None else 'both'}."
        )
    mode = config.get_generation_mode(assistant)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"Drafts serve greedy decoding and sampling; these settings ask for {mode.value!r}. Leave them out, or use "
            "`model.generate` without drafts."
        )
    if assistant is None:
        return
    target, draft = (m.config.get_text_config(decoder=True) for m in (model, assistant))
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"The draft has another vocabulary ({draft.vocab_size} tokens) than the target ({target.vocab_size}): use "
            "`model.generate(..., assistant_model=..., tokenizer=..., assistant_tokenizer=...)`."
        )
    if draft.model_type in FAMILIES:
        return
    kinds = set(get_layer_types_and_kwargs(draft)[0]) - {"full_attention", "sliding_attention"}
    if kinds or assistant.config.is_encoder_decoder:
        raise ValueError(
            f"Drafts of {type(assistant).__name__} cannot be taken back row by row. Use a draft of a supported family "
            f"({supported_families()}) or one of attention layers only."
        )


def _prepare(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    assistant: PreTrainedModel | None,
    kwargs: dict[str, Any],
) -> tuple[GenerationConfig, torch.Tensor | None]:
    """The generation config as `generate` completes it, and the mask (batch, columns) bool, CPU (None: no padding)."""
    configs = (generation_config, model.generation_config)
    no_max_length, no_min_length = (
        kwargs.get(name) is None and all(config is None or getattr(config, name) is None for config in configs)
        for name in ("max_length", "min_length")
    )
    config, unknown = model._prepare_generation_config(generation_config, **kwargs)
    unknown = sorted(name for name, value in unknown.items() if value is not None)
    if unknown:
        raise ValueError(
            f"`speculative_generate` does not know {', '.join(map(repr, unknown))}: leave it out (or correct a "
            "typo), or use `model.generate`."
        )
    _check_served(model, config, assistant)
    batch, columns = input_ids.shape
    model._prepare_special_tokens(config, attention_mask is not None, device=input_ids.device, batch_size=batch)
    model._prepare_generated_length(config, no_max_length, no_min_length, "input_ids", columns, input_ids)
    model._validate_generated_length(config, columns, no_max_length)
    if attention_mask is None:
        attention_mask = model._prepare_attention_mask_for_generation(input_ids, config, {})
    mask = attention_mask.cpu().bool()
    if not bool(mask[:, -1].all()):
        raise ValueError(RIGHT_PADDING)
    return config, None if bool(mask.all()) else mask


def _drafts_per_round(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
) -> int:
    """k of the first round. transformers' default of 20 is not taken: it counts on an early end of unsure drafts."""
    configs = [kwargs, *(vars(config) for config in (generation_config, model.generation_config) if config is not None)]
    if any(config.get("assistant_confidence_threshold") for config in configs[:-1]):
        raise ValueError(
            "`assistant_confidence_threshold` ends the draft of a row early; in a batch all rows draft together: leave "
            "it out, and set `num_assistant_tokens`."
        )
    name = "num_assistant_tokens"
    if assistant is None:
        name = "prompt_lookup_num_tokens"
    else:
        configs.append(vars(assistant.generation_config))
    drafts = next((config[name] for config in configs if config.get(name) is not None), NUM_ASSISTANT_TOKENS)
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 1:
        raise ValueError(f"`{name}` counts the drafts of a round: pass an integer of 1 or more, not {drafts!r}.")
    return drafts


def _own_criteria(
    model: PreTrainedModel, config: GenerationConfig, given: StoppingCriteriaList | None, tokenizer: Any
) -> list[StoppingCriteria]:
    """The stopping criteria beside the length and the end token, which the loop sees to itself."""
    of_config = model._get_stopping_criteria(config, StoppingCriteriaList(), tokenizer=tokenizer)
    return [c for c in of_config if type(c) not in (MaxLengthCriteria, EosTokenCriteria)] + list(given or [])


def _check_cache(cache: ReplayCache, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Whether the cache has seen the first columns of these rows, as far as it knows."""
    if not isinstance(cache, ReplayCache):
        raise ValueError(
            f"Drafts must be taken back, which a {type(cache).__name__} cannot do: leave `cache` out, or pass a "
            "ReplayCache."
        )
    if cache.signature != signature(model.config.get_text_config(decoder=True)):
        raise ValueError("This ReplayCache was built for another model: `ReplayCache(config=model.config)`.")
    if cache.interrupted:
        raise ValueError("The last forward through this cache failed half-way: call `cache.reset()`.")
    if cache.batch_size not in (-1, len(ids)):
        raise ValueError(
            f"This cache holds a batch of {cache.batch_size}, and the call is for {len(ids)} rows: move its rows with "
            "`batch_repeat_interleave` or `batch_select_indices`, or leave `cache` out."
        )
    seen = int(cache.get_seq_length())
    if seen >= ids.shape[1]:
        raise ValueError(
            f"The cache has seen {seen} columns, which leaves no new token of the {ids.shape[1]} in `input_ids` (pass "
            "those that the cache has seen too). Add to the prompt, or take the last token back (`cache.crop(-1)`)."
        )
    told = None if mask is None or bool(mask[:, :seen].all()) else mask[:, :seen]
    known = cache.padding_mask()
    if isinstance(cache, StaticReplayCache) and seen:  # it knows how many tokens a row has, and padding is on the left
        known = torch.arange(seen, device="cpu") >= seen - cache.lengths.cpu()[:, None]
        known = None if bool(known.all()) else known
    if (known is None) != (told is None) or (known is not None and not torch.equal(known, told)):
        raise ValueError(
            "The cache's padding is not that of `attention_mask`: pad `input_ids` on the left so that the rows are as "
            "in the cache (`cache.padding_mask()`), or leave `cache` out."
        )
