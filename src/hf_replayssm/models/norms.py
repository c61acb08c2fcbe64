"""
Upstream's RMS norms, and what each computes: a call of one of these may become one launch of a kernel, and only of
these, as upstream has them. Any other module, or one that somebody has changed or watches, is called.

A gated norm is called by our mixer, which asks `as_rms_norm`. The norms between the layers are called by upstream's
code: [`ReplayRMSNorm`] goes in front of their classes, and stands aside wherever the forward is not one that replays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.nn.modules import module as nn_module

from ..ops import rms_norm
from ..ops.rms_norm import RMSNorm
from .replaced import ReplacedClass


def _weighted_after_rounding(norm: torch.nn.Module) -> RMSNorm:
    return RMSNorm(norm.weight, norm.variance_epsilon, norm.group_size)


def _falcon_h1(norm: torch.nn.Module) -> RMSNorm:
    return RMSNorm(
        norm.weight,
        norm.variance_epsilon,
        norm.weight.shape[-1] // norm.n_groups,
        weight_in_float32=True,
        norm_before_gate=norm.norm_before_gate,
    )


def _of_a_head(norm: torch.nn.Module) -> RMSNorm | None:
    # (Those that round to the dtype of y before the weight round nothing here: our mixers call them with sums.)
    if norm.activation != "silu":
        return None
    return RMSNorm(
        norm.weight,
        norm.variance_epsilon,
        norm.weight.shape[-1],
        weight_in_float32=True,
        norm_before_gate=True,
    )


# (folder of the model, class) -> how it is read. (Those of KDA have another gate.)
GATED_NORMS = {
    ("mamba2", "MambaRMSNormGated"): _weighted_after_rounding,
    ("bamba", "BambaRMSNormGated"): _weighted_after_rounding,
    ("zamba2", "Zamba2RMSNormGated"): _weighted_after_rounding,
    ("nemotron_h", "NemotronHRMSNormGated"): _weighted_after_rounding,
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): _weighted_after_rounding,
    ("falcon_h1", "FalconH1RMSNormGated"): _falcon_h1,
    ("qwen3_next", "Qwen3NextRMSNormGated"): _of_a_head,
    ("qwen3_5", "Qwen3_5RMSNormGated"): _of_a_head,
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"): _of_a_head,
    ("olmo_hybrid", "OlmoHybridRMSNormGated"): _of_a_head,
    ("lara_mini", "LaraMiniRMSNormGated"): _of_a_head,
}
# The norms between layers: likewise -> whether the weight is multiplied in float32. (Qwen's are another formula.)
NORMS = {
    ("mamba2", "Mamba2RMSNorm"): False,
    ("bamba", "BambaRMSNorm"): False,
    ("zamba2", "Zamba2RMSNorm"): False,
    ("nemotron_h", "NemotronHRMSNorm"): True,
    ("granitemoehybrid", "GraniteMoeHybridRMSNorm"): False,
    ("falcon_h1", "FalconH1RMSNorm"): False,
    ("mamba", "MambaRMSNorm"): False,
    ("falcon_mamba", "FalconMambaRMSNorm"): False,
    ("jamba", "JambaRMSNorm"): False,
    ("zamba", "ZambaRMSNorm"): False,
    ("olmo_hybrid", "OlmoHybridRMSNorm"): True,
    ("lara_mini", "LaraMiniRMSNorm"): True,
    ("kimi_linear", "KimiLinearRMSNorm"): False,
    ("bailing_hybrid", "BailingHybridRMSNorm"): False,
}


def _by_class(table: dict) -> dict:
    return {(f"transformers.models.{model}.modeling_{model}", name): value for (model, name), value in table.items()}


_GATED_BY_CLASS, _BY_CLASS = _by_class(GATED_NORMS), _by_class(NORMS)


def as_rms_norm(norm: torch.nn.Module) -> RMSNorm | None:
    """What a call of a gated norm computes; None where that is more, or something else, than is known here."""
    cls = type(norm)
    read = _GATED_BY_CLASS.get((cls.__module__, cls.__qualname__))
    if read is None or not _is_called_as_it_is(norm):
        return None
    return read(norm)


def _is_called_as_it_is(norm: torch.nn.Module) -> bool:
    """Whether nothing stands between the caller and the forward that upstream has written for the class."""
    cls, own = type(norm), norm.__dict__
    if not _is_upstreams(cls):
        return False
    # accelerate's hooks, and whatever else replaces a forward on the module. (Removed hooks leave the class's there.)
    if "_hf_hook" in own or ("forward" in own and getattr(own["forward"], "__func__", None) is not cls.forward):
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    if own.get("_compiled_call_impl") is not None:
        return False
    # (A weight that is computed, or was taken away, is no parameter.)
    return own["_parameters"].get("weight") is not None and not nn_module._has_any_global_hook()


def _is_upstreams(cls: type) -> bool:
    """Whether the class has the forward that upstream wrote for it."""
    # Of the code itself: a decorator copies names, and the class may have been given another forward.
    code, scope = getattr(cls.forward, "__code__", None), getattr(cls.forward, "__globals__", {})
    if code is None or code.co_qualname != f"{cls.__qualname__}.forward" or scope.get("__name__") != cls.__module__:
        return False
    # (A subclass may have taken the names over.)
    return getattr(sys.modules[cls.__module__], cls.__name__, None) is cls


# The backend of the forward that replays at the moment, in this thread; None outside of one.
_replaying: ContextVar[str | None] = ContextVar("replaying", default=None)


@contextlib.contextmanager
def norms_of_a_replay(backend: str) -> Iterator[None]:
    """Norms between layers that are called inside may be kernels."""
    token = _replaying.set(backend)
    try:
        yield
    finally:
        _replaying.reset(token)


class ReplayRMSNorm(ReplacedClass):
    """Goes in front of the class of a norm between layers (see `replaced.py`)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # (A compiler fuses upstream's code by itself.)
        backend = None if torch.compiler.is_compiling() else _replaying.get()
        if backend is not None and (weight := self.weight) is not None and _is_upstreams(self._replaced_class):
            norm = RMSNorm(weight, self.variance_epsilon, weight.shape[-1], self._weight_in_float32)
            dtype = hidden_states.dtype
            if not norm.weight_in_float32:
                dtype = torch.promote_types(dtype, weight.dtype)
            if rms_norm.uses_kernel(norm, hidden_states, None, dtype, backend):
                return rms_norm.rms_norm_triton(norm, hidden_states, None, dtype)
        return super().forward(hidden_states)

    @property
    def _weight_in_float32(self) -> bool:
        cls = self._replaced_class
        return _BY_CLASS[cls.__module__, cls.__qualname__]


def is_norm(module: torch.nn.Module) -> bool:
    """Whether [`ReplayRMSNorm`] can go in front of the module's class, and is not there yet."""
    cls, own = type(module), module.__dict__
    if (cls.__module__, cls.__qualname__) not in _BY_CLASS or not _is_upstreams(cls):
        return False
    forward = own.get("_old_forward", own.get("forward"))  # accelerate's hooks keep the class's
    return forward is None or getattr(forward, "__func__", None) is cls.forward
