"""benchmark_kernels.py and plot_kernels.py without a GPU: arithmetic, schedules, the check, tables and files."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch


SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bk = load("benchmark_kernels")
plot_kernels = load("plot_kernels")

NEMOTRON = bk.GEOMETRIES["Nemotron-H-8B"]
TINY = bk.Geometry(bk.TARGET_GEOMETRY, heads=4, head_dim=8, state=16, groups=2)


def case(checkpoint="fp32", batch=1, geometry=NEMOTRON, activation="bf16"):
    return bk.Case(geometry, batch, checkpoint, activation)


# ---- bytes and bounds


def test_bytes_of_one_row_by_hand():
    state = 128 * 64 * 128 * 4
    x, shared, heads = 128 * 64 * 2, 8 * 128 * 2, 128
    slot = x + shared + heads * 4  # x, B, final dt in fp32
    token = x + 2 * shared + heads * 2 + x  # x, B, C, raw dt, y
    parameters, positions = 3 * 4 * heads, 5 * 4
    one = case()
    assert bk.state_bytes(one) == state and bk.slot_bytes(one) == slot and bk.token_bytes(one) == token
    assert bk.classic_bytes(one) == 2 * state + token + parameters
    plain = bk.Step(seen=9, first=0, held=5, count=1, fold=0)
    assert bk.step_bytes(one, plain) == state + 5 * slot + token + slot + parameters + positions
    flush = bk.Step(seen=15, first=0, held=15, count=1, fold=16)  # its own token is folded, so it is not appended
    assert bk.step_bytes(one, flush) == 2 * state + 15 * slot + token + parameters + positions
    window = bk.Step(seen=40, first=3, held=20, count=5, fold=15)
    assert bk.step_bytes(one, window) == 2 * state + 25 * slot + 5 * token + parameters + positions
    # A plain step with the convolution: three inputs of history read, one written, four taps and a bias.
    channels = (128 * 64 + 2 * 8 * 128) * 2
    assert bk.decode_bytes(one, plain) == bk.step_bytes(one, plain) + (3 + 1 + 4 + 1) * channels
    assert bk.conv_bytes(one) == (1 + 3 + 1 + 1 + 4 + 1) * channels


@pytest.mark.parametrize("checkpoint, expected_us, possible", [("fp32", 550, 2.24), ("bf16", 290, 4.0)])
def test_the_bound_is_the_one_that_was_estimated(checkpoint, expected_us, possible):
    """Batch 512 at 4.40 TB/s; the classic step took 1241.6 and 1161.0 us."""
    many = case(checkpoint, 512)
    bound = bk.bound_us(bk.mean_bytes(many, bk.plain_schedule(16)), 4.40e12)
    assert bound == pytest.approx(expected_us, rel=0.035)
    assert {"fp32": 1241.6, "bf16": 1161.0}[checkpoint] / bound == pytest.approx(possible, rel=0.035)


@pytest.mark.parametrize("name", bk.GEOMETRIES)
def test_bytes_grow_with_the_batch_and_the_buffer(name):
    geometry = bk.GEOMETRIES[name]
    assert geometry.heads % geometry.groups == 0
    for checkpoint in bk.DTYPES:
        one, two = (case(checkpoint, batch, geometry) for batch in (1, 2))
        by_held = [bk.step_bytes(one, bk.Step(0, 0, held, 1, 0)) for held in range(4)]
        assert {b - a for a, b in zip(by_held, by_held[1:])} == {bk.slot_bytes(one)}
        assert bk.step_bytes(one, bk.Step(0, 0, 1, 1, 0)) < bk.step_bytes(two, bk.Step(0, 0, 1, 1, 0))
        assert bk.fold_bytes(one, 16) < 2 * bk.state_bytes(one) + 17 * bk.slot_bytes(one)


def test_cycle_averages():
    assert bk.cycle_average(10.0, 26.0, 16) == pytest.approx(11.0)
    assert bk.cycle_average(10.0, 26.0, 1) == 26.0
    one = case()
    steps = [bk.step_bytes(one, step) for step in bk.plain_schedule(16)]
    by_hand = bk.cycle_average(sum(steps[:-1]) / 15, steps[-1], 16)
    assert bk.mean_bytes(one, bk.plain_schedule(16)) == pytest.approx(by_hand)


def test_layers_that_flush_together_or_spread():
    together = bk.layers_at_once(24, 16, 10.0, 26.0, staggered=False)
    staggered = bk.layers_at_once(24, 16, 10.0, 26.0, staggered=True)
    assert together["worst"] == 24 * 26.0
    assert staggered["worst"] == 22 * 10.0 + 2 * 26.0  # 24 layers over 16 phases: two at once at most
    assert together["mean"] == pytest.approx(staggered["mean"]) == pytest.approx(24 * 11.0)


# ---- schedules


@pytest.mark.parametrize("buffer_len", [1, 4, 16])
def test_plain_cycles_advance_and_flush_once(buffer_len):
    steps = bk.plain_schedule(buffer_len, 3, seen=7)
    assert [step.seen for step in steps] == list(range(7, 7 + 3 * buffer_len))
    assert [step.held for step in steps] == 3 * list(range(buffer_len))
    assert [step.fold for step in steps] == 3 * ([0] * (buffer_len - 1) + [buffer_len])


@pytest.mark.parametrize("window, wanted", [(2, 32), (4, 32), (5, 32), (8, 32), (16, 32), (5, 64), (16, 96)])
def test_window_cycles_are_steady_and_fit(window, wanted):
    buffer_len, slots = bk.window_sizes(window, wanted)
    assert slots >= wanted and buffer_len >= 16 and slots == buffer_len + 2 * window + 1
    steps = bk.window_schedule(buffer_len, window, slots, 4)
    held = first = 0
    for step in steps:
        assert (step.held, step.first, step.count) == (held, first, window)
        assert (step.fold > 0) == (held + window > buffer_len + window)
        assert step.fold in (0, held - window) and held + window <= slots
        held, first = held + window - step.fold, (first + step.fold) % slots
    cycle = bk.window_cycle(buffer_len, window, slots)
    assert [step.fold > 0 for step in cycle] == [False] * (len(cycle) - 1) + [True]
    assert sum(step.fold for step in cycle) == window * len(cycle)  # as many tokens leave as come
    shape = [(step.held, step.fold) for step in cycle]
    assert [(step.held, step.fold) for step in steps[-len(cycle) :]] == shape


# ---- the whole run, with kernels in PyTorch and without a clock


class TorchKernels:
    """The functions of replayssm_kernels, row by row as their description says. `broken` makes one of them wrong."""

    def __init__(self, broken: str = ""):
        self.broken = broken

    def mamba2_step(self, positions, x, B, C, dt, x_buffer, B_buffer, dt_buffer, A, D, checkpoint, **options):
        fused, dt_bias = options.pop("fused"), options.pop("dt_bias")
        assert not options
        if fused and x.shape[1] > 1:
            raise ValueError("fused takes one token")
        dt = torch.nn.functional.softplus(dt.float() + dt_bias)
        slots, y = x_buffer.shape[2], torch.zeros_like(x, memory_format=torch.contiguous_format)
        for b, (_, first, held, count, fold) in enumerate(positions.T.tolist()):
            for i in range(count):
                slot = (first + held + i) % slots
                x_buffer[b, :, slot], B_buffer[b, :, slot], dt_buffer[b, :, slot] = x[b, i], B[b, i], dt[b, i]
            S = checkpoint[b].float()
            for i in range(held + count):
                S = self.advance(S, x_buffer[b], B_buffer[b], dt_buffer[b], (first + i) % slots, A)
                if i >= held:
                    t = i - held
                    C_t = C[b, t].float().repeat_interleave(A.numel() // C.shape[2], dim=0)
                    y[b, t] = ((S * C_t[:, None]).sum(-1) + D[:, None] * x[b, t]).to(y.dtype)
                if i + 1 == fold and self.broken != "flush":
                    checkpoint[b] = S
        return y

    @staticmethod
    def advance(S, x, B, dt, slot, A):
        B_j = B[:, slot].float().repeat_interleave(A.numel() // B.shape[0], dim=0)
        return (
            torch.exp(A * dt[:, slot])[:, None, None] * S + (dt[:, slot, None] * x[:, slot])[..., None] * B_j[:, None]
        )

    def causal_conv(self, positions, inputs, ring, weight, bias, activation):
        assert activation == "silu"
        kernel, slots, outputs = weight.shape[1], ring.shape[1], torch.zeros_like(inputs)
        for b, (seen, *_, count, _fold) in enumerate(positions.T.tolist()):
            for i in range(count):
                ring[b, (seen + i) % slots] = inputs[b, i]
                total = bias.float()
                for k in range(min(kernel, seen + i + 1)):
                    total = total + weight[:, kernel - 1 - k].float() * ring[b, (seen + i - k) % slots].float()
                outputs[b, i] = torch.nn.functional.silu(total)
        return outputs

    def mamba2_decode(self, positions, xBC, dt, ring, weight, bias, *rest, activation, **options):
        x_buffer, B_buffer, dt_buffer, A, D, checkpoint = rest
        geometry = types.SimpleNamespace(**{**vars(TINY), "inner": TINY.inner})
        x, B, C = bk.split(geometry, self.causal_conv(positions, xBC, ring, weight, bias, activation))
        return self.mamba2_step(positions, x, B, C, dt, x_buffer, B_buffer, dt_buffer, A, D, checkpoint, **options)

    def mamba2_fold(self, positions, x_buffer, B_buffer, dt_buffer, A, checkpoint, *, inplace):
        assert inplace
        for b, (_, first, _held, _count, fold) in enumerate(positions.T.tolist()):
            S = checkpoint[b].float()
            for i in range(fold):
                S = self.advance(S, x_buffer[b], B_buffer[b], dt_buffer[b], (first + i) % x_buffer.shape[2], A)
            checkpoint[b] = S
        return checkpoint


def classic(state, x, dt, A, B, C, D, *, dt_bias, dt_softplus):
    """mamba_ssm's step in PyTorch, with its arguments."""
    assert dt_softplus and A.stride()[1:] == (0, 0) and dt.stride(-1) == dt_bias.stride(-1) == D.stride(-1) == 0
    B, C = (part.float().repeat_interleave(x.shape[1] // part.shape[1], dim=1)[:, :, None] for part in (B, C))
    dt = torch.nn.functional.softplus(dt.float() + dt_bias)[..., None]
    state.copy_(state.float() * torch.exp(dt * A) + dt * B * x[..., None])
    return ((state.float() * C).sum(-1) + D * x).to(x.dtype)


def run(tmp_path, *arguments, kernels=None, classic=classic):
    """The rows of a run on the CPU in which every launch takes its bytes at 2 TB/s."""
    names = ["--geometry", bk.TARGET_GEOMETRY, "--window-batch", "2", "--batch", "2", "--layers", "24"]
    path = tmp_path / "results.json"
    args = bk.parse([*names, "--json", str(path), *arguments])
    bench = bk.Bench(kernels or TorchKernels(), classic, "cpu", 1.0, 1)
    bench.bandwidth = 4e12

    def time(launch, sets, schedule, expected_us):
        bench.warm(launch, sets, schedule)
        return 2 * expected_us  # expected: at 4 TB/s

    bench.time = time
    about = {
        "date": "2026-11-30", "device": "a made-up GPU", "torch": "1", "triton": "2", "mamba_ssm": "3", "commit": None,
        "activation": args.activation, "bandwidth": {"bytes_per_s": 4e12, "how": "made up", "all": {}},
    }  # fmt: skip
    result = {"about": about, "steps": [], "convs": [], "windows": [], "layers": [], "targets": []}
    jobs = [job._replace(case=bk.Case(TINY, *tuple(vars(job.case).values())[1:])) for job in bk.jobs_of(args)]
    bk.run_jobs(bench, jobs, result, args, 0.0)
    return result, json.loads(path.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.manual_seed(0)
    return run(tmp_path_factory.mktemp("run"), "--buffer-len", "4", "--windows", "2", "5:32", "16")


def test_every_section_is_measured_and_right(whole):
    result, written = whole
    assert written["steps"][0]["replay"]["cycle"] == result["steps"][0]["replay"]["cycle"]
    assert [len(result[section]) for section in ("steps", "convs", "windows", "layers")] == [2, 2, 6, 2]
    for section in ("steps", "convs", "windows"):
        for row in result[section]:
            assert bk.trouble(row) is None
            assert row["errors"] and all(error < row["tolerance"] for error in row["errors"].values())
    for row in result["steps"]:
        assert set(row["errors"]) == {"replay", "classic", "buffer_len_1", "fused", "apart", "fold"}
        for part in ("cycle", "nonflush", "flush"):
            figure = row["replay"][part]
            assert figure["fraction"] == pytest.approx(0.5)
            assert figure["us"] == pytest.approx(2 * figure["bytes"] / 4e12 * 1e6)
        parts = (row["replay"][part]["us"] for part in ("nonflush", "flush"))
        assert row["replay"]["cycle"]["us"] == pytest.approx(bk.cycle_average(*parts, 4))
        assert row["ratios"]["ratio"] == pytest.approx(row["classic"]["us"] / row["replay"]["cycle"]["us"])
    assert set(result["convs"][0]["decode"]) == {"default", "fused", "apart"}


def test_the_check_holds_in_single_precision(tmp_path):
    torch.manual_seed(1)
    options = ["--activation", "fp32", "--checkpoint", "fp32", "fp16", "--buffer-len", "3", "--windows", "4"]
    result, _ = run(tmp_path, *options)
    for row in [*result["steps"], *result["convs"], *result["windows"]]:
        assert bk.trouble(row) is None
        assert row["checkpoint"] != "fp32" or max(row["errors"].values()) < 1e-5


def test_a_wrong_kernel_gets_no_speed_and_the_rest_goes_on(tmp_path):
    torch.manual_seed(0)
    result, written = run(tmp_path, "--buffer-len", "4", "--windows", "5", kernels=TorchKernels(broken="flush"))
    row = result["steps"][0]
    assert "replay" in row["wrong"] and "replay" not in row and row["ratios"]["ratio"] is None
    assert "classic" not in row["wrong"] and row["classic"]["us"] > 0
    assert "cycle" not in result["windows"][0]
    written["about"]["seconds"] = 1.0
    text = bk.report(written)
    assert "no speed of it" in text and "replay is off by" in text


def test_a_row_that_fails_is_an_error_row(tmp_path):
    class Failing(TorchKernels):
        def causal_conv(self, *arguments):
            raise RuntimeError("no such luck")

    result, written = run(tmp_path, "--buffer-len", "2", "--windows", "2", "--checkpoint", "fp32", kernels=Failing())
    assert written["convs"][0]["error"] == "RuntimeError: no such luck"
    assert "replay" in written["steps"][0] and "cycle" in written["windows"][0]
    assert "no such luck" in bk.report(written)


def test_without_mamba_ssm_there_is_no_ratio(tmp_path):
    result, _ = run(tmp_path, "--buffer-len", "2", "--windows", "--checkpoint", "fp32", classic=None)
    row = result["steps"][0]
    assert "classic" not in row and row["ratios"]["ratio"] is None and row["ratios"]["own"] > 0


def test_errors_are_seen():
    expected = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    assert bk.relative_error(expected, expected, (1, 3)) == 0
    values = expected.clone()
    values[2, :, 4] *= 1.5  # one head of one row
    assert bk.relative_error(values, expected, (1, 3)) == pytest.approx(0.5)
    values[0, 0, 0, 0] = math.nan
    assert bk.relative_error(values, expected, (1, 3)) == math.inf
    assert bk.rows_to_check(512, "cpu").unique().numel() == 64
    assert bk.rows_to_check(512, "cpu")[[0, -1]].tolist() == [0, 511]
    assert bk.rows_to_check(3, "cpu").tolist() == [0, 1, 2]


# ---- tables, files, command line


def figure(us, fraction=0.9):
    return {"us": us, "bytes": 1.0, "bound_us": us * fraction, "fraction": fraction}


def made_up() -> dict:
    """Two geometries at two batches, one window, one convolution."""
    steps = []
    for geometry in (bk.TARGET_GEOMETRY, "Zamba2-7B"):
        for batch, classic, cycle in ((1, 3.8, 4.0), (128, 309.6, 141.0)):
            row = {
                **case(batch=batch, geometry=bk.GEOMETRIES[geometry]).row(), "buffer_len": 16,
                "replay": {"cycle": figure(cycle, 0.93), "nonflush": figure(0.95 * cycle), "flush": figure(2 * cycle)},
                "classic": figure(classic), "buffer_len_1": figure(1.7 * cycle), "fold": figure(1.9 * cycle),
                "variants": {"fused": figure(cycle), "apart": figure(cycle)}, "errors": {}, "wrong": [],
            }  # fmt: skip
            steps.append({**row, "ratios": bk.step_ratios(row)})
    many = case(batch=128).row()
    window = {
        **many, "window": 5, "slots": 64, "buffer_len": 53, "calls": 9, "errors": {}, "wrong": [],
        "cycle": figure(170.0), "nonflush": figure(150.0), "flush": figure(330.0),
    }  # fmt: skip
    conv = {**many, "conv": figure(5.0), "decode": {"default": figure(144.0)}, "errors": {}, "wrong": []}
    lost = {**case(batch=512).row(), "buffer_len": 16, "error": "skipped: needs 900 GB, 139 GB are free"}
    return {
        "about": {
            "date": "2026-11-30", "device": "a made-up GPU", "torch": "1", "triton": "2", "mamba_ssm": "2.3.2",
            "commit": "abc", "activation": "bf16", "seconds": 12.0,
            "bandwidth": {"bytes_per_s": 4.4e12, "how": "torch.sum", "all": {}},
        },
        "steps": [*steps, lost], "convs": [conv], "windows": [window],
        "layers": bk.layer_rows(steps, 24), "targets": [],
    }  # fmt: skip


def test_targets_are_judged():
    result = made_up()
    found = {(target["what"], target["where"]): target for target in bk.all_targets(result)}
    at_128 = f"{bk.TARGET_GEOMETRY} batch 128 fp32"
    assert found["ratio", at_128]["value"] == pytest.approx(309.6 / 141) and found["ratio", at_128]["met"]
    assert found["own", at_128]["met"] and found["fraction", at_128]["met"]
    assert found["fraction", "Zamba2-7B batch 128 fp32"]["met"]
    assert ("ratio", "Zamba2-7B batch 128 fp32") not in found
    assert found["ratio", f"{bk.TARGET_GEOMETRY} batch 1 fp32"]["met"]
    assert found["flush_classic", at_128]["met"] and found["conv share", at_128]["met"]
    assert found["window 5 of 64 slots, nonflush", at_128]["met"]
    assert found["ratio", f"{bk.TARGET_GEOMETRY} batch 512 fp32"]["met"] is None  # not measured
    result["steps"][1]["replay"]["cycle"]["us"] = 200.0
    found = {(target["what"], target["where"]): target["met"] for target in bk.all_targets(result)}
    assert found["ratio", at_128] is False


def test_the_report_says_it_all():
    text = bk.report(made_up())
    for words in ("a made-up GPU", "4.400 TB/s", "2.20 >=2.10 met", "1.70 >=1.65 met", "0.93 >=0.92 met"):
        assert words in text
    assert "needs 900 GB" in text and "staggered" in text and "0.035 <=0.050 met" in text
    assert "not measured: ratio" in text
    assert max(map(len, text.splitlines())) <= 200


def test_json_is_whole_and_strict(tmp_path):
    path = tmp_path / "results.json"
    bk.write_json({"a": [math.nan, 1.5, (math.inf, 2)], "b": {"c": "d"}}, str(path))
    assert json.loads(path.read_text()) == {"a": [None, 1.5, [None, 2]], "b": {"c": "d"}}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_the_command_line():
    args = bk.parse([])
    jobs = bk.jobs_of(args)
    steps = [job for job in jobs if job.section == "steps"]
    assert len(steps) == len(bk.GEOMETRIES) * 2 * 5 and jobs[0].case.geometry is NEMOTRON
    assert {dict(job.options)["window"] for job in jobs if job.section == "windows"} == {2, 4, 5, 8, 16}
    assert len(bk.jobs_of(bk.parse(["--quick"]))) <= 6
    with pytest.raises(SystemExit):
        bk.parse(["--geometry", "a-mule"])


def test_mamba_ssm_is_found_where_it_is_named(tmp_path):
    import zipfile

    wheel = tmp_path / "mamba_ssm-2.3.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mamba_ssm/ops/triton/selective_state_update.py", "raise RuntimeError")
    for given in (wheel, tmp_path):
        folder = bk.mamba_ssm_folder(str(given))
        assert (folder / "ops/triton/selective_state_update.py").exists()
        assert bk.mamba_ssm_folder(str(folder)) == bk.mamba_ssm_folder(str(folder.parent)) == folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="mamba_ssm"):
        bk.mamba_ssm_folder(str(tmp_path / "empty"))


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(bk, "triton", None)
    with pytest.raises(SystemExit, match="triton"):
        bk.load_ours()
    monkeypatch.setattr(bk, "triton", object())
    monkeypatch.setitem(sys.modules, "replayssm_kernels", types.SimpleNamespace(mamba2_step=len))
    with pytest.raises(SystemExit, match="mamba2_decode, causal_conv, mamba2_fold"):
        bk.load_ours()


def test_the_plot_has_a_line_per_geometry_and_dtype(tmp_path):
    result = made_up()
    lines = plot_kernels.series(result, "ratio")
    assert set(lines) == {(bk.TARGET_GEOMETRY, "fp32"), ("Zamba2-7B", "fp32")}
    assert lines["Zamba2-7B", "fp32"] == ([1, 128], pytest.approx([0.95, 309.6 / 141]))
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / name for name in ("one.svg", "two.svg")]
    for picture in pictures:
        plot_kernels.plot(json.loads(json.dumps(result)), picture)
    assert pictures[0].read_text() == pictures[1].read_text()
    assert "<svg" in pictures[0].read_text()


