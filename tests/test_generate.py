"""generate() with replay, in every mode, against the untouched model's generate() without a cache.

Without a cache upstream runs a whole forward per token, so its tokens are right for every family; its own cached tokens
are not for those whose single step skips the limit of dt.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import (
    BUFFER_LENS,
    FIRST_TOKEN,
    VARIANT_NAMES,
    Forwards,
    Streamer,
    assert_same_logits,
    copy_of,
    enabled_model,
    greedy_without_cache,
    mixers,
    random_ids,
    replay_layers,
    shared_model,
    tiny_model,
    whole_forward,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)

import hf_replayssm


lengths = pytest.mark.parametrize("buffer_len", BUFFER_LENS)
NEW = 24
TAKES_EMBEDS = ("mamba2", "granitemoehybrid", "mamba", "falcon_mamba", "jamba")
TAKES_EMBEDS += ("qwen3_next", "kimi_linear")


@functools.cache
def _expected(name: str, rows: tuple, seed: int | None, options: tuple) -> torch.Tensor:
    ids, model = torch.tensor(rows), shared_model(name)
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), use_cache=False, **{"do_sample": False, **dict(options)}
    )


def expected(name: str, ids: torch.Tensor, seed: int | None = None, **options) -> torch.Tensor:
    """What the untouched model generates without a cache."""
    rows = tuple(tuple(row) for row in ids.tolist())
    return _expected(name, rows, seed, tuple(sorted({"max_new_tokens": NEW, **options}.items()))).clone()


def run(name_or_model, ids: torch.Tensor, buffer_len: int | None = None, seed: int | None = None, **options):
    model = enabled_model(name_or_model) if isinstance(name_or_model, str) else name_or_model
    if buffer_len is not None:
        options["cache_config"] = {"buffer_len": buffer_len}
    options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **options}
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(ids, **options)


# ------------------------------------------------------------------------------------------------ greedy
@lengths
def test_greedy(family: str, buffer_len: int):
    for prompt in (1, 2, 3, 8):
        ids = random_ids(2, prompt, seed=prompt)
        assert torch.equal(run(family, ids, buffer_len), expected(family, ids))


def test_the_expected_tokens_are_greedy(family: str):
    ids = random_ids(2, 8, seed=8)
    assert torch.equal(expected(family, ids), greedy_without_cache(shared_model(family), ids, NEW))


@lengths
def test_greedy_over_many_flushes(family: str, buffer_len: int):
    ids = random_ids(1, 5, seed=11)
    assert torch.equal(run(family, ids, buffer_len, max_new_tokens=70), expected(family, ids, max_new_tokens=70))


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_greedy_of_the_variants(name: str):
    ids = random_ids(2, 6, seed=12)
    assert torch.equal(run(name, ids, 4), expected(name, ids))


def test_replay_is_the_default_and_can_be_said(family: str):
    ids = random_ids(1, 6, seed=13)
    for options in ({}, {"cache_implementation": "replayssm"}):
        out = run(family, ids, return_dict_in_generate=True, **options)
        assert isinstance(out.cache, hf_replayssm.ReplayCache)
        assert torch.equal(out.sequences, expected(family, ids))
        assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
        assert len(replay_layers(out.cache)) == len(mixers(shared_model(family)))
        assert out.cache.stats.forwards == NEW


def test_dynamic_is_upstreams_own(family: str):
    """Bit by bit, with upstream's very class of cache; and so is no cache at all."""
    ids = random_ids(2, 6, seed=14)
    for options in ({"cache_implementation": "dynamic"}, {"use_cache": False}):
        outs = [
            run(model, ids, return_dict_in_generate=True, output_logits=True, **options)
            for model in (shared_model(family), enabled_model(family))
        ]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert all(torch.equal(left, right) for left, right in zip(outs[0].logits, outs[1].logits))
        assert type(outs[0].cache) is type(outs[1].cache)
        assert type(outs[1].cache) is (DynamicCache if "use_cache" not in options else type(None))


def test_the_models_own_choice_of_a_cache(family: str):
    """`generation_config.cache_implementation` of an enabled model holds, "dynamic" included."""
    ids = random_ids(1, 6, seed=14)
    model = hf_replayssm.enable(copy_of(family))
    for name, kind in (("dynamic", DynamicCache), ("replayssm", hf_replayssm.ReplayCache)):
        model.generation_config.cache_implementation = name
        assert type(run(model, ids, return_dict_in_generate=True).cache) is kind
        assert model.generation_config.cache_implementation == name


