"""`hf-replayssm perplexity`: on a data set, teacher-forced through the cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import typer

from . import common


class Mode(str, Enum):
    step = "step"
    window = "window"
    full = "full"


class Reference(str, Enum):
    dynamic = "dynamic"
    replayssm = "replayssm"
    none = "none"


class TextUnit(str, Enum):
    paragraph = "paragraph"
    line = "line"
    file = "file"


@common.one_line_errors
def perplexity(
    data: Annotated[
        str | None,
        typer.Argument(help="Data set id on the Hub, or a text, jsonl, csv or parquet file (default: bundled text)"),
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Data set id on the Hub.")] = None,
    file: Annotated[str | None, typer.Option("--file", help="A local text, jsonl, csv or parquet file.")] = None,
    model: common.ModelOption = common.BUNDLED,
    config: Annotated[str | None, typer.Option("--config", help="Configuration of the data set.")] = None,
    split: Annotated[str | None, typer.Option("--split", help='Split, e.g. "test[:100]" (default: test)')] = None,
    column: Annotated[str | None, typer.Option("--column", help="Column with the text (default: text)")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data set while evaluating.")] = False,
    text_unit: Annotated[
        TextUnit, typer.Option("--text-unit", help="What one document of a text file is.")
    ] = TextUnit.paragraph,
    one_stream: Annotated[
        bool, typer.Option("--one-stream", help="Join all documents into one, separated by an empty line.")
    ] = False,
    mode: Annotated[
        Mode, typer.Option("--mode", help="One token at a time, windows of tokens, or one forward without a cache.")
    ] = Mode.step,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Tokens per forward in mode window (8 unless given).")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Changes the speed, not the result.")
    ] = 8,
    carry: Annotated[
        bool, typer.Option("--carry/--independent", help="Never reset the cache within a document, or per context.")
    ] = False,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of an independent context (default: up to 1024)")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="Tokens between contexts (default: --context)")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Stop after this many scored tokens.")
    ] = None,
    cache: common.CacheOption = common.CacheName.replayssm,
    compare: Annotated[
        Reference | None,
        typer.Option("--compare", help="Compare with this cache over the same tokens; none is one whole forward."),
    ] = None,
    buffer_len: common.BufferLenOption = None,
    checkpoint_dtype: common.CheckpointDtypeOption = None,
    rounding: common.RoundingOption = None,
    rounding_seed: common.RoundingSeedOption = None,
    backend: common.BackendOption = None,
    dtype: common.DtypeOption = None,
    device: common.DeviceOption = "auto",
    device_map: common.DeviceMapOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", help="Keep finished batches in this folder, and go on from those in it.", metavar="DIR"
        ),
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Perplexity on a data set, teacher-forced through the cache.

    Every token of a document but the first is scored once, whatever the mode, the cache and the batch size, so the
    results agree up to rounding wherever the cache is exact.

    Under `torchrun` or `accelerate launch` the processes share the work, each on a device of its own, and the result is
    that of one process.
    """
    common.check_json_target(json)
    source = _one_source(data, dataset, file)
    if compare is not None:
        if mode is Mode.full:
            raise typer.BadParameter("--compare goes through the caches: use --mode step or --mode window.")
        if compare.value == cache.value:
            raise typer.BadParameter(f"--compare {compare.value}: that is the cache itself. Name another one.")
    if window is not None and mode is not Mode.window:
        raise typer.BadParameter(f"--window {window} goes with --mode window; the mode is {mode.value}.")
    if carry and (context is not None or stride is not None):
        raise typer.BadParameter("--context and --stride cut independent contexts: leave them out with --carry.")
    uses_replay = mode is not Mode.full and "replayssm" in (cache.value, compare and compare.value)
    fields = common.replay_fields(
        used=uses_replay, buffer_len=buffer_len, checkpoint_dtype=checkpoint_dtype, rounding=rounding,
        seed=rounding_seed, backend=backend,
    )  # fmt: skip

    several = common.process() is not None
    if compare is not None and (several or resume is not None):
        raise typer.BadParameter("--compare pairs the tokens of two caches in one process, and has no --resume.")
    if several and device_map is not None:
        raise typer.BadParameter("--device-map spreads one model over the devices that several processes share out.")

    from hf_replayssm import bundled
    from hf_replayssm.evaluation import (
        BatchesFailed,
        Processes,
        compare_caches,
        evaluate_perplexity,
        join_documents,
        load_documents,
    )

    processes = Processes.from_environment()
    is_main = processes is None or processes.is_main
    failed: BatchesFailed | None = None
    with processes or contextlib.nullcontext():
        documents = load_documents(
            source or bundled.heldout_path("jsonl"),
            config=config,
            split=split,
            column=column,
            streaming=streaming,
            text_unit=text_unit.value,
        )
        if one_stream:
            documents = join_documents(documents)
        source = source or f"{common.BUNDLED} held-out text"
        loaded, tokenizer = common.load_model(model, dtype=dtype, device=device, device_map=device_map)
        settings = {
            "mode": mode.value,
            "cache": cache.value,
            "window": window or 8,
            "batch_size": batch_size,
            "carry_state": carry,
            "max_length": context,
            "stride": stride,
            "max_tokens": max_tokens,
            "replay": fields or None,
        }
        with _progress_bar(off=quiet or not is_main) as progress:
            if compare is None:
                try:
                    result = evaluate_perplexity(
                        loaded, tokenizer, documents, progress=progress, processes=processes, resume=resume, **settings
                    )
                except BatchesFailed as error:
                    if not is_main:
                        raise typer.Exit(1) from None  # the main process says it
                    if error.partial is None:
                        raise
                    failed, result = error, error.partial
            else:
                comparison = compare_caches(
                    loaded, tokenizer, documents, reference=compare.value, progress=progress, **settings
                )
                result = comparison.other
        if not is_main:
            return
        values = {**result.to_dict(), "model": model, "data": source}
        if failed is not None:
            values["failed_batches"] = failed.failures
        if compare is not None:
            values["comparison"] = comparison.to_dict()
        if not quiet:
            out = common.console(stderr=json == "-")
            _print_result(out, result, model, source)
            if compare is not None:
                _print_comparison(out, comparison)
        common.emit_json(values, json)
        if failed is not None:
            raise failed


