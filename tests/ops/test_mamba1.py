"""The reference ops against the recurrence itself, token by token in float64, and against upstream's functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.models.mamba import modeling_mamba as upstream

from hf_replayssm.ops import mamba1


NAN = float("nan")


def random_layer(batch, groups, channels, state, slots, dtype=torch.float32, seed=0):
    """Buffers x, B, raw dt, then A, D, C (of every slot, laid out as B), dt_bias, z and a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, z, dt = (randn(batch, groups, slots, channels).to(dtype) for _ in range(3))
    B, C = (randn(batch, groups, slots, state).to(dtype) for _ in range(2))
    A = -torch.exp(randn(groups, state, channels)).float()
    D, dt_bias = randn(groups, channels).float(), randn(groups, channels).float() - 2
    return x, B, dt, A, D, C, dt_bias, z, randn(batch, groups, state, channels).float()


def recurrence(x, B, dt, A, D, C, dt_bias, z, S):
    """
    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t and y_t = (S_t C_t + D x_t) silu(z_t): all states (b, s + 1, g, n, p) and
    all outputs (b, s, g, p), float64.
    """
    x, B, dt, A, D, C, dt_bias, z, S = (tensor.double() for tensor in (x, B, dt, A, D, C, dt_bias, z, S))
    dt = F.softplus(dt + dt_bias[:, None])
    states, outputs = [S], []
    for t in range(x.shape[2]):
        x_t, B_t, dt_t, C_t = (tensor[:, :, t] for tensor in (x, B, dt, C))
        S = torch.exp(A * dt_t[:, :, None]) * S + B_t[..., None] * (dt_t * x_t)[:, :, None]
        states.append(S)
        outputs.append(((S * C_t[..., None]).sum(2) + D * x_t) * F.silu(z[:, :, t]))
    return torch.stack(states, 1), torch.stack(outputs, 1)


def new(tensor, start, end):
    """Slots (b, g, s, ..) -> new tokens (b, t, g, ..)."""
    return tensor[:, :, start:end].transpose(1, 2)


def poisoned(tensor, end):
    """NaN in every slot from each row's `end` on."""
    tensor = tensor.clone()
    for row, stop in enumerate(end):
        tensor[row, :, stop:] = NAN
    return tensor


def close(got, exact, bar=1e-5):
    torch.testing.assert_close(got.double(), exact, rtol=bar, atol=bar)


SHAPES = [(1, 24, 16), (2, 40, 16), (3, 5, 7), (1, 3, 64)]  # groups, channels, state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start, tokens", [(0, 1), (0, 7), (5, 1), (9, 6), (15, 1)])
def test_replay_and_fold_are_the_recurrence(shape, start, tokens):
    end, slots = start + tokens, 17
    x, B, dt, A, D, C, dt_bias, z, S = random_layer(3, *shape, slots)
    states, outputs = recurrence(x, B, dt, A, D, C, dt_bias, z, S)
    x, B, dt = (poisoned(tensor, [end] * 3) for tensor in (x, B, dt))
    gate = new(z, start, end)

    y = mamba1.replay(new(C, start, end), x, B, dt, A, D, S, start, end, dt_bias=dt_bias, z=gate)
    close(y, outputs[:, start:end])
    close(mamba1.fold(x, B, dt, A, S, end, dt_bias=dt_bias), states[:, end])
    # A final dt in the buffer, no gate and no skip.
    y = mamba1.replay(new(C, start, end), x, B, mamba1.final_dt(dt, dt_bias[:, None]), A, None, S, start, end)
    skip = D.double() * new(x, start, end).double()
    close((y.double() + skip) * F.silu(gate.double()), outputs[:, start:end])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_stand_at_positions_of_their_own(data):
    batch, tokens, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), 12
    start = [data.draw(st.integers(0, slots - tokens)) for _ in range(batch)]
    count = [data.draw(st.integers(0, tokens)) for _ in range(batch)]  # real tokens, at the front
    end = [s + c for s, c in zip(start, count)]
    layer = random_layer(batch, 2, 6, 10, slots, seed=data.draw(st.integers(0, 99)))
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, S = layer
    of_rows = lambda tensor: torch.stack([tensor[row, :, s : s + tokens] for row, s in enumerate(start)])  # noqa: E731
    C, z = of_rows(C).transpose(1, 2), of_rows(z).transpose(1, 2)
    x, B, dt = (poisoned(tensor, end) for tensor in (x, B, dt))

    start, end = torch.tensor(start), torch.tensor(end)
    y = mamba1.replay(C, x, B, dt, A, D, S, start, end, dt_bias=dt_bias, z=z)
    assert torch.isfinite(y).all()
    folded = mamba1.fold(x, B, dt, A, S, end, dt_bias=dt_bias)
    for row in range(batch):
        close(y[row, : count[row]], outputs[row, start[row] : end[row]])
        close(folded[row], states[row, end[row]])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_sequences_of_windows_crops_and_flushes(data):
    """After tokens, windows of which any number is taken back, and folds: what is left is all that was ever seen."""
    slots, length = 9, 40
    layer = random_layer(2, 2, 4, 3, length, seed=data.draw(st.integers(0, 99)))
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, checkpoint = layer
    buffers = [torch.full((*tensor.shape[:2], slots, tensor.shape[3]), NAN) for tensor in (x, B, dt)]
    held = folded = 0
    for _ in range(data.draw(st.integers(1, 12))):
        seen = folded + held
        tokens = data.draw(st.integers(1, 5))
        if seen + tokens > length:
            break
        if held + tokens > slots:
            count = data.draw(st.integers(held + tokens - slots, held))
            checkpoint = mamba1.fold(*buffers, A, checkpoint, count, dt_bias=dt_bias)
            buffers = [torch.cat([b[:, :, count:], torch.full_like(b[:, :, :count], NAN)], 2) for b in buffers]
            held, folded = held - count, folded + count
        for buffer, values in zip(buffers, (x, B, dt)):
            buffer[:, :, held : held + tokens] = values[:, :, seen : seen + tokens]
        window = new(C, seen, seen + tokens), *buffers
        gate = new(z, seen, seen + tokens)
        y = mamba1.replay(*window, A, D, checkpoint, held, held + tokens, dt_bias=dt_bias, z=gate)
        close(y, outputs[:, seen : seen + tokens])
        held += tokens
        held -= data.draw(st.integers(0, held))  # a crop
        for buffer in buffers:
            buffer[:, :, held:] = NAN
        close(mamba1.fold(*buffers, A, checkpoint, held, dt_bias=dt_bias), states[:, folded + held])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_activations(dtype):
    """With inputs rounded beforehand, low-precision activations add no error of their own."""
    layer = random_layer(2, 2, 16, 16, 16, dtype)
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, S = layer
    y = mamba1.replay(new(C, 15, 16), x, B, dt, A, D, S, 15, 16, dt_bias=dt_bias, z=new(z, 15, 16))
    assert y.dtype == torch.float32
    close(y, outputs[:, 15:])
    close(mamba1.fold(x, B, dt, A, S, 16, dt_bias=dt_bias), states[:, 16])


