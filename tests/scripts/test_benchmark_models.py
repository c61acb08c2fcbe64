"""The benchmarks of whole models on a tiny geometry on the CPU: what they compare, count and write, not the times."""

from __future__ import annotations

import functools
import json
import math

import benchmark_generate
import benchmark_speculative
import geometries
import model_timing
import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, StaticCache

import hf_replayssm
from hf_replayssm import layers
from hf_replayssm.speculative import acceptance


@functools.cache
def tiny(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return hf_replayssm.enable(geometries.build(geometries.named("tiny"), "cpu", dtype))


# Geometries.


@pytest.mark.parametrize(
    "name, billions, layers_of_state", [("Nemotron-H-8B", 8.10, 24), ("Zamba2-7B", 7.36, 81), ("mamba2-2.7b", 2.83, 64)]
)
def test_sizes_are_those_of_the_checkpoints(name, billions, layers_of_state):
    """(mamba2-2.7b has 2.70 with one table for embedding and head; here the head has its own.)"""
    config = geometries.named(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.003)
    kinds = [kind for kind in config.layer_types if kind in ("linear_attention", "hybrid")]
    assert len(kinds) == layers_of_state
    heads, head_dim, state = {"N": (128, 64, 128), "Z": (112, 64, 64), "m": (80, 64, 128)}[name[0]]
    assert geometries.state_bytes(config) == layers_of_state * heads * head_dim * state * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_token_is_the_id_after_it(dtype):
    model = tiny(dtype)
    ids = geometries.random_prompt(model, 3, 7)
    new = model.generate(ids, max_new_tokens=40)[:, 7:]
    assert torch.equal(new, (ids[:, -1:] + 1 + torch.arange(40)) % 256)
    logits = model(input_ids=ids).logits.float()
    best, second = logits.topk(2).values.unbind(-1)
    assert bool(((best - second) > 0.15 * best).all())
    # Still the other logits depend on the tokens before.
    other = model(input_ids=torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], dim=1)).logits.float()
    assert model_timing.distance(other[:, -1], logits[:, -1]) > 0.1


def test_tied_embeddings_are_parted_and_drafts_share_the_vocabulary():
    config = geometries.draft_of("Zamba2-7B")
    config.vocab_size = 500
    assert config.tie_word_embeddings
    model = geometries.build(config, "cpu", torch.float32)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() != embedding.data_ptr()
    everything = sum(p.nbytes for p in model.parameters())
    assert geometries.weight_bytes(model) == everything - embedding.nbytes
    for name in geometries.GEOMETRIES:
        assert geometries.draft_of(name).vocab_size == geometries.named(name).vocab_size


def test_other_configs_are_found_in_folders_and_unknown_names_say_what_there_is(tmp_path):
    tiny_model("bamba").config.save_pretrained(tmp_path)
    assert geometries.named(str(tmp_path)).model_type == "bamba"
    assert geometries.draft_of(str(tmp_path)) is None
    with pytest.raises(ValueError, match="Nemotron-H-8B, Bamba-9B"):
        geometries.named(str(tmp_path / "nothing"))


# Comparisons and clocks.


def log_of(*logits: torch.Tensor) -> model_timing.LogitsLog:
    log = model_timing.LogitsLog()
    log.logits = dict(enumerate(logits))
    return log


def test_what_differs_is_said():
    tokens, logits = torch.tensor([[1, 2, 3]]), torch.randn(2, 50)
    compare = functools.partial(model_timing.compare, dtype=torch.bfloat16)
    assert compare(tokens, log_of(logits), tokens, log_of(logits * 1.01)) == (pytest.approx(0.01, rel=0.02), None)
    assert "1/3 = 33.3%"[-5:] in compare(tokens, log_of(logits), tokens + torch.tensor([0, 0, 1]), log_of(logits))[1]
    assert "logits differ" in compare(tokens, log_of(logits), tokens, log_of(logits * 1.4))[1]
    assert "logits differ" in compare(tokens, log_of(logits, logits * math.nan), tokens, log_of(logits, logits))[1]
    assert "no logits" in compare(tokens, log_of(), tokens, log_of(logits))[1]


def test_means_are_over_whole_cycles():
    steps = [9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 5.0]
    assert model_timing.summary(steps, 3) == {"median_ms": 1.0, "worst_ms": 9.0, "cycle_mean_ms": 14 / 6}
    found = benchmark_speculative.over_cycles([1.0, 7.0, 2.0, 3.0, 8.0, 1.0], [False, True, False, False, True, False])
    assert (found["cycle_mean_ms"], found["flushes"]) == (pytest.approx(13 / 3), 2)
    assert benchmark_speculative.over_cycles([1.0, 2.0], [False, True])["cycle_mean_ms"] == 1.5


