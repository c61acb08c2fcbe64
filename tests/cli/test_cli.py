"""The command line, run in this process; one test starts it as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_model
from tiny_text import TEXTS, save_tiny, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from hf_replayssm import bundled
from hf_replayssm.cli import app
from hf_replayssm.cli.common import size
from hf_replayssm.evaluation import evaluate_perplexity, load_documents


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Stand-ins for the bundled models and text."""
    folder = tmp_path_factory.mktemp("assets")
    save_tiny(folder / "target")
    save_tiny(folder / "draft", num_hidden_layers=2, seed=0)
    (folder / "heldout.txt").write_text("\n\n".join(text for text in TEXTS if text), encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def run(assets, monkeypatch):
    """Run a command; the bundled assets are the stand-ins."""
    monkeypatch.setattr(bundled, "ASSETS", assets)

    def invoke(*arguments, code=0, stdin=None):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        said = f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert result.exit_code == code, said
        if code:
            assert "Traceback" not in said
        return result

    return invoke


def only_json(text: str) -> dict:
    """Standard output with `--json -` is JSON and nothing else; and strictly so."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ----------------------------------------------------------------------------------------------- perplexity
def test_perplexity_without_arguments_is_the_bundled_model_on_the_bundled_text(run, assets, tmp_path):
    result = run("perplexity", "--json", tmp_path / "out.json")
    assert "perplexity per token" in result.stdout and "bits per byte" in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    assert {"perplexity", "tokens", "words", "mode", "cache"} <= set(values)
    assert (values["mode"], values["cache"], values["model"]) == ("step", "replayssm", "bundled")
    assert values["cache_stats"]["checkpoint_writes"] > 0 and values["skipped_documents"] == 1
    model = AutoModelForCausalLM.from_pretrained(assets / "target")
    tokenizer = AutoTokenizer.from_pretrained(assets / "target")
    expected = evaluate_perplexity(model, tokenizer, TEXTS, mode="full")
    assert values["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert (values["tokens"], values["words"], values["bytes"]) == (expected.tokens, expected.words, expected.bytes)


def test_all_modes_and_caches_agree(run, assets):
    found = {}
    for mode in ("step", "window", "full"):
        for cache in ("replayssm", "dynamic"):
            arguments = ("--mode", mode, "--cache", cache, "--batch-size", 3, "--quiet", "--json", "-")
            window = ("--window", 5) if mode == "window" else ()
            found[mode, cache] = only_json(run("perplexity", *arguments, *window).stdout)
    perplexities = [values["perplexity"] for values in found.values()]
    assert max(perplexities) == pytest.approx(min(perplexities), rel=1e-4)
    assert len({values["tokens"] for values in found.values()}) == 1
    assert found["full", "replayssm"]["cache"] == "none"


def test_perplexity_of_a_file_a_model_and_its_settings(run, assets):
    arguments = ("--model", assets / "target", "--context", 8, "--stride", 4, "--max-tokens", 30, "--buffer-len", 4)
    dtypes = ("--dtype", "bfloat16", "--checkpoint-dtype", "bfloat16", "--device", "cpu")
    result = run("perplexity", assets / "heldout.txt", *arguments, *dtypes, "--json", "-")
    values = only_json(result.stdout)
    assert (values["tokens"], values["max_length"], values["stride"]) == (30, 8, 4)
    assert (values["dtype"], values["replay"]["checkpoint_dtype"]) == ("bfloat16", "bfloat16")
    assert values["replay"]["buffer_len"] == 4
    assert "perplexity per token" in result.stderr  # the table makes room for the JSON


def test_one_stream_with_carried_state(run, assets):
    values = only_json(
        run("perplexity", "--file", assets / "heldout.txt", "--one-stream", "--carry", "--json", "-").stdout
    )
    assert (values["documents"], values["contexts"], values["carry_state"]) == (1, 1, True)


@pytest.mark.parametrize("reference", ["dynamic", "none"])
def test_a_comparison_of_caches(run, reference):
    result = run("perplexity", "--compare", reference, "--json", "-")
    assert "argmax agreement" in result.stderr
    values = only_json(result.stdout)
    assert values["cache"] == "replayssm"
    comparison = values["comparison"]
    assert comparison["reference"]["cache"] == reference
    assert comparison["kl"] < 1e-6 and comparison["argmax_agreement"] == 1.0
    assert abs(comparison["delta_logprob"]) < 1e-5 and comparison["delta_logprob_se"] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.txt"], 1, "no file missing.txt"),
        (["--file", "missing"], 1, "There is no file missing"),
        (["--model", "no/such-model"], 1, "No model 'no/such-model'"),
        (["--column", "body"], 1, "has no column 'body'. Its columns are: text (str)"),
        (["--mode", "sideways"], 2, "sideways"),
        (["a.txt", "--file", "b.txt"], 2, "Name the data once"),
        (["--cache", "dynamic", "--buffer-len", "4"], 2, "--buffer-len"),
        (["--buffer-len", "0"], 2, "buffer_len"),
        (["--checkpoint-dtype", "int3"], 2, "checkpoint_dtype"),
        (["--checkpoint-dtype", "int8", "--rounding", "up"], 2, "rounding"),
        (["--checkpoint-dtype", "int8", "--rounding-seed", "-1"], 2, "seed"),
        (["--cache", "dynamic", "--rounding-seed", "1"], 2, "--rounding-seed"),
        (["--dtype", "float7"], 2, "--dtype must be"),
        (["--device", "abacus"], 2, "--device 'abacus' cannot be used"),
        (["--compare", "replayssm"], 2, "Name another one"),
        (["--compare", "dynamic", "--mode", "full"], 2, "--mode step"),
        (["--carry", "--context", "4"], 2, "leave them out with --carry"),
        (["--context", "4", "--stride", "5"], 1, "stride must lie between"),
        (["--json", "/no/such/folder/out.json"], 2, "no folder"),
        (["--window", "0"], 2, "window"),
        (["--compare", "dynamic", "--resume", "folder"], 2, "has no --resume"),
    ],
)
def test_errors_are_one_clear_line(run, monkeypatch, arguments, code, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    monkeypatch.setenv("COLUMNS", "400")
    result = run("perplexity", *arguments, code=code)
    assert message in " ".join(result.stderr.split())
    if code == 1:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_an_evaluation_goes_on_where_it_was(run, tmp_path):
    arguments = (
        "perplexity",
        "--batch-size",
        2,
        "--context",
        8,
        "--resume",
        tmp_path / "run",
        "--quiet",
        "--json",
        "-",
    )
    first = only_json(run(*arguments).stdout)
    (file,) = (tmp_path / "run").glob("finished-*")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))
    again = only_json(run(*arguments).stdout)
    assert {**again, "seconds": 0, "tokens_per_second": 0} == {**first, "seconds": 0, "tokens_per_second": 0}
    assert sum(len(file.read_text().splitlines()) for file in (tmp_path / "run").glob("finished-*")) == len(lines)
    result = run(*arguments, "--window", 3, "--mode", "window", code=1)
    assert "mode was 'step' and is 'window', window was None and is 3" in result.stderr


def test_a_batch_that_fails_is_said_and_the_rest_is_shown(run, tmp_path, monkeypatch):
    from hf_replayssm.evaluation.engine import Run

    whole, measure = only_json(run("perplexity", "--quiet", "--json", "-").stdout), Run._measure
    monkeypatch.setattr(
        Run,
        "_measure",
        lambda self, batch, *rest: (
            measure(self, batch, *rest) if batch[0].document != 0 else (_ for _ in ()).throw(RuntimeError("no kernel"))
        ),
    )
    arguments = ("perplexity", "--batch-size", 1, "--resume", tmp_path / "run", "--json", "-")
    result = run(*arguments, code=1)
    assert "error: 1 of 6 batches failed: batch " in result.stderr and "no kernel" in result.stderr
    assert "perplexity per token" in result.stderr
    values = json.loads(result.stdout)
    assert values["failed_batches"][0]["documents"] == [0] and 0 < values["tokens"] < whole["tokens"]


@pytest.mark.slow  # for the time of starting
def test_under_a_launcher_only_the_main_process_speaks(run, assets, tmp_path):
    import several

    save_tiny(tmp_path / "model")
    arguments = ("--model", tmp_path / "model", "--file", assets / "heldout.jsonl", "--batch-size", 2)
    source = """
        import sys
        from hf_replayssm.cli import app
        app(["perplexity", *sys.argv[1:]])
    """
    shown, silent = several.succeed(several.launch(source, *arguments, "--json", tmp_path / "out.json", count=2))
    assert "perplexity per token" in shown and not silent.strip()
    values, alone = json.loads((tmp_path / "out.json").read_text()), run("perplexity", *arguments, "--json", "-")
    assert (values["nll"], values["tokens"]) == tuple(only_json(alone.stdout)[name] for name in ("nll", "tokens"))
    for process in several.launch(source, *arguments, "--column", "body", count=2):
        assert process.returncode == 1 and "error in process " in process.stderr
    for process in several.launch(source, *arguments, "--compare", "dynamic", count=2):
        assert process.returncode == 2 and "in one process" in process.stderr


def test_each_process_has_a_device_of_its_own(monkeypatch):
    from hf_replayssm.cli.common import pick_device

    found = {"is_available": True, "device_count": 2, "current_accelerator": torch.device("cuda")}
    for name, value in found.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert pick_device("auto") == torch.device("cuda", rank)
        assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="Process 2 has no cuda device of its own: there are 2 here"):
        pick_device("auto")


def test_an_unsupported_model_is_named_and_other_caches_remain(run, tmp_path):
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    save_tiny(tmp_path)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    result = run("perplexity", "--model", tmp_path, code=1)
    assert "llama" in result.stderr and result.stderr.count("\n") == 1
    assert only_json(run("perplexity", "--model", tmp_path, "--cache", "dynamic", "--json", "-").stdout)["tokens"] > 0


def test_debug_shows_the_traceback(assets, monkeypatch):
    result = CliRunner().invoke(app, ["perplexity", "missing.txt", "--debug"])
    assert isinstance(result.exception, FileNotFoundError)


# ----------------------------------------------------------------------------------------------- generate
def test_generate_streams_the_text(run):
    result = run("generate", "The state", "--max-new-tokens", 12, "--stats", "--json", "-")
    values = only_json(result.stdout)
    assert (values["new_tokens"], values["cache"], values["do_sample"]) == (12, "replayssm", False)
    assert "cache: checkpoint writes" in result.stderr and "tokens/s" in result.stderr
    streamed = run("generate", "The state", "--max-new-tokens", 12).stdout
    assert streamed.strip() == values["text"].strip()


def test_every_cache_and_draft_gives_the_same_greedy_text(run):
    ways = {
        "replay": [],
        "dynamic": ["--cache", "dynamic"],
        "short buffer": ["--buffer-len", 2],
        "bundled draft": ["--assistant", "bundled"],
        "prompt lookup": ["--prompt-lookup", 3],
    }
    texts = {}
    for name, arguments in ways.items():
        values = only_json(run("generate", "The state is the state is", "-n", 24, *arguments, "--json", "-").stdout)
        texts[name] = values["text"]
        assert values["new_tokens"] == 24
        assert (values["speculation"] is not None) == (name in ("bundled draft", "prompt lookup"))
        if values["speculation"] is not None:
            assert values["cache_stats"]["crops"] == values["speculation"]["rounds"] > 0
    assert set(texts.values()) == {texts["replay"]}


def test_stats_of_speculation(run):
    arguments = ("generate", "The state is the state is", "-n", 24, "--prompt-lookup", 3, "--stats", "--json", "-")
    result = run(*arguments)
    values = only_json(result.stdout)
    speculation, stats = values["speculation"], values["cache_stats"]
    assert speculation["new_tokens"] == values["new_tokens"] == 24
    assert speculation["target_forwards"] == stats["forwards"] == 24 - speculation["forwards_saved"]
    assert 24 - speculation["rounds"] <= speculation["accepted"] <= speculation["drafted"] <= 3 * speculation["rounds"]
    assert speculation["mean_accepted"] == pytest.approx(sum(speculation["accepted_per_round"]) / speculation["rounds"])
    said = " ".join(result.stderr.split())
    assert f"rounds {speculation['rounds']} " in said and f"{speculation['mean_accepted']:.2f} per round" in said
    assert f"{speculation['accepted']} of {speculation['drafted']} (" in said and "tokens/s" in said
    assert f"{speculation['forwards_saved']} fewer than without drafts" in said


def test_a_draft_with_another_tokenizer(run, tmp_path):
    """Only generate's own loop serves it; its cache tells the same of it."""
    tiny_model("bamba", vocab_size=280, num_hidden_layers=2, seed=0).save_pretrained(tmp_path / "draft")
    tiny_tokenizer(vocab_size=280).save_pretrained(tmp_path / "draft")
    arguments = ("generate", "The state is the state is", "-n", 16, "--json", "-")
    values = only_json(run(*arguments, "--assistant", tmp_path / "draft").stdout)
    assert values["text"] == only_json(run(*arguments).stdout)["text"]
    speculation, stats = values["speculation"], values["cache_stats"]
    assert speculation["rounds"] == speculation["target_forwards"] == stats["forwards"]
    assert speculation["new_tokens"] == 16 == speculation["rounds"] + speculation["accepted"]
    assert speculation["drafted"] - speculation["accepted"] == stats["tokens_cropped"]
    assert speculation["draft_forwards"] is None and speculation["accepted_per_round"] == []


def test_sampling_is_repeatable(run):
    def text(*arguments):
        return only_json(run("generate", "One", "-n", 16, *arguments, "--json", "-").stdout)["text"]

    sampled = ("--temperature", "1.2", "--top-p", "0.95", "--top-k", "50")
    assert text(*sampled, "--seed", 1) == text(*sampled, "--seed", 1) != text(*sampled, "--seed", 2)
    assert text("--temperature", "0") == text()


def test_the_prompt_comes_from_anywhere(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("One two\n", encoding="utf-8")
    wanted = ("--max-new-tokens", 4, "--json", "-")
    expected = only_json(run("generate", "One two", *wanted).stdout)
    for arguments, stdin in (
        (("--prompt-file", tmp_path / "prompt.txt"), None),
        ((), "One two\n"),
        (("-",), "One two"),
    ):
        values = only_json(run("generate", *arguments, *wanted, stdin=stdin).stdout)
        assert (values["prompt"], values["text"]) == ("One two", expected["text"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([""], 1, "The prompt is empty"),
        (["a", "--prompt-file", "b"], 2, "Give the prompt once"),
        (["--prompt-file", "missing"], 1, "There is no file missing"),
        (["a", "--assistant", "bundled", "--prompt-lookup", "3"], 2, "choose one"),
        (["a", "--assistant", "bundled", "--cache", "dynamic"], 2, "Use --cache replayssm"),
        (["a", "--cache", "dynamic", "--buffer-len", "4"], 2, "--buffer-len"),
        (["a", "--temperature", "0", "--top-p", "0.5"], 2, "--temperature 0 is greedy"),
        (["a", "--max-new-tokens", "0"], 2, "max-new-tokens"),
    ],
)
def test_errors_of_generate(run, monkeypatch, arguments, code, message):
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    monkeypatch.setenv("COLUMNS", "400")
    assert message in " ".join(run("generate", *arguments, code=code).stderr.split())


# ----------------------------------------------------------------------------------------------- doctor
def test_doctor_says_what_is_here(run):
    result = run("doctor")
    for word in ("transformers", "in the tested range", "Devices", "cpu", "mamba2"):
        assert word in result.stdout
    report = only_json(run("doctor", "--json", "-").stdout)
    assert report["versions"]["torch"] == torch.__version__.split("+")[0] or report["versions"]["torch"]
    assert report["ok"] and report["ops"][0]["reason"]


def test_doctor_says_what_a_model_gets_layer_by_layer(run, assets, tmp_path):
    AutoConfig.from_pretrained(assets / "target").save_pretrained(tmp_path)  # a config, no weights
    report = only_json(run("doctor", "--model", tmp_path, "--json", "-").stdout)
    assert report["model"]["supported"]
    treatments = [layer["treatment"] for layer in report["model"]["layers"]]
    assert treatments == ["replay", "attention cache", "replay"]
    assert "attention cache" in run("doctor", "--model", "bundled").stdout


def test_doctor_on_an_unsupported_model_says_so_and_fails(run, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path, code=1)
    assert "'llama' is not supported" in result.stdout and "nemotron_h" in result.stdout


def test_doctor_check(run, assets):
    report = only_json(run("doctor", "--check", "--model", assets / "target", "--json", "-").stdout)
    assert {check["family"] for check in report["checks"]} == {"bamba"}
    assert all(check["ok"] for check in report["checks"])
    assert "rejected window: ok" in run("doctor", "--check").stdout


def test_doctor_check_fails_where_replay_is_wrong(run, assets, monkeypatch):
    import hf_replayssm

    monkeypatch.setattr(hf_replayssm.ReplayCache, "crop", lambda self, count: None)
    result = run("doctor", "--check", "--model", assets / "target", code=1)
    assert "rejected window: FAILED" in result.stdout and "steps over a flush: ok" in result.stdout


def test_doctor_names_a_release_outside_the_tested_range(run, monkeypatch):
    monkeypatch.setattr("hf_replayssm.versions.TESTED_TRANSFORMERS", ">=4,<5")
    result = run("doctor")
    assert "OUTSIDE the tested range >=4,<5" in result.stdout and "doctor --check" in result.stdout


# ----------------------------------------------------------------------------------------------- the rest
def test_help_and_version(run):
    for arguments in (["--help"], ["perplexity", "--help"], ["generate", "--help"], ["doctor", "--help"]):
        assert "Usage" in run(*arguments).stdout
    import hf_replayssm

    assert run("--version").stdout.strip() == hf_replayssm.__version__


def test_the_harness_command_says_what_is_missing(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name.endswith("harness")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = run("lm-eval", "run", "--tasks", "any", code=1)
    assert "pip install" in result.stderr and "hf-replayssm[lm-eval]" in result.stderr


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "hf_replayssm", "perplexity", "missing.txt"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # as this process finds the packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    # (Its last line: a package that is installed beside may have something to say when it is imported.)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: There is no file missing.txt")


def test_missing_assets_say_where_they_come_from(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "ASSETS", tmp_path)
    with pytest.raises(FileNotFoundError, match="scripts/train_bundled.py"):
        bundled.target_path()
    with pytest.raises(ValueError, match="not as 'csv'"):
        bundled.heldout_path("csv")


def test_bundled_models_load(assets, monkeypatch):
    monkeypatch.setattr(bundled, "ASSETS", assets)
    model, tokenizer = bundled.load_target()
    draft, draft_tokenizer = bundled.load_draft(dtype=torch.bfloat16)
    assert (model.dtype, draft.dtype, model.training) == (torch.float32, torch.bfloat16, False)
    assert tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    assert bundled.heldout_path().suffix == ".txt" and bundled.heldout_path("jsonl").suffix == ".jsonl"


@pytest.mark.skipif(not (bundled.ASSETS / "target").exists(), reason="the bundled models are not in this checkout")
def test_the_bundled_model_knows_its_text():
    model, tokenizer = bundled.load_target()
    documents = load_documents(bundled.heldout_path("jsonl"))
    step = evaluate_perplexity(model, tokenizer, documents, max_length=64, max_tokens=256)
    full = evaluate_perplexity(model, tokenizer, documents, max_length=64, max_tokens=256, mode="full")
    assert step.nll == pytest.approx(full.nll, rel=1e-5) and step.tokens == 256
    assert step.perplexity < 60  # a model that knows nothing has 1024


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (3.4e6, "3.4 MB"), (5e15, "5000.0 TB")]
)
def test_sizes(value, said):
    assert size(value) == said
