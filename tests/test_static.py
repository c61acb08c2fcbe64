"""The static replay cache: the plain one's answers, without a host read, a moved tensor or a second graph."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import test_properties as properties
import torch
from hypothesis import given, note, settings
from tape import HostRead, Tape
from tiny_models import (
    BUFFER_LENS,
    Session,
    assert_same_logits,
    assert_unchanged,
    copy_of,
    enabled_model,
    fingerprint,
    greedy_without_cache,
    has_attention,
    poison,
    random_ids,
    replay_layers,
    shared_model,
    tiny_config,
    tiny_model,
    whole_forward,
)
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig
from transformers.masking_utils import flash_attention_mask

import hf_replayssm
from hf_replayssm import CropError, ReplayCache, ReplayConfig, StaticReplayCache, capture, integration, static


MAX_CACHE_LEN = 260


def session(name: str, batch: int = 1, **config) -> Session:
    model = enabled_model(name)
    config.setdefault("max_cache_len", MAX_CACHE_LEN)
    return Session(name, batch, cache=StaticReplayCache(config=model.config, **config))


# ------------------------------------------------------------------------------------------------ any operations
class StaticProgram(properties.Program):
    """The plain cache's random programs. What is different: no buffer grows, and no tensor moves in a forward."""

    def __init__(self, name: str, drawn: dict):
        super().__init__(name, drawn)
        self.made = session(name, drawn["batch"], buffer_len=drawn["buffer_len"], max_window=drawn["max_window"])
        if drawn["recording"]:
            self.made.cache.activate_past_recording()

    def check_bounds(self) -> None:
        cache, made = self.made.cache, self.made
        if not any(made.columns):
            assert cache.get_seq_length() == 0
        if not any(made.history):
            return
        assert cache.lengths.tolist() == [len(tokens) for tokens in made.history]
        assert max(len(tokens) for tokens in made.history) <= cache.get_seq_length()
        assert int(cache.get_seq_length()) <= max(len(row) for row in made.columns)
        assert bool((cache.held >= 0).all()) and int(cache.held.max()) <= cache.capacity
        if not cache.record_past:
            assert cache.max_croppable == 0

    def append(self, size: int, mask: torch.Tensor | None = None) -> None:
        places = addresses(self.made.cache)
        super().append(size, mask)
        assert not places or addresses(self.made.cache) == places


def addresses(cache) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in cache.static_tensors()}


@settings(properties.common, max_examples=12)
@given(drawn=properties.programs)
def test_any_sequence_of_operations(family: str, drawn: dict):
    note(f"family: {family}")
    StaticProgram(family, drawn).run()


@pytest.mark.slow
@settings(properties.common, max_examples=300)
@given(drawn=properties.programs)
def test_any_sequence_of_operations_at_length(family: str, drawn: dict):
    StaticProgram(family, drawn).run()


# ------------------------------------------------------------------------------------------------ by hand
@pytest.mark.parametrize("buffer_len", BUFFER_LENS)
def test_crops_at_every_phase(family: str, buffer_len: int):
    """Windows that are rejected in part, by counts of their own, wherever the flushes are. (Unused slots are NaN.)"""
    made = session(family, 3, buffer_len=buffer_len, max_window=5)
    made.cache.activate_past_recording()
    made.append(3)
    for round_ in range(2 * buffer_len + 3):
        made.append(1 + round_ % 6)
        counts = [(round_ + shift) % (min(5, 1 + round_ % 6) + 1) for shift in (0, 2, 3)]
        made.crop(counts if round_ % 3 else counts[0])
    made.crop(made.cache.max_croppable)
    made.verify()


def test_down_to_nothing(family: str):
    made = session(family, 2, max_window=6)
    made.cache.activate_past_recording()
    made.append(4)
    made.crop([4, 2])
    made.append(2)
    made.crop([2, 4])
    assert made.cache.lengths.tolist() == [0, 0] and made.cache.get_seq_length() == 0
    made.append(5)
    made.verify()


@torch.no_grad()
def test_layers_flush_at_tokens_of_their_own():
    """Every layer writes its checkpoint once in `buffer_len` steps, and no step is one for all of them."""
    model = hf_replayssm.enable(tiny_model("mamba2", num_hidden_layers=8))
    cache = StaticReplayCache(config=model.config, max_cache_len=64, buffer_len=4)
    ids = random_ids(1, 40)
    model(input_ids=ids[:, :7], cache=cache)
    writes = [[] for _ in cache.replay_layers]
    for step in range(7, 39):
        before = [layer.checkpoint.clone() for layer in cache.replay_layers]
        model(input_ids=ids[:, step : step + 1], cache=cache)
        for layer, old, steps in zip(cache.replay_layers, before, writes):
            if not torch.equal(layer.checkpoint, old):
                steps.append(step)
    assert all(len(steps) == 8 and {b - a for a, b in zip(steps, steps[1:])} == {4} for steps in writes)
    per_step = [sum(step in steps for steps in writes) for step in range(11, 39)]
    assert set(per_step) == {2}  # 8 layers, 4 phases
    assert cache.stats.checkpoint_writes == 1 + 8
    assert cache.stats.tokens == 39 and cache.stats.forwards == 33


