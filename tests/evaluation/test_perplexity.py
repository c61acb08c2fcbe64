"""Perplexity through the cache: the same tokens and the same sums, however they are fed."""

from __future__ import annotations

import json
import math

import pytest
import tiny_models
import torch
from tiny_text import TEXTS, tiny_text_model, tiny_tokenizer
from transformers import DynamicCache

import hf_replayssm
from hf_replayssm.evaluation import compare_caches, evaluate_perplexity, join_documents, load_documents
from hf_replayssm.evaluation.comparison import cluster_standard_error
from hf_replayssm.evaluation.contexts import Document, cut_contexts
from hf_replayssm.evaluation.forward import pieces


TOKENIZER = tiny_tokenizer()
LENGTHS = (5, 17, 2, 30, 1, 9)  # the one of one token has nothing to score
DOCUMENTS = [tiny_models.random_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def model():
    return tiny_models.tiny_model("bamba")


@pytest.fixture(scope="module")
def text_model():
    return tiny_text_model("bamba")


def by_hand(model, documents, max_length=None) -> float:
    """Negative log likelihood of each token but the first of each document, one plain forward per context."""
    total = 0.0
    for ids in documents:
        ids = torch.tensor([ids])
        for start in range(0, ids.shape[1] - 1, max_length or ids.shape[1]):
            part = ids[:, start : start + (max_length or ids.shape[1]) + 1]
            logits = tiny_models.whole_forward(model, part[:, :-1]).double()
            total -= torch.log_softmax(logits, -1).gather(-1, part[:, 1:, None]).sum().item()
    return total


# ----------------------------------------------------------------------------------------------- the same everywhere
FEEDS = {
    "full": dict(mode="full"),
    "step": dict(mode="step"),
    "window of 4": dict(mode="window", window=4),
    "window of 50": dict(mode="window", window=50),
    "carried": dict(mode="step", carry_state=True),
    "carried window": dict(mode="window", window=3, carry_state=True),
    "carried full": dict(mode="full", carry_state=True),
}


@pytest.mark.parametrize("cache", ["dynamic", "replayssm"])
@pytest.mark.parametrize("feed", FEEDS)
def test_every_way_to_feed_gives_the_sum_by_hand(model, feed, cache):
    result = evaluate_perplexity(model, None, DOCUMENTS, cache=cache, **FEEDS[feed])
    assert result.nll == pytest.approx(by_hand(model, DOCUMENTS), rel=1e-6)
    assert result.tokens == sum(length - 1 for length in LENGTHS)
    assert result.perplexity == pytest.approx(math.exp(result.nll / result.tokens), rel=1e-12)
    assert (result.documents, result.skipped_documents, result.contexts) == (5, 1, 5)


@pytest.mark.parametrize("name", tiny_models.FAMILY_NAMES)
def test_step_window_and_full_agree_for_every_family_through_replay(name):
    model = tiny_models.tiny_model(name)
    full = evaluate_perplexity(model, None, DOCUMENTS, mode="full")
    for mode in ("step", "window"):
        result = evaluate_perplexity(model, None, DOCUMENTS, mode=mode, window=5, replay={"buffer_len": 4})
        assert result.nll == pytest.approx(full.nll, rel=1e-6)
        assert [score.nll for score in result.per_document] == pytest.approx(
            [score.nll for score in full.per_document], rel=1e-5
        )


@pytest.mark.parametrize("cache", ["dynamic", "replayssm"])
@pytest.mark.parametrize("mode", ["step", "window", "full"])
def test_any_batch_size_gives_the_same(model, mode, cache):
    settings = dict(mode=mode, window=4, cache=cache, max_length=8, stride=5)
    results = [evaluate_perplexity(model, None, DOCUMENTS, batch_size=size, **settings) for size in (1, 2, 3, 16)]
    for result in results[1:]:
        assert result.nll == pytest.approx(results[0].nll, rel=1e-6)
        assert (result.tokens, result.contexts) == (results[0].tokens, results[0].contexts)
        for one, other in zip(result.per_document, results[0].per_document):
            assert (one.index, one.tokens) == (other.index, other.tokens)
            assert one.nll == pytest.approx(other.nll, rel=1e-5)


@pytest.mark.parametrize("mode", ["step", "full"])
def test_independent_windows_start_afresh(model, mode):
    result = evaluate_perplexity(model, None, DOCUMENTS, mode=mode, cache="dynamic", max_length=6)
    assert result.nll == pytest.approx(by_hand(model, DOCUMENTS, max_length=6), rel=1e-6)
    assert result.contexts == sum(math.ceil((length - 1) / 6) for length in LENGTHS)
    carried = evaluate_perplexity(model, None, DOCUMENTS, mode=mode, cache="dynamic", carry_state=True)
    assert abs(carried.nll - result.nll) > 0.1, "the test's model must notice where contexts begin"


@pytest.mark.parametrize(("max_length", "stride"), [(8, 8), (8, 3), (5, 1), (1, 1), (100, 7)])
@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 30])
def test_each_token_but_the_first_is_scored_once(length, max_length, stride):
    document = Document(0, torch.arange(length), None, None)
    seen = []
    for context in cut_contexts(document, carry_state=False, max_length=max_length, stride=stride):
        assert len(context.inputs) <= max_length and torch.equal(context.targets, context.inputs + 1)
        assert context.inputs[0] == context.start
        seen += context.targets[context.first_scored :].tolist()
    assert seen == list(range(1, length))


