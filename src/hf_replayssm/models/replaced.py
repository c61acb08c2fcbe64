"""
Replacing the class of a module in place.

A replacement is a subclass of the upstream class, with our mixin in front and upstream's names: `save_pretrained`
writes the same architecture, `isinstance` holds, and it pickles by naming the two classes that it is made of.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch


class ReplacedClass:
    """Base of the mixins that go in front of an upstream module class."""

    _replaced_class: type  # upstream's
    _mixin: type
    _forward_parameters: tuple[str, ...]  # names of the parameters of upstream's forward, in order
    _keeps_signature: tuple[str, ...] = ()  # methods whose parameters transformers looks at to see what a model takes

    def __reduce_ex__(self, protocol: int):
        # The class is made at run time, so it cannot be found by its name: name what it is made of. (Used by deepcopy
        # as well.)
        return _rebuild, (self._mixin, self._replaced_class), self.__dict__.copy()


def _rebuild(mixin: type, upstream: type) -> Any:
    cls = replacement(mixin, upstream)
    return cls.__new__(cls)


@functools.cache
def replacement(mixin: type[ReplacedClass], upstream: type) -> type:
    """`upstream` with `mixin` in front."""
    namespace = {
        "__module__": upstream.__module__,
        "__qualname__": upstream.__qualname__,
        "__doc__": upstream.__doc__,
        "_replaced_class": upstream,
        "_mixin": mixin,
        "_forward_parameters": tuple(inspect.signature(upstream.forward).parameters)[1:],
    }
    for name in mixin._keeps_signature:
        namespace[name] = _with_signature_of(getattr(upstream, name), mixin.__dict__[name])
    return type(upstream.__name__, (mixin, upstream), namespace)


def _with_signature_of(upstream, method):
    @functools.wraps(upstream)
    def wrapped(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    # Compilers count what they compiled, up to a limit, for each code object: every class has one of its own.
    wrapped.__code__ = wrapped.__code__.replace(co_name=upstream.__qualname__)
    return wrapped


def replace_class(module: torch.nn.Module, mixin: type[ReplacedClass]) -> None:
    """Puts `mixin` in front of the module's class. Does nothing when it is there already."""
    if not isinstance(module, mixin):
        _set_class(module, replacement(mixin, type(module)))


def restore_class(module: torch.nn.Module) -> None:
    """Undoes [`replace_class`]."""
    if isinstance(module, ReplacedClass):
        _set_class(module, module._replaced_class)


def check_replaceable(module: torch.nn.Module, name: str) -> None:
    """
    Raises `ValueError` for a module whose forward was replaced on the instance, where a change of class has no effect.
    accelerate's hooks are such a replacement that we know: they call a bound `_old_forward`, which can be bound anew.
    """
    old = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if old is not None and getattr(old, "__func__", None) is not type(module).forward:
        raise ValueError(
            f"The forward of `{name}` ({type(module).__name__}) was replaced on the module itself, so replay would not "
            "be reached. Call `hf_replayssm.enable(model)` before what replaced it."
        )


def _set_class(module: torch.nn.Module, cls: type) -> None:
    module.__class__ = cls
    for name in ("_old_forward",) if "_old_forward" in module.__dict__ else ("forward",):
        if name in module.__dict__:
            setattr(module, name, types.MethodType(cls.forward, module))
