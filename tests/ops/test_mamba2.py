"""The reference ops against the recurrence itself, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import relative_error

from hf_replayssm.ops import mamba2


def random_layer(batch, heads, head_dim, state, groups, slots, dtype=torch.float32, seed=0):
    """(x, B, dt, A, D, C, checkpoint); decays from long to short memory."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = randn(batch, heads, slots, head_dim).to(dtype)
    B, C = (randn(batch, groups, slots, state).to(dtype) for _ in range(2))
    dt = torch.nn.functional.softplus(randn(batch, heads, slots) - 2).float()
    A = -torch.exp(randn(heads)).float()
    D = randn(heads).float()
    checkpoint = randn(batch, heads, head_dim, state).float()
    return x, B, dt, A, D, C, checkpoint


def recurrence(x, B, dt, A, D, C, checkpoint):
    """S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T and y_t = S_t C_t + D x_t: all states and all outputs, float64."""
    x, B, dt, A, D, C, S = (tensor.double() for tensor in (x, B, dt, A, D, C, checkpoint))
    per_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    states, outputs = [S], []
    for t in range(x.shape[2]):
        update = dt[:, :, t, None, None] * x[:, :, t, :, None] * B[:, :, t, None, :]
        S = torch.exp(A * dt[:, :, t])[..., None, None] * S + update
        states.append(S)
        outputs.append((S @ C[:, :, t, :, None]).squeeze(-1) + D[:, None] * x[:, :, t])
    return torch.stack(states, 1), torch.stack(outputs, 1)  # (b, s + 1, h, p, n), (b, s, h, p)


def poisoned(tensor, end):
    """NaN in every slot from each row's `end` on."""
    tensor = tensor.clone()
    for row, stop in enumerate(end):
        tensor[row, :, stop:] = float("nan")
    return tensor


