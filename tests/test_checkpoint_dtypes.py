"""Caches whose checkpoint is stored in 8 or 16 bits: what it holds, that nothing of it is left behind, and its size."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from tiny_models import (
    copy_of,
    enabled_model,
    fingerprint,
    poison,
    random_ids,
    relative_error,
    replay_layers,
    tiny_model,
)

import hf_replayssm
from hf_replayssm import ReplayCache, ReplayConfig, StaticReplayCache
from hf_replayssm.ops import mamba1, quantize
from hf_replayssm.recurrences import GatedDelta, Mamba1


RECURRENCES = ("bamba", "zamba", "olmo_hybrid", "kimi_linear")  # one model of each
STORED = {
    "int8": {"checkpoint_dtype": "int8"},
    "float8": {"checkpoint_dtype": "float8_e4m3fn"},
    "int8, stochastic": {"checkpoint_dtype": "int8", "rounding": "stochastic", "seed": 5},
    "float8, stochastic": {"checkpoint_dtype": "float8_e4m3fn", "rounding": "stochastic"},
    "bfloat16, stochastic": {"checkpoint_dtype": "bfloat16", "rounding": "stochastic"},
}
COMMON = ("int8", "float8, stochastic")
every_way = pytest.mark.parametrize(
    "stored",
    [pytest.param(way, id=name, marks=() if name in COMMON else pytest.mark.slow) for name, way in STORED.items()],
)


def new_cache(kind: str, model, **config):
    if kind == "static":
        return StaticReplayCache(config=model.config, max_cache_len=80, **config)
    return ReplayCache(config=model.config, **config)


@functools.cache
def double_model(name: str):
    """In float64 two ways to the same state differ by so little that rounding hides it."""
    model = tiny_model(name).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not run in float64
    return hf_replayssm.enable(model)


@torch.no_grad()
def feed(model, cache, ids, *lengths):
    """The logits of ids (b, t), in forwards of these lengths, the last of which may be left out."""
    logits, begin = [], 0
    for length in (*lengths, *[1] * (ids.shape[1] - sum(lengths))):
        logits.append(model(input_ids=ids[:, begin : begin + length], cache=cache).logits)
        begin += length
    return torch.cat(logits, 1)


# ------------------------------------------------------------------------------------------- what the checkpoint holds
def classic_step(layer, state, constants, x, *operands):
    """One token of a recurrence as it is written down: its output from the state, and the state."""
    recurrence = layer.recurrence
    if isinstance(recurrence, GatedDelta):
        k, v, g, beta = (operand[:, 0] for operand in operands)
        unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
        repeats = recurrence.heads // recurrence.key_heads
        q, k = (unit(x).repeat_interleave(repeats, 1) for x in (x[:, 0], k))
        state = state * g.exp().view(*state.shape[:2], -1, 1)
        u = beta[..., None] * (v - (state * k[..., None]).sum(2))
        state = state + k[..., None] * u[:, :, None]
        return (state * q[..., None]).sum(2) * k.shape[-1] ** -0.5, state
    x = x[:, 0]
    if isinstance(recurrence, Mamba1):
        (A, bias), (B, C, dt, D, z) = constants, operands
        dt = mamba1.final_dt(dt[:, 0], bias)
        state = (A * dt[:, :, None]).exp() * state + (dt * x)[:, :, None] * B[:, 0, :, :, None]
        y = (state * C[:, 0, :, :, None]).sum(2) + D * x
        return y * torch.nn.functional.silu(z[:, 0]), state
    (A,), (B, C, dt, D) = constants, operands
    B, C = (each[:, 0].repeat_interleave(recurrence.heads // recurrence.groups, 1) for each in (B, C))
    dt = dt[:, 0, :, None, None]
    state = (A[:, None, None] * dt).exp() * state + dt * x[..., None] * B[:, :, None]
    return (state * C[:, :, None]).sum(-1) + D[:, None] * x, state


@every_way
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_buffer_of_one_token_is_the_classic_step_rounded_at_every_token(name, stored):
    """What per flush is compared with: outputs from the whole state, which is rounded behind each token."""
    model = double_model(name)
    cache = ReplayCache(config=model.config, buffer_len=1, **stored)
    layer = cache.replay_layers[0]
    config = cache.replay_config
    calls, replay = [], layer.replay

    def watched(segment, *operands):
        y = replay(segment, *operands)
        calls.append((operands, y.clone(), layer.checkpoint.clone(), copy.deepcopy(layer.scale)))
        return y

    layer.replay = watched
    feed(model, cache, random_ids(2, 12), 1)
    state = torch.zeros((2, *layer.recurrence.state_shape), dtype=torch.float64)
    assert len(calls) == 12 and cache.stats.checkpoint_writes == 2 * 12
    for token, (operands, y, checkpoint, scale) in enumerate(calls):
        expected, state = classic_step(layer, state, layer.constants, *operands)
        assert relative_error(y[:, 0], expected) < 1e-6
        bits = None
        if config.rounding == "stochastic":
            seed = quantize.layer_seed(config.seed, 0)
            bits = quantize.random_bits(seed, token + 1, state.shape[1:], state.device)
        values, scales = quantize.store(state, config.checkpoint_dtype, layer.recurrence.scale_dim, bits)
        assert torch.equal(values.float(), checkpoint.float())
        assert scale is None or torch.allclose(scale, scales, rtol=1e-6, atol=0)
        state = quantize.read(values, scales).double()


@every_way
@pytest.mark.parametrize("kind", ["plain", "static"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_logits_are_those_of_a_whole_state_but_for_rounding(name, kind, stored):
    model, ids = enabled_model(name), random_ids(2, 40)
    exact = feed(model, ReplayCache(config=model.config, buffer_len=4), ids, 9, 3)
    cache = new_cache(kind, model, buffer_len=4, **stored)
    error = relative_error(feed(model, cache, ids, 9, 3), exact)
    assert 1e-5 < error < (0.05 if stored["checkpoint_dtype"] == "bfloat16" else 0.4), error  # 1: no state at all


@pytest.mark.parametrize("name", RECURRENCES)
def test_plain_and_static_round_alike(name):
    """At the same tokens, with the same random bits."""
    model, ids = double_model(name), random_ids(2, 20)
    config = {"buffer_len": 1, "checkpoint_dtype": "int8", "rounding": "stochastic", "seed": 7}
    logits = [feed(model, new_cache(kind, model, **config), ids, 5) for kind in ("plain", "static")]
    assert relative_error(*logits) < 1e-9


# ------------------------------------------------------------------------------------------------- stochastic rounding
def test_a_seed_gives_the_same_answers_in_any_batch():
    """Alone, beside other rows, in another place, and padded on the left."""
    model, ids = double_model("bamba"), random_ids(3, 21)
    config = {"buffer_len": 4, "checkpoint_dtype": "int8", "rounding": "stochastic"}
    new = lambda **more: ReplayCache(config=model.config, **config | more)  # noqa: E731
    together = feed(model, new(), ids, 6)
    for row in range(3):
        assert relative_error(feed(model, new(), ids[row : row + 1], 6), together[row : row + 1]) < 1e-9
    assert relative_error(feed(model, new(), ids.flip(0), 6).flip(0), together) < 1e-9
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ids], 1)
    cache = new()
    mask = torch.ones_like(padded)
    mask[:, :2] = 0
    with torch.no_grad():
        first = model(input_ids=padded[:, :8], attention_mask=mask[:, :8], cache=cache).logits[:, 2:]
    assert relative_error(torch.cat([first, feed(model, cache, ids[:, 6:])], 1), together) < 1e-9
    assert relative_error(feed(model, new(), ids, 6), together) < 1e-9
    assert relative_error(feed(model, new(seed=1), ids, 6), together) > 1e-4
    assert relative_error(feed(model, new(rounding="nearest"), ids, 6), together) > 1e-4


def test_layers_have_random_bits_of_their_own():
    model = enabled_model("bamba")
    cache = ReplayCache(config=model.config, checkpoint_dtype="int8", rounding="stochastic")
    layers = replay_layers(cache)
    assert len({layer._seed for layer in layers}) == len(layers) > 1
    other = copy.deepcopy(cache)
    assert [layer._seed for layer in replay_layers(other)] == [layer._seed for layer in layers]


# ---------------------------------------------------------------------------------------------------- cache operations
OPERATIONS = {
    "deepcopy": (copy.deepcopy, [0, 1]),
    "copy": (copy.copy, [0, 1]),
    "pickle": (lambda cache: pickle.loads(pickle.dumps(cache)), [0, 1]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
}


def restored(cache):
    """Goes on, comes back."""
    snapshot = cache.snapshot()
    feed(enabled_model("bamba"), cache, random_ids(2, 9, seed=4))
    cache.restore(snapshot)


OPERATIONS["restore"] = (restored, [0, 1])


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
@pytest.mark.parametrize("kind", ["plain", "static"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", pytest.param("int8", marks=pytest.mark.slow)])
def test_rows_take_their_scales_along(dtype, kind, operation):
    model, ids = enabled_model("bamba"), random_ids(2, 24)
    operate, rows = operation
    cache = new_cache(kind, model, buffer_len=4, checkpoint_dtype=dtype)
    feed(model, cache, ids[:, :14], 7)
    twin = new_cache(kind, model, buffer_len=4, checkpoint_dtype=dtype)
    feed(model, twin, ids[:, :14], 7)
    cache = operate(cache) or cache
    poison(cache)
    for layer, other in zip(replay_layers(cache), replay_layers(twin)):
        assert layer.checkpoint.dtype == other.checkpoint.dtype and layer.scale.dtype == torch.float32
        assert torch.equal(layer.checkpoint.float(), other.checkpoint.float()[rows])
        assert torch.equal(layer.scale, other.scale[rows]) and bool((layer.scale > 0).any())
        assert layer.scale.data_ptr() != other.scale.data_ptr()
    logits = feed(model, cache, ids[rows, 14:])
    # (Another batch size sums in another order, and what lies between two stored numbers may go to the other one.)
    assert relative_error(logits, feed(model, twin, ids[:, 14:])[rows]) < (1e-6 if len(rows) == 2 else 0.05)


@pytest.mark.parametrize("kind", ["plain", "static"])
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_crop_gives_back_what_was(name, kind):
    model, ids = double_model(name), random_ids(2, 24)
    config = {"buffer_len": 8, "max_window": 4, "checkpoint_dtype": "int8", "rounding": "stochastic"}
    cache, twin = (new_cache(kind, model, **config) for _ in range(2))
    for each in (cache, twin):
        each.activate_past_recording()
        feed(model, each, ids[:, :8], 5, 3)
    before = [(layer.checkpoint.clone(), layer.recurrent_states[0].clone()) for layer in replay_layers(cache)]
    feed(model, cache, random_ids(2, 4, seed=9), 4)
    cache.crop(-4)
    poison(cache)
    kept = 0
    for layer, (checkpoint, state) in zip(replay_layers(cache), before):
        # Where old tokens were folded in between, their state is rounded now, and it was not before.
        flushed = not torch.equal(layer.checkpoint, checkpoint)
        kept += not flushed
        assert relative_error(layer.recurrent_states[0], state) < (0.2 if flushed else 1e-12)
    assert kept
    logits = [feed(model, each, ids[:, 8:], 3, 1) for each in (cache, twin)]
    assert relative_error(*logits) < 0.3  # (without the crop they flush at other tokens)


@pytest.mark.parametrize("kind", ["plain", "static"])
def test_reset_equals_a_fresh_cache(kind):
    model, ids = enabled_model("bamba"), random_ids(2, 20)
    config = {"buffer_len": 4, "checkpoint_dtype": "int8", "rounding": "stochastic"}
    cache = new_cache(kind, model, **config)
    first = feed(model, cache, ids, 5)
    cache.reset()
    assert all(layer.scale is None or not layer.scale.any() for layer in replay_layers(cache))
    assert torch.equal(feed(model, cache, ids, 5), first)


def test_a_static_cache_keeps_its_scales_in_place():
    model, ids = enabled_model("bamba"), random_ids(2, 20)
    cache = new_cache("static", model, buffer_len=4, checkpoint_dtype="float8_e4m3fn")
    feed(model, cache, ids, 5)
    tensors = dict(cache.static_tensors())
    named = [name for name in tensors if name.endswith(".scale")]
    assert len(named) == len(replay_layers(cache))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    feed(model, cache, ids)
    assert {name: tensor.data_ptr() for name, tensor in cache.static_tensors()} == addresses


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("kind", ["plain", "static"])
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECURRENCES)
def test_nothing_else_holds_the_state(name, dtype, kind):
    """A byte for each of its numbers, four for each scale, and no other tensor of that size in the layer."""
    model = enabled_model(name)
    cache = new_cache(kind, model, buffer_len=2, checkpoint_dtype=dtype)
    feed(model, cache, random_ids(2, 9), 4)
    for layer in replay_layers(cache):
        state = layer.recurrent_states[0]
        assert state.dtype == torch.float32
        row, scales = state.numel() // 2, state.numel() // 2 // layer.recurrence.state_shape[layer.recurrence.scale_dim]
        assert layer.checkpoint_bytes == row + 4 * scales
        cached, layer.cache = layer.cache, None
        held = fingerprint(layer, "layer")
        layer.cache = cached
        large = [path for path, held in held.items() if isinstance(held, torch.Tensor) and held.numel() >= 2 * row]
        apart = ("inputs", "keys", "values")  # of the convolution, of the buffer and of attention
        assert [path for path in large if path != "layer.checkpoint" and not any(one in path for one in apart)] == []
    writes = cache.stats.checkpoint_writes
    row_bytes = sum(layer.checkpoint_bytes for layer in replay_layers(cache))
    if kind == "plain":
        assert cache.stats.checkpoint_bytes_written == writes * row_bytes


# ------------------------------------------------------------------------------------------------------------- settings
def test_generate_takes_the_settings():
    model = hf_replayssm.enable(copy_of("bamba"))
    config = {"checkpoint_dtype": "int8", "rounding": "stochastic", "seed": 3, "buffer_len": 4}
    for implementation in ("replayssm", "replayssm_static"):
        out = model.generate(
            random_ids(1, 6),
            max_new_tokens=8,
            cache_implementation=implementation,
            cache_config=config,
            return_dict_in_generate=True,
        )
        assert out.cache.replay_config == ReplayConfig(**config)
        assert {layer.checkpoint.dtype for layer in replay_layers(out.cache)} == {torch.int8}
    assert ReplayConfig.from_dict(ReplayConfig(**config).to_dict()) == ReplayConfig(**config)


def test_a_device_without_float8_is_told_what_it_has(monkeypatch):
    model = enabled_model("bamba")
    zeros = torch.zeros

    def refuses(*args, dtype=None, **kwargs):
        if dtype == torch.float8_e4m3fn:
            raise TypeError("Trying to convert Float8_e4m3fn to the MPS backend but it does not have support")
        return zeros(*args, dtype=dtype, **kwargs)

    cache = ReplayCache(config=model.config, checkpoint_dtype="float8_e4m3fn")
    monkeypatch.setattr(torch, "zeros", refuses)
    with pytest.raises(ValueError, match="checkpoint_dtype='int8'"):
        feed(model, cache, random_ids(1, 3), 3)
