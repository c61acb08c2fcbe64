"""How a state is stored in fewer bits: bounds, what rounding does on average, and random bits that can be repeated."""

import pytest
import torch

from hf_replayssm.ops import quantize


DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16]
EIGHT_BITS = DTYPES[:2]


def states(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator)


def steps(state, dtype, dim=-1):
    """The distance between two neighbours where each number is stored."""
    if dtype in EIGHT_BITS:
        scale = state.abs().amax(dim, keepdim=True) / quantize.GREATEST[dtype]
        return scale if dtype == torch.int8 else torch.maximum(state.abs() * 2**-3, scale * 2**-9)
    return state.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal


def bits_of(state, seed=3, tokens=7):
    return quantize.random_bits(quantize.layer_seed(seed, 0), tokens, state.shape[1:], state.device)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_number_is_off_by_more_than_a_step(dtype, dim):
    state = states(3, 4, 16, 24)
    for share, bits in ((0.5, None), (1.0, bits_of(state))):
        values, scale = quantize.store(state, dtype, dim, bits)
        assert values.dtype == dtype and (scale is not None) == (dtype in EIGHT_BITS)
        if scale is not None:
            shape = list(state.shape)
            shape[dim] = 1
            assert scale.dtype == torch.float32 and list(scale.shape) == shape
        error = (quantize.read(values, scale).float() - state).abs()
        assert bool((error <= share * steps(state, dtype, dim) * (1 + 1e-4)).all())
        assert error.max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stochastic_rounding_is_right_on_average(dtype):
    state, times = states(1, 2, 8, 32), 2000
    total = torch.zeros_like(state)
    for tokens in range(times):
        total += quantize.read(*quantize.store(state, dtype, -1, bits_of(state, tokens=tokens))).float()
    bias = (total / times - state) / steps(state, dtype)
    # A single rounding is off by up to a step, with a standard deviation of at most half of one.
    assert bias.abs().max() < 5 * 0.5 / times**0.5
    assert bias.mean().abs() < 5 * 0.5 / (times * bias.numel()) ** 0.5
    nearest = (quantize.read(*quantize.store(state, dtype, -1)).float() - state) / steps(state, dtype)
    assert nearest.abs().max() > 0.3  # which is what would stay


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_can_be_stored_stays_as_it_is(dtype):
    state = torch.arange(1.0, 9.0).repeat(1, 2, 3, 1)
    if dtype in EIGHT_BITS:
        state[..., -1] = quantize.GREATEST[dtype]  # the scale is 1
    for bits in (None, *(bits_of(state, tokens=tokens) for tokens in range(50))):
        stored = quantize.read(*quantize.store(state, dtype, -1, bits))
        assert torch.allclose(stored.float(), state, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_rows_of_zeros_and_rows_that_are_not_finite(dtype, stochastic):
    state = states(1, 1, 6, 8)
    state[0, 0, 1] = 0
    state[0, 0, 2] = 1e-41
    state[0, 0, 3, 5] = float("nan")
    state[0, 0, 4, 5] = float("inf")
    stored = quantize.read(*quantize.store(state, dtype, -1, bits_of(state) if stochastic else None))[0, 0]
    assert stored[1].eq(0).all() and stored[2].eq(0).all()
    assert not stored[3].isfinite().any() and not stored[4].isfinite().all()
    assert stored[[0, 5]].isfinite().all() and stored[0].abs().max() == pytest.approx(state[0, 0, 0].abs().max().item())


def test_random_bits_can_be_repeated_and_are_each_their_own():
    shape, device = (3, 40, 50), torch.device("cpu")
    bits = lambda seed, layer, tokens: quantize.random_bits(  # noqa: E731
        quantize.layer_seed(seed, layer), tokens, shape, device
    )
    rows = bits(1, 2, torch.tensor([5, 9, 5]))
    assert rows.shape == (3, *shape) and torch.equal(rows[0], rows[2])
    assert torch.equal(rows[:1], bits(1, 2, 5)) and torch.equal(rows[1:2], bits(1, 2, 9))
    others = [bits(seed, layer, tokens) for seed in (0, 1) for layer in (0, 2) for tokens in (0, 1, 5)]
    flat = torch.stack([other.flatten() for other in others]).double() / 2**32
    assert bool((flat >= 0).all()) and bool((flat < 1).all())
    assert (flat.mean(1) - 0.5).abs().max() < 5 / (12 * flat.shape[1]) ** 0.5
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 5 / flat.shape[1] ** 0.5
    for lag in (1, 2, 50, 2000):  # neighbours in a row, in a column, and from head to head
        pairs = torch.stack([flat[:, lag:].flatten(), flat[:, :-lag].flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 5 / pairs.shape[1] ** 0.5
    share = torch.stack([(other >> bit & 1).double().mean() for other in others for bit in range(32)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / flat.shape[1] ** 0.5


def test_rows_of_every_dtype_can_be_moved():
    for dtype in DTYPES:
        values, _ = quantize.store(states(3, 2, 4, 8), dtype, -1)
        picked = quantize.select(values, torch.tensor([2, 0, 2]))
        assert picked.dtype == dtype
        assert torch.equal(picked.float(), values.float()[[2, 0, 2]])