@torch.no_grad()
def test_buffer_len_1_is_the_classic_step():
    model = enabled_model("bamba")
    cache = StaticReplayCache(config=model.config, max_cache_len=64, buffer_len=1)
    for step in range(5):
        model(input_ids=random_ids(2, 1, seed=step), cache=cache)
        assert int(cache.held.max()) == 0
    assert cache.capacity == 1 and cache.stats.checkpoint_writes == 2 * 5


@torch.no_grad()
def test_memory_without_drafts_is_the_buffer_alone():
    """Room for what may be cropped is made when recording begins, and only then."""
    model = enabled_model("bamba")
    cache = StaticReplayCache(config=model.config, max_cache_len=20, buffer_len=4, max_window=6)
    made = Session("bamba", 2, cache=cache)
    made.append(5)
    layer = replay_layers(cache)[0]
    assert layer.inputs.capacity == 4 and layer.conv_inputs.shape[1] == 4
    made.append(1)
    cache.activate_past_recording()
    assert layer.inputs.capacity == 4 + 2 * 6
    made.append(6)
    made.crop([6, 1])
    made.verify()


def test_crop_after_crop_over_masked_columns(family: str):
    """How many tokens are among the newest columns has to be known of those before a crop, too."""
    made = session(family, 3, buffer_len=4, max_window=9)
    made.cache.activate_past_recording()
    made.append(4)
    made.append(4, torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]]))
    made.append(1)
    for counts in (2, [1, 0, 2], [0, 2, 1], 1):
        made.crop(counts)
        assert made.cache.lengths.tolist() == [len(tokens) for tokens in made.history]
    made.verify()


def test_a_larger_window_in_mid_stream(family: str):
    """Buffers are laid out anew, and what could be taken back still can be."""
    made = session(family, 2, buffer_len=4, max_window=3)
    made.append(5)
    made.append(1)
    made.cache.activate_past_recording()
    made.append(4)
    made.append(1)
    layout, capacity = made.cache.layout, made.cache.capacity
    made.cache.max_window = 9
    assert made.cache.layout > layout and made.cache.capacity == capacity + 2 * 6
    made.crop([3, 1])
    made.append(9)
    assert made.cache.max_croppable == 9
    made.crop([9, 2])
    made.cache.max_window = 4  # does not shrink
    assert made.cache.max_window == 9
    made.verify()


def test_reset_and_restore_move_nothing(family: str):
    made = session(family, 2, buffer_len=4, max_window=6)
    made.cache.activate_past_recording()
    made.append(9)
    made.append(1)
    made.compare()
    places, snapshot, columns = addresses(made.cache), made.cache.snapshot(), [list(row) for row in made.columns]
    made.append(3)
    made.crop([3, 0])
    made.compare()
    made.cache.restore(snapshot)
    made.columns = columns
    made.verify()
    made.cache.reset()
    assert addresses(made.cache) == places and made.cache.get_seq_length() == 0 and not made.cache.record_past
    assert all(not tensor.any() for _, tensor in made.cache.static_tensors())
    made.forget(2)
    made.append(5)
    made.append(1)
    made.verify()


@torch.no_grad()
def test_restore_from_a_cache_of_another_size():
    """These have as many slots of keys, of which they use others."""
    model, ids = enabled_model("bamba"), random_ids(1, 7)
    mine, other = (
        StaticReplayCache(config=model.config, max_cache_len=length, checkpoint_dtype=dtype)
        for length, dtype in ((8, "bfloat16"), (10, "float32"))
    )
    model(input_ids=ids[:, 2:5], cache=mine)
    model(input_ids=ids[:, :6], cache=other)
    assert {name: t.shape for name, t in mine.static_tensors()} == {name: t.shape for name, t in other.static_tensors()}
    mine.restore(other)
    assert mine.max_cache_len == 10 and mine.replay_config == other.replay_config
    logits = model(input_ids=ids[:, 6:], cache=mine).logits
    assert_same_logits(logits, whole_forward(shared_model("bamba"), ids)[:, 6:])


@torch.no_grad()
def test_rows_that_are_not_there():
    made = session("bamba", 2)
    made.append(4)
    refused(made.cache, lambda: made.cache.reorder_cache(torch.tensor([0, 5, 1])), RuntimeError, "out of")
    made.append(1)
    made.verify()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_static_too(way):
    made = session("zamba2", 2)
    made.append(5)
    other = way(made.cache)
    assert not set(addresses(other).values()) & set(addresses(made.cache).values())
    for _, tensor in other.static_tensors():
        assert tensor._dynamo_static_input_type == "unguarded"
    assert all(layer.cache is other for layer in other.layers if hasattr(layer, "cache"))


