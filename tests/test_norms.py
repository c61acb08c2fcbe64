"""When a call of a norm may become one of the kernel: upstream's own module, untouched, with plain tensors.

That the kernel gives the same numbers is in `kernels/test_rms_norm.py`, and that models take it in
`test_triton_backend.py`.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_models import (
    MAMBA2_NAMES,
    mixers,
    tiny_model,
)
from torch.nn.utils import parametrize, prune

from hf_replayssm.families import FAMILIES
from hf_replayssm.models.norms import GATED_NORMS, NORMS, as_rms_norm
from hf_replayssm.ops import backend, rms_norm


def module(family: str = "mamba2") -> torch.nn.Module:
    return copy.deepcopy(_mixer(family).norm)


@functools.cache
def _mixer(family: str) -> torch.nn.Module:
    overrides = {"mamba_rms_norm": True} if family == "falcon_h1" else {}
    return mixers(tiny_model(family, **overrides))[0]


def test_every_family_has_its_norm_in_the_table():
    assert {model_type for model_type, _ in GATED_NORMS} == set(MAMBA2_NAMES)
    for model_type, name in GATED_NORMS:
        assert type(module(model_type)) is FAMILIES[model_type].load(name)


def test_every_norm_between_layers_is_in_the_table():
    assert {model_type for model_type, _ in NORMS} == set(FAMILIES)
    for family in FAMILIES:
        found = {type(m).__name__ for m in tiny_model(family).modules() if type(m).__name__.endswith("RMSNorm")}
        found.discard("FalconMambaWeightlessRMSNorm")  # whose weight is not read
        assert found == {name for model_type, name in NORMS if model_type == family}


@pytest.mark.parametrize("family", MAMBA2_NAMES)
def test_how_a_module_is_read(family):
    norm, mixer = module(family), _mixer(family)
    known = as_rms_norm(norm)
    assert known.weight is norm.weight and known.eps == norm.variance_epsilon
    assert known.group_size == mixer.intermediate_size // mixer.n_groups
    assert known.weight_in_float32 == (family == "falcon_h1")
    if family == "falcon_h1":
        for value in (True, False):
            norm.norm_before_gate = value
            assert as_rms_norm(norm).norm_before_gate is value
    else:
        assert not known.norm_before_gate


def subclassed(norm):
    norm.__class__ = type("Mine", (type(norm),), {})


def subclassed_under_the_name(norm):
    cls = type(norm)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    norm.__class__ = type(cls.__name__, (cls,), names | {"__call__": lambda self, y, gate=None: y})


def replaced_on_the_module(norm):
    norm.forward = lambda hidden_states, gate=None: hidden_states


def compiled(norm):
    norm.compile(backend="eager")


def without_weight(norm):
    norm.weight = None


CHANGES = {
    "a forward hook": lambda norm: norm.register_forward_hook(lambda *args: None),
    "a forward pre-hook": lambda norm: norm.register_forward_pre_hook(lambda *args: None),
    "a backward hook": lambda norm: norm.register_full_backward_hook(lambda *args: None),
    "a hook of accelerate": lambda norm: add_hook_to_module(norm, ModelHook()),
    "a hook of accelerate without its forward": lambda norm: setattr(norm, "_hf_hook", ModelHook()),
    "a subclass": subclassed,
    "a subclass of the same name": subclassed_under_the_name,
    "a forward on the module": replaced_on_the_module,
    "compiled": compiled,
    "parametrised": lambda norm: parametrize.register_parametrization(norm, "weight", torch.nn.Identity()),
    "pruned": lambda norm: prune.l1_unstructured(norm, "weight", 3),
    "without a weight": without_weight,
    "another module": lambda norm: norm.__setattr__("__class__", torch.nn.RMSNorm),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_module_that_somebody_changed_is_called(what):
    norm = module()
    assert as_rms_norm(norm) is not None
    CHANGES[what](norm)
    assert as_rms_norm(norm) is None


def test_a_forward_that_somebody_put_into_the_class(monkeypatch):
    norm = module()
    forward = type(norm).forward
    monkeypatch.setattr(type(norm), "forward", functools.wraps(forward)(lambda *args: 2 * forward(*args)))
    assert as_rms_norm(norm) is None
    monkeypatch.undo()
    assert as_rms_norm(norm) is not None


def test_global_hooks_see_the_module():
    norm = module()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert as_rms_norm(norm) is None
    finally:
        handle.remove()
    assert as_rms_norm(norm) is not None


def test_a_hook_that_was_removed_is_forgotten():
    norm = module()
    add_hook_to_module(norm, ModelHook())
    remove_hook_from_module(norm)
    handle = norm.register_forward_hook(lambda *args: None)
    handle.remove()
    assert "forward" in norm.__dict__ and as_rms_norm(norm) is not None


class Plain(torch.Tensor):
    """A tensor with a meaning of its own, as DTensor is."""


def tensors(dtype=torch.float32):
    norm = module()
    y = torch.ones(2, 1, norm.weight.shape[0], dtype=dtype)
    return norm, y, y.clone()


def answer(norm, y, gate, out_dtype=torch.float32, setting="auto"):
    return rms_norm.uses_kernel(as_rms_norm(norm), y, gate, out_dtype, setting)


@pytest.fixture
def accelerator(monkeypatch):
    """The CPU counts as a device with Triton."""
    monkeypatch.setattr(
        backend, "resolve", lambda setting, device, dtypes=(): "torch" if setting == "torch" else "triton"
    )


@torch.no_grad()
def test_tensors_that_the_kernel_takes(accelerator):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm, y, gate = tensors(dtype)
        assert answer(norm, y, gate, torch.bfloat16) and answer(norm.to(torch.bfloat16), y, gate, setting="triton")


@torch.no_grad()
def test_tensors_that_the_module_takes(accelerator):
    norm, y, gate = tensors()
    assert answer(norm, y, gate)
    refused = {
        "backend='torch'": lambda: answer(norm, y, gate, setting="torch"),
        "float64": lambda: answer(norm, y.double(), gate),
        "a float64 gate": lambda: answer(norm, y, gate.double()),
        "a float64 weight": lambda: answer(copy.deepcopy(norm).double(), y, gate),
        "a float64 result": lambda: answer(norm, y, gate, torch.float64),
        "a subclass of Tensor": lambda: answer(norm, y.as_subclass(Plain), gate),
        "a gate of it": lambda: answer(norm, y, gate.as_subclass(Plain)),
        "a weight elsewhere": lambda: answer(copy.deepcopy(norm).to("meta"), y, gate),
        "another shape": lambda: answer(norm, y, gate[:1]),
        "other columns": lambda: answer(norm, y[..., :-1], gate[..., :-1]),
    }
    for what, ask in refused.items():
        assert not ask(), what
    plain = copy.deepcopy(norm)
    plain.weight = torch.nn.Parameter(norm.weight.detach().as_subclass(Plain))
    assert type(plain.weight) is not torch.nn.Parameter and not answer(plain, y, gate)
    with torch.autocast("cpu", torch.bfloat16):
        assert not answer(norm, y, gate)
    norm.requires_grad_(True)
    assert answer(norm, y, gate)
    with torch.enable_grad():
        assert not answer(norm, y, gate)
        norm.requires_grad_(False)
        assert answer(norm, y, gate) and not answer(norm, y, gate.clone().requires_grad_())


@torch.no_grad()
def test_a_cpu_without_the_interpreter_calls_the_module():
    norm, y, gate = tensors()
    assert not answer(norm, y, gate)
