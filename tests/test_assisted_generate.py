"""Assisted generation through `generate`: everything that drafts for an enabled model, and what it gives back.

The target's tokens are checked against the untouched model's forward without a cache: a sequence is the greedy
continuation of its prompt exactly if every token is the best one after those before it, which one forward over the
whole sequence says for all of them.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    BUFFER_LENS,
    FAMILY_NAMES,
    FIRST_TOKEN,
    VOCAB,
    Forwards,
    Streamer,
    assert_same_logits,
    copy_of,
    enabled_model,
    random_ids,
    shared_model,
    tiny_model,
    whole_forward,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GenerationMixin
from transformers.modeling_layers import MtpModel

import hf_replayssm


NEW = 24


def generate(model, ids: torch.Tensor, **options):
    model = enabled_model(model) if isinstance(model, str) else model
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **options})


def assert_greedy(name: str, sequences: torch.Tensor, *turns: slice) -> None:
    """The columns `turns` of `sequences` (1, length) are what the untouched model likes best, one after another."""
    best = whole_forward(shared_model(name), sequences).argmax(-1)
    for turn in turns:
        columns = torch.arange(sequences.shape[1])[turn]
        assert torch.equal(sequences[:, columns], best[:, columns - 1])


@pytest.fixture
def crops(monkeypatch) -> list[int]:
    """What is cropped from any replay cache, call by call."""
    counts: list[int] = []
    crop = hf_replayssm.ReplayCache.crop

    def watched(self, tokens_to_remove):
        counts.append(-int(tokens_to_remove))
        crop(self, tokens_to_remove)

    monkeypatch.setattr(hf_replayssm.ReplayCache, "crop", watched)
    return counts


def forgetful_crop(monkeypatch) -> None:
    """From now on tokens are taken back everywhere but in the recurrent state."""
    crop = hf_replayssm.ReplayCache.crop

    def forgetful(self, tokens_to_remove):
        held = self.positions.held
        crop(self, tokens_to_remove)
        self.positions = self.positions.holding(held, self.positions.first)

    monkeypatch.setattr(hf_replayssm.ReplayCache, "crop", forgetful)


# ------------------------------------------------------------------------------------------------ drafts
class Contrary(torch.nn.Module):
    """A head that likes best what its model likes least."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    @property
    def weight(self):
        return self.head.weight

    def forward(self, hidden):
        return -self.head(hidden)


def draft_model(name: str, kind: str, tokens: int = 5, schedule: str = "constant", threshold: float = 0.0):
    """
    A draft for the target `name`, not enabled: `perfect` (the target itself), `near` (its head disturbed), `random`
    (other weights), `rejected` (what the target likes least).
    """
    model = tiny_model(name, seed=3) if kind == "random" else copy_of(name)
    if kind == "near":
        weight = model.get_output_embeddings().weight
        generator = torch.Generator().manual_seed(1)
        weight.data += 0.35 * weight.std() * torch.randn(weight.shape, generator=generator)
    elif kind == "rejected":
        model.set_output_embeddings(Contrary(model.get_output_embeddings()))
    return configured(model, tokens, schedule, threshold)


def configured(model, tokens: int = 5, schedule: str = "constant", threshold: float = 0.0):
    model.generation_config.num_assistant_tokens = tokens
    model.generation_config.num_assistant_tokens_schedule = schedule
    model.generation_config.assistant_confidence_threshold = threshold
    return model


class Script(CandidateGenerator):
    """
    Drafts from a text (1, length) that is known already. For each round `pattern` says how many tokens are drafted and
    how many of them, the first ones, are the text's.
    """

    def __init__(self, text: torch.Tensor, pattern):
        self.text, self.pattern = text, itertools.cycle(pattern)

    def get_candidates(self, input_ids, **_):
        drafted, right = next(self.pattern)
        length = input_ids.shape[1]
        drafts = self.text[:, length : length + drafted].clone()
        if length + drafts.shape[1] == self.text.shape[1]:  # the target adds a token of its own
            drafts = drafts[:, :-1]
        drafts[:, right:] = FIRST_TOKEN + (drafts[:, right:] - FIRST_TOKEN + 1) % (VOCAB - FIRST_TOKEN)
        return torch.cat([input_ids, drafts], dim=1), None


class Forced(LogitsProcessor):
    """Only the text's own next token is possible."""

    def __init__(self, text: torch.Tensor):
        self.text = text

    def __call__(self, input_ids, scores):
        length = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, self.text[:, length : length + 1], 0.0)