@torch.no_grad()
def test_low_precision_checkpoint():
    """Its error is the plain variant's: the state is rounded as often."""
    model = enabled_model("mamba2")
    ids, errors = random_ids(2, 60), []
    expected = whole_forward(shared_model("mamba2"), ids)
    fields = {"config": model.config, "buffer_len": 4, "checkpoint_dtype": torch.bfloat16}
    for cache in (ReplayCache(**fields), StaticReplayCache(max_cache_len=64, **fields)):
        logits = [model(input_ids=ids[:, i : i + 1], cache=cache).logits for i in range(60)]
        errors.append(float((torch.cat(logits, 1) - expected).norm() / expected.norm()))
    assert 0 < errors[1] < 1.5 * errors[0]


# ------------------------------------------------------------------------------------------------ errors
def refused(cache, call, error=ValueError, match: str = "") -> None:
    before = fingerprint(cache)
    with pytest.raises(error, match=match):
        call()
    assert_unchanged(before, cache)


@torch.no_grad()
def test_refusals_leave_everything_as_it_was():
    model = enabled_model("bamba")
    cache = StaticReplayCache(config=model.config, max_cache_len=12, buffer_len=4, max_window=3)
    cache.activate_past_recording()
    run = lambda ids, **more: lambda: model(input_ids=ids, cache=cache, **more)  # noqa: E731
    right = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(ValueError, match="pads on the right"):
        run(random_ids(2, 3), attention_mask=right)()
    run(random_ids(2, 9))()
    refused(cache, run(random_ids(3, 1)), match="laid out for a batch of 2")
    refused(cache, run(random_ids(2, 8)), hf_replayssm.CacheFullError, "room for 12 tokens and a window of 4")
    refused(cache, run(random_ids(2, 0)), match="at least one token")
    refused(cache, lambda: cache.crop(1), CropError, "counts <= 0")
    refused(cache, lambda: cache.crop(-4), CropError, r"Cannot crop 4 tokens: 3 can be removed .* larger `max_window`")
    refused(cache, lambda: cache.crop(torch.tensor([0, -4])), CropError, "in row 1")
    refused(cache, lambda: cache.crop(torch.tensor([0, -1, 0])), CropError, "one count for each of the 2 rows")
    refused(cache, lambda: cache.layers[0].reset(), match="on the cache")
    refused(cache, lambda: cache.layers[0].reorder_cache(torch.tensor([0, 1])), match="on the cache")
    cache.crop(-3)
    cache.record_past = False
    refused(cache, lambda: cache.crop(-1), CropError, "does not record")


def test_what_cannot_be_built(monkeypatch):
    config = shared_model("bamba").config
    for wrong in (None, 0, True, 3.5):
        with pytest.raises(ValueError, match="max_cache_len"):
            StaticReplayCache(config=config, max_cache_len=wrong)
    with pytest.raises(ValueError, match="capture"):
        StaticReplayCache(config=config, max_cache_len=8, capture="yes")
    monkeypatch.setattr(static, "get_layer_types_and_kwargs", lambda config: (["sliding_attention"], [{}]))
    with pytest.raises(ValueError, match="'sliding_attention'.*cache_implementation='replayssm'"):
        StaticReplayCache(config=config, max_cache_len=8)


@torch.no_grad()
def test_a_forward_that_fails_half_way():
    model = hf_replayssm.enable(copy_of("bamba"))
    cache = StaticReplayCache(config=model.config, max_cache_len=32)
    ids = random_ids(1, 6)
    model(input_ids=ids, cache=cache)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids[:, :1], cache=cache)
    handle.remove()
    with pytest.raises(ValueError, match="failed half-way"):
        model(input_ids=ids[:, :1], cache=cache)
    cache.reset()
    assert_same_logits(model(input_ids=ids, cache=cache).logits, whole_forward(shared_model("bamba"), ids))


# ------------------------------------------------------------------------------------------------ generate
STATIC = {"cache_implementation": "replayssm_static", "do_sample": False}


class Graphs:
    """A backend for `torch.compile` that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.count = 0
        self.config = CompileConfig(backend=self, fullgraph=True, mode=None)
        self.config._compile_all_devices = True  # on the CPU as well

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward

    def __deepcopy__(self, memo) -> Graphs:
        return self  # transformers copies its configs


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.fixture
def model(family: str):
    """An enabled model that no other test has a kept cache of."""
    model = enabled_model(family)
    yield model
    integration._kept.pop(model, None)


@pytest.mark.parametrize("buffer_len", BUFFER_LENS)
def test_greedy_tokens(family, model, buffer_len):
    ids = random_ids(2, 7)
    tokens = model.generate(ids, max_new_tokens=30, cache_config={"buffer_len": buffer_len}, **STATIC)
    assert torch.equal(tokens, greedy_without_cache(shared_model(family), ids, 30))


def test_padding_beams_and_chunks(family, model):
    """All ways to call `generate` give the plain variant's tokens."""
    ids, mask = random_ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :6] = mask[2, :9] = 0
    for more in (
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"max_cache_len": 90},
        {"do_sample": True, "top_k": 5},  # the same draws, so the same logits
    ):
        made = []
        for implementation in ("replayssm", "replayssm_static"):
            torch.manual_seed(0)
            settings = {**STATIC, "max_new_tokens": 14, **more, "cache_implementation": implementation}
            if implementation == "replayssm":
                settings.pop("max_cache_len", None)
            made.append(model.generate(ids, attention_mask=mask, **settings))
        assert torch.equal(*made), more


