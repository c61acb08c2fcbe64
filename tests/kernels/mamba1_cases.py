"""
One Mamba-1 layer's decoding state for the kernel tests, with the recurrence in float64 beside it, token by token: what
`cases.Layer` is for Mamba-2. Everything that must not be read is NaN; what must not be written is compared bit for bit.
"""

from __future__ import annotations

import torch
from cases import F32, NAN, error, poisoned_memory, same_bits
from torch.nn import functional as F

import replayssm_kernels as kernels


class Layer:
    """
    Args:
        shape: (batch, groups, channels of a group, state, slots).
        raw_dt: whether the kernel applies bias and softplus.
        first: the slot of the first token (of row i: 3 i further).
    """

    def __init__(self, shape, device="cpu", dtype=F32, checkpoint_dtype=F32, *, raw_dt=True, D=True, gate=True, first=0,
                 seed=0):  # fmt: skip
        self.shape, self.device, self.dtype, self.gate, self.raw_dt = shape, torch.device(device), dtype, gate, raw_dt
        batch, groups, channels, state, slots = shape
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.calls = 0
        self.checkpoint = self.randn(batch, groups, state, channels).to(checkpoint_dtype)
        full = lambda *size, dtype=dtype: torch.full(size, NAN, device=device, dtype=dtype)  # noqa: E731
        self.x_buffer, self.dt_buffer = (full(batch, groups, slots, channels) for _ in range(2))
        self.B_buffer = full(batch, groups, slots, state)
        self.A = -self.rand(groups, state, channels).add(0.02)
        self.D = self.randn(groups, channels) if D else None
        self.dt_bias = self.randn(groups, channels).sub(1.0) if raw_dt else None
        rows = torch.arange(batch, device=device)
        self.first = (3 * rows * bool(first) + first) % slots
        self.held = torch.zeros_like(rows)
        # In float64: the checkpoint, the state after all tokens, and the held tokens (x, B, final dt), oldest first.
        self.base = self.checkpoint.double()
        self.state = self.base
        self.tokens = [full(batch, slots, groups, size, dtype=torch.float64) for size in (channels, state, channels)]

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator, device=self.device)

    def rand(self, *size):
        return torch.rand(*size, generator=self.generator, device=self.device)

    def per_row(self, value):
        return torch.as_tensor(value, device=self.device).expand(self.shape[0])

    def positions(self, count, fold):
        never_read = torch.full_like(self.held, -(2**31))
        rows = [never_read, self.first, self.held, self.per_row(count), self.per_row(fold)]
        return torch.stack(rows).to(torch.int32)

    def buffers(self):
        return self.x_buffer, self.B_buffer, self.dt_buffer

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
                     "checkpoint": self.checkpoint, "dt_bias": self.dt_bias}  # fmt: skip
        before = {name: tensor.clone() for name, tensor in arguments.items() if tensor is not None}
        with poisoned_memory():
            y = kernels.mamba1_step(**arguments, out_dtype=out_dtype)
        assert y.shape == (batch, tokens, groups, channels) and y.dtype == (out_dtype or self.dtype)
        self.check_writes(before, arguments, count, fold)

        # The new tokens as the buffer holds them: bit for bit as they were given.
        place = torch.where(real, self.held[:, None] + torch.arange(tokens, device=self.device), 0)
        row, slot = torch.arange(batch, device=self.device)[:, None], (self.first[:, None] + place) % slots
        for buffer, given in zip(self.buffers(), (x, B, dt), strict=True):
            assert same_bits(buffer.transpose(1, 2)[row, slot], given, but=~real[..., None, None]), "appended inputs"
        new = x.double(), B.double(), self.final_dt(dt)
        expected, self.state = self.recurrence(self.state, *new, count, C.double(), z)
        for held, token in zip(self.tokens, new):
            for t in range(tokens):
                rows = (t < count).nonzero().squeeze(1)
                held[rows, self.held[rows] + t] = token[rows, t]
        self.held = self.held + count
        self.folded(fold)
        hidden = ~real[:, :, None, None]
        return y.double().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def flush(self, fold):
        """A flush alone."""
        fold = self.per_row(fold)
        arguments = {"positions": self.positions(7, fold), "x_buffer": self.x_buffer, "B_buffer": self.B_buffer,
                     "dt_buffer": self.dt_buffer, "A": self.A, "checkpoint": self.checkpoint,
                     "dt_bias": self.dt_bias}  # fmt: skip
        before = {name: tensor.clone() for name, tensor in arguments.items() if tensor is not None}
        assert kernels.mamba1_fold(**arguments, inplace=True) is self.checkpoint
        self.check_writes(before, arguments, self.per_row(0), fold)
        self.folded(fold)

    def crop(self, tokens):
        """Takes back the newest tokens of each row."""
        self.held = self.held - self.per_row(tokens)
        assert bool((self.held >= 0).all())
        self.state = self.recurrence(self.base, *self.tokens, self.held)
        self.poison()

    def folded(self, fold):
        """The reference's share in a flush; a 16-bit checkpoint is compared here and followed from then on."""
        slots = self.shape[-1]
        self.base = self.recurrence(self.base, *self.tokens, fold)
        self.first, self.held = (self.first + fold) % slots, self.held - fold
        shifted = (torch.arange(slots, device=self.device) + fold[:, None]) % slots
        self.tokens = [held[torch.arange(len(held), device=self.device)[:, None], shifted] for held in self.tokens]
        if self.checkpoint.dtype != F32:
            # Rounded once. (Triton's interpreter cuts bfloat16 off.)
            share = 1.0 if self.device.type == "cpu" else 0.5
            bar = self.base.abs() * (share * torch.finfo(self.checkpoint.dtype).eps) + 3e-6 * self.base.abs().amax()
            assert bool(((self.checkpoint.double() - self.base).abs() <= bar).all()), "a rounded checkpoint"
            self.base = self.checkpoint.double()
            self.state = self.recurrence(self.base, *self.tokens, self.held)
        self.poison()

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

    def check_writes(self, before, after, count, fold):
        """What a call must not write is as it was."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        written = ((place >= self.held[:, None]) & (place < (self.held + count)[:, None]))[:, None, :, None]
        may = {"x_buffer": written, "B_buffer": written, "dt_buffer": written,
               "checkpoint": (fold > 0)[:, None, None, None]}  # fmt: skip
        for name, old in before.items():
            assert same_bits(old, after[name], may.get(name)), f"{name} was written where it must not be"

    def poison(self):
        """NaN into every slot that holds no token."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        unused = (place >= self.held[:, None])[:, None, :, None]
        for buffer in self.buffers():
            buffer.masked_fill_(unused, NAN)

    def whole_state(self):
        """(kernel's, float64's) state after all tokens."""
        positions = self.positions(0, self.held)
        with poisoned_memory():
            state = kernels.mamba1_fold(positions, *self.buffers(), self.A, self.checkpoint, dt_bias=self.dt_bias)
        assert state.dtype == F32
        return state.double(), self.state


BAR = 1e-6  # relative, of a row's outputs


def play(layer, lengths, *, seed=0, flushes=0.5, slack=1):
    """
    Calls with windows of the given lengths, checked one by one and at the end. In each, some rows take all tokens and
    others a part or none, and some fold all, a part or none; a row whose buffer is full folds at least one.
    """
    random = torch.Generator().manual_seed(seed)
    batch, slots = layer.shape[0], layer.shape[-1]
    draw = lambda highest: (torch.rand(batch, generator=random) * (highest + 1)).long()  # noqa: E731
    for call, tokens in enumerate(lengths):
        held = layer.held.cpu()
        most = (slots - held).clamp(max=tokens)
        count = torch.where(torch.rand(batch, generator=random) < 0.6, most, draw(most))
        total = held + count
        fold = torch.where(torch.rand(batch, generator=random) < flushes, draw(total), 0)
        fold = torch.where(total == slots, torch.where(fold > 0, fold, total), fold)
        y, expected = layer.advance(tokens, count.to(layer.device), fold.to(layer.device))
        assert error(y, expected) <= slack * BAR, f"call {call}: {error(y, expected):.1e}"
    assert error(*layer.whole_state()) <= slack * BAR, f"state: {error(*layer.whole_state()):.1e}"
