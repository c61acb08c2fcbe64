"""`speculative_generate`: what `generate` does before its loop, what cannot be served, and the call of the loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..cache import RIGHT_PADDING, ReplayCache
from ..families import FAMILIES, signature, supported_families
from ..integration import REPLAY_IMPLEMENTATIONS, is_enabled, keep_static_cache, refuse_short_static_cache
from ..static import StaticReplayCache
from .decoders import ReplayDecoder, draft_decoder, new_cache
from .loop import Speculation
from .statistics import SpeculativeOutput


NUM_ASSISTANT_TOKENS = 5

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
        cache = new_cache(model, model._replay_settings(config), config, drafts, len(ids))
    else:
        _check_cache(cache, model, ids, mask)
        refuse_short_static_cache(cache, config.max_length - 1)
    if assistant_model is not None:
        model._validate_assistant(config, assistant_model)  # enables it: the last thing that can be refused

    cache.max_window = max(cache.max_window, drafts + 1)
    recorded = cache.record_past
    draft = None if assistant_model is None else draft_decoder(assistant_model, config, drafts, ids)
    speculation = Speculation(
        target=ReplayDecoder(model, cache, config, ids.device),
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