def test_several_turns(family, model):
    cache = StaticReplayCache(config=model.config, max_cache_len=80)
    ids = random_ids(2, 5)
    for turn in range(3):
        ids = torch.cat([ids, random_ids(2, 3, seed=turn)], 1)
        tokens = model.generate(ids, max_new_tokens=9, cache=cache, do_sample=False)
        assert torch.equal(tokens, greedy_without_cache(shared_model(family), ids, 9))
        ids = tokens
    if has_attention(model.config):
        with pytest.raises(ValueError, match="room for 80 tokens"):
            model.generate(ids, max_new_tokens=60, cache=cache, do_sample=False)


@pytest.mark.parametrize("prompt", [1, 12], ids=["one token", "a window of drafts at once"])
def test_drafts(family, model, prompt):
    ids = random_ids(1, prompt)
    expected = greedy_without_cache(shared_model(family), ids, 25)
    draft = hf_replayssm.enable(tiny_model(family, seed=1))
    assert torch.equal(model.generate(ids, max_new_tokens=25, assistant_model=draft, **STATIC), expected)
    lookup = model.generate(ids, max_new_tokens=25, prompt_lookup_num_tokens=6, return_dict_in_generate=True, **STATIC)
    assert torch.equal(lookup.sequences, expected)
    assert lookup.cache.stats.tokens_cropped > 0


def test_drafts_of_a_batch_in_a_cache_of_ones_own(family, model):
    """Padded rows, several turns; the cache comes back as it would have been without drafts."""
    cache = StaticReplayCache(config=model.config, max_cache_len=60, max_window=6)
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    for _ in range(2):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        tokens = hf_replayssm.speculative_generate(
            model, ids, mask, max_new_tokens=12, prompt_lookup_num_tokens=4, cache=cache
        )
        assert torch.equal(tokens, expected)
        assert cache.lengths.tolist() == (mask.sum(1) + 11).tolist() and not cache.record_past
        ids = torch.cat([tokens, random_ids(2, 2)], 1)
        mask = torch.cat([mask, torch.ones(2, 14, dtype=torch.long)], 1)
    if has_attention(model.config):
        with pytest.raises(ValueError, match="room for 60 tokens"):
            hf_replayssm.speculative_generate(
                model, ids, mask, max_new_tokens=30, prompt_lookup_num_tokens=4, cache=cache
            )


def test_a_growing_schedule_stays_within_the_window():
    model = hf_replayssm.enable(copy_of("bamba"), max_window=6)
    draft = hf_replayssm.enable(copy_of("bamba"))  # always right
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.assistant_confidence_threshold = 0
    ids = random_ids(1, 5)
    output = model.generate(ids, max_new_tokens=80, assistant_model=draft, return_dict_in_generate=True, **STATIC)
    assert torch.equal(output.sequences, greedy_without_cache(shared_model("bamba"), ids, 80))
    assert output.cache.max_window == 6  # not the 40 tokens that the schedule would have come to
    assert output.cache.stats.forwards < 20


@pytest.mark.parametrize(
    ("name", "lengths"), [("bamba", (16, 16)), ("qwen3_next", (16, 16)), ("kimi_linear", (10, 7)), ("mamba", (4, 3))]
)
def test_the_default_buffer_len_is_the_recurrences(name, lengths):
    config = tiny_config(name)
    for dtype, length in zip((torch.float32, torch.bfloat16), lengths):
        settings = ReplayConfig(checkpoint_dtype=dtype)
        assert ReplayCache(config=config, replay_config=settings).replay_config.buffer_len == length
        static = StaticReplayCache(config=config, max_cache_len=8, replay_config=settings)
        assert static.replay_config == settings.replace(buffer_len=length)
    assert ReplayCache(config=config, buffer_len=7).replay_config.buffer_len == 7


def test_the_cache_is_kept_for_the_next_call():
    model = hf_replayssm.enable(copy_of("bamba"))
    ids = random_ids(2, 6)
    first = model.generate(ids, max_new_tokens=9, **STATIC)
    kept = integration._kept[model]
    assert torch.equal(model.generate(ids, max_new_tokens=9, **STATIC), first) and integration._kept[model] is kept
    output = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **STATIC)
    assert output.cache is kept and model not in integration._kept  # the caller's now
    model.generate(ids, max_new_tokens=9, **STATIC)
    assert integration._kept[model] is not output.cache
    copied = copy.deepcopy(model)
    assert copied not in integration._kept
    for other in ({"max_new_tokens": 20}, {"cache_config": {"buffer_len": 3}}, {"num_beams": 2}):
        before = integration._kept[model]
        model.generate(ids, **{"max_new_tokens": 9, **STATIC, **other})
        assert integration._kept[model] is not before
    hf_replayssm.disable(model)
    assert model not in integration._kept


