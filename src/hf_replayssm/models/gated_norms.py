"""
Upstream's gated RMS norms, and what each computes: a mixer may replace a call of one of these by a kernel, and only of
these, as upstream has them. Any other module, or one that somebody has changed or watches, is called.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.modules import module as nn_module

from ..ops.gated_norm import GatedNorm


def _weighted_after_rounding(norm: torch.nn.Module) -> GatedNorm:
    return GatedNorm(norm.weight, norm.variance_epsilon, norm.group_size)


def _weighted_in_float32(norm: torch.nn.Module) -> GatedNorm:
    return GatedNorm(
        norm.weight,
        norm.variance_epsilon,
        norm.weight.shape[-1] // norm.n_groups,
        weight_in_float32=True,
        norm_before_gate=norm.norm_before_gate,
    )


# (model type, class) -> how it is read.
GATED_NORMS = {
    ("mamba2", "MambaRMSNormGated"): _weighted_after_rounding,
    ("bamba", "BambaRMSNormGated"): _weighted_after_rounding,
    ("zamba2", "Zamba2RMSNormGated"): _weighted_after_rounding,
    ("nemotron_h", "NemotronHRMSNormGated"): _weighted_after_rounding,
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): _weighted_after_rounding,
    ("falcon_h1", "FalconH1RMSNormGated"): _weighted_in_float32,
}
_BY_CLASS = {
    (f"transformers.models.{model}.modeling_{model}", name): read for (model, name), read in GATED_NORMS.items()
}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def as_gated_norm(norm: torch.nn.Module) -> GatedNorm | None:
    """What a call of the module computes; None where that is more, or something else, than is known here."""
    cls = type(norm)
    read = _BY_CLASS.get((cls.__module__, cls.__qualname__))
    if read is None or not _is_called_as_it_is(norm):
        return None
    return read(norm)


def _is_called_as_it_is(norm: torch.nn.Module) -> bool:
    """Whether nothing stands between the caller and the forward that upstream has written for the class."""
    cls, own = type(norm), norm.__dict__
    # Of the code itself: a decorator copies names, and the class may have been given another forward.
    code, scope = getattr(cls.forward, "__code__", None), getattr(cls.forward, "__globals__", {})
    if code is None or code.co_qualname != f"{cls.__qualname__}.forward" or scope.get("__name__") != cls.__module__:
        return False
    if getattr(sys.modules[cls.__module__], cls.__name__, None) is not cls:
        return False  # a subclass that took the names over
    # accelerate's hooks, and whatever else replaces a forward on the module. (Removed hooks leave the class's there.)
    if "_hf_hook" in own or ("forward" in own and getattr(own["forward"], "__func__", None) is not cls.forward):
        return False
    if own.get("_compiled_call_impl") is not None or any(own[name] for name in _HOOKS):
        return False
    # (A weight that is computed, or was taken away, is no parameter.)
    return own["_parameters"].get("weight") is not None and not nn_module._has_any_global_hook()