# One round is (tokens drafted, tokens that are right); the patterns are repeated.
PATTERNS = {
    "all accepted": [(4, 4)],
    "all rejected": [(5, 0)],
    "rejected inside the prefill": [(23, 0), (3, 2)],
    "windows that grow": [(size, size) for size in (1, 3, 5, 8, 12)] + [(16, 3)],
    "mixed": [(5, 3), (1, 0), (0, 0), (7, 7), (2, 1), (9, 0), (6, 5)],
}


# ------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize("buffer_len", BUFFER_LENS)
def test_logits_do_not_depend_on_what_was_rejected(family: str, buffer_len: int, monkeypatch):
    """Teacher-forced over one text, every pattern of rejections gives the whole forward's logits, and one argmax."""
    text = random_ids(1, 50, seed=101)
    whole = whole_forward(shared_model(family), text[:, :-1])
    for prompt, patterns in ((2, ["rejected inside the prefill"]), (9, PATTERNS)):
        for name in patterns:
            script = Script(text, PATTERNS[name])
            monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *_, script=script, **__: script)
            out = generate(
                family,
                text[:, :prompt],
                prompt_lookup_num_tokens=1,  # any drafts: the script takes their place
                cache_config={"buffer_len": buffer_len, "max_window": 4},
                logits_processor=LogitsProcessorList([Forced(text)]),
                max_new_tokens=50 - prompt,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert torch.equal(out.sequences, text)
            logits = torch.stack(out.logits, 1)
            assert_same_logits(logits, whole[:, prompt - 1 :], what=f"{name}, prompt of {prompt}")
            assert torch.equal(logits.argmax(-1), whole[:, prompt - 1 :].argmax(-1))
            assert out.cache.stats.tokens_cropped > 0 or name == "all accepted"


def test_a_crop_that_forgets_the_state_is_noticed(monkeypatch):
    """The test above fails where tokens are taken back everywhere but in the recurrent state."""
    forgetful_crop(monkeypatch)
    for name in FAMILY_NAMES:
        with pytest.raises(AssertionError, match="relative error"):
            test_logits_do_not_depend_on_what_was_rejected(name, 16, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["perfect", "random", "rejected"])
def test_256_tokens_with_a_draft_model(family: str, kind: str):
    ids = random_ids(1, 9, seed=102)
    with Forwards(enabled_model(family)) as target:
        sequences = generate(family, ids, assistant_model=draft_model(family, kind), max_new_tokens=256)
    assert sequences.shape == (1, 9 + 256)
    assert_greedy(family, sequences, slice(9, None))
    if kind == "perfect":
        assert target.tokens == [9 + 5] + [6] * 41 + [4]  # the last window ends with the text
    elif kind == "rejected":
        assert len(target.tokens) == 256


def test_256_tokens_with_prompt_lookup(family: str, crops: list[int]):
    """The prompt repeats itself where the model does not: the first window is rejected, inside the prefill."""
    pattern = random_ids(1, 6, seed=103)
    ids = torch.cat([pattern, pattern], dim=1)
    with Forwards(enabled_model(family)) as target:
        sequences = generate(family, ids, prompt_lookup_num_tokens=5, max_new_tokens=256)
    assert sequences.shape == (1, 12 + 256)
    assert_greedy(family, sequences, slice(12, None))
    assert target.tokens[0] == 12 + 5 and crops[0] == 5


# ------------------------------------------------------------------------------------------------ who may draft
def test_a_draft_of_another_family(family: str):
    """A pure state-space draft and a hybrid one, neither enabled before."""
    ids = random_ids(1, 7, seed=104)
    others = ("mamba2", FAMILY_NAMES[(FAMILY_NAMES.index(family) + 1) % len(FAMILY_NAMES)])
    for other in others:
        helper = configured(copy_of(other), tokens=3)
        sequences = generate(family, ids, assistant_model=helper)
        assert_greedy(family, sequences, slice(7, None))
        assert hf_replayssm.is_enabled(helper)


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    return configured(LlamaForCausalLM(config).eval(), tokens=3)


def test_a_transformer_as_draft(family: str):
    ids = random_ids(1, 7, seed=105)
    assert_greedy(family, generate(family, ids, assistant_model=tiny_llama()), slice(7, None))


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_recurrent_draft_that_is_not_supported(kind: str):
    """Refused before anything happens, and the target is as good as before. (MiniMax does not say it is stateful.)"""
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    if kind == "rwkv":
        helper = RwkvForCausalLM(RwkvConfig(**common))
    else:
        sizes = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        helper = MiniMaxForCausalLM(MiniMaxConfig(**common, **sizes, num_local_experts=2, block_size=8))
    ids = random_ids(1, 7, seed=106)
    cache = hf_replayssm.ReplayCache(config=enabled_model("bamba").config)
    with pytest.raises(ValueError, match="recurrent state .* Use an assistant of a supported family"):
        generate("bamba", ids, assistant_model=helper.eval(), cache=cache)
    assert cache.get_seq_length() == 0 and not cache.record_past
    assert_greedy("bamba", generate("bamba", ids, cache=cache), slice(7, None))


def test_disable_brings_upstreams_refusal_back(family: str):
    model = hf_replayssm.enable(copy_of(family))
    ids = random_ids(1, 5, seed=107)
    generate(model, ids, prompt_lookup_num_tokens=3)
    hf_replayssm.disable(model)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_llama()}, {"use_mtp": True}):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            generate(model, ids, **options)


