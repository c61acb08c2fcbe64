"""Text from a hybrid model through transformers' own cache and through replay; then the perplexity through both.

Without --model it runs on the bundled pair of models and needs no network. See scripts/demo.sh, which also installs.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import transformers
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_replayssm
from hf_replayssm import bundled
from hf_replayssm.evaluation import compare_caches, load_documents


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="model id or path (default: the bundled hybrid)")
    add("--draft", help="draft model for speculation (default: the bundled one; prompt lookup with --model)")
    add("--prompt", default="The carriage stopped at the door, and Emma", help="what the text begins with")
    add("--max-new-tokens", type=positive, default=120, help="length of the text (default: %(default)s)")
    add("--buffer-len", type=positive, default=16, help="tokens between two writes of the state (default: %(default)s)")
    add("--data", help="text file (.txt, .jsonl, .parquet) or data set id (default: the bundled held-out text)")
    add("--eval-tokens", type=positive, default=2000, help="tokens in the perplexity (default: %(default)s)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", default="auto", choices=dtypes, help="of the weights (default: as they are stored)")
    return parser.parse_args()


def load(name: str | None, dtype: str, load_bundled):
    """The model and its tokenizer, from the Hub, a path, or (no name) the package."""
    if name is None:
        return load_bundled(**({} if dtype == "auto" else {"dtype": dtype}))
    device_map = "auto" if torch.cuda.is_available() else None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, trust_remote_code=False)
    return model.eval(), AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def upstream_step_skips_dt_limit(model) -> bool:
    """Whether the model limits dt, which upstream's whole-sequence forward does and its cached step does not."""
    limits = {tuple(module.time_step_limit) for module in model.modules() if getattr(module, "time_step_limit", None)}
    return bool(limits - {(0.0, float("inf"))})


def generate(model, inputs, new_tokens: int, do_sample: bool = False, **kwargs):
    """Greedy text, unless `do_sample`: the new tokens, the seconds it took, and the cache."""
    start = time.perf_counter()
    output = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=do_sample, return_dict_in_generate=True, **kwargs
    )
    seconds = time.perf_counter() - start
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), seconds, output.cache


def generate_both(model, inputs, new_tokens: int, baseline: dict):
    """With the baseline's settings and with replay, in turn. The times are the best of three, or of fewer in 20 s."""
    for settings in (baseline, {}):  # once to warm up
        generate(model, inputs, 8, **settings)
    began = time.perf_counter()
    best = [float("inf"), float("inf")]
    for _ in range(3):
        expected, seconds_without, _ = generate(model, inputs, new_tokens, **baseline)
        tokens, seconds_with, cache = generate(model, inputs, new_tokens)
        best = [min(best[0], seconds_without), min(best[1], seconds_with)]
        if time.perf_counter() - began > 20:
            break
    return expected, tokens, cache, best


def speculate(model, inputs, new_tokens: int, **kwargs):
    """The new tokens with drafts, and the statistics of the fastest of three calls, or of fewer in 20 s."""
    began, best = time.perf_counter(), None
    for _ in range(3):
        output = hf_replayssm.speculative_generate(
            model,
            inputs["input_ids"],
            inputs["attention_mask"],
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            **kwargs,
        )
        if best is None or output.statistics.seconds < best.statistics.seconds:
            best = output
        if time.perf_counter() - began > 20:
            break
    return best.sequences[0, inputs["input_ids"].shape[1] :].tolist(), best.statistics


def what_drafts_did(statistics, seconds_without: float) -> str:
    """Acceptance, rounds and time, in words."""
    ratio = seconds_without / statistics.seconds
    verdict = f"[green]{ratio:.2f} times as fast[/]" if ratio >= 1.05 else f"[yellow]no gain[/] ({ratio:.2f})"
    return (
        f"{statistics.rounds} rounds for {statistics.new_tokens} tokens, {statistics.accepted} of {statistics.drafted} "
        f"drafts accepted ({statistics.acceptance_rate:.0%}, {statistics.mean_accepted:.2f} per round), "
        f"{statistics.seconds:.2f} s against {seconds_without:.2f} s without drafts: {verdict}"
    )


