"""The tested range of transformers, and what is said outside of it."""

from __future__ import annotations

import warnings

import pytest
import transformers
from tiny_models import copy_of

import hf_replayssm
from hf_replayssm import versions


@pytest.mark.parametrize(
    "version, inside",
    [("5.24.0", True), ("5.25.3", True), ("5.25.0.dev0", True), ("5.23.9", False), ("5.26.0", False), ("6.0", False)],
)
def test_range(version, inside):
    assert versions.in_tested_range(version) is inside


def test_another_release_warns_once_and_names_the_range(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    monkeypatch.setattr(versions, "_warned", False)
    with pytest.warns(UserWarning, match=f"{versions.TESTED_TRANSFORMERS}.*5.99.0.*doctor --check"):
        hf_replayssm.enable(copy_of("mamba2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_replayssm.enable(copy_of("mamba2"))
