"""
Decoding steps as CUDA graphs, without a compiler: the eager forward of a few tokens is recorded once and replayed.

A forward through a [`StaticReplayCache`] reads nothing back to the host and its tensors do not move, so what it
launches is the same at every step. The first forwards of a shape run as they are and warm up what is made at a first
call (kernels, workspaces); the next one is recorded, which runs nothing, and from then on a step copies its inputs and
replays. There is one graph for each shape of inputs, that is for a batch and a number of tokens.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.utils import ModelOutput

from .static import StaticReplayCache


WARM_UPS = 2  # forwards of a shape before it is recorded; each is a step that counts
MAX_GRAPHS = 32  # of one cache: a window of every length up to the default `max_window`, and the step


class Recorder(Protocol):
    """How forwards are recorded."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Runs `function` where it will be recorded, and returns what it returns."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Records what `function` launches, without running it. Returns what runs it, to the same tensors each time."""


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = function()
        current.wait_stream(self.stream)
        return outputs

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            outputs = function()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay


# What records, by type of device.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraphs}


def available(model: torch.nn.Module) -> bool:
    """Whether the model's steps can be captured; where not, says so once."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and model.device.type in RECORDERS:
        return True
    where = ", ".join(sorted(map(str, devices)))
    _warn_once(
        f"`capture=True` records CUDA graphs, which takes a model on one CUDA device; this one is on {where}. Its "
        "steps run eagerly. Leave `capture` out, and `generate` compiles where it can."
    )
    return False


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def frozen(model: torch.nn.Module) -> tuple:
    """
    What a graph of the model's forward has frozen, as far as it can be told without a forward: which modules there
    are, where their weights lie, their hooks and their plain settings (those of adapters, too). Not the values of the
    weights: a graph reads them.
    """
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind in _PLAIN:
                found.append(value)
            elif kind in _CONTAINERS:
                if not value or name == "_modules":
                    continue
                if name in ("_parameters", "_buffers"):
                    # (A subclass may have no address of its own.)
                    found += [t.data_ptr() if type(t) in _TENSORS else id(t) for t in value.values()]
                elif name.endswith("_hooks"):
                    found += value
                else:
                    found.append(_plain(value))
            elif callable(value):
                found.append(id(value))
    return tuple(found)


_PLAIN = {bool, int, float, str}
_CONTAINERS = {dict, OrderedDict, list, tuple}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