def test_logits_and_scores(family: str):
    ids = random_ids(2, 6, seed=15)
    out = run(
        family, ids, 4, return_dict_in_generate=True, output_logits=True, output_scores=True, output_hidden_states=True
    )
    whole = whole_forward(shared_model(family), out.sequences[:, :-1])[:, 5:]
    assert_same_logits(torch.stack(out.logits, 1), whole)
    assert len(out.scores) == len(out.hidden_states) == NEW


def test_one_new_token(family: str):
    ids = random_ids(2, 6, seed=16)
    assert torch.equal(run(family, ids, max_new_tokens=1), expected(family, ids, max_new_tokens=1))


def test_a_finished_row_is_padded(family: str):
    """With an end token some rows stop early; the others go on as they would alone."""
    ids = random_ids(3, 6, seed=17)
    plain = expected(family, ids)
    end = int(plain[1, 6 + 5])
    options = {"eos_token_id": end, "pad_token_id": 0}
    result, right = run(family, ids, 4, **options), expected(family, ids, **options)
    assert torch.equal(result, right)
    assert (right[1, 6 + 6 :] == 0).all()


# ------------------------------------------------------------------------------------------------ sampling and beams
@lengths
def test_sampling(family: str, buffer_len: int):
    ids = random_ids(2, 6, seed=20)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    right = expected(family, ids, seed=5, **options)
    assert torch.equal(run(family, ids, buffer_len, seed=5, **options), right)
    assert not torch.equal(right, expected(family, ids))


def test_sampling_equals_upstreams_cache(family: str):
    from tiny_models import UPSTREAM_STEP_DIFFERS

    if family in UPSTREAM_STEP_DIFFERS:
        pytest.skip("upstream's cached step skips the limit of dt here")
    ids = random_ids(2, 6, seed=21)
    options = {"do_sample": True, "seed": 6}
    assert torch.equal(run(family, ids, 4, **options), run(shared_model(family), ids, **options))


def test_num_return_sequences(family: str):
    ids = random_ids(2, 6, seed=22)
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 7}
    result = run(family, ids, 4, **options)
    assert result.shape[0] == 6
    assert torch.equal(result, expected(family, ids, **options))


@lengths
def test_beams(family: str, buffer_len: int):
    ids = random_ids(2, 6, seed=23)
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(run(family, ids, buffer_len, **options), expected(family, ids, **options))