def test_memory_of_a_sequence_by_hand():
    args = bk.parse(["--checkpoint", "fp32", "int8", "--geometry", "Nemotron-H-8B", "--layers", "2", "--memory", "1"])
    rows = {row["checkpoint"]: row for row in bk.memory_rows(args)}
    elements, rows_of_state = 128 * 64 * 128, 128 * 64
    assert rows["classic"]["state_bytes"] == rows["fp32"]["state_bytes"] == 2 * 4 * elements
    assert rows["int8"]["state_bytes"] == 2 * (elements + 4 * rows_of_state)  # a float32 scale for each row
    assert rows["classic"]["buffer_bytes"] == 0 < rows["int8"]["buffer_bytes"] == rows["fp32"]["buffer_bytes"]
    assert rows["int8"]["sequences"] == 10**9 // rows["int8"]["bytes"] > 2 * rows["classic"]["sequences"]
    assert case("int8").classic == case("fp32") and case("bf16").classic == case("bf16")


@pytest.mark.parametrize("checkpoint", bk.SCALED)
def test_what_8_bits_store_is_read_back(checkpoint):
    bench = bk.Bench(None, None, "cpu", 1.0, 0)
    one = case(checkpoint, 3, TINY)
    state, scale = bench.state(one)
    assert (
        state.element_size() == 1 and scale.shape == (3, 4, 8, 1) and state.nbytes + scale.nbytes == bk.state_bytes(one)
    )
    values = bk.stored(state, scale, torch.tensor([2, 0]))
    assert values.shape == (2, 4, 8, 16) and 0.5 < values.std() < 1.5
    assert torch.equal(values[0], state[2].double() * scale[2].double())
