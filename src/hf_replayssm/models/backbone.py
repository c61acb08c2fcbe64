"""
The forward of the model around the mixers: opens the replay cache's forward, and closes it.

What has to be known once for all layers is settled here: whether the cache fits the model and the batch, which of the
new tokens are padding, and, after rows were cropped to lengths of their own, what attention may look at.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.utils.generic import is_flash_attention_requested

from ..cache import ReplayCache
from ..families import Signature
from ..layers import attention_part
from ..ops import backend
from ..positions import upload
from ..static import StaticReplayCache
from ..static_positions import StaticForward
from .mixer import ReplayMixer
from .norms import norms_of_a_replay
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
        cache = arguments.get("cache")
        if not isinstance(cache, ReplayCache):
            return super().forward(*args, **kwargs)
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return super().forward(**arguments)  # upstream's own error
        if isinstance(cache, StaticReplayCache):
            return self._replay_forward(cache, arguments, inputs)
        return self._uncompiled_forward(cache, arguments, inputs)

    # The plain variant decides on the host, which a compiler would only freeze or break on.
    @torch.compiler.disable
    def _uncompiled_forward(self, cache: ReplayCache, arguments: dict[str, Any], inputs: torch.Tensor):
        return self._replay_forward(cache, arguments, inputs)

    def _replay_forward(self, cache: ReplayCache, arguments: dict[str, Any], inputs: torch.Tensor):
        batch, tokens = inputs.shape[:2]
        mask = new_tokens_mask(arguments.get("attention_mask"), batch, tokens)
        self._check(cache, arguments, inputs, mask)
        if isinstance(cache, StaticReplayCache) and not cache.is_allocated:
            self.allocate(cache, inputs)
        cache.begin_forward(tokens, batch, mask)
        try:
            if isinstance(cache, StaticReplayCache):
                self._fill_in_static(cache, arguments, inputs)
            else:
                self._fill_in(cache, arguments, inputs, tokens, mask)
            setting = cache.replay_config.backend
            if torch.compiler.is_compiling() or backend.resolve(setting, inputs.device) == "torch":
                outputs = super().forward(**arguments)
            else:
                with norms_of_a_replay(setting):
                    outputs = super().forward(**arguments)
            cache.end_forward()
        except BaseException:
            cache.abort_forward()
            raise
        return outputs

    def check_model(self, cache: ReplayCache) -> None:
        """Raises `ValueError` for a cache of another model."""
        if cache.signature.text != self._replay_signature.text:
            raise ValueError(
                f"This ReplayCache was built for another model ({cache.signature}) than the one it is used with "
                f"({self._replay_signature}). Build it with `ReplayCache(config=model.config)`."
            )

    def _check(
        self,
        cache: ReplayCache,
        arguments: dict[str, Any],
        inputs: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """Raises `ValueError` for what replay cannot do, before anything is changed."""
        tokens = inputs.shape[1]
        self.check_model(cache)
        if self.training and torch.is_grad_enabled():
            raise ValueError(
                "Training through a ReplayCache is not possible: its buffers carry no gradients. Train without a cache "
                "(`use_cache=False`), or call `model.eval()`."
            )
        if not (isinstance(cache, StaticReplayCache) and cache.is_allocated):
            config = cache.replay_config
            dtype = inputs.dtype if inputs.is_floating_point() else self.dtype
            backend.resolve(config.backend, inputs.device, (dtype, config.checkpoint_dtype))  # raises if not available
        refuse_packed(arguments)
        position_ids = arguments.get("position_ids")
        if cache.is_fresh and tokens > 1 and position_ids is not None and not torch.compiler.is_compiling():
            # Positions that start anew in a row. (Under padding they may be anything. Of several axes the first counts
            # the text, or time; the others start anew in each line of an image.)
            axis = position_ids[0] if position_ids.dim() == 3 else position_ids
            restarts = axis[..., -tokens:].diff(dim=-1) < 0
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
        deltas = arguments.pop("rope_deltas", None)
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

        if "position_ids" in self._forward_parameters and arguments.get("position_ids") is None:
            # Bamba would start at 0 again; and rows cropped to lengths of their own go on from their own.
            after = cache.forward_in_progress.after
            if after.mask is None:
                position_ids = torch.arange(past, past + tokens, device="cpu")[None]
            else:
                position_ids = (after.mask.long().cumsum(1)[:, past:] - 1).clamp(min=0)
            arguments["position_ids"] = behind_images(upload(position_ids, inputs.device), deltas)

    # The static variant.

    def allocate(
        self,
        cache: StaticReplayCache,
        inputs: torch.Tensor,
        key_shape: tuple[int | list[int], int | list[int]] | None = None,
    ) -> None:
        """Lays `cache` out for this model and the batch of `inputs`; see [`StaticReplayCache.allocate`]."""
        if torch.compiler.is_compiling():
            raise ValueError(
                "A static replay cache has no memory before its first forward, and a compiled forward cannot lay it "
                "out. Run the first one (the prefill) without `torch.compile`, or call `cache.allocate(...)` before."
            )
        devices = {}
        for module in self.modules():
            if isinstance(module, ReplayMixer):
                device = module.replay_device
                devices[module.layer_idx] = inputs.device if device.type == "meta" else device
        cache.allocate(inputs.shape[0], activation_dtype(self), devices, key_shape)

    def _fill_in_static(self, cache: StaticReplayCache, arguments: dict[str, Any], inputs: torch.Tensor) -> None:
        """
        The attention mask and, when they were left out, the position ids, both from the numbers of the tokens: a mask
        that was given says which of the new columns are padding, and of the past the cache knows.
        """
        forward, deltas = cache.forward_in_progress, arguments.pop("rope_deltas", None)
        if "position_ids" in self._forward_parameters and arguments.get("position_ids") is None:
            arguments["position_ids"] = behind_images(forward.numbers_from_0.to(inputs.device), deltas)
        arguments["attention_mask"] = None
        if cache.has_attention:
            mask = self._static_mask(cache, forward, inputs)
            arguments["attention_mask"] = {"full_attention": mask, "linear_attention": None}

    def _static_mask(self, cache: StaticReplayCache, forward: StaticForward, inputs: torch.Tensor) -> Any:
        """
        What the attention implementation takes for a mask, over what `StaticAttentionLayer.update` returns.
        `ValueError` for an implementation that cannot be told what there is.
        """
        implementation = self.config._attn_implementation
        if implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
            raise ValueError(
                f"transformers makes no masks for the attention implementation {implementation!r}, and without one it "
                "would look at the unused slots of a static cache. Use `cache_implementation='replayssm'`, or load the "
                "model with `attn_implementation='sdpa'`."
            )
        device, (batch, tokens) = inputs.device, inputs.shape[:2]
        numbers = forward.numbers_from_0.to(device)
        real = None if forward.real is None else forward.real.to(device)
        padding, front = None, cache.front_slots
        slots = tokens if forward.fresh else cache.key_slots
        if is_flash_attention_requested(self.config):
            # It takes which keys there are, and lets the new tokens be the last of them.
            if forward.fresh:
                padding = real
            else:
                newest, slot = numbers[:, -1:], torch.arange(slots, device=device)
                forward.aligned_right = tokens > 1
                if forward.aligned_right:
                    padding = slot >= slots - 1 - newest
                else:
                    padding = (slot >= front) & (slot <= front + newest)
            if forward.aligned_right and real is not None:
                raise ValueError(
                    "FlashAttention takes no padding among later tokens of a static cache: pad the first forward only, "
                    "or load the model with `attn_implementation='sdpa'`."
                )
            visible = causal_mask_function
        elif not forward.fresh:
            visible = lambda b, h, q, k: (k >= front) & (k <= front + numbers[b, q])  # noqa: E731
        elif real is None:
            visible = causal_mask_function
        else:
            # Padding sees itself, so that its output is a number.
            visible = lambda b, h, q, k: (k <= q) & real[b, k] | (k == q)  # noqa: E731
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=batch,
            q_length=tokens,
            kv_length=slots,
            q_offset=0,
            kv_offset=0,
            mask_function=visible,
            attention_mask=padding,
            allow_is_causal_skip=forward.fresh and real is None,
            dtype=inputs.dtype if inputs.is_floating_point() else self.dtype,
            config=self.config,
            use_vmap=False,
            device=device,
        )


class ReplayMultimodal(ReplacedClass):
    """
    Goes in front of a class that makes positions of several axes for the backbone inside it. For tokens behind a prompt
    upstream counts the cache's columns, on the host, or those of the mask, which may be one of the new tokens alone;
    the backbone knows where each row stands, and needs to be told only how far its positions are behind its tokens.
    """

    _keeps_signature = ("forward",)

    def compute_3d_position_ids(self, *args, cache=None, **kwargs):
        if not isinstance(cache, ReplayCache):
            return super().compute_3d_position_ids(*args, cache=cache, **kwargs)
        if cache.is_fresh:
            self.rope_deltas = None  # of another sequence
            return super().compute_3d_position_ids(*args, cache=None, **kwargs)
        return None

    def forward(self, *args, **kwargs):
        arguments = bind(self, args, kwargs)
        cache = arguments.get("cache")
        if isinstance(cache, ReplayCache) and not cache.is_fresh and arguments.get("position_ids") is None:
            return super().forward(**arguments, rope_deltas=self.rope_deltas)
        return super().forward(*args, **kwargs)


def behind_images(position_ids: torch.Tensor, deltas: torch.Tensor | None) -> torch.Tensor:
    """Positions (b or 1, t) of tokens of which images in front, or frames, took up more or less than their number."""
    if deltas is None:
        return position_ids
    deltas = deltas.to(position_ids.device)
    if position_ids.shape[0] > len(deltas):  # rows of one prompt: beams, or several sequences returned
        deltas = deltas.repeat_interleave(position_ids.shape[0] // len(deltas), dim=0)
    return position_ids + deltas


def activation_dtype(model: Any) -> torch.dtype:
    """The dtype that leaves the model's projections."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


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


def bind(module: ReplacedClass, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with a ReplayCache under `cache` whichever of its old names it came under."""
    names = module._forward_parameters[: len(args)]
    if len(names) < len(args) or any(name in kwargs for name in names):
        inspect.signature(module._replaced_class.forward).bind_partial(module, *args, **kwargs)  # raises TypeError
    arguments = dict(zip(names, args)) | kwargs
    for old_name in ("past_key_values", "cache_params"):
        # Some models swallow an unknown keyword and make a cache of their own.
        if isinstance(arguments.get(old_name), ReplayCache):
            arguments["cache"] = arguments.pop(old_name)
    return arguments
