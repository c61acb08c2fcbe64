"""
`enable` and `disable`, and the hooks into `generate()`: all of them in this file, each with its reason.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.generation import configuration_utils as generation_configuration
from transformers.generation.candidate_generator import AssistantVocabTranslatorCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import PreTrainedModel

from . import capture
from .cache import RIGHT_PADDING, ReplayCache
from .config import ReplayConfig
from .families import FAMILIES, family_of_config, signature, supported_families
from .layers import REPLAY_LAYER_TYPES
from .models.backbone import ReplayBackbone, ReplayMultimodal, activation_dtype, bind, refuse_packed
from .models.gated_delta import (
    ReplayGatedDeltaMixer,
    ReplayKDAMixer,
    ReplayOlmoHybridMixer,
    ReplayQwen3NextMixer,
)
from .models.mamba1 import ReplayMamba1Mixer, ReplayZambaMixer
from .models.mamba2 import ReplayFalconH1Mixer, ReplayMamba2Mixer
from .models.mixer import ReplayMixer
from .models.norms import ReplayRMSNorm, is_norm
from .models.replaced import ReplacedClass, check_replaceable, replace_class, restore_class
from .static import StaticReplayCache
from .versions import warn_outside_tested_range


REPLAY_IMPLEMENTATIONS = ("replayssm", "replayssm_static")
# By recurrence, or by model type for a family with a class of its own.
MIXERS: dict[str, type[ReplayMixer]] = {
    "mamba2": ReplayMamba2Mixer,
    "falcon_h1": ReplayFalconH1Mixer,
    "mamba1": ReplayMamba1Mixer,
    "zamba": ReplayZambaMixer,
    "gated_delta": ReplayGatedDeltaMixer,
    "qwen3_next": ReplayQwen3NextMixer,
    "olmo_hybrid": ReplayOlmoHybridMixer,
    "kimi_linear": ReplayKDAMixer,
    "bailing_hybrid": ReplayKDAMixer,
}

# A draft window may be a little longer than the number of drafts asked for: the bonus token, and a schedule that adds
# two after a full match.
WINDOW_MARGIN = 4


def enable(model: torch.nn.Module | None = None, **fields: Any) -> torch.nn.Module | None:
    """
    Switches replay on.

    Args:
        model: a model of a supported family, or anything around one (PEFT, a compiled module, a multimodal class).
            It is changed in place and returned: its mixers replay when they are given a [`ReplayCache`], and
            `generate` makes one by default. With any other cache, or none, it computes what it computed before.
            None: every later `from_pretrained` and `from_config` of a supported family comes enabled.
        **fields: of [`ReplayConfig`]: the settings of the caches that `generate` makes. On a model that is enabled
            already they change what they name and leave the rest.

    Raises:
        ValueError: nothing to enable (with the list of what is supported), remote code, a mixer that replay would not
            reach, or an invalid setting. Nothing is changed then.
        TypeError: not a model.
    """
    config = ReplayConfig.from_dict(fields)  # raises for unknown or invalid fields
    warn_outside_tested_range()
    if model is None:
        _enable_later_models(config)
        return None

    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"`enable` takes a loaded model, not {model!r}: pass what `from_pretrained` returned, or call "
            "`hf_replayssm.enable()` before it."
        )
    mixers, backbones, multimodal, generators = _parts(model)
    for name, module, _ in mixers + backbones:
        if not isinstance(module, ReplacedClass):
            check_replaceable(module, name)
    for _, module, family in mixers:
        replace_class(module, MIXERS.get(family.model_type, MIXERS[family.recurrence]))
    for _, module, _ in backbones:
        replace_class(module, ReplayBackbone)
        module._replay_signature = signature(module.config)
        for part in module.modules():
            if is_norm(part):
                replace_class(part, ReplayRMSNorm)
    for _, module, _ in multimodal:
        replace_class(module, ReplayMultimodal)
    for _, module in generators:
        replace_class(module, ReplayGeneration)
        module._replay_config = getattr(module, "_replay_config", ReplayConfig()).replace(**fields)
    for name, module, _ in mixers:
        _assert_reached(module, name)
    return model


def disable(model: torch.nn.Module | None = None) -> torch.nn.Module | None:
    """Makes the model upstream's again (a model that is not enabled stays as it is). None: later models come plain."""
    if model is None:
        _disable_later_models()
        return None
    release(model)
    for module in model.modules():
        for name in ("_replay_config", "_replay_signature"):
            module.__dict__.pop(name, None)
        restore_class(module)
    return model


