"""lm-evaluation-harness on enabled models: tasks and data of our own, nothing from a network.

Run where lm-evaluation-harness is installed (the extra `lm-eval`); it is no light package.
"""

from __future__ import annotations

import json

import pytest
from tiny_text import TEXTS, save_tiny, tiny_tokenizer
from typer.testing import CliRunner


lm_eval = pytest.importorskip("lm_eval")

from transformers import AutoModelForCausalLM

import hf_replayssm
from hf_replayssm.cli import app


# A task of each kind of request.
TASKS = {
    "choice": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_target: "{{label}}"
        doc_to_choice: "{{choices}}"
        metric_list:
          - metric: acc
        """,
    "text": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{question}}"
        metric_list:
          - metric: word_perplexity
        """,
    "generation": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[0]}}"
        generation_kwargs:
          until: ["\\n\\n"]
          max_gen_toks: 12
          do_sample: false
        metric_list:
          - metric: exact_match
        """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, the tasks and their data."""
    import textwrap

    folder = tmp_path_factory.mktemp("harness")
    save_tiny(folder / "model")
    rows = [
        {"question": text, "choices": [" a state", " and the window"], "label": n % 2}
        for n, text in enumerate(TEXTS)
        if text
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        head = f"task: tiny_{name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n"
        head += f"    test: {folder / 'rows.jsonl'}\n"
        (folder / "tasks" / f"{name}.yaml").write_text(head + textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_cache(folder, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def responses(folder, model, **arguments) -> dict[str, list]:
    """What the harness got for each request, by task."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"tiny_{name}" for name in TASKS],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        **arguments,
    )
    assert found["results"].keys() == {f"tiny_{name}" for name in TASKS}
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


def numbers(requests) -> list[float]:
    flat = []
    for one in requests:
        flat += (
            numbers(one) if isinstance(one, (list, tuple)) else [float(one)] if isinstance(one, (int, float)) else []
        )
    return flat


@pytest.fixture(scope="module")
def upstream(folder):
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    return responses(folder, "hf", model_args={"pretrained": str(folder / "model"), "device": "cpu"}, batch_size=3)


def assert_same(found, expected, rel=1e-4):
    assert found["tiny_generation"] == expected["tiny_generation"]
    for name in ("tiny_choice", "tiny_text"):
        assert len(numbers(found[name])) >= 6
        assert numbers(found[name]) == pytest.approx(numbers(expected[name]), rel=rel)


def test_an_enabled_model_in_the_harness_own_type(folder, upstream):
    from lm_eval.models.huggingface import HFLM

    model = hf_replayssm.enable(AutoModelForCausalLM.from_pretrained(folder / "model").eval())
    made = []
    handle = model.register_forward_pre_hook(lambda m, a, kwargs: made.append(kwargs.get("cache")), with_kwargs=True)
    lm = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=3)
    assert_same(responses(folder, lm), upstream)
    handle.remove()
    assert any(isinstance(cache, hf_replayssm.ReplayCache) for cache in made)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_model_type_of_this_package(folder, upstream, window):
    from hf_replayssm.evaluation.harness import ReplayLM

    arguments = {"pretrained": str(folder / "model"), "device": "cpu", "buffer_len": 4, "window": window}
    lm = ReplayLM.create_from_arg_obj(arguments, {"batch_size": 3})
    assert hf_replayssm.is_enabled(lm.model) and lm.replay_config.buffer_len == 4
    calls = []
    lm.model.register_forward_pre_hook(
        lambda m, a, kwargs: calls.append((kwargs.get("cache"), (kwargs.get("input_ids") if not a else a[0]).shape[1])),
        with_kwargs=True,
    )
    assert_same(responses(folder, lm), upstream)
    replayed = [length for cache, length in calls if isinstance(cache, hf_replayssm.ReplayCache)]
    assert (5 in replayed) == (window == 5)
    without = [length for cache, length in calls if not isinstance(cache, hf_replayssm.ReplayCache)]
    assert bool(without) == (window is None), "log-likelihoods come through the cache exactly where a window is given"


def test_a_low_precision_checkpoint_shows_in_the_log_likelihoods(folder, upstream):
    arguments = {
        "pretrained": str(folder / "model"),
        "device": "cpu",
        "buffer_len": 1,
        "checkpoint_dtype": "bfloat16",
        "window": 1,
    }
    import hf_replayssm.evaluation.harness  # noqa: F401

    found = responses(folder, "hf-replayssm", model_args=arguments, batch_size=3)
    gap = max(abs(a - b) for a, b in zip(numbers(found["tiny_choice"]), numbers(upstream["tiny_choice"])))
    assert 1e-5 < gap < 1.0


def test_the_static_cache(folder, upstream):
    arguments = f"pretrained={folder / 'model'},device=cpu,cache_implementation=replayssm_static"
    import hf_replayssm.evaluation.harness  # noqa: F401

    assert_same(responses(folder, "hf-replayssm", model_args=arguments, batch_size=3), upstream)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"buffer_len": 0}, "buffer_len"),
        ({"window": 0}, "window must be"),
        ({"cache_implementation": "dynamic"}, "model type `hf`"),
        ({"checkpoint_dtype": "int3"}, "checkpoint_dtype"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_loaded(wrong, message):
    from hf_replayssm.evaluation.harness import ReplayLM

    with pytest.raises(ValueError, match=message):
        ReplayLM("no/such-model", **wrong)


def test_the_harness_command(folder, tmp_path):
    arguments = ["lm-eval", "run", "--model", "hf-replayssm", "--model_args", f"pretrained={folder / 'model'},window=8"]
    arguments += ["--device", "cpu", "--batch_size", "2", "--include_path", str(folder / "tasks")]
    result = CliRunner().invoke(app, [*arguments, "--tasks", "tiny_choice", "--output_path", str(tmp_path)])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert "tiny_choice" in result.output
    (written,) = tmp_path.rglob("results_*.json")
    assert "acc,none" in json.loads(written.read_text())["results"]["tiny_choice"]
