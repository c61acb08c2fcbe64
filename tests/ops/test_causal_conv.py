"""The convolution with a history against torch's own over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_replayssm.ops.causal_conv import causal_conv


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("split", [0, 1, 2, 9])
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_history_continues_the_sequence(kernel, with_bias, split, tokens):
    torch.manual_seed(0)
    sequence = torch.randn(2, split + tokens, 10)
    weight, bias = torch.randn(10, kernel), torch.randn(10) if with_bias else None
    padded = F.pad(sequence, (0, 0, kernel - 1, 0))
    expected = F.silu(F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=10)).transpose(1, 2)[:, split:]
    history, new = padded[:, split : split + kernel - 1], sequence[:, split:]
    torch.testing.assert_close(causal_conv(history, new, weight, bias, F.silu), expected, rtol=1e-5, atol=1e-5)


def test_sums_in_float32():
    torch.manual_seed(0)
    history, new = torch.randn(1, 3, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    weight, bias = torch.randn(64, 4).bfloat16(), torch.randn(64).bfloat16()
    low = causal_conv(history, new, weight, bias, F.silu)
    exact = causal_conv(history.double(), new.double(), weight.double(), bias.double(), F.silu)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, exact.bfloat16())
