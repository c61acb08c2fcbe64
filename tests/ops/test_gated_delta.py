"""The reference ops of the delta rules against the recurrence, token by token in float64, and against upstream's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from hf_replayssm.ops import gated_delta


RULES = ["gated delta", "kda"]


def random_layer(shape, slots, rule, dtype=torch.float32, seed=0, memory=2.0, batch=3):
    """
    (q, k, v, beta, g, checkpoint) with slots in front of channels; shape is (h, m, c, d). `memory`: the greater, the
    slower the decay.
    """
    heads, key_heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k = (randn(batch, key_heads, slots, key_dim).to(dtype) for _ in range(2))
    v = randn(batch, heads, slots, value_dim).to(dtype)
    beta = randn(batch, heads, slots).sigmoid().float()
    channels = (key_dim,) if rule == "kda" else ()
    g = -torch.nn.functional.softplus(randn(batch, heads, slots, *channels) - memory).float()
    return q, k, v, beta, g, randn(batch, heads, key_dim, value_dim).float()


def recurrence(q, k, v, beta, g, checkpoint, dtype=torch.float64):
    """The three lines at the head of the module: all states, outputs and u."""
    q, k, v, beta, g, S = (tensor.to(dtype) for tensor in (q, k, v, beta, g, checkpoint))
    repeats = v.shape[1] // k.shape[1]
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    q, k = (unit(x).repeat_interleave(repeats, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    g = g[..., None] if g.dim() == 3 else g
    states, outputs, us = [S], [], []
    for t in range(k.shape[2]):
        S = g[:, :, t, :, None].exp() * S
        u = beta[:, :, t, None] * (v[:, :, t] - (S * k[:, :, t, :, None]).sum(2))
        S = S + k[:, :, t, :, None] * u[:, :, None]
        states.append(S)
        us.append(u)
        outputs.append((S * q[:, :, t, :, None]).sum(2))
    return torch.stack(states, 1), torch.stack(outputs, 2), torch.stack(us, 2)


def poisoned(tensor, end):
    """NaN in every slot from each row's `end` on."""
    tensor = tensor.clone()
    for row, stop in enumerate(end):
        tensor[row, :, stop:] = float("nan")
    return tensor


def turned(*tensors):
    """(b, heads, t, ...) as (b, t, heads, ...)."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def close(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


SHAPES = [  # value heads, key heads, key channels, value channels
    (4, 4, 64, 64),
    (4, 2, 128, 128),
    (8, 2, 16, 48),
    (3, 1, 7, 5),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start, tokens", [(0, 1), (0, 7), (5, 1), (9, 6), (15, 1), (1, 16)])
def test_replay_and_fold_are_the_recurrence(rule, shape, start, tokens):
    end = start + tokens
    q, k, v, beta, g, S = random_layer(shape, 18, rule)
    states, outputs, us = recurrence(q, k, v, beta, g, S)
    k, g = poisoned(k, [end] * 3), poisoned(g, [end] * 3)
    u = poisoned(us.float(), [start] * 3)

    new = turned(*(tensor[:, :, start:end] for tensor in (q, v, beta)))
    y, new_u = gated_delta.replay(*new, k, u, g, S, start, end)
    close(y, outputs[:, :, start:end].transpose(1, 2))
    close(new_u, us[:, :, start:end].transpose(1, 2))
    close(gated_delta.fold(k, poisoned(us.float(), [end] * 3), g, S, end), states[:, end])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("buffer_len", [1, 4, 16])
def test_steps_and_flushes_are_the_recurrence(rule, buffer_len):
    """Every phase of the buffer, the buffer's own u being fed back."""
    q, k, v, beta, g, S = random_layer((4, 2, 16, 24), 40, rule)
    states, outputs, _ = recurrence(q, k, v, beta, g, S)
    layer = Buffered(rule, S, (4, 2, 16, 24), buffer_len)
    for t in range(40):
        y = layer.append(*(tensor[:, :, t : t + 1] for tensor in (q, k, v, beta, g)))
        close(y, outputs[:, :, t : t + 1])
        close(layer.state(), states[:, t + 1])
        if layer.held[0] == buffer_len:
            layer.flush(buffer_len)


