"""Defects that were found by trying to break the cache, each as it was found."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import (
    FAMILY_NAMES,
    assert_same_logits,
    copy_of,
    enabled_model,
    greedy_without_cache,
    random_ids,
    relative_error,
    shared_model,
    whole_forward,
)

import hf_replayssm
from hf_replayssm import CropError, ReplayCache


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def recording(model, **fields) -> ReplayCache:
    cache = ReplayCache(config=model.config, **fields)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_length_after_the_longest_rows_have_left(family):
    model, ids = enabled_model(family), random_ids(2, 10)
    cache = recording(model)
    model(input_ids=ids, cache=cache)
    cache.crop(torch.tensor([0, -4]))
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.get_seq_length() == 6
    whole = torch.cat([ids[1:, :6], random_ids(1, 3, seed=5)], 1)
    generated = model.generate(whole, cache=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, greedy_without_cache(shared_model(family), whole, 8))


@pytest.mark.parametrize("buffer_len", [1, 4, 16])
@torch.no_grad()
def test_a_crop_reaches_behind_the_last_one_on_top_of_all_since(buffer_len):
    """As a draft does whose tokenizer is another: single steps, then a crop of all of them and of 14 tokens before."""
    model, ids = enabled_model("bamba"), random_ids(1, 400)
    expected = whole_forward(shared_model("bamba"), ids)
    cache, seen = recording(model, buffer_len=buffer_len), 60
    model(input_ids=ids[:, :seen], cache=cache)
    cache.crop(0)
    for drafts in (30, 24, 40, 5, 31):
        for _ in range(drafts):
            logits = model(input_ids=ids[:, seen : seen + 1], cache=cache).logits
            assert_same_logits(logits, expected[:, seen : seen + 1])
            seen += 1
        cache.crop(-(drafts + 14) if drafts != 5 else -14)
        seen -= (drafts + 14) if drafts != 5 else 14
        model(input_ids=ids[:, seen : seen + 30], cache=cache)
        cache.crop(0)
        seen += 30


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_an_interrupt_while_a_forward_is_closed(family, monkeypatch):
    model, ids = copy.deepcopy(enabled_model(family)), random_ids(1, 12)
    cache = ReplayCache(config=model.config, buffer_len=4)
    model(input_ids=ids[:, :4], cache=cache)

    def interrupt(self, forward):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReplayCache, "_counted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids[:, 4:8], cache=cache)
    for go_on in (lambda: model(input_ids=ids[:, 4:8], cache=cache), lambda: cache.reorder_cache(torch.tensor([0]))):
        with pytest.raises(ValueError, match=r"reset\(\)"):
            go_on()
    cache.reset()
    logits = model(input_ids=ids, cache=cache).logits
    assert_same_logits(logits, whole_forward(shared_model(family), ids))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_right_padding_however_it_comes(family, chunk):
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    with pytest.raises(ValueError, match="padding_side"):
        enabled_model(family).generate(ids, attention_mask=mask, prefill_chunk_size=chunk, max_new_tokens=3)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_a_prompt_that_the_cache_has_seen(family):
    model, ids = enabled_model(family), random_ids(1, 9)
    cache = ReplayCache(config=model.config)
    model(input_ids=ids, cache=cache)
    with pytest.raises(ValueError, match="crop"):
        model.generate(ids, cache=cache, max_new_tokens=3)
    longer = torch.cat([ids, random_ids(1, 2, seed=3)], 1)
    generated = model.generate(longer, cache=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, greedy_without_cache(shared_model(family), longer, 3))


@torch.no_grad()
def test_embeddings_and_lookup_on_a_warm_cache():
    model = enabled_model("mamba2")
    cache = ReplayCache(config=model.config)
    turn = model.generate(random_ids(1, 7), cache=cache, max_new_tokens=8, do_sample=False)
    whole = torch.cat([turn, random_ids(1, 3, seed=2)], 1)
    embeds = model.get_input_embeddings()(whole)
    generated = model.generate(
        inputs_embeds=embeds, cache=cache, prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False
    )
    assert torch.equal(generated, greedy_without_cache(shared_model("mamba2"), whole, 8)[:, -8:])


@torch.no_grad()
def test_positions_under_padding_may_be_anything():
    """transformers' own idiom puts 1 there, which is no restart of another packed sequence."""
    model, ids, mask = enabled_model("bamba"), random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    cache = ReplayCache(config=model.config)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache).logits
    assert relative_error(logits[:1, 4:], whole_forward(shared_model("bamba"), ids[:1, 4:])) < 1e-4
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="Packed"):
        model(input_ids=ids, position_ids=packed, cache=ReplayCache(config=model.config))


