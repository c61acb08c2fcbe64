"""
The forward of a mixer over a replay cache: what all recurrences share.

The parameters and submodules are upstream's, as are the long convolution and the scan of a prefill where they can be
(so hub kernels and mamba_ssm come with them). With any other cache, or none, the forward is upstream's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cache import ReplayCache
from ..layers import ReplayLayer
from ..ops.mamba2 import accumulate_dtype
from ..ops.refuse_backward import RefuseBackward
from ..positions import Segment
from .replaced import ReplacedClass


class ReplayMixer(ReplacedClass):
    """Goes in front of an upstream mixer class (see `replaced.py`). A recurrence has a subclass of its own."""

    def forward(self, hidden_states: torch.Tensor, cache=None, attention_mask=None, **kwargs):
        if isinstance(cache, ReplayCache):
            return self._replay_forward(hidden_states, cache)  # the mask is in the forward that the model opened
        return super().forward(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)

    # Subclasses wrap this one in `force_accelerate_hooks` with the children whose weights they read.
    def _replay_forward(self, hidden_states: torch.Tensor, cache: ReplayCache) -> torch.Tensor:
        """(b, t, hidden) -> (b, t, hidden): projections around the segments of the forward that the model opened."""
        if cache.forward_in_progress is None:
            raise ValueError(
                "A mixer was called with a ReplayCache outside of its model. Call the model: it opens the cache's "
                "forward, which all layers share."
            )
        layer: ReplayLayer = cache.layers[self.layer_idx]
        gate, *inputs = self._project(hidden_states)
        constants = layer.update_constants(lambda: self._constants(accumulate_dtype(*inputs)))

        outputs, segments = [], cache.forward_in_progress.segments
        with torch.no_grad():
            for segment in segments:
                # (One segment is the whole: no launches and no views that a step can do without.)
                columns = inputs if len(segments) == 1 else [tensor[:, segment.columns] for tensor in inputs]
                outputs.append(segment.original_order(self._replay_segment(layer, segment, *columns)))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if torch.is_grad_enabled():
            y = RefuseBackward.apply(y, *inputs, *constants, *self._parameters_inside())
        return self._output(y, gate, hidden_states.dtype, cache.replay_config.backend)

    @property
    def replay_device(self) -> torch.device:
        """Where the mixer's parameters are; meta while accelerate keeps them elsewhere."""
        return self.A_log.device

    # Each recurrence.

    def _project(self, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        """The gate, whatever [`_output`] takes for it, and the tensors (b, t, ...) that [`_replay_segment`] takes."""
        raise NotImplementedError

    def _constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """[`Recurrence.constants`], in `dtype`."""
        raise NotImplementedError

    def _replay_segment(self, layer: ReplayLayer, segment: Segment, *inputs: torch.Tensor) -> torch.Tensor:
        """
        The segment's columns of the inputs -> y (b, t, ...), a row's real tokens first. All but projections is in
        float32 or as the activations are, also under autocast ([`outside_autocast`]).
        """
        raise NotImplementedError

    def _parameters_inside(self) -> tuple[torch.Tensor | None, ...]:
        """The parameters that [`_replay_segment`] reads: a gradient for one of them is refused."""
        raise NotImplementedError

    def _output(self, y: torch.Tensor, gate: Any, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y of all columns -> (b, t, hidden), in `dtype` in front of the last projection."""
        raise NotImplementedError


def outside_autocast(method: Callable) -> Callable:
    """`method(self, layer, segment, tensor, ...)` with autocast switched off."""

    @functools.wraps(method)
    def wrapped(self, layer: ReplayLayer, segment: Segment, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
        if not torch.is_autocast_enabled(tensor.device.type):  # (asking is quicker)
            return method(self, layer, segment, tensor, *others)
        with torch.autocast(tensor.device.type, enabled=False):
            return method(self, layer, segment, tensor, *others)

    return wrapped


def is_reference(function: Callable) -> bool:
    """
    Whether one of upstream's functions that take kernels where a package has them runs its own PyTorch code. (Upstream
    does not say; its wrapper holds both. Of anything else: False.)
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells))) if code is not None else {}
    return "torch_function" in held and held["torch_function"] is held.get("implementation")