def test_a_row_that_fails_or_comes_too_late_costs_no_other(tmp_path):
    path = tmp_path / "record.json"
    record = model_timing.Record({"device": "none"}, str(path), time_limit=100.0)
    record.add({"n": 1}, lambda: {"ms": 3.0})
    record.add({"n": 2}, lambda: 1 / 0)
    record.began -= 200
    record.add({"n": 3}, lambda: pytest.fail("the time was over"))
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["ms"] == 3.0 and "ZeroDivisionError" in rows[1]["error"] and "time limit" in rows[2]["skipped"]


def test_products_are_called_as_often_as_in_a_forward():
    linears = model_timing.products_of(tiny())
    # Two mixers of two, one MLP of two, attention of four, and the head.
    assert len(linears) == 4 + 2 + 4 + 1
    assert model_timing.time_products(linears, 3) > 0


# Speculation.


class NoGraph:
    """A graph without a device: a replay runs what was captured."""

    def __init__(self, launch):
        self.replay = launch


@pytest.fixture(scope="module")
def speculated(tmp_path_factory):
    path = tmp_path_factory.mktemp("speculation") / "results.json"
    sizes = ["--geometry", "tiny", "--device", "cpu", "--dtype", "float32", "--rounds", "6", "--repeats", "1"]
    benchmark_speculative.main([*sizes, "--batch", "1", "3", "--json", str(path)])
    return json.loads(path.read_text())


def rows_of(result: dict, section: str) -> list[dict]:
    return [row for row in result["rows"] if row["section"] == section]


def test_acceptance_is_forced_and_nothing_is_wrong(speculated):
    assert not [row for row in speculated["rows"] if "wrong" in row]
    eager = [row for row in rows_of(speculated, "decoding") if row["path"] == "eager"]
    assert [(row["batch"], row["candidates"]) for row in eager] == [
        (1, "even"), (1, "upstream"), (3, "even"), (3, "ragged"),
    ]  # fmt: skip
    for row in eager:
        assert row["ratio"] > 0 and row["tokens_per_s"] > 0 and row["rounds_per_s"] > 0
        if row["candidates"] != "ragged":
            assert row["accepted_per_round"] == 3 and row["rounds"] == 7 and row["difference"] < 1e-4
        else:
            assert 2.4 < row["accepted_per_round"] <= 3.2
    captured = [row for row in rows_of(speculated, "decoding") if row["path"] == "captured"]
    assert len(captured) == 4 and all("ratio" in row or "skipped" in row for row in captured)


def test_forwards_and_overhead_are_there(speculated):
    for row in rows_of(speculated, "forwards"):
        assert row["one"]["tokens"] == 1 and row["window"]["tokens"] == 5
        assert all(row[name]["eager"]["flushes"] >= 2 and row[name]["products_ms"] > 0 for name in ("one", "window"))
        assert row["ratios"]["eager"] > 0
    overhead = rows_of(speculated, "overhead")
    assert len(overhead) == 4 + 2
    assert all(row["median_ms"] > 0 and row["rounds"] >= 4 for row in overhead)
    assert all(row["new_tokens_per_round"] > 4 for row in overhead)  # the drafts are found, and right
    about = speculated["about"]
    assert about["geometry"] == "tiny" and {"date", "device", "torch", "transformers", "seconds"} <= set(about)


def test_the_tables_can_be_printed_again(speculated, tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(speculated))
    benchmark_speculative.main(["--show", str(path)])
    printed = capsys.readouterr().out
    assert "accepted/round" in printed and "Overhead of a round" in printed and "upstream" in printed


def options(*arguments: str):
    sizes = ["--geometry", "tiny", "--device", "cpu", "--dtype", "float32", "--rounds", "4", "--repeats", "1"]
    return benchmark_speculative.parse([*sizes, *arguments])


def test_wrong_tokens_get_no_speed(monkeypatch):
    monkeypatch.setattr(acceptance, "_run_length", lambda accept, available: available)  # every draft is taken
    row = benchmark_speculative.Decoding(tiny(), 1, False, options()).measure("even")
    assert "tokens differ" in row["wrong"] and "ratio" not in row


def test_wrong_logits_get_no_speed(monkeypatch):
    """A window whose state is wrong: the tokens are right by their margin, the logits are not."""
    from hf_replayssm.ops import mamba2

    replay = mamba2.replay

    def without_state(C, x, B, dt, A, D, checkpoint, start, end):
        return replay(C, x, B, dt, A, D, checkpoint * 0 if C.shape[1] > 1 else checkpoint, start, end)

    monkeypatch.setattr(mamba2, "replay", without_state)
    row = benchmark_speculative.Decoding(tiny(), 1, False, options()).measure("even")
    assert "logits differ" in row["wrong"] and "ratio" not in row