def test_every_token_but_the_first_goes_through_the_decode_path():
    assert pieces(5, "step", 1) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert pieces(8, "window", 3) == [(0, 1), (1, 4), (4, 7), (7, 8)]
    assert pieces(1, "window", 3) == [(0, 1)]
    assert pieces(8, "full", 3) == [(0, 8)]


def test_the_cache_that_is_named_is_the_cache_that_is_used(model):
    made = []

    def my_cache(model):
        made.append(DynamicCache(config=model.config))
        return made[-1]

    result = evaluate_perplexity(model, None, DOCUMENTS, cache=my_cache, batch_size=2)
    assert result.cache == "my_cache"
    assert [cache.get_seq_length() for cache in made] == [29, 8, 1]  # the longest of each batch, sorted by length
    assert [len(cache.layers[1].keys) for cache in made] == [1, 1, 1]  # the other row of each batch has left


def test_a_cache_that_forgets_is_noticed(model):
    class Forgetful(DynamicCache):
        def update_recurrent_state(self, state, *args, **kwargs):
            return super().update_recurrent_state(torch.zeros_like(state), *args, **kwargs)

    comparison = compare_caches(
        model, None, DOCUMENTS, cache=lambda model: Forgetful(config=model.config), mode="window", window=4
    )
    assert comparison.kl > 1e-2 and comparison.argmax_agreement < 0.95


def test_a_replay_cache_counts_what_it_did(model):
    document = [tiny_models.random_ids(1, 33)[0].tolist()]
    result = evaluate_perplexity(model, None, document, replay={"buffer_len": 4}, carry_state=True)
    assert result.cache_stats["forwards"] == result.cache_stats["tokens"] == 32
    assert result.cache_stats["checkpoint_writes"] == 8
    assert result.replay["buffer_len"] == 4
    result = evaluate_perplexity(model, None, document, carry_state=True)
    assert result.replay["buffer_len"] == 16 and result.cache_stats["checkpoint_writes"] == 2  # what it ran with


def test_rows_that_have_ended_leave_the_batch(model):
    """A step is never spent on a row that has nothing left to score."""
    results = [evaluate_perplexity(model, None, DOCUMENTS, batch_size=size) for size in (1, 3, 16)]
    assert {result.cache_stats["tokens"] for result in results} == {58}
    assert results[0].cache_stats["forwards"] == 58 and results[2].cache_stats["forwards"] == 29


def test_the_model_is_left_as_it_was(model):
    model.train()
    try:
        evaluate_perplexity(model, None, DOCUMENTS[:1])
        assert model.training and not hf_replayssm.is_enabled(model)
    finally:
        model.eval()
    hf_replayssm.enable(model, buffer_len=4)
    try:
        result = evaluate_perplexity(model, None, DOCUMENTS[:1], replay={"max_window": 9})
        assert hf_replayssm.is_enabled(model)
        assert (result.replay["buffer_len"], result.replay["max_window"]) == (4, 9)
    finally:
        hf_replayssm.disable(model)