def release(model: torch.nn.Module) -> None:
    """
    Frees the static cache, with its graphs, that `generate(cache_implementation="replayssm_static")` and
    `speculative_generate` keep from a call to the next. (`disable` does as well.)
    """
    for module in model.modules():
        _kept.pop(module, None)


def is_enabled(model: torch.nn.Module) -> bool:
    """Whether the model's mixers replay."""
    return any(isinstance(module, ReplayMixer) for module in model.modules())


def _parts(model: torch.nn.Module):
    """
    All that can be enabled: mixers, backbones and what makes positions for them, with their names and families, and the
    models that generate.
    """
    mixers, backbones, multimodal, generators = [], [], [], []
    by_class = {}
    for family in FAMILIES.values():
        by_class[(family.module_name, family.mixer)] = (family, mixers)
        by_class[(family.module_name, family.backbone)] = (family, backbones)
        by_class[(family.module_name, family.multimodal)] = (family, multimodal)
    for name, module in model.named_modules():
        cls = getattr(module, "_replaced_class", type(module))
        family, parts = by_class.get((cls.__module__, cls.__name__), (None, None))
        if family is not None:
            parts.append((name or type(module).__name__, module, family))
        if isinstance(module, PreTrainedModel) and type(module).__module__.startswith("transformers_modules"):
            raise ValueError(
                f"{type(module).__name__} is a remote-code model, whose modeling hf_replayssm does not know. Load it "
                f"with `trust_remote_code=False` if transformers has its family ({supported_families()}), or leave "
                "hf_replayssm out for it."
            )
    if not backbones:
        config = getattr(model, "config", None)
        if isinstance(model, PreTrainedModel) and hasattr(config, "get_text_config"):
            family_of_config(config.get_text_config(decoder=True))  # says which model_type is not supported
        raise ValueError(
            f"Found nothing to enable in {type(model).__name__}: hf_replayssm supports models of the families "
            f"{supported_families()}, as transformers implements them. Other models work as before without it."
        )
    for name, backbone, family in backbones:
        # Every recurrent layer of the backbone must be one that we know, or a replay cache would be half read.
        expected = sum(kind in REPLAY_LAYER_TYPES for kind in signature(backbone.config).layer_types)
        found = sum(any(module is mixer for _, mixer, _ in mixers) for module in backbone.modules())
        if found != expected:
            raise ValueError(
                f"`{name}` has {expected} recurrent layers, of which {found} are {family.mixer} as transformers "
                "implements it. Replay needs all of them: undo the replacement of the others, or leave replay off."
            )
    for name, module in model.named_modules():
        if isinstance(module, GenerationMixin) and any(part is b for part in module.modules() for _, b, _ in backbones):
            generators.append((name, module))
    return mixers, backbones, multimodal, generators


def _assert_reached(mixer: torch.nn.Module, name: str) -> None:
    forward = mixer.__dict__.get("_old_forward", mixer.forward)
    if getattr(forward, "__func__", None) is not type(mixer).forward:
        raise AssertionError(f"`{name}` does not reach replay: its forward is {forward}.")


# The static cache of a model's last call of `generate`, for the next: a compiled or captured step is bound to its
# addresses. Lent while a call is running (calls may be nested, and other threads have calls of their own). Beside the
# models, so that no copy of one takes it.
_kept: weakref.WeakKeyDictionary[torch.nn.Module, StaticReplayCache] = weakref.WeakKeyDictionary()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.lent: weakref.WeakKeyDictionary[torch.nn.Module, list[StaticReplayCache]] = weakref.WeakKeyDictionary()