@pytest.mark.parametrize("tokens", [1, 5])
@torch.no_grad()
def test_what_a_forward_sends_to_the_device_can_be_given_again(tokens):
    """As for a graph: the same forward from the same cache, with the recorded tensors, over a whole flush cycle."""
    forwards, uploads = benchmark_speculative.Forwards(tiny(), 2, tokens, 9), benchmark_speculative.Uploads()
    for _ in range(18):
        before = forwards.cache.snapshot()
        with uploads.recorded():
            expected = forwards.call(forwards.window)
        forwards.cache.restore(before)
        with uploads.given_again():
            assert torch.equal(forwards.call(forwards.window), expected)
        if tokens > 1:
            forwards.cache.crop(-1)
    assert forwards.flushes() > 1 and (tokens == 1 or uploads.sent)
    with uploads.given_again(), pytest.raises((RuntimeError, StopIteration)):
        forwards.call(torch.ones((2, tokens + 2), dtype=torch.long))


@pytest.mark.parametrize("tokens", [1, 5])
@torch.no_grad()
def test_forwards_through_the_static_cache(tokens, monkeypatch):
    monkeypatch.setattr(benchmark_speculative, "graph_of", NoGraph)
    row = benchmark_speculative.static_forwards(tiny(), 2, tokens, 9, 6)
    assert row["difference"] < 1e-4 and row["forwards"] == 6 and row["cycle_mean_ms"] > 0


# Decoding through generate.


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "results.json"
    sizes = ["--geometry", "tiny", "--device", "cpu", "--dtype", "float32", "--cycles", "1", "--prompt", "20"]
    benchmark_generate.main([*sizes, "--batch", "1", "3", "--json", str(path)])
    return json.loads(path.read_text())


def test_variants_are_compared_and_timed(generated):
    rows = {(row["variant"], row["batch"]): row for row in generated["rows"]}
    assert not [row for row in rows.values() if row.get("wrong") or row.get("error")]
    assert {variant for variant, batch in rows if batch == 1} == set(benchmark_generate.VARIANTS)
    for name in ("upstream-captured", "upstream-static", "replay-eager"):
        assert rows[name, 1]["compared_with"] == "upstream-dynamic" and rows[name, 1]["difference"] < 1e-3
    for (variant, _), row in rows.items():
        if "skipped" not in row:
            not_counted = benchmark_generate.CAPTURED_BY if variant == "upstream-captured" else 0
            assert len(row["steps_ms"]) == 16 - not_counted and row["worst_ms"] >= row["median_ms"] > 0
            assert row["first_token_ms"] > 0
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["cycle_mean_ms"])
    printed = benchmark_generate.report(generated)
    assert "cycle mean, ms" in printed and "replay-eager" in printed


def bench(*arguments: str) -> benchmark_generate.Bench:
    sizes = ["--geometry", "tiny", "--device", "cpu", "--dtype", "float32", "--cycles", "1", "--prompt", "20"]
    model = geometries.build(geometries.named("tiny"), "cpu", torch.float32)
    return benchmark_generate.Bench(
        model, benchmark_generate.parse([*sizes, *arguments]), benchmark_generate.Bounds(model, None)
    )


def test_a_flush_that_writes_nothing_gets_no_speed(monkeypatch):
    """The tokens are right all the same, by their margin."""
    monkeypatch.setattr(layers.ReplayLayer, "_write_checkpoint", lambda *args: None)
    one = bench()
    one.measure("upstream-dynamic", 2)
    row = one.measure("replay-eager", 2)
    assert "logits differ" in row["wrong"] and "median_ms" not in row


def test_a_call_captured_by_hand_sees_new_inputs(monkeypatch):
    monkeypatch.setattr(benchmark_generate, "graph_of", NoGraph)
    monkeypatch.setattr(  # as on a GPU
        "transformers.GenerationMixin._valid_auto_compile_criteria",
        lambda self, model_kwargs, config: isinstance(model_kwargs["cache"], StaticCache),
    )
    one, calls = bench(), []
    init = benchmark_generate.CapturedCall.__init__

    def remembered(self, model):
        init(self, model)
        calls.append(self)

    monkeypatch.setattr(benchmark_generate.CapturedCall, "__init__", remembered)
    one.measure("upstream-dynamic", 2)
    row = one.measure("upstream-captured", 2)
    assert isinstance(calls[0].inputs["attention_mask"], dict)
    assert "wrong" not in row and row["difference"] < 1e-4
    # Each call of generate has a graph: 16 steps behind the first token.
    assert [call.calls for call in calls] == [16, 16] and all(call.graph is not None for call in calls)


def test_the_plot_is_drawn(generated, tmp_path):
    pytest.importorskip("matplotlib")
    for row in generated["rows"]:
        row["floor"] = {"ms": 1.0}
    benchmark_generate.plot(generated, str(tmp_path / "plot.svg"))
    assert "replay-eager" in (tmp_path / "plot.svg").read_text() or (tmp_path / "plot.svg").stat().st_size > 5000