def test_beams_of_padded_rows(family: str):
    ids = random_ids(2, 8, seed=24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    result = run(family, ids.masked_fill(mask == 0, 0), 4, num_beams=3, attention_mask=mask)
    assert torch.equal(result[1, 8:], expected(family, ids[1:], num_beams=3)[0, 8:])
    assert torch.equal(result[0, 8:], expected(family, ids[:1, 5:], num_beams=3)[0, 3:])


def test_beams_on_a_given_cache(family: str):
    """The rows of a prefilled cache are repeated for the beams by hand, as upstream's users do for their own."""
    ids = random_ids(1, 9, seed=24)
    model = enabled_model(family)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    with torch.no_grad():
        model(input_ids=ids[:, :6], cache=cache, use_cache=True)
    cache.batch_repeat_interleave(3)
    assert torch.equal(run(model, ids, cache=cache, num_beams=3), expected(family, ids, num_beams=3))


def test_beam_sampling(family: str):
    ids = random_ids(2, 6, seed=25)
    options = {"num_beams": 2, "do_sample": True, "seed": 8}
    assert torch.equal(run(family, ids, 4, **options), expected(family, ids, **options))


class Forbid(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 3 == 0, -torch.inf)


def test_processors(family: str):
    ids = random_ids(2, 6, seed=26)
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    assert torch.equal(run(family, ids, 4, **options), expected(family, ids, **options))
    result = run(family, ids, 4, logits_processor=LogitsProcessorList([Forbid()]))
    assert (result[:, 6:] % 3 != 0).all()


# ------------------------------------------------------------------------------------------------ padding and turns
@lengths
def test_left_padded_batches_equal_single_rows(family: str, buffer_len: int):
    lengths_ = (9, 1, 4, 8)
    ids = random_ids(4, 9, seed=30)
    mask = torch.stack([(torch.arange(9) >= 9 - length).long() for length in lengths_])
    for filler in (0, FIRST_TOKEN + 1):  # the pad token, or a token like others: only the mask counts
        result = run(family, ids.masked_fill(mask == 0, filler), buffer_len, attention_mask=mask)
        for row, length in enumerate(lengths_):
            assert torch.equal(result[row, 9:], expected(family, ids[row : row + 1, 9 - length :])[0, length:])


def turns(family: str, cache, batch: int = 1, **options) -> list[int]:
    """Three turns with one cache; returns the tokens that each forward ran."""
    model = enabled_model(family)
    text = random_ids(batch, 5, seed=31)
    with Forwards(model) as counter:
        for turn in range(3):
            result = run(model, text, cache=cache, max_new_tokens=9, **options)
            assert torch.equal(result, expected(family, text, max_new_tokens=9))
            assert cache.get_seq_length() == result.shape[1] - 1
            text = torch.cat([result, random_ids(batch, 4 + turn, seed=32 + turn)], 1)
    return counter.tokens


@lengths
def test_turns_with_one_cache(family: str, buffer_len: int):
    """Every turn feeds only what is new to the cache: pure state-space models included."""
    cache = hf_replayssm.ReplayCache(config=enabled_model(family).config, buffer_len=buffer_len)
    fed = turns(family, cache)
    assert fed == [5] + [1] * 8 + [5] + [1] * 8 + [6] + [1] * 8


def test_turns_of_a_batch(family: str):
    turns(family, hf_replayssm.ReplayCache(config=enabled_model(family).config, buffer_len=4), batch=3)


def test_turns_of_a_padded_batch(family: str):
    """The mask over everything goes along; rows equal their single runs in the second turn too."""
    model = enabled_model(family)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    ids = random_ids(2, 7, seed=33)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    first = run(model, ids, attention_mask=mask, cache=cache, max_new_tokens=6)
    text = torch.cat([first, random_ids(2, 3, seed=34)], 1)
    mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], 1)
    second = run(model, text, attention_mask=mask, cache=cache, max_new_tokens=6)
    assert torch.equal(second[:1], expected(family, text[:1], max_new_tokens=6))
    assert torch.equal(second[1:, 4:], expected(family, text[1:, 4:], max_new_tokens=6))


def test_a_prefilled_cache_goes_on(family: str):
    """A prompt shared by several requests: prefill once, copy, generate."""
    import copy

    model = enabled_model(family)
    shared = random_ids(1, 12, seed=35)
    prefilled = hf_replayssm.ReplayCache(config=model.config, buffer_len=4)
    with torch.no_grad():
        model(input_ids=shared, cache=prefilled, use_cache=True)
    for seed in (36, 37):
        ids = torch.cat([shared, random_ids(1, 3, seed=seed)], 1)
        assert torch.equal(run(model, ids, cache=copy.deepcopy(prefilled)), expected(family, ids))
    assert prefilled.get_seq_length() == 12


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_prefill_chunk_size(family: str, chunk: int):
    for prompt in (1, 11):
        ids = random_ids(2, prompt, seed=38)
        with Forwards(enabled_model(family)) as counter:
            result = run(family, ids, 4, prefill_chunk_size=chunk)
        assert torch.equal(result, expected(family, ids))
        assert max(counter.tokens) <= chunk


def test_prefill_chunk_size_of_a_padded_batch(family: str):
    ids = random_ids(2, 10, seed=39)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    result = run(family, ids, 4, prefill_chunk_size=4, attention_mask=mask)
    assert torch.equal(result[:1], expected(family, ids[:1]))
    assert torch.equal(result[1:, 6:], expected(family, ids[1:, 6:]))


# ------------------------------------------------------------------------------------------------ streaming, embeddings
def test_streaming(family: str):
    ids = random_ids(1, 6, seed=40)
    streamer = Streamer()
    result = run(family, ids, 4, streamer=streamer)
    assert streamer.ended and streamer.tokens == result[0].tolist() == expected(family, ids)[0].tolist()


def test_inputs_embeds(family: str):
    ids = random_ids(2, 6, seed=41)
    model = enabled_model(family)
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    if family not in TAKES_EMBEDS:
        with pytest.raises(ValueError, match="inputs_embeds"):
            model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=3)
        return
    result = model.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_config={"buffer_len": 4}
    )
    assert torch.equal(result, expected(family, ids)[:, 6:])