def test_float64_stays_float64():
    layer = [tensor.double() for tensor in random_layer(2, 2, 4, 5, 8)]
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, S = layer
    y, state = mamba1.scan(*(new(t, 0, 8) for t in (C, x, B, dt)), A, D, S, dt_bias=dt_bias, z=new(z, 0, 8))
    close(y, outputs, 1e-12)
    close(state, states[:, -1], 1e-12)
    close(mamba1.fold(x, B, dt, A, S, 8, dt_bias=dt_bias), states[:, -1], 1e-12)


def test_read_out_of_a_folded_state_is_the_replayed_output():
    x, B, dt, A, D, C, dt_bias, z, S = random_layer(2, 2, 6, 16, 8)
    state = mamba1.fold(x, B, dt, A, S, 8, dt_bias=dt_bias)
    read = mamba1.read_out(new(C, 7, 8), new(x, 7, 8), D, state, z=new(z, 7, 8))
    replayed = mamba1.replay(new(C, 7, 8), x, B, dt, A, D, S, 7, 8, dt_bias=dt_bias, z=new(z, 7, 8))
    torch.testing.assert_close(read, replayed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_a_scan_is_the_recurrence(tokens):
    layer = random_layer(2, 2, 3, 5, tokens)
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, S = layer
    inputs = [new(tensor, 0, tokens) for tensor in (C, x, B, dt)]
    y, state = mamba1.scan(*inputs, A, D, S, dt_bias=dt_bias, z=new(z, 0, tokens))
    close(y, outputs)
    close(state, states[:, -1])
    before = S.clone()
    mamba1.scan(*inputs, A, D, S, dt_bias=dt_bias)
    assert torch.equal(S, before)


def test_a_long_continuation_in_chunks_is_one_scan():
    tokens = 4000
    layer = random_layer(1, 1, 8, 16, tokens)
    states, outputs = recurrence(*layer)
    x, B, dt, A, D, C, dt_bias, z, S = layer
    inputs = [new(tensor, 0, tokens) for tensor in (C, x, B, dt)]
    whole, last = mamba1.scan(*inputs, A, D, S, dt_bias=dt_bias)
    parts, state = [], S
    for begin in range(0, tokens, 1000):
        few = [tensor[:, begin : begin + 1000] for tensor in inputs]
        y, state = mamba1.scan(*few, A, D, state, dt_bias=dt_bias)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-6, atol=1e-6)
    close(state, states[:, -1])


def test_a_scan_holds_few_states_at_a_time(monkeypatch):
    seen = []
    plain = mamba1._states
    monkeypatch.setattr(mamba1, "_states", lambda *args: seen.append(plain(*args)) or seen[-1])
    x, B, dt, A, D, C, dt_bias, _, S = random_layer(2, 1, 512, 16, 100)
    mamba1.scan(*(new(t, 0, 100) for t in (C, x, B, dt)), A, D, S, dt_bias=dt_bias)
    assert len(seen) > 1 and max(states.numel() for states in seen) <= 2**18