def test_early_exit_is_refused_up_front(family: str):
    layers = enabled_model(family).config.num_hidden_layers
    with pytest.raises(ValueError, match="first layers.*Use an `assistant_model`"):
        generate(family, random_ids(1, 5), assistant_early_exit=1)
    assert enabled_model(family).config.num_hidden_layers == layers  # upstream leaves it changed when it fails


def test_no_cache_no_drafts(family: str):
    with pytest.raises(ValueError, match="leave `cache` and `use_cache` out"):
        generate(family, random_ids(1, 5), prompt_lookup_num_tokens=3, use_cache=False)


# ------------------------------------------------------------------------------------------------ two tokenizers
CHARACTERS = [" "] + [chr(0x4E00 + number) for number in range(VOCAB - FIRST_TOKEN - 1)]


def character_tokenizer(characters: list[str]) -> PreTrainedTokenizerFast:
    """One token a character, behind <pad>, <s> and </s>."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def draft_with_another_tokenizer(name: str, more: bool):
    """
    The target `name` in another vocabulary: the characters in another order, and one `more` or one less of them. Its
    drafts are perfect (but for the character that it lacks). Returns model and tokenizer.
    """
    size = VOCAB + (1 if more else -1)
    order = torch.randperm(VOCAB - FIRST_TOKEN, generator=torch.Generator().manual_seed(2))
    order = order[: size - FIRST_TOKEN]
    characters = [CHARACTERS[number] for number in order.tolist()] + ["!"] * more
    model, target = tiny_model(name, vocab_size=size), shared_model(name)
    weights = model.state_dict()
    weights.update({key: value for key, value in target.state_dict().items() if value.shape == weights[key].shape})
    model.load_state_dict(weights)
    tokens = torch.cat([torch.arange(FIRST_TOKEN), FIRST_TOKEN + order])
    for own, targets in (
        (model.get_input_embeddings(), target.get_input_embeddings()),
        (model.get_output_embeddings(), target.get_output_embeddings()),
    ):
        own.weight.data[: len(tokens)] = targets.weight.data[tokens]
    if more:
        model.get_output_embeddings().weight.data[-1] = 0
    return configured(model), character_tokenizer(characters)


@pytest.mark.parametrize("more", [True, False])
def test_a_draft_with_another_tokenizer(family: str, more: bool):
    ids = random_ids(1, 9, seed=108)
    helper, assistant_tokenizer = draft_with_another_tokenizer(family, more)
    options = {"tokenizer": character_tokenizer(CHARACTERS), "assistant_tokenizer": assistant_tokenizer}
    options["max_new_tokens"] = new_tokens = 24 if family == "zamba" else 14  # whose draft is right less often
    with Forwards(enabled_model(family)) as target:
        sequences = generate(family, ids, assistant_model=helper, **options)
    assert_greedy(family, sequences, slice(9, None))
    assert len(target.tokens) < new_tokens  # drafts were accepted

    # Sampling, so cold that it is greedy. The draft stays as it is, and so another one can have its tokenizer.
    for assistant in (helper, copy.deepcopy(helper)):
        head = assistant.get_output_embeddings()
        options |= {"do_sample": True, "temperature": 1e-4}
        with Forwards(enabled_model(family)) as target:
            sequences = generate(family, ids, assistant_model=assistant, **options)
        assert_greedy(family, sequences, slice(9, None))
        assert len(target.tokens) < new_tokens
        assert assistant.get_output_embeddings() is head


def test_a_tokenizer_of_long_tokens(family: str, crops: list[int]):
    """Five drafts of a tokenizer with words of ten characters are many more for the target, in the first round too."""
    generator = torch.Generator().manual_seed(6)
    words = ["".join(CHARACTERS[1 + i] for i in torch.randperm(80, generator=generator)[:10]) for _ in range(200)]
    pieces = [("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0)] + [(piece, -1.0) for piece in CHARACTERS + words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    long_tokens = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    helper = configured(tiny_model(family, vocab_size=len(pieces), seed=3), schedule="heuristic")
    ids = random_ids(1, 12, seed=108)  # longer than what upstream translates anew each round (`assistant_lookbehind`)
    sequences = generate(
        family,
        ids,
        assistant_model=helper,
        tokenizer=character_tokenizer(CHARACTERS),
        assistant_tokenizer=long_tokens,
        cache_config={"max_window": 2},
        max_new_tokens=38,
    )
    assert_greedy(family, sequences, slice(12, None))
    assert crops[0] > 5 + 4  # what was announced, with its margin


# ------------------------------------------------------------------------------------------------ settings of generate
HELPERS = {
    "near": lambda name: {"assistant_model": draft_model(name, "near")},
    "perfect": lambda name: {"assistant_model": draft_model(name, "perfect")},
    "lookup": lambda name: {"prompt_lookup_num_tokens": 4},
}


class NoRepeats(LogitsProcessor):
    """A processor that looks at all tokens so far: none may come a second time in a row, or two apart."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -2:], -torch.inf)


