"""The causal convolution over a ring of raw inputs, against float64. See `test_mamba2.py` for how it is run."""

import pytest
import torch
from torch.nn import functional as F


pytest.importorskip("triton")
from cases import BF16, F16, F32, INTERPRETED, NAN, needs, on_gpu, poisoned_memory, run_in_interpreter, same_bits

import replayssm_kernels as kernels


def check(device, channels, kernel, ring, tokens, count, seen, dtype=F32, bias=True, activation="silu", seed=0):
    """One call in which each row has its own `count` and `seen`."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*size, generator=generator).to(dtype)  # noqa: E731
    batch = len(seen)
    history, new = randn(batch, kernel - 1, channels), randn(batch, tokens, channels)
    weight, bias = randn(channels, kernel) / kernel**0.5, randn(channels) if bias else None
    conv_inputs = torch.full((batch, ring, channels), NAN, dtype=dtype)
    for b in range(batch):
        for i in range(1, kernel):  # token seen - i
            if seen[b] >= i:
                conv_inputs[b, (seen[b] - i) % ring] = history[b, -i]
            else:
                history[b, -i] = 0
    expected_ring, wide = conv_inputs.clone(), torch.full((batch, tokens, channels + 4), NAN, dtype=dtype)
    for b in range(batch):
        wide[b, : count[b], 1:-3] = new[b, : count[b]]
        for t in range(count[b]):
            expected_ring[b, (seen[b] + t) % ring] = new[b, t]
    wide, conv_inputs = wide.to(device), conv_inputs.to(device)
    positions = torch.full((5, batch), -1, dtype=torch.int32)  # the other three are not read
    positions[kernels.SEEN], positions[kernels.COUNT] = torch.tensor(seen), torch.tensor(count)
    before = wide.clone()
    with poisoned_memory():
        out = kernels.causal_conv(
            positions.to(device), wide[..., 1:-3], conv_inputs, weight.to(device),
            None if bias is None else bias.to(device), activation,
        )  # fmt: skip
    assert same_bits(before, wide) and same_bits(expected_ring, conv_inputs.cpu())
    assert out.shape == new.shape and out.dtype == dtype
    window = torch.cat([history, new], 1).double().transpose(1, 2)
    exact = F.conv1d(window, weight.double()[:, None], None if bias is None else bias.double(), groups=channels)
    exact = (F.silu(exact) if activation else exact).transpose(1, 2)
    share = 1.0 if dtype == BF16 and device == "cpu" else 0.5  # the interpreter cuts bfloat16 off
    for b in range(batch):
        got, wanted = out[b, : count[b]].double().cpu(), exact[b, : count[b]]
        bar = 1e-6 * (1 + wanted.abs())
        if dtype != F32:
            bar += wanted.abs() * share * torch.finfo(dtype).eps
        assert bool(((got - wanted).abs() <= bar).all())


@needs
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 40])
@pytest.mark.parametrize(("kernel", "extra"), [(3, 0), (4, 0), (4, 2), (4, 39)])
def test_equals_a_convolution(kernel, extra, tokens, device):
    """Rings that the window overlaps or not; rows at the start of the sequence, in it, without new tokens."""
    count = [tokens, 0, (tokens + 1) // 2, tokens, tokens]
    check(device, 20, kernel, kernel + extra, tokens, count, seen=[0, 3, 1, 2, 11], seed=tokens)


@needs
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_variants(activation, bias, dtype, device):
    check(device, 20, 4, 6, 5, [5, 3], [100, 2], dtype, bias, activation)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("channels", [1792, 10240, 8192 + 2 * 80])
def test_models_sizes(channels, tokens, device):
    check(device, channels, 4, 12, tokens, [tokens] * 6 + [0, 1], [*range(7), 2**31 - 50], BF16)


@needs
def test_token_by_token_is_the_window(device):
    """The ring carries what a window has in one piece, over several turns of it."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(*size, generator=generator).to(device)  # noqa: E731
    inputs, weight, bias = randn(1, 12, 16), randn(16, 4), randn(16)
    positions = torch.zeros(5, 1, dtype=torch.int32, device=device)
    rings = [torch.full((1, ring, 16), NAN, device=device) for ring in (4, 16)]
    positions[kernels.COUNT] = 12
    whole = kernels.causal_conv(positions, inputs, rings[1], weight, bias)
    positions[kernels.COUNT] = 1
    for t in range(12):
        positions[kernels.SEEN] = t
        step = kernels.causal_conv(positions, inputs[:, t : t + 1], rings[0], weight, bias)
        torch.testing.assert_close(step, whole[:, t : t + 1], rtol=1e-5, atol=1e-6)


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_in_interpreter(__file__)
