"""Products of float32 matrices by the terms that matrix units take, against float64."""

import pytest
import torch


triton = pytest.importorskip("triton")
import triton.language as tl
from cases import BF16, F16, F32, INTERPRETED, needs, run_in_interpreter

from replayssm_kernels._arithmetic import _two_tf32, dot_float32


@triton.jit
def _terms_kernel(x_ptr, high_ptr, low_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    high, low = _two_tf32(tl.load(x_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    out = dot_float32(a, b, tl.zeros((M, N), tl.float32))
    tl.store(out_ptr + m[:, None] * N + n[None, :], out)


def spread(*shape, device):
    """Both signs, over many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)
    return x.to(device)


def as_tf32(x):
    """What units for tf32 look at: the leading 19 bits."""
    return (x.view(torch.int32) & -0x2000).view(F32)


@needs
def test_two_tf32_numbers_are_a_float32_number(device):
    x = spread(1024, device=device)
    high, low = torch.empty_like(x), torch.empty_like(x)
    _terms_kernel[(1,)](x, high, low, 1024)
    assert torch.equal(as_tf32(high), high)
    assert torch.equal(high.double() + low.double(), x.double())
    assert ((low.abs() / x.abs()) <= 2**-11).all() and (low * x > 0).any() and (low * x < 0).any()
    rest = (high.double() + as_tf32(low).double() - x.double()).abs()
    assert (rest <= 2**-23 * x.double().abs()).all()


@needs
@pytest.mark.parametrize("b_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("a_dtype", [F32, BF16, F16], ids=str)
def test_a_product_has_float32_accuracy(a_dtype, b_dtype, device):
    """One tf32 number in place of a float32 one would be off by 5e-4; what is allowed is the rounding of sums."""
    a, b = spread(16, 64, device=device).to(a_dtype), spread(64, 32, device=device).to(b_dtype)
    out = torch.empty(16, 32, device=device)
    _dot_kernel[(1,)](a, b, out, 16, 64, 32)
    a, b = a.double(), b.double()
    assert ((out.double() - a @ b).abs() <= 2e-6 * (a.abs() @ b.abs())).all()


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        run_in_interpreter(__file__)
