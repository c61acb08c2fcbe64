"""
`speculative_generate`: the tokens are those of plain decoding whatever the draft proposes, sampling has the target's
distribution, and after every round both models go on as if rejected tokens had never been seen.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from tiny_models import (
    FAMILY_NAMES,
    FIRST_TOKEN,
    VOCAB,
    assert_same_logits,
    copy_of,
    enabled_model,
    greedy_without_cache,
    random_ids,
    shared_model,
    tiny_model,
    whole_forward,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import hf_replayssm
from hf_replayssm import ReplayCache, bundled, is_enabled, speculative_generate
from hf_replayssm.speculative import acceptance, loop
from hf_replayssm.speculative.lookup import PromptLookup


NEW_TOKENS = 14
PADDING = (3, 0, 6, 1)  # columns on the left of each row, of 7


def prompts(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of 4, 7, 1 and 6 tokens, padded on the left with token 0: ids and mask (4, 7)."""
    ids = random_ids(len(PADDING), 7, seed=seed)
    mask = (torch.arange(7) >= torch.tensor(PADDING)[:, None]).long()
    return ids * mask, mask


_alone: dict[str, torch.Tensor] = {}


def row_by_row(name: str) -> torch.Tensor:
    """New tokens (4, NEW_TOKENS) of each row of `prompts()` decoded alone, greedily and without drafts."""
    if name not in _alone:
        ids, _ = prompts()
        rows = [row[padding:][None] for row, padding in zip(ids, PADDING)]
        new = [enabled_model(name).generate(row, max_new_tokens=NEW_TOKENS)[:, row.shape[1] :] for row in rows]
        _alone[name] = torch.cat(new)
    return _alone[name]


def with_changed_logits(name: str, change) -> torch.nn.Module:
    """A draft that is the target but for `change` of its logits."""
    model = copy_of(name)

    def hook(module, args, output):
        output.logits = change(output.logits)

    model.register_forward_hook(hook)
    return model


def noisy(logits: torch.Tensor) -> torch.Tensor:
    """The same preference for some tokens everywhere: now and then another token is the best."""
    bias = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    return logits + 0.25 * logits.std() * bias


def plain_draft(kind: str, vocab: int = VOCAB) -> torch.nn.Module:
    """A tiny attention model."""
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        elif kind == "mistral":
            model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4))
        else:
            model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval().requires_grad_(False)


def drafting(kind: str, name: str) -> dict:
    """Arguments of a call that drafts in this way."""
    if kind == "prompt lookup":
        return {"prompt_lookup_num_tokens": 3}
    drafts = {
        "the target": lambda: enabled_model(name),
        "noisy": lambda: with_changed_logits(name, noisy),
        "rejected": lambda: with_changed_logits(name, torch.neg),  # its best token is the target's worst
        "random": lambda: tiny_model(name, seed=1),
        "attention": lambda: plain_draft("llama"),
    }
    return {"assistant_model": drafts[kind](), "num_assistant_tokens": 4}


# Greedy decoding.


@pytest.mark.parametrize("kind", ["the target", "noisy", "rejected", "random", "attention", "prompt lookup"])
def test_greedy_tokens_are_those_of_each_row_alone(family, kind):
    ids, mask = prompts()
    output = speculative_generate(
        enabled_model(family),
        ids,
        mask,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **drafting(kind, family),
    )
    assert torch.equal(output.sequences[:, :7], ids)
    assert torch.equal(output.sequences[:, 7:], row_by_row(family))

    statistics = output.statistics
    assert statistics.new_tokens_per_row == (NEW_TOKENS,) * 4
    if kind == "the target":
        assert statistics.acceptance_rate == 1 and statistics.rounds == math.ceil(NEW_TOKENS / 5)
    elif kind == "noisy":
        assert 0.1 < statistics.acceptance_rate < 0.95
        assert len(set(statistics.accepted_per_row)) > 1  # rows went on at their own pace
    elif kind == "rejected":
        assert statistics.acceptance_rate == 0 and statistics.rounds == NEW_TOKENS