@pytest.mark.parametrize("helper", ["near", "lookup"])
def test_logits_processors(family: str, helper: str):
    ids = torch.cat([random_ids(1, 5, seed=109)] * 2, dim=1)
    for options in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 10, "eos_token_id": 40},
        {"logits_processor": LogitsProcessorList([NoRepeats()])},
    ):
        options["max_new_tokens"] = 14
        plain = generate(shared_model(family), ids, use_cache=False, **options)
        assert torch.equal(generate(family, ids, **options, **HELPERS[helper](family)), plain)


class Contains(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return (input_ids == self.token).any(1)


def test_stopping_criteria(family: str):
    """They are asked once a round: the text may go on to the end of the window, as upstream says, and not further."""
    ids = random_ids(1, 7, seed=110)
    plain = generate(family, ids)
    token = next(token for token in plain[0, 7 + 8 :].tolist() if token not in plain[0, : 7 + 8])
    stop = int((plain[0] == token).nonzero()[0]) + 1
    for helper in HELPERS.values():
        criteria = StoppingCriteriaList([Contains(token)])
        out = generate(family, ids, stopping_criteria=criteria, return_dict_in_generate=True, **helper(family))
        length = out.sequences.shape[1]
        assert stop <= length <= stop + 5
        assert torch.equal(out.sequences, plain[:, :length])
        assert out.cache.get_seq_length() == length - 1


def test_the_end_token_inside_an_accepted_window(family: str):
    """The text ends there, the cache too, the streamer has seen that much, and the conversation goes on."""
    ids = random_ids(1, 7, seed=111)
    plain = generate(family, ids)
    place = next(place for place in range(7 + 4, 7 + 20) if plain[0, place] not in plain[0, 7:place])
    end = int(plain[0, place])
    streamer, helper = Streamer(), draft_model(family, "perfect", tokens=9)
    options = {"eos_token_id": end, "pad_token_id": 0, "assistant_model": helper}
    with Forwards(enabled_model(family)) as target:
        out = generate(family, ids, streamer=streamer, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain[:, : place + 1])
    assert streamer.tokens == out.sequences[0].tolist() and streamer.ended
    assert len(target.tokens) == 1 + (place - 7) // 10  # the draft stops there too; the next test drafts beyond
    assert out.cache.get_seq_length() == place
    text = torch.cat([out.sequences, random_ids(1, 3, seed=112)], dim=1)
    again = generate(family, text, cache=out.cache, **HELPERS["lookup"](family))
    assert_greedy(family, again, slice(text.shape[1], None))


def test_drafts_beyond_the_end_token(family: str, monkeypatch, crops: list[int]):
    ids = random_ids(1, 7, seed=113)
    plain = generate(family, ids)
    place = next(place for place in range(7 + 3, 7 + 9) if plain[0, place] not in plain[0, 7:place])
    script = Script(plain, [(12, 12)])
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *_, **__: script)
    options = {"eos_token_id": int(plain[0, place]), "pad_token_id": 0, "prompt_lookup_num_tokens": 1}
    out = generate(family, ids, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain[:, : place + 1])
    # The window ended 12 columns behind the prompt, and the end token itself has not gone in yet.
    assert crops == [7 + 12 - place] and out.cache.get_seq_length() == place


