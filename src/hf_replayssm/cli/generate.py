"""`hf-replayssm generate`: a prompt in, streamed text out."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import common


@common.one_line_errors
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt (default: standard input)")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")] = None,
    model: common.ModelOption = common.BUNDLED,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", min=0.0, help="Sample; 0 is greedy (default: greedy)")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from this mass.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the k likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the sampling.")] = None,
    cache: common.CacheOption = common.CacheName.replayssm,
    assistant: Annotated[
        str | None,
        typer.Option("--assistant", help='Draft model of assisted generation: an id, a folder, or "bundled".'),
    ] = None,
    prompt_lookup: Annotated[
        int | None,
        typer.Option("--prompt-lookup", min=1, help="Draft this many tokens by looking them up in the text."),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Time, rounds and acceptance of drafts, and the cache's counters, on standard error."
        ),
    ] = False,
    buffer_len: common.BufferLenOption = None,
    checkpoint_dtype: common.CheckpointDtypeOption = None,
    rounding: common.RoundingOption = None,
    rounding_seed: common.RoundingSeedOption = None,
    backend: common.BackendOption = None,
    dtype: common.DtypeOption = None,
    device: common.DeviceOption = "auto",
    device_map: common.DeviceMapOption = None,
    json: common.JsonOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the text (with --json).")] = False,
    debug: common.DebugOption = False,
) -> None:
    """Generate text from a prompt, streamed as it comes."""
    common.check_json_target(json)
    replay = cache is common.CacheName.replayssm
    if assistant is not None and prompt_lookup is not None:
        raise typer.BadParameter("--assistant and --prompt-lookup are two ways to draft: choose one.")
    if (assistant is not None or prompt_lookup is not None) and not replay:
        raise typer.BadParameter(
            f"--cache {cache.value} cannot take back rejected drafts of a recurrent state. Use --cache replayssm."
        )
    fields = common.replay_fields(
        used=replay, buffer_len=buffer_len, checkpoint_dtype=checkpoint_dtype, rounding=rounding,
        seed=rounding_seed, backend=backend,
    )  # fmt: skip
    text = _prompt(prompt, prompt_file)

    import torch
    from transformers import TextStreamer

    import hf_replayssm
    from hf_replayssm.speculative import SpeculationStatistics

    loaded, tokenizer = common.load_model(model, dtype=dtype, device=device, device_map=device_map)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(
            "The prompt is empty. Give some text as the argument, with --prompt-file, or on standard input."
        )
    inputs = inputs.to(loaded.device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    options |= _sampling(temperature, top_p, top_k)
    if replay:
        hf_replayssm.enable(loaded, **fields)
        options["cache_implementation"] = "replayssm"
    else:
        options["cache_implementation"] = "dynamic"
    run, batched = loaded.generate, prompt_lookup is not None
    if assistant is not None:
        draft, batched = _draft(assistant, dtype, loaded, tokenizer)
        options |= draft
    if prompt_lookup is not None:
        options["prompt_lookup_num_tokens"] = prompt_lookup
    if not quiet and json != "-":
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if seed is not None:
        torch.manual_seed(seed)
    if batched:  # the loop of this package costs less per round than that of generate
        run = functools.partial(hf_replayssm.speculative_generate, loaded)
    began = time.perf_counter()
    output = run(**inputs, **options)
    seconds = time.perf_counter() - began

    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    cache_stats = getattr(getattr(output, "cache", None), "stats", None)
    speculation = getattr(output, "statistics", None)
    if speculation is None and assistant is not None:
        speculation = SpeculationStatistics.from_generate(cache_stats, len(new), seconds)
    result = {
        "model": model,
        "cache": cache.value,
        "prompt": text,
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "new_tokens": len(new),
        "seconds": seconds,
        "tokens_per_second": len(new) / seconds if seconds > 0 else 0.0,
        "do_sample": options["do_sample"],
        "assistant": assistant,
        "prompt_lookup": prompt_lookup,
        "speculation": None if speculation is None else speculation.to_dict(),
        "cache_stats": cache_stats.to_dict() if cache_stats is not None else None,
    }
    if stats:
        _print_stats(result)
    common.emit_json(result, json)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("Give the prompt once: as the argument or with --prompt-file.")
    if prompt_file is not None:
        if not prompt_file.is_file():
            raise FileNotFoundError(f"There is no file {prompt_file} to read the prompt from.")
        return prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "There is no prompt. Give one as the argument, with --prompt-file, or on standard input."
        )
    return sys.stdin.read().removesuffix("\n")  # what echo and editors put there


def _sampling(temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Greedy, unless something about sampling was asked for."""
    if temperature == 0.0:
        if top_p is not None or top_k is not None:
            raise typer.BadParameter("--temperature 0 is greedy: leave --top-p and --top-k out.")
        return {"do_sample": False}
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": bool(given), **given}


def _draft(name: str, dtype: str | None, target: Any, tokenizer: Any) -> tuple[dict[str, Any], bool]:
    """
    The arguments for a draft model, which is enabled by them if it has a recurrent state, and whether
    `speculative_generate` serves it: with another vocabulary only `generate` does.
    """
    from hf_replayssm import bundled

    path = str(bundled.draft_path()) if name == common.BUNDLED else name
    if name == common.BUNDLED and dtype is None:
        dtype = "float32"
    draft, draft_tokenizer = common.load_model(path, dtype=dtype, device=str(target.device))
    options = {"assistant_model": draft}
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        return options | {"tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}, False
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (draft, target)]
    return options, sizes[0] == sizes[1]


def _print_stats(result: dict[str, Any]) -> None:
    rows = [
        ("prompt tokens", common.count(result["prompt_tokens"])),
        ("new tokens", common.count(result["new_tokens"])),
        ("time", f"{result['seconds']:.2f} s, {result['tokens_per_second']:,.1f} tokens/s"),
    ]
    speculation = result["speculation"]
    if speculation is not None:
        rows += [
            ("rounds", f"{common.count(speculation['rounds'])} (draft, verify in one forward, accept)"),
            (
                "drafts accepted",
                f"{common.count(speculation['accepted'])} of {common.count(speculation['drafted'])} "
                f"({speculation['acceptance_rate']:.0%}), {speculation['mean_accepted']:.2f} per round",
            ),
            (
                "forwards of the model",
                f"{common.count(speculation['target_forwards'])}, {abs(speculation['forwards_saved']):,} "
                f"{'fewer' if speculation['forwards_saved'] >= 0 else 'more'} than without drafts",
            ),
        ]
    common.print_rows(common.console(stderr=True), rows + common.stats_rows(result["cache_stats"] or {}))
