"""`ReplayConfig`: how a replay cache behaves. Taken by `enable`, `ReplayCache` and `generate(cache_config={...})`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch


CHECKPOINT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # 8 bits, with one float32 scale for a row of the state (see `ops/quantize.py`).
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    # Not for serving: for the state of a model that runs in float64.
    "float64": torch.float64,
}
BACKENDS = ("auto", "triton", "torch")
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class ReplayConfig:
    """
    Settings of a [`ReplayCache`].

    Args:
        buffer_len (`int`, *optional*):
            Tokens between two writes of the recurrent state (*flushes*). 1 is the classic step: the state is written
            at every token. By default what suits the recurrence: 16, for Mamba-1 3, and for KDA 10 (with a checkpoint
            of 16 bits 7, of 8 bits 5).
        max_window (`int`, defaults to 24):
            Tokens that may wait for a `crop` while the past is recorded (speculative decoding). `generate` raises it
            to what the assistant asks for; the buffer of the plain variant grows when a round needs more.
        checkpoint_dtype (`torch.dtype` or its name, defaults to `torch.float32`):
            How the state is stored between flushes: float32, bfloat16, float16, or float8_e4m3fn or int8 with a
            float32 scale for each row of the state. All arithmetic is float32.
        rounding (`str`, defaults to `"nearest"`):
            How a flush rounds the state to `checkpoint_dtype`: `"nearest"`, or `"stochastic"`, up or down at random, so
            that it is right on average.
        seed (`int`, defaults to 0):
            Of stochastic rounding. The same seed gives the same random bits, whatever else is in the batch. (When the
            state is rounded may depend on it: in the plain variant rows flush together.)
        backend (`str`, defaults to `"auto"`):
            `"triton"`, `"torch"` (the reference, any device), or `"auto"`: Triton where the tensors' device has it.
        time_step_limit (`tuple[float, float]`, *optional*):
            Overrides the limit on dt of the model's family. Upstream applies the family's limit in a whole-sequence
            forward and skips it in the cached single step; replay applies one limit everywhere, by default the
            whole-sequence one.
        capture (`bool`, defaults to `False`):
            With `cache_implementation="replayssm_static"`: `generate` captures its decoding steps in CUDA graphs, which
            takes a few steps, instead of compiling them. The other variant ignores it.

    Raises:
        ValueError: a field that does not exist, or a value out of range.
    """

    buffer_len: int | None = None
    max_window: int = 24
    checkpoint_dtype: torch.dtype = torch.float32
    backend: str = "auto"
    time_step_limit: tuple[float, float] | None = None
    capture: bool = False
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("buffer_len", "max_window"):
            value = getattr(self, name)
            if value is None and name == "buffer_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` counts tokens: pass an integer of 1 or more, not {value!r}.")
        object.__setattr__(self, "checkpoint_dtype", _as_dtype(self.checkpoint_dtype))
        if not isinstance(self.capture, bool):
            raise ValueError(f"`capture` is True or False, not {self.capture!r}.")
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` is one of {', '.join(map(repr, BACKENDS))}, not {self.backend!r}.")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"`rounding` is one of {', '.join(map(repr, ROUNDINGS))}, not {self.rounding!r}.")
        if self.rounding == "stochastic" and self.checkpoint_dtype in (torch.float32, torch.float64):
            raise ValueError(
                "`rounding='stochastic'` has nothing to round in a float32 checkpoint: choose a smaller "
                "`checkpoint_dtype`, or `rounding='nearest'`."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` is an integer from 0 to 2^32 - 1, not {self.seed!r}.")
        if self.time_step_limit is not None:
            try:
                low, high = (float(limit) for limit in self.time_step_limit)
            except (TypeError, ValueError):
                low, high = 0.0, -1.0
            if not 0.0 <= low <= high:
                raise ValueError(
                    f"`time_step_limit` is a pair (low, high) with 0 <= low <= high, not {self.time_step_limit!r}."
                )
            object.__setattr__(self, "time_step_limit", (low, high))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ReplayConfig:
        """The config with these fields; the others keep their defaults. `ValueError` names an unknown field."""
        return cls().replace(**fields)

    def replace(self, **fields: Any) -> ReplayConfig:
        """A copy with these fields changed. `ValueError` names an unknown field."""
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(
                f"Unknown replay setting{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}: "
                f"the settings are {', '.join(known)}."
            )
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them: the dtype is its name."""
        fields = dataclasses.asdict(self)
        fields["checkpoint_dtype"] = str(self.checkpoint_dtype).removeprefix("torch.")
        if self.time_step_limit is not None:
            fields["time_step_limit"] = list(self.time_step_limit)
        return fields


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in CHECKPOINT_DTYPES:
        raise ValueError(
            "`checkpoint_dtype` is float32, bfloat16, float16, float8_e4m3fn or int8 (a torch dtype or its name), not "
            f"{dtype!r}."
        )
    return CHECKPOINT_DTYPES[name]