_this_thread = _OfThread()


def lend_static_cache(
    model: PreTrainedModel, settings: ReplayConfig, rows: int, length: int, recording: bool
) -> StaticReplayCache:
    """The static cache of the model's last call, emptied, if a call like this can use it; else a new one."""
    cache = _kept.pop(model, None)
    if (
        cache is not None
        and cache.replay_config == cache.signature.recurrence.settings(settings)
        and cache.batch_size == rows
        and (cache.max_cache_len >= length or not cache.has_attention)
        and cache.is_laid_out_for_recording == recording
        and cache.replay_layers[0].device == model.device
        and cache.replay_layers[0].dtype == activation_dtype(model)
    ):
        cache.reset()
        return cache
    del cache  # its memory goes before the new one's is taken
    return StaticReplayCache(config=model.config, max_cache_len=length, replay_config=settings)


def refuse_short_static_cache(cache: Any, length: int) -> None:
    """`ValueError` for a static cache with room for fewer than `length` tokens: here, before the device finds out."""
    if isinstance(cache, StaticReplayCache) and -1 < cache.get_max_length() < length:
        raise ValueError(
            f"This static cache has room for {cache.max_cache_len} tokens, and the call is for {length}. Build it with "
            "a larger `max_cache_len`, or generate fewer tokens."
        )


def keep_static_cache(model: PreTrainedModel, cache: StaticReplayCache) -> None:
    """Keeps a cache that nobody else has for the model's next call."""
    if cache.is_allocated:
        _kept[model] = cache