SHAPES = [  # heads, head_dim, state, groups
    (8, 64, 128, 1),
    (6, 80, 16, 2),  # three heads a group
    (4, 16, 256, 4),  # one head a group
    (2, 5, 7, 1),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start, tokens", [(0, 1), (0, 7), (5, 1), (9, 6), (15, 1)])
def test_replay_and_fold_are_the_recurrence(shape, start, tokens):
    heads, head_dim, state, groups = shape
    end, slots = start + tokens, 17
    x, B, dt, A, D, C, S = random_layer(3, heads, head_dim, state, groups, slots)
    states, outputs = recurrence(x, B, dt, A, D, C, S)
    x, B, dt = (poisoned(tensor, [end] * 3) for tensor in (x, B, dt))

    y = mamba2.replay(C[:, :, start:end].transpose(1, 2), x, B, dt, A, D, S, start, end)
    torch.testing.assert_close(y.double(), outputs[:, start:end], rtol=1e-4, atol=1e-4)
    folded = mamba2.fold(x, B, dt, A, S, end)
    torch.testing.assert_close(folded.double(), states[:, end], rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_stand_at_positions_of_their_own(data):
    batch, tokens, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), 12
    start = [data.draw(st.integers(0, slots - tokens)) for _ in range(batch)]
    count = [data.draw(st.integers(0, tokens)) for _ in range(batch)]  # real tokens, at the front
    end = [s + c for s, c in zip(start, count)]
    x, B, dt, A, D, C, S = random_layer(batch, 6, 8, 10, 2, slots, seed=data.draw(st.integers(0, 99)))
    states, outputs = recurrence(x, B, dt, A, D, C, S)
    new_C = torch.stack([C[row, :, s : s + tokens] for row, s in enumerate(start)]).transpose(1, 2)
    x, B, dt = (poisoned(tensor, end) for tensor in (x, B, dt))

    y = mamba2.replay(new_C, x, B, dt, A, D, S, torch.tensor(start), torch.tensor(end))
    assert torch.isfinite(y).all()
    folded = mamba2.fold(x, B, dt, A, S, torch.tensor(end))
    for row in range(batch):
        torch.testing.assert_close(
            y[row, : count[row]].double(), outputs[row, start[row] : end[row]], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(folded[row].double(), states[row, end[row]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_activations(dtype):
    """With inputs rounded beforehand, low-precision activations add no error of their own."""
    x, B, dt, A, D, C, S = random_layer(2, 6, 16, 32, 2, 16, dtype)
    states, outputs = recurrence(x, B, dt, A, D, C, S)
    y = mamba2.replay(C[:, :, 15:].transpose(1, 2), x, B, dt, A, D, S, 15, 16)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), outputs[:, 15:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mamba2.fold(x, B, dt, A, S, 16).double(), states[:, 16], rtol=1e-5, atol=1e-5)


def test_read_out_of_a_folded_state_is_the_replayed_output():
    x, B, dt, A, D, C, S = random_layer(2, 6, 16, 32, 2, 8)
    state = mamba2.fold(x, B, dt, A, S, 8)
    read = mamba2.read_out(C[:, :, 7:].transpose(1, 2), x[:, :, 7:].transpose(1, 2), D, state)
    replayed = mamba2.replay(C[:, :, 7:].transpose(1, 2), x, B, dt, A, D, S, 7, 8)
    torch.testing.assert_close(read, replayed, rtol=1e-5, atol=1e-5)


def test_exponents_never_overflow():
    """Large steps: behind a token the exponent is in the thousands, where exp would be infinite."""
    x, B, dt, A, D, C, S = random_layer(1, 2, 4, 4, 1, 6)
    y = mamba2.replay(C.transpose(1, 2), x, B, dt * 1e4, A * 10, D, S, 0, 6)
    assert torch.isfinite(y).all()
    assert torch.isfinite(mamba2.fold(x, B, dt * 1e4, A * 10, S, 6)).all()


def test_thousands_of_steps_do_not_drift():
    """A float32 checkpoint folded once in 16 tokens stays as close to float64 as one written at every token."""
    steps, x_, B_, dt_, A, D, C_, S = 4000, *random_layer(1, 4, 8, 16, 1, 4000)
    exact, _ = recurrence(x_, B_, dt_, A, D, C_, S)

    def run(buffer_len):
        state = S
        for begin in range(0, steps, buffer_len):
            chunk = [tensor[:, :, begin : begin + buffer_len] for tensor in (x_, B_, dt_)]
            state = mamba2.fold(*chunk, A, state, buffer_len)
        return float((state.double() - exact[:, -1]).norm() / exact[:, -1].norm())

    assert run(16) < 1e-6
    assert run(16) < 2 * run(1) + 1e-7


@pytest.mark.parametrize("tokens", [1, 4, 64, 65, 203])
@pytest.mark.parametrize("seen", [False, True])
def test_a_scan_equals_the_recurrence(tokens, seen, monkeypatch):
    """In chunks that do not divide the sequence, and in parts of it that memory allows for; masked tokens have dt 0."""
    monkeypatch.setattr(mamba2, "SCAN_ELEMENTS", 2 * 6 * 64 * 64 * 2)
    x, B, dt, A, D, C, state = random_layer(2, 6, 20, 16, 3, tokens, seed=tokens)
    dt[1, :, -1] = 0.0
    if not seen:
        state = torch.zeros_like(state)
    states, outputs = recurrence(x, B, dt, A, D, C, state)
    before = state.clone()
    by_time = [tensor.transpose(1, 2) for tensor in (x, dt, B, C)]
    for dtype, bar in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        new_x, new_dt, new_B, new_C = (tensor.to(dtype) for tensor in by_time)
        y, after = mamba2.scan(new_x, new_dt, A, new_B, new_C, D, state.to(dtype) if seen else None)
        assert y.dtype == after.dtype == dtype
        assert relative_error(y, outputs) < bar
        assert relative_error(after, states[:, -1]) < bar
    assert torch.equal(state, before)
    half, _ = mamba2.scan(by_time[0].bfloat16(), by_time[1], A, by_time[2].bfloat16(), by_time[3].bfloat16(), D, None)
    assert half.dtype == torch.float32


def test_a_scan_of_strong_and_weak_decays():
    """A token that forgets all, and then tokens that forget little: what decays in between is no difference of sums."""
    x, B, dt, _, D, C, state = random_layer(1, 4, 8, 16, 2, 150, seed=3)
    A = -torch.tensor([1e-6, 1.0, 60.0, 4e3])
    dt = torch.full_like(dt, 1e-4)
    dt[..., 20::40] = 2.0
    states, outputs = recurrence(x, B, dt, A, D, C, state)
    y, after = mamba2.scan(*(tensor.transpose(1, 2) for tensor in (x, dt)), A,
                           *(tensor.transpose(1, 2) for tensor in (B, C)), D, state)  # fmt: skip
    assert relative_error(y, outputs) < 1e-5 and relative_error(after, states[:, -1]) < 1e-5