def test_threads_have_caches_of_their_own(monkeypatch):
    """What another thread still generates with is not kept for the next call."""
    model, ids = hf_replayssm.enable(copy_of("bamba")), random_ids(2, 6)
    expected, made = greedy_without_cache(shared_model("bamba"), ids, 9), []
    generating, done = threading.Event(), threading.Event()

    def wait(input_ids, scores):
        generating.set()
        assert done.wait(60)
        return scores

    thread = threading.Thread(
        target=lambda: made.append(model.generate(ids, max_new_tokens=9, logits_processor=[wait], **STATIC))
    )
    lend = integration.lend_static_cache

    def lend_behind_the_thread(*args, **kwargs):
        if threading.current_thread() is threading.main_thread() and not thread.ident:
            thread.start()
            assert generating.wait(60)
        return lend(*args, **kwargs)

    monkeypatch.setattr(integration, "lend_static_cache", lend_behind_the_thread)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=9, **STATIC), expected)
    done.set()
    thread.join()
    assert len(made) == 1 and torch.equal(made[0], expected)


def test_a_kept_cache_without_attention_has_no_length():
    model = hf_replayssm.enable(copy_of("mamba2"))
    model.generate(random_ids(1, 4), max_new_tokens=3, **STATIC)
    kept, ids = integration._kept[model], random_ids(1, 9)
    assert torch.equal(
        model.generate(ids, max_new_tokens=30, **STATIC), greedy_without_cache(shared_model("mamba2"), ids, 30)
    )
    assert integration._kept[model] is kept and kept.get_max_length() == -1


# ------------------------------------------------------------------------------------------------ compiled
@torch.no_grad()
def test_one_graph_for_steps_and_one_for_windows(family, model, graphs):
    """No other over flushes, crops by row, reorderings, resets and new caches."""
    compiled = torch.compile(model.__call__, backend=graphs, fullgraph=True, dynamic=False)
    ids = random_ids(2, 60)
    expected = whole_forward(shared_model(family), ids)
    made = []
    for _ in range(2):
        cache = StaticReplayCache(config=model.config, max_cache_len=64, buffer_len=4, max_window=6)
        for _ in range(2):
            cache.activate_past_recording()
            logits = [model(input_ids=ids[:, :7], cache=cache).logits]
            for i in range(7, 17):
                logits.append(compiled(input_ids=ids[:, i : i + 1].clone(), cache=cache).logits)
            for i in range(17, 42, 5):
                poison(cache)
                compiled(input_ids=random_ids(2, 5, seed=i), cache=cache)
                cache.crop(torch.tensor([-5, -3]))
                cache.crop(torch.tensor([0, -2]))
                logits.append(compiled(input_ids=ids[:, i : i + 5].clone(), cache=cache).logits)
                cache.reorder_cache(torch.tensor([0, 1]))
            assert_same_logits(torch.cat(logits, 1), expected[:, :42])
            made.append(graphs.count)
            cache.reset()
    assert made == [2, 2, 2, 2]


@pytest.mark.parametrize("family", ["mamba2", "zamba2", "granitemoehybrid", "mamba", "zamba"])
def test_generate_compiles_by_itself(family, model, graphs):
    ids = random_ids(2, 7)
    expected = greedy_without_cache(shared_model(family), ids, 20)
    for _ in range(3):
        tokens = model.generate(ids, max_new_tokens=20, compile_config=graphs.config, **STATIC)
        assert torch.equal(tokens, expected) and graphs.count == 1
    for seed in (1, 2):  # what it runs on may be another prompt of any length
        model.generate(random_ids(2, 4 + seed, seed), max_new_tokens=11, compile_config=graphs.config, **STATIC)
    assert graphs.count == 1


@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_chunks_of_a_prompt_are_compiled(family, model, graphs):
    ids = random_ids(2, 12)
    expected = greedy_without_cache(shared_model(family), ids, 6)
    made = []
    for _ in range(2):
        tokens = model.generate(ids, max_new_tokens=6, prefill_chunk_size=4, compile_config=graphs.config, **STATIC)
        assert torch.equal(tokens, expected)
        made.append(graphs.count)
    assert made == [3, 3]  # the first chunk, later ones, a step


@pytest.mark.parametrize("family", ["mamba2"])
def test_windows_of_drafts_are_compiled(family, model, graphs):
    ids = random_ids(3, 8)
    expected = greedy_without_cache(shared_model(family), ids, 20)
    one = greedy_without_cache(shared_model(family), ids[:1], 20)
    made = []
    for _ in range(2):
        tokens = hf_replayssm.speculative_generate(
            model, ids, max_new_tokens=20, prompt_lookup_num_tokens=4, compile_config=graphs.config, **STATIC
        )
        assert torch.equal(tokens, expected)
        made.append(graphs.count)
    assert made == [1, 1]
    torch._dynamo.reset()
    graphs.count = 0
    for _ in range(2):
        tokens = model.generate(
            ids[:1], max_new_tokens=20, prompt_lookup_num_tokens=4, compile_config=graphs.config, **STATIC
        )
        assert torch.equal(tokens, one)
    assert graphs.count <= 3  # one token, a window, and windows of any other length


