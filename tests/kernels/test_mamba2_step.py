"""The Triton step of Mamba-2 against the formula in float64, token by token.

Without an accelerator the kernel runs in triton's interpreter, which must be chosen before triton is imported: a plain
run starts this file once more in a process of its own, with TRITON_INTERPRET=1. On a GPU: `pytest -m gpu`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
import replayssm_kernels


INTERPRETED = replayssm_kernels.is_available("cpu")
DEVICES = [*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
needs = pytest.mark.parametrize("device", DEVICES)

# batch, heads, groups, head_dim, state, capacity
SHAPES = {
    "one head": (2, 1, 1, 16, 16, 1),
    "narrow": (1, 2, 2, 16, 16, 2),
    "one head per group": (2, 3, 3, 64, 64, 16),
    "three heads per group": (2, 6, 2, 32, 128, 16),
    "sixteen heads per group": (2, 32, 2, 64, 128, 16),
    "head_dim 80": (2, 6, 2, 80, 128, 40),
    "head_dim 128, state 256": (2, 2, 1, 128, 256, 64),
    "state 256, one warp of rows": (2, 3, 1, 16, 256, 40),
    "odd state and capacity": (3, 4, 2, 24, 48, 5),
}


def inputs(shape, device, *, state_dtype=torch.float32, dtype=torch.float32, held=None, seed=0):
    """Random inputs in which the state, every slot and D all matter; unused slots are NaN."""
    batch, heads, groups, head_dim, state_dim, capacity = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    if held is None:  # a full row, an empty one, and something between
        held = [capacity, 0, (capacity + 1) // 2][:batch]
    used = torch.arange(capacity) < torch.tensor(held)[:, None]  # (batch, capacity)
    nan = float("nan")
    x = randn(batch, heads, capacity, head_dim).masked_fill(~used[:, None, :, None], nan)
    B = (randn(batch, groups, capacity, state_dim) / state_dim**0.5).masked_fill(~used[:, None, :, None], nan)
    dt = torch.rand(batch, heads, capacity, generator=generator).mul(0.5).masked_fill(~used[:, None, :], nan)
    return {
        "state": (randn(batch, heads, head_dim, state_dim) / state_dim**0.5).to(device, state_dtype),
        "x": x.to(device, dtype),
        "B": B.to(device, dtype),
        "dt": dt.to(device),
        "held": torch.tensor(held, dtype=torch.int32, device=device),
        "A": -torch.rand(heads, generator=generator).add(0.05).to(device),
        "C": randn(batch, groups, state_dim).to(device, dtype),
        "D": randn(heads).to(device),
    }


def reference(state, x, B, dt, held, A, C, D=None):
    """The recurrence itself, S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T, one slot after the other, in float64."""
    state, x, B, dt, A, C = (t.double().cpu() for t in (state, x, B, dt, A, C))
    batch, heads = state.shape[:2]
    y = torch.zeros(state.shape[:3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // B.shape[1])
            S = state[b, h]
            for j in range(int(held[b])):
                S = torch.exp(A[h] * dt[b, h, j]) * S + dt[b, h, j] * torch.outer(x[b, h, j], B[b, g, j])
            y[b, h] = S @ C[b, g]
            if D is not None and held[b] > 0:
                y[b, h] += D[h].double().cpu() * x[b, h, int(held[b]) - 1]
    return y


def assert_close(y, expected, tolerance):
    assert y.isfinite().all()
    error = (y.double().cpu() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@needs
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_recurrence(shape, device):
    args = inputs(shape, device)
    assert_close(replayssm_kernels.replay_step(**args), reference(**args), 1e-6)


@needs
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(state_dtype, dtype, device):
    args = inputs(SHAPES["three heads per group"], device, state_dtype=state_dtype, dtype=dtype)
    y = replayssm_kernels.replay_step(**args)
    assert y.dtype == dtype
    # The reference starts from the rounded inputs, so all that is left is the rounding of the output.
    assert_close(y, reference(**args), {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype])
    exact = torch.empty_like(y, dtype=torch.float32)
    assert replayssm_kernels.replay_step(**args, out=exact) is exact
    assert_close(exact, reference(**args), 1e-6)


@needs
def test_every_number_of_held_slots(device):
    *shape, capacity = 9, 2, 1, 16, 16, 8
    args = inputs((*shape, capacity), device, held=list(range(capacity + 1)))
    y = replayssm_kernels.replay_step(**args)
    assert_close(y, reference(**args), 1e-6)
    for row in range(capacity + 1):  # a row does not depend on its neighbours
        alone = {name: t[row : row + 1] if name not in ("A", "D") else t for name, t in args.items()}
        torch.testing.assert_close(replayssm_kernels.replay_step(**alone), y[row : row + 1], rtol=0, atol=0)


@needs
def test_an_empty_row_is_the_state_times_c(device):
    args = inputs(SHAPES["narrow"], device, held=[0])
    expected = torch.einsum("bhpn,bhn->bhp", args["state"], args["C"])
    torch.testing.assert_close(replayssm_kernels.replay_step(**args), expected, rtol=1e-5, atol=1e-6)


@needs
def test_without_d(device):
    args = inputs(SHAPES["narrow"], device) | {"D": None}
    assert_close(replayssm_kernels.replay_step(**args), reference(**args), 1e-6)


@needs
@pytest.mark.parametrize("scale", [0.0, 50.0], ids=["no decay", "total decay"])
def test_extreme_time_steps(scale, device):
    args = inputs(SHAPES["narrow"], device, held=[2])
    args["dt"] = args["dt"] * scale if scale else torch.zeros_like(args["dt"])
    args["A"] = args["A"] * 16
    assert_close(replayssm_kernels.replay_step(**args), reference(**args), 1e-6)


@needs
def test_strides(device):
    """Views with gaps and with permuted dimensions, among them layouts that a cache may choose."""
    args = inputs(SHAPES["three heads per group"], device)
    expected = replayssm_kernels.replay_step(**args)

    def permuted(t, *order):  # the same values, laid out in memory in another order
        inverse = [order.index(i) for i in range(t.ndim)]
        return t.permute(order).contiguous().permute(inverse)

    def gapped(t):  # every second element of a tensor that is NaN elsewhere
        wide = torch.full((*t.shape, 2), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., 0] = t
        return wide[..., 0]

    strided = {
        "state": permuted(args["state"], 0, 1, 3, 2),
        "x": permuted(args["x"], 0, 2, 1, 3),
        "B": permuted(args["B"], 2, 0, 1, 3),
        "dt": permuted(args["dt"], 2, 0, 1),
        "held": args["held"].repeat_interleave(2)[::2],
        "A": gapped(args["A"]),
        "C": gapped(args["C"]),
        "D": gapped(args["D"]),
    }
    assert not any(t.is_contiguous() for t in strided.values())
    out = torch.full((*expected.shape, 2), float("nan"), dtype=expected.dtype, device=device)
    replayssm_kernels.replay_step(**strided, out=out[..., 1])
    torch.testing.assert_close(out[..., 1], expected, rtol=1e-6, atol=1e-6)
    assert out[..., 0].isnan().all()
    expanded = args | {"A": args["A"][:1].expand(6), "D": args["D"][:1].expand(6)}
    assert_close(replayssm_kernels.replay_step(**expanded), reference(**expanded), 1e-6)


@needs
def test_the_inputs_are_only_read(device):
    args = inputs(SHAPES["narrow"], device)
    before = {name: t.clone() for name, t in args.items()}
    replayssm_kernels.replay_step(**args)
    for name, t in args.items():
        torch.testing.assert_close(t, before[name], rtol=0, atol=0, equal_nan=True)


@needs
def test_offsets_beyond_32_bits(device):
    """The third row lies 2^31 elements behind the first, at a stride of 2^30; only the pages in use are touched."""
    args = inputs((3, 1, 1, 16, 16, 2), device, state_dtype=torch.bfloat16, held=[1, 0, 2])
    far = torch.empty(2**31 + 16 * 16, dtype=torch.bfloat16, device=device)
    far = far.as_strided(args["state"].shape, (2**30, 256, 16, 1))
    far.copy_(args["state"])
    assert_close(replayssm_kernels.replay_step(**args | {"state": far}), reference(**args), 1e-6)


@needs
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t[..., :-1], "x has shape"),
        ("dt", lambda t: t[:, :1], "dt has shape"),
        ("held", lambda t: t.float(), "held counts slots"),
        ("C", lambda t: t[:, :1], "C has shape"),
        ("A", lambda t: t[:1], "A has shape"),
    ],
    ids=["x", "dt", "held", "C", "A"],
)
def test_misfits_raise(name, change, message, device):
    args = inputs(SHAPES["narrow"], device)
    with pytest.raises(ValueError, match=message):
        replayssm_kernels.replay_step(**args | {name: change(args[name])})


@needs
def test_heads_that_cannot_be_shared_out(device):
    args = inputs((1, 3, 3, 16, 16, 2), device)
    with pytest.raises(ValueError, match="shared out evenly"):
        replayssm_kernels.replay_step(**args | {"B": args["B"][:, :2], "C": args["C"][:, :2]})


if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_in_the_interpreter():
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        run = subprocess.run(
            command,
            env=env | {"TRITON_INTERPRET": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
        print(run.stdout.splitlines()[-1])