def test_what_generate_returns(family: str):
    ids = random_ids(1, 7, seed=114)
    # Hidden states are taken by hooks that stay in a model, which is then no longer one that can be pickled.
    untouched = copy_of(family)
    enabled = hf_replayssm.enable(copy_of(family))
    for helper in HELPERS.values():
        out = generate(
            enabled,
            ids,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            output_hidden_states=True,
            **helper(family),
        )
        assert_greedy(family, out.sequences, slice(7, None))
        with torch.no_grad():
            whole = untouched(out.sequences[:, :-1], use_cache=False, output_hidden_states=True)
        for kept in (out.logits, out.scores):
            assert_same_logits(torch.stack(kept, 1), whole.logits[:, 6:])
        # One entry a token. Of the first round upstream cuts all but the prompt's from the wrong columns.
        assert len(out.hidden_states) == NEW
        for layer, expected in enumerate(whole.hidden_states):
            assert_same_logits(out.hidden_states[0][layer], expected[:, :7], what=f"hidden states {layer}")
            assert_same_logits(out.hidden_states[-1][layer], expected[:, -1:], what=f"hidden states {layer}")
        assert out.cache.get_seq_length() == out.sequences.shape[1] - 1


def test_hidden_states_of_a_later_assisted_turn_are_refused(family: str):
    """Upstream cuts them out of the first round as if it had fed everything: they would be those of other tokens."""
    first = generate(family, random_ids(1, 7, seed=115), return_dict_in_generate=True)
    text = torch.cat([first.sequences, random_ids(1, 3, seed=116)], dim=1)
    seen = first.cache.get_seq_length()
    options = {"return_dict_in_generate": True, "prompt_lookup_num_tokens": 3}
    for wanted in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"already seen {seen} columns"):
            generate(family, text, cache=first.cache, **{wanted: True}, **options)
    out = generate(family, text, cache=first.cache, **options)
    assert_greedy(family, out.sequences, slice(text.shape[1], None))


def test_turns_in_any_order(family: str):
    """One cache through assisted and plain turns: nothing is fed twice, and each turn is greedy."""
    cache = hf_replayssm.ReplayCache(config=enabled_model(family).config, buffer_len=4)
    text = torch.empty((1, 0), dtype=torch.long)
    turns = []
    with Forwards(enabled_model(family)) as target:
        for number, kind in enumerate(("near", None, "lookup", "perfect", None, None, "near", "lookup")):
            text = torch.cat([text, random_ids(1, 4, seed=117 + number)], dim=1)
            turns.append(slice(text.shape[1], text.shape[1] + 10))
            forwards = len(target.tokens)
            options = HELPERS[kind](family) if kind else {}
            text = generate(family, text, cache=cache, max_new_tokens=10, **options)
            assert target.tokens[forwards] <= 4 + 1 + 5
            assert cache.record_past == bool(kind) and cache.get_seq_length() == text.shape[1] - 1
    assert_greedy(family, text, *turns)


def test_a_prompt_that_the_cache_has_seen_to_its_end(family: str):
    """There is nothing to feed but drafts, whose first has no logits: refused before anything is fed, as without."""
    out = generate(family, random_ids(1, 7, seed=124), return_dict_in_generate=True)
    seen = out.cache.get_seq_length()
    for kind in (None, "perfect", "lookup"):
        for prompt in (out.sequences[:, :seen], out.sequences[:, : seen - 2]):
            with pytest.raises(ValueError, match="no new token to go on from"):
                generate(family, prompt, cache=out.cache, **(HELPERS[kind](family) if kind else {}))
            assert out.cache.get_seq_length() == seen
    again = generate(family, out.sequences, cache=out.cache, **HELPERS["perfect"](family))
    assert_greedy(family, again, slice(7, None))


def test_chunked_prefill_is_no_matter(family: str):
    ids = random_ids(1, 11, seed=125)
    assert_greedy(family, generate(family, ids, prefill_chunk_size=4, **HELPERS["near"](family)), slice(11, None))


