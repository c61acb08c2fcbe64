"""Teacher-forced forwards: a batch of contexts through a cache piece by piece, or in one forward without a cache.

Rows of a batch all begin at position 0, and a row that has ended leaves the batch and the cache before the next piece.
Inside its last piece (of a window, or of the one forward without a cache) a filler follows its end, which is not
scored: the models are causal and rows do not see each other, so nothing that is scored has seen a filler. There is no
padding in front and no attention mask, hence nothing that could leak into a state.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from hf_replayssm.config import ReplayConfig


FILLER = 0  # any id of the vocabulary will do
NO_CACHE = "none"
MODES = ("step", "window", "full")


def pieces(length: int, mode: str, window: int) -> list[tuple[int, int]]:
    """Bounds of the forwards over `length` inputs.

    Through the cache, the first forward is one token (the prefill), so that every later token goes through the decode
    path: one at a time (step) or `window` at a time.
    """
    if mode == "full":
        return [(0, length)]
    width = 1 if mode == "step" else window
    return [(0, 1)] + [(start, min(start + width, length)) for start in range(1, length, width)]


# ------------------------------------------------------------------------------------------------------- routes
class Route:
    """How logits come about: through one kind of cache, or without one. Feed it with `start`, then `next` per piece."""

    def __init__(self, model, name: str, make_cache: Callable[[], Any] | None):
        self.model = model
        self.name = name
        self.make_cache = make_cache
        self.takes_positions = "position_ids" in forward_parameters(model)
        self.seconds = 0.0
        self.stats: dict[str, float] | None = None
        self._device = model.device

    def start(self, inputs: torch.Tensor) -> None:
        """Begin a batch of contexts. inputs: (batch, length) int64."""
        self.inputs = inputs
        self.cache = None if self.make_cache is None else self.make_cache()
        self.whole = None

    def next(self, rows: int, start: int, stop: int) -> torch.Tensor:
        """Logits (rows, stop - start, vocab) of the inputs from `start` to `stop`, of the first `rows` rows.

        Call it with consecutive bounds and never more rows than before.
        """
        began = time.perf_counter()
        if self.make_cache is None:
            if self.whole is None:
                self.whole = self._forward(0, self.inputs.shape[1], use_cache=False).logits
            logits = self.whole[:rows, start:stop]
        else:
            if rows < len(self.inputs):
                self.inputs = self.inputs[:rows]
                self.cache.reorder_cache(torch.arange(rows, device=self.inputs.device))
            output = self._forward(start, stop, cache=self.cache, use_cache=True)
            # A keyword that a model does not know is swallowed, and a fresh cache used instead.
            if getattr(output, "cache", None) is not self.cache:
                raise RuntimeError(
                    f"{type(self.model).__name__} did not use the cache that was passed to it, so its perplexity would "
                    'not be what it says. Evaluate this model with mode="full".'
                )
            logits = output.logits
        synchronize(self._device)
        self.seconds += time.perf_counter() - began
        return logits

    def finish(self) -> None:
        """End a batch: add up the cache's own counters, if it has any, and let it go."""
        stats = getattr(self.cache, "stats", None)
        if stats is not None and hasattr(stats, "to_dict"):
            totals = self.stats or {}
            for key, value in stats.to_dict().items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    totals[key] = totals.get(key, 0) + value
            self.stats = totals
        self.drop()

    def drop(self) -> None:
        """Let go of what a batch holds; a batch that is not finished leaves no trace in the counters."""
        self.inputs = self.cache = self.whole = None

    def _forward(self, start: int, stop: int, **kwargs):
        if self.takes_positions:
            # Some forwards (Bamba's) ignore the cache's length when positions are left out.
            positions = torch.arange(start, stop, device=self.inputs.device)
            kwargs["position_ids"] = positions.unsqueeze(0).expand(len(self.inputs), -1)
        return self.model(input_ids=self.inputs[:, start:stop], **kwargs)


def make_route(model, cache: Any, replay: ReplayConfig | None) -> Route:
    """The route of a cache given as "replayssm", "dynamic", "none", or a function from the model to a fresh cache."""
    if callable(cache):
        return Route(model, getattr(cache, "__name__", type(cache).__name__), lambda: cache(model))
    if cache == NO_CACHE:
        return Route(model, NO_CACHE, None)
    if cache == "dynamic":
        from transformers import DynamicCache

        return Route(model, cache, lambda: DynamicCache(config=model.config))
    if cache == "replayssm":
        from hf_replayssm import ReplayCache

        return Route(model, cache, lambda: ReplayCache(config=model.config, replay_config=replay))
    raise ValueError(
        f'cache must be "replayssm", "dynamic" or a function that takes the model and returns a fresh cache, '
        f"not {cache!r}."
    )


def replay_settings(model, replay: Any) -> ReplayConfig:
    """The `ReplayConfig` of the replay caches, from such a config, a dict of fields, or None.

    Fields that are left out are those that the model was enabled with, else the defaults. A wrong one raises here and
    now, as does a model that is not supported.
    """
    from hf_replayssm import ReplayCache
    from hf_replayssm.config import ReplayConfig

    model = _unwrapped(model)
    if not isinstance(replay, ReplayConfig):
        replay = (getattr(model, "_replay_config", None) or ReplayConfig()).replace(**dict(replay or {}))
    # As a cache of the model takes them: what is left open is the recurrence's choice.
    return ReplayCache(config=model.config, replay_config=replay).replay_config


@contextlib.contextmanager
def replay_enabled(model, needed: bool) -> Iterator[None]:
    """Enables replay on the model for the time of an evaluation, unless it is enabled already."""
    if not needed:
        yield
        return
    import hf_replayssm

    if hf_replayssm.is_enabled(model):
        yield
        return
    hf_replayssm.enable(model)
    try:
        yield
    finally:
        hf_replayssm.disable(model)


# ------------------------------------------------------------------------------------------------------- models
def forward_parameters(model) -> set[str]:
    """Names of the arguments of the model's forward, looked up behind a PEFT wrapper."""
    return set(inspect.signature(_unwrapped(model).forward).parameters)


def _unwrapped(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_model(model) -> None:
    """Raises ValueError for a model that cannot be evaluated here."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model. Load it with AutoModelForCausalLM.from_pretrained."
        )
    if "cache" not in forward_parameters(model):
        raise ValueError(
            f"The forward of {type(model).__name__} has no argument `cache`: it is older than transformers 5.24, or "
            "remote code. Load the class that transformers itself has for this model."
        )


def vocab_size(model) -> int | None:
    embeddings = model.get_input_embeddings()
    return getattr(embeddings, "num_embeddings", None)


def default_max_length(model) -> int:
    """1024 tokens, or the model's positions where those are fewer."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(1024, positions) if positions else 1024


@contextlib.contextmanager
def evaluation_mode(model) -> Iterator[None]:
    """No dropout and no gradients; the model's training flag is put back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that times are those of the work and not of its launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "xpu":
        torch.xpu.synchronize(device)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In fp64 (fp32 on MPS, which has none): differences of caches are often smaller than fp32 rounding here."""
    dtype = torch.float32 if logits.device.type == "mps" else torch.float64
    return torch.log_softmax(logits.to(dtype), dim=-1)