def _plain(value: Any) -> Any:
    """The plain values in lists and dicts, in an order that tells them apart."""
    if isinstance(value, dict):
        return tuple((key if type(key) in _PLAIN else None, _plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if type(value) in _PLAIN else None


class _Captured:
    """One shape of inputs."""

    def __init__(self) -> None:
        self.forwards = 0
        self.inputs: dict[str, torch.Tensor] = {}
        self.replay: Callable[[], Any] | None = None
        self.failed = False


class CapturedForwards:
    """
    The graphs of one cache. Kept in `cache.graphs`; dropped when the cache's tensors have moved.

    Args:
        recorder ([`Recorder`]): how to record.
        max_graphs (`int`): shapes that are recorded; forwards of further ones run as they are.
    """

    def __init__(self, recorder: Recorder, max_graphs: int = MAX_GRAPHS):
        self.recorder, self.max_graphs = recorder, max_graphs
        self.captured: dict[Any, _Captured] = {}
        self.layout: Any = None
        self.frozen: Any = None  # of the model, when it was last looked at
        self.call: object = None  # and for which call

    def __call__(self, model: torch.nn.Module, inputs: dict[str, Any], call: object = None) -> Any:
        """
        `model(**inputs)`; `inputs["cache"]` is the cache that this belongs to. While `call` is the same object, nothing
        about the model changes, which takes a millisecond or two to find out. None: it may have changed.
        """
        cache: StaticReplayCache = inputs["cache"]
        key = self._key(model, cache, inputs)
        if key is None or cache.interrupted:  # which the model refuses, and a graph would not
            return model(**inputs)
        layout = cache.layout, id(model), model.get_input_embeddings().weight.data_ptr()
        if layout != self.layout:  # addresses have changed
            self.captured.clear()
            self.layout, self.call = layout, None
        if call is None or call is not self.call:
            before, self.frozen, self.call = self.frozen, frozen(model), call
            if self.frozen != before:
                self.captured.clear()
        if key not in self.captured and len(self.captured) >= self.max_graphs:
            _warn_once(
                f"{self.max_graphs} shapes of inputs are captured already; a forward of another one runs eagerly. Use "
                "batches and windows of fewer sizes."
            )
            return model(**inputs)
        captured = self.captured.setdefault(key, _Captured())
        captured.forwards += 1
        if captured.failed:
            return model(**inputs)
        if captured.forwards <= WARM_UPS:
            return self.recorder.warm_up(lambda: model(**inputs))
        if captured.replay is None and not self._record(captured, model, cache, inputs):
            return model(**inputs)
        for name, tensor in captured.inputs.items():
            tensor.copy_(inputs[name])

        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone()  # the next replay overwrites the graph's
            return cache if value is _CACHE else value

        return _map(captured.replay(), own)

    def _record(
        self, captured: _Captured, model: torch.nn.Module, cache: StaticReplayCache, inputs: dict[str, Any]
    ) -> bool:
        tensors = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}

        def forward() -> Any:
            # (The cache owns the graph: its outputs must not own the cache.)
            return _map(model(**(inputs | tensors)), lambda value: _CACHE if value is cache else value)

        try:
            captured.replay = self.recorder.record(forward)
        except Exception as error:
            # Nothing has run, so the cache is as it was.
            cache.forward_in_progress, cache.interrupted = None, False
            captured.failed = True
            reason = error.__context__ or error  # the end of a recording that went wrong fails as well
            _warn_once(
                f"The forward of {type(model).__name__} cannot be captured in a CUDA graph and runs eagerly: {reason}"
            )
            return False
        captured.inputs = tensors
        return True

    def _key(self, model: torch.nn.Module, cache: StaticReplayCache, inputs: dict[str, Any]) -> Any:
        """What tells graphs apart; None for a forward that is not captured."""
        tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
        longest = cache.max_window + 1 if cache.record_past else 1
        if (
            tokens is None
            or tokens.shape[1] > longest
            or cache.is_fresh
            or inputs.get("attention_mask") is not None
            or model.training
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(tokens.device.type)  # it keeps copies of weights, which a graph would lose
        ):
            return None
        key: list[Any] = [cache.record_past, torch.is_inference_mode_enabled()]
        for name, value in sorted(inputs.items()):
            if isinstance(value, torch.Tensor):
                key.append((name, value.shape, value.dtype, value.device))
            elif value is None or isinstance(value, (bool, int, float, str)):
                key.append((name, value))
            elif name != "cache":
                return None
        return tuple(key)


_CACHE = object()  # stands for the cache in the outputs of a graph


def _map(outputs: Any, function: Callable[[Any], Any]) -> Any:
    """The outputs of a model with `function` applied to what they hold, but for None."""
    if isinstance(outputs, ModelOutput):
        return type(outputs)(**{name: _map(value, function) for name, value in outputs.items()})
    if isinstance(outputs, tuple):
        return tuple(_map(value, function) for value in outputs)
    return None if outputs is None else function(outputs)


def captured_forward(model: torch.nn.Module, inputs: dict[str, Any], call: object = None) -> Any:
    """`model(**inputs)` through the graphs of `inputs["cache"]`; see [`CapturedForwards.__call__`]."""
    cache: StaticReplayCache = inputs["cache"]
    if cache.graphs is None:
        cache.graphs = CapturedForwards(RECORDERS[model.device.type](model.device))
    return cache.graphs(model, inputs, call)