def test_progress_comes_to_the_number_of_tokens(model):
    calls = []
    evaluate_perplexity(
        model, None, DOCUMENTS, cache="dynamic", batch_size=2, progress=lambda *call: calls.append(call)
    )
    assert calls[-1] == (58, 58)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_documents_may_come_as_a_stream(model):
    calls = []
    streamed = evaluate_perplexity(
        model, None, iter(DOCUMENTS), cache="dynamic", batch_size=2, progress=lambda *call: calls.append(call)
    )
    assert streamed.nll == pytest.approx(by_hand(model, DOCUMENTS), rel=1e-6)
    assert calls[-1] == (58, None)


# ----------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("bos", [False, True])
def test_words_and_bytes_are_those_of_the_scored_text(text_model, bos):
    tokenizer = tiny_tokenizer(bos=bos)
    result = evaluate_perplexity(text_model, tokenizer, TEXTS, mode="full")
    scored = [text for text in TEXTS if len(tokenizer(text)["input_ids"]) > 1]
    expected = []
    for text in scored:
        ids = tokenizer(text)["input_ids"]
        expected.append(tokenizer.decode(ids[1:]))  # without the first token, or without <s>
    assert result.bytes == sum(len(text.encode()) for text in expected)
    assert result.words == sum(len(text.split()) for text in expected)
    assert result.tokens == sum(len(tokenizer(text)["input_ids"]) - 1 for text in scored)
    assert result.word_perplexity == pytest.approx(math.exp(result.nll / result.words))
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2) / result.bytes)
    if bos:
        assert expected == scored  # with a beginning-of-sequence token the whole text is scored


def test_max_tokens_is_kept_to_the_token(text_model):
    whole = evaluate_perplexity(text_model, TOKENIZER, TEXTS, mode="full")
    first = len(TOKENIZER(TEXTS[0])["input_ids"]) - 1
    result = evaluate_perplexity(text_model, TOKENIZER, TEXTS, mode="full", max_tokens=first + 3)
    assert (result.tokens, result.documents) == (first + 3, 2)
    assert result.per_document[0].nll == pytest.approx(whole.per_document[0].nll, rel=1e-6)
    cut = TOKENIZER.decode(TOKENIZER(TEXTS[1])["input_ids"][1:4])
    assert result.per_document[1].bytes == len(cut.encode())
    assert result.per_document[1].words == len(cut.split())


def test_a_joined_stream_is_one_document(text_model):
    stream = join_documents(TEXTS)
    assert len(stream) == 1 and stream[0].count("\n\n") == len(TEXTS) - 2
    result = evaluate_perplexity(text_model, TOKENIZER, stream, cache="dynamic", carry_state=True, mode="window")
    assert (result.documents, result.contexts) == (1, 1)
    assert result.tokens == len(TOKENIZER(stream[0])["input_ids"]) - 1


def test_the_result_is_json(text_model, tmp_path):
    result = evaluate_perplexity(text_model, TOKENIZER, TEXTS, cache="dynamic", mode="window", window=4)
    values = json.loads(result.to_json(tmp_path / "result.json", per_document=True))
    assert values == json.loads((tmp_path / "result.json").read_text())
    assert {"perplexity", "tokens", "words", "mode", "cache"} <= set(values)
    assert (values["mode"], values["window"], values["cache"]) == ("window", 4, "dynamic")
    assert sum(one["nll"] for one in values["per_document"]) == pytest.approx(values["nll"])


# ----------------------------------------------------------------------------------------------- comparison
def test_a_cache_against_itself_is_the_same(model):
    comparison = compare_caches(model, None, DOCUMENTS, cache="dynamic", reference="dynamic")
    assert comparison.delta_logprob == comparison.max_abs_delta_logprob == comparison.max_kl == 0.0
    assert comparison.argmax_agreement == 1.0 and comparison.relative_perplexity == 0.0
    # Five documents are too few for clusters; blocks end where their documents do.
    assert (comparison.cluster, comparison.clusters) == ("block of 64 tokens", 5)
    many = [tiny_models.random_ids(1, 4, seed=seed)[0].tolist() for seed in range(12)]
    comparison = compare_caches(model, None, many, cache="dynamic", reference="dynamic")
    assert (comparison.cluster, comparison.clusters) == ("document", 12)


