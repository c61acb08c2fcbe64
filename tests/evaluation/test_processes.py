"""Several processes at one evaluation, and an evaluation that goes on where it was: nothing differs, nothing hangs.

Most of it is shown with threads for processes, each with a seat of its own at one store.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
import warnings

import pytest
import several
import tiny_models
import torch
import torch.distributed as dist
from tiny_text import TEXTS, tiny_text_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_replayssm.evaluation import BatchesFailed, Processes, compare_caches, evaluate_perplexity
from hf_replayssm.evaluation.engine import Run, Settings
from hf_replayssm.evaluation.finished import _changes, weights_digest


LENGTHS = (5, 17, 2, 30, 1, 9, 12, 22, 40, 3, 8)
DOCUMENTS = [tiny_models.random_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
SETTINGS = dict(mode="window", window=4, cache="dynamic", batch_size=2, max_length=12)
BATCHES = 9  # of the documents with these settings
BAD = 7  # a token


@pytest.fixture(scope="module")
def model():
    return tiny_models.tiny_model("bamba")


@pytest.fixture(scope="module")
def alone(model):
    return evaluate_perplexity(model, None, DOCUMENTS, **SETTINGS)


def without_times(result) -> dict:
    values = result.to_dict(per_document=True)
    for name in ("seconds", "tokens_per_second", "processes"):
        values.pop(name)
    return values


def together(count, task, timeout=20.0, seats=None, store=None):
    """Runs task(processes) in `count` threads that share a store; what each returned or raised, in their order."""
    store, outcomes = store or dist.HashStore(), [None] * count

    def run(rank):
        try:
            with Processes(store, rank, count, timeout) as processes:
                outcomes[rank] = task(processes)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in seats or range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "hangs"
    return outcomes


def calls_of(model) -> list:
    """The batch sizes of the model's forwards from here on."""
    calls = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    calls_of.handles.append(handle)
    return calls


calls_of.handles = []


@pytest.fixture(autouse=True)
def no_hooks_left():
    yield
    while calls_of.handles:
        calls_of.handles.pop().remove()