class ReplayGeneration(ReplacedClass):
    """Goes in front of the class of a model that generates. The names are hooks of transformers' `GenerationMixin`."""

    _replay_config: ReplayConfig
    _keeps_signature = ("forward", "prepare_inputs_for_generation", "generate")

    # Upstream refuses drafts for models with a state, since it cannot take tokens back. A replay cache can;
    # `_validate_generation_mode` refuses them for the other caches.
    _is_stateful = False

    def forward(self, *args, **kwargs):
        # Some models swallow what they do not know: a ReplayCache under an older keyword (they would make a cache of
        # their own), and the arguments of packed sequences.
        arguments = bind(self, args, kwargs)
        if isinstance(arguments.get("cache"), ReplayCache):
            refuse_packed(arguments)
            return super().forward(**arguments)
        return super().forward(*args, **kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        # Before anything is prepared: what replay cannot do is refused with the remedy.
        implementation = generation_config.cache_implementation
        if implementation in ("offloaded", "quantized", "offloaded_static"):
            raise ValueError(
                f"`cache_implementation={implementation!r}` moves or quantises keys and values only, and knows nothing "
                "of a recurrent state. Leave `cache_implementation` out to replay, or use 'dynamic'."
            )
        settings = self._replay_settings(generation_config)  # raises for unknown or invalid fields
        if implementation == "replayssm_static" and settings.capture and generation_config.compile_config is not None:
            raise ValueError(
                "`capture=True` takes the place of a compiler: leave out `compile_config`, or `capture` to compile."
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            self._validate_assistant(generation_config, generation_mode_kwargs.get("assistant_model"))
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _validate_assistant(self, generation_config: GenerationConfig, assistant: PreTrainedModel | None) -> None:
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "`assistant_early_exit` drafts with the model's first layers, which none of these models can run "
                "alone. Use an `assistant_model` or `prompt_lookup_num_tokens`."
            )
        if generation_config.cache_implementation not in (None, *REPLAY_IMPLEMENTATIONS):
            raise ValueError(
                f"Drafts must be taken back, which `cache_implementation={generation_config.cache_implementation!r}` "
                "cannot do for a recurrent state. Leave it out: replay can."
            )
        text_config = self.config.get_text_config(decoder=True)
        missing = [name for name in ("num_mtp_layers", "mtp_layer_types") if not getattr(text_config, name, None)]
        if generation_config.use_mtp and missing:
            raise ValueError(
                "`use_mtp` builds its layers from `config.num_mtp_layers` and `config.mtp_layer_types`; the config of "
                f"{type(self).__name__} has no {' and no '.join(missing)}. transformers skips the layers for "
                "multi-token prediction that checkpoints of these families bring, and their configs describe them in "
                "other words or not at all. Use an `assistant_model` or `prompt_lookup_num_tokens`."
            )
        if assistant is None or isinstance(assistant, ReplayGeneration):
            return
        assistant_config = assistant.config.get_text_config(decoder=True)
        layer_types = getattr(assistant_config, "layer_types", None) or ()
        if getattr(assistant_config, "model_type", None) in FAMILIES:
            # A draft must take tokens back as well. The limit on dt is a matter of each model.
            enable(assistant, **self._replay_config.replace(time_step_limit=None).to_dict())
        elif assistant._is_stateful or "linear_attention" in layer_types:  # MiniMax does not say that it is stateful
            raise ValueError(
                f"The assistant {type(assistant).__name__} has a recurrent state that cannot take drafts back. Use an "
                f"assistant of a supported family ({supported_families()}) or a pure attention model."
            )

    def _replay_settings(self, generation_config: GenerationConfig) -> ReplayConfig | None:
        """The settings of the cache that `generate` makes; None when it makes upstream's."""
        if generation_config.cache_implementation not in (None, *REPLAY_IMPLEMENTATIONS):
            return None
        given = generation_config.cache_config or {}
        if isinstance(given, ReplayConfig):
            return given
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ValueError(
                "`cache_config` is a dictionary of fields of `ReplayConfig`, such as {'checkpoint_dtype': 'int8'}, or "
                f"a `ReplayConfig`, not {given!r}."
            )
        return getattr(self, "_replay_config", ReplayConfig()).replace(**given)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        # Replay is the default cache. Recording is switched for every call: upstream switches it on for assisted
        # generation and never off.
        cache = model_kwargs.get("cache")
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        settings = self._replay_settings(generation_config)
        if cache is None and settings is not None and generation_config.use_cache is not False:
            if generation_config.cache_implementation == "replayssm_static":
                rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
                length = max(max_cache_length, generation_config.max_cache_len or 1)
                cache = lend_static_cache(self, settings, rows, length, recording=assisted)
                _this_thread.lent.setdefault(self, []).append(cache)
            else:
                cache = ReplayCache(config=self.config, replay_config=settings)
            model_kwargs["cache"] = cache
        else:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        refuse_short_static_cache(cache, max_cache_length)
        if isinstance(cache, ReplayCache):
            if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
                raise ValueError(  # upstream would feed all embeddings again with every chunk of `input_ids`
                    "`prefill_chunk_size` cuts `input_ids` and leaves `inputs_embeds` whole: leave one of them out."
                )
            if not generation_config.is_assistant:  # whose masks are guesses, from drafts that may be pad ids
                _refuse_right_padding(model_kwargs.get("attention_mask"))
            cache.record_past = assisted or bool(generation_config.is_assistant)
            cache.resume_at, cache.drafts_begin = 0, None
            if generation_config.is_assistant:
                _announce_window(cache, self.generation_config.num_assistant_tokens)
        elif assisted:
            raise ValueError(
                "Assisted generation needs a cache that can take drafts back: leave `cache` and `use_cache` out, or "
                "pass a ReplayCache."
            )

    # The static variant.

    def generate(self, *args, **kwargs):
        # Only to keep the static cache that the call was lent, unless its caller has got it.
        lent = _this_thread.lent.setdefault(self, [])
        before = len(lent)
        try:
            output = super().generate(*args, **kwargs)
            if len(lent) > before and kwargs.get("custom_generate") is None:
                if getattr(output, "cache", None) is not lent[before]:
                    keep_static_cache(self, lent[before])
            return output
        finally:
            del lent[before:]

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, cache, **kwargs):
        # Upstream makes 4D masks for a cache of fixed size before the forward that it compiles. Ours are made inside,
        # where the positions are; what is needed from outside is the padding among the new tokens, which a prompt has.
        if isinstance(cache, StaticReplayCache):
            if attention_mask is None or not kwargs.get("is_first_iteration"):
                return None
            return attention_mask[:, -inputs_embeds.shape[1] :]
        upstream = getattr(super(), "create_masks_for_generate", create_masks_for_generate)
        return upstream(config, inputs_embeds, attention_mask, cache, **kwargs)

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config):
        cache = model_kwargs.get("cache")
        if isinstance(cache, StaticReplayCache) and cache.replay_config.capture:
            return not generation_config.disable_compile and capture.available(self)
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def get_compiled_call(self, compile_config) -> Callable:
        # What `generate` calls for decoding steps where `_valid_auto_compile_criteria` holds.
        # Between two calls of `generate` the model may have been changed, within one it is not.
        compiled_call, this_call = super().get_compiled_call, object()

        def call(**inputs):
            cache = inputs.get("cache")
            if isinstance(cache, StaticReplayCache) and cache.replay_config.capture:
                return capture.captured_forward(self, inputs, this_call)
            return compiled_call(compile_config)(**inputs)

        return call

    def _prepare_static_inputs(self, cache: StaticReplayCache, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """What a static cache needs before a forward of `generate`."""
        new_tokens, first_round = kwargs.get("next_sequence_length"), kwargs.get("is_first_iteration")
        if isinstance(new_tokens, torch.Tensor):  # computed from `get_seq_length()`, for a prompt
            kwargs["next_sequence_length"] = new_tokens = int(new_tokens)
        if cache.record_past:
            if first_round:
                new_tokens = None if cache.drafts_begin is None else input_ids.shape[1] - cache.drafts_begin + 1
            if new_tokens is not None and new_tokens > cache.max_window + 1:
                raise ValueError(
                    f"A window of {new_tokens} tokens is more than the {cache.max_window} (`max_window`) that a static "
                    "cache can take back. Set a larger `max_window`, fewer drafts, or use "
                    "`cache_implementation='replayssm'`."
                )
        if first_round and kwargs.get("position_ids") is not None:
            # Those of a chunk are a slice, to whose strides a compiled forward would be bound.
            kwargs["position_ids"] = kwargs["position_ids"].clone(memory_format=torch.contiguous_format)
        if not cache.is_allocated:
            # Before the first forward, which is a compiled one with `prefill_chunk_size`.
            embeds = kwargs.get("inputs_embeds") if first_round else None
            inputs = input_ids.to(self.device) if embeds is None else embeds
            backbone = next(module for module in self.modules() if isinstance(module, ReplayBackbone))
            backbone.check_model(cache)
            key_shape = self._get_static_cache_init_shape() if cache.has_attention else None
            backbone.allocate(cache, inputs, key_shape)

    def _get_candidate_generator(
        self, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs
    ):
        # Sampling with two tokenizers: upstream prunes the draft's head, in place. That fails for Mamba-2 and wherever
        # the draft has no token that the target lacks, and the draft is of no other use afterwards. Upstream's
        # translator can do without; it takes the one that it finds made for these tokenizers.
        tokenizers = kwargs.get("target_tokenizer"), kwargs.get("assistant_tokenizer")
        if generation_config.do_sample and kwargs.get("assistant_model") is not None and None not in tokenizers:
            AssistantVocabTranslatorCache.get_translator(
                *tokenizers, self.config.get_text_config().vocab_size, kwargs["assistant_model"]
            )
        generator = super()._get_candidate_generator(
            generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs
        )
        # Buffers with room for the usual window from the start need not grow; see `prepare_inputs_for_generation`.
        drafts = getattr(generator, "num_assistant_tokens", None) or getattr(generator, "num_output_tokens", None)
        cache = model_kwargs["cache"]
        _announce_window(cache, drafts)
        if isinstance(cache, StaticReplayCache):
            _bound_drafts(generator, cache)
        cache.drafts_begin = input_ids.shape[1]
        # Upstream's first round feeds all `input_ids` again, also those that a warm cache has seen.
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] != input_ids.shape[1]:
            raise ValueError(
                f"Assisted generation takes the whole sequence: `input_ids` has {input_ids.shape[1]} columns, the "
                f"attention mask {mask.shape[1]}. Pass the tokens that the cache has seen as well."
            )
        columns = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        whole = input_ids if model_kwargs.get("inputs_embeds") is None else model_kwargs["inputs_embeds"]
        cache.resume_at = int(cache.get_seq_length()) if columns == whole.shape[1] else 0
        if cache.resume_at >= whole.shape[1]:  # here, since drafts would be new tokens later on
            raise _nothing_new(cache)
        wants_states = generation_config.return_dict_in_generate and (
            generation_config.output_hidden_states or generation_config.output_attentions
        )
        if cache.resume_at and (wants_states or generator.requires_model_outputs):
            raise ValueError(
                "`output_hidden_states`, `output_attentions` and `use_mtp` take the first round of assisted generation "
                f"for the whole sequence, of which this cache has already seen {cache.resume_at} columns. Leave them "
                "out, or start from an empty cache (`cache.reset()`)."
            )
        return generator

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        cache, new_tokens = kwargs.get("cache"), kwargs.get("next_sequence_length")
        first_round = kwargs.get("is_first_iteration")
        if isinstance(cache, StaticReplayCache):
            self._prepare_static_inputs(cache, input_ids, kwargs)
        elif isinstance(cache, ReplayCache) and cache.record_past:
            # How many drafts there are is known here and not to the mixers: tell the cache. (They may be more than were
            # announced: a schedule adds two after a full match, and one token of another tokenizer may be many here.)
            if not first_round:
                _announce_window(cache, new_tokens)
            elif cache.drafts_begin is not None:
                _announce_window(cache, input_ids.shape[1] - cache.drafts_begin)
        if isinstance(cache, ReplayCache) and not cache.is_fresh:
            if cache.record_past and first_round and cache.resume_at:
                # See `_get_candidate_generator`: the first round of assisted generation on a warm cache.
                whole = input_ids if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
                kwargs["next_sequence_length"] = whole.shape[1] - cache.resume_at
            # Upstream slices with [-0:] and the like then, and feeds what the cache has seen once more.
            if kwargs.get("next_sequence_length") is not None and kwargs["next_sequence_length"] < 1:
                raise _nothing_new(cache)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        # A directory whose generation config names "replayssm" could not be loaded without this package.
        generation_config = self.generation_config
        if generation_config is not None and generation_config.cache_implementation in REPLAY_IMPLEMENTATIONS:
            self.generation_config = GenerationConfig.from_dict(
                generation_config.to_dict() | {"cache_implementation": None, "cache_config": None}
            )
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            self.generation_config = generation_config

    def _refuse_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "Continuous batching has a paged cache of its own, which holds no recurrent state. Use `generate` with a "
            "batch, padded on the left."
        )

    generate_batch = _refuse_continuous_batching
    init_continuous_batching = _refuse_continuous_batching
    continuous_batching_context_manager = _refuse_continuous_batching


