"""
One layer's decoding state for the kernel tests of the delta rules, with the recurrence in float64 beside it, token by
token; see `cases.py`, on whose `Layer` it builds, for what is poisoned and what is compared.
"""

from __future__ import annotations

import torch
from cases import BF16, F32, NAN, Layer, poisoned_memory, same_bits

import replayssm_kernels as kernels


class DeltaLayer(Layer):
    """
    Args:
        shape: (batch, value heads, key heads, K, V, slots).
        kda: whether g is one number per key channel.
        conv: kernel size; 0 runs `gated_delta_step` on given q, k, v, else `gated_delta_decode` on raw inputs.
        memory: how slow the decay is; g is -rand() / memory. beta is in (0, `most`).
        The others as for `Layer`.
    """

    def __init__(self, shape, device="cpu", dtype=F32, checkpoint_dtype=F32, *, kda=False, conv=0, ring=None,
                 conv_bias=False, activation="silu", memory=2.0, most=1.0, seen=0, first=0, reach=0,
                 seed=0):  # fmt: skip
        self.shape, self.device, self.dtype, self.conv, self.reach = shape, torch.device(device), dtype, conv, reach
        batch, heads, key_heads, key_dim, value_dim, slots = shape
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.kda, self.activation, self.memory, self.most, self.calls = kda, activation, memory, most, 0
        self.checkpoint = self.randn(batch, heads, key_dim, value_dim).to(checkpoint_dtype)
        full = lambda *size, dtype=dtype: torch.full(size, NAN, device=device, dtype=dtype)  # noqa: E731
        self.k_buffer = full(batch, key_heads, slots, key_dim)
        self.u_buffer = full(batch, heads, slots, value_dim, dtype=F32)
        self.channels_of_g = (key_dim,) if kda else ()
        self.g_buffer = full(batch, heads, slots, *self.channels_of_g, dtype=F32)
        rows = torch.arange(batch, device=device)
        self.seen = torch.full_like(rows, seen)
        self.first = (3 * rows * bool(first) + first) % slots
        self.held = torch.zeros_like(rows)
        # In float64: the checkpoint, the state after all tokens, and k, u and g of the held tokens, oldest first.
        self.base = self.state = self.checkpoint.double()
        sizes = [(key_heads, key_dim), (heads, value_dim), (heads, *self.channels_of_g)]
        self.tokens = [full(batch, slots, *size, dtype=torch.float64) for size in sizes]
        if conv:
            self.channels = 2 * key_heads * key_dim + heads * value_dim
            ring = conv if ring is None else ring
            self.weight = (self.randn(self.channels, conv) / conv**0.5).to(dtype)
            self.bias = self.randn(self.channels).mul(0.2).to(dtype) if conv_bias else None
            self.history = self.randn(batch, conv - 1 + reach, self.channels).to(dtype)  # raw inputs, newest last
            self.conv_inputs = full(batch, ring, self.channels)
            for i in range(1, conv + reach):  # token seen - i
                if seen - i >= 0:
                    self.conv_inputs[:, (seen - i) % ring] = self.history[:, -i]
                else:
                    self.history[:, -i] = 0
            self.poison()

    def buffers(self):
        return self.k_buffer, self.u_buffer, self.g_buffer

    def owned(self):
        names = ("k_buffer", "u_buffer", "g_buffer", "checkpoint")
        return {name: getattr(self, name) for name in names}

    def advance(self, tokens, count=None, fold=0, *, fused=None, out_dtype=F32):
        """(kernel's output, float64 output), (b, t, h, V) in float64; zeros from a row's `count` on in both."""
        batch, heads, key_heads, key_dim, value_dim, slots = self.shape
        self.calls += 1
        count, fold = self.per_row(tokens if count is None else count), self.per_row(fold)
        real = torch.arange(tokens, device=self.device) < count[:, None]
        g = -self.rand(batch, tokens, heads, *self.channels_of_g) / self.memory
        beta = (self.randn(batch, tokens, heads).sigmoid() * self.most).to(self.dtype)
        new = {"g": self.hide(g, real), "beta": self.hide(beta, real)}
        options = {"fused": fused, "out_dtype": out_dtype}
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
        arguments = {"positions": self.positions(count, fold)} | new | self.owned()
        before = {name: tensor.clone() for name, tensor in arguments.items() if tensor is not None}
        with poisoned_memory():
            y = (kernels.gated_delta_decode if self.conv else kernels.gated_delta_step)(**arguments, **options)
        assert y.shape == (batch, tokens, heads, value_dim) and y.dtype == (out_dtype or self.dtype)
        self.check_writes(before, arguments, count, fold)

        # The new tokens as the buffer holds them: g as given, k as given or convolved, u up to rounding in float32.
        expected, u, state = self.new_tokens(self.state, q, k, v, beta, g, count)
        place = torch.where(real, self.held[:, None] + torch.arange(tokens, device=self.device), 0)
        row, slot = torch.arange(batch, device=self.device)[:, None], (self.first[:, None] + place) % slots
        got = [buffer.transpose(1, 2)[row, slot] for buffer in self.buffers()]
        # (On a GPU, two kernels may round a number that lies between two 16-bit ones differently.)
        twice_rounded = bool(self.conv) and self.dtype != F32 and self.device.type != "cpu"
        share = 1e-6 if self.conv else 0.0
        k_slack = torch.finfo(self.dtype).eps if twice_rounded else share
        for buffered, wanted, relative, absolute in (
            (got[0], k, k_slack, share),
            (got[1], u, 2e-2 if twice_rounded else 3e-6, 2e-2 if twice_rounded else 3e-6),
            (got[2], g, 0.0, 0.0),
        ):
            mask = ~real.view(*real.shape, *[1] * (wanted.dim() - 2))
            buffered, wanted = buffered.double().masked_fill(mask, 0), wanted.double().masked_fill(mask, 0)
            assert bool(((buffered - wanted).abs() <= absolute + relative * wanted.abs()).all()), "appended inputs"
        if twice_rounded:
            k, u = got[0], got[1].double()
            state = self.recurrence(self.state, k, u, g, count)
        self.state = state
        for held, token in zip(self.tokens, (k, u, g)):
            self.scatter(held, token.double(), self.held, count)
        if self.conv:
            newest = count[:, None] + torch.arange(self.history.shape[1], device=self.device)
            history = torch.cat([self.history, raw], 1)
            self.history = history.gather(1, newest[..., None].expand(-1, -1, self.channels))
        self.seen = self.seen + count
        self.held = self.held + count
        self.folded(fold)
        hidden = ~real[:, :, None, None]
        return y.double().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def flush(self, fold):
        """A flush alone."""
        fold = self.per_row(fold)
        arguments = {"positions": self.positions(7, fold)} | self.owned()
        before = {name: tensor.clone() for name, tensor in arguments.items()}
        assert kernels.gated_delta_fold(**arguments, inplace=True) is self.checkpoint
        self.check_writes(before, arguments, self.per_row(0), fold)
        self.folded(fold)

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

    def check_writes(self, before, after, count, fold):
        """What a call must not write is as it was."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        written = (place >= self.held[:, None]) & (place < (self.held + count)[:, None])
        may = {
            "k_buffer": written[:, None, :, None],
            "u_buffer": written[:, None, :, None],
            "g_buffer": written[:, None, :, None] if self.kda else written[:, None],
            "checkpoint": (fold > 0)[:, None, None, None],
        }
        if "conv_inputs" in before:
            ring = self.conv_inputs.shape[1]
            behind = (torch.arange(ring, device=self.device) - self.seen[:, None]) % ring  # slot of new token `behind`
            may["conv_inputs"] = (behind < count[:, None])[..., None]
        for name, old in before.items():
            assert same_bits(old, after[name], may.get(name)), f"{name} was written where it must not be"

    def check_rounding(self, got, exact):
        """`got`, a checkpoint, is `exact`, rounded to 16 bits. (Triton's interpreter cuts bfloat16 off.)"""
        dtype = self.checkpoint.dtype
        share = 1.0 if dtype == BF16 and self.device.type == "cpu" else 0.5
        bar = exact.abs() * (share * torch.finfo(dtype).eps) + 3e-6 * exact.abs().amax() + 1e-7
        assert bool(((got - exact).abs() <= bar).all()), "rounded values"

    def poison(self):
        """NaN into every slot that holds no token, and into raw inputs that no convolution can still reach."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        unused = place >= self.held[:, None]  # (b, s)
        for buffer in self.buffers():
            buffer.masked_fill_(unused.view(unused.shape[0], 1, slots, *[1] * (buffer.dim() - 3)), NAN)
        if self.conv:
            ring = self.conv_inputs.shape[1]
            age = (self.seen[:, None] - 1 - torch.arange(ring, device=self.device)) % ring  # 0: the newest
            gone = (age >= self.conv - 1 + self.reach) | (age >= self.seen[:, None])
            self.conv_inputs.masked_fill_(gone[..., None], NAN)

    def whole_state(self):
        """(kernel's, float64's) state after all tokens."""
        positions = self.positions(0, self.held)
        with poisoned_memory():
            state = kernels.gated_delta_fold(positions, **self.owned())
        assert state.dtype == F32
        return state.double(), self.state