def test_models_of_one_class_in_one_process(graphs):
    """What differs between two models must not be taken for what varies in one."""
    ids = random_ids(2, 7)
    for sizes in ({}, {"hidden_size": 16, "num_heads": 4, "head_dim": 8}, {"hidden_size": 32, "num_heads": 4}):
        model = hf_replayssm.enable(tiny_model("mamba2", num_hidden_layers=2, **sizes))
        expected = model.generate(ids, max_new_tokens=9, do_sample=False)
        for max_new_tokens in (9, 5):
            tokens = model.generate(ids, max_new_tokens=max_new_tokens, compile_config=graphs.config, **STATIC)
            assert torch.equal(tokens, expected[:, : 7 + max_new_tokens])
    assert graphs.count == 3


@torch.no_grad()
def test_a_compiled_first_forward(graphs):
    """It cannot lay the cache out: with `fullgraph` it says what to do, else it runs as it is."""
    model, ids = enabled_model("bamba"), random_ids(1, 4)
    cache = StaticReplayCache(config=model.config, max_cache_len=16)
    with pytest.raises(Exception, match="Run the first one"):
        torch.compile(model.__call__, backend=graphs, fullgraph=True)(input_ids=ids, cache=cache)
    torch._dynamo.reset()
    logits = torch.compile(model.__call__, backend=graphs)(input_ids=ids, cache=cache).logits
    assert_same_logits(logits, whole_forward(shared_model("bamba"), ids))


# ------------------------------------------------------------------------------------------------ captured
class Tapes(list):
    """The tapes of a test, and the caches that they may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[StaticReplayCache] = []

    def record_for(self, device) -> Tape:
        self.append(Tape(lambda: [tensor for cache in self.caches for _, tensor in cache.static_tensors()]))
        return self[-1]


@pytest.fixture
def tapes(monkeypatch) -> Tapes:
    """Tapes stand in for CUDA graphs on the CPU: they freeze the host's decisions as a graph does."""
    made = Tapes()
    init = StaticReplayCache.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.caches.append(self)

    monkeypatch.setattr(StaticReplayCache, "__init__", remember)
    # It reads on the CPU alone, where that does not wait for anything.
    monkeypatch.setattr(StaticReplayCache, "_refuse_overflow", lambda self, numbers: None)
    monkeypatch.setitem(capture.RECORDERS, "cpu", made.record_for)
    yield made


CAPTURED = {**STATIC, "cache_config": {"capture": True, "buffer_len": 4}}


def test_captured_steps(family, model, tapes):
    ids = random_ids(2, 7)
    expected = greedy_without_cache(shared_model(family), ids, 25)
    for call in (1, 2):
        assert torch.equal(model.generate(ids, max_new_tokens=25, **CAPTURED), expected)
        assert [(tape.warm_ups, tape.recordings) for tape in tapes] == [(capture.WARM_UPS, 1)]
        assert tapes[0].replays == 24 * call - capture.WARM_UPS
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    padded = model.generate(ids, attention_mask=mask, max_new_tokens=25, **CAPTURED)
    assert torch.equal(padded, model.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False))
    assert len(tapes) == 1 and tapes[0].recordings <= 2  # positions of each row are another shape


@pytest.mark.parametrize("family", ["mamba2", "zamba2", "falcon_h1", "jamba"])
def test_captured_windows(family, model, tapes):
    """Drafts of a batch: the target's windows, and the draft's steps, one graph each."""
    ids = random_ids(3, 6)
    expected = greedy_without_cache(shared_model(family), ids, 30)
    draft = hf_replayssm.enable(tiny_model(family, seed=1))
    for _ in range(2):
        tokens = hf_replayssm.speculative_generate(
            model, ids, max_new_tokens=30, assistant_model=draft, num_assistant_tokens=3, **CAPTURED
        )
        assert torch.equal(tokens, expected)
    assert sorted(tape.recordings for tape in tapes) == [1, 2]  # of the draft's forwards the first has two tokens
    assert all(tape.replays > 20 for tape in tapes)


@pytest.mark.parametrize("family", ["mamba2", "zamba2"])
def test_captured_windows_of_any_length(family, model, tapes):
    ids = random_ids(1, 8)
    expected = greedy_without_cache(shared_model(family), ids, 60)
    for _ in range(2):
        tokens = model.generate(ids, max_new_tokens=60, prompt_lookup_num_tokens=4, **CAPTURED)
        assert torch.equal(tokens, expected)
    assert len(tapes) == 1 and 1 <= tapes[0].recordings <= 5 and tapes[0].replays > 20


@torch.no_grad()
def test_a_tape_notices_what_a_graph_would_not_do():
    """The tests above could fail: a number read on the host ends a recording, and a position kept there is frozen."""
    tensor = torch.zeros(3)
    tape = Tape(lambda: [tensor])
    with pytest.raises(HostRead):
        tape.record(lambda: tensor + int(tensor.sum()))
    with pytest.raises(HostRead):
        tape.record(lambda: tensor[tensor > 0])
    position = [0]

    def step():
        tensor.add_(1)
        position[0] += 1
        return tensor + position[0]

    replay = tape.record(step)
    assert tensor.tolist() == [0, 0, 0]  # recording runs nothing
    assert replay().tolist() == [2, 2, 2] and replay().tolist() == [3, 3, 3]