def _one_source(data: str | None, dataset: str | None, file: str | None) -> str | None:
    given = [value for value in (data, dataset, file) if value is not None]
    if len(given) > 1:
        raise typer.BadParameter("Name the data once: as the argument, with --dataset, or with --file.")
    if file is not None:
        from pathlib import Path

        if not Path(file).expanduser().exists():
            raise FileNotFoundError(f"There is no file {file}. For a data set on the Hub use --dataset.")
    return given[0] if given else None


@contextlib.contextmanager
def _progress_bar(off: bool) -> Iterator[Any]:
    """A function (done, total) that moves a bar on standard error; None where there is no terminal to show it."""
    if off or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=common.console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_result(out: Any, result: Any, model: str, source: str) -> None:
    how = {"step": "one token at a time", "window": f"{result.window} tokens at a time", "full": "one forward"}
    rows = [
        ("model", f"{model} ({result.dtype}, {result.device})"),
        ("data", source),
        ("through", f"{result.cache} cache, {how[result.mode]}" if result.mode != "full" else "one forward, no cache"),
        ("perplexity per token", f"{result.perplexity:.4f}   ({common.count(result.tokens)} tokens)"),
    ]
    if result.word_perplexity is not None:
        rows.append(("perplexity per word", f"{result.word_perplexity:.4f}   ({common.count(result.words)} words)"))
    if result.bits_per_byte is not None:
        rows.append(("bits per byte", f"{result.bits_per_byte:.4f}   ({common.count(result.bytes)} bytes)"))
    kind = "with carried state" if result.carry_state else f"of up to {result.max_length} tokens"
    skipped = f", {common.count(result.skipped_documents)} empty ones skipped" if result.skipped_documents else ""
    contexts = f"{common.count(result.contexts)} contexts {kind}"
    rows.append(("documents", f"{common.count(result.documents)}, in {contexts}{skipped}"))
    among = f", {result.processes} processes" if result.processes > 1 else ""
    rows.append(("time", f"{result.seconds:.2f} s, {result.tokens_per_second:,.0f} tokens/s{among}"))
    common.print_rows(out, rows + common.stats_rows(result.cache_stats or {}))


def _print_comparison(out: Any, comparison: Any) -> None:
    reference, other = comparison.reference, comparison.other
    error = comparison.delta_logprob_se
    spread = f" ± {error:.1e} (per {comparison.cluster})" if error is not None else ""
    rows = [
        ("perplexity per token", f"{other.perplexity:.6f} against {reference.perplexity:.6f}"),
        ("relative difference", f"{comparison.relative_perplexity:+.2e}"),
        ("mean delta log p", f"{comparison.delta_logprob:+.2e}{spread}"),
        ("largest |delta log p|", f"{comparison.max_abs_delta_logprob:.2e}"),
        (f"KL({reference.cache} || {other.cache})", f"mean {comparison.kl:.2e}, max {comparison.max_kl:.2e}"),
        ("argmax agreement", f"{comparison.argmax_agreement:.4%} of {common.count(comparison.tokens)} tokens"),
        ("time", f"{other.seconds:.2f} s against {reference.seconds:.2f} s"),
    ]
    out.print(f"\n{other.cache} against {reference.cache}" + (" (one forward)" if reference.cache == "none" else ""))
    common.print_rows(out, rows)