# ----------------------------------------------------------------------------------------------- the same result
@pytest.mark.parametrize("as_a_stream", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_every_process_has_the_result_of_one_to_the_last_bit(model, count, as_a_stream):
    documents = (lambda: iter(DOCUMENTS)) if as_a_stream else (lambda: DOCUMENTS)
    alone = evaluate_perplexity(model, None, documents(), **SETTINGS)

    def task(processes):
        own = []
        result = evaluate_perplexity(
            model, None, documents(), processes=processes, progress=lambda *call: own.append(call), **SETTINGS
        )
        return result, own

    outcomes = together(count, task)
    for result, _ in outcomes:
        assert without_times(result) == without_times(alone)
    assert sum(score.tokens for score in alone.per_document) == sum(LENGTHS) - len(LENGTHS)
    assert outcomes[0][1][-1][0] == alone.tokens, "the main process shows the tokens of all"
    assert not any(own for _, own in outcomes[1:]), "the others show nothing"


def test_each_batch_is_evaluated_by_one_process(model):
    whole = calls_of(model)
    evaluate_perplexity(model, None, DOCUMENTS, **SETTINGS)
    forwards = len(whole)
    whole.clear()
    outcomes = together(
        3, lambda processes: evaluate_perplexity(model, None, DOCUMENTS, processes=processes, **SETTINGS)
    )
    assert len(whole) == forwards
    assert {result.processes for result in outcomes} <= {1, 2, 3}


def test_several_evaluations_one_after_the_other(model, alone):
    def task(processes):
        return [
            evaluate_perplexity(model, None, DOCUMENTS[:count], processes=processes, **SETTINGS) for count in (3, 11)
        ]

    for first, second in together(2, task):
        assert first.documents == 3
        assert without_times(second) == without_times(alone)


def test_a_store_that_outlives_an_evaluation_serves_the_next_one(model, alone):
    """A launcher's store does, and a process group's: the second seats at it do not find what the first ones left."""
    store, other = dist.HashStore(), tiny_models.tiny_model("bamba", seed=5)
    expected = evaluate_perplexity(other, None, DOCUMENTS, **SETTINGS)
    for one, outcome in ((model, alone), (other, expected), (None, None), (other, expected)):

        def task(processes, one=one):
            if one is None:
                raise OSError("ends with an error")  # of which those after it know nothing either
            return evaluate_perplexity(one, None, DOCUMENTS, processes=processes, **SETTINGS)

        for result in together(2, task, store=store):
            assert isinstance(result, OSError) if one is None else without_times(result) == without_times(outcome)


def test_positions_add_up(alone, model):
    assert sum(row["tokens"] for row in alone.by_position) == alone.tokens
    assert math.fsum(row["nll"] for row in alone.by_position) == pytest.approx(alone.nll, rel=1e-12)
    # Each of the contexts of at most 12 tokens has one token with one token before it, and so on.
    assert alone.by_position[0] == {**alone.by_position[0], "start": 1, "stop": 2, "tokens": alone.contexts}
    assert [row["start"] for row in alone.by_position] == [1, 2, 3, 4, 6, 8, 12]
    assert json.loads(alone.to_json())["by_position"] == alone.by_position
    comparison = compare_caches(model, None, DOCUMENTS, cache="replayssm", reference="dynamic", max_length=12)
    assert [row["tokens"] for row in comparison.by_position] == [row["tokens"] for row in alone.by_position]
    assert math.fsum(row["kl"] for row in comparison.by_position) == pytest.approx(comparison.kl * comparison.tokens)
    assert [row["nll"] for row in comparison.reference.by_position] == pytest.approx(
        [row["nll"] for row in alone.by_position], rel=1e-5
    )


def test_a_stream_is_read_as_it_goes_and_not_kept(model):
    """What is in memory at a time is the documents looked ahead, and of the rest their numbers."""
    read, at_forward = [], []

    def documents():
        for index in range(300):
            read.append(index)
            yield [5 + index % 50, 7, 9]

    def progress(done, total):
        at_forward.append(len(read))

    result = evaluate_perplexity(model, None, documents(), mode="full", batch_size=1, progress=progress)
    assert at_forward[0] <= 65 < at_forward[-1] == 300 and result.documents == 300
    rest = dict.fromkeys(("max_length", "stride", "max_tokens", "device"))
    settings = Settings.checked(model, mode="full", window=1, batch_size=1, carry_state=False, **rest)
    run = Run(model, None, documents(), settings, None)
    for _ in run.batches():
        pass
    assert len(run.documents) == 300
    assert not any(torch.is_tensor(value) for counts in run.documents.values() for value in vars(counts).values())


# ----------------------------------------------------------------------------------------------- going on
class Killed(BaseException):
    """Not an error that a batch may have: nothing in the package catches it."""


def interrupt(model, folder, after: int, **settings) -> None:
    def progress(done, total):
        if done > after:
            raise Killed

    with pytest.raises(Killed):
        evaluate_perplexity(model, None, DOCUMENTS, resume=folder, progress=progress, **{**SETTINGS, **settings})


def test_a_run_that_was_killed_goes_on_from_the_last_finished_batch(model, alone, tmp_path):
    interrupt(model, tmp_path / "run", after=60)
    lines = [line for file in (tmp_path / "run").glob("finished-*") for line in file.read_text().splitlines()]
    assert 0 < len(lines) < BATCHES
    before = sum(json.loads(line)["tokens"] for line in lines)
    calls, shown = calls_of(model), []
    result = evaluate_perplexity(
        model, None, DOCUMENTS, resume=tmp_path / "run", progress=lambda *call: shown.append(call), **SETTINGS
    )
    assert without_times(result) == without_times(alone)
    assert shown[0][0] == before and shown[-1] == (alone.tokens, alone.tokens)
    assert 0 < len(calls)
    calls.clear()
    again = evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path / "run", **SETTINGS)
    assert again == result and not calls, "a finished run is not run again"


def test_a_line_that_was_cut_short_is_evaluated_again(model, alone, tmp_path):
    evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    (file,) = tmp_path.glob("finished-*")
    text = file.read_text()
    file.write_text(text[: text.rstrip().rindex("\n") + 40])
    # Two runs that did the same batch: it counts once.
    (tmp_path / "finished-other.jsonl").write_text(text.splitlines()[0] + "\n")
    calls = calls_of(model)
    result = evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    assert without_times(result) == without_times(alone)
    assert 0 < len(calls) <= 4


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x80", b"\0\0\0", b"17", b"null", b"[]", b"{}", b'{"batch": 1}',
        lambda whole: {**whole, "batch": "1"},
        lambda whole: {**whole, "tokens": whole["tokens"] + 1},
        lambda whole: {**whole, "contexts": [[document, None] for document, _ in whole["contexts"]]},
        lambda whole: {**whole, "by_position": {"x": {"tokens": whole["tokens"], "nll": 1.0}}},
        lambda whole: {**whole, "stats": {"forwards": None}},
        lambda whole: {name: value for name, value in whole.items() if name != "inputs"},
    ],
)  # fmt: skip
def test_a_damaged_line_is_evaluated_again(model, alone, tmp_path, line):
    evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    (file,) = tmp_path.glob("finished-*")
    lines = file.read_bytes().splitlines()
    lines[1] = line if isinstance(line, bytes) else json.dumps(line(json.loads(lines[1]))).encode()
    file.write_bytes(b"\n".join(lines) + b"\n")
    calls = calls_of(model)
    result = evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    assert without_times(result) == without_times(alone)
    assert 0 < len(calls) <= 4


