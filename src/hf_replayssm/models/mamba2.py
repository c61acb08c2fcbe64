"""The forward of a Mamba-2 mixer over a replay cache: one for all families."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F
from transformers.integrations.accelerate import force_accelerate_hooks

from ..layers import ReplayLayer
from ..ops import flash_linear, mamba2, rms_norm
from ..positions import Segment
from .mixer import ReplayMixer, is_reference, outside_autocast
from .norms import as_rms_norm


class ReplayMamba2Mixer(ReplayMixer):
    _replay_forward = force_accelerate_hooks("conv1d")(ReplayMixer._replay_forward)

    def _constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """A (h,), negative."""
        return (-self.A_log.to(dtype).exp(),)

    def _parameters_inside(self) -> tuple[torch.Tensor | None, ...]:
        return self.dt_bias, self.D, self.conv1d.weight, self.conv1d.bias

    @outside_autocast
    def _replay_segment(
        self, layer: ReplayLayer, segment: Segment, xBC: torch.Tensor, dt: torch.Tensor
    ) -> torch.Tensor:
        """Raw xBC (b, t, conv_dim) and dt (b, t, h) of the segment -> y (b, t, h, p), a row's real tokens first."""
        upstream = sys.modules[self._replaced_class.__module__]
        batch, tokens, _ = xBC.shape
        conv1d = self.conv1d
        weight, bias = conv1d.weight.squeeze(1), conv1d.bias
        low, high = layer.cache.replay_config.time_step_limit or self.time_step_limit
        dt_rule = {"dt_bias": self.dt_bias, "dt_min": low, "dt_max": high}
        kernels = not segment.scan and layer.uses_kernels(xBC)
        xBC = segment.real_first(xBC)
        # Kernels apply the rule for dt themselves. Here it comes before masked dt become 0: a limit would raise them.
        dt = segment.real_first(dt if kernels else mamba2.final_dt(dt, **dt_rule))

        if kernels and self.activation in mamba2.FUSED_ACTIVATIONS:
            return layer.decode(segment, xBC, weight, bias, dt, self.D, activation=self.activation, **dt_rule)
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
            return self._scan(layer, segment, x, B, C, dt)
        if kernels:
            return layer.step(segment, x, B, C, dt, self.D, **dt_rule)
        return layer.replay(segment, x, B, C, dt, self.D)

    def _scan(
        self,
        layer: ReplayLayer,
        segment: Segment,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
    ) -> torch.Tensor:
        """A prefill's tokens, behind the whole state; dt is final."""
        upstream = sys.modules[self._replaced_class.__module__]
        initial_state = layer.state_before_scan(x, segment)
        (A,) = layer.constants
        # Upstream's own PyTorch code takes longer than ours, on a CPU three times as long, and more memory. (A compiler
        # would unroll ours, chunk by chunk.)
        if not torch.compiler.is_compiling() and is_reference(upstream.mamba2_chunk_scan):
            scan = flash_linear.scan if flash_linear.serves(x) else mamba2.scan
            y, state = scan(x, dt, A, B, C, self.D, initial_state)
        else:
            y, state = upstream.mamba2_chunk_scan(
                x,
                dt,
                A,
                B,
                C,
                chunk_size=self.chunk_size,
                D=self.D,
                initial_states=initial_state,
                return_final_states=True,
            )
        layer.flush_to(state, segment)
        return y

    # Where the families differ.

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate (b, t, intermediate), xBC (b, t, conv_dim) and dt (b, t, h) before its bias."""
        return self._split(self.in_proj(hidden_states))

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.split_with_sizes(projected, [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)

    def _output(self, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y (b, t, h, p) and gate (b, t, intermediate) -> (b, t, hidden)."""
        return self.out_proj(self._gated_norm(y.flatten(2), gate, dtype, backend))

    def _gated_norm(self, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y and gate (b, t, intermediate) -> the same in `dtype`."""
        # (A compiler fuses the module by itself.)
        norm = None if torch.compiler.is_compiling() else as_rms_norm(self.norm)
        if norm is not None and rms_norm.uses_kernel(norm, y, gate, dtype, backend):
            return rms_norm.rms_norm_triton(norm, y, gate, dtype)
        return self.norm(y, gate).to(dtype)


class ReplayFalconH1Mixer(ReplayMamba2Mixer):
    """It multiplies what goes into and comes out of the first projection (muP), and may have no norm."""

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._split(self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector)

    def _gated_norm(self, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
        if self.mamba_rms_norm:
            return super()._gated_norm(y, gate, dtype, backend)
        return (y * F.silu(gate)).to(dtype)
