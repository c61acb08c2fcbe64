"""The benchmark of the delta rules, without a GPU: its bytes, and that it has no speed for what is wrong."""

import dataclasses
import math
from types import SimpleNamespace

import benchmark_gated_delta as script
import pytest
import torch
from benchmark_kernels import Bench, Step


QWEN, KIMI = script.GEOMETRIES["Qwen3-Next"], script.GEOMETRIES["Kimi-Linear"]


def test_bytes_of_a_step():
    """One head of Qwen3-Next: 64 KiB of state; u and g in float32, half of a key head's k; a flush writes the state."""
    assert script.state_bytes(QWEN) == 32 * 65536
    assert script.slot_bytes(QWEN) == 32 * (128 * 4 + 4 + 128 * 2 // 2)
    assert script.slot_bytes(KIMI) == 32 * (128 * 4 + 128 * 4 + 128 * 2)
    plain, flush = Step(64, 0, 3, 1, 0), Step(64, 0, 3, 1, 4)
    held = script.state_bytes(QWEN) + 3 * script.slot_bytes(QWEN) + script.token_bytes(QWEN)
    assert script.step_bytes(QWEN, plain) == held + script.slot_bytes(QWEN)
    assert script.step_bytes(QWEN, flush) == held + script.state_bytes(QWEN)


class WithoutClock(Bench):
    def time(self, launch, sets, schedule, expected_us):
        return 10.0


class Kernels:
    """Outputs of the recurrence, all tokens since the first again at every call, off by a share."""

    def __init__(self, case, off):
        self.case, self.off, self.states = case, off, {}

    def gated_delta_step(self, positions, q, k, v, g, beta, k_buffer, u_buffer, g_buffer, state):
        new = SimpleNamespace(q=q, k=k, v=v, g=g, beta=beta)
        key = state.data_ptr()
        self.states[key] = seen = [*(self.states.get(key, []) if int(positions[0, 0]) > 0 else []), new]
        whole = SimpleNamespace(**{name: torch.cat([getattr(one, name) for one in seen], 1) for name in vars(new)})
        y = script.reference(self.case, state, whole)[:, -q.shape[1] :]
        return y * (1 + self.off)


@pytest.mark.parametrize("rule", [QWEN, KIMI], ids=lambda case: case.geometry)
@pytest.mark.parametrize("off", [0.0, 0.01])
def test_no_speed_of_what_is_wrong(rule, off):
    case = dataclasses.replace(rule, heads=2, key_heads=1, key_dim=8, value_dim=8, batch=2, activation="fp32")
    bench = WithoutClock(Kernels(case, off), None, "cpu", 1.0, 100)
    bench.bandwidth = 4e12
    step = script.measure_step(bench, case, 3, None) | {"tolerance": script.tolerance(case)}
    window = script.measure_window(bench, case, 2, 8) | {"tolerance": script.tolerance(case)}
    assert ("replay" in step) == ("buffer_len_1" in step) == ("cycle" in window) == (off == 0.0)
    assert all(math.isclose(error, off, rel_tol=0.2, abs_tol=1e-6) for error in step["errors"].values())
    about = dict(device="none", date="", torch="", triton="", fla=None, commit=None, bandwidth=4e12)
    text = script.report({"about": about, "steps": [step], "windows": [window]})
    assert ("no speed" in text) == (off != 0.0)