@pytest.mark.parametrize("content", [b"", b'{"mode": ', b"[1]", b"\xff\xfe"])
def test_damaged_settings_are_named(model, tmp_path, content):
    interrupt(model, tmp_path, after=60)
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(ValueError, match="settings.json is damaged.*another folder"):
        evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)


def test_a_run_that_was_killed_before_its_settings_were_written_begins_anew(model, alone, tmp_path):
    (tmp_path / "settings.part").write_text('{"mode": ')
    result = evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    assert without_times(result) == without_times(alone)


def test_processes_go_on_from_what_one_has_finished(model, alone, tmp_path):
    interrupt(model, tmp_path, after=60)
    done = sum(len(file.read_text().splitlines()) for file in tmp_path.glob("finished-*"))
    for result in together(
        2,
        lambda processes: evaluate_perplexity(model, None, DOCUMENTS, processes=processes, resume=tmp_path, **SETTINGS),
    ):
        assert without_times(result) == without_times(alone)
    lines = [json.loads(line) for file in tmp_path.glob("finished-*") for line in file.read_text().splitlines()]
    assert sorted(line["batch"] for line in lines) == list(range(BATCHES)) and done < BATCHES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 3}, "batch_size was 2 and is 3"),
        ({"window": 5}, "window was 4 and is 5"),
        ({"max_length": 10}, "max_length was 12 and is 10, stride was 12 and is 10"),
        ({"cache": "replayssm"}, "cache was 'dynamic' and is 'replayssm'"),
    ],
)
def test_a_changed_setting_is_refused(model, tmp_path, change, message):
    interrupt(model, tmp_path, after=60)
    with pytest.raises(ValueError, match=message):
        evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **{**SETTINGS, **change})


def test_other_weights_other_data_and_another_order_are_refused(model, tmp_path):
    interrupt(model, tmp_path, after=60)
    other = tiny_models.tiny_model("bamba", seed=5)
    assert weights_digest(other) != weights_digest(model)
    with pytest.raises(ValueError, match="weights was"):
        evaluate_perplexity(other, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match="streaming was False and is True"):
        evaluate_perplexity(model, None, iter(DOCUMENTS), resume=tmp_path, **SETTINGS)
    changed = [list(ids) for ids in DOCUMENTS]
    changed[1][3] = (changed[1][3] + 1) % 50
    with pytest.raises(ValueError, match="finished of other documents.*document 1"):
        evaluate_perplexity(model, None, changed, resume=tmp_path, **SETTINGS)
    for one in together(
        2, lambda processes: evaluate_perplexity(model, None, changed, processes=processes, resume=tmp_path, **SETTINGS)
    ):
        assert "other documents" in str(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (7, 2, 9), (0, 4)])
def test_the_digest_of_weights_sees_every_value(dtype, shape):
    def of(values):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(values, requires_grad=False)
        return weights_digest(module)

    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    whole = of(values)
    assert of(values.clone()) == whole
    assert of(torch.cat([values.reshape(-1)[:1], values.reshape(-1)])[1:].reshape(shape)) == whole, "lies elsewhere"
    assert of(values.transpose(0, -1).contiguous().transpose(0, -1) if values.dim() else values) == whole
    for index in range(values.numel()):
        other = values.clone()
        other.view(-1)[index] += 1
        assert of(other) != whole
    if values.numel() > 1:
        assert of(values.flip(tuple(range(values.dim())))) != whole, "the same values, elsewhere"


def test_a_folder_of_something_else_is_refused(model, tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="holds other files"):
        evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match="is a file"):
        evaluate_perplexity(model, None, DOCUMENTS, resume=tmp_path / "thesis.txt", **SETTINGS)