@pytest.mark.parametrize("module", [qwen3_next, qwen3_5, olmo_hybrid], ids=lambda module: module.__name__[-12:])
@pytest.mark.parametrize("shape", [(4, 2, 16, 32), (2, 2, 32, 16), (8, 2, 16, 16)])
def test_gated_delta_is_upstreams(module, shape):
    """Step for step and as a chunk from an initial state, beta up to 2 as OLMo-Hybrid has it."""
    q, k, v, beta, g, S = random_layer(shape, 12, "gated delta")
    beta = 2 * beta
    upstream = dict(initial_state=S, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for function in (module.torch_recurrent_gated_delta_rule, module.torch_chunk_gated_delta_rule):
        assert_same_as(function(*turned(q, k, v, g, beta), **upstream), q, k, v, beta, g, S)


@pytest.mark.parametrize("heads", [1, 3])
def test_kda_is_upstreams(heads):
    q, k, v, beta, g, S = random_layer((heads, heads, 16, 24), 12, "kda")
    upstream = dict(initial_state=S, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for function in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
        assert_same_as(function(*turned(q, k, v, g, beta), **upstream), q, k, v, beta, g, S)


def assert_same_as(upstream, q, k, v, beta, g, S):
    expected, state = upstream
    tokens = k.shape[2]
    u = torch.full_like(v, float("nan"))
    y, u = gated_delta.replay(*turned(q, v, beta), k, u, g, S, 0, tokens)
    close(y, expected)
    close(gated_delta.fold(k, u.transpose(1, 2), g, S, tokens), state)
    # In two pieces: a window of eight behind four.
    u = torch.cat([u.transpose(1, 2)[:, :, :4], torch.full_like(v[:, :, 4:], float("nan"))], 2)
    y, _ = gated_delta.replay(*turned(q[:, :, 4:], v[:, :, 4:], beta[:, :, 4:]), k, u, g, S, 4, tokens)
    close(y, expected[:, 4:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_stand_at_positions_of_their_own(data):
    batch, tokens, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), 12
    rule = data.draw(st.sampled_from(RULES))
    start = [data.draw(st.integers(0, slots - tokens)) for _ in range(batch)]
    count = [data.draw(st.integers(0, tokens)) for _ in range(batch)]  # real tokens, at the front
    end = [s + c for s, c in zip(start, count)]
    q, k, v, beta, g, S = random_layer((4, 2, 8, 10), slots, rule, seed=data.draw(st.integers(0, 99)), batch=batch)
    states, outputs, us = recurrence(q, k, v, beta, g, S)
    new = [
        torch.stack(
            [poisoned(x[row : row + 1], [e])[0, :, s : s + tokens] for row, (s, e) in enumerate(zip(start, end))]
        )
        for x in (q, v, beta)
    ]
    k, g = poisoned(k, end), poisoned(g, end)

    y, new_u = gated_delta.replay(
        *turned(*new), k, poisoned(us.float(), start), g, S, torch.tensor(start), torch.tensor(end)
    )
    folded = gated_delta.fold(k, poisoned(us.float(), end), g, S, torch.tensor(end))
    for row in range(batch):
        rows = slice(start[row], end[row])
        close(y[row, : count[row]].transpose(0, 1), outputs[row, :, rows])
        close(new_u[row, : count[row]].transpose(0, 1), us[row, :, rows])
        assert not y[row, count[row] :].any() and not new_u[row, count[row] :].any()
        close(folded[row], states[row, end[row]])


@pytest.mark.parametrize("rule", RULES)
def test_float64_stays_float64(rule):
    layer = [tensor.double() for tensor in random_layer((4, 2, 16, 24), 12, rule)]
    q, k, v, beta, g, S = layer
    states, outputs, us = recurrence(*layer)
    y, u = gated_delta.replay(*turned(q, v, beta), k, us, g, S, 0, 12)
    folded = gated_delta.fold(k, us, g, S, 12)
    assert y.dtype == u.dtype == folded.dtype == torch.float64
    close(y, outputs.transpose(1, 2), 1e-13)
    close(folded, states[:, 12], 1e-13)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_activations(dtype, rule):
    """With inputs rounded beforehand, low-precision activations add no error of their own."""
    q, k, v, beta, g, S = random_layer((4, 2, 32, 16), 16, rule, dtype)
    states, outputs, us = recurrence(q, k, v, beta, g, S)
    y, u = gated_delta.replay(*turned(*(x[:, :, 9:] for x in (q, v, beta))), k, us.float(), g, S, 9, 16)
    assert y.dtype == u.dtype == torch.float32
    close(y, outputs[:, :, 9:].transpose(1, 2))
    close(gated_delta.fold(k, us.float(), g, S, 16), states[:, 16])


@pytest.mark.parametrize("rule", RULES)
def test_a_padded_token_is_inert(rule):
    """g = 0 and beta = 0, whatever its k, q and v are."""
    q, k, v, beta, g, S = random_layer((4, 2, 16, 16), 9, rule)
    real = torch.tensor([0, 1, 3, 4, 6, 8])
    padded = torch.tensor([2, 5, 7])
    beta[:, :, padded], g[:, :, padded] = 0, 0
    u = torch.full_like(v, float("nan"))
    y, u = gated_delta.replay(*turned(q, v, beta), k, u, g, S, 0, 9)
    state = gated_delta.fold(k, u.transpose(1, 2), g, S, 9)
    q, k, v, beta, g_alone, u_alone = (x[:, :, real] for x in (q, k, v, beta, g, u.transpose(1, 2)))
    alone, alone_u = gated_delta.replay(*turned(q, v, beta), k, u_alone, g_alone, S, 0, 6)
    close(y[:, real], alone)
    assert not u[:, padded].any()
    close(state, gated_delta.fold(k, alone_u.transpose(1, 2), g_alone, S, 6))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 6])
def test_exponents_never_overflow(rule, tokens):
    """Total decay: behind a token the exponent is in the thousands, and exp(-G_j) is infinite."""
    q, k, v, beta, g, S = random_layer((2, 1, 8, 8), 12, rule)
    g = g * 1e4
    states, outputs, us = recurrence(q, k, v, beta, g, S)
    start = 12 - tokens
    new = turned(*(x[:, :, start:] for x in (q, v, beta)))
    for where in ((start, 12), (torch.full((3,), start), torch.full((3,), 12))):
        y, _ = gated_delta.replay(*new, k, us.float(), g, S, *where)
        close(y, outputs[:, :, start:].transpose(1, 2))
    close(gated_delta.fold(k, us.float(), g, S, 12), states[:, 12])


@pytest.mark.parametrize("rule", RULES)
def test_a_large_decay_does_not_blur_the_small_ones_behind_it(rule):
    """Sums of g in which small ones would vanish: they are counted from the newest token backwards."""
    q, k, v, beta, g, S = random_layer((2, 1, 8, 8), 12, rule)
    g = g * 1e-3
    g[:, :, 3] = -3e4
    states, outputs, us = recurrence(q, k, v, beta, g, S)
    y, _ = gated_delta.replay(*turned(*(x[:, :, 11:] for x in (q, v, beta))), k, us.float(), g, S, 11, 12)
    close(y, outputs[:, :, 11:].transpose(1, 2), 1e-6)
    close(gated_delta.fold(k, us.float(), g, S, 12), states[:, 12], 1e-6)


class Buffered:
    """A checkpoint and a buffer by the reference ops, all rows alike or each at a position of its own."""

    def __init__(self, rule, checkpoint, shape, slots, dtype=torch.float32, u_dtype=torch.float32):
        heads, key_heads, key_dim, value_dim = shape
        batch = checkpoint.shape[0]
        nan = lambda *size, dtype=dtype: torch.full((batch, *size), float("nan"), dtype=dtype)  # noqa: E731
        self.checkpoint = checkpoint
        self.k = nan(key_heads, slots, key_dim)
        self.u = nan(heads, slots, value_dim, dtype=u_dtype)
        self.g = nan(heads, slots, *((key_dim,) if rule == "kda" else ()), dtype=torch.float32)
        self.held = torch.zeros(batch, dtype=torch.long)

    def append(self, q, k, v, beta, g, ragged=False):
        """Outputs (b, h, t, d) of new tokens, (b, heads, t, ...)."""
        tokens, start = k.shape[2], self.held
        for row, at in enumerate(start.tolist()):
            self.k[row, :, at : at + tokens] = k[row]
            self.g[row, :, at : at + tokens] = g[row]
        where = (start, start + tokens) if ragged else (int(start[0]), int(start[0]) + tokens)
        y, u = gated_delta.replay(*turned(q, v, beta), self.k, self.u, self.g, self.checkpoint, *where)
        for row, at in enumerate(start.tolist()):
            self.u[row, :, at : at + tokens] = u[row].transpose(0, 1)
        self.held = start + tokens
        return y.transpose(1, 2)

    def state(self):
        return gated_delta.fold(self.k, self.u, self.g, self.checkpoint, self.held)

    def flush(self, count):
        """Folds the oldest tokens of every row, an integer or a tensor."""
        self.checkpoint = gated_delta.fold(self.k, self.u, self.g, self.checkpoint, count).to(self.checkpoint.dtype)
        count = torch.as_tensor(count).expand_as(self.held)
        for row, by in enumerate(count.tolist()):
            for buffer in (self.k, self.u, self.g):
                buffer[row] = buffer[row].roll(-by, 1)
        self.crop(0, self.held - count)

    def crop(self, tokens, held=None):
        """Takes the newest tokens back; what is not held is NaN."""
        self.held = self.held - tokens if held is None else held
        for row, at in enumerate(self.held.tolist()):
            for buffer in (self.k, self.u, self.g):
                buffer[row, :, at:] = float("nan")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_windows_crops_and_flushes(data):
    """Rows at positions of their own; the float64 state is that of the tokens that were kept."""
    rule, shape, slots, batch = data.draw(st.sampled_from(RULES)), (4, 2, 6, 5), 9, 2
    S = random_layer(shape, 1, rule, batch=batch)[-1]
    layer, exact = Buffered(rule, S, shape, slots), [[S[row : row + 1].double()] for row in range(batch)]
    for turn in range(data.draw(st.integers(1, 8))):
        free = slots - int(layer.held.max())
        what = data.draw(st.sampled_from(["append", "crop", "flush"])) if free else "flush"
        draw = lambda: torch.tensor([data.draw(st.integers(0, int(held))) for held in layer.held])  # noqa: E731
        if what == "append":
            tokens = data.draw(st.integers(1, min(free, 5)))
            *new, _ = random_layer(shape, tokens, rule, seed=turn, batch=batch)
            y = layer.append(*new, ragged=True)
            for row in range(batch):
                states, outputs, _ = recurrence(*(x[row : row + 1] for x in new), exact[row][-1])
                exact[row] += states[:, 1:].unbind(1)
                close(y[row : row + 1], outputs)
        elif what == "crop":
            tokens = draw()
            layer.crop(tokens)
            exact = [states[: len(states) - int(n)] for states, n in zip(exact, tokens)]
        else:
            layer.flush(torch.maximum(draw(), layer.held - slots + 1))
    close(layer.state(), torch.cat([states[-1] for states in exact]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [800, pytest.param(8000, marks=pytest.mark.slow)])
def test_thousands_of_steps_do_not_drift(steps, rule):
    """
    With a buffer of 16 no further from float64 than the classic float32 step, which writes its state at every token.
    With u in bfloat16 it is a thousand times further.
    """
    shape = (2, 1, 16, 16)
    *inputs, S = random_layer(shape, steps, rule, seed=1, memory=7.0, batch=1)
    inputs[3] *= 0.2  # beta: little is overwritten at a token, so that the state remembers what was rounded
    exact = recurrence(*inputs, S)[0][:, -1]
    classic = recurrence(*inputs, S, dtype=torch.float32)[0][:, -1]

    def run(u_dtype=torch.float32):
        layer = Buffered(rule, S, shape, 16, u_dtype=u_dtype)
        for t in range(steps):
            layer.append(*(x[:, :, t : t + 1] for x in inputs))
            if (t + 1) % 16 == 0:
                layer.checkpoint = gated_delta.fold(layer.k, layer.u, layer.g, layer.checkpoint, 16)
                layer.held = torch.zeros_like(layer.held)
        return error(layer.checkpoint)

    def error(state):
        return float((state.double() - exact).norm() / exact.norm())

    ours = run()
    print(f"{ours:.1e}, classic {error(classic):.1e}")
    assert ours < 1e-6
    assert ours <= error(classic)
    assert run(torch.bfloat16) > 100 * ours


@pytest.mark.parametrize("rule", RULES)
def test_a_large_decay_does_not_blur_the_small_ones_before_it(rule):
    """Within a window, too: a draft that forgets everything changes nothing of what those before it remember."""
    q, k, v, beta, g, S = random_layer((2, 1, 8, 8), 12, rule)
    g = g * 1e-3
    g[:, :, 11] = -3e4
    _, outputs, us = recurrence(q, k, v, beta, g, S)
    for where in ((6, 12), (torch.full((3,), 6), torch.full((3,), 12))):
        y, u = gated_delta.replay(*turned(*(x[:, :, 6:] for x in (q, v, beta))), k, us.float(), g, S, *where)
        close(y, outputs[:, :, 6:].transpose(1, 2), 1e-6)
        close(u, us[:, :, 6:].transpose(1, 2), 1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "value"), [("q", math.nan), ("k", math.nan), ("v", math.inf), ("g", math.nan), ("g", -math.inf)]
)
def test_a_draft_that_is_not_finite_leaves_those_before_it(rule, name, value):
    """So that it can be taken back. Those behind it get it, as in the recurrence."""
    whole = dict(zip("q k v beta g S".split(), random_layer((4, 2, 8, 12), 12, rule)))
    broken = {key: tensor.clone() for key, tensor in whole.items()}
    broken[name][:, :, 8] = value
    _, _, us = recurrence(*whole.values())
    for where in ((6, 12), (torch.full((3,), 6), torch.full((3,), 12))):
        (y, u), (broken_y, broken_u) = (
            gated_delta.replay(
                *turned(*(all_[key][:, :, 6:] for key in ("q", "v", "beta"))), all_["k"], us.float(), all_["g"],
                all_["S"], *where,
            )
            for all_ in (whole, broken)
        )  # fmt: skip
        assert torch.equal(y[:, :2], broken_y[:, :2]) and torch.equal(u[:, :2], broken_u[:, :2])
        assert broken_y[:, 2].isfinite().all() == (value == -math.inf)
        assert broken_y[:, 3:].isfinite().all() == (name == "q" or value == -math.inf)
