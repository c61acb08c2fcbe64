"""The static replay cache: the plain one's answers, without a host read, a moved tensor or a second graph."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import test_properties as properties
import torch
from hypothesis import given, note, settings
from tiny_models import (
    Session,
    assert_same_logits,
    assert_unchanged,
    enabled_model,
    fingerprint,
    random_ids,
    replay_layers,
)

import hf_replayssm
from hf_replayssm import StaticReplayCache


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