@torch.no_grad()
def test_graphs_are_dropped_when_the_tensors_move(tapes):
    model = hf_replayssm.enable(copy_of("bamba"))
    cache = StaticReplayCache(config=model.config, max_cache_len=64, max_window=4, capture=True)
    made = Session("bamba", 2, cache=cache, model=model)
    made.append(5)

    def step():
        made.columns = [row + [int(token)] for row, token in zip(made.columns, ids[:, 0])]
        logits = capture.captured_forward(model, {"input_ids": ids, "cache": cache}).logits
        for row, history in enumerate(made.history):
            made.pending.append((f"row {row}", tuple(history), logits[row]))

    for seed in range(6):
        ids = random_ids(2, 1, seed)
        step()
    assert tapes[0].recordings == 1
    cache.activate_past_recording()  # lays it out anew
    for seed in range(6):
        ids = random_ids(2, 1, seed + 10)
        step()
    assert tapes[0].recordings == 2
    made.crop([2, 1])
    cache.interrupted = True
    with pytest.raises(ValueError, match="failed half-way"):
        capture.captured_forward(model, {"input_ids": ids, "cache": cache})
    cache.interrupted = False
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.clone()
    for seed in range(6):
        ids = random_ids(2, 1, seed + 20)
        step()
    assert tapes[0].recordings == 3
    made.compare()


def replace_a_weight(model) -> None:
    mixer = model.model.layers[0].mamba
    mixer.in_proj.weight = torch.nn.Parameter(mixer.in_proj.weight.flip(0), requires_grad=False)


def replace_the_head(model) -> None:
    head = copy.deepcopy(model.lm_head)
    head.weight.data = head.weight.flip(0)
    model.set_output_embeddings(head)


def change_a_setting(model) -> None:
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.2, 0.3)


def hook_a_layer(model) -> None:
    model.model.layers[2].mamba.out_proj.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize("change", [replace_a_weight, replace_the_head, change_a_setting, hook_a_layer])
def test_graphs_are_dropped_when_the_model_has_changed(tapes, change):
    """A graph reads the weights that there were, and does what the modules did then."""
    plain, ids = copy_of("bamba"), random_ids(2, 7)
    model = hf_replayssm.enable(copy_of("bamba"))
    before = model.generate(ids, max_new_tokens=20, **CAPTURED)
    for each in (plain, model):
        change(each)
    for _ in range(2):
        after = model.generate(ids, max_new_tokens=20, **CAPTURED)
        assert torch.equal(after, greedy_without_cache(plain, ids, 20)) and not torch.equal(after, before)
        assert len(tapes) == 1 and tapes[0].recordings == 2
    with_drafts = {"max_new_tokens": 40, "prompt_lookup_num_tokens": 4, **CAPTURED}
    model.generate(ids[:1], **with_drafts)
    for each in (plain, model):
        change(each)
    assert torch.equal(model.generate(ids[:1], **with_drafts), greedy_without_cache(plain, ids[:1], 40))
    model.generate(ids, max_new_tokens=20, **CAPTURED)
    recordings = [tape.recordings for tape in tapes]
    for each in (plain, model):  # in place
        each.model.layers[0].mamba.in_proj.weight.mul_(1.5)
    assert torch.equal(model.generate(ids, max_new_tokens=20, **CAPTURED), greedy_without_cache(plain, ids, 20))
    assert [tape.recordings for tape in tapes] == recordings


@torch.no_grad()
def test_no_more_graphs_than_agreed(tapes, monkeypatch):
    monkeypatch.setattr(capture, "MAX_GRAPHS", 2)
    model = enabled_model("mamba2")
    cache = StaticReplayCache(config=model.config, max_cache_len=200, max_window=8, capture=True)
    cache.graphs = capture.CapturedForwards(capture.RECORDERS["cpu"](None), max_graphs=2)
    cache.activate_past_recording()
    made = Session("mamba2", 1, cache=cache)
    made.append(3)
    capture._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="2 shapes of inputs are captured already"):
        for tokens in (1, 2, 3, 4) * 4:
            capture.captured_forward(model, {"input_ids": random_ids(1, tokens), "cache": cache})
    assert tapes[0].recordings == 2


def test_a_forward_that_cannot_be_captured(tapes, monkeypatch):
    model = hf_replayssm.enable(copy_of("bamba"))

    def read(module, args):
        assert bool(args[0].isfinite().all())

    model.model.layers[1].register_forward_pre_hook(read)
    ids = random_ids(2, 5)
    capture._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph and runs eagerly: .*local_scalar"):
        tokens = model.generate(ids, max_new_tokens=12, **CAPTURED)
    assert torch.equal(tokens, greedy_without_cache(shared_model("bamba"), ids, 12))
    assert tapes[0].recordings == 0


def test_no_graphs_on_this_device():
    model = hf_replayssm.enable(copy_of("bamba"))
    ids = random_ids(2, 5)
    capture._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="takes a model on one CUDA device; this one is on cpu"):
        tokens = model.generate(ids, max_new_tokens=12, **CAPTURED)
    assert torch.equal(tokens, greedy_without_cache(shared_model("bamba"), ids, 12))
    with pytest.raises(ValueError, match="in place of a compiler|takes the place of a compiler"):
        model.generate(ids, max_new_tokens=12, compile_config=CompileConfig(), **CAPTURED)