# ------------------------------------------------------------------------------------------------ schedules
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_schedules(family: str, schedule: str):
    """The target verifies as many drafts as the schedule asks for; windows outgrow the buffer, which grows."""
    ids = random_ids(1, 7, seed=126)
    helper = draft_model(family, "perfect", tokens=2, schedule=schedule)
    with Forwards(enabled_model(family)) as target:
        out = generate(
            family,
            ids,
            assistant_model=helper,
            max_new_tokens=70,
            cache_config={"buffer_len": 2, "max_window": 3},
            return_dict_in_generate=True,
        )
    assert_greedy(family, out.sequences, slice(7, None))
    asked, left, expected = 2, 70, []
    while left:
        drafts = min(asked, left - 1)
        expected.append(drafts + 1)
        left -= drafts + 1
        asked += 0 if schedule == "constant" else 2
    expected[0] += 7 - 1
    assert target.tokens == expected
    after = helper.generation_config.num_assistant_tokens
    assert after == (asked if schedule == "heuristic" else 2)  # upstream hands on what "heuristic" has found


def test_a_schedule_that_shrinks(family: str):
    ids = random_ids(1, 7, seed=127)
    with Forwards(enabled_model(family)) as target:
        helper = draft_model(family, "rejected", tokens=5, schedule="heuristic")
        sequences = generate(family, ids, assistant_model=helper, max_new_tokens=10)
    assert_greedy(family, sequences, slice(7, None))
    assert target.tokens == [7 + 5, 5, 4, 3, 2, 2, 2, 2, 2, 1]


def test_windows_longer_than_anything_announced(family: str, monkeypatch):
    """A generator that says nothing of its windows: the buffer grows in the middle of a round, and no draft is lost."""
    text = random_ids(1, 350, seed=128)
    script = Script(text, [(30, 9), (7, 7), (300, 20), (3, 0), (30, 30)])
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *_, **__: script)
    with Forwards(enabled_model(family)) as target:
        out = generate(
            family,
            text[:, :5],
            prompt_lookup_num_tokens=1,
            cache_config={"buffer_len": 1, "max_window": 1},
            logits_processor=LogitsProcessorList([Forced(text)]),
            max_new_tokens=60,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert torch.equal(out.sequences, text[:, :65])
    assert target.tokens == [5 + 30, 8, 301, 4, 31]
    assert_same_logits(torch.stack(out.logits, 1), whole_forward(shared_model(family), text[:, :64])[:, 4:])


def test_a_confidence_threshold_ends_windows(family: str):
    ids = random_ids(1, 7, seed=129)
    lengths = {}
    for threshold in (0.0, 0.3, 1.0):
        helper = draft_model(family, "near", threshold=threshold)
        with Forwards(enabled_model(family)) as target:
            sequences = generate(family, ids, assistant_model=helper)
        assert_greedy(family, sequences, slice(7, None))
        lengths[threshold] = target.tokens
    assert max(lengths[0.0][1:]) == 6 and max(lengths[1.0][1:]) == 2
    assert len(lengths[1.0]) >= len(lengths[0.3]) >= len(lengths[0.0])  # shorter windows, more rounds
    assert len(lengths[1.0]) > len(lengths[0.0])


def roc_curve(matches, probabilities):
    """scikit-learn's, as upstream uses it: rates of false and true positives for falling thresholds."""
    matches, probabilities = np.array(matches), np.array(probabilities)
    thresholds = np.sort(np.unique(probabilities))[::-1]
    positive = probabilities[None, :] >= thresholds[:, None]
    false, true = positive[:, matches == 0].mean(1), positive[:, matches == 1].mean(1)
    return np.append(0.0, false), np.append(0.0, true), np.append(np.inf, thresholds)


def test_a_threshold_that_adapts(family: str, monkeypatch):
    """Upstream moves the threshold after each round where scikit-learn is installed."""
    monkeypatch.setitem(sys.modules, "sklearn.metrics", types.SimpleNamespace(roc_curve=roc_curve))
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: True)
    seen = []
    update = candidate_generator.AssistedCandidateGenerator.update_candidate_strategy

    def watched(self, *args):
        update(self, *args)
        seen.append(float(self.generation_config.assistant_confidence_threshold))

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "update_candidate_strategy", watched)
    ids = random_ids(1, 7, seed=130)
    helper = draft_model(family, "near", threshold=0.05)
    sequences = generate(family, ids, assistant_model=helper, max_new_tokens=40)
    assert_greedy(family, sequences, slice(7, None))
    assert len(set(seen)) > 1


# ------------------------------------------------------------------------------------------------ sampling
SMALL = 8  # tokens in the vocabulary


