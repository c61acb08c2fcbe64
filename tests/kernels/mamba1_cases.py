"""
One Mamba-1 layer's decoding state for the kernel tests, with the recurrence in float64 beside it, token by token: what
`cases.Layer` is for Mamba-2. Everything that must not be read is NaN; what must not be written is compared bit for bit.
"""

from __future__ import annotations

import torch
from cases import F32, NAN, Layer, poisoned_memory, same_bits
from torch.nn import functional as F

import replayssm_kernels as kernels


class Mamba1Layer(Layer):
    """
    Args:
        shape: (batch, groups, channels of a group, state, slots).
        raw_dt: whether the kernel applies bias and softplus.
        first: the slot of the first token (of row i: 3 i further).
    """

    def __init__(self, shape, device="cpu", dtype=F32, checkpoint_dtype=F32, *, raw_dt=True, D=True, gate=True, first=0,
                 seed=0):  # fmt: skip
        self.begin(shape, device, dtype, 0, 0, seed)
        batch, groups, channels, state, slots = shape
        self.gate, self.raw_dt = gate, raw_dt
        self.start_checkpoint(self.randn(batch, groups, state, channels), checkpoint_dtype)
        self.x_buffer, self.dt_buffer = (self.full(batch, groups, slots, channels) for _ in range(2))
        self.B_buffer = self.full(batch, groups, slots, state)
        self.A = -self.rand(groups, state, channels).add(0.02)
        self.D = self.randn(groups, channels) if D else None
        self.dt_bias = self.randn(groups, channels).sub(1.0) if raw_dt else None
        self.hold_nothing(0, first, [(groups, size) for size in (channels, state, channels)])

    scale_dim = -2

    def positions(self, count, fold):
        never_read = torch.full_like(self.held, -(2**31))
        rows = [
            never_read if self.rounding_seed is None else self.seen,
            self.first,
            self.held,
            self.per_row(count),
            self.per_row(fold),
        ]
        return torch.stack(rows).to(torch.int32)

    def bar(self, tokens):
        return self.state_bar

    def fold_call(self):
        names = (*self.buffer_names, "A", "checkpoint", "dt_bias")
        return kernels.mamba1_fold, {name: getattr(self, name) for name in names}

    def final_dt(self, dt):
        return F.softplus(dt.double() + self.dt_bias.double()) if self.raw_dt else dt.double()

    def new_tokens(self, tokens):
        """x, B, C, dt and z as they are given to a kernel."""
        batch, groups, channels, state, _ = self.shape
        x, z = (self.randn(batch, tokens, groups, channels).to(self.dtype) for _ in range(2))
        B = (self.randn(batch, tokens, groups, state) / state**0.5).to(self.dtype)
        C = self.randn(batch, tokens, groups, state).to(self.dtype)
        dt = self.randn(batch, tokens, groups, channels) if self.raw_dt else self.rand(batch, tokens, groups, channels)
        return x, B, C, dt.to(self.dtype), z if self.gate else None

    def hide(self, tensor, real):
        """
        The tensor with NaN in tokens that are not real; in every second call a view into a wider one of NaN, in every
        fourth call of every second element.
        """
        tensor = tensor.masked_fill(~real[..., None, None], NAN)
        if self.calls % 2:
            return tensor
        wide = torch.full((*tensor.shape[:3], 2 * tensor.shape[3] + 3), NAN, device=self.device, dtype=tensor.dtype)
        view = wide[..., 1:-2:2] if self.calls % 4 else wide[..., 3 : 3 + tensor.shape[3]]
        return view.copy_(tensor)

    def advance(self, tokens, count=None, fold=0, *, out_dtype=F32):
        """(kernel's output, float64 output), (b, t, g, p) in float64; zeros from a row's `count` on in both."""
        batch, groups, channels, _, slots = self.shape
        self.calls += 1
        count, fold = self.per_row(tokens if count is None else count), self.per_row(fold)
        real = torch.arange(tokens, device=self.device) < count[:, None]
        x, B, C, dt, z = self.new_tokens(tokens)
        names = ("x", "B", "C", "dt", "z")
        new = {name: self.hide(t, real) for name, t in zip(names, (x, B, C, dt, z)) if t is not None}
        arguments = {"positions": self.positions(count, fold), **new, "x_buffer": self.x_buffer,
                     "B_buffer": self.B_buffer, "dt_buffer": self.dt_buffer, "A": self.A, "D": self.D,
                     "checkpoint": self.checkpoint, "dt_bias": self.dt_bias, **self.storage()}  # fmt: skip
        before = {name: tensor.clone() for name, tensor in arguments.items() if torch.is_tensor(tensor)}
        with poisoned_memory():
            y = kernels.mamba1_step(**arguments, out_dtype=out_dtype)
        assert y.shape == (batch, tokens, groups, channels) and y.dtype == (out_dtype or self.dtype)
        self.check_writes(before, arguments, count, fold)

        # The new tokens as the buffer holds them, but for those that this call folds: bit for bit as they were given.
        kept = real & (self.held[:, None] + torch.arange(tokens, device=self.device) >= fold[:, None])
        for buffered, given in zip(self.appended(real), (x, B, dt), strict=True):
            assert same_bits(buffered, given, but=~kept[..., None, None]), "appended inputs"
        new = x.double(), B.double(), self.final_dt(dt)
        expected, self.state = self.recurrence(self.state, *new, count, C.double(), z)
        self.take_up(new, count, fold)
        hidden = ~real[:, :, None, None]
        return y.double().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def recurrence(self, state, x, B, dt, count, C=None, z=None):
        """
        S <- exp(A dt) S + dt x B, y = (S C + D x) silu(z), in float64, first `count` tokens: (y, S), or S without C.
        """
        A, y = self.A.double(), []
        for t in range(x.shape[1] if C is not None else int(count.max())):
            new = state * (A * dt[:, t, :, None]).exp() + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, :, :, None]
            state = torch.where((t < count)[:, None, None, None], new, state)
            if C is not None:
                out = (state * C[:, t, :, :, None]).sum(2)
                out = out if self.D is None else out + self.D.double() * x[:, t]
                y.append(out if z is None else out * F.silu(z[:, t].double()))
        return state if C is None else (torch.stack(y, 1), state)
