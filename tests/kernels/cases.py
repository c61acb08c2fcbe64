"""
One layer's decoding state for the kernel tests, with the recurrence in float64 beside it, token by token.

`Layer.advance` makes random inputs for a call, runs the kernel on the device and the recurrence in float64, and returns
both outputs. Everything that must not be read is NaN: slots of the buffer that hold no token, slots of the ring behind
which no convolution looks, inputs of tokens from a row's count on, the gaps between strided inputs, and memory that the
kernels allocate. Everything that must not be written is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import replayssm_kernels as kernels


NAN = math.nan
INTERPRETED = kernels.is_available("cpu")
needs = pytest.mark.parametrize(
    "device", [*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
)
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}  # with a scale for each row of the state


def run_in_interpreter(file: str, marked: str = "not slow") -> None:
    """
    Runs the tests of a file, slow ones or the others, in a process of its own, since the interpreter must be chosen
    before triton is imported.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    command += ["-m", f"{marked} and not gpu and not multigpu"]
    run = subprocess.run(
        command,
        env=env | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    print(run.stdout.splitlines()[-1])


@contextlib.contextmanager
def poisoned_memory():
    """`torch.empty` and its kin are filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def bits(tensor):
    """As integers, so that NaN equals itself and zero has a sign."""
    return tensor.contiguous().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def same_bits(a, b, but=None):
    """Whether both are equal bit for bit, `but` for the elements that a mask names."""
    different = bits(a) != bits(b)
    return not bool((different if but is None else different & ~but).any())


class Layer:
    """
    Args:
        shape: (batch, heads, groups, head_dim, state, slots).
        conv: kernel size; 0 runs `mamba2_step` on given x, B, C, else `mamba2_decode` on raw inputs.
        ring: slots of the convolution's ring.
        raw_dt: whether the kernel applies bias, softplus and limits.
        checkpoint_dtype: of 8 bits with a scale for each row, the numbers along `scale_dim`.
        seen, first: tokens before the first call, and the slot of the first token (of row i: 3 i further).
        reach: by how many tokens `crop` may go back at once; the ring needs K - 1 + reach slots.
    """

    def __init__(self, shape, device="cpu", dtype=F32, checkpoint_dtype=F32, *, conv=0, ring=None, raw_dt=True, D=True,
                 conv_bias=True, activation="silu", limits=(0.0, math.inf), seen=0, first=0, reach=0,
                 seed=0):  # fmt: skip
        self.begin(shape, device, dtype, conv, reach, seed)
        batch, heads, groups, head_dim, state, slots = shape
        self.raw_dt, self.activation, self.limits = raw_dt, activation, limits
        self.start_checkpoint(self.randn(batch, heads, head_dim, state), checkpoint_dtype)
        self.x_buffer = self.full(batch, heads, slots, head_dim)
        self.B_buffer = self.full(batch, groups, slots, state)
        self.dt_buffer = self.full(batch, heads, slots, dtype=F32)
        self.A = -self.rand(heads).add(0.02)
        self.D = self.randn(heads) if D else None
        self.dt_bias = self.randn(heads).sub(1.0) if raw_dt else None
        self.hold_nothing(seen, first, [(heads, head_dim), (groups, state), (heads,)])
        if conv:
            self.start_convolution(heads * head_dim + 2 * groups * state, ring, conv_bias, seen)

    # What every recurrence shares. Its own are the buffers, `advance`, `fold_call` and `recurrence`.

    buffer_names = ("x_buffer", "B_buffer", "dt_buffer")
    scale_dim = -1

    def start_checkpoint(self, state, dtype):
        self.scale, self.rounding_seed = None, None
        if dtype in GREATEST:
            self.scale = state.abs().amax(self.scale_dim, keepdim=True) / GREATEST[dtype]
            state = state / self.scale
            state = state.round() if dtype == INT8 else state
        self.checkpoint = state.to(dtype)

    def stored(self):
        """The state that the checkpoint holds, float64."""
        state = self.checkpoint.float().double()
        return state if self.scale is None else state * self.scale.double()

    def storage(self):
        """The arguments of a call that say how the checkpoint is stored."""
        options = {} if self.scale is None else {"scale": self.scale}
        return options if self.rounding_seed is None else options | {"seed": self.rounding_seed}

    def begin(self, shape, device, dtype, conv, reach, seed):
        self.shape, self.device, self.dtype, self.conv, self.reach = shape, torch.device(device), dtype, conv, reach
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.calls = 0

    def full(self, *size, dtype=None):
        """NaN, in the dtype of the activations if no other is given."""
        return torch.full(size, NAN, device=self.device, dtype=dtype or self.dtype)

    def hold_nothing(self, seen, first, sizes):
        """`sizes`: of what the buffers hold of a token."""
        batch, slots = self.shape[0], self.shape[-1]
        rows = torch.arange(batch, device=self.device)
        self.seen = torch.full_like(rows, seen)
        self.first = (3 * rows * bool(first) + first) % slots
        self.held = torch.zeros_like(rows)
        # In float64: the checkpoint, the state after all tokens, and the held tokens, oldest first.
        self.base = self.state = self.stored()
        self.tokens = [self.full(batch, slots, *size, dtype=torch.float64) for size in sizes]

    def start_convolution(self, channels, ring, bias, seen):
        conv, self.channels = self.conv, channels
        ring = conv if ring is None else ring
        self.weight = (self.randn(channels, conv) / conv**0.5).to(self.dtype)
        self.bias = self.randn(channels).mul(0.2).to(self.dtype) if bias else None
        # Raw inputs, newest last.
        self.history = self.randn(self.shape[0], conv - 1 + self.reach, channels).to(self.dtype)
        self.conv_inputs = self.full(self.shape[0], ring, channels)
        for i in range(1, conv + self.reach):  # token seen - i
            if seen - i >= 0:
                self.conv_inputs[:, (seen - i) % ring] = self.history[:, -i]
            else:
                self.history[:, -i] = 0
        self.poison()

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator, device=self.device)

    def rand(self, *size):
        return torch.rand(*size, generator=self.generator, device=self.device)

    def per_row(self, value):
        return torch.as_tensor(value, device=self.device).expand(self.shape[0])

    def positions(self, count, fold):
        rows = [self.seen, self.first, self.held, self.per_row(count), self.per_row(fold)]
        return torch.stack(rows).to(torch.int32)

    def buffers(self):
        return tuple(getattr(self, name) for name in self.buffer_names)

    def bar(self, tokens):
        """
        The greatest error of an output in float32. (A window takes float32 factors as two bfloat16 terms. On a GPU, C
        may leave the convolution rounded to the other neighbour.)
        """
        if self.conv and self.dtype != F32 and self.device.type != "cpu":
            return 1e-3
        return self.state_bar if tokens == 1 or self.dtype == F32 else 3e-5

    @property
    def state_bar(self):
        """The greatest relative error of a state in float32."""
        return 1e-6

    def fold_call(self):
        """The function that folds, and its arguments but for the positions."""
        arguments = {name: getattr(self, name) for name in (*self.buffer_names, "A", "checkpoint")}
        return kernels.mamba2_fold, arguments

    def hide(self, tensor, real):
        """The tensor with NaN in tokens that are not real; in every second call a view into a wider one of NaN."""
        tensor = tensor.masked_fill(~real.view(*real.shape, *[1] * (tensor.dim() - 2)), NAN)
        if self.calls % 2:
            return tensor
        flat = tensor.flatten(2)
        wide = torch.full((*flat.shape[:2], flat.shape[2] + 5), NAN, device=self.device, dtype=tensor.dtype)
        wide[..., 3:-2] = flat
        return wide[..., 3:-2].unflatten(2, tensor.shape[2:])

    def advance(self, tokens, count=None, fold=0, *, fused=None, out_dtype=F32):
        """(kernel's output, float64 output), (b, t, h, p) in float64; zeros from a row's `count` on in both."""
        batch, heads, groups, head_dim, state, slots = self.shape
        self.calls += 1
        count, fold = self.per_row(tokens if count is None else count), self.per_row(fold)
        real = torch.arange(tokens, device=self.device) < count[:, None]
        raw_dt = self.randn(batch, tokens, heads) if self.raw_dt else self.rand(batch, tokens, heads).mul(0.5)
        raw_dt = raw_dt.to(self.dtype)
        dt = raw_dt.double()
        if self.raw_dt:
            dt = F.softplus(dt + self.dt_bias.double()).clamp(*self.limits)
        common = {"x_buffer": self.x_buffer, "B_buffer": self.B_buffer, "dt_buffer": self.dt_buffer, "A": self.A,
                  "D": self.D, "checkpoint": self.checkpoint, "dt_bias": self.dt_bias, **self.storage()}  # fmt: skip
        options = {"dt_min": self.limits[0], "dt_max": self.limits[1], "fused": fused, "out_dtype": out_dtype}
        new = {"dt": self.hide(raw_dt, real)}
        if self.conv:
            raw = self.randn(batch, tokens, self.channels).to(self.dtype)
            new |= {"xBC": self.hide(raw, real), "conv_inputs": self.conv_inputs, "conv_weight": self.weight,
                    "conv_bias": self.bias}  # fmt: skip
            options["activation"] = self.activation
            exact = self.convolved(raw)
            mixed = exact
            if self.dtype != F32:  # rounded as the kernels round, which is checked apart
                mixed = kernels.causal_conv(self.positions(count, fold), raw, self.conv_inputs.clone(), self.weight,
                                            self.bias, self.activation).double()  # fmt: skip
                self.check_rounding(mixed.masked_fill(~real[..., None], 0), exact.masked_fill(~real[..., None], 0))
            x, B, C = mixed.split([heads * head_dim, groups * state, groups * state], -1)
            x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
        else:
            x = self.randn(batch, tokens, heads, head_dim).to(self.dtype)
            B = (self.randn(batch, tokens, groups, state) / state**0.5).to(self.dtype)
            C = self.randn(batch, tokens, groups, state).to(self.dtype)
            new |= {"x": self.hide(x, real), "B": self.hide(B, real), "C": self.hide(C, real)}
        arguments = {"positions": self.positions(count, fold)} | new | common
        before = {name: tensor.clone() for name, tensor in arguments.items() if torch.is_tensor(tensor)}
        with poisoned_memory():
            y = (kernels.mamba2_decode if self.conv else kernels.mamba2_step)(**arguments, **options)
        assert y.shape == (batch, tokens, heads, head_dim) and y.dtype == (out_dtype or self.dtype)
        self.check_writes(before, arguments, count, fold)

        got = self.appended(real)
        # As given; behind a convolution up to rounding in float32. (On a GPU, two kernels may round a number that lies
        # between two 16-bit ones differently.)
        twice_rounded = bool(self.conv) and self.dtype != F32 and self.device.type != "cpu"
        share = 1e-6 if self.conv else 0.0
        slack = torch.finfo(self.dtype).eps if twice_rounded else share
        for buffered, wanted, relative, absolute in zip(got, (x, B, dt), (slack, slack, 1e-6), (share, share, 0.0)):
            self.check_appended(buffered, wanted, real, relative, absolute)
        if twice_rounded:
            x, B = got[0], got[1]
        new_tokens = x.double(), B.double(), dt
        expected, self.state = self.recurrence(self.state, *new_tokens, count, C.double())
        self.take_up(new_tokens, count, fold, raw if self.conv else None)
        hidden = ~real[:, :, None, None]
        return y.double().masked_fill(hidden, 0), expected.masked_fill(hidden, 0)

    def appended(self, real):
        """What the buffers hold of the new tokens, each (b, t, ...)."""
        batch, tokens = real.shape
        place = torch.where(real, self.held[:, None] + torch.arange(tokens, device=self.device), 0)
        row, slot = torch.arange(batch, device=self.device)[:, None], (self.first[:, None] + place) % self.shape[-1]
        return [buffer.transpose(1, 2)[row, slot] for buffer in self.buffers()]

    @staticmethod
    def check_appended(buffered, wanted, real, relative, absolute):
        mask = ~real.view(*real.shape, *[1] * (wanted.dim() - 2))
        buffered, wanted = buffered.double().masked_fill(mask, 0), wanted.double().masked_fill(mask, 0)
        assert bool(((buffered - wanted).abs() <= absolute + relative * wanted.abs()).all()), "appended inputs"

    def take_up(self, new_tokens, count, fold, raw=None):
        """The reference's share in a call: its new tokens are held, and some of the oldest folded."""
        for held, token in zip(self.tokens, new_tokens):
            self.scatter(held, token.double(), self.held, count)
        if raw is not None:
            newest = count[:, None] + torch.arange(self.history.shape[1], device=self.device)
            history = torch.cat([self.history, raw], 1)
            self.history = history.gather(1, newest[..., None].expand(-1, -1, self.channels))
        self.seen = self.seen + count
        self.held = self.held + count
        self.folded(fold)

    def flush(self, fold):
        """A flush alone."""
        fold, (function, owned) = self.per_row(fold), self.fold_call()
        arguments = {"positions": self.positions(7, fold)} | owned | self.storage()
        before = {name: tensor.clone() for name, tensor in arguments.items() if torch.is_tensor(tensor)}
        assert function(**arguments, inplace=True) is self.checkpoint
        self.check_writes(before, arguments, self.per_row(0), fold)
        self.folded(fold)

    def croppable(self):
        """How many of each row's newest tokens can be taken back: raw inputs for a convolution must be left behind."""
        left = (~self.history[..., 0].isnan()).sum(1) - (self.conv - 1)
        return torch.minimum(left, self.seen)

    def crop(self, tokens):
        """Takes back the newest tokens of each row."""
        tokens = self.per_row(tokens)
        assert bool((tokens <= self.held).all()) and (not self.conv or bool((tokens <= self.croppable()).all()))
        self.held, self.seen = self.held - tokens, self.seen - tokens
        if self.conv:
            older = torch.arange(self.history.shape[1], device=self.device) - tokens[:, None]
            lost = (older < 0)[..., None]
            self.history = self.history.gather(1, older.clamp(min=0)[..., None].expand(-1, -1, self.channels))
            self.history = self.history.masked_fill(lost, NAN)
        self.state = self.recurrence(self.base, *self.tokens, self.held)
        self.poison()

    def folded(self, fold):
        """The reference's share in a flush; a checkpoint of fewer bits is compared here and followed from then on."""
        slots = self.shape[-1]
        self.base = self.recurrence(self.base, *self.tokens, fold)
        self.first, self.held = (self.first + fold) % slots, self.held - fold
        shifted = (torch.arange(slots, device=self.device) + fold[:, None]) % slots
        self.tokens = [held[torch.arange(len(held), device=self.device)[:, None], shifted] for held in self.tokens]
        if self.checkpoint.dtype != F32:
            self.check_rounding(self.stored(), self.base)
            self.base = self.stored()
            self.state = self.recurrence(self.base, *self.tokens, self.held)
        self.poison()

    def convolved(self, raw):
        """The convolution with its activation, in float64."""
        window = torch.cat([self.history[:, self.reach :], raw], 1).double()
        taps = self.weight.double()
        out = sum(window[:, k : k + raw.shape[1]] * taps[:, k] for k in range(self.conv))
        out = out if self.bias is None else out + self.bias.double()
        return F.silu(out) if self.activation else out

    @staticmethod
    def scatter(held, new, start, count):
        for t in range(new.shape[1]):
            rows = (t < count).nonzero().squeeze(1)
            held[rows, start[rows] + t] = new[rows, t]

    def recurrence(self, state, x, B, dt, count, C=None):
        """S <- exp(A dt) S + dt x B^T, y = S C + D x, in float64, first `count` tokens: (y, S), or S without C."""
        per_group = self.shape[1] // self.shape[2]
        A, D = self.A.double(), None if self.D is None else self.D.double()
        y = []
        for t in range(x.shape[1] if C is not None else int(count.max())):
            new = state * (A * dt[:, t]).exp()[..., None, None]
            new += (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t].repeat_interleave(per_group, 1)[:, :, None]
            state = torch.where((t < count)[:, None, None, None], new, state)
            if C is not None:
                out = (state @ C[:, t].repeat_interleave(per_group, 1)[..., None]).squeeze(-1)
                y.append(out if D is None else out + D[:, None] * x[:, t])
        return state if C is None else (torch.stack(y, 1), state)

    def check_writes(self, before, after, count, fold):
        """What a call must not write is as it was."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        written = (place >= self.held[:, None]) & (place < (self.held + count)[:, None])
        may = {name: self.of_slots(written, getattr(self, name)) for name in self.buffer_names}
        may["checkpoint"] = may["scale"] = (fold > 0)[:, None, None, None]
        if "conv_inputs" in before:
            ring = self.conv_inputs.shape[1]
            behind = (torch.arange(ring, device=self.device) - self.seen[:, None]) % ring  # slot of new token `behind`
            may["conv_inputs"] = (behind < count[:, None])[..., None]
        for name, old in before.items():
            assert same_bits(old, after[name], may.get(name)), f"{name} was written where it must not be"

    def check_rounding(self, got, exact):
        """`got` is `exact`, rounded to 16 bits or 8. (Triton's interpreter cuts bfloat16 off.)"""
        dtype = self.dtype if got.dim() == 3 else self.checkpoint.dtype  # (b, t, c) activations, or a checkpoint
        if dtype in GREATEST:
            scale = exact.abs().amax(self.scale_dim, keepdim=True) / GREATEST[dtype]
            step = scale if dtype == INT8 else torch.maximum(exact.abs() * 2**-3, scale * 2**-9)
            share = 0.5 if self.rounding_seed is None else 1.0
            if dtype == FP8 and self.device.type == "cpu":  # the interpreter cuts the smallest off
                step = torch.where(exact.abs() < scale * 2**-6, scale * 2**-8, step)
            # (The row's greatest number, of which all steps are made, is off by the error of float32 sums.)
            assert bool(((got - exact).abs() <= share * step + 1e-4 * step + 1e-5 * exact.abs() + 1e-6).all())
            return
        share = 1.0 if self.rounding_seed is not None or (dtype == BF16 and self.device.type == "cpu") else 0.5
        bar = exact.abs() * (share * torch.finfo(dtype).eps) + 3e-6 * exact.abs().amax() + 1e-7
        assert bool(((got - exact).abs() <= bar).all()), "rounded values"

    def poison(self):
        """NaN into every slot that holds no token, and into raw inputs that no convolution can still reach."""
        slots = self.shape[-1]
        place = (torch.arange(slots, device=self.device) - self.first[:, None]) % slots
        unused = place >= self.held[:, None]  # (b, s)
        for buffer in self.buffers():
            buffer.masked_fill_(self.of_slots(unused, buffer), NAN)
        if self.conv:
            ring = self.conv_inputs.shape[1]
            age = (self.seen[:, None] - 1 - torch.arange(ring, device=self.device)) % ring  # 0: the newest
            gone = (age >= self.conv - 1 + self.reach) | (age >= self.seen[:, None])
            self.conv_inputs.masked_fill_(gone[..., None], NAN)

    @staticmethod
    def of_slots(mask, buffer):
        """A mask (b, s) for a buffer (b, h, s, ...)."""
        return mask.view(len(mask), 1, -1, *[1] * (buffer.dim() - 3))

    def whole_state(self):
        """(kernel's, float64's) state after all tokens."""
        function, owned = self.fold_call()
        with poisoned_memory():
            state = function(self.positions(0, self.held), **owned, **self.storage())
        assert state.dtype == F32
        return state.double(), self.state


def error(got, expected):
    """Relative, of the worst row of the batch; infinite where something is not finite."""
    if not bool(torch.isfinite(got).all()):
        return math.inf
    rows = (got - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    return float((rows[0] / rows[1]).where(rows[0] > 0, 0).max())


def play(layer, lengths, *, seed=0, fused=None, flushes=0.5, slack=1):
    """
    Calls with windows of the given lengths, checked one by one and at the end. In each, some rows take all tokens and
    others a part or none, and some fold all, a part or none; a row whose buffer is full folds at least one. `slack`
    multiplies the bars, where a slow decay lets a state remember the roundings of thousands of tokens.
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
        how = {} if fused is None or tokens > 1 else {"fused": fused[call % len(fused)]}
        y, expected = layer.advance(tokens, count.to(layer.device), fold.to(layer.device), **how)
        assert error(y, expected) <= slack * layer.bar(tokens), f"call {call}: {error(y, expected):.1e}"
    assert error(*layer.whole_state()) <= slack * layer.state_bar, f"state: {error(*layer.whole_state()):.1e}"
