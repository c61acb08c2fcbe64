"""What is Mamba-1's own in the mixers: the projections behind the convolution, and upstream's scan."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_models import (
    MAMBA1_NAMES,
    Session,
    assert_same_logits,
    copy_of,
    dt_bias_of,
    mixers,
    random_ids,
    relative_error,
    shared_model,
    tiny_model,
    whole_forward,
)

import hf_replayssm
from hf_replayssm.models.mixer import is_reference


families = pytest.mark.parametrize("family", MAMBA1_NAMES)
PADDING = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])


@families
def test_a_package_with_a_faster_scan_is_used_where_it_can_be(family: str, monkeypatch):
    """It takes no initial state, so it serves the first tokens of a cache; padding goes in as a dt of no effect."""
    upstream = sys.modules[type(mixers(shared_model(family))[0]).__module__]
    scan, calls = upstream.mamba_selective_scan, []
    assert is_reference(scan)

    def faster(x, *args, **kwargs):
        calls.append(x.shape[-1])
        return scan(x, *args, **kwargs)

    monkeypatch.setattr(upstream, "mamba_selective_scan", faster)
    model = hf_replayssm.enable(copy_of(family))
    made = Session(family, 2, model=model, buffer_len=2)
    made.append(6, mask=PADDING)
    assert calls == [6] * len(mixers(model)) * getattr(mixers(model)[0], "n_mamba_heads", 1)
    calls.clear()
    made.append(9)
    assert not calls
    monkeypatch.undo()
    made.verify()


@families
def test_there_is_no_limit_of_dt_to_override(family: str):
    with pytest.raises(ValueError, match=f"`time_step_limit`.*'{family}'"):
        hf_replayssm.ReplayCache(config=shared_model(family).config, time_step_limit=(0.1, 0.2))


@families
def test_a_gradient_for_a_parameter_between_the_projections_is_refused(family: str):
    model = copy_of(family)
    inside = [
        parameter
        for name, parameter in mixers(model)[-1].named_parameters()
        if not name.startswith(("in_proj", "out_proj"))
    ]
    hf_replayssm.enable(model)
    for parameter in inside:
        parameter.requires_grad_(True)
        cache = hf_replayssm.ReplayCache(config=model.config)
        logits = model(input_ids=random_ids(1, 3), cache=cache).logits
        with pytest.raises(RuntimeError, match="ReplayCache"):
            logits.sum().backward()
        parameter.requires_grad_(False)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_lora_behind_the_convolution(family: str):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    model = get_peft_model(copy_of(family), lora).eval()
    ids = random_ids(1, 12)
    expected = whole_forward(model, ids)
    assert relative_error(expected, whole_forward(shared_model(family), ids)) > 0.01
    hf_replayssm.enable(model)
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=2)
    with torch.no_grad():
        parts = [model(input_ids=ids[:, a:b], cache=cache).logits for a, b in ((0, 6), (6, 7), (7, 8), (8, 12))]
    assert_same_logits(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("family", ["falcon_mamba", "jamba"])
def test_a_quantised_projection_is_called(family: str):
    """Its weight is no matrix; upstream takes the bias off again."""
    model = hf_replayssm.enable(copy_of(family))
    model.config._is_quantized = True
    calls = []
    for mixer in mixers(model):
        mixer.dt_proj.register_forward_hook(lambda *_: calls.append(1))
    made = Session(family, 1, model=model, buffer_len=2)
    for tokens in (5, 1, 1, 1):
        made.append(tokens)
    assert len(calls) == 4 * len(mixers(model))
    made.compare()


@pytest.mark.parametrize("name", ["zamba", "zamba_one_head"])
def test_zambas_heads_are_not_interchangeable(name: str):
    """The tests would notice: each head has a selection of its own."""
    model = tiny_model(name)
    for mixer in mixers(model):
        dt_bias_of(mixer).copy_(dt_bias_of(mixer).flip(0, 1))
    moved = relative_error(
        whole_forward(model, random_ids(1, 12)), whole_forward(shared_model(name), random_ids(1, 12))
    )
    assert moved > 0.01
