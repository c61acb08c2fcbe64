"""The scan by flash-linear-attention: how it is called, when, and, on a GPU that has it, what it answers."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import sys
import types
import warnings

import pytest
import torch
from torch.nn import functional as F

from hf_replayssm.ops import flash_linear, mamba2


def inputs(groups: int = 2, tokens: int = 200, heads: int = 4, head_dim: int = 8, size: int = 16, seed: int = 0):
    """x, dt, A, B, C and D in float32."""
    random = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    dt = F.softplus(randn(2, tokens, heads) - 1)
    A = -torch.rand(heads, generator=random) * 4
    B, C = (randn(2, tokens, groups, size) for _ in range(2))
    return randn(2, tokens, heads, head_dim), dt, A, B, C, randn(heads), randn(2, heads, head_dim, size)


def documented(q, k, v, g, *, scale, initial_state, output_final_state, state_v_first):
    """What the package says that its function computes, token by token."""
    assert scale == 1.0 and output_final_state and state_v_first
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape and g.dtype == torch.float32
    shape = q.shape[0], q.shape[2], v.shape[3], q.shape[3]  # (b, h, v, k)
    state, outputs = torch.zeros(shape) if initial_state is None else initial_state, []
    assert state.shape == shape and state.dtype == torch.float32
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, 1).to(q.dtype), state


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("seen", [False, True])
def test_is_the_scan(seen, groups, parts, monkeypatch):
    *arguments, state = inputs(groups)
    calls = []
    monkeypatch.setattr(
        flash_linear, "chunk_simple_gla", lambda: lambda *args, **kw: (calls.append(0), documented(*args, **kw))[1]
    )
    if parts == 3:  # 64, 64 and 72 tokens
        monkeypatch.setattr(flash_linear, "PART_ELEMENTS", 2 * 4 * 16 * 100)
    got = flash_linear.scan(*arguments, state if seen else None)
    expected = mamba2.scan(*arguments, state if seen else None)
    for ours, reference in zip(got, expected):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert len(calls) == (4 if parts == 3 else 1)


def test_whom_it_serves(monkeypatch):
    monkeypatch.setattr(flash_linear, "chunk_simple_gla", lambda: documented)
    tensor = lambda device, dtype: types.SimpleNamespace(  # noqa: E731
        device=torch.device(device), element_size=lambda: dtype.itemsize
    )
    assert flash_linear.serves(tensor("cuda", torch.bfloat16)) and flash_linear.serves(tensor("cuda", torch.float16))
    assert not flash_linear.serves(tensor("cuda", torch.float32)) and not flash_linear.serves(torch.ones(2).bfloat16())
    monkeypatch.setattr(flash_linear, "chunk_simple_gla", lambda: None)
    assert not flash_linear.serves(tensor("cuda", torch.bfloat16))


@pytest.fixture
def importing(monkeypatch):
    """`importing(error)` makes the import of the package raise it."""

    def importing(error: Exception) -> None:
        def raising(name, *args, **kwargs):
            if name.partition(".")[0] == "fla":
                raise error
            return real(name, *args, **kwargs)

        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        real = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", raising)
        flash_linear.chunk_simple_gla.cache_clear()

    yield importing
    flash_linear.chunk_simple_gla.cache_clear()


def test_a_missing_package_is_none(importing):
    importing(ModuleNotFoundError("No module named 'fla'", name="fla"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash_linear.chunk_simple_gla() is None


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'einops'", name="einops"), AttributeError("no attribute 'jit'")]
)
def test_a_broken_package_is_said_once(error, importing):
    importing(error)
    with pytest.warns(UserWarning, match=rf"scanned in PyTorch \({type(error).__name__}: [Nn]o .*--upgrade"):
        assert flash_linear.chunk_simple_gla() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash_linear.chunk_simple_gla() is None


def test_an_old_version_is_not_used(monkeypatch):
    """One that would take a state of another layout without a word."""
    module = types.ModuleType("fla.ops.simple_gla")
    module.chunk_simple_gla = lambda q, k, v, g=None, scale=None, initial_state=None, **kwargs: None
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flash_linear.chunk_simple_gla.cache_clear()
    try:
        with pytest.warns(UserWarning, match="old version.*--upgrade"):
            assert flash_linear.chunk_simple_gla() is None
    finally:
        flash_linear.chunk_simple_gla.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA (or ROCm) device")
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.timeout(900)  # it compiles and times some fifty variants of a kernel for each shape
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "size", "dtype"),
    [(777, 8, 64, 128, torch.bfloat16), (100, 4, 8, 16, torch.float16)],
)
def test_the_package_itself(tokens, heads, head_dim, size, dtype, monkeypatch):
    """Against float64 of the same inputs; a bar of the rounding of dt x and of y to 16 bits."""
    x, dt, A, B, C, D, state = (tensor.cuda() for tensor in inputs(2, tokens, heads, head_dim, size))
    monkeypatch.setattr(flash_linear, "PART_ELEMENTS", 2 * heads * size * 256)  # several parts of 777 tokens
    x, B, C = x.to(dtype), B.to(dtype), C.to(dtype)
    assert flash_linear.serves(x)
    for before in (state, None):
        exact = mamba2.scan(
            *(tensor.double() for tensor in (x, dt, A, B, C, D)), None if before is None else before.double()
        )
        for got, expected in zip(flash_linear.scan(x, dt, A, B, C, D, before), exact):
            error = float((got.double() - expected).norm() / expected.norm())
            assert error <= (8e-3 if dtype == torch.bfloat16 else 1e-3), error
    known = inspect.signature(flash_linear.chunk_simple_gla()).parameters
    assert {"scale", "initial_state", "output_final_state", "state_v_first"} <= known.keys()
