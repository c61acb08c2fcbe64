"""Fixtures and guards of the whole suite."""

from __future__ import annotations

import os
import sys


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tiny_models import FAMILY_NAMES, SHARED_MODELS


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


# Families whose mixer is, but for a projection or a norm, that of another one here. In a plain run they have what is
# their own, and the invariants with one buffer length; all else is run with `-m slow`.
LIKE_ANOTHER = {
    "granitemoehybrid",  # bamba
    "nemotron_h",  # bamba
    "zamba2",  # bamba, and falcon_h1 (attention and a mixer in one layer)
    "falcon_mamba",  # mamba2 (without attention) and zamba
    "mamba",  # likewise
    "jamba",  # zamba
}
ALWAYS_WHOLE = {
    "test_selfcheck",
    "test_tiny_models",
    "test_norms",
    "test_mamba1",
    "test_gated_delta",
    "test_triton_backend",
    "test_gpu",
    "test_gpu_static",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        names = {value for value in parameters.values() if isinstance(value, str)}
        if not names & LIKE_ANOTHER or item.path.stem in ALWAYS_WHOLE:
            continue
        if item.path.stem != "test_invariants" or parameters.get("buffer_len") != 4:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family of transformers once."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_leaks():
    """A test leaves the shared models and the library as it found them, and a failed one spoils no other."""
    yield
    package = sys.modules.get("hf_replayssm")
    if package is None:
        return
    package.disable()  # the global switch: later loads come untouched again
    for name, model in SHARED_MODELS.items():
        assert not package.is_enabled(model), f"the shared model {name} was enabled by a test"
        touched = [key for key, parameter in model.named_parameters() if parameter.grad is not None]
        assert not model.training and not touched, f"the shared model {name} was trained by a test"
