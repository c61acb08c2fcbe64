"""A stand-in for CUDA graphs on the CPU: what an eager forward did is recorded, operator by operator, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# What reads a value back to the host, which a CUDA graph cannot record.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class HostRead(RuntimeError):
    pass


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS or any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves(args)):
            raise HostRead(f"{function} was called in a recording")
        if function is torch.ops.aten.index.Tensor or function is torch.ops.aten.index_put_.default:
            # A boolean index is a `nonzero` in disguise.
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                raise HostRead(f"{function} with a boolean index was called in a recording")
        outputs = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, outputs))
        return outputs


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


class Tape:
    """
    A [`Recorder`]. Like a CUDA graph it freezes every decision of the host, reads and writes the tensors that were
    there at the recording, and gives its outputs in the same tensors each time. `static` are the tensors that a
    recording changes: they are put back after it, since recording a graph runs nothing.
    """

    def __init__(self, static: Callable[[], list[torch.Tensor]]):
        self.static = static
        self.warm_ups = self.recordings = self.replays = 0

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return function()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        before = [(tensor, tensor.clone()) for tensor in self.static()]
        try:
            with _Recording() as recording:
                outputs = function()
        finally:
            for tensor, value in before:
                tensor.copy_(value)
        self.recordings += 1

        def replay() -> Any:
            self.replays += 1
            for operator, args, kwargs, recorded in recording.calls:
                new = operator(*args, **kwargs)
                for old, fresh in zip(tree_leaves(recorded), tree_leaves(new)):
                    if isinstance(old, torch.Tensor) and _storages(old) != _storages(fresh):
                        old.copy_(fresh)
            return outputs

        return replay
