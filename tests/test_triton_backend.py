"""A model with `backend="triton"` against the same with `backend="torch"`, and when which of them is taken.

Without an accelerator the kernels run in triton's interpreter, which must be chosen before triton is imported: a plain
run starts this file once more in a process of its own, with TRITON_INTERPRET=1. `test_gpu.py` does the same on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_models import (
    FAMILY_NAMES,
    RTOL,
    assert_same_logits,
    copy_of,
    mixers,
    poison,
    random_ids,
    relative_error,
    replay_layers,
    tiny_model,
)
from twins import Twins, eventful_session

import hf_replayssm
from hf_replayssm.models.mixer import is_reference
from hf_replayssm.models.norms import NORMS
from hf_replayssm.ops import backend, flash_linear, mamba2


pytest.importorskip("triton")
import replayssm_kernels


INTERPRETED = replayssm_kernels.is_available("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")

ONE_DELTA_LAYER = dict(num_hidden_layers=1, layer_types=["linear_attention"])
TWO_HEADS = dict(linear_num_key_heads=1, linear_num_value_heads=2)

# Four heads in two groups, in one recurrent layer: the interpreter takes its time for each of them.
SMALL = {
    "mamba2": ("mamba2", dict(hidden_size=16, num_heads=4, head_dim=8, num_hidden_layers=1)),
    "mamba2, another activation": (
        "mamba2",
        dict(hidden_size=16, num_heads=4, head_dim=8, num_hidden_layers=1, hidden_act="gelu", use_conv_bias=False),
    ),
    "bamba, a limit on dt": (
        "bamba",
        dict(
            hidden_size=16,
            mamba_n_heads=4,
            mamba_d_head=8,
            num_hidden_layers=2,
            attn_layer_indices=[0],
            time_step_limit=(0.05, 0.25),
        ),
    ),
    "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, num_hidden_layers=1)),
    "mamba": ("mamba", dict(hidden_size=16, num_hidden_layers=1)),
    "falcon_mamba, another activation": (
        "falcon_mamba",
        dict(hidden_size=16, num_hidden_layers=1, hidden_act="gelu", use_conv_bias=False),
    ),
    "jamba": (
        "jamba",
        dict(hidden_size=16, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1),
    ),
    "zamba": ("zamba", dict(hidden_size=16, num_hidden_layers=2, layers_block_type=["hybrid", "hybrid"])),
    "qwen3_next": ("qwen3_next", dict(hidden_size=16, **ONE_DELTA_LAYER, **TWO_HEADS, mlp_only_layers=[0])),
    "olmo_hybrid, another activation": (
        "olmo_hybrid",
        dict(
            hidden_size=16,
            hidden_act="gelu",
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            **TWO_HEADS,
        ),
    ),
    "kimi_linear": (
        "kimi_linear",
        dict(hidden_size=16, **ONE_DELTA_LAYER, mlp_layer_types=["dense"], linear_num_heads=1),
    ),
}


def small_twins(name: str, **config) -> Twins:
    """Of two rows: triton, then torch, then torch with a float32 checkpoint."""
    family, overrides = SMALL[name]
    model = hf_replayssm.enable(tiny_model(family, **overrides))
    config = {"config": model.config, "buffer_len": 3, "max_window": 2} | config
    triton, plain = (hf_replayssm.ReplayCache(**config, backend=backend) for backend in ("triton", "torch"))
    config |= {"checkpoint_dtype": torch.float32, "rounding": "nearest"}
    exact = hf_replayssm.ReplayCache(**config, backend="torch")
    return Twins(*((model, cache) for cache in (triton, plain, exact)), batch=2)


OFTEN = {"mamba2", "falcon_h1", "zamba", "qwen3_next", "kimi_linear"}  # the others with `-m slow`


@interpreted
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_the_same_answers(name):
    twins = small_twins(name)
    eventful_session(twins)
    triton, expected, _ = twins.all_logits()
    assert_same_logits(triton, expected)
    for ours, reference in zip(twins.states(0), twins.states(1)):
        assert float((ours - reference).abs().max() / reference.abs().max()) <= RTOL
    assert twins.caches[0].stats == twins.caches[1].stats


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["mamba2", "zamba", "qwen3_next", "kimi_linear"])
def test_a_checkpoint_of_8_bits(name, rounding):
    """As `test_a_low_precision_checkpoint`; the same scales and random bits, so as far off as PyTorch's."""
    twins = small_twins(name, checkpoint_dtype="int8", rounding=rounding)
    eventful_session(twins)
    triton, plain, exact = twins.all_logits()
    assert 0 < (triton - exact).norm() < 2 * (plain - exact).norm()
    assert {layer.checkpoint.dtype for layer in replay_layers(twins.caches[0])} == {torch.int8}
    assert twins.caches[0].stats == twins.caches[1].stats