# ----------------------------------------------------------------------------------------------- what goes wrong
def failing_at(model, when):
    """The model raises where `when(input_ids)` holds."""

    def hook(module, args, kwargs):
        if when(kwargs["input_ids"]):
            raise RuntimeError("the kernel said no")

    calls_of.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_that_fails_is_reported_and_the_others_finish(model, alone, tmp_path, count):
    first = torch.tensor(DOCUMENTS[8][:1])
    failing_at(model, lambda ids: ids.shape[1] == 1 and (ids[:, 0] == first).any())
    broken = [index for index, ids in enumerate(DOCUMENTS) if ids[0] == first and len(ids) > 1]
    run = lambda processes=None: evaluate_perplexity(  # noqa: E731
        model, None, DOCUMENTS, processes=processes, resume=tmp_path, **SETTINGS
    )
    if count == 1:
        with pytest.raises(BatchesFailed) as caught:
            run()
        errors = [caught.value]
    else:
        errors = together(count, run)
    for error in errors:
        assert isinstance(error, BatchesFailed) and 0 < len(error.failures) < BATCHES
        assert f"of {BATCHES} batches failed" in str(error) and "the kernel said no" in str(error)
        assert "run again to try only these" in str(error)
        lost = {index for failure in error.failures for index in failure["documents"]}
        assert set(broken) <= lost
        kept = {score.index: score.nll for score in error.partial.per_document}
        assert kept == {score.index: score.nll for score in alone.per_document if score.index not in lost}
        # What is left is of one set of documents in every figure.
        assert sum(row["tokens"] for row in error.partial.by_position) in (0, error.partial.tokens)
        assert error.partial.contexts == sum(-(-(LENGTHS[index] - 1) // 12) for index in kept)
    calls_of.handles.pop().remove()
    calls = calls_of(model)
    assert without_times(run()) == without_times(alone)
    assert len(calls) <= 4 * len(errors[0].failures)


def test_without_processes_and_folder_an_error_is_raised_at_once(model):
    failing_at(model, lambda ids: True)
    with pytest.raises(RuntimeError, match="^the kernel said no$"):
        evaluate_perplexity(model, None, DOCUMENTS, **SETTINGS)


def test_an_error_in_the_documents_ends_all_processes(model):
    def task(processes):
        def documents():
            yield DOCUMENTS[0]
            yield "a text, but there is no tokenizer"

        return evaluate_perplexity(model, None, documents(), processes=processes, **SETTINGS)

    started = time.monotonic()
    for outcome in together(2, task):
        assert "A tokenizer is needed" in str(outcome)
    assert time.monotonic() - started < 10


def test_an_error_in_one_process_ends_the_others(model):
    def task(processes):
        if processes.rank == 1:
            raise OSError("no such weights")
        return evaluate_perplexity(model, None, DOCUMENTS, processes=processes, **SETTINGS)

    outcomes = together(2, task)
    assert isinstance(outcomes[1], OSError)
    assert isinstance(outcomes[0], RuntimeError)
    assert "Process 1 of 2 has ended with an error: OSError: no such weights" in str(outcomes[0])


def test_memory_that_runs_out_halves_the_batch(model):
    whole = evaluate_perplexity(model, None, DOCUMENTS, **{**SETTINGS, "batch_size": 16})

    def hook(module, args, kwargs):
        if kwargs["input_ids"].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    calls_of.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
    shown = []
    with pytest.warns(UserWarning) as warned:
        result = evaluate_perplexity(
            model, None, DOCUMENTS, progress=lambda *call: shown.append(call), **{**SETTINGS, "batch_size": 16}
        )
    said = [str(one.message) for one in warned]
    assert said == [
        "CUDA out of memory: a batch of 16 contexts does not fit. It is halved, to 8, from here on.",
        "CUDA out of memory: a batch of 8 contexts does not fit. It is halved, to 4, from here on.",
        "CUDA out of memory: a batch of 4 contexts does not fit. It is halved, to 2, from here on.",
    ]
    assert (result.batch_size, result.reduced_batch_size, whole.reduced_batch_size) == (16, 2, None)
    assert result.nll == pytest.approx(whole.nll, rel=1e-6)
    assert (result.tokens, result.contexts, shown[-1]) == (whole.tokens, whole.contexts, (whole.tokens, whole.tokens))
    assert [score.index for score in result.per_document] == [score.index for score in whole.per_document]


@pytest.mark.parametrize(
    "message",
    ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "MPS backend out of memory (18 GB)"],
)
def test_libraries_that_lack_memory_halve_the_batch_too(message, model):
    def hook(module, args, kwargs):
        if kwargs["input_ids"].shape[0] > 8:
            raise RuntimeError(message)

    calls_of.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
    with pytest.warns(UserWarning, match="It is halved, to 8, from here on"):
        assert evaluate_perplexity(model, None, DOCUMENTS, **{**SETTINGS, "batch_size": 16}).reduced_batch_size == 8


def test_other_errors_halve_nothing(model):
    def hook(module, args, kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    calls_of.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="illegal"):
        warnings.simplefilter("error")
        evaluate_perplexity(model, None, DOCUMENTS, **{**SETTINGS, "batch_size": 16})


def test_memory_that_does_not_do_for_one_context_is_an_error(model):
    def hook(module, args, kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    calls_of.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
    with pytest.warns(UserWarning, match="halved"), pytest.raises(torch.OutOfMemoryError):
        evaluate_perplexity(model, None, DOCUMENTS, **SETTINGS)


def test_a_process_that_was_never_heard_of_is_missed():
    """Seat 1 of 2 stays empty."""
    started = time.monotonic()
    outcomes = together(2, lambda processes: processes.fetch("batch/0"), timeout=1.0, seats=[0])
    assert "Process 1 of 2 has given no sign of life for 1 s" in str(outcomes[0]) and "--resume" in str(outcomes[0])
    assert time.monotonic() - started < 10


def test_processes_that_were_not_started_together_are_told(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Processes.from_environment() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one of 2 processes.*torchrun or accelerate launch"):
        Processes.from_environment()


def test_values_of_any_size_go_through_the_store(monkeypatch):
    from hf_replayssm.evaluation import processes as module

    monkeypatch.setattr(module, "CHUNK", 7)
    value = bytes(range(256)) * 3

    def task(processes):
        if processes.is_main:
            processes.publish("long", value)
            processes.publish("empty", b"")
        return processes.fetch("long"), processes.fetch("empty")

    assert together(2, task) == [(value, b"")] * 2


# ----------------------------------------------------------------------------------------------- real processes
def test_two_processes_and_one_that_dies(model, tmp_path):
    """With a gloo process group, as in a script of accelerate; then one of them is killed in the midst of a batch."""
    tiny_text_model("bamba").save_pretrained(tmp_path / "model")
    source = """
        import json, os, signal, sys, time
        import torch, torch.distributed as dist
        from tiny_text import TEXTS, tiny_tokenizer
        from transformers import AutoModelForCausalLM
        from hf_replayssm.evaluation import Processes, evaluate_perplexity

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model").eval()
        dist.init_process_group("gloo")
        settings = dict(mode="window", window=4, batch_size=1, max_length=10)
        processes = Processes.from_environment(timeout=2.0)
        result = evaluate_perplexity(model, tiny_tokenizer(), TEXTS, processes=processes, **settings)
        print(json.dumps(result.to_dict(per_document=True)), flush=True)

        def die(module, arguments):
            os.kill(os.getpid(), signal.SIGKILL)

        if processes.rank == 1:
            model.register_forward_pre_hook(die)
        else:
            model.register_forward_pre_hook(lambda *_: time.sleep(0.05))  # the other gets its turn
        began = time.monotonic()
        try:
            folder = sys.argv[1] + "/resume"
            evaluate_perplexity(model, tiny_tokenizer(), TEXTS, processes=processes, resume=folder, **settings)
        except RuntimeError as error:
            print(error, time.monotonic() - began, flush=True)
        os._exit(0)  # past the process group, which would wait for the dead
    """
    finished = several.launch(source, tmp_path)
    assert [process.returncode for process in finished] == [0, -9], finished
    # Also from the file: how tensors lie in memory may show in the last bit.
    tiny = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    settings = dict(mode="window", window=4, batch_size=1, max_length=10)
    alone = evaluate_perplexity(tiny, tiny_tokenizer(), TEXTS, **settings)
    for process in finished:
        found = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("{")))
        assert (found["nll"], found["tokens"], found["documents"]) == (alone.nll, alone.tokens, alone.documents)
        assert found["per_document"] == json.loads(alone.to_json(per_document=True))["per_document"]
    said = finished[0].stdout
    assert "Process 1 of 2 has given no sign of life" in said
    result = evaluate_perplexity(tiny, tiny_tokenizer(), TEXTS, resume=tmp_path / "resume", **settings)
    assert dataclasses.replace(result, seconds=0, tokens_per_second=0) == dataclasses.replace(
        alone, seconds=0, tokens_per_second=0
    )


def test_only_what_differs_is_named():
    before = {"mode": "step", "replay": {"buffer_len": 16, "seed": 0}}
    now = {"mode": "step", "replay": {"buffer_len": 8, "seed": 0}}
    assert list(_changes(before, now)) == ["replay.buffer_len was 16 and is 8"]
    assert list(_changes(before, {"mode": "step", "replay": None})) == [
        "replay was {'buffer_len': 16, 'seed': 0} and is None"
    ]