def test_tokens_without_time_are_inert():
    """Masked tokens anywhere: a raw dt of minus infinity, or a final one of 0."""
    x, B, dt, A, D, C, dt_bias, _, S = random_layer(2, 2, 4, 5, 9)
    real = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    inputs = [new(tensor, 0, 9) for tensor in (C, x, B)]
    raw = new(dt, 0, 9).masked_fill(~real[:, None, None], -torch.inf)
    final = mamba1.final_dt(new(dt, 0, 9), dt_bias).masked_fill(~real[:, None, None], 0.0)
    few = [tensor[:, real] for tensor in (*inputs, new(dt, 0, 9))]
    expected, last = mamba1.scan(*few, A, D, S, dt_bias=dt_bias)
    for y, state in (mamba1.scan(*inputs, raw, A, D, S, dt_bias=dt_bias), mamba1.scan(*inputs, final, A, D, S)):
        torch.testing.assert_close(y[:, real], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state, last, rtol=1e-6, atol=1e-6)
    folded = mamba1.fold(x, B, raw.transpose(1, 2), A, S, 9, dt_bias=dt_bias)
    torch.testing.assert_close(folded, last, rtol=1e-6, atol=1e-6)


def test_exponents_never_overflow():
    x, B, dt, A, D, C, _, _, S = random_layer(1, 1, 4, 4, 6)
    dt = dt.abs() * 1e4
    y = mamba1.replay(new(C, 0, 6), x, B, dt, A * 10, D, S, 0, 6)
    assert torch.isfinite(y).all()
    assert torch.isfinite(mamba1.fold(x, B, dt, A * 10, S, 6)).all()


def test_thousands_of_steps_do_not_drift():
    """A float32 checkpoint folded once in 4 tokens stays as close to float64 as one written at every token."""
    steps = 4000
    layer = random_layer(1, 1, 32, 16, steps)
    x, B, dt, A, D, C, dt_bias, _, S = layer
    exact = recurrence(*layer)[0][:, -1]

    def run(buffer_len, dtype=torch.float32):
        state = S
        for begin in range(0, steps, buffer_len):
            few = [tensor[:, :, begin : begin + buffer_len] for tensor in (x, B, dt)]
            state = mamba1.fold(*few, A, state, buffer_len, dt_bias=dt_bias).to(dtype)
        return float((state.double() - exact).norm() / exact.norm())

    assert run(4) < 1e-6
    assert run(4) < 2 * run(1) + 1e-7
    # What is rounded once in many tokens drifts less than what is rounded at each.
    assert run(8, torch.bfloat16) < 0.8 * run(1, torch.bfloat16)


# Upstream's functions: one group, channels first, a state (b, d, n).


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_upstreams(dtype):
    x, B, dt, A, D, C, dt_bias, z, S = random_layer(2, 1, 24, 16, 6, dtype)
    state = S[:, 0].mT.contiguous()
    bar = 1e-5 if dtype == torch.float32 else 5e-2  # upstream rounds dt and the state it reads to the activation dtype
    for t in range(6):
        of_t = lambda tensor: tensor[:, 0, t]  # noqa: B023, E731
        expected = upstream.mamba_selective_state_update(
            state, of_t(x), of_t(dt), A[0].mT, of_t(B), of_t(C), D[0], dt_bias=dt_bias[0], dt_softplus=True, z=of_t(z)
        )
        y = mamba1.replay(new(C, t, t + 1), x, B, dt, A, D, S, t, t + 1, dt_bias=dt_bias, z=new(z, t, t + 1))
        close(y[:, 0, 0], expected.double(), bar)
    close(mamba1.fold(x, B, dt, A, S, 6, dt_bias=dt_bias)[:, 0].mT, state.double(), bar)


def test_a_scan_is_upstreams():
    x, B, dt, A, D, C, dt_bias, z, S = random_layer(2, 1, 24, 16, 50)
    first = lambda tensor: tensor[:, 0].mT  # (b, d, t)  # noqa: E731
    expected, state = upstream.mamba_selective_scan(
        first(x), first(dt), A[0].mT, first(B), first(C), D[0], z=first(z), delta_bias=dt_bias[0],
        delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    y, last = mamba1.scan(*(new(t, 0, 50) for t in (C, x, B, dt)), A, D, None, dt_bias=dt_bias, z=new(z, 0, 50))
    close(y[:, :, 0].mT, expected.double())
    close(last[:, 0].mT, state.double())


@pytest.mark.parametrize("groups", [None, 2])
def test_rates_are_upstreams(groups):
    A_log = torch.randn(*([groups] if groups else []), 6, 4, dtype=torch.bfloat16)
    A = mamba1.decay_rates(A_log)
    assert A.shape == (groups or 1, 4, 6) and A.is_contiguous()
    expected = -torch.exp(A_log.float())
    assert torch.equal(A.mT, expected if groups else expected[None])