@interpreted
def test_a_low_precision_checkpoint():
    """
    As far from a float32 checkpoint as PyTorch's. (Not equal: where old tokens are folded first, PyTorch's output
    comes from the rounded state, the kernel's from the state before.)
    """
    twins = small_twins("falcon_h1", checkpoint_dtype=torch.bfloat16)
    eventful_session(twins)
    assert {layer.checkpoint.dtype for layer in replay_layers(twins.caches[0])} == {torch.bfloat16}
    triton, plain, exact = twins.all_logits()
    # The interpreter cuts bfloat16 off where a device rounds it: twice the error. `test_gpu.py` asks for more.
    assert 0 < (triton - exact).norm() < 2.5 * (plain - exact).norm()


@interpreted
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("mamba2", ["mamba2_decode"]),
        ("mamba2, another activation", ["mamba2_step"]),
        ("mamba", ["causal_conv", "mamba1_step"]),
        ("falcon_mamba, another activation", ["mamba1_step"]),
        ("qwen3_next", ["gated_delta_decode"]),
        ("olmo_hybrid, another activation", ["gated_delta_step"]),
        ("kimi_linear", ["gated_delta_decode"]),
    ],
)
@torch.no_grad()
def test_a_segment_is_one_call(name, kernels, monkeypatch):
    """
    Whatever happens in it (of Mamba-1, around the projections that stand behind the convolution): no PyTorch op stands
    in for a flush, for masked tokens or for rows apart.
    """
    calls = []
    of_delta = "gated_delta_decode", "gated_delta_step", "gated_delta_fold"
    for op in ("mamba2_decode", "mamba2_step", "mamba2_fold", "mamba1_step", "mamba1_fold", "causal_conv", *of_delta):
        function = getattr(replayssm_kernels, op)
        monkeypatch.setattr(
            replayssm_kernels,
            op,
            lambda *args, op=op, function=function, **kwargs: (calls.append(op), function(*args, **kwargs))[1],
        )
    layer_class = hf_replayssm.layers.ReplayLayer
    for method in ("replay", "_fold", "_write_checkpoint"):
        monkeypatch.delattr(layer_class, method)
    family, overrides = SMALL[name]
    model = hf_replayssm.enable(tiny_model(family, **overrides), backend="triton")
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=2, max_window=1, backend="triton")
    mask = torch.tensor([[1, 1], [0, 1]])
    cache.activate_past_recording()
    for tokens in (1, 2, 3):
        model(input_ids=random_ids(2, tokens), attention_mask=mask if tokens == 2 else None, cache=cache)
    cache.crop(torch.tensor([-1, -2]))
    cache.record_past = False
    model(input_ids=random_ids(2, 1), cache=cache)  # flushes
    assert cache.stats.checkpoint_writes > 0 and calls == kernels * 4
    cache.get_recurrent_state(0)
    assert calls[len(kernels) * 4 :] == [kernels[-1].rpartition("_")[0] + "_fold"]


