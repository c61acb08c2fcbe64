"""
The forward of the model around the mixers: opens the replay cache's forward, and closes it.

What has to be known once for all layers is settled here: whether the cache fits the model and the batch, which of the
new tokens are padding, and, after rows were cropped to lengths of their own, what attention may look at.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..cache import ReplayCache
from ..families import Signature
from ..layers import attention_part
from ..ops import backend
from ..positions import upload
from .replaced import ReplacedClass


PACKED_SEQUENCE_ARGUMENTS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


def refuse_packed(arguments: dict[str, Any]) -> None:
    """Raises `ValueError` if the arguments of a forward say that its rows are several sequences each."""
    packed = [name for name in PACKED_SEQUENCE_ARGUMENTS if arguments.get(name) is not None]
    if packed:
        raise ValueError(
            f"Packed sequences ({', '.join(packed)}) cannot be told apart in a recurrent state. Put each sequence in a "
            "row of its own and pad on the left, or call the model without a cache."
        )


class ReplayBackbone(ReplacedClass):
    """Goes in front of an upstream base model (see `replaced.py`)."""

    _keeps_signature = ("forward",)
    _replay_signature: Signature  # set by `enable`: reading it off the config takes longer than all else before a step

    def forward(self, *args, **kwargs):
        arguments = bind(self, args, kwargs)
        if isinstance(arguments.get("cache"), ReplayCache):
            return self._replay_forward(arguments)
        return super().forward(*args, **kwargs)

    # The plain variant decides on the host, which a compiler would only freeze or break on.
    @torch.compiler.disable
    def _replay_forward(self, arguments: dict[str, Any]):
        cache: ReplayCache = arguments["cache"]
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return super().forward(**arguments)  # upstream's own error
        batch, tokens = inputs.shape[:2]
        mask = new_tokens_mask(arguments.get("attention_mask"), batch, tokens)
        self._check(cache, arguments, inputs, mask)
        cache.begin_forward(tokens, batch, mask)
        try:
            self._fill_in(cache, arguments, inputs, tokens, mask)
            outputs = super().forward(**arguments)
            cache.end_forward()
        except BaseException:
            cache.abort_forward()
            raise
        return outputs

    def _check(
        self,
        cache: ReplayCache,
        arguments: dict[str, Any],
        inputs: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """Raises `ValueError` for what replay cannot do, before anything is changed."""
        tokens = inputs.shape[1]
        if cache.signature != self._replay_signature:
            raise ValueError(
                f"This ReplayCache was built for another model ({cache.signature}) than the one it is used with "
                f"({self._replay_signature}). Build it with `ReplayCache(config=model.config)`."
            )
        if self.training and torch.is_grad_enabled():
            raise ValueError(
                "Training through a ReplayCache is not possible: its buffers carry no gradients. Train without a cache "
                "(`use_cache=False`), or call `model.eval()`."
            )
        config = cache.replay_config
        dtype = inputs.dtype if inputs.is_floating_point() else self.dtype
        backend.resolve(config.backend, inputs.device, (dtype, config.checkpoint_dtype))  # raises if it cannot be had
        refuse_packed(arguments)
        position_ids = arguments.get("position_ids")
        if cache.get_seq_length() == 0 and tokens > 1 and position_ids is not None:
            # Positions that start anew in a row. (Under padding they may be anything.)
            restarts = position_ids[..., -tokens:].diff(dim=-1) < 0
            if mask is not None:
                restarts = restarts & mask[:, 1:] & mask[:, :-1]
            if bool(restarts.any()):
                refuse_packed({"seq_idx": position_ids})

    def _fill_in(
        self,
        cache: ReplayCache,
        arguments: dict[str, Any],
        inputs: torch.Tensor,
        tokens: int,
        mask: torch.Tensor | None,
    ) -> None:
        """Completes the attention mask to all columns, and the position ids when they were left out."""
        given, past = arguments.get("attention_mask"), cache.get_seq_length()
        has_attention = any(attention_part(layer) is not None for layer in cache.layers)
        if has_attention and not isinstance(given, dict):
            if given is not None and given.shape[1] not in (tokens, past + tokens):
                raise ValueError(
                    f"The attention mask has {given.shape[1]} columns. With {past} in the cache and {tokens} new ones "
                    f"it takes {tokens} or {past + tokens} (or none, when there is no padding among the new ones)."
                )
            # Of the past the cache knows best: what the recurrence has seen, attention looks at as well. (`generate`
            # guesses masks from pad ids, and takes a generated pad id in an earlier turn for padding.)
            seen = cache.padding_mask(inputs.device)
            if seen is None and mask is None:
                arguments["attention_mask"] = None
            else:
                all_real = torch.ones((inputs.shape[0], past + tokens), dtype=torch.bool, device=inputs.device)
                seen = all_real[:, :past] if seen is None else seen
                new = all_real[:, past:] if mask is None else mask.to(inputs.device)
                arguments["attention_mask"] = torch.cat([seen, new], dim=1).long()

        if "position_ids" in parameters(self) and arguments.get("position_ids") is None:
            # Bamba would start at 0 again; and rows cropped to lengths of their own go on from their own.
            after = cache.forward_in_progress.after
            if after.mask is None:
                position_ids = torch.arange(past, past + tokens)[None]
            else:
                position_ids = (after.mask.long().cumsum(1)[:, past:] - 1).clamp(min=0)
            arguments["position_ids"] = upload(position_ids, inputs.device)


def new_tokens_mask(attention_mask: Any, batch: int, tokens: int) -> torch.Tensor | None:
    """
    Which of the new columns are tokens, (batch, tokens) bool, from the mask that a model is given: None, (batch,
    columns) with at least the new ones, of which the last are taken, or a dict of such masks by layer type.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4:
        raise ValueError(
            "A 4D attention mask does not say which tokens are padding, which a recurrent state has to know. Pass a 2D "
            "mask (batch, columns), or call the model without a cache."
        )
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"The attention mask {tuple(attention_mask.shape)} does not cover the inputs: it takes a row for each of "
            f"the {batch} rows and a column for each of the {tokens} new tokens (those in the cache may come before)."
        )
    return attention_mask[:, -tokens:].bool()


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls.forward)


def parameters(module: ReplacedClass) -> Any:
    """The parameters of upstream's forward."""
    return _signature(module._replaced_class).parameters


def bind(module: ReplacedClass, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with a ReplayCache under `cache` whichever of its old names it came under."""
    arguments = dict(_signature(module._replaced_class).bind_partial(module, *args).arguments)
    arguments.pop("self", None)
    arguments.update(kwargs)
    for old_name in ("past_key_values", "cache_params"):
        # Some models swallow an unknown keyword and make a cache of their own.
        if isinstance(arguments.get(old_name), ReplayCache):
            arguments["cache"] = arguments.pop(old_name)
    return arguments
