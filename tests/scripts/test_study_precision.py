"""scripts/study_precision.py: it drives layers as the cache does, and its errors are those that rounding makes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import enabled_model, random_ids

from hf_replayssm import ReplayCache
from hf_replayssm.ops import quantize


SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
spec = importlib.util.spec_from_file_location("study_precision", SCRIPTS / "study_precision.py")
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(study, "EVERY", 64)


def arguments(**changed):
    defaults = dict(
        checkpoint=["fp32", "int8"], rounding=["nearest"], buffer_len=[1, 16], seed=0, attention=32, scale_dim=None
    )
    return argparse.Namespace(**defaults | changed)


@torch.no_grad()
def test_a_layer_is_driven_as_the_cache_drives_it():
    """Recorded and driven, a layer ends in the checkpoint that a cache of that precision ends in."""
    model, ids = enabled_model("bamba"), random_ids(1, 64)[0]
    layer = study.record(model, ids, 1)[0]
    assert layer.tokens == 64 and layer.decay().shape == (6,) and bool((layer.decay() < 0).all())
    cache = ReplayCache(config=model.config, buffer_len=8, checkpoint_dtype="int8", rounding="stochastic")
    for begin in range(0, 64, 8):
        model(input_ids=ids[None, begin : begin + 8], cache=cache)
    driven = []
    study.drive(layer, 8, [("int8", "stochastic")], keep=driven.append)
    state = cache.replay_layers[0].checkpoint_state()
    # (Sums of float32 in another order, so a number that lies between two may go to the other one.)
    assert (driven[-1] != state).float().mean() < 0.05
    assert torch.allclose(driven[-1], state, atol=1.01 * float(cache.replay_layers[0].scale.max()))


@pytest.mark.parametrize("name", study.SYNTHETIC)
def test_errors_are_those_of_rounding(name):
    """float32 has next to none, a flush has less than a rounding at every token, and int8 less than float8."""
    layer = study.synthetic(name, 128)
    rows = [("fp32", "nearest"), ("bf16", "nearest"), ("int8", "nearest"), ("fp8", "stochastic")]
    per_token, per_flush = (study.drive(layer, length, rows)["relative"].mean(1) for length in (1, 16))
    for errors in (per_token, per_flush):
        fp32, bf16, int8, fp8 = errors.tolist()
        assert fp32 < 1e-11 < 1e-7 < bf16 < int8 < fp8 < 0.1
    ratio = per_token[1:] / per_flush[1:]
    assert bool((ratio > 4).all()) and bool((ratio < 40).all())


def test_phases_count_alike():
    """Windows of sampled tokens hold every phase of a buffer equally often, whatever its length."""
    layer = study.synthetic("Jamba", 128)
    for length in (1, 4, 32):
        result = study.drive(layer, length, [("int8", "nearest")])
        assert result["windows"].shape == (2, 1)


def test_logits_tables_and_files(tmp_path, monkeypatch):
    model, ids = enabled_model("bamba"), random_ids(2, 65)
    args = arguments()
    *_, result = study.study_logits(model, ids, args)
    runs = {(run["checkpoint"], run["buffer_len"]): run for run in result["runs"]}
    assert len(runs) == 4 and result["tokens"] == 64
    for length in (1, 16):
        assert runs["fp32", length]["kl"] < 1e-7 and runs["fp32", length]["relative_perplexity"] == 0
        assert runs["fp32", length]["perplexity"] == pytest.approx(result["float64"]["perplexity"], rel=1e-4)
    assert runs["int8", 1]["kl"] > runs["int8", 16]["kl"] > 1e-6
    states = study.study_states(study.record(model, ids[0, :64], None), args)
    whole = {"about": {}, "studies": [{"model": "tiny", "states": states, "logits": result}]}
    text = study.report(whole)
    assert "| int8 |" in text and "per token / per flush (L=16)" in text
    path = tmp_path / "a.json"
    path.write_text(json.dumps(whole))
    again = json.loads(path.read_text())
    for part in ("states", "logits"):
        again["studies"][0][part]["runs"][0]["buffer_len"] = 8
    both = study.merged([json.loads(path.read_text()), again])
    assert [len(both["studies"][0][part]["runs"]) for part in ("states", "logits")] == [5, 5]
    pytest.importorskip("matplotlib")
    study.plot(whole, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").stat().st_size > 1000


@torch.no_grad()
def test_attention_forgets_at_the_same_tokens_for_every_width():
    model, ids = enabled_model("bamba"), random_ids(1, 96)
    logits = []
    for width in (1, 16, 32):
        logits.append(torch.cat([part for _, part in study.teacher_forced(model, ids, width, 32, buffer_len=width)], 1))
    assert torch.allclose(logits[0], logits[1], atol=1e-3) and torch.allclose(logits[0], logits[2], atol=1e-3)
    whole = torch.cat([part for _, part in study.teacher_forced(model, ids, 32, 0, buffer_len=32)], 1)
    assert torch.allclose(whole[:, :64], logits[0][:, :64], atol=1e-3)
    assert not torch.allclose(whole[:, 64:], logits[0][:, 64:], atol=1e-2)


def test_rounding_is_the_cache_s():
    state = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    key = quantize.layer_seed(0, 0)
    out = study.rounded(state, [("int8", "stochastic"), ("bf16", "nearest")], -1, key, 5)
    bits = quantize.random_bits(key, 5, state.shape[1:], state.device)
    assert torch.equal(out[:1], quantize.read(*quantize.store(state[:1], torch.int8, -1, bits)))
    assert torch.equal(out[1], state[1].bfloat16().float())
