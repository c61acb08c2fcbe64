"""
The forward of a Mamba-1 mixer over a replay cache: one for all families. The projections to dt, B and C stand behind
the convolution, so they are called segment by segment.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F
from transformers.integrations.accelerate import force_accelerate_hooks

from ..layers import ReplayLayer
from ..ops import mamba1
from ..ops.mamba2 import FUSED_ACTIVATIONS
from ..positions import Segment
from .mixer import ReplayMixer, is_reference, outside_autocast


class ReplayMamba1Mixer(ReplayMixer):
    _replay_forward = force_accelerate_hooks(["conv1d", "dt_proj"])(ReplayMixer._replay_forward)

    groups = 1  # of channels that share B and C

    def _constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """A (g, n, p), negative, and the bias of dt (g, p)."""
        return mamba1.decay_rates(self.A_log).to(dtype), self._dt_bias().to(dtype).view(self.groups, -1)

    def _replay_segment(self, layer: ReplayLayer, segment: Segment, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """x in front of the convolution and the gate z (b, t, d) -> y (b, t, g, p), a row's real tokens first."""
        x = self._convolve(layer, segment, segment.real_first(x))
        dt, B, C = self._select(x)
        x, z = self._by_group(x), self._by_group(segment.real_first(z))
        return self._replay_selected(layer, segment, x, B, C, dt, self.D.view(self.groups, -1), z)

    @outside_autocast
    def _convolve(self, layer: ReplayLayer, segment: Segment, x: torch.Tensor) -> torch.Tensor:
        upstream, activation = sys.modules[self._replaced_class.__module__], self.activation
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if not segment.scan and activation in FUSED_ACTIVATIONS and layer.uses_kernels(x):
            return layer.convolve_triton(segment, x, weight, bias, activation)
        long_conv = lambda window: upstream.causal_conv1d_fn(window, weight, bias, activation=activation)  # noqa: E731
        return layer.convolve(x, segment, weight, bias, self.act, long_conv)

    @outside_autocast
    def _replay_selected(
        self,
        layer: ReplayLayer,
        segment: Segment,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor,
    ) -> torch.Tensor:
        """x, dt and z (b, t, g, p), B and C (b, t, g, n), D (g, p) -> y (b, t, g, p)."""
        if not segment.scan:
            run = layer.step if layer.uses_kernels(x) else layer.replay
            return run(segment, x, B, C, dt, D, z)
        initial_state = layer.state_before_scan(x, segment)
        A, dt_bias = layer.constants
        dt = segment.only_real(dt, -torch.inf)  # which softplus takes to 0
        upstream_scan = sys.modules[self._replaced_class.__module__].mamba_selective_scan
        if initial_state is None and not is_reference(upstream_scan):
            y, state = self._upstream_scan(upstream_scan, x, B, C, dt, A, D, z, dt_bias)
        else:
            scan = mamba1.scan_triton if layer.uses_kernels(x) else mamba1.scan
            y, state = scan(C, x, B, dt, A, D, initial_state, dt_bias=dt_bias, z=z)
        layer.flush_to(state, segment)
        return y

    @staticmethod
    def _upstream_scan(scan, x, B, C, dt, A, D, z, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
        """The scan of a package with kernels, which takes one group and no initial state."""
        outputs = [
            scan(
                x[:, :, g].transpose(1, 2),
                dt[:, :, g].transpose(1, 2),
                A[g].t().contiguous(),
                B[:, :, g].transpose(1, 2),
                C[:, :, g].transpose(1, 2),
                D=D[g].float(),
                z=z[:, :, g].transpose(1, 2),
                delta_bias=dt_bias[g],
                delta_softplus=True,
                return_last_state=True,
            )
            for g in range(x.shape[2])
        ]
        y = torch.stack([y.transpose(1, 2) for y, _ in outputs], dim=2)
        return y, torch.stack([state.transpose(1, 2) for _, state in outputs], dim=1)

    def _by_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (..., g, p)"""
        return tensor.unflatten(-1, (self.groups, -1))

    def _output(self, y: torch.Tensor, gate: None, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y (b, t, g, p), which is gated already -> (b, t, hidden)."""
        return self.out_proj(y.flatten(2).to(dtype))

    # Where the families differ.

    def _project(self, hidden_states: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        """No gate for [`_output`]; x and z (b, t, d)."""
        return None, *self.in_proj(hidden_states).chunk(2, dim=-1)

    def _select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (b, t, d) behind the convolution -> dt (b, t, g, p) before its bias, B and C (b, t, g, n)."""
        dt, B, C = self.x_proj(x).split([self.time_step_rank, *[self.ssm_state_size] * 2], dim=-1)
        if hasattr(self, "dt_layernorm"):  # Falcon-Mamba and Jamba
            dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
        if hasattr(self.config, "_is_quantized"):  # its weight is no matrix: as upstream does it
            dt = self.dt_proj(dt) - self.dt_proj.bias
        else:
            dt = F.linear(dt, self.dt_proj.weight)
        return tuple(self._by_group(tensor) for tensor in (dt, B, C))

    def _dt_bias(self) -> torch.Tensor:
        return self.dt_proj.bias

    def _parameters_inside(self) -> tuple[torch.Tensor | None, ...]:
        outside = "in_proj.", "out_proj."
        return tuple(parameter for name, parameter in self.named_parameters() if not name.startswith(outside))


class ReplayZambaMixer(ReplayMamba1Mixer):
    """Zamba's heads are groups; each has projections of its own, and x and z take turns in the channels of in_proj."""

    _replay_forward = force_accelerate_hooks("conv1d")(ReplayMixer._replay_forward)

    @property
    def groups(self) -> int:
        return self.n_mamba_heads

    def _project(self, hidden_states: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        return None, *self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)

    def _select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.unflatten(-1, (self.groups, -1))
        projected = torch.einsum("btgp,grp->btgr", x, self.x_proj_weight)
        dt, B, C = projected.split([self.time_step_rank, *[self.ssm_state_size] * 2], dim=-1)
        return torch.einsum("btgr,gpr->btgp", dt, self.dt_proj_weight), B, C

    def _dt_bias(self) -> torch.Tensor:
        return self.dt_proj_bias
