"""
One layer's decoding state for the kernel tests of the delta rules, with the recurrence in float64 beside it, token by
token; see `cases.py`, on whose `Layer` it builds, for what is poisoned and what is compared.
"""

from __future__ import annotations

import torch
from cases import F32, Layer, poisoned_memory

import replayssm_kernels as kernels


class DeltaLayer(Layer):
    """
    Args:
        shape: (batch, value heads, key heads, K, V, slots).
        kda: whether g is one number per key channel.
        conv: kernel size; 0 runs `gated_delta_step` on given q, k, v, else `gated_delta_decode` on raw inputs.
        memory: how slow the decay is; g is -rand() / memory, and with `forget` -forget for the second token of a call.
            beta is in (0, `most`).
        The others as for `Layer`.
    """

    def __init__(self, shape, device="cpu", dtype=F32, checkpoint_dtype=F32, *, kda=False, conv=0, ring=None,
                 conv_bias=False, activation="silu", memory=2.0, forget=None, most=1.0, seen=0, first=0, reach=0,
                 seed=0):  # fmt: skip
        self.begin(shape, device, dtype, conv, reach, seed)
        batch, heads, key_heads, key_dim, value_dim, slots = shape
        self.kda, self.activation, self.memory, self.forget, self.most = kda, activation, memory, forget, most
        self.start_checkpoint(self.randn(batch, heads, key_dim, value_dim), checkpoint_dtype)
        self.k_buffer = self.full(batch, key_heads, slots, key_dim)
        self.u_buffer = self.full(batch, heads, slots, value_dim, dtype=F32)
        self.channels_of_g = (key_dim,) if kda else ()
        self.g_buffer = self.full(batch, heads, slots, *self.channels_of_g, dtype=F32)
        self.hold_nothing(seen, first, [(key_heads, key_dim), (heads, value_dim), (heads, *self.channels_of_g)])
        if conv:
            self.start_convolution(2 * key_heads * key_dim + heads * value_dim, ring, conv_bias, seen)

    buffer_names = ("k_buffer", "u_buffer", "g_buffer")

    def owned(self):
        return {name: getattr(self, name) for name in (*self.buffer_names, "checkpoint")}

    scale_dim = -2

    @property
    def state_bar(self):
        """(A GPU multiplies matrices with sums that are cut off: over 256 channels an H200 was off by 2.3e-6.)"""
        return 3e-6 if self.device.type != "cpu" and self.shape[3] >= 256 else 1e-6

    def fold_call(self):
        return kernels.gated_delta_fold, self.owned()

    def advance(self, tokens, count=None, fold=0, *, out_dtype=F32):
        """(kernel's output, float64 output), (b, t, h, V) in float64; zeros from a row's `count` on in both."""
        batch, heads, key_heads, key_dim, value_dim, slots = self.shape
        self.calls += 1
        count, fold = self.per_row(tokens if count is None else count), self.per_row(fold)
        real = torch.arange(tokens, device=self.device) < count[:, None]
        g = -self.rand(batch, tokens, heads, *self.channels_of_g) / self.memory
        if self.forget is not None:
            g[:, 1:2] = -self.forget
        beta = (self.randn(batch, tokens, heads).sigmoid() * self.most).to(self.dtype)
        new = {"g": self.hide(g, real), "beta": self.hide(beta, real)}
        options = {"out_dtype": out_dtype}
        if self.conv:
            raw = self.randn(batch, tokens, self.channels).to(self.dtype)
            new |= {"qkv": self.hide(raw, real), "conv_inputs": self.conv_inputs, "conv_weight": self.weight,
                    "conv_bias": self.bias}  # fmt: skip
            options["activation"] = self.activation
            mixed = self.convolved(raw)
            if self.dtype != F32:  # rounded as the kernels round; how the convolution does it is checked elsewhere
                mixed = kernels.causal_conv(self.positions(count, fold), raw, self.conv_inputs.clone(), self.weight,
                                            self.bias, self.activation).double()  # fmt: skip
            q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], -1)
            q, k, v = q.unflatten(-1, (key_heads, -1)), k.unflatten(-1, (key_heads, -1)), v.unflatten(-1, (heads, -1))
        else:
            q, k = (self.randn(batch, tokens, key_heads, key_dim).to(self.dtype) for _ in range(2))
            v = self.randn(batch, tokens, heads, value_dim).to(self.dtype)
            new |= {"q": self.hide(q, real), "k": self.hide(k, real), "v": self.hide(v, real)}
        arguments = {"positions": self.positions(count, fold)} | new | self.owned() | self.storage()
        before = {name: tensor.clone() for name, tensor in arguments.items() if torch.is_tensor(tensor)}
        with poisoned_memory():
            y = (kernels.gated_delta_decode if self.conv else kernels.gated_delta_step)(**arguments, **options)
        assert y.shape == (batch, tokens, heads, value_dim) and y.dtype == (out_dtype or self.dtype)
        self.check_writes(before, arguments, count, fold)

        # The new tokens as the buffer holds them: g as given, k as given or convolved, u up to rounding in float32.
        expected, u, state = self.new_tokens(self.state, q, k, v, beta, g, count)
        got = self.appended(real)
        # (On a GPU, two kernels may round a number that lies between two 16-bit ones differently.)
        twice_rounded = bool(self.conv) and self.dtype != F32 and self.device.type != "cpu"
        share = 1e-6 if self.conv else 0.0
        k_slack = torch.finfo(self.dtype).eps if twice_rounded else share
        for buffered, wanted, relative, absolute in (
            (got[0], k, k_slack, share),
            (got[1], u, 2e-2 if twice_rounded else 3e-6, 2e-2 if twice_rounded else 3e-6),
            (got[2], g, 0.0, 0.0),
        ):
            self.check_appended(buffered, wanted, real, relative, absolute)
        if twice_rounded:
            k, u = got[0], got[1].double()
            state = self.recurrence(self.state, k, u, g, count)
        self.state = state
        self.take_up((k, u, g), count, fold, raw if self.conv else None)
        hidden = ~real[:, :, None, None]
        return y.double().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def units(self, x):
        """Of unit length and per value head: (b, m, K) -> (b, h, K) in float64."""
        x = x.double()
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x.repeat_interleave(self.shape[1] // self.shape[2], 1)

    def decayed(self, state, g):
        return state * (g.double()[..., None] if self.kda else g.double()[..., None, None]).exp()

    def new_tokens(self, state, q, k, v, beta, g, count):
        """y, u and the state after the first `count` tokens, from the recurrence as it is written down."""
        y, us = [], []
        for t in range(k.shape[1]):
            k_t, q_t = self.units(k[:, t]), self.units(q[:, t]) * q.shape[-1] ** -0.5
            new = self.decayed(state, g[:, t])
            u = beta[:, t, :, None].double() * (v[:, t].double() - (new * k_t[..., None]).sum(2))
            new = new + k_t[..., None] * u[:, :, None]
            state = torch.where((t < count)[:, None, None, None], new, state)
            us.append(u)
            y.append((new * q_t[..., None]).sum(2))
        return torch.stack(y, 1), torch.stack(us, 1), state

    def recurrence(self, state, k, u, g, count, C=None):
        """S <- exp(g) S + k u^T in float64, first `count` tokens."""
        for t in range(int(count.max())):
            new = self.decayed(state, g[:, t]) + self.units(k[:, t])[..., None] * u[:, t, :, None]
            state = torch.where((t < count)[:, None, None, None], new, state)
        return state