@pytest.mark.parametrize("reference", ["none", "dynamic"])
@pytest.mark.parametrize("mode", ["step", "window"])
def test_replay_against_the_others_differs_by_rounding_only(model, mode, reference):
    comparison = compare_caches(model, None, DOCUMENTS, reference=reference, mode=mode, window=4, batch_size=2)
    assert comparison.max_abs_delta_logprob < 1e-4 and comparison.max_kl < 1e-6
    assert comparison.argmax_agreement == 1.0
    assert comparison.reference.cache == reference and comparison.other.cache == "replayssm"
    assert json.loads(comparison.to_json())["other"]["mode"] == mode


def test_statistics_are_paired_and_have_their_signs(model):
    """Against a cache whose dtype is lower: recomputed here from the logits themselves."""
    document = tiny_models.random_ids(1, 150, seed=3)
    rounded = {"checkpoint_dtype": torch.bfloat16, "buffer_len": 1}
    comparison = compare_caches(model, None, [document[0]], reference="none", carry_state=True, replay=rounded)
    reference = torch.log_softmax(tiny_models.whole_forward(model, document[:, :-1]).double(), -1)
    hf_replayssm.enable(model)
    try:
        cache = hf_replayssm.ReplayCache(config=model.config, **rounded)
        with torch.no_grad():
            steps = [model(input_ids=document[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(149)]
    finally:
        hf_replayssm.disable(model)
    other = torch.log_softmax(torch.cat(steps, 1).double(), -1)
    delta = (other - reference).gather(-1, document[:, 1:, None]).flatten()
    kl = (reference.exp() * (reference - other)).sum(-1).flatten()
    assert comparison.tokens == 149
    assert comparison.delta_logprob == pytest.approx(delta.mean().item(), abs=1e-9)
    assert comparison.max_abs_delta_logprob == pytest.approx(delta.abs().max().item(), rel=1e-6)
    assert comparison.kl == pytest.approx(kl.mean().item(), rel=1e-6)
    assert comparison.max_kl == pytest.approx(kl.max().item(), rel=1e-6)
    assert comparison.relative_perplexity == pytest.approx(math.expm1(-delta.mean().item()), rel=1e-6)
    assert comparison.argmax_disagreements == int((reference.argmax(-1) != other.argmax(-1)).sum())
    assert comparison.delta_logprob_se_per_token == pytest.approx(delta.std().item() / math.sqrt(149), rel=1e-6)
    assert (comparison.cluster, comparison.clusters) == ("block of 64 tokens", 3)
    ratio = comparison.other.perplexity / comparison.reference.perplexity - 1
    assert comparison.relative_perplexity == pytest.approx(ratio, abs=1e-9)


def test_clusters_widen_the_error_of_tokens_that_err_together():
    values = torch.randn(50, dtype=torch.float64).repeat_interleave(10)
    mean = values.mean().item()
    per_token = cluster_standard_error(list(values.split(1)), mean)
    clustered = cluster_standard_error(list(values.split(10)), mean)
    assert clustered == pytest.approx(per_token * math.sqrt(10), rel=0.02)
    assert cluster_standard_error([values], mean) is None


# ----------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "stream"}, "mode must be one of"),
        ({"window": 0}, "window must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_length": 0}, "max_length must be"),
        ({"max_length": 4, "stride": 5}, "stride must lie between"),
        ({"max_length": 4, "carry_state": True}, "Leave one of the two out"),
        ({"cache": "static"}, "cache must be"),
        ({"cache": "none"}, 'use mode="full"'),
        ({"cache": "dynamic", "replay": {"buffer_len": 4}}, 'cache="replayssm" only'),
        ({"replay": {"buffer_len": 0}}, "buffer_len"),
        ({"replay": {"bufer_len": 4}}, "bufer_len"),
        ({"device": "meta"}, "Move it first"),
    ],
)
def test_wrong_settings_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate_perplexity(model, None, DOCUMENTS, **settings)
    assert not hf_replayssm.is_enabled(model)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "nothing to score"),
        (["", "   "], "nothing to score: 2 documents"),
        ([[5], []], "nothing to score"),
        ("one text", r"pass \[text\]"),
        (["text without a tokenizer"], "A tokenizer is needed"),
        ([[5, 6, 1000]], "token id 1000.*not this model's"),
        ([[[5, 6], [7, 8]]], "1-D"),
    ],
)
def test_wrong_documents_are_refused(model, documents, message):
    with pytest.raises(ValueError, match=message):
        evaluate_perplexity(model, None, documents, cache="dynamic")