@interpreted
@pytest.mark.parametrize("name", ["mamba2", "mamba2, another activation", "mamba", "zamba", "qwen3_next"])
@torch.no_grad()
def test_autocast_changes_the_dtype_on_the_way(name):
    """The buffers keep the dtype of the first forward; activations of another one are cast to it."""
    family, overrides = SMALL[name]
    model = hf_replayssm.enable(tiny_model(family, **overrides))
    ids, logits = random_ids(2, 9), {}
    for kind in ("triton", "torch"):
        cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=3, backend=kind)
        model(input_ids=ids[:, :4], cache=cache)
        with torch.autocast("cpu", torch.bfloat16):
            steps = [model(input_ids=ids[:, i : i + 1], cache=cache).logits for i in range(4, 8)]
        logits[kind] = torch.cat([*steps, model(input_ids=ids[:, 8:], cache=cache).logits], 1).float()
        assert replay_layers(cache)[0].inputs.tensors()[0].dtype == torch.float32
    assert relative_error(logits["triton"], logits["torch"]) < 0.05


@interpreted
@pytest.mark.parametrize("who", ["upstream", "flash-linear-attention", "ours"])
@torch.no_grad()
def test_who_scans_a_prompt(who, monkeypatch):
    """Upstream's scan where it has kernels, else flash-linear-attention's where that is installed, else ours."""
    model = hf_replayssm.enable(tiny_model("mamba2", **SMALL["mamba2"][1]), backend="triton")
    ids, calls = random_ids(2, 9), []
    expected = model(input_ids=ids, use_cache=False).logits
    upstream, scan = sys.modules[mixers(model)[0]._replaced_class.__module__], mamba2.scan
    chunked = upstream.mamba2_chunk_scan
    if who == "upstream":  # a function of its own stands for one with kernels
        recorded = lambda *args, **kwargs: (calls.append("upstream"), chunked(*args, **kwargs))[1]  # noqa: E731
        monkeypatch.setattr(upstream, "mamba2_chunk_scan", recorded)
    assert is_reference(upstream.mamba2_chunk_scan) is (who != "upstream")
    monkeypatch.setattr(flash_linear, "serves", lambda x: who != "ours")
    monkeypatch.setattr(flash_linear, "scan", lambda *args: (calls.append("flash-linear-attention"), scan(*args))[1])
    monkeypatch.setattr(mamba2, "scan", lambda *args: (calls.append("ours"), scan(*args))[1])
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=3, backend="triton")
    logits = [model(input_ids=part, cache=cache).logits for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:])]
    assert_same_logits(torch.cat(logits, 1), expected)
    assert calls == [who] * 2 * len(mixers(model))


@torch.no_grad()
def static_session(model, kind: str) -> tuple[hf_replayssm.StaticReplayCache, torch.Tensor]:
    """Padding, flushes in phases, windows, rows cropped by counts of their own, a scan from inputs that are pending."""
    cache = hf_replayssm.StaticReplayCache(
        config=model.config, max_cache_len=80, buffer_len=3, max_window=3, backend=kind
    )
    logits = []

    def append(tokens, mask=None):
        poison(cache)
        out = model(input_ids=random_ids(2, tokens, seed=len(logits)), attention_mask=mask, cache=cache).logits
        logits.append((out if mask is None else out[mask.bool()]).reshape(-1, out.shape[-1]))

    append(5, torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]))
    for _ in range(4):
        append(1)
    append(2, torch.tensor([[1, 0], [0, 1]]))
    append(1, torch.tensor([[0], [1]]))
    cache.activate_past_recording()
    for tokens, counts in ((3, (2, 0)), (1, (0, 1)), (4, (3, 1)), (4, (0, 3)), (9, (3, 0)), (4, (1, 3))):
        append(tokens)
        cache.crop(-torch.tensor(counts))
    cache.record_past = False
    for tokens in (1, 1, 6, 1):
        append(tokens)
    assert replay_layers(cache)[0].kernels == (kind == "triton")
    return cache, torch.cat(logits)


