"""lm-evaluation-harness: the model type `hf-replayssm`, its `hf` with replay.

    hf-replayssm lm-eval run --model hf-replayssm --model_args pretrained=ID,buffer_len=16,window=8 --tasks ...

or, in Python, after `import hf_replayssm.evaluation.harness`:

    lm_eval.simple_evaluate(model="hf-replayssm", model_args={"pretrained": "ID", "buffer_len": 16}, tasks=[...])

(The harness has no entry points for model types, so something has to import this module.) An enabled model can also be
given to its own type: `HFLM(pretrained=model, tokenizer=tokenizer)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(
        "lm-evaluation-harness is not installed, or does not import here "
        f'({str(error).splitlines()[0]}). Install it with `pip install "hf-replayssm[lm-eval]"`.'
    ) from error

import hf_replayssm
from hf_replayssm.config import ReplayConfig
from hf_replayssm.integration import REPLAY_IMPLEMENTATIONS

from . import forward


REPLAY_FIELDS = tuple(field.name for field in dataclasses.fields(ReplayConfig))


@register_model("hf-replayssm")
class ReplayLM(HFLM):
    """The harness's `hf` with replay: generation decodes through the replay cache.

    Args:
        pretrained: as for `hf`: an id, a folder, or a model, which is enabled in place.
        window: how log-likelihoods come about. None: one forward over context and continuation without a cache, as
            with `hf`, which shows nothing of the decode path. N: through the replay cache, N tokens per forward (1 is
            a token at a time), so that the settings of the cache show in every task.
        cache_implementation: of `generate`: "replayssm" (the default) or "replayssm_static".
        **kwargs: the fields of `ReplayConfig` (`buffer_len`, `checkpoint_dtype`, ...), and all that `hf` takes.

    Raises:
        ValueError: a setting that replay does not take, or a model that is not supported.
    """

    def __init__(
        self,
        pretrained: Any,
        *args: Any,
        window: int | None = None,
        cache_implementation: str = "replayssm",
        **kwargs: Any,
    ) -> None:
        fields = {name: kwargs.pop(name) for name in REPLAY_FIELDS if name in kwargs}
        if fields.get("backend") in ("default", "causal", "seq2seq"):  # `hf` has an argument of that name, too
            kwargs["backend"] = fields.pop("backend")
        ReplayConfig.from_dict(fields)  # before the model is loaded
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"window must be a whole number of at least 1, or left out, not {window!r}.")
        if cache_implementation not in REPLAY_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation must be one of {', '.join(REPLAY_IMPLEMENTATIONS)}, not "
                f"{cache_implementation!r}. Use the model type `hf` for transformers' own caches."
            )
        super().__init__(pretrained, *args, **kwargs)
        hf_replayssm.enable(self.model, **fields)
        self.window, self.cache_implementation = window, cache_implementation
        self.replay_config = forward.replay_settings(self.model, None)

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Logits (batch, length, vocab) of inputs (batch, length), filled up behind their ends."""
        if self.window is None:
            return super()._model_call(inps, attn_mask, labels)
        route = forward.make_route(self.model, "replayssm", self.replay_config)
        autocast = torch.autocast(
            self.device.type, self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        )
        with torch.no_grad(), autocast:
            route.start(inps)
            pieces = forward.pieces(inps.shape[1], "window", self.window)
            return torch.cat([route.next(len(inps), start, stop) for start, stop in pieces], dim=1)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        options.setdefault("cache_implementation", self.cache_implementation)
        return super()._model_generate(context, max_length, stop, **options)