def compare_tokens(tokens: list[int], reference: list[int], what: str, exact: bool) -> tuple[bool, str]:
    """Whether the tokens are right, which in 16 bits does not mean the same, and how they compare, in words."""
    if tokens == reference:
        return True, f"[green]the same {len(tokens)} tokens[/] as {what}."
    pairs = zip(tokens, reference)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference)))
    sentence = f"[{'red' if exact else 'yellow'}]other tokens[/] than {what}, from token {first + 1} on."
    if not exact:
        sentence += " In 16 bits the best two often tie, and the order of a sum decides: see the KL below."
    return not exact, sentence


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def table_of_savings(stats, buffer_len: int, seconds: list[float] | None, tokens: int) -> Table:
    """`seconds`: without and with replay, or None where the tokens differ (then no speed is shown)."""
    written = stats.checkpoint_bytes_written + stats.input_bytes_written
    table = Table(title=f"What replay saved over {stats.forwards} forwards, buffer_len={buffer_len}")
    table.add_column("")
    for heading in ("without", "with replay", "ratio"):
        table.add_column(heading, justify="right")

    def row(name: str, without: float, replay: float, show) -> None:
        table.add_row(name, show(without), show(replay), f"{without / replay:.2f}" if replay else "")

    row("writes of the recurrent state", stats.forwards, stats.checkpoint_writes, str)
    row("bytes written to the state and the buffers", stats.per_token_bytes, written, size)
    if seconds is not None:
        row("milliseconds per token", seconds[0] / tokens * 1e3, seconds[1] / tokens * 1e3, "{:.2f}".format)
    return table


def main() -> int:
    args = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.model is None:
        torch.set_num_threads(1)  # the bundled models are too small to share out
    console.rule("hf_replayssm")
    # What can be wrong is read first: the data are small, the text takes a while.
    documents = load_documents(args.data or bundled.heldout_path("jsonl"))
    model, tokenizer = load(args.model, args.dtype, bundled.load_target)
    hf_replayssm.enable(model, buffer_len=args.buffer_len)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    family = model.config.model_type
    exact = model.dtype == torch.float32
    console.print(
        f"{args.model or 'The bundled hybrid'}: {family}, {model.num_parameters() / 1e6:.1f} M parameters, "
        f"{str(model.dtype).removeprefix('torch.')}, on {model.device}."
    )

    # 1. The same text, through transformers' cache and through replay.
    if upstream_step_skips_dt_limit(model):
        what, reference, baseline = "greedy decoding without a cache", "none", {"use_cache": False}
        console.print(
            f"Upstream's cached step of {family} skips the limit on dt that its whole-sequence forward applies. Replay "
            "applies it always, so it is compared with the model without a cache, and no time is."
        )
    else:
        what, reference, baseline = "transformers' own cache", "dynamic", {"cache_implementation": "dynamic"}
    expected, tokens, cache, seconds = generate_both(model, inputs, args.max_new_tokens, baseline)
    torch.manual_seed(0)
    samples = [generate(model, inputs, args.max_new_tokens, **SAMPLING) for _ in range(3 if args.model is None else 1)]
    sampled, seconds_sampled = samples[0][0], min(seconds for _, seconds, _ in samples)
    for title, ids in (("greedy", tokens), ("sampled", sampled)):
        text = Text.assemble((args.prompt, "bold"), tokenizer.decode(ids, skip_special_tokens=True))
        console.print(Panel(text, title=f"{title}, through replay"))
    passed, sentence = compare_tokens(tokens, expected, what, exact)
    console.print(f"Greedy: {sentence}")

    # 2. Speculative decoding, which transformers itself refuses for a model with a recurrent state.
    if args.draft or not args.model:
        draft, _ = load(args.draft, args.dtype, bundled.load_draft)
        how, drafting = "a draft model", {"assistant_model": draft, "num_assistant_tokens": 5}
    else:
        how, drafting = "prompt lookup", {"prompt_lookup_num_tokens": 5}
    speculated, statistics = speculate(model, inputs, args.max_new_tokens, do_sample=False, **drafting)
    same, sentence = compare_tokens(speculated, tokens, "without drafts", exact)
    passed &= same
    console.print(f"Speculation with {how}: {sentence}")
    if speculated == tokens:
        console.print(f"  greedy: {what_drafts_did(statistics, seconds[1])}.")
    # Greedy text of a small model repeats itself, which is easy to guess. Sampled text does not.
    torch.manual_seed(0)
    _, statistics = speculate(model, inputs, args.max_new_tokens, **SAMPLING, **drafting)
    console.print(f"  sampled: {what_drafts_did(statistics, seconds_sampled)}.")

    # 3. Perplexity, one token at a time through both caches.
    replay = {"buffer_len": args.buffer_len}
    with console.status("Perplexity"):
        result = compare_caches(
            model, tokenizer, documents, reference=reference, max_tokens=args.eval_tokens, max_length=256, replay=replay
        )
    through = f"with {what}" if reference == "dynamic" else "without a cache"
    console.print(
        f"Perplexity over {result.tokens} tokens, fed one by one: {result.reference.perplexity:.4f} {through}, "
        f"{result.other.perplexity:.4f} with replay (KL {result.kl:.1e}, "
        f"the same best token for {result.argmax_agreement:.2%}).\n"
    )

    # 4. What was saved while the text of step 1 was generated.
    timed = tokens == expected and reference == "dynamic"
    console.print(table_of_savings(cache.stats, args.buffer_len, seconds if timed else None, len(tokens)))
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:  # a model that does not load or is not supported, data that cannot be read
        sys.exit(f"demo: {' '.join(str(error).split())}")