@interpreted
@pytest.mark.parametrize(
    "name", ["mamba2, another activation", pytest.param("falcon_h1", marks=pytest.mark.slow), "kimi_linear"]
)
def test_the_same_answers_of_the_static_cache(name):
    family, overrides = SMALL[name]
    model = hf_replayssm.enable(tiny_model(family, **overrides))
    caches, logits = zip(*(static_session(model, kind) for kind in ("triton", "torch")))
    assert_same_logits(*logits)
    for ours, reference in zip(*(replay_layers(cache) for cache in caches)):
        ours, reference = ours.recurrent_states[0], reference.recurrent_states[0]
        assert float((ours - reference).abs().max() / reference.abs().max()) <= RTOL
    assert caches[0].stats == caches[1].stats


# Few heads, and no more mixers than a family must have.
FOUR_HEADS = dict(hidden_size=16, mamba_n_heads=4, mamba_d_head=8, num_hidden_layers=2)
WITH_NORM = {
    "mamba2": dict(hidden_size=8, num_heads=2, head_dim=8, num_hidden_layers=1),
    "bamba": FOUR_HEADS | dict(attn_layer_indices=[0]),
    "zamba2": dict(n_mamba_heads=2, layers_block_type=["linear_attention", "hybrid"], num_hidden_layers=2),
    "nemotron_h": dict(layers_block_type=["linear_attention", "mlp"], mamba_num_heads=2),
    "granitemoehybrid": FOUR_HEADS | dict(layer_types=["linear_attention", "full_attention"]),
    "falcon_h1": dict(mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, num_hidden_layers=1, mamba_rms_norm=True),
    "qwen3_next": dict(**ONE_DELTA_LAYER, **TWO_HEADS, mlp_only_layers=[0]),
}
WITH_NORM["falcon_h1, norm first"] = WITH_NORM["falcon_h1"] | {"mamba_norm_before_gate": True}
WITHOUT_NORM = WITH_NORM["falcon_h1"] | {"mamba_rms_norm": False}


def model_with_norm(name: str):
    """Enabled; the weights of its norms matter."""
    model = tiny_model(name.partition(",")[0], **WITH_NORM[name])
    for mixer in mixers(model):
        with torch.no_grad():
            mixer.norm.weight.copy_(torch.linspace(-1.0, 2.0, len(mixer.norm.weight)))
    return hf_replayssm.enable(model)


@pytest.fixture
def norm_calls(monkeypatch) -> list[int]:
    """The number of tokens in each call of the norm's kernel with a gate."""
    return _recorded_norms(monkeypatch)[True]


@pytest.fixture
def plain_norm_calls(monkeypatch) -> list[int]:
    """The same without a gate: norms between layers."""
    return _recorded_norms(monkeypatch)[False]


def _recorded_norms(monkeypatch) -> dict[bool, list[int]]:
    calls, kernel = {True: [], False: []}, replayssm_kernels.rms_norm

    def recorded(y, gate, *args, **kwargs):
        calls[gate is not None].append(y.shape[1])
        return kernel(y, gate, *args, **kwargs)

    monkeypatch.setattr(replayssm_kernels, "rms_norm", recorded)
    return calls


def forwards(model, kind: str, *lengths: int) -> torch.Tensor:
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=3, backend=kind)
    return torch.cat(
        [model(input_ids=ids, cache=cache).logits for ids in random_ids(1, sum(lengths)).split(lengths, 1)], 1
    )


@interpreted
@pytest.mark.parametrize("name", WITH_NORM)
@torch.no_grad()
def test_the_gated_norm_is_one_call(name, norm_calls, monkeypatch):
    """In a prefill, a step and a window; upstream's module is not called."""
    model = model_with_norm(name)
    lengths = (5, 1, 2) if name == "bamba" else (3, 1)
    expected = forwards(model, "torch", *lengths)
    assert norm_calls == []
    for mixer in mixers(model):
        monkeypatch.setattr(mixer.norm, "_call_impl", lambda *args: pytest.fail("the module was called"))
    assert_same_logits(forwards(model, "triton", *lengths), expected)
    assert norm_calls == [tokens for tokens in lengths for _ in mixers(model)]


