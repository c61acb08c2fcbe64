"""
The scan of a Mamba-2 prompt by flash-linear-attention, a package of Triton kernels that pip installs without a compiler
(the extra `fla`). Its gated linear attention with one gate a head is the recurrence of `mamba2.py`: queries are C, keys
B, values dt x, and the log gate is dt A.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable

import torch


# Elements of B, repeated for every head, that one call may hold: a longer prompt is scanned in parts.
PART_ELEMENTS = 2**28


@functools.cache
def chunk_simple_gla() -> Callable | None:
    """The package's function; None where it is missing, too old, or not for the triton at hand (which is said)."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla as function
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fla":
            return None
        reason: Exception = error
    except Exception as error:  # (anything may be raised while a module defines kernels for another triton)
        reason = error
    else:
        if "state_v_first" in inspect.signature(function).parameters:
            return function
        reason = TypeError("chunk_simple_gla takes no state_v_first: it is an old version")
    warnings.warn(
        f"flash-linear-attention is installed and cannot be used, so prompts are scanned in PyTorch "
        f"({type(reason).__name__}: {reason}). Install a version that goes with the installed triton, for example "
        f"`pip install --upgrade flash-linear-attention`.",
        stacklevel=2,
    )
    return None


def serves(x: torch.Tensor) -> bool:
    """Activations x of 16 bits on a GPU: it multiplies in tf32 or less, too coarse for others."""
    return x.device.type in ("cuda", "xpu") and x.element_size() == 2 and chunk_simple_gla() is not None


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    As [`mamba2.scan`]: x (b, t, h, p), B and C (b, t, g, n), dt (b, t, h), initial_state (b, h, p, n) -> y (b, t, h, p)
    and the state (b, h, p, n), both float32. dt x and, between chunks, the state are rounded to the dtype of x.
    """
    (batch, tokens, heads, _), (groups, size) = x.shape, B.shape[2:]
    y = torch.empty_like(x, dtype=torch.float32)
    state = None if initial_state is None else initial_state.float()
    dt, A, D = dt.float(), A.float(), D.float()
    part = max(64, PART_ELEMENTS // (batch * heads * size) // 64 * 64)
    for begin in range(0, tokens, part):
        now = slice(begin, begin + part)
        keys, queries = (tensor[:, now].repeat_interleave(heads // groups, 2) for tensor in (B, C))
        values = (x[:, now] * dt[:, now, :, None]).to(x.dtype)
        seen, state = chunk_simple_gla()(
            queries,
            keys,
            values,
            dt[:, now] * A,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
            state_v_first=True,
        )
        torch.addcmul(seen, x[:, now], D[:, None], out=y[:, now])
    return y, state
