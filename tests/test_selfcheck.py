"""The self-check says ok where replay is right, and FAILED where it is not."""

from __future__ import annotations

import pytest
import tiny_models
import torch

import hf_replayssm
from hf_replayssm.families import FAMILIES
from hf_replayssm.selfcheck import _KEPT, TOLERANCE, run_self_checks, self_check, tiny_config, tiny_model


CHECKS = {
    "the state matters",
    "two chunks against one forward",
    "steps over a flush",
    "rejected window",
    "left padding",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_is_right_for_every_family(family):
    results = self_check(family)
    assert {result.check for result in results} == CHECKS
    assert all(result.ok for result in results), [result for result in results if not result.ok]
    assert all(result.error < TOLERANCE for result in results if result.check != "the state matters")


def test_all_families_by_default():
    assert {result.family for result in run_self_checks()} == set(FAMILIES)


def test_random_numbers_of_the_caller_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    self_check("mamba2")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", tiny_models.VARIANT_NAMES)
def test_the_features_of_a_given_config_are_taken_over(name):
    config = tiny_models.tiny_config(name)
    _, overrides = tiny_models.VARIANTS[name]
    tiny = tiny_config(config.model_type, like=config)
    for field in set(overrides) & set(_KEPT):
        assert getattr(tiny, field) == getattr(config, field), field
    assert all(result.ok for result in self_check(config.model_type, config=config))


def test_an_unknown_family_is_an_error():
    with pytest.raises(ValueError, match="No self-check for model type 'llama'. There is one for mamba2"):
        self_check("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_model_is_tiny_and_of_the_family(family):
    model = tiny_model(family)
    assert model.config.model_type == family
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert sum(type(module).__name__ == FAMILIES[family].mixer for module in model.modules()) >= 2


# A cache with a fault: each must be found, by the check that is there for it.
def _no_rollback(cache_class, monkeypatch):
    monkeypatch.setattr(cache_class, "crop", lambda self, count: None)


def _lost_state(cache_class, monkeypatch):
    forward = cache_class.end_forward

    def end_forward(self):
        forward(self)
        for layer in self.replay_layers:
            layer.checkpoint.zero_()

    monkeypatch.setattr(cache_class, "end_forward", end_forward)


def _ignored_mask(cache_class, monkeypatch):
    begin = cache_class.begin_forward
    monkeypatch.setattr(
        cache_class, "begin_forward", lambda self, num_tokens, batch, mask=None: begin(self, num_tokens, batch, None)
    )


def _writes_at_every_token(cache_class, monkeypatch):
    end = cache_class.end_forward

    def end_forward(self):
        end(self)
        self.stats.checkpoint_writes += 2

    monkeypatch.setattr(cache_class, "end_forward", end_forward)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (_no_rollback, {"rejected window"}),
        (_lost_state, {"two chunks against one forward", "steps over a flush", "rejected window", "left padding"}),
        (_ignored_mask, {"left padding"}),
        (_writes_at_every_token, {"steps over a flush"}),
    ],
)
def test_a_fault_is_found(monkeypatch, fault, found):
    fault(hf_replayssm.ReplayCache, monkeypatch)
    failed = {result.check for result in self_check("bamba") if not result.ok}
    assert failed == found


def test_a_check_that_raises_has_failed_and_says_why(monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("upstream changed\nmore lines")

    monkeypatch.setattr(hf_replayssm.ReplayCache, "begin_forward", broken)
    results = [result for result in self_check("bamba") if result.check != "the state matters"]
    assert len(results) == len(CHECKS) - 1
    assert all(not result.ok and result.error is None for result in results)
    assert results[0].detail == "RuntimeError: upstream changed"
    assert results[0].to_dict()["family"] == "bamba"