@torch.no_grad()
def test_memory_goes_with_the_last_reference(tapes):
    """Without the garbage collector: two caches of a large batch do not fit side by side."""
    gc.disable()
    try:
        model, ids = hf_replayssm.enable(copy_of("falcon_h1")), random_ids(2, 5)
        for made in (ReplayCache, functools.partial(StaticReplayCache, max_cache_len=30)):
            cache = made(config=model.config)
            model(input_ids=ids, cache=cache)
            reference = weakref.ref(cache)
            tapes.caches.clear()
            del cache
            assert reference() is None
        for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
            ids = ids[:1] if "prompt_lookup_num_tokens" in more else ids
            output = model.generate(ids, max_new_tokens=12, return_dict_in_generate=True, **CAPTURED, **more)
            assert "num_beams" in more or output.cache.graphs.captured
            reference = weakref.ref(output.cache)
            tapes.caches.clear()
            del output
            assert reference() is None
        model.generate(ids, max_new_tokens=12, **CAPTURED)
        reference = weakref.ref(integration._kept[model])
        tapes.caches.clear()
        assert reference() is not None
        hf_replayssm.release(model)
        assert reference() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ attention masks
def flash_like(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """
    What transformers asks of FlashAttention: a 2D mask says which keys there are (and, where there are as many
    queries, which of those), and the queries are the last of them. Through ragged rows, as there.
    """
    batch, heads, tokens, _ = query.shape
    repeats = heads // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.zeros(batch, tokens, heads, value.shape[-1])
    for row in range(batch):
        there = torch.ones(key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask[row].bool()
        asked = torch.ones(tokens, dtype=torch.bool)
        if attention_mask is not None and tokens > 1:
            asked = there[-tokens:]  # "assumes left padding"
        q, k, v = query[row][:, asked], key[row, :, : len(there)][:, there], value[row, :, : len(there)][:, there]
        causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~causal, -torch.inf)
        out[row, asked] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out, None


@pytest.fixture
def flash():
    AttentionInterface.register("flash_for_tests", flash_like)
    AttentionMaskInterface.register("flash_for_tests", flash_attention_mask)
    yield "flash_for_tests"
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("flash_for_tests")


@pytest.mark.parametrize("implementation", ["eager", "flash"])
@pytest.mark.parametrize("family", ["bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"])
@torch.no_grad()
def test_other_attention_implementations(family, implementation, request):
    """Padding, steps, windows, rows of their own and a later chunk, through the masks that these take."""
    name = request.getfixturevalue("flash") if implementation == "flash" else implementation
    model = hf_replayssm.enable(copy_of(family))
    model.config._attn_implementation_internal = name
    cache = StaticReplayCache(config=model.config, max_cache_len=90, max_window=4, buffer_len=4)
    cache.activate_past_recording()
    made = Session(family, 3, cache=cache, model=model)
    made.append(9, torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [0] + [1] * 8]))
    for counts in ([3, 0, 1], [0, 4, 2]):
        made.append(1)
        made.append(4)
        made.crop(counts)
    made.append(11)
    made.append(1)
    made.compare()


@torch.no_grad()
def test_flash_refuses_padding_among_later_tokens(flash):
    model = hf_replayssm.enable(copy_of("bamba"))
    model.config._attn_implementation_internal = flash
    cache = StaticReplayCache(config=model.config, max_cache_len=30)
    model(input_ids=random_ids(2, 4), cache=cache)
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    refused(
        cache,
        lambda: model(input_ids=random_ids(2, 3), attention_mask=mask, cache=cache),
        match="attn_implementation='sdpa'",
    )


@torch.no_grad()
def test_an_attention_without_masks_is_refused():
    AttentionInterface.register("maskless_for_tests", flash_like)
    model = hf_replayssm.enable(copy_of("bamba"))
    cache = StaticReplayCache(config=model.config, max_cache_len=30)
    model(input_ids=random_ids(2, 4), cache=cache)
    model.config._attn_implementation_internal = "maskless_for_tests"
    try:
        refused(cache, lambda: model(input_ids=random_ids(2, 1), cache=cache), match="makes no masks.*'sdpa'")
    finally:
        AttentionInterface._global_mapping.pop("maskless_for_tests")


@torch.no_grad()
def test_keys_that_are_known_before_the_first_forward(family, model):
    """`generate` lays keys and values out from the config, where a compiled chunk could not."""
    if not has_attention(model.config):
        pytest.skip("no attention layers")
    early = model.generate(random_ids(1, 3), max_new_tokens=2, return_dict_in_generate=True, **STATIC).cache
    late = StaticReplayCache(config=model.config, max_cache_len=early.max_cache_len)
    model(input_ids=random_ids(1, 3), cache=late)
    shapes = [{name: tensor.shape for name, tensor in cache.static_tensors()} for cache in (early, late)]
    assert shapes[0] == shapes[1] and any(name.endswith("keys") for name in shapes[0])