def _refuse_right_padding(mask: torch.Tensor | None) -> None:
    """The cache sees it in a first forward; with `prefill_chunk_size`, and in a later turn, only `generate` does."""
    if mask is not None and mask.dim() == 2 and bool(((mask[:, -1] == 0) & (mask != 0).any(1)).any()):
        raise ValueError(RIGHT_PADDING)


def _nothing_new(cache: ReplayCache) -> ValueError:
    return ValueError(
        f"The cache has seen {cache.get_seq_length()} columns, which is all of the prompt: there is no new token to go "
        "on from. Add to the prompt, or take the last token back (`cache.crop(-1)`)."
    )


def _announce_window(cache: ReplayCache, drafts: float | None) -> None:
    """Tells the cache how many tokens may wait for a crop. It does not shrink: the crop may still be due."""
    cache.max_window = max(cache.max_window, cache.replay_config.max_window, int(drafts or 0) + WINDOW_MARGIN)


def _bound_drafts(generator: Any, cache: StaticReplayCache) -> None:
    """A schedule that drafts more after every full match goes as far as the cache can take back."""
    update, most = type(generator).update_candidate_strategy, cache.max_window
    generator_ref = weakref.ref(generator)  # it must not own itself: it may own the draft's cache

    def update_candidate_strategy(*args, **kwargs):
        generator = generator_ref()
        update(generator, *args, **kwargs)
        if getattr(generator, "num_assistant_tokens", None) is not None:
            generator.num_assistant_tokens = min(generator.num_assistant_tokens, most)

    generator.update_candidate_strategy = update_candidate_strategy


