"""Replay on an accelerator: the same answers as the whole-sequence forward there, with the kernels and without."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from tiny_models import FAMILY_NAMES, RTOL, assert_same_logits, mixers, poison, random_ids, tiny_model
from twins import Twins, eventful_session

import hf_replayssm


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA (or ROCm) device"),
]


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """The families are compared in float32, not in tf32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def pair(family: str, backend: str, dtype: torch.dtype = torch.float32):
    """(untouched, enabled) on the device."""
    model = tiny_model(family).to("cuda", dtype)
    return model, hf_replayssm.enable(copy.deepcopy(model), backend=backend)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("buffer_len", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_steps_windows_and_crops(family, buffer_len, backend):
    untouched, enabled = pair(family, backend)
    ids = random_ids(3, 80).cuda()
    expected = untouched(input_ids=ids, use_cache=False).logits
    cache = hf_replayssm.ReplayCache(config=enabled.config, buffer_len=buffer_len, backend=backend)
    seen = 0

    def append(tokens):
        nonlocal seen
        logits = enabled(input_ids=ids[:, seen : seen + tokens], cache=cache).logits
        assert_same_logits(logits, expected[:, seen : seen + tokens])
        seen += tokens
        poison(cache)

    for tokens in (7, *[1] * 20, 5, 1, 1, 3):
        append(tokens)
    cache.activate_past_recording()
    for tokens, rejected in ((5, 3), (1, 0), (6, 6), (1, 1), (8, 2), (1, 0)):
        append(tokens)
        cache.crop(-rejected)
        seen -= rejected
    cache.record_past = False
    for _ in range(18):
        append(1)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_speculation_of_a_batch(family):
    """Greedy tokens are those without drafts, for rows that are padded and go on at their own pace."""
    _, enabled = pair(family, "auto")
    ids = random_ids(3, 9).cuda()
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    expected = enabled.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    draft = tiny_model(family, seed=1).cuda()
    for drafting in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}, {"assistant_model": enabled}):
        got = hf_replayssm.speculative_generate(enabled, ids, mask, max_new_tokens=24, do_sample=False, **drafting)
        assert torch.equal(got, expected)


def test_speculation_waits_for_the_device_once_a_round():
    """And once each for the prompt and the result. What the models' forwards do is left out."""
    _, enabled = pair("bamba", "auto")
    ids = random_ids(1, 9).cuda()
    drafting = {"assistant_model": enabled, "max_new_tokens": 24, "return_dict_in_generate": True, "do_sample": False}
    hf_replayssm.speculative_generate(enabled, ids, **drafting)  # compiles
    mode = torch.cuda.set_sync_debug_mode
    handles = [
        enabled.register_forward_pre_hook(lambda module, args: mode("default")),
        enabled.register_forward_hook(lambda module, args, output: mode("warn")),
    ]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rounds = hf_replayssm.speculative_generate(enabled, ids, **drafting).statistics.rounds
    finally:
        mode("default")
        for handle in handles:
            handle.remove()
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == rounds + 2 > 4


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_rows_of_their_own(family):
    """Left padding, then rows cropped by different counts: every row is as it would be alone."""
    untouched, enabled = pair(family, "auto")
    ids = random_ids(3, 40).cuda()
    mask = torch.ones(3, 12, dtype=torch.long, device="cuda")
    mask[1, :5] = mask[2, :9] = 0
    alone = [
        untouched(input_ids=row[None, 12 - int(n) :], use_cache=False).logits[0] for row, n in zip(ids, mask.sum(1))
    ]
    cache = hf_replayssm.ReplayCache(config=enabled.config, buffer_len=4)
    cache.activate_past_recording()
    enabled(input_ids=ids[:, :12], attention_mask=mask, cache=cache)
    enabled(input_ids=ids[:, 12:18], cache=cache)
    cache.crop(torch.tensor([-1, -5, -3]))
    at = [17, 13, 15]
    for _ in range(9):
        new = torch.stack([row[i : i + 1] for row, i in zip(ids, at)])
        logits = enabled(input_ids=new, cache=cache).logits
        for row, position in enumerate(at):
            assert_same_logits(logits[row], alone[row][position - 12 + int(mask[row].sum())][None])
        at = [i + 1 for i in at]


def device_twins(family: str, dtype: torch.dtype = torch.float32, **config) -> Twins:
    """Of two rows: triton and torch in `dtype`, and torch in float32 with a float32 checkpoint."""
    exact = hf_replayssm.enable(tiny_model(family).to("cuda"))
    model = exact if dtype == torch.float32 else hf_replayssm.enable(tiny_model(family).to("cuda", dtype))
    config = {"config": model.config, "buffer_len": 3, "max_window": 2} | config
    triton, plain = (hf_replayssm.ReplayCache(**config, backend=backend) for backend in ("triton", "torch"))
    config |= {"checkpoint_dtype": torch.float32, "rounding": "nearest"}
    return Twins((model, triton), (model, plain), (exact, hf_replayssm.ReplayCache(**config, backend="torch")), batch=2)