# ------------------------------------------------------------------------------------------------ configuration
def test_cache_config(family: str):
    ids = random_ids(1, 20, seed=50)
    settings = {"buffer_len": 5, "max_window": 7, "checkpoint_dtype": "bfloat16", "backend": "torch"}
    for given in (settings, {**settings, "checkpoint_dtype": torch.bfloat16}):
        before = dict(given)
        out = run(family, ids, cache_config=given, return_dict_in_generate=True)
        assert given == before
        assert all(layer.checkpoint.dtype == torch.bfloat16 for layer in replay_layers(out.cache))
        assert out.cache.stats.checkpoint_writes == -(-NEW // 5)
    assert enabled_model(family).generation_config.cache_config is None


def test_the_models_own_settings_hold():
    ids = random_ids(1, 20, seed=51)
    model = hf_replayssm.enable(copy_of("bamba"), buffer_len=3)
    writes = run(model, ids, return_dict_in_generate=True).cache.stats.checkpoint_writes
    assert writes == -(-NEW // 3)
    out = run(model, ids, return_dict_in_generate=True, cache_config={"buffer_len": 12})
    assert out.cache.stats.checkpoint_writes == -(-NEW // 12)


def test_a_generation_config_is_saved_and_loaded(family: str, tmp_path):
    """`cache_implementation="replayssm"` and its settings survive JSON where this package is imported."""
    wanted = GenerationConfig(
        cache_implementation="replayssm",
        cache_config={"buffer_len": 6, "checkpoint_dtype": "float32"},
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    wanted.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.cache_implementation == "replayssm" and loaded.cache_config == wanted.cache_config
    ids = random_ids(1, 20, seed=52)
    mask = torch.ones_like(ids)
    out = enabled_model(family).generate(
        ids, attention_mask=mask, generation_config=loaded, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected(family, ids))
    assert out.cache.stats.checkpoint_writes == -(-NEW // 6)


def test_a_cache_and_an_implementation_are_one_too_many(family: str):
    """As upstream says for its own caches."""
    cache = hf_replayssm.ReplayCache(config=shared_model(family).config)
    with pytest.raises(ValueError, match="cache_implementation"):
        run(family, random_ids(1, 4), cache=cache, cache_implementation="replayssm")


def test_generate_never_compiles(family: str, monkeypatch):
    """The plain variant never sets off generate's automatic compilation, whatever the device is said to be."""
    model = hf_replayssm.enable(copy_of(family))

    def compiled(*_, **__):
        raise AssertionError("generate compiled the model")

    monkeypatch.setattr(type(model), "get_compiled_call", compiled)
    out = run(model, random_ids(1, 4), return_dict_in_generate=True)
    assert not out.cache.is_compileable
    assert not any(layer.is_compileable for layer in replay_layers(out.cache))


def test_enabled_globally(family: str, tmp_path):
    """`enable()` without a model: what is loaded or made later comes enabled, and `disable()` ends that."""
    from transformers import AutoModelForCausalLM

    shared_model(family).save_pretrained(tmp_path)
    ids = random_ids(1, 6, seed=53)
    hf_replayssm.enable()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        made = AutoModelForCausalLM.from_config(shared_model(family).config)
    finally:
        hf_replayssm.disable()
    after = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert hf_replayssm.is_enabled(loaded) and hf_replayssm.is_enabled(made) and not hf_replayssm.is_enabled(after)
    assert type(after) is type(shared_model(family))
    loaded.generation_config.eos_token_id = after.generation_config.eos_token_id = None
    out = run(loaded, ids, return_dict_in_generate=True)
    assert isinstance(out.cache, hf_replayssm.ReplayCache)
    assert torch.equal(out.sequences, expected(family, ids))
    assert type(run(after, ids, return_dict_in_generate=True).cache) is DynamicCache


# ------------------------------------------------------------------------------------------------ drafts
class Contrary(torch.nn.Module):
    """A head that prefers the least likely token: its model's drafts are always wrong."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    @property
    def weight(self):
        return self.head.weight

    def forward(self, hidden):
        return -self.head(hidden)


@functools.cache
def draft(family: str, kind: str):
    """An enabled draft model: `perfect` (the target itself), `near` (its logits disturbed), `random`, `wrong`."""
    if kind == "random":
        return hf_replayssm.enable(tiny_model(family, seed=3))
    model = copy_of(family)
    if kind == "near":
        generator = torch.Generator().manual_seed(1)
        weight = model.get_output_embeddings().weight
        weight.data += 0.35 * weight.std() * torch.randn(weight.shape, generator=generator)
    elif kind == "wrong":
        model.set_output_embeddings(Contrary(model.get_output_embeddings()))
    return hf_replayssm.enable(model)


def assisted(family: str, ids: torch.Tensor, kind: str, tokens: int = 5, schedule: str = "constant", **options):
    helper = draft(family, kind)
    helper.generation_config.num_assistant_tokens = tokens
    helper.generation_config.num_assistant_tokens_schedule = schedule
    helper.generation_config.assistant_confidence_threshold = 0.0
    return run(family, ids, assistant_model=helper, **options)


@lengths
@pytest.mark.parametrize("kind", ["perfect", "near", "random", "wrong"])
def test_assisted_generation_equals_greedy(family: str, buffer_len: int, kind: str):
    for prompt, schedule in ((2, "heuristic"), (9, "constant")):
        ids = random_ids(1, prompt, seed=60 + prompt)
        result = assisted(family, ids, kind, schedule=schedule, buffer_len=buffer_len, max_new_tokens=18)
        assert torch.equal(result, expected(family, ids, max_new_tokens=18)), (prompt, schedule)


@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_assisted_generation_with_short_and_long_drafts(family: str, tokens: int):
    """Windows of one token, upstream's default of twenty, and more than max_window."""
    ids = random_ids(1, 7, seed=70)
    for kind, new, schedule in (("perfect", 50, "constant"), ("near", 25, "constant"), ("wrong", 4, "heuristic")):
        result = assisted(family, ids, kind, tokens, schedule, buffer_len=4, max_new_tokens=new)
        assert torch.equal(result, expected(family, ids, max_new_tokens=new))


def test_a_generated_pad_token_is_a_token(family: str):
    """Where no mask is given, generate() takes pad ids in a draft model's prompt for padding: the tokens stay right."""
    ids = random_ids(1, 7, seed=71)
    pad = next(token for token in expected(family, ids)[0, 7 + 2 :].tolist() if token not in ids)
    result = assisted(family, ids, "perfect", attention_mask=None, pad_token_id=pad)
    assert torch.equal(result, expected(family, ids))


def test_assisted_generation_with_a_small_max_window(family: str):
    ids = random_ids(1, 7, seed=71)
    for kind in ("perfect", "near"):
        result = assisted(family, ids, kind, 6, cache_config={"buffer_len": 4, "max_window": 2})
        assert torch.equal(result, expected(family, ids))


def test_a_perfect_draft_saves_forwards(family: str):
    """Every drafted token is accepted: the target runs once per round, and nothing again after a crop."""
    ids = random_ids(1, 7, seed=72)
    with Forwards(enabled_model(family)) as target:
        assisted(family, ids, "perfect", 5, max_new_tokens=24)
    assert len(target.tokens) == 4 and target.tokens == [7 + 5, 6, 6, 6]
    with Forwards(enabled_model(family)) as target:
        assisted(family, ids, "wrong", 5, max_new_tokens=8)
    assert len(target.tokens) == 8 and all(tokens <= 6 for tokens in target.tokens[1:])


@lengths
def test_prompt_lookup(family: str, buffer_len: int):
    pattern = random_ids(1, 6, seed=73)
    for ids, tokens in (
        (torch.cat([pattern, pattern, pattern], 1), 3),
        (random_ids(1, 9, seed=74), 30),
        (pattern[:, :1], 3),
    ):
        result = run(family, ids, buffer_len, prompt_lookup_num_tokens=tokens, max_new_tokens=30)
        assert torch.equal(result, expected(family, ids, max_new_tokens=30))


def test_assisted_generation_of_a_padded_prompt(family: str):
    ids = random_ids(1, 10, seed=84)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    right = expected(family, ids[:, 4:])[0, 6:]
    padded = ids.masked_fill(mask == 0, 0)
    for result in (
        run(family, padded, 4, attention_mask=mask, prompt_lookup_num_tokens=3),
        assisted(family, padded, "near", attention_mask=mask),
        assisted(family, padded, "perfect", attention_mask=mask, buffer_len=4),
    ):
        assert torch.equal(result[0, 10:], right)


def test_assisted_generation_stops_at_the_end_token(family: str):
    ids = random_ids(1, 7, seed=75)
    end = int(expected(family, ids)[0, 7 + 8])
    right = expected(family, ids, eos_token_id=end, pad_token_id=0)
    for kind in ("perfect", "near"):
        result = assisted(family, ids, kind, eos_token_id=end, pad_token_id=0)
        assert torch.equal(result, right)


def test_assisted_generation_returns_what_it_says(family: str):
    """The cache that comes back holds what was accepted, no more; its logits are the whole forward's."""
    ids = random_ids(1, 7, seed=76)
    out = assisted(family, ids, "near", return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, expected(family, ids))
    whole = whole_forward(shared_model(family), out.sequences[:, :-1])[:, 6:]
    assert_same_logits(torch.stack(out.logits, 1), whole)
    assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
    stats = out.cache.stats
    assert stats.crops >= 2 and stats.tokens_cropped > 0
    streamer = Streamer()
    assisted(family, ids, "near", streamer=streamer)
    assert streamer.tokens == out.sequences[0].tolist()


def test_a_plain_generate_after_an_assisted_one(family: str):
    """One cache through both: recording is switched off again, so that the buffer stays small."""
    cache = hf_replayssm.ReplayCache(config=enabled_model(family).config, buffer_len=4)
    ids = random_ids(1, 7, seed=77)
    first = assisted(family, ids, "near", cache=cache)
    assert torch.equal(first, expected(family, ids))
    text = torch.cat([first, random_ids(1, 3, seed=78)], 1)
    second = run(family, text, cache=cache)
    assert torch.equal(second, expected(family, text))
    assert cache.record_past is False and int(cache.held.max()) < 4
    text = torch.cat([second, random_ids(1, 3, seed=79)], 1)
    assert torch.equal(run(family, text, cache=cache, prompt_lookup_num_tokens=3), expected(family, text))


def test_assisted_sampling(family: str):
    """A perfect draft is accepted always, whatever is drawn; near zero temperature the tokens are greedy."""
    ids = random_ids(1, 7, seed=80)
    options = {"do_sample": True, "temperature": 1e-4, "seed": 9}
    assert torch.equal(assisted(family, ids, "near", **options), expected(family, ids))
    with Forwards(enabled_model(family)) as target:
        result = assisted(family, ids, "perfect", do_sample=True, seed=10)
    assert result.shape == (1, 7 + NEW) and len(target.tokens) == 4
    # A prompt lookup draws each token from the target, as plain sampling does: only the order of the draws differs.
    result = run(family, ids, 4, do_sample=True, prompt_lookup_num_tokens=3, seed=11)
    assert result.shape == (1, 7 + NEW)


def test_a_draft_of_another_family():
    ids = random_ids(1, 7, seed=81)
    helper = draft("mamba2", "perfect")
    for target in ("bamba", "zamba2"):
        assert torch.equal(run(target, ids, 4, assistant_model=helper), expected(target, ids))


def test_a_draft_with_attention_only():
    ids = random_ids(1, 7, seed=82)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shared_model("bamba").config.vocab_size,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=4,
        )
    ).eval()
    llama.generation_config.eos_token_id = None
    llama.generation_config.pad_token_id = 0
    for target in ("bamba", "falcon_h1", "mamba2"):
        assert torch.equal(run(target, ids, 4, assistant_model=llama), expected(target, ids))
    # The other way round: an untouched target, drafted for by an enabled state-space model.
    plain = llama.generate(ids, max_new_tokens=NEW, do_sample=False)
    helped = llama.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=draft("mamba2", "random"))
    assert torch.equal(plain, helped)


def test_a_draft_that_was_not_enabled(family: str):
    """Drafting with a model of a supported family just works: generate enables it."""
    ids = random_ids(1, 7, seed=83)
    helper = copy_of(family)
    assert torch.equal(run(family, ids, 4, assistant_model=helper), expected(family, ids))


def test_an_untouched_model_still_refuses_drafts(family: str):
    with pytest.raises(ValueError, match="stateful"):
        run(shared_model(family), random_ids(1, 5), prompt_lookup_num_tokens=3)


def test_upstreams_cache_still_refuses_drafts(family: str):
    """With `cache_implementation="dynamic"` a rejected draft could not be rolled back."""
    with pytest.raises(ValueError):
        run(family, random_ids(1, 5), prompt_lookup_num_tokens=3, cache_implementation="dynamic")
    cache = DynamicCache(config=shared_model(family).config)
    with pytest.raises(ValueError):
        run(family, random_ids(1, 5), prompt_lookup_num_tokens=3, cache=cache)