FURTHER_DRAFTS = ("other family", "mistral", "gpt2")  # with two families


@pytest.mark.parametrize(
    "family, draft",
    [(family, draft) for family in FAMILY_NAMES for draft in ("same family", "llama")]
    + [(family, draft) for family in ("mamba2", "bamba") for draft in FURTHER_DRAFTS],
)
@pytest.mark.parametrize("buffer_len", [1, 4])
def test_rollback_is_exact_for_rows_of_their_own_pace(family, draft, buffer_len, monkeypatch):
    """
    Acceptance is forced to be arbitrary, rejections of everything and of nothing included. Still the target's scores
    are those of the whole sequence, and the draft proposes what it would propose from the start of each row.
    """
    model = hf_replayssm.enable(copy_of(family), buffer_len=buffer_len)
    if draft == "same family":
        assistant = tiny_model(family, seed=1)
    elif draft == "other family":
        assistant = tiny_model("falcon_h1")
    else:
        assistant = plain_draft(draft)
    ids, mask = (tensor[:3] for tensor in prompts())
    generator = torch.Generator().manual_seed(1)
    rounds = []
    counts = iter([(0, 3, 1), (0, 0, 3), (3, 3, 0), (2, 0, 1), (1, 1, 2), (0, 0, 0)] * 5)

    def accept(scores, drafts, available):
        rounds.append((scores.clone(), drafts.clone()))
        accepted = torch.tensor(next(counts)).minimum(available.clamp(min=0))
        return accepted, torch.randint(FIRST_TOKEN, VOCAB, (3,), generator=generator)

    taken = []
    advance = loop.Speculation._advance

    def recorded(self, kept, *args):
        taken.append((self.rows.clone(), self.lengths[self.rows].clone()))
        advance(self, kept, *args)

    monkeypatch.setattr(loop, "accept_greedy", accept)
    monkeypatch.setattr(loop.Speculation, "_advance", recorded)
    monkeypatch.setattr(loop, "LEAVING_SHARE", 2)  # nobody leaves
    arguments = {"assistant_model": assistant, "num_assistant_tokens": 3}
    sequences = speculative_generate(model, ids, mask, max_new_tokens=11, **arguments)

    plain = shared_model(family)
    hf_replayssm.disable(assistant)
    compared = 0
    for (scores, drafts), (rows, lengths) in zip(rounds, taken):
        for row, length in zip(rows.tolist(), lengths.tolist()):
            if length == sequences.shape[1]:
                continue  # finished
            begin = sequences[row, PADDING[row] : length]
            expected = whole_forward(plain, torch.cat([begin, drafts[row]])[None])[0, len(begin) - 1 :]
            assert_same_logits(scores[row], expected, what=f"row {row} at {length}")
            best = greedy_without_cache(assistant, begin[None], drafts.shape[1])[0, len(begin) :]
            assert torch.equal(drafts[row], best), f"row {row} at {length}"
            compared += 1
    assert compared > 12


def test_buffers_are_as_small_as_the_window_needs():
    model = enabled_model("bamba")
    output = speculative_generate(
        model,
        *prompts(),
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **drafting("noisy", "bamba"),
    )
    cache = output.cache
    assert cache.max_window == 5 and cache.stats.buffer_growths == 0
    # Nothing is run again after a crop: the prompt, and a window a round.
    assert cache.stats.forwards == output.statistics.target_forwards == output.statistics.rounds + 1


def test_windows_have_no_columns_for_drafts_that_no_row_has():
    model, widths = enabled_model("bamba"), []
    handle = model.register_forward_hook(lambda _, args, output: widths.append(output.logits.shape[1]))
    ids = torch.arange(20, 32).view(2, 6)  # every token once: nothing to look up yet
    output = speculative_generate(
        model, ids, prompt_lookup_num_tokens=3, max_new_tokens=40, return_dict_in_generate=True
    )
    handle.remove()
    assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=40))
    widths = widths[1:]  # behind the prompt
    assert widths[0] == 1 and max(widths) == 4 and len(widths) == output.statistics.rounds
    # A row that has drafts has its columns: no more are verified than there are.
    assert all(drafted <= 2 * (width - 1) for drafted, width in zip(output.statistics.drafted_per_round, widths))