@interpreted
@torch.no_grad()
def test_no_norm_is_no_call(norm_calls):
    model = hf_replayssm.enable(tiny_model("falcon_h1", **WITHOUT_NORM))
    assert_same_logits(forwards(model, "triton", 3, 1), forwards(model, "torch", 3, 1))
    assert norm_calls == []


@interpreted
@torch.no_grad()
def test_a_norm_with_a_hook_is_called(norm_calls):
    """Whatever watches the module sees it; without the hook it is the kernel again."""
    model, seen = model_with_norm("bamba"), []
    (mixer,) = mixers(model)
    ids, cache = random_ids(1, 5), hf_replayssm.ReplayCache(config=model.config, buffer_len=4, backend="triton")
    expected = forwards(model, "torch", 2, 1, 1, 1)

    class Watches(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(("accelerate", args[0].shape[1]))
            return args, kwargs

    logits = [model(input_ids=ids[:, :2], cache=cache).logits]
    handle = mixer.norm.register_forward_hook(lambda module, args, out: seen.append(("torch", out.shape[1])))
    logits.append(model(input_ids=ids[:, 2:3], cache=cache).logits)
    handle.remove()
    add_hook_to_module(mixer.norm, Watches())
    logits.append(model(input_ids=ids[:, 3:4], cache=cache).logits)
    remove_hook_from_module(mixer.norm)
    assert seen == [("torch", 1), ("accelerate", 1)] and norm_calls == [2]
    logits.append(model(input_ids=ids[:, 4:], cache=cache).logits)
    assert len(seen) == 2 and norm_calls == [2, 1]
    assert_same_logits(torch.cat(logits, 1), expected)


@interpreted
def test_a_gradient_takes_the_module(norm_calls):
    """A gradient that comes back is refused as ever."""
    model = model_with_norm("bamba")
    (mixer,) = mixers(model)
    mixer.norm.requires_grad_(True)
    logits = forwards(model, "triton", 2, 1)
    assert norm_calls == []
    logits.sum().backward()
    assert mixer.norm.weight.grad is not None  # behind the cache, where it can come


@interpreted
@torch.no_grad()
def test_the_gated_norm_of_a_16_bit_model(norm_calls):
    """float32 from the recurrence, float16 weights and gate: the result is what the projection takes."""
    model = model_with_norm("bamba").to(torch.float16)
    triton, plain = (forwards(model, kind, 2, 1) for kind in ("triton", "torch"))
    assert norm_calls == [2, 1] and triton.dtype == torch.float16
    assert relative_error(triton, plain) < 0.01


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        # (Norms like Bamba's and Zamba's.)
        pytest.param(name, marks=pytest.mark.slow if name in ("mamba", "falcon_mamba", "jamba", "zamba2") else ())
        for name in FAMILY_NAMES
        if name != "qwen3_next"  # a norm of another formula
    ],
)
@torch.no_grad()
def test_a_norm_between_layers_is_one_call(name, plain_norm_calls):
    """In all forwards that replay, and only there; whatever watches the module sees it as before."""
    model, called = tiny_model(name), []
    names = {name for _, name in NORMS}
    norms = [module for module in model.modules() if type(module).__name__ in names]
    for norm in norms:
        norm.weight.copy_(torch.linspace(-1.0, 2.0, len(norm.weight)))
        norm.register_forward_hook(lambda module, args, out: called.append(out.shape[1]))
    upstream = [type(norm) for norm in norms]
    hf_replayssm.enable(model)
    expected = forwards(model, "torch", 5, 1, 2)
    assert plain_norm_calls == [] and len(called) > 3
    called.clear()
    assert_same_logits(forwards(model, "triton", 5, 1, 2), expected)
    assert plain_norm_calls == called
    plain_norm_calls.clear()
    model(input_ids=random_ids(1, 3), use_cache=False)
    hf_replayssm.disable(model)
    model(input_ids=random_ids(1, 3))
    assert plain_norm_calls == [] and [type(norm) for norm in norms] == upstream


