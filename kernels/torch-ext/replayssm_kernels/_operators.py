"""Registration as torch operators, so that `torch.compile(fullgraph=True)` takes the functions as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


# The Kernel Hub loads a package under a name of its own: each copy that is loaded has its own operators.
NAMESPACE = __package__.replace(".", "_").replace("-", "_")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# What an argument is where torch has nothing to do for an operator but to call the function.
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, bool, int, float, type(None)}


def define(name: str, function: Callable, mutates: tuple[str, ...], fake: Callable) -> Callable:
    """
    Registers `function` (its annotations give the schema) for all devices, and returns what calls the operator.

    In eager mode, which waits for the host, that is the function itself: the way through torch takes the host as long
    as a launch. It is taken where something looks on ([`_is_looked_on`], or a subclass of tensors). (And
    `torch.library.custom_op` would do the same with more work at every call.)
    """
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args):
        if _is_looked_on() or not _PLAIN.issuperset(map(type, args)) or args[0].is_meta:
            return operator(*args)
        return function(*args)

    return call


def _is_looked_on() -> bool:
    """
    Whether a compiler, autograd, a mode, a transform of torch.func or a tracer is to see the operator. (A profiler is
    not: it sees the kernels.)
    """
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or is_in_torch_dispatch_mode()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    )
