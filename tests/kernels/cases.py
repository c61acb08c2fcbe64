"""
One layer's decoding state for the kernel tests, with the recurrence in float64 beside it, token by token.

`Layer.advance` makes random inputs for a call, runs the kernel on the device and the recurrence in float64, and returns
both outputs. Everything that must not be read is NaN: unused slots of the buffer and of the ring, and inputs of tokens
from a row's count on.
"""

from __future__ import annotations

import math

import replayssm_kernels as kernels
import torch
from torch.nn import functional as F


NAN = math.nan


class Layer:
    """
    Args:
        shape: (batch, heads, groups, head_dim, state, slots).
        conv: kernel size; 0 runs `mamba2_step` on given x, B, C, else `mamba2_decode` on raw inputs.
        ring: slots of the convolution's ring.
        raw_dt: whether the kernel applies bias, softplus and limits.
    """

    def __init__(self, shape, device="cpu", dtype=torch.float32, checkpoint_dtype=torch.float32, *, conv=0, ring=None,
                 raw_dt=True, D=True, conv_bias=True, activation="silu", limits=(0.0, math.inf), seen=0, first=None,
                 seed=0):  # fmt: skip
        self.shape, self.device, self.dtype, self.conv = shape, device, dtype, conv
        batch, heads, groups, head_dim, state, slots = shape
        self.generator = torch.Generator().manual_seed(seed)
        self.raw_dt, self.activation, self.limits = raw_dt, activation, limits
        self.checkpoint = (self.randn(batch, heads, head_dim, state)).to(device, checkpoint_dtype)
        self.state = self.checkpoint.double().cpu()  # float64, after all tokens
        self.x_buffer = torch.full((batch, heads, slots, head_dim), NAN, device=device, dtype=dtype)
        self.B_buffer = torch.full((batch, groups, slots, state), NAN, device=device, dtype=dtype)
        self.dt_buffer = torch.full((batch, heads, slots), NAN, device=device)
        self.A = -self.rand(heads).add(0.02).to(device)
        self.D = self.randn(heads).to(device) if D else None
        self.dt_bias = self.randn(heads).sub(1.0).to(device) if raw_dt else None
        self.seen = torch.full((batch,), seen)
        self.first = torch.tensor([(3 * i + (first or 0)) % slots for i in range(batch)]) if first is not None else None
        if self.first is None:
            self.first = torch.zeros(batch, dtype=torch.long)
        self.held = torch.zeros(batch, dtype=torch.long)
        if conv:
            self.channels = heads * head_dim + 2 * groups * state
            ring = conv if ring is None else ring
            self.weight = (self.randn(self.channels, conv) / conv**0.5).to(device, dtype)
            self.bias = self.randn(self.channels).mul(0.2).to(device, dtype) if conv_bias else None
            self.history = self.randn(batch, max(conv - 1, 0), self.channels).to(dtype)  # newest raw inputs
            self.conv_inputs = torch.full((batch, ring, self.channels), NAN, device=device, dtype=dtype)
            for i in range(1, conv):  # token seen - i
                if seen - i >= 0:
                    self.conv_inputs[:, (seen - i) % ring] = self.history[:, -i].to(device)
                else:
                    self.history[:, -i] = 0

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator)

    def rand(self, *size):
        return torch.rand(*size, generator=self.generator)

    def positions(self, count, fold):
        rows = [self.seen, self.first, self.held, torch.as_tensor(count), torch.as_tensor(fold)]
        return torch.stack([row.expand(self.shape[0]) for row in rows]).to(self.device, torch.int32)

    def advance(self, tokens, count=None, fold=0, *, fused=None, out_dtype=torch.float32, record=True):
        """(kernel's output, float64 output), (b, t, h, p) on the CPU, float64; zeros from a row's `count` on in both."""
        batch, heads, groups, head_dim, state, slots = self.shape
        count = torch.as_tensor(tokens if count is None else count).expand(batch)
        fold = torch.as_tensor(fold).expand(batch)
        real = torch.arange(tokens) < count[:, None]
        raw_dt = self.randn(batch, tokens, heads) if self.raw_dt else self.rand(batch, tokens, heads).mul(0.5)
        dt = raw_dt = raw_dt.to(self.dtype)
        if self.raw_dt:
            dt = F.softplus(raw_dt.double() + self.dt_bias.cpu().double()).clamp(*self.limits)
        common = (self.x_buffer, self.B_buffer, self.dt_buffer, self.A, self.D, self.checkpoint)
        options = {"dt_bias": self.dt_bias, "dt_min": self.limits[0], "dt_max": self.limits[1], "fused": fused,
                   "out_dtype": out_dtype}  # fmt: skip
        hide = lambda tensor: tensor.masked_fill(~real.view(*real.shape, *[1] * (tensor.dim() - 2)), NAN).to(self.device)  # noqa: E731
        positions = self.positions(count, fold)
        if self.conv:
            xBC = self.randn(batch, tokens, self.channels).to(self.dtype)
            y = kernels.mamba2_decode(
                positions, hide(xBC), hide(raw_dt), self.conv_inputs, self.weight, self.bias, *common,
                activation=self.activation, **options,
            )  # fmt: skip
            window = torch.cat([self.history, xBC], 1).double()
            out = sum(
                window[:, k : k + tokens] * self.weight.cpu().double()[:, k] for k in range(self.conv)
            )  # (b, t, c)
            out = out if self.bias is None else out + self.bias.cpu().double()
            out = F.silu(out) if self.activation else out
            out = out.to(self.dtype)
            x, B, C = out.split([heads * head_dim, groups * state, groups * state], -1)
            x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
            newest = count[:, None] + torch.arange(self.conv - 1)
            self.history = torch.cat([self.history, xBC], 1).gather(1, newest[..., None].expand(-1, -1, self.channels))
        else:
            x = self.randn(batch, tokens, heads, head_dim).to(self.dtype)
            B = (self.randn(batch, tokens, groups, state) / state**0.5).to(self.dtype)
            C = self.randn(batch, tokens, groups, state).to(self.dtype)
            y = kernels.mamba2_step(positions, hide(x), hide(B), hide(C), hide(raw_dt), *common, **options)
        expected = self.recurrence(x.double(), B.double(), C.double(), dt.double(), count)
        self.seen = self.seen + count
        self.held = self.held + count - fold
        self.first = torch.where(self.held > 0, (self.first + fold) % slots, 0)
        self.poison()
        hidden = ~real[:, :, None, None]
        return y.double().cpu().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def recurrence(self, x, B, C, dt, count):
        """S <- exp(A dt) S + dt x B^T, y = S C + D x, in float64 for the real tokens of each row."""
        per_group = self.shape[1] // self.shape[2]
        A, D = self.A.double().cpu(), None if self.D is None else self.D.double().cpu()
        y = []
        for t in range(x.shape[1]):
            B_t, C_t = (v[:, t].repeat_interleave(per_group, 1) for v in (B, C))  # (b, h, n)
            new = self.state * (A * dt[:, t]).exp()[..., None, None]
            new = new + (dt[:, t, :, None] * x[:, t])[..., None] * B_t[:, :, None]
            self.state = torch.where((t < count)[:, None, None, None], new, self.state)
            out = (self.state @ C_t[..., None]).squeeze(-1)
            y.append(out if D is None else out + D[:, None] * x[:, t])
        return torch.stack(y, 1)

    def poison(self):
        """NaN into every slot that holds no token."""
        slots = self.shape[-1]
        place = (torch.arange(slots) - self.first[:, None]) % slots
        unused = (place >= self.held[:, None]).to(self.device)  # (b, s)
        self.x_buffer.masked_fill_(unused[:, None, :, None], NAN)
        self.B_buffer.masked_fill_(unused[:, None, :, None], NAN)
        self.dt_buffer.masked_fill_(unused[:, None], NAN)

    def whole_state(self):
        """(kernel's, float64's) state after all tokens."""
        positions = self.positions(0, self.held)
        state = kernels.mamba2_fold(positions, self.x_buffer, self.B_buffer, self.dt_buffer, self.A, self.checkpoint)
        return state.double().cpu(), self.state


def error(got, expected):
    """Relative, of the whole tensor; infinite where something is not finite."""
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got - expected).norm() / expected.norm())