def test_gradients_of_a_mixers_own_parameters_are_refused():
    model = hf_replayssm.enable(copy_of("mamba2"))
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    for parameter in (mixer.D, mixer.A_log, mixer.conv1d.weight):
        parameter.requires_grad_(True)
    logits = model(input_ids=random_ids(1, 6), cache=ReplayCache(config=model.config)).logits
    with pytest.raises(RuntimeError, match="use_cache=False"):
        logits.sum().backward()


@torch.no_grad()
def test_a_forward_of_no_tokens_and_a_crop_that_is_no_count():
    model, ids = enabled_model("mamba2"), random_ids(1, 9)
    cache = recording(model)
    cache.crop(torch.zeros(3, dtype=torch.long))  # nothing to remove from nothing
    model(input_ids=ids[:, :4], cache=cache)
    with pytest.raises(ValueError, match="at least one token"):
        model(input_ids=ids[:, :0], cache=cache)
    for wrong in (-1.5, torch.tensor([-1.0]), torch.tensor([-1, -1]), 1):
        with pytest.raises((CropError, TypeError)):
            cache.crop(wrong)
    assert_same_logits(
        model(input_ids=ids[:, 4:], cache=cache).logits, whole_forward(shared_model("mamba2"), ids)[:, 4:]
    )


@torch.no_grad()
def test_the_longest_window():
    """Up to 256 tokens of a later forward can all go again."""
    model, ids = enabled_model("bamba"), random_ids(1, 270)
    cache = recording(model)
    model(input_ids=ids[:, :5], cache=cache)
    cache.crop(0)
    model(input_ids=ids[:, 5:261], cache=cache)
    cache.crop(-256)
    logits = model(input_ids=ids[:, 5:15], cache=cache).logits
    assert_same_logits(logits, whole_forward(shared_model("bamba"), ids[:, :15])[:, 5:])


@torch.no_grad()
def test_every_kind_of_copy_is_a_copy():
    model, ids = enabled_model("bamba"), random_ids(1, 20)
    cache = ReplayCache(config=model.config, buffer_len=4)
    model(input_ids=ids[:, :7], cache=cache)
    copies = [copy.copy(cache), copy.deepcopy(cache), cache.snapshot()]
    model(input_ids=random_ids(1, 6, seed=9), cache=cache)
    for other in copies:
        logits = model(input_ids=ids[:, 7:], cache=other).logits
        assert_same_logits(logits, whole_forward(shared_model("bamba"), ids)[:, 7:])


def test_settings_add_up_and_may_come_as_a_config():
    model = hf_replayssm.enable(copy_of("mamba2"), buffer_len=4)
    hf_replayssm.enable(model, max_window=8)
    made = model.generate(random_ids(1, 5), max_new_tokens=2, return_dict_in_generate=True).cache.replay_config
    assert (made.buffer_len, made.max_window) == (4, 8)
    given = hf_replayssm.ReplayConfig(buffer_len=7)
    output = model.generate(random_ids(1, 5), max_new_tokens=2, return_dict_in_generate=True, cache_config=given)
    assert output.cache.replay_config == given
    with pytest.raises(ValueError, match=r"config=model\.config"):
        ReplayCache(config=model)


@torch.no_grad()
def test_a_crop_by_a_list():
    model, ids = enabled_model("bamba"), random_ids(2, 12)
    cache = recording(model)
    model(input_ids=ids[:, :8], cache=cache)
    cache.crop([-3, 0])
    assert cache.lengths.tolist() == [5, 8]
