"""
The table of supported families. A family is a line here; what its mixer does differently is a line in the module of its
recurrence in `models`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from .recurrences import RECURRENCES, Recurrence


@dataclass(frozen=True)
class Family:
    """
    One `model_type` of transformers whose recurrent layers replay: that of the config that describes the layers, which
    in a multimodal model is the text config.

    `sizes` says where that config has the fields of the recurrence, in their order: the name of an attribute, or a
    function of the config.
    """

    model_type: str
    mixer: str  # class names in transformers.models.<folder>.modeling_<folder>
    backbone: str
    recurrence: str  # a key of `RECURRENCES`
    sizes: tuple[str | Callable[[Any], int], ...]
    folder: str | None = None  # where it is not the model type

    @property
    def module_name(self) -> str:
        folder = self.folder or self.model_type
        return f"transformers.models.{folder}.modeling_{folder}"

    def load(self, class_name: str) -> type:
        """The class of that name in the family's modeling file (imported at the first use)."""
        return getattr(importlib.import_module(self.module_name), class_name)

    def recurrence_of(self, config: Any) -> Recurrence:
        """The recurrence with the sizes of this (text) config."""
        sizes = (getattr(config, size) if isinstance(size, str) else size(config) for size in self.sizes)
        return RECURRENCES[self.recurrence](*sizes)


_MAMBA_NAMES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_MAMBA1_NAMES = (lambda config: 1, "intermediate_size", "state_size", "conv_kernel")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mamba2",
            "Mamba2Mixer",
            "Mamba2Model",
            "mamba2",
            ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
        ),
        Family("bamba", "BambaMixer", "BambaModel", "mamba2", _MAMBA_NAMES),
        Family(
            "zamba2",
            "Zamba2MambaMixer",
            "Zamba2Model",
            "mamba2",
            ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
        ),
        Family(
            "nemotron_h",
            "NemotronHMamba2Mixer",
            "NemotronHModel",
            "mamba2",
            ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        ),
        Family("falcon_h1", "FalconH1Mixer", "FalconH1Model", "mamba2", _MAMBA_NAMES),
        Family("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridModel", "mamba2", _MAMBA_NAMES),
        Family("mamba", "MambaMixer", "MambaModel", "mamba1", _MAMBA1_NAMES),
        Family("falcon_mamba", "FalconMambaMixer", "FalconMambaModel", "mamba1", _MAMBA1_NAMES),
        Family(
            "jamba",
            "JambaMambaMixer",
            "JambaModel",
            "mamba1",
            (
                lambda config: 1,
                lambda config: config.mamba_expand * config.hidden_size,
                "mamba_d_state",
                "mamba_d_conv",
            ),
        ),
        Family(
            "zamba",
            "ZambaMambaMixer",
            "ZambaModel",
            "mamba1",
            (
                "n_mamba_heads",
                lambda config: config.mamba_expand * config.hidden_size // config.n_mamba_heads,
                "mamba_d_state",
                "mamba_d_conv",
                lambda config: True,
            ),
        ),
    )
}


def supported_families() -> str:
    return ", ".join(FAMILIES)


def family_of_config(config: Any) -> Family:
    """The family of a model's (text) config. `ValueError` names the supported ones."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"hf_replayssm does not support models of type {model_type!r}: supported are {supported_families()}. Other "
            "models work as before with transformers' own caches; leave hf_replayssm out for them."
        )
    return FAMILIES[model_type]


@dataclass(frozen=True)
class Signature:
    """What a cache and a model must agree on."""

    model_type: str
    layer_types: tuple[str, ...]
    recurrence: Recurrence

    def __post_init__(self) -> None:
        # A compiler takes integers that differ from one model to the next for variable; a string it compares.
        object.__setattr__(self, "text", repr((self.model_type, self.layer_types, self.recurrence)))


def signature(config: Any) -> Signature:
    """The signature of a (text) config of a supported family."""
    family = family_of_config(config)
    layer_types, _ = get_layer_types_and_kwargs(config)
    return Signature(family.model_type, tuple(layer_types), family.recurrence_of(config))