def test_heuristic_schedule_lengthens_and_shortens_the_drafts():
    model, ids = enabled_model("mamba2"), random_ids(2, 5)
    arguments = {"max_new_tokens": 40, "num_assistant_tokens": 2, "return_dict_in_generate": True}
    lengths = {}
    for schedule, kind in itertools.product(("constant", "heuristic"), ("the target", "rejected")):
        draft = drafting(kind, "mamba2")["assistant_model"]
        output = speculative_generate(
            model, ids, assistant_model=draft, num_assistant_tokens_schedule=schedule, **arguments
        )
        assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=40))
        lengths[schedule, kind] = [drafted // 2 for drafted in output.statistics.drafted_per_round[:4]]
    assert lengths["constant", "the target"] == lengths["constant", "rejected"] == [2, 2, 2, 2]
    assert lengths["heuristic", "the target"] == [2, 4, 6, 8]
    assert lengths["heuristic", "rejected"] == [2, 1, 1, 1]


@pytest.mark.parametrize("prompt", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize("kind", ["noisy", "attention", "prompt lookup"])
def test_short_prompts_and_short_outputs(prompt, new, kind):
    model, ids = enabled_model("falcon_h1"), random_ids(3, prompt)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    for length in ({"max_new_tokens": new}, {"max_length": prompt + new}):
        got = speculative_generate(model, ids, **length, **drafting(kind, "falcon_h1"))
        assert torch.equal(got, expected)


def test_default_length_and_chunked_prefill():
    model, (ids, mask) = enabled_model("zamba2"), prompts()
    arguments = drafting("noisy", "zamba2")
    expected = model.generate(ids, attention_mask=mask)
    assert torch.equal(speculative_generate(model, ids, mask, **arguments), expected)
    assert torch.equal(speculative_generate(model, ids, mask, prefill_chunk_size=2, **arguments), expected)
    config = GenerationConfig(max_new_tokens=6)
    got = speculative_generate(model, ids, mask, generation_config=config, **arguments)
    assert torch.equal(got, expected[:, :13])


# Ends.


@pytest.mark.parametrize(
    "kind, stay", [("the target", False), ("noisy", False), ("noisy", True), ("attention", False), ("attention", True)]
)
def test_rows_end_at_their_end_tokens_and_leave(family, kind, stay, monkeypatch):
    model, (ids, mask) = enabled_model(family), prompts()
    new = row_by_row(family)
    ends = {"eos_token_id": [int(new[0, 2]), int(new[1, 8])], "pad_token_id": 1, "max_new_tokens": NEW_TOKENS}
    expected = model.generate(ids, attention_mask=mask, **ends)
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends["eos_token_id"]), len(row)) for row in new.tolist()]
    assert len(set(lengths)) > 1

    batches = []
    handle = model.register_forward_hook(lambda _, args, output: batches.append(len(output.logits)))
    if stay:
        monkeypatch.setattr(loop, "LEAVING_SHARE", 2)
    output = speculative_generate(model, ids, mask, return_dict_in_generate=True, **ends, **drafting(kind, family))
    handle.remove()
    assert torch.equal(output.sequences, expected)
    assert output.statistics.new_tokens_per_row == tuple(lengths)
    if kind != "the target":  # which is counted by the hook as well
        assert (batches[-1] == len(ids)) == stay
        assert batches == sorted(batches, reverse=True)