@interpreted
@torch.no_grad()
def test_a_norm_that_somebody_changed_is_called(plain_norm_calls, monkeypatch):
    """On the module or in its class, before `enable` or after."""
    model = tiny_model("bamba")
    own, late = model.model.layers[0].input_layernorm, model.model.final_layernorm
    cls = type(own)
    own.forward = lambda hidden_states: 2 * cls.forward(own, hidden_states)
    model = hf_replayssm.enable(model)
    assert type(own) is cls and type(late) is not cls
    expected = forwards(model, "torch", 2, 1)
    assert_same_logits(forwards(model, "triton", 2, 1), expected)
    taken = len(plain_norm_calls)
    late.forward = lambda hidden_states: hidden_states
    expected = forwards(model, "torch", 2, 1)
    assert_same_logits(forwards(model, "triton", 2, 1), expected)
    assert 0 < len(plain_norm_calls) - taken < taken
    del late.forward, plain_norm_calls[:]
    upstream = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, hidden_states: 3 * upstream(self, hidden_states))
    expected = forwards(model, "torch", 2, 1)
    assert_same_logits(forwards(model, "triton", 2, 1), expected)
    assert plain_norm_calls == []


@interpreted
@torch.no_grad()
def test_norms_between_layers_of_a_16_bit_model(plain_norm_calls):
    for name in ("bamba", "nemotron_h"):  # rounded before the weight, and behind it
        model = hf_replayssm.enable(tiny_model(name).to(torch.float16))
        triton, plain = (forwards(model, kind, 2, 1) for kind in ("triton", "torch"))
        assert triton.dtype == plain.dtype and relative_error(triton, plain) < 0.01
    assert plain_norm_calls


# ------------------------------------------------------------------------------------------------ which backend
def test_auto_is_silent_where_pytorch_is_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.resolve("auto", torch.device("cpu")) == "torch"
        assert backend.resolve("auto", torch.device("cuda"), [torch.bfloat16, torch.float64]) == "torch"
        assert backend.resolve("torch", torch.device("cuda"), [torch.float64]) == "torch"
        assert backend.resolve("auto", torch.device("cuda"), [torch.bfloat16, torch.float32]) == "triton"


def test_triton_takes_no_float64():
    with pytest.raises(ValueError, match="float64.*Use `backend='auto'`"):
        backend.resolve("triton", torch.device("cuda"), [torch.float64])


@pytest.mark.parametrize("what", ["activations", "checkpoint"])
@torch.no_grad()
def test_a_float64_model(what):
    """`"triton"` refuses it before anything is changed; `"auto"` and `"torch"` take the PyTorch ops."""
    model = hf_replayssm.enable(copy_of("bamba"))
    if what == "activations":
        model, checkpoint_dtype = model.double(), torch.float32
    else:
        checkpoint_dtype = torch.float64
    ids = random_ids(2, 9)
    config = {"config": model.config, "buffer_len": 3, "checkpoint_dtype": checkpoint_dtype}
    cache = hf_replayssm.ReplayCache(**config, backend="triton")
    with pytest.raises(ValueError, match="float64" if INTERPRETED else "float64|cpu"):
        model(input_ids=ids, cache=cache)
    assert cache.get_seq_length() == 0 and not cache.interrupted
    expected = model(input_ids=ids, use_cache=False).logits
    cache = hf_replayssm.ReplayCache(**config, backend="auto")
    logits = torch.cat([model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(9)], 1)
    assert relative_error(logits, expected) <= RTOL
    assert cache.get_recurrent_state(0).dtype == torch.float64


def test_every_op_has_a_kernel():
    rows = backend.explain("cuda")
    assert [op for op, _, _ in rows] == list(backend.OPS)
    assert {chosen for _, chosen, _ in rows} == {"triton"}
    assert {chosen for _, chosen, _ in backend.explain("cpu")} == {"torch"}


if not INTERPRETED:

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked):
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        run = subprocess.run(
            [*command, "-m", f"{marked} and not gpu and not multigpu"],
            env=env | {"TRITON_INTERPRET": "1"},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
        print(run.stdout.splitlines()[-1])