# What is patched in transformers itself, at import: three names.


def _register_implementations() -> None:
    """`GenerationConfig` checks names of cache implementations against these lists, the second for `max_cache_len`."""
    for lists, ours in (
        ("ALL_CACHE_IMPLEMENTATIONS", REPLAY_IMPLEMENTATIONS),
        ("ALL_STATIC_CACHE_IMPLEMENTATIONS", ("replayssm_static",)),
    ):
        known = getattr(generation_configuration, lists)
        setattr(generation_configuration, lists, known + tuple(name for name in ours if name not in known))


def _refuse_replay_on_plain_models() -> None:
    """With the name accepted, a model that is not enabled would make upstream's cache without a word."""
    upstream = GenerationMixin._prepare_cache_for_generation
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def prepare_cache_for_generation(self, generation_config, *args, **kwargs):
        implementation = generation_config.cache_implementation
        if implementation in REPLAY_IMPLEMENTATIONS and not isinstance(self, ReplayGeneration):
            raise ValueError(
                f"`cache_implementation={implementation!r}` needs a model with replay switched on: call "
                f"`hf_replayssm.enable(model)` first (supported families: {supported_families()})."
            )
        return upstream(self, generation_config, *args, **kwargs)

    GenerationMixin._prepare_cache_for_generation = prepare_cache_for_generation