@pytest.mark.parametrize("kind", ["rejected", "attention"])
def test_rows_leave_a_draft_that_holds_no_token(kind):
    """Prompts of one token, and nothing accepted: the draft's cache is empty when the first row ends."""
    model, ids = enabled_model("falcon_h1"), random_ids(3, 1)
    first = model.generate(ids, max_new_tokens=1)[:, 1]
    ends = {"eos_token_id": int(first[1]), "pad_token_id": 0, "max_new_tokens": 9}
    output = speculative_generate(model, ids, return_dict_in_generate=True, **ends, **drafting(kind, "falcon_h1"))
    assert output.statistics.accepted_per_round[0] == 0 and output.statistics.new_tokens_per_row[1] == 1
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **ends)
    assert torch.equal(output.sequences, expected)


class EndsWhere(StoppingCriteria):
    """Holds for rows whose last two tokens have such a sum. Counts how often it was asked of a row."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += len(input_ids)
        return input_ids[:, -2:].sum(1) % 5 == 0


@pytest.mark.parametrize("kind", ["the target", "prompt lookup"])
def test_stopping_criteria_are_asked_for_each_token_of_the_output(kind):
    model, (ids, mask) = enabled_model("bamba"), prompts()
    ends = {"eos_token_id": VOCAB + 1, "pad_token_id": 1, "max_new_tokens": NEW_TOKENS}  # an end token never drawn
    expected = model.generate(ids, attention_mask=mask, stopping_criteria=[EndsWhere()], **ends)
    criterion = EndsWhere()
    output = speculative_generate(
        model,
        ids,
        mask,
        stopping_criteria=[criterion],
        return_dict_in_generate=True,
        **ends,
        **drafting(kind, "bamba"),
    )
    assert torch.equal(output.sequences, expected)
    assert len(set(output.statistics.new_tokens_per_row)) > 1
    assert criterion.asked == output.statistics.new_tokens


def test_max_time_ends_all_rows():
    ids = random_ids(2, 4)
    arguments = drafting("rejected", "bamba") | {"max_time": 0.0, "pad_token_id": 0}
    assert speculative_generate(enabled_model("bamba"), ids, max_new_tokens=9, **arguments).shape == (2, 5)


# Logits processors.


class NotAfter(LogitsProcessor):
    """Forbids what depends on the last tokens and on their number."""

    def __call__(self, input_ids, scores):
        forbidden = (input_ids[:, -1:] * 7 + input_ids.shape[1] + torch.arange(40)) % VOCAB
        return scores.scatter(1, forbidden, -math.inf)


@pytest.mark.parametrize("kind", ["the target", "noisy", "prompt lookup"])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"logits_processor": [NotAfter()], "min_new_tokens": 6},
        {"suppress_tokens": list(range(3, 60))},
        {"forced_eos_token_id": 5, "exponential_decay_length_penalty": (3, 1.5)},
    ],
)
def test_processors_see_what_they_see_in_generate(kind, settings):
    model, (ids, mask) = enabled_model("bamba"), prompts()
    new = row_by_row("bamba")
    common = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [int(new[0, 2]), int(new[1, 8])], "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **common, **settings)
    arguments = common | settings | drafting(kind, "bamba") | {"return_dict_in_generate": True}
    output = speculative_generate(model, ids, mask, **arguments)
    assert torch.equal(output.sequences, expected)
    assert not torch.equal(expected, model.generate(ids, attention_mask=mask, **common))
    if kind == "the target":
        # The draft's scores went through them too. (Behind an end token drafts count as rejected.)
        s = output.statistics
        counts = list(zip(s.new_tokens_per_row, s.drafted_per_row, s.accepted_per_row))
        assert all(accepted > drafted - 4 for _, drafted, accepted in counts)
        assert all(accepted == drafted for new, drafted, accepted in counts if new == NEW_TOKENS)


def test_repetition_penalty_knows_the_padding_of_each_row():
    """Six tokens only, so that it matters to each row which of them its prompt has."""
    model, mask = hf_replayssm.enable(small_model(0)), prompts()[1].repeat(4, 1)
    ids = torch.randint(0, SMALL_VOCAB, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    draft = small_model(1)
    # With an end token, so that rows leave.
    arguments = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 2.5, "eos_token_id": 2, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(speculative_generate(model, ids, mask, assistant_model=draft, **arguments), expected)


# Sampling.

SMALL_VOCAB, SAMPLED, ROWS = 6, 3, 4000


def small_model(seed: int) -> torch.nn.Module:
    return tiny_model("bamba", seed=seed, vocab_size=SMALL_VOCAB)


def exact_distribution(model, prompt: list[int], temperature: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """(SMALL_VOCAB,) * SAMPLED: the probability of each continuation."""
    log_p = torch.zeros((SMALL_VOCAB,) * SAMPLED, dtype=torch.float64)
    continuations = list(itertools.product(range(SMALL_VOCAB), repeat=SAMPLED))
    logits = whole_forward(model, torch.tensor([prompt + list(c) for c in continuations]))[:, len(prompt) - 1 :]
    logits = logits.double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    for continuation, steps in zip(continuations, logits.log_softmax(-1)):
        log_p[continuation] = sum(steps[number, token] for number, token in enumerate(continuation))
    return log_p.exp()


def standard_deviations_off(samples: torch.Tensor, p: torch.Tensor) -> float:
    """
    Pearson's chi-square of `samples` (n, SAMPLED) against the joint probabilities, in standard deviations above its
    mean. Continuations with an expected count below 5 are taken together.
    """
    base = SMALL_VOCAB ** torch.arange(SAMPLED - 1, -1, -1)
    observed = torch.bincount((samples * base).sum(1), minlength=p.numel()).double()
    expected = p.flatten() * len(samples)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    observed, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi2, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 20
    return float((chi2 - freedom) / math.sqrt(2 * freedom))


# Of the right distribution the deviation has mean 0 and standard deviation 1, with a heavier tail than a normal one.
BAR = 4.5


def sampled(model, prompt: list[int], **arguments) -> tuple[torch.Tensor, object]:
    torch.manual_seed(0)
    output = speculative_generate(
        model,
        torch.tensor([prompt]),
        do_sample=True,
        num_return_sequences=ROWS,
        max_new_tokens=SAMPLED,
        return_dict_in_generate=True,
        **{"top_k": 0, **arguments},
    )
    return output.sequences[:, len(prompt) :], output.statistics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_k": 4},
        {"prompt_lookup_num_tokens": 2},
        {"prompt_lookup_num_tokens": 2, "temperature": 1.3},
    ],
)
def test_sampling_has_the_distribution_of_the_target(settings):
    model, prompt = small_model(0), [3, 4, 5, 3, 4, 5, 3, 4]
    expected = exact_distribution(model, prompt, settings.get("temperature", 1.0), settings.get("top_k", 0))
    hf_replayssm.enable(model)
    if "prompt_lookup_num_tokens" not in settings:
        settings = settings | {"assistant_model": small_model(1), "num_assistant_tokens": 2}
    samples, statistics = sampled(model, prompt, **settings)
    assert 0.03 < statistics.acceptance_rate < 0.95
    assert standard_deviations_off(samples, expected) < BAR


WRONG = {
    "the refused token may come again": ("residual", lambda p, q: p),
    "the draft's distribution": ("residual", lambda p, q: q),
    "every draft accepted": ("_run_length", lambda accept, available: available),
}


@pytest.mark.parametrize(
    "what, source",
    [(what, "draft model") for what in WRONG]
    + [("the refused token may come again", "prompt lookup"), ("every draft accepted", "prompt lookup")],
)
def test_a_wrong_correction_is_noticed(what, source, monkeypatch):
    monkeypatch.setattr(acceptance, *WRONG[what])
    model, prompt = small_model(0), [3, 4, 5, 3, 4, 5, 3, 4]
    expected = exact_distribution(model, prompt)
    hf_replayssm.enable(model)
    settings = {"prompt_lookup_num_tokens": 2}
    if source == "draft model":
        settings = {"assistant_model": small_model(1), "num_assistant_tokens": 2}
    samples, _ = sampled(model, prompt, **settings)
    assert standard_deviations_off(samples, expected) > 3 * BAR


def test_a_perfect_draft_is_always_accepted_when_sampling():
    model, (ids, mask) = enabled_model("granitemoehybrid"), prompts()
    output = speculative_generate(
        model,
        ids,
        mask,
        assistant_model=model,
        do_sample=True,
        top_p=0.9,
        repetition_penalty=1.3,
        max_new_tokens=20,
        return_dict_in_generate=True,
    )
    assert output.statistics.acceptance_rate > 0.99  # up to rounding


# The rules by themselves.


def test_accept_greedy():
    best = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    scores = torch.nn.functional.one_hot(best, 9).float()
    drafts = torch.tensor([[4, 5, 6], [4, 1, 6], [1, 5, 6], [4, 5, 6]])
    accepted, token = acceptance.accept_greedy(scores, drafts, torch.tensor([3, 3, 3, 1]))
    assert accepted.tolist() == [3, 1, 0, 1] and token.tolist() == [7, 5, 4, 5]


def test_accept_sampled_at_its_limits():
    one_hot = torch.nn.functional.one_hot
    p = one_hot(torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), 5).float()
    drafts = torch.tensor([[1, 2], [1, 4], [1, 2]])
    accepted, token = acceptance.accept_sampled(p, one_hot(drafts, 5).float(), drafts, torch.tensor([2, 2, 0]))
    # All; up to a draft that p does not know; and none where there was none, though p would have taken it.
    assert accepted.tolist() == [2, 1, 0] and token.tolist() == [3, 2, 1]


def test_residual():
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]), torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.3, 0.5]])
    assert torch.allclose(acceptance.residual(p, q), torch.tensor([[0.0, 0.2, 0.0], [0.2, 0.3, 0.5]]))


def naive_look_up(tokens: list[int], drafts: int, ngram: int) -> list[int]:
    for size in range(min(ngram, len(tokens) - 1), 0, -1):
        for end in range(size, len(tokens)):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + drafts]
    return []


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_prompt_lookup_equals_a_search_after_every_round(ngram):
    generator = torch.Generator().manual_seed(0)
    counts = set()
    for row in torch.randint(0, 4, (40, 30), generator=generator).tolist():
        lookup, end = PromptLookup(ngram), 0
        while end < len(row):
            new = int(torch.randint(0, 5, (1,), generator=generator))  # a round may also end with no token of a row
            lookup.extend(row[end : end + new])
            end += new
            expected = naive_look_up(row[:end], 3, ngram)
            assert lookup.drafts(3) == expected
            counts.add(len(expected))
    assert counts == {0, 1, 2, 3}


# The bundled models: text with something to accept.


@pytest.mark.parametrize("source", ["draft", "lookup"])
def test_bundled_models_save_forwards(source):
    model, tokenizer = bundled.load_target()
    texts = ["It was a truth", "She could not", "The evening passed, and the evening passed, and"]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    arguments = {"assistant_model": bundled.load_draft()[0]} if source == "draft" else {"prompt_lookup_num_tokens": 4}
    hf_replayssm.enable(model)
    output = speculative_generate(model, **inputs, max_new_tokens=48, return_dict_in_generate=True, **arguments)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=48))
    assert output.statistics.forwards_saved > 5 and output.statistics.acceptance_rate > 0.15
    assert len(set(output.statistics.accepted_per_row)) > 1


def test_stop_strings():
    model, tokenizer = bundled.load_target()
    hf_replayssm.enable(model)
    inputs = tokenizer("It was a truth", return_tensors="pt", return_token_type_ids=False)
    common = {"max_new_tokens": 40, "stop_strings": ["ing"], "tokenizer": tokenizer}
    expected = model.generate(**inputs, **common)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 40
    got = speculative_generate(model, **inputs, assistant_model=bundled.load_draft()[0], **common)
    assert torch.equal(got, expected)


# Statistics and outputs.


def test_statistics_add_up():
    ids, mask = prompts()
    output = speculative_generate(
        enabled_model("bamba"),
        ids,
        mask,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **drafting("noisy", "bamba"),
    )
    s = output.statistics
    assert len(s.drafted_per_round) == len(s.accepted_per_round) == s.rounds
    assert sum(s.drafted_per_round) == sum(s.drafted_per_row)
    assert sum(s.accepted_per_round) == sum(s.accepted_per_row)
    assert s.new_tokens == 4 * NEW_TOKENS == output.sequences[:, 7:].numel()
    # Each round gives a row its accepted drafts and a token of the target's.
    assert all(new - accepted <= s.rounds for new, accepted in zip(s.new_tokens_per_row, s.accepted_per_row))
    assert s.target_forwards == s.rounds + 1 and s.forwards_saved == NEW_TOKENS - s.target_forwards
    assert 0 < s.seconds < 60 and s.tokens_per_second == s.new_tokens / s.seconds
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.rounds = 0


class Pieces(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_gets_the_tokens_of_a_round():
    model, ids, streamer = enabled_model("bamba"), random_ids(1, 5), Pieces()
    arguments = {"max_new_tokens": 9, "assistant_model": model, "num_assistant_tokens": 3}
    sequences = speculative_generate(model, ids, streamer=streamer, **arguments)
    assert streamer.ended and [len(piece) for piece in streamer.pieces] == [5, 4, 4, 1]
    assert list(itertools.chain(*streamer.pieces)) == sequences[0].tolist()


def test_padding_is_told_by_the_pad_token_where_no_mask_is_given():
    model, (ids, mask) = enabled_model("bamba"), prompts()
    arguments = drafting("noisy", "bamba") | {"max_new_tokens": 8}
    with_mask = speculative_generate(model, ids, mask, **arguments)
    assert torch.equal(speculative_generate(model, ids, pad_token_id=0, **arguments), with_mask)


# Going on from a cache.


@pytest.mark.parametrize("kind", ["the target", "attention", "prompt lookup"])
def test_a_cache_that_has_seen_the_beginning(kind):
    model, (ids, mask) = enabled_model("bamba"), prompts()
    cache = ReplayCache(config=model.config)
    model(input_ids=ids[:, :5], attention_mask=mask[:, :5], cache=cache)
    arguments = drafting(kind, "bamba") | {"max_new_tokens": NEW_TOKENS}
    ends = {"eos_token_id": int(row_by_row("bamba")[0, 2]), "pad_token_id": 0}
    output = speculative_generate(model, ids, mask, cache=cache, return_dict_in_generate=True, **ends, **arguments)
    assert torch.equal(output.sequences, model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **ends))
    # All rows are in it, without their newest tokens.
    assert output.cache is cache and not cache.record_past
    seen = [4 + new - 1 + 3 - padding for new, padding in zip(output.statistics.new_tokens_per_row, PADDING)]
    assert cache.lengths.tolist() == seen


def test_two_turns_on_one_cache():
    model, ids = enabled_model("nemotron_h"), random_ids(2, 6)
    cache = ReplayCache(config=model.config)
    arguments = drafting("noisy", "nemotron_h") | {"max_new_tokens": 7}
    first = speculative_generate(model, ids, cache=cache, **arguments)
    turn = torch.cat([first, random_ids(2, 4, seed=9)], dim=1)
    before = cache.stats.tokens
    second = speculative_generate(model, turn, cache=cache, **arguments)
    assert torch.equal(second, model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=7))
    windows = second.shape[0] * 5 * 7
    assert cache.stats.tokens - before <= 2 * 4 + windows  # only what is new went through the model again


# What is refused, before anything is changed.


REFUSED = {
    "both": ({"prompt_lookup_num_tokens": 3}, "one source"),
    "neither": ({"assistant_model": None}, "one source"),
    "beams": ({"num_beams": 2}, "num_beams=2.*model.generate"),
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 3}, "contrastive_search"),
    "use_mtp": ({"use_mtp": True}, "use_mtp"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "dynamic": ({"cache_implementation": "dynamic"}, "cache_implementation"),
    "embeds": ({"inputs_embeds": torch.zeros(4, 7, 48)}, "input_ids"),
    "old name": ({"past_key_values": DynamicCache()}, "`cache`"),
    "other cache": ({"cache": DynamicCache()}, "ReplayCache"),
    "typo": ({"max_new_token": 3}, "'max_new_token'.*typo"),
    "prefix fn": ({"prefix_allowed_tokens_fn": lambda row, ids: [3]}, "'prefix_allowed_tokens_fn'"),
    "no drafts": ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
    "threshold": ({"assistant_confidence_threshold": 0.3}, "assistant_confidence_threshold"),
    "streamer": ({"streamer": Pieces()}, "row by row"),
    "criterion without padding": ({"stopping_criteria": [EndsWhere()]}, "pad_token_id"),
    "tokenizers": ({"assistant_tokenizer": object()}, "model.generate"),
    "length": ({"max_new_tokens": None, "max_length": 7}, "max_length"),
    "mask": ({"attention_mask": torch.ones(4, 6)}, "same shape"),
    "right padding": ({"attention_mask": torch.ones(4, 7).tril(3)}, "left"),
    "no ids": ({"input_ids": None}, "input_ids"),
    "setting": ({"cache_config": {"buffer_length": 3}}, "buffer_length"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_names_the_remedy_and_changes_nothing(what):
    given, message = REFUSED[what]
    model, draft, (ids, mask) = enabled_model("bamba"), copy_of("mamba2"), prompts()
    arguments = {"input_ids": ids, "attention_mask": mask, "assistant_model": draft, "max_new_tokens": 4} | given
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, **arguments)
    assert not is_enabled(draft)


def test_other_vocabularies_other_models_and_other_drafts():
    model, ids = enabled_model("bamba"), random_ids(2, 4)
    with pytest.raises(ValueError, match=r"90 tokens.*assistant_tokenizer"):
        speculative_generate(model, ids, assistant_model=plain_draft("llama", vocab=90))
    with pytest.raises(ValueError, match=r"hf_replayssm.enable\(model\)"):
        speculative_generate(shared_model("bamba"), ids, prompt_lookup_num_tokens=3)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    with pytest.raises(ValueError, match="encoder-decoder"):
        speculative_generate(T5ForConditionalGeneration(T5Config(**sizes)), ids, prompt_lookup_num_tokens=3)
    stateful = copy.deepcopy(plain_draft("llama"))
    stateful.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="row by row"):
        speculative_generate(model, ids, assistant_model=stateful)


def test_caches_that_do_not_fit_the_rows():
    model, (ids, mask) = enabled_model("bamba"), prompts()

    def refused(cache, message):
        with pytest.raises(ValueError, match=message):
            speculative_generate(model, ids, mask, cache=cache, prompt_lookup_num_tokens=3, max_new_tokens=4)

    refused(ReplayCache(config=shared_model("mamba2").config), "another model")
    cache = ReplayCache(config=model.config)
    model(input_ids=ids[:2, :5], attention_mask=mask[:2, :5], cache=cache)
    refused(cache, "batch of 2")
    cache.reset()
    model(input_ids=ids[:, :5], cache=cache)
    refused(cache, "padding")
    cache.reset()
    model(input_ids=ids, attention_mask=mask, cache=cache)
    refused(cache, r"crop\(-1\)")


def test_a_draft_of_a_supported_family_is_enabled():
    draft = copy_of("mamba2")
    speculative_generate(enabled_model("bamba"), random_ids(2, 4), assistant_model=draft, max_new_tokens=4)
    assert is_enabled(draft)
