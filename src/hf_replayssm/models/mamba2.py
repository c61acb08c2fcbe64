"""
The forward of a Mamba-2 mixer over a replay cache: one for all families.

The parameters and submodules are upstream's, as are the long convolution and the chunked scan of a prefill (so hub
kernels and mamba_ssm come with them). With any other cache, or none, the forward is upstream's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers.integrations.accelerate import force_accelerate_hooks

from ..cache import ReplayCache
from ..layers import ReplayLayer
from ..ops import mamba2, rms_norm
from ..ops.refuse_backward import RefuseBackward
from ..positions import Segment
from .norms import as_rms_norm
from .replaced import ReplacedClass


class ReplayMamba2Mixer(ReplacedClass):
    """Goes in front of an upstream mixer class (see `replaced.py`)."""

    def forward(self, hidden_states: torch.Tensor, cache=None, attention_mask=None, **kwargs):
        if isinstance(cache, ReplayCache):
            return self._replay_forward(hidden_states, cache)  # the mask is in the forward that the model opened
        return super().forward(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)

    @force_accelerate_hooks("conv1d")
    def _replay_forward(self, hidden_states: torch.Tensor, cache: ReplayCache) -> torch.Tensor:
        """(b, t, hidden) -> (b, t, hidden): projections around the segments of the forward that the model opened."""
        if cache.forward_in_progress is None:
            raise ValueError(
                "A mixer was called with a ReplayCache outside of its model. Call the model: it opens the cache's "
                "forward, which all layers share."
            )
        layer: ReplayLayer = cache.layers[self.layer_idx]
        gate, xBC, dt = self._project(hidden_states)

        A = layer.decay_rates(self.A_log, mamba2.accumulate_dtype(dt))

        # Everything between the projections is float32 or as the activations are, also under autocast.
        with torch.no_grad(), torch.autocast(hidden_states.device.type, enabled=False):
            outputs = [
                segment.original_order(
                    self._replay_segment(xBC[:, segment.columns], dt[:, segment.columns], A, layer, segment)
                )
                for segment in cache.forward_in_progress.segments
            ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if torch.is_grad_enabled():
            y = RefuseBackward.apply(y, xBC, dt, self.dt_bias, A, self.D, self.conv1d.weight, self.conv1d.bias)
        return self.out_proj(self._gated_norm(y.flatten(2), gate, hidden_states.dtype, cache.replay_config.backend))

    def _replay_segment(
        self, xBC: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, layer: ReplayLayer, segment: Segment
    ) -> torch.Tensor:
        """Raw xBC (b, t, conv_dim) and dt (b, t, h) of the segment -> y (b, t, h, p), a row's real tokens first."""
        upstream = sys.modules[self._replaced_class.__module__]
        batch, tokens, _ = xBC.shape
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        low, high = layer.cache.replay_config.time_step_limit or self.time_step_limit
        dt_rule = {"dt_bias": self.dt_bias, "dt_min": low, "dt_max": high}
        kernels = not segment.scan and layer.uses_kernels(xBC)
        xBC = segment.real_first(xBC)
        # Kernels apply the rule for dt themselves. Here it comes before masked dt become 0: a limit would raise them.
        dt = segment.real_first(dt if kernels else mamba2.final_dt(dt, **dt_rule))

        if kernels and self.activation in mamba2.FUSED_ACTIVATIONS:
            heads, groups = (self.num_heads, self.head_dim), (self.n_groups, self.ssm_state_size)
            return layer.decode(xBC, dt, A, self.D, segment, weight, bias, self.activation, heads, groups, **dt_rule)
        xBC = layer.convolve(
            xBC,
            segment,
            weight,
            bias,
            self.act,
            lambda window: upstream.causal_conv1d_fn(window, weight, bias, activation=self.activation),
        )
        x, B, C = xBC.split([self.intermediate_size, *[self.n_groups * self.ssm_state_size] * 2], dim=-1)
        x = x.view(batch, tokens, self.num_heads, self.head_dim)
        B = B.view(batch, tokens, self.n_groups, self.ssm_state_size)
        C = C.view(batch, tokens, self.n_groups, self.ssm_state_size)

        if segment.scan:
            initial_state = layer.state_before_scan(x, B, A, segment)
            by_windows = layer.uses_kernels(x) and is_reference(upstream.mamba2_chunk_scan)
            if by_windows and not torch.compiler.is_compiling():
                y, state = mamba2.scan_triton(x, dt, A, B, C, self.D, initial_state)
            else:
                y, state = upstream.mamba2_chunk_scan(
                    x,
                    dt,
                    A,
                    B,
                    C,
                    # No larger than needed: the scan of the PyTorch path pads to whole chunks. (Compiled, the number of
                    # tokens may stand for any.)
                    chunk_size=self.chunk_size
                    if torch.compiler.is_compiling()
                    else min(self.chunk_size, max(16, 1 << (tokens - 1).bit_length())),
                    D=self.D,
                    initial_states=initial_state,
                    return_final_states=True,
                )
            layer.flush_to(state, segment)
            return y

        if kernels:
            return layer.step(x, B, C, dt, A, self.D, segment, **dt_rule)

        return layer.replay(x, B, C, dt, A, self.D, segment)

    # Where the families differ.

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate (b, t, intermediate), xBC (b, t, conv_dim) and dt (b, t, h) before its bias."""
        if hasattr(self, "ssm_in_multiplier"):  # Falcon-H1: muP
            hidden_states = hidden_states * self.ssm_in_multiplier
        projected = self.in_proj(hidden_states)
        if hasattr(self, "mup_vector"):
            projected = projected * self.mup_vector
        return projected.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)

    def _gated_norm(self, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y and gate (b, t, intermediate) -> the same in `dtype`."""
        if not getattr(self, "mamba_rms_norm", True):
            return (y * F.silu(gate)).to(dtype)  # Falcon-H1 without a norm
        # (A compiler fuses the module by itself.)
        norm = None if torch.compiler.is_compiling() else as_rms_norm(self.norm)
        if norm is not None and rms_norm.uses_kernel(norm, y, gate, dtype, backend):
            return rms_norm.rms_norm_triton(norm, y, gate, dtype)
        return self.norm(y, gate).to(dtype)


def is_reference(function: Callable) -> bool:
    """
    Whether one of upstream's functions that take kernels where a package has them runs its own PyTorch code. (Upstream
    does not say; its wrapper holds both. Of anything else: False.)
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells))) if code is not None else {}
    return "torch_function" in held and held["torch_function"] is held.get("implementation")