def test_logits_that_are_not_finite_are_an_error(model):
    broken = tiny_models.tiny_model("bamba")
    with torch.no_grad():
        broken.get_output_embeddings().weight[7] = float("nan")
    with pytest.raises(ValueError, match="no finite log probability"):
        evaluate_perplexity(broken, None, DOCUMENTS, cache="dynamic")


def test_a_comparison_needs_two_caches(model):
    with pytest.raises(ValueError, match="goes through them"):
        compare_caches(model, None, DOCUMENTS, mode="full")
    with pytest.raises(ValueError, match='reference="none"'):
        compare_caches(model, None, DOCUMENTS, cache="none")


# ----------------------------------------------------------------------------------------------- data
ROWS = [{"text": "first row", "id": 1}, {"text": "", "id": 2}, {"text": "third row", "id": 3}]


def write(path, rows=ROWS):
    import pandas

    frame = pandas.DataFrame(rows)
    if path.name.endswith(".parquet"):
        frame.to_parquet(path)
    elif path.name.endswith(".csv"):
        frame.to_csv(path, index=False)
    elif path.name.endswith(".tsv"):
        frame.to_csv(path, index=False, sep="\t")
    else:
        frame.to_json(path, orient="records", lines=True)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet", "rows.jsonl.gz"])
def test_documents_of_a_local_file(tmp_path, name):
    assert load_documents(write(tmp_path / name)) == ["first row", "", "third row"]


@pytest.mark.parametrize(
    ("unit", "documents"),
    [
        ("paragraph", ["one\ntwo", "three\n"]),
        ("line", ["one", "two", "", "three"]),
        ("file", ["one\ntwo\n\nthree\n"]),
    ],
)
def test_documents_of_a_text_file(tmp_path, unit, documents):
    (tmp_path / "text.txt").write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    assert load_documents(tmp_path / "text.txt", text_unit=unit) == documents


def test_a_file_can_be_streamed(tmp_path):
    documents = load_documents(write(tmp_path / "rows.jsonl"), streaming=True)
    assert not isinstance(documents, list) and next(documents) == "first row"


def test_the_text_column_is_found_or_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"body": "some text", "n": 1}])
    assert load_documents(path) == ["some text"]  # the only column of strings
    path = write(tmp_path / "two.jsonl", [{"question": "why?", "answer": "because", "n": 1}])
    assert load_documents(path, column="answer") == ["because"]
    with pytest.raises(ValueError, match=r"several columns of strings.*question \(str\), answer \(str\), n \(int\)"):
        load_documents(path)
    with pytest.raises(ValueError, match=r"no column 'text'.*question"):
        load_documents(path, column="text")
    with pytest.raises(ValueError, match="holds int, not text"):
        load_documents(path, column="n")
    path = write(tmp_path / "none.jsonl", [{"n": 1}])
    with pytest.raises(ValueError, match=r"no column of strings.*n \(int\)"):
        load_documents(path)


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file.*nothing.txt"):
        load_documents(tmp_path / "nothing.txt")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_documents("nothing.jsonl")  # ends like a file: the Hub is not asked
    with pytest.raises(ValueError, match="is a folder"):
        load_documents(tmp_path)
    (tmp_path / "text.pdf").write_bytes(b"%PDF")
    with pytest.raises(ValueError, match="format is unknown"):
        load_documents(tmp_path / "text.pdf")
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="no split 'test'"):
        load_documents(path, split="test")
    with pytest.raises(ValueError, match="no configuration"):
        load_documents(path, config="english")
    with pytest.raises(ValueError, match="text_unit"):
        load_documents(path, text_unit="page")


def test_a_hub_data_set_is_asked_for_its_held_out_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *a, **k: ["train", "validation", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or ROWS)
    assert load_documents("owner/name", config="small") == ["first row", "", "third row"]
    assert asked == [(("owner/name", "small"), {"split": "test", "streaming": False, "revision": None})]


@pytest.mark.parametrize("error", [ConnectionError("no route"), OSError("offline")])
def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch, error):
    import datasets

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(ValueError, match="could not be fetched.*local text, jsonl"):
        load_documents("owner/name")