def surprise(probabilities: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float]:
    """
    How far `tokens` (n,) are from draws of `probabilities` (n, vocab), each given what came before. Two statistics, of
    which each is about 1 or less if they are, and grows with n if they are not: a chi-square of how often each token
    came, over its 99.9 % quantile, and the mean log-likelihood's distance from its expectation, over 3.3 standard
    errors.
    """
    probabilities = probabilities.double()
    log = probabilities.log()
    expected = (probabilities * log).sum(1)
    variance = (probabilities * log.square()).sum(1) - expected.square()
    likelihood = (log.gather(1, tokens[:, None])[:, 0] - expected).sum().abs() / variance.sum().sqrt()

    excess = (torch.nn.functional.one_hot(tokens, SMALL) - probabilities).sum(0)
    covariance = probabilities.sum(0).diag() - probabilities.T @ probabilities
    chi_square = excess @ torch.linalg.pinv(covariance) @ excess
    return float(chi_square) / 24.32, float(likelihood) / 3.29  # SMALL - 1 = 7 degrees of freedom


# A pure model, a hybrid, and one with both in a layer; the others take their time.
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("mamba2", "bamba", "falcon_h1") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILY_NAMES
    ],
)
def test_sampling_follows_the_targets_distribution(family: str, monkeypatch):
    """
    Every token drawn is compared with the exact distribution that the untouched model gives it, without a cache.
    Neither the draft's own tokens nor those of a cache that takes nothing back from its state pass.
    """

    def small_model(seed: int):
        model = tiny_model(family, vocab_size=SMALL, seed=seed)
        logits = whole_forward(model, torch.randint(SMALL, (1, 50), generator=torch.Generator().manual_seed(7)))
        model.get_output_embeddings().weight.data *= 3 / logits.std()  # neither even nor nearly certain
        return configured(model, tokens=2)

    def drawn(model, max_new_tokens=120, **options) -> tuple[float, float]:
        probabilities, tokens = [], []
        for seed in range(2):
            torch.manual_seed(seed)
            ids = torch.randint(SMALL, (1, 5))
            sequences = generate(model, ids, do_sample=True, top_k=0, max_new_tokens=max_new_tokens, **options)
            probabilities.append(whole_forward(untouched, sequences)[0, 4:-1].softmax(-1))
            tokens.append(sequences[0, 5:])
        return surprise(torch.cat(probabilities), torch.cat(tokens))

    untouched, target = small_model(seed=0), hf_replayssm.enable(small_model(seed=0))
    helper = hf_replayssm.enable(small_model(seed=3))
    for options in ({"assistant_model": helper, "max_new_tokens": 50}, {"prompt_lookup_num_tokens": 3}):
        assert max(drawn(target, **options)) < 1, options
    assert max(drawn(helper, max_new_tokens=50)) > 2
    forgetful_crop(monkeypatch)
    assert max(drawn(target, prompt_lookup_num_tokens=3)) > 1.5


def test_what_sampling_accepts(family: str):
    """A perfect draft's tokens are accepted, whatever is drawn."""
    ids = random_ids(1, 7, seed=131)
    torch.manual_seed(5)
    with Forwards(enabled_model(family)) as target:
        sequences = generate(family, ids, do_sample=True, assistant_model=draft_model(family, "perfect"))
    assert target.tokens == [7 + 5, 6, 6, 6]
    assert not torch.equal(sequences, generate(family, ids))


# ------------------------------------------------------------------------------------------------ a loop of one's own
@torch.no_grad()
def speculate(name: str, ids: torch.Tensor, helper, drafts: int, new_tokens: int) -> tuple[torch.Tensor, object]:
    """Greedy speculative decoding as one would write it, without `generate`."""
    target = enabled_model(name)
    cache = hf_replayssm.ReplayCache(config=target.config, buffer_len=4, max_window=drafts + 1)
    draft_cache = hf_replayssm.ReplayCache(config=helper.config, buffer_len=4, max_window=drafts + 1)
    cache.activate_past_recording()
    draft_cache.activate_past_recording()
    end = ids.shape[1] + new_tokens
    while ids.shape[1] < end:
        window = ids
        for _ in range(drafts):
            logits = helper(window[:, draft_cache.get_seq_length() :], cache=draft_cache).logits
            window = torch.cat([window, logits[:, -1:].argmax(-1)], dim=1)
        seen = cache.get_seq_length()
        best = target(window[:, seen:], cache=cache).logits.argmax(-1)[:, -drafts - 1 :]
        accepted = int((window[:, -drafts:] == best[:, :-1]).long().cumprod(1).sum())
        ids = torch.cat([ids, best[:, : accepted + 1]], dim=1)
        cache.crop(-(drafts - accepted))
        draft_cache.crop(-max(0, drafts - 1 - accepted))
    return ids, cache


