"""benchmark_mamba1.py without a GPU: bytes, the check (with the reference ops in place of kernels), tables."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

from hf_replayssm.ops import mamba1


def load(name: str):
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bm = load("benchmark_mamba1")
JAMBA = bm.GEOMETRIES["Jamba-mini"]


class Reference:
    """The functions of `replayssm_kernels`, made of the reference ops. All rows are in the same phase."""

    def __init__(self, wrong: float = 1.0):
        self.wrong = wrong

    def mamba1_step(self, positions, x, B, C, dt, x_buffer, B_buffer, dt_buffer, A, D, state, *, dt_bias, z):
        _, first, held, count, fold = positions[:, 0].tolist()
        buffers = [buffer.roll(-first, 2) for buffer in (x_buffer, B_buffer, dt_buffer)]
        for buffer, new in zip(buffers, (x, B, dt)):
            buffer[:, :, held : held + count] = new.transpose(1, 2)
        y = mamba1.replay(C, *buffers, A, D, state, held, held + count, dt_bias=dt_bias, z=z)
        state.copy_(mamba1.fold(*buffers, A, state, fold, dt_bias=dt_bias))
        for buffer, rolled in zip((x_buffer, B_buffer, dt_buffer), buffers):
            buffer.copy_(rolled.roll(first, 2))
        return y.to(x.dtype) * self.wrong

    def mamba1_scan(self, x, B, C, dt, A, D, state, *, dt_bias, z):
        return mamba1.scan(C, x, B, dt, A, D, state, dt_bias=dt_bias, z=z)


def classic(state, x, dt, A, B, C, D, *, z, dt_bias, dt_softplus):
    """mamba_ssm's signature; where the state has heads, head by head."""
    arguments = lambda *pick: [t[pick] for t in (x, dt)]  # noqa: E731
    if state.dim() == 3:
        return mamba_selective_state_update(state, x, dt, A, B, C, D, dt_bias, dt_softplus, z)
    heads = range(state.shape[1])
    y = [
        mamba_selective_state_update(
            state[:, h], *arguments(slice(None), h), A[h], B[:, h], C[:, h], D[h], dt_bias[h], dt_softplus, z[:, h]
        )
        for h in heads
    ]
    return torch.stack(y, 1)


@pytest.fixture
def bench(monkeypatch):
    def make(kernels=None):
        one = bm.Bench(kernels or Reference(), classic, "cpu", 0.0, 1)
        one.bandwidth = 4.4e12
        monkeypatch.setattr(one, "time", lambda launch, sets, schedule, expected_us: 2.0 * len(schedule))
        return one

    return make


def tiny(groups=1, checkpoint="fp32", activation="fp32"):
    return bm.Case(bm.Geometry("tiny", groups, 8, 4), 3, checkpoint, activation)


def test_bytes_of_one_row_by_hand():
    case = bm.Case(JAMBA, 1, "fp32", "bf16")
    x, state, B = 8192 * 2, 8192 * 16 * 4, 16 * 2
    assert bm.state_bytes(case) == state
    assert bm.slot_bytes(case) == 2 * x + B
    own = 4 * x + 2 * B
    fixed = 8192 * 18 * 4
    plain = bm.Step(seen=9, first=0, held=2, count=1, fold=0)
    assert bm.step_bytes(case, plain) == state + 3 * (2 * x + B) + own + fixed + 20
    flush = bm.Step(seen=9, first=0, held=3, count=1, fold=4)
    assert bm.step_bytes(case, flush) == 2 * state + 3 * (2 * x + B) + own + fixed + 20
    assert bm.classic_bytes(case) == 2 * state + own + fixed
    assert bm.exponentials(case, flush) == 4 * 8192 * 16


@pytest.mark.parametrize("checkpoint, best", [("fp32", {4, 5, 6}), ("bf16", {3, 4})])
def test_the_shipped_length_has_next_to_the_fewest_bytes(checkpoint, best):
    case = bm.Case(JAMBA, 128, checkpoint, "bf16")
    cost = {n: bm.mean_bytes(case, bm.plain_schedule(n), bm.step_bytes) for n in range(1, 17)}
    assert min(cost, key=cost.get) in best
    assert cost[mamba1.BUFFER_LEN] <= 1.05 * min(cost.values()) and cost[1] > 1.2 * cost[mamba1.BUFFER_LEN]


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_right_gets_a_speed(groups, bench):
    row = bm.measure_step(bench(), tiny(groups), [1, 4])
    assert not row["wrong"] and max(row["errors"].values()) < 1e-5
    assert set(row["errors"]) == {"replay 1", "replay 4", "classic"}
    assert row["replay"]["4"]["cycle"]["us"] == 8.0 and row["classic"]["us"] == 2.0


def test_what_is_wrong_gets_none(bench):
    row = bm.measure_step(bench(Reference(wrong=1.01)), tiny(), [1, 4])
    assert row["wrong"] == ["replay 1", "replay 4"] and not row["replay"] and "classic" in row


def test_a_row_of_each_kind_is_in_the_tables(bench, tmp_path):
    one, case = bench(), tiny()
    about = {"device": "a device", "torch": "2", "triton": "3", "mamba_ssm": None, "commit": None,
             "bandwidth": {"bytes_per_s": 4.4e12}}  # fmt: skip
    tile = {**case.row(), "tokens": 1, "length": 4, "bound": 0.5}
    result = {
        "about": about,
        "steps": [bm.measure_step(one, case, [1, 4])],
        "windows": [bm.measure_window(one, case, 5)],
        "scans": [bm.measure_scan(one, case, 7)],
        "sweeps": [{**tile, "tile": "Tile(1)", "us": 1.0}, {**tile, "tile": "the default", "us": 2.0}],
        "failed": [],
    }
    path = tmp_path / "result.json"
    bm.write_json(result, str(path))
    text = bm.report(json.loads(path.read_text()))
    for words in ("classic / shipped", "Windows of T", "Scans", "Tile(1)", "the default 2.00", "by bytes 0.50", "tiny"):
        assert words in text
    assert bm.report(result | {"steps": [], "windows": [], "scans": [], "sweeps": []})


def test_settings():
    args = bm.parse(["--quick", "--buffer-len", "4"])
    assert args.geometry == ["Jamba-mini"] and 1 in args.buffer_len
    assert 1 in bm.parse(["--buffer-len", "5"]).buffer_len
    assert isinstance(bm.parse([]), types.SimpleNamespace | type(args))


def test_a_sweep_leaves_the_default_as_it_was(bench):
    kernels = pytest.importorskip("replayssm_kernels.mamba1")
    rows = bm.sweep(bench(), tiny(), [1, 4], 5)
    assert {row["tokens"] for row in rows} == {1, 5} and len({row["tile"] for row in rows}) > 20
    assert kernels.OVERRIDE is None
