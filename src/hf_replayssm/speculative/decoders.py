"""The target and the draft model, each with its cache: new tokens in, logits out, rejected columns back."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig

from ..cache import ReplayCache
from ..config import ReplayConfig
from ..integration import is_enabled, lend_static_cache
from ..positions import upload
from ..static import StaticReplayCache


class ReplayDecoder:
    """A model of a supported family and the ReplayCache that it decodes through."""

    def __init__(self, model: PreTrainedModel, cache: Any, config: GenerationConfig, device: torch.device):
        self.model, self.cache, self.device = model, cache, device
        self.forwards = 0
        self.is_static = isinstance(cache, StaticReplayCache)
        # As `generate` does it: a static cache's forwards are compiled or captured where they can be, but for prompts.
        self._decode: Any = model
        if self.is_static and model._valid_auto_compile_criteria({"cache": cache}, config):
            self._decode = model.get_compiled_call(config.compile_config)
        self._keeps_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor | None, chunk: int | None) -> None:
        """Prompt tokens (b, columns), of which none will be rolled back, so they go straight into the state."""
        chunk = chunk or ids.shape[1]
        for start in range(0, ids.shape[1], chunk):
            columns = slice(start, start + chunk)
            self.forward(ids[:, columns], None if mask is None else mask[:, columns], last_only=True, call=self.model)

    def start_recording(self) -> None:
        """From here on tokens are rolled back."""
        self.cache.record_past = True

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, last_only: bool = False, call: Any = None
    ) -> torch.Tensor:
        """
        New tokens (b, t), and which of them are no padding (CPU) -> logits (b, t or 1, vocab) float32; `call` runs the
        model.
        """
        inputs = self._inputs(ids.shape, mask) | (self._keeps_last if last_only else {})
        if call is None:
            call = self._decode if mask is None and not (self.is_static and self.cache.is_fresh) else self.model
        output = call(input_ids=ids.to(self.model.device), cache=self.cache, use_cache=True, **inputs)
        self.forwards += 1
        logits = output.logits[:, -1:] if last_only else output.logits
        return logits.to(self.device, torch.float32)

    def _inputs(self, shape: torch.Size, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        # An enabled model knows the rest from its cache.
        return {} if mask is None else {"attention_mask": mask.to(self.model.device, torch.long)}

    def crop(self, counts: torch.Tensor) -> None:
        """Drops each row's newest -counts (b,) columns."""
        # A static cache on another device takes them there, and nobody waits for it.
        self.cache.crop(upload(counts, self.cache.seen.device) if self.is_static else counts)

    def keep_rows(self, index: torch.Tensor) -> None:
        self.cache.batch_select_indices(index)


class AttentionDecoder(ReplayDecoder):
    """
    A draft model of attention layers only. transformers' cache has one length for all rows, so after a round the keys
    and values of each row are moved to the right end: to the model it is a batch padded on the left like any other.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, device: torch.device):
        # Without a config every layer keeps all columns. The model masks what a sliding window does not see.
        super().__init__(model, DynamicCache(), config, device)
        self.columns = 0
        self.mask: torch.Tensor | None = None  # (b, columns) int64, on the model's device: which are tokens; None: all
        self.holes: torch.Tensor | None = None  # (b,) CPU: columns on the left that are there for longer rows
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def start_recording(self) -> None:
        pass  # keys and values are all kept

    def _inputs(self, shape: torch.Size, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if self.holes is None:
            self.holes = torch.zeros(shape[0], dtype=torch.long, device="cpu")
        if self.mask is None and mask is not None and not bool(mask.all()):
            self.mask = self._all_tokens(self.columns)
        self.columns += shape[1]
        # Without padding no mask is given: transformers would wait for the device to see whether it is all ones.
        if self.mask is None:
            return {}
        new = self._all_tokens(shape[1]) if mask is None else upload(mask.long(), self.model.device)
        self.mask = torch.cat([self.mask, new], dim=1)
        inputs = {"attention_mask": self.mask}
        if self._takes_positions:
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -shape[1] :]
        return inputs

    def _all_tokens(self, columns: int) -> torch.Tensor:
        return torch.ones((len(self.holes), columns), dtype=torch.long, device=self.model.device)

    def crop(self, counts: torch.Tensor) -> None:
        end = self.columns + counts
        lengths = end - self.holes
        self.columns = columns = int(lengths.max())
        self.holes = columns - lengths
        shift = end - columns
        if not bool(shift.any()):  # all rows end alike (one row always does): nothing moves
            self.mask = None if self.mask is None else self.mask[:, :columns]
            for layer in self._layers():
                layer.keys, layer.values = layer.keys[..., :columns, :], layer.values[..., :columns, :]
            return
        source = torch.arange(columns, device="cpu") + shift[:, None]
        source = upload(source, self.model.device)
        there, source = source >= 0, source.clamp(min=0)  # (b, columns)
        # What one row takes back may be there for another: every column up to the end of the forward counts here.
        mask = self._all_tokens(int(end.max())) if self.mask is None else self.mask
        self.mask = mask.gather(1, source).where(there, 0)
        source = source[:, None, :, None]
        for layer in self._layers():
            layer.keys, layer.values = (
                states.gather(-2, source.to(states.device).expand(-1, states.shape[1], -1, states.shape[-1]))
                for states in (layer.keys, layer.values)
            )

    def _layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if layer.is_initialized]

    def keep_rows(self, index: torch.Tensor) -> None:
        self.holes = self.holes[index]
        index = upload(index, self.model.device)
        self.mask = None if self.mask is None else self.mask[index]
        # (The cache's own `batch_select_indices` leaves layers without a column as they are.)
        for layer in self._layers():
            layer.keys, layer.values = (states[index.to(states.device)] for states in (layer.keys, layer.values))


def new_cache(
    model: PreTrainedModel, settings: ReplayConfig, config: GenerationConfig, drafts: int, rows: int
) -> ReplayCache:
    settings = settings.replace(max_window=drafts + 1)
    if config.cache_implementation != "replayssm_static":
        return ReplayCache(config=model.config, replay_config=settings)
    length = max(config.max_length - 1, config.max_cache_len or 1)
    cache = lend_static_cache(model, settings, rows, length, recording=True)
    cache.record_past = True  # from the start: its memory is laid out once
    return cache


def draft_decoder(model: PreTrainedModel, config: GenerationConfig, drafts: int, ids: torch.Tensor) -> ReplayDecoder:
    if not is_enabled(model):
        return AttentionDecoder(model, config, ids.device)
    cache_config = config.cache_config or {}
    captures = cache_config.capture if isinstance(cache_config, ReplayConfig) else cache_config.get("capture")
    settings = model._replay_config if captures is None else model._replay_config.replace(capture=captures)
    return ReplayDecoder(model, new_cache(model, settings, config, drafts, len(ids)), config, ids.device)
