"""Registration as torch operators, so that `torch.compile(fullgraph=True)` takes the functions as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch


# The Kernel Hub loads a package under a name of its own: each copy that is loaded has its own operators.
NAMESPACE = __package__.replace(".", "_").replace("-", "_")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(name: str, function: Callable, mutates: tuple[str, ...], fake: Callable) -> Callable:
    """
    Registers `function` (its annotations give the schema) for all devices, and returns the operator.

    `torch.library.custom_op` would do the same with more work at every call, which a decode step in eager mode feels.
    """
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