def test_a_loop_of_ones_own(family: str):
    ids = random_ids(1, 6, seed=132)
    for kind in ("near", "perfect"):
        helper = hf_replayssm.enable(draft_model(family, kind))
        sequences, cache = speculate(family, ids, helper, drafts=4, new_tokens=20)
        assert_greedy(family, sequences, slice(6, None))
        assert cache.get_seq_length() == sequences.shape[1] - 1
        again = generate(family, sequences, cache=cache, prompt_lookup_num_tokens=3)  # and `generate` goes on
        assert_greedy(family, again, slice(6, None))


# ------------------------------------------------------------------------------------------------ MTP
def test_mtp_is_refused_where_there_is_none(family: str):
    """No config of these families has all that upstream builds MTP layers from; Nemotron-H's own fields are others."""
    model = enabled_model(family)
    cache = hf_replayssm.ReplayCache(config=model.config)
    with pytest.raises(ValueError, match="num_mtp_layers.*Use an `assistant_model`"):
        generate(model, random_ids(1, 5), use_mtp=True, cache=cache)
    assert cache.get_seq_length() == 0 and not cache.record_past


def test_half_a_description_of_mtp_is_none():
    """Bailing's config counts the layers, and upstream wants to know of what type they are."""
    assert enabled_model("bailing_hybrid").config.num_mtp_layers == 1
    with pytest.raises(ValueError, match="no mtp_layer_types.*Use an `assistant_model`"):
        generate("bailing_hybrid", random_ids(1, 5), use_mtp=True)


def model_with_mtp(folder, family: str, layers: int):
    """
    A checkpoint with `layers` MTP layers of one attention block each, and a config that names them as upstream's
    `MtpModel` reads them. (Published checkpoints of these families describe, or name, theirs in another way.)
    """
    model = tiny_model(family)
    model.config.num_mtp_layers = layers
    model.config.mtp_layer_types = ["full_attention"] * layers
    if family == "nemotron_h":
        model.config.rms_norm_eps = model.config.layer_norm_epsilon
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    hidden = model.config.hidden_size
    block = next(name for name in weights if name.endswith("q_proj.weight")).rpartition(".q_proj")[0]
    attention = block.rpartition(".")[0] + "."
    for layer in range(layers):
        own = f"mtp.layers.{layer}."
        for name in ("enorm", "hnorm", "post_norm"):
            weights[f"{own}{name}.weight"] = torch.full((hidden,), float(family == "nemotron_h"))  # Qwen's adds one
        weights[f"{own}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
        for name in [name for name in weights if name.startswith(attention)]:
            weights[f"{own}mtp_block.{name.removeprefix(attention)}"] = weights[name].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = hf_replayssm.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@pytest.mark.parametrize(
    ("family", "layers"), [("nemotron_h", 1), ("nemotron_h", 2), ("nemotron_h", 3), ("qwen3_5_text", 2)]
)
def test_mtp(family: str, layers: int, tmp_path, monkeypatch):
    """Layers that know nothing, and layers that are right now and then: the tokens are greedy."""
    model = model_with_mtp(tmp_path, family, layers)
    ids = random_ids(1, 7, seed=133)
    plain = generate(model, ids)
    assert_greedy(family, plain, slice(7, None))
    with Forwards(model) as target:
        assert torch.equal(generate(model, ids, use_mtp=True), plain)
    assert target.tokens[0] == 7 and max(target.tokens[1:]) == layers + 1

    rights, forward = itertools.cycle([layers, 0, 1]), MtpModel.forward

    def helped(self, *args, full_input_ids, **kwargs):
        tokens, logits, loss = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        known = plain[:, full_input_ids.shape[1] :][:, : min(next(rights), tokens.shape[1])]
        tokens[:, : known.shape[1]] = known
        return tokens, logits, loss

    monkeypatch.setattr(MtpModel, "forward", helped)
    with Forwards(model) as target:
        out = generate(model, ids, use_mtp=True, return_dict_in_generate=True, cache_config={"buffer_len": 2})
    assert torch.equal(out.sequences, plain) and len(target.tokens) < NEW - 4
    assert out.cache.stats.tokens_cropped > 0 and out.cache.get_seq_length() == plain.shape[1] - 1

    # It drafts from the hidden states of the whole prompt, so a later turn cannot begin with it; it can with others.
    text = torch.cat([plain, random_ids(1, 3, seed=134)], dim=1)
    with pytest.raises(ValueError, match="use_mtp.*already seen"):
        generate(model, text, use_mtp=True, cache=out.cache)
    again = generate(model, text, prompt_lookup_num_tokens=3, cache=out.cache)
    assert_greedy(family, again, slice(text.shape[1], None))