def low_precision_error(model, logits: torch.Tensor, exact: torch.Tensor) -> float:
    """
    Relative to the float32 model. Of a model with experts that of the median token: one that a rounding sends to
    another expert is off by a third or more, and with which backend that happens is chance.
    """
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
    return float((logits - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_an_eventful_session(family):
    """The kernels give what the PyTorch ops give, whatever happens to the cache."""
    twins = device_twins(family)
    eventful_session(twins)
    triton, plain, _ = twins.all_logits()
    assert_same_logits(triton, plain)
    for ours, expected in zip(twins.states(0), twins.states(1)):
        assert float((ours - expected).abs().max() / expected.abs().max()) <= RTOL
    assert twins.caches[0].stats == twins.caches[1].stats


STORED = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(
    ("dtype", "checkpoint_dtype", "rounding"),
    [
        (torch.bfloat16, torch.float32, "nearest"),
        *((*dtypes, rounding) for dtypes in STORED for rounding in ("nearest", "stochastic")),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_an_eventful_session_in_fewer_bits(family, dtype, checkpoint_dtype, rounding):
    """The kernels come as close to float32 as the PyTorch ops do."""
    twins = device_twins(family, dtype, checkpoint_dtype=checkpoint_dtype, rounding=rounding)
    eventful_session(twins)
    triton, plain, exact = twins.all_logits()
    error = functools.partial(low_precision_error, twins.pairs[0][0], exact=exact)
    assert error(triton) < max(2 * error(plain), 20 * RTOL)


@pytest.mark.parametrize("checkpoint_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_mixers_never_wait_for_the_device(family, checkpoint_dtype):
    """Steps, windows and flushes, also where rows stand apart: all that is on the device stays there."""
    model = hf_replayssm.enable(tiny_model(family).to("cuda", torch.bfloat16))
    cache = hf_replayssm.ReplayCache(
        config=model.config, buffer_len=3, max_window=2, checkpoint_dtype=checkpoint_dtype, backend="triton"
    )
    ids = random_ids(2, 16).cuda()
    cache.activate_past_recording()

    def round_(may_wait: bool) -> None:
        """The same events at every call, but for the places in the ring."""
        for tokens, mask in ((1, None), (3, None), (2, torch.tensor([[True, False], [True, True]]))):
            hidden = torch.randn(2, tokens, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
            cache.begin_forward(tokens, 2, mask)
            torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
            try:
                for mixer in mixers(model):
                    mixer(hidden, cache=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            cache.end_forward()
            if cache.record_past:
                cache.crop(0)  # so that no buffer has to grow

    model(input_ids=ids[:, :6], cache=cache)
    for recording in (True, False):
        cache.record_past = recording
        round_(may_wait=True)  # kernels are compiled
        for _ in range(4):
            round_(may_wait=False)
    assert cache.stats.checkpoint_writes > 8


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_generate(family):
    untouched, enabled = pair(family, "auto")
    ids = random_ids(1, 9).cuda()
    expected = untouched.generate(ids, do_sample=False, max_new_tokens=40, use_cache=False)
    assert torch.equal(enabled.generate(ids, do_sample=False, max_new_tokens=40), expected)
    drafted = enabled.generate(
        ids, do_sample=False, max_new_tokens=40, assistant_model=tiny_model(family, seed=1).cuda()
    )
    assert torch.equal(drafted, expected)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_bfloat16_is_as_close_to_float32_as_the_whole_forward(family):
    """Both compute in bfloat16; neither may be much further from the float32 model than the other."""
    exact, _ = pair(family, "torch")
    low, enabled = pair(family, "auto", torch.bfloat16)
    ids = random_ids(4, 64).cuda()
    expected = exact(input_ids=ids, use_cache=False).logits
    error = functools.partial(low_precision_error, low, exact=expected)
    cache = hf_replayssm.ReplayCache(config=enabled.config)
    stepped = [enabled(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(64)]
    whole = error(low(input_ids=ids, use_cache=False).logits)
    assert error(torch.cat(stepped, 1)) < max(1.5 * whole, 20 * RTOL)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@torch.no_grad()
def test_a_model_on_the_second_device():
    """Kernels run on the device of their tensors, whichever is current."""
    model = tiny_model("bamba").to("cuda:1")
    ids = random_ids(2, 30).to("cuda:1")
    expected = model(input_ids=ids, use_cache=False).logits
    hf_replayssm.enable(model)
    cache = hf_replayssm.ReplayCache(config=model.config)
    logits = torch.cat([model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(30)], 1)
    assert_same_logits(logits, expected)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
# Not Zamba2: its layers share attention blocks, and with this device map one block would have to be on both devices.
@pytest.mark.parametrize("family", [family for family in FAMILY_NAMES if family != "zamba2"])
@torch.no_grad()
def test_layers_on_two_devices(family, tmp_path):
    """accelerate moves the activations; buffers, positions and masks follow the layers."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 30)
    expected = model.cuda()(input_ids=ids.cuda(), use_cache=False).logits
    half = len(getattr(model, model.base_model_prefix).layers) // 2
    device_map = by_layer(model, lambda i: int(i >= half))
    spread = hf_replayssm.enable(type(model).from_pretrained(tmp_path, device_map=device_map).eval(), buffer_len=4)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    cache = hf_replayssm.ReplayCache(config=spread.config, buffer_len=4)
    cache.activate_past_recording()
    logits = spread(input_ids=ids[:, :12].cuda(), attention_mask=mask.cuda(), cache=cache).logits
    logits = [logits] + [spread(input_ids=ids[:, t : t + 1].cuda(), cache=cache).logits for t in range(12, 20)]
    assert_same_logits(torch.cat(logits, 1)[:1], expected[:1, :20])
    assert {layer.checkpoint.device.index for layer in cache.replay_layers} == {0, 1}
    cache.crop(torch.tensor([-3, -1]))
    new = torch.stack([ids[0, 17:18], ids[1, 19:20]]).cuda()
    again = spread(input_ids=new, cache=cache).logits
    assert_same_logits(again[0], expected[0, 17:18])


def by_layer(model, device_of) -> dict[str, object]:
    """A device map: layer i on device_of(i), what comes before and behind the layers on the first device."""
    prefix = model.base_model_prefix
    backbone = getattr(model, prefix)
    device_map = {f"{prefix}.{name}": 0 for name, _ in backbone.named_children() if name != "layers"}
    device_map |= {f"{prefix}.layers.{i}": device_of(i) for i in range(len(backbone.layers))}
    return device_map | {name: 0 for name, _ in model.named_children() if name != prefix}


def assert_same_tokens_and_logits(family, spread, path) -> None:
    """As the model on one device: greedy tokens, with drafts too, and the logits of tokens one by one."""
    whole = type(tiny_model(family)).from_pretrained(path).cuda().eval()
    whole.generation_config.eos_token_id = spread.generation_config.eos_token_id = None
    for model in (whole, spread):
        hf_replayssm.enable(model, buffer_len=4)
    ids = random_ids(1, 30).cuda()
    options = dict(max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
    tokens = whole.generate(ids, **options)
    assert torch.equal(spread.generate(ids, **options), tokens)
    assert torch.equal(spread.generate(ids, prompt_lookup_num_tokens=3, **options), tokens)
    caches = [hf_replayssm.ReplayCache(config=model.config, buffer_len=4) for model in (whole, spread)]
    for start, stop in [(0, 9), *((t, t + 1) for t in range(9, 24)), (24, 30)]:
        expected, logits = (
            model(input_ids=ids[:, start:stop], cache=cache).logits for model, cache in zip((whole, spread), caches)
        )
        assert_same_logits(logits.to(expected.device), expected)


@pytest.mark.parametrize("family", [family for family in FAMILY_NAMES if family != "zamba2"])
@torch.no_grad()
def test_one_layer_on_the_cpu(family, tmp_path):
    """accelerate brings its weights to the GPU when they are used; its checkpoint is there all the time."""
    tiny_model(family).save_pretrained(tmp_path)
    device_map = by_layer(tiny_model(family), lambda i: "cpu" if i == 1 else 0)
    spread = type(tiny_model(family)).from_pretrained(tmp_path, device_map=device_map).eval()
    assert any(parameter.is_meta for parameter in spread.parameters())
    assert_same_tokens_and_logits(family, spread, tmp_path)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("offloaded", [None, 0])
@pytest.mark.parametrize("family", [family for family in FAMILY_NAMES if family != "zamba2"])
@torch.no_grad()
def test_two_devices_give_the_tokens_of_one(family, offloaded, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    half = len(getattr(tiny_model(family), tiny_model(family).base_model_prefix).layers) // 2
    device_map = by_layer(tiny_model(family), lambda i: "cpu" if i == offloaded else int(i >= half))
    spread = type(tiny_model(family)).from_pretrained(tmp_path, device_map=device_map).eval()
    assert set(spread.hf_device_map.values()) >= {0, 1}
    assert_same_tokens_and_logits(family, spread, tmp_path)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_map_that_accelerate_makes(tmp_path):
    """`device_map="auto"`, with memory for a half on each device."""
    tiny_model("bamba").save_pretrained(tmp_path)
    size = sum(parameter.nbytes for parameter in tiny_model("bamba").parameters())
    memory = {0: int(size * 0.7), 1: size}
    spread = type(tiny_model("bamba")).from_pretrained(tmp_path, device_map="auto", max_memory=memory).eval()
    assert set(spread.hf_device_map.values()) == {0, 1}, spread.hf_device_map
    with torch.no_grad():
        assert_same_tokens_and_logits("bamba", spread, tmp_path)
