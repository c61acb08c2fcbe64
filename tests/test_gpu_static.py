"""The static cache on an accelerator: captured in CUDA graphs, compiled by `generate`, never waited for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tiny_models import FAMILY_NAMES, assert_same_logits, mixers, poison, random_ids, tiny_model

import hf_replayssm
from hf_replayssm import StaticReplayCache, capture, integration


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STATIC = {"cache_implementation": "replayssm_static", "do_sample": False}


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """The families are compared in float32, not in tf32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def no_silent_fallback():
    """A forward that could not be captured says so: here that is a failure."""
    capture._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be captured in a CUDA graph.*")
        warnings.filterwarnings("error", message=".*shapes of inputs are captured already.*")
        warnings.filterwarnings("error", message=".*`capture=True`.*")
        yield


def pair(family: str, **fields):
    """(untouched, enabled) on the device."""
    model = tiny_model(family).to("cuda")
    return model, hf_replayssm.enable(copy.deepcopy(model), **fields)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("buffer_len", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_steps_windows_and_crops(family, buffer_len, backend):
    untouched, enabled = pair(family, backend=backend)
    ids = random_ids(3, 90).cuda()
    expected = untouched(input_ids=ids, use_cache=False).logits
    cache = StaticReplayCache(
        config=enabled.config, max_cache_len=100, buffer_len=buffer_len, max_window=8, backend=backend
    )
    seen = 0

    def append(tokens):
        nonlocal seen
        logits = enabled(input_ids=ids[:, seen : seen + tokens], cache=cache).logits
        assert_same_logits(logits, expected[:, seen : seen + tokens])
        seen += tokens
        poison(cache)

    for tokens in (7, *[1] * 20, 5):
        append(tokens)
    cache.activate_past_recording()
    for tokens, rejected in ((5, 3), (1, 0), (6, 6), (1, 1), (9, 2), (1, 0), (12, 8)):
        append(tokens)
        cache.crop(torch.full((3,), -rejected, device="cuda") if tokens % 2 else -rejected)
        seen -= rejected
    cache.record_past = False
    for _ in range(18):
        append(1)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_rows_of_their_own(family):
    """Left padding, then rows cropped by different counts: every row is as it would be alone."""
    untouched, enabled = pair(family)
    ids = random_ids(3, 40).cuda()
    mask = torch.ones(3, 12, dtype=torch.long, device="cuda")
    mask[1, :5] = mask[2, :9] = 0
    alone = [
        untouched(input_ids=row[None, 12 - int(n) :], use_cache=False).logits[0] for row, n in zip(ids, mask.sum(1))
    ]
    cache = StaticReplayCache(config=enabled.config, max_cache_len=64, buffer_len=4, max_window=6)
    cache.activate_past_recording()
    enabled(input_ids=ids[:, :12], attention_mask=mask, cache=cache)
    enabled(input_ids=ids[:, 12:18], cache=cache)
    cache.crop(torch.tensor([-1, -5, -3], device="cuda"))
    at = [17, 13, 15]
    for _ in range(9):
        new = torch.stack([row[i : i + 1] for row, i in zip(ids, at)])
        logits = enabled(input_ids=new, cache=cache).logits
        for row, position in enumerate(at):
            assert_same_logits(logits[row], alone[row][position - 12 + int(mask[row].sum())][None])
        at = [i + 1 for i in at]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_a_forward_never_waits_for_the_device(family):
    """Steps, windows and crops by tensors on the device. (Of upstream's mixtures of experts some do: their layers are
    not run.)"""
    enabled = hf_replayssm.enable(
        tiny_model(family, **({"num_local_experts": 0} if "granite" in family else {})).cuda()
    )
    cache = StaticReplayCache(config=enabled.config, max_cache_len=200, buffer_len=3, max_window=4)
    cache.activate_past_recording()
    ids = random_ids(2, 6).cuda()
    counts = torch.tensor([-1, -3], device="cuda")
    enabled(input_ids=ids, cache=cache)

    def rounds():
        for _ in range(4):
            cache_forward(1)
            cache_forward(4)
            cache.crop(counts)

    def cache_forward(tokens):
        """What every forward does, with the recurrent layers and without the other modules."""
        forward = cache.begin_forward(tokens, 2)
        for mixer in mixers(enabled):
            mixer(hidden[:, :tokens], cache=cache)
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                states = layer.keys, layer.values
                layer.update(*(torch.randn(*s.shape[:2], tokens, s.shape[3], device="cuda") for s in states))
        assert forward is cache.forward_in_progress
        cache.end_forward()

    hidden = torch.randn(2, 4, enabled.config.hidden_size, device="cuda")
    rounds()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_captured_steps(family):
    untouched, enabled = pair(family)
    ids = random_ids(2, 9).cuda()
    expected = untouched.generate(ids, do_sample=False, max_new_tokens=60, use_cache=False)
    settings = {**STATIC, "cache_config": {"capture": True, "buffer_len": 4}}
    for _ in range(2):
        assert torch.equal(enabled.generate(ids, max_new_tokens=60, **settings), expected)
    graphs = integration._kept[enabled].graphs.captured
    assert len(graphs) == 1 and all(captured.replay is not None for captured in graphs.values())
    # Another prompt, padded, and tokens that are drawn: the same as without a graph.
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    made = []
    for capture_ in (True, False):
        torch.manual_seed(0)
        cache_config = {"capture": capture_, "buffer_len": 4}
        more = {**STATIC, "do_sample": True, "cache_config": cache_config, "disable_compile": not capture_}
        made.append(enabled.generate(ids, attention_mask=mask, max_new_tokens=30, **more))
    assert torch.equal(*made)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_captured_windows(family):
    untouched, enabled = pair(family)
    ids = random_ids(3, 9).cuda()
    expected = untouched.generate(ids, do_sample=False, max_new_tokens=50, use_cache=False)
    draft = hf_replayssm.enable(tiny_model(family, seed=1).cuda())
    settings = {**STATIC, "max_new_tokens": 50, "cache_config": {"capture": True}}
    for _ in range(2):
        for drafts in ({"assistant_model": draft, "num_assistant_tokens": 3}, {"prompt_lookup_num_tokens": 5}):
            assert torch.equal(hf_replayssm.speculative_generate(enabled, ids, **drafts, **settings), expected)
    one = enabled.generate(ids[:1], prompt_lookup_num_tokens=4, **settings)
    assert torch.equal(one, expected[:1])
    graphs = integration._kept[enabled].graphs.captured
    assert graphs and all(captured.replay is not None or captured.forwards <= 2 for captured in graphs.values())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_generate_compiles_by_itself(family):
    """With inductor, as it comes: tokens, and no other graph for later calls."""
    torch._dynamo.reset()
    untouched, enabled = pair(family)
    ids = random_ids(2, 9).cuda()
    expected = untouched.generate(ids, do_sample=False, max_new_tokens=40, use_cache=False)
    assert torch.equal(enabled.generate(ids, max_new_tokens=40, **STATIC), expected)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert torch.equal(enabled.generate(ids, max_new_tokens=40, **STATIC), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    drafted = hf_replayssm.speculative_generate(enabled, ids, max_new_tokens=40, prompt_lookup_num_tokens=3, **STATIC)
    assert torch.equal(drafted, expected)


@torch.no_grad()
def test_more_tokens_than_fit_raise_on_the_host_where_generate_knows():
    model = hf_replayssm.enable(tiny_model("bamba").cuda())
    cache = StaticReplayCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match="room for 20 tokens"):
        model.generate(random_ids(2, 9).cuda(), max_new_tokens=13, cache=cache, do_sample=False)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@torch.no_grad()
def test_layers_on_two_devices(tmp_path):
    """Positions follow the layers; nothing is captured there."""
    model = tiny_model("bamba")
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 30)
    expected = model.cuda()(input_ids=ids.cuda(), use_cache=False).logits
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.final_layernorm": 1, "lm_head": 1}
    device_map |= {f"model.layers.{i}": int(i > 1) for i in range(3)}
    spread = hf_replayssm.enable(type(model).from_pretrained(tmp_path, device_map=device_map).eval())
    cache = StaticReplayCache(config=spread.config, max_cache_len=40, buffer_len=4, max_window=4)
    cache.activate_past_recording()
    logits = [spread(input_ids=ids[:, :12].cuda(), cache=cache).logits]
    logits += [spread(input_ids=ids[:, t : t + 1].cuda(), cache=cache).logits for t in range(12, 20)]
    assert_same_logits(torch.cat([x.to("cuda:0") for x in logits], 1), expected[:, :20])
    cache.crop(torch.tensor([-3, -1]))
    again = spread(input_ids=torch.stack([ids[0, 17:18], ids[1, 19:20]]).cuda(), cache=cache).logits
    assert_same_logits(again[0].to("cuda:0"), expected[0, 17:18])
