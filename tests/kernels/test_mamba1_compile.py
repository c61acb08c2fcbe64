"""The Mamba-1 kernels, compiled for GPUs that are not here: see `test_compile.py`."""

import pytest
import torch


pytest.importorskip("triton")
from cases import BF16, F16, F32, FP8, INT8, INTERPRETED
from test_compile import LEAST_SHARED_MEMORY, Compiles, on_targets, sm_90

import replayssm_kernels as kernels
from replayssm_kernels import _launch, mamba1


pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles, and does not interpret")


@on_targets
def compiled(request, monkeypatch):
    """(name, result) of every kernel that a call launches."""
    found = []
    for name in ("_step_kernel", "_window_kernel", "_fold_kernel", "_scan_kernel"):
        monkeypatch.setattr(mamba1, name, Compiles(getattr(mamba1, name), request.param, found))
    monkeypatch.setattr(mamba1, "can_overlap", lambda device: request.param.arch == 90)
    monkeypatch.setattr(_launch, "can_limit_registers", lambda device: request.param.backend == "cuda")
    return found


@pytest.mark.parametrize(
    ("shape", "dtype", "checkpoint_dtype", "raw", "gate"),
    [
        ((2, 1, 8192, 16, 4), BF16, F32, True, True),
        ((2, 2, 3712, 16, 28), BF16, BF16, True, True),
        ((2, 1, 100, 8, 5), F16, F16, False, False),
        ((2, 1, 40, 256, 3), F32, F32, True, False),
    ],
    ids=["Jamba", "Zamba", "state 8, float16", "state 256, float32"],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_compiles_elsewhere(shape, dtype, checkpoint_dtype, raw, gate, tokens, compiled):
    batch, groups, channels, state, slots = shape
    zeros = lambda *size, dtype=dtype: torch.zeros(*size, dtype=dtype)  # noqa: E731
    x, B = zeros(batch, tokens, groups, channels), zeros(batch, tokens, groups, state)
    z = zeros(batch, tokens, groups, 2 * channels)[..., ::2] if gate else None
    buffers = [zeros(batch, groups, slots, size) for size in (channels, state, channels)]
    A, D = zeros(groups, state, channels, dtype=F32), zeros(groups, channels, dtype=F32)
    checkpoint, positions = zeros(batch, groups, state, channels, dtype=checkpoint_dtype), zeros(5, batch).int()
    bias = D if raw else None
    kernels.mamba1_step(positions, x, B, B, x, *buffers, A, D, checkpoint, dt_bias=bias, z=z)
    kernels.mamba1_fold(positions, *buffers, A, checkpoint, dt_bias=bias)
    kernels.mamba1_scan(x, B, B, x, A, D, checkpoint if gate else None, dt_bias=bias, z=z)
    step = "_step_kernel" if tokens == 1 else "_window_kernel"
    assert [name for name, _ in compiled] == [step, "_fold_kernel", "_scan_kernel"]
    assert max(result.metadata.shared for _, result in compiled) <= LEAST_SHARED_MEMORY


@sm_90
@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint_dtype", "seed"), [(INT8, 3), (FP8, None)], ids=str)
def test_8_bits_compile(checkpoint_dtype, seed, compiled):
    zeros = lambda *size, dtype=BF16: torch.zeros(*size, dtype=dtype)  # noqa: E731
    new, B = zeros(2, 1, 1, 256), zeros(2, 1, 1, 16)
    buffers = zeros(2, 1, 4, 256), zeros(2, 1, 4, 16), zeros(2, 1, 4, 256)
    A, D, scale = zeros(1, 16, 256, dtype=F32), zeros(1, 256, dtype=F32), zeros(2, 1, 1, 256, dtype=F32)
    owned = *buffers, A
    checkpoint, positions = zeros(2, 1, 16, 256, dtype=checkpoint_dtype), zeros(5, 2).int()
    how = {"dt_bias": D, "scale": scale, "seed": seed}
    kernels.mamba1_step(positions, new, B, B, new, *owned, D, checkpoint, z=new, **how)
    for inplace in (False, True):
        kernels.mamba1_fold(positions, *owned, checkpoint, inplace=inplace, **how)
    assert [name for name, _ in compiled] == ["_step_kernel", "_fold_kernel", "_fold_kernel"]
