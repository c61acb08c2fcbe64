"""
The forward of a Gated DeltaNet or KDA mixer over a replay cache: one for all families.

Letters in the shapes: b batch, t tokens, h value heads, m key heads, c channels of a key, d channels of a value.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks

from ..layers import ReplayLayer
from ..ops import rms_norm
from ..ops.mamba2 import FUSED_ACTIVATIONS, accumulate_dtype
from ..positions import Segment
from .mixer import ReplayMixer, is_reference, outside_autocast
from .norms import as_rms_norm


class ReplayGatedDeltaMixer(ReplayMixer):
    """Qwen3.5, whose projections are separate; the other families differ from it in their projections alone."""

    _replay_forward = force_accelerate_hooks("conv1d")(ReplayMixer._replay_forward)

    chunk_function = "torch_chunk_gated_delta_rule"  # of upstream's module
    largest_chunk = 64  # of its PyTorch code
    gated_norm, last_projection = "norm", "out_proj"

    @property
    def replay_device(self) -> torch.device:
        return self.conv1d.weight.device

    def _constants(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return ()

    def _parameters_inside(self) -> tuple[torch.Tensor | None, ...]:
        return self.conv1d.weight, self.conv1d.bias

    @outside_autocast
    def _replay_segment(
        self, layer: ReplayLayer, segment: Segment, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Raw qkv (b, t, conv_dim), g (b, t, h[, c]) and beta (b, t, h) -> y (b, t, h, d), real tokens first."""
        upstream, recurrence = sys.modules[self._replaced_class.__module__], layer.recurrence
        weight, bias, activation = self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation
        # A masked token changes nothing: its g and beta become 0 here, as its qkv do.
        decay_shape = g.shape[2:]
        qkv, beta = segment.real_first(qkv), segment.real_first(beta)
        g = segment.real_first(g.flatten(2)).unflatten(2, decay_shape)
        kernels = not segment.scan and layer.uses_kernels(qkv)
        if kernels and activation in FUSED_ACTIVATIONS:
            return layer.decode(segment, qkv, weight, bias, g, beta, activation=activation)

        qkv = layer.convolve(
            qkv,
            segment,
            weight,
            bias,
            ACT2FN[activation],
            lambda window: upstream.causal_conv1d_fn(window, weight, bias, activation=activation),
        )
        keys = recurrence.key_heads * recurrence.key_dim
        q, k, v = qkv.split([keys, keys, recurrence.heads * recurrence.value_dim], dim=-1)
        q, k, v = (
            x.unflatten(-1, (-1, d)) for x, d in zip((q, k, v), (*[recurrence.key_dim] * 2, recurrence.value_dim))
        )
        if segment.scan:
            return self._scan(layer, segment, q, k, v, g, beta)
        return (layer.step if kernels else layer.replay)(segment, q, k, v, g, beta)

    def _scan(
        self,
        layer: ReplayLayer,
        segment: Segment,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """A prefill's tokens, behind the whole state."""
        chunk, options = getattr(sys.modules[self._replaced_class.__module__], self.chunk_function), {}
        if not torch.compiler.is_compiling() and is_reference(chunk):
            # No larger than needed: the PyTorch path pads to whole chunks.
            options["chunk_size"] = min(self.largest_chunk, max(16, 1 << (q.shape[1] - 1).bit_length()))
        y, state = chunk(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=layer.state_before_scan(q, segment),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **options,
        )
        layer.flush_to(state, segment)
        return y

    def _output(self, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """y and gate (b, t, h, d) -> (b, t, hidden)."""
        module, y = getattr(self, self.gated_norm), y.to(accumulate_dtype(y))
        # (A compiler fuses the module by itself.)
        norm = None if torch.compiler.is_compiling() else as_rms_norm(module)
        if norm is not None and rms_norm.uses_kernel(norm, y, gate, dtype, backend):
            y = rms_norm.rms_norm_triton(norm, y, gate, dtype)
        else:
            y = module(y, gate).to(dtype)
        return getattr(self, self.last_projection)(y.flatten(2))

    # Where the families differ.

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gate (b, t, h, d); raw qkv (b, t, conv_dim), g (b, t, h[, c]) and beta (b, t, h)."""
        gate = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        decay = self._decay(self.in_proj_a(hidden_states))
        return gate, self.in_proj_qkv(hidden_states), decay, self.in_proj_b(hidden_states).sigmoid()

    def _decay(self, a: torch.Tensor) -> torch.Tensor:
        """The log decay of `a` (b, t, h), in the dtype of sums."""
        dtype = accumulate_dtype(a)
        return -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias)


class ReplayQwen3NextMixer(ReplayGatedDeltaMixer):
    """Its two projections hold, key head by key head, what belongs together."""

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        q, k, v, gate, beta, decay = self.fix_query_key_value_ordering(*projected)
        qkv = torch.cat([tensor.flatten(2) for tensor in (q, k, v)], dim=-1)
        return gate, qkv, self._decay(decay), beta.sigmoid()


class ReplayOlmoHybridMixer(ReplayGatedDeltaMixer):
    gated_norm, last_projection = "o_norm", "o_proj"

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        qkv = torch.cat([project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        beta = self.b_proj(hidden_states).sigmoid()
        if self.allow_neg_eigval:
            beta = beta * 2.0
        return gate, qkv, self._decay(self.a_proj(hidden_states)), beta


class ReplayKDAMixer(ReplayGatedDeltaMixer):
    """Kimi Linear, and Bailing, whose gate has one projection. Its decay is a module of upstream's."""

    chunk_function = "chunk_kimi_delta_attention"
    largest_chunk = 16  # it holds so many times the channels of a key for each token, and takes as many turns
    gated_norm, last_projection = "o_norm", "o_proj"

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if hasattr(self, "g_a_proj"):
            gate = self.g_b_proj(self.g_a_proj(hidden_states))
        else:
            gate = self.g_proj(hidden_states)
        qkv = torch.cat([project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        decay, beta = self.forget_gate(hidden_states), self.b_proj(hidden_states).sigmoid()
        return gate.unflatten(-1, (-1, self.head_dim)), qkv, decay, beta