_register_implementations()
_refuse_replay_on_plain_models()


# `enable()` without a model. transformers' own `register_patch_mapping` replaces classes by name while a model is
# built, which reaches the mixers but not the class of the model that `from_pretrained` was called on, so `generate`
# would need another patch. Enabling the finished model instead is one mechanism, the same as for a model at hand.

_LOADERS = ("from_pretrained", "_from_config")
_upstream_loaders: dict[str, Any] = {}


def _enable_later_models(config: ReplayConfig) -> None:
    _disable_later_models()
    for name in _LOADERS:
        upstream = PreTrainedModel.__dict__[name]
        _upstream_loaders[name] = upstream
        setattr(PreTrainedModel, name, classmethod(_enabling(upstream.__func__, config)))


def _disable_later_models() -> None:
    while _upstream_loaders:
        setattr(PreTrainedModel, *_upstream_loaders.popitem())


def _enabling(loader, config: ReplayConfig):
    @functools.wraps(loader)
    def load(cls, *args, **kwargs):
        loaded = loader(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model_config = getattr(model, "config", None)
        text_config = model_config.get_text_config(decoder=True) if hasattr(model_config, "get_text_config") else None
        remote = type(model).__module__.startswith("transformers_modules")
        if getattr(text_config, "model_type", None) in FAMILIES and not remote:
            enable(model, **config.to_dict())
        return loaded

    return load
