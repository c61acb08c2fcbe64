"""
What a checkpoint in fewer bits costs in accuracy: rounded once a flush, and, with a buffer of one token, at every
token, as the classic step with a state in these bits does.

    python scripts/study_precision.py --json study.json --plot study.svg      # the bundled model, layers and logits
    python scripts/study_precision.py --model Nemotron-H-8B --tokens 4096     # layers of a geometry, random weights
    python scripts/study_precision.py --model Qwen3-Next --tokens 4096        # Kimi-Linear, Jamba, slow: one layer
    python scripts/study_precision.py --model ID --device cuda --text FILE    # any supported checkpoint
    python scripts/study_precision.py --show a.json b.json --json both.json   # tables of earlier runs, put together

*States.* The inputs of every recurrent layer (x, dt, B, C; or q, k, v, g, beta) are recorded once, from a forward over
the text in float32, and each layer is then driven alone, at every precision at once: `Recurrence.replay` and `fold` on
buffers of `buffer_len` tokens, and `ops.quantize` between them, which is what the cache does. (A buffer goes in as one
window. A state is folded and rounded behind the same tokens as by single steps, from the same numbers; sums differ in
the last bits of float32.) Beside them runs the same layer in float64. In windows of 32 tokens spread over the text, so
that every phase of every buffer counts alike, the state behind each token is compared, what is in the buffer
included: mean |S - S64|^2 / mean |S64|^2 of each head, over all phases. Means over heads are of these.

*Logits.* The text in a few streams of carried state goes through the whole model and its cache, in windows of
`buffer_len` tokens, against the model in float64: perplexity, KL, how often the best token agrees. Attention sees the
text from the beginning of the last block of `--attention` tokens on, at every precision the same (the bundled model was
trained on 512).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import geometries
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicLayer

import hf_replayssm
from hf_replayssm import bundled
from hf_replayssm.ops import quantize
from hf_replayssm.recurrences import GatedDelta, Mamba1, Mamba2, Recurrence


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
BUFFER_LENS = (1, 4, 8, 16, 32)
SAMPLED = 32  # tokens in a row whose states are compared; a multiple of every buffer length
EVERY = 512  # tokens from the beginning of one such window to the next
RECORDED = 64  # tokens of a forward that records
POINTS = 32  # of a plot's line


# ------------------------------------------------------------------------------------------------ layers and inputs


class Layer:
    """One recurrent layer: its recurrence, the constants, and the operands of all tokens, (1, t, ...) each."""

    def __init__(
        self, name: str, recurrence: Recurrence, constants: tuple, operands: tuple, per_token: tuple[bool, ...]
    ):
        self.name, self.recurrence, self.constants = name, recurrence, constants
        self.operands, self.per_token = operands, per_token

    @property
    def tokens(self) -> int:
        return self.operands[0].shape[1]

    def part(self, begin: int, end: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(
            operand[:, begin:end].to(dtype).expand(rows, *[-1] * (operand.dim() - 1))
            if per_token
            else operand.to(dtype)
            for operand, per_token in zip(self.operands, self.per_token)
        )

    def decay(self) -> torch.Tensor:
        """The mean log decay of a token, for each head (of Mamba-1: each channel), <= 0."""
        if isinstance(self.recurrence, GatedDelta):
            g = self.operands[3][0].double()
            return g.mean(0) if g.dim() == 2 else g.mean((0, 2))
        if isinstance(self.recurrence, Mamba1):
            dt = F.softplus(self.operands[3][0].double() + self.constants[1])  # (t, g, p)
            return (dt.mean(0)[:, None] * self.constants[0]).mean(1).flatten()
        return (self.operands[3][0].double() * self.constants[0]).mean(0)


class Window:
    """`recurrences.Window` of a buffer that holds some tokens and nothing else."""

    start, flushes = 0, True

    def __init__(self, recurrence: Recurrence, checkpoint: torch.Tensor, tokens: int):
        self.checkpoint, self.num_tokens, self.end = checkpoint, tokens, tokens
        # (Of the delta rule u is found after the others are read; what is read of it lies in front of the new tokens.)
        self.tensors = {
            name: checkpoint.new_zeros((len(checkpoint), one.shape[0], 0, *one.shape[1:]))
            for name, one in recurrence.inputs.items()
        }

    def append(self, **new: torch.Tensor) -> None:
        for name, values in new.items():
            self.tensors[name] = values.transpose(1, 2)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.tensors.values())


@torch.no_grad()
def record(model: Any, ids: torch.Tensor, layers: int | None) -> list[Layer]:
    """The layers of an enabled model over the tokens `ids` (t,)."""
    cache = hf_replayssm.ReplayCache(config=model.config, buffer_len=RECORDED, backend="torch")
    recorded: list[list[tuple]] = [[] for _ in cache.replay_layers]

    def watch(layer, into):
        replay = layer.replay

        def watched(segment, *operands):
            into.append((layer.constants, operands))
            return replay(segment, *operands)

        layer.replay = watched

    for layer, into in zip(cache.replay_layers, recorded):
        watch(layer, into)
    for begin in range(0, len(ids), RECORDED):
        part = ids[None, begin : begin + RECORDED].to(model.device)
        forward(model, cache, part, begin)
        trim_attention(cache, RECORDED)
    found = []
    for number, calls in list(enumerate(recorded))[:layers]:
        first = calls[0][1]
        per_token = tuple(operand.dim() > 2 or operand.shape[:1] == (1,) for operand in first)
        operands = tuple(
            torch.cat([call[1][i].cpu() for call in calls], 1) if each else first[i].cpu()
            for i, each in enumerate(per_token)
        )
        constants = tuple(constant.cpu() for constant in calls[0][0])
        found.append(Layer(f"layer {number}", cache.replay_layers[number].recurrence, constants, operands, per_token))
    return found


def synthetic(name: str, tokens: int, seed: int = 0) -> Layer:
    """A layer of a public model's head sizes with random inputs, and decays as such layers are initialised."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    rand = lambda *size: torch.rand(*size, generator=generator)  # noqa: E731
    if name == "Jamba":  # 64 of its 8192 channels of 16
        channels, state = 64, 16
        recurrence = Mamba1(groups=1, channels=channels, state_size=state, conv_kernel=4)
        A = -torch.arange(1.0, state + 1)[None, :, None].expand(1, state, channels).contiguous()
        dt = torch.exp(math.log(1e-3) + rand(1, channels) * math.log(100))
        bias = dt + torch.log(-torch.expm1(-dt))
        x, z = F.silu(randn(1, tokens, 1, channels)), randn(1, tokens, 1, channels)
        B, C = randn(1, tokens, 1, state), randn(1, tokens, 1, state)
        raw, D = 0.5 * randn(1, tokens, 1, channels), torch.ones(1, channels)
        return Layer(name, recurrence, (A, bias), (x, B, C, raw, D, z), (True,) * 4 + (False, True))
    if name == "slow":  # Mamba-2 with a longer memory than the bundled model has: 30 to 30,000 tokens
        heads, head_dim, state = 8, 32, 64
        recurrence = Mamba2(heads, head_dim, state, groups=1, conv_kernel=4)
        A = -torch.logspace(math.log10(1 / 30), math.log10(1 / 30000), heads) / 0.03
        dt = 0.03 * torch.exp(0.5 * randn(1, tokens, heads) - 0.125)
        x, B, C = F.silu(randn(1, tokens, heads, head_dim)), *F.silu(randn(2, 1, tokens, 1, state))
        return Layer(name, recurrence, (A,), (x, B, C, dt, torch.ones(heads)), (True,) * 4 + (False,))
    per_channel = name == "Kimi-Linear"
    heads, key_heads = (4, 4) if per_channel else (4, 2)  # of 32; 128 x 128 each
    recurrence = GatedDelta(key_heads, heads, 128, 128, conv_kernel=4, decay_per_channel=per_channel)
    q, k = F.silu(randn(2, 1, tokens, key_heads, 128))
    v = F.silu(randn(1, tokens, heads, 128))
    gates = (heads, 128) if per_channel else (heads,)
    # exp(A_log) in [1, 16], softplus of dt around [0.001, 0.1].
    rate = torch.linspace(1, 16, heads).view(heads, *[1] * (len(gates) - 1))
    dt = torch.exp(math.log(1e-3) + rand(*gates) * math.log(100))
    g = -rate * F.softplus(dt + torch.log(-torch.expm1(-dt)) + 0.5 * randn(1, tokens, *gates))
    beta = randn(1, tokens, heads).sigmoid()
    return Layer(name, recurrence, (), (q, k, v, g, beta), (True,) * 5)


SYNTHETIC = ("Qwen3-Next", "Kimi-Linear", "Jamba", "slow")


# ------------------------------------------------------------------------------------------------------------- states


def variants(dtypes: list[str], roundings: list[str]) -> list[tuple[str, str]]:
    """(dtype, rounding) of each row that is driven."""
    return [
        (dtype, rounding)
        for dtype, rounding in itertools.product(dtypes, roundings)
        if dtype != "fp32" or rounding == "nearest"
    ]


def head_squares(layer: Layer, states: torch.Tensor) -> torch.Tensor:
    """(rows, *state_shape) -> (rows, heads): sums of squares; of Mamba-1 for each channel."""
    squares = states.square()
    if isinstance(layer.recurrence, Mamba1):
        return squares.sum(2).flatten(1)
    return squares.flatten(2).sum(2)


@torch.no_grad()
def drive(
    layer: Layer,
    buffer_len: int,
    rows: list[tuple[str, str]],
    seed: int = 0,
    keep: Callable[[torch.Tensor], None] = lambda checkpoint: None,
    scale_dim: int | None = None,
) -> dict[str, Any]:
    """
    The errors of the layer's state with a buffer of `buffer_len` tokens: relative to the mean square of the float64
    state, for each row (dtype, rounding) and head, over all phases; and in the order of the windows, over all heads.
    `keep` is given the checkpoints, as they are read, behind every flush.
    """
    recurrence, count = layer.recurrence, len(rows)
    shape = (count, *recurrence.state_shape)
    checkpoint, exact = torch.zeros(shape), torch.zeros((1, *shape[1:]), dtype=torch.float64)
    squares, errors = [], []  # of each sampled token: (heads,), (rows, heads)
    key = quantize.layer_seed(seed, 0)
    for begin in range(0, layer.tokens - buffer_len + 1, buffer_len):
        end = begin + buffer_len
        window = Window(recurrence, checkpoint, buffer_len)
        _, state = recurrence.replay(window, layer.constants, *layer.part(begin, end, count, torch.float32))
        truth = Window(recurrence, exact, buffer_len)
        constants64 = tuple(constant.double() for constant in layer.constants)
        recurrence.replay(truth, constants64, *layer.part(begin, end, 1, torch.float64))
        if state is None:
            state = recurrence.fold(window.inputs(), layer.constants, checkpoint, buffer_len)
        sampled = begin % EVERY >= EVERY - SAMPLED
        for held in range(1, buffer_len) if sampled else ():  # the tokens that are still in the buffer
            now = recurrence.fold(window.inputs(), layer.constants, checkpoint, held)
            now64 = recurrence.fold(truth.inputs(), constants64, exact, held)
            squares.append(head_squares(layer, now64)[0])
            errors.append(head_squares(layer, now.double() - now64))
        exact = recurrence.fold(truth.inputs(), constants64, exact, buffer_len).clone()
        checkpoint = rounded(state, rows, recurrence.scale_dim if scale_dim is None else scale_dim, key, end)
        keep(checkpoint)
        if sampled:  # behind the flush
            squares.append(head_squares(layer, exact)[0])
            errors.append(head_squares(layer, checkpoint.double() - exact))
    squares, errors = torch.stack(squares), torch.stack(errors)  # (samples, heads), (samples, rows, heads)
    relative = errors.mean(0) / squares.mean(0)
    windows = errors.view(-1, SAMPLED, *errors.shape[1:]).mean(1) / squares.mean(0)
    return {"relative": relative, "windows": windows.mean(2)}


def rounded(state: torch.Tensor, rows: list[tuple[str, str]], dim: int, key: int, tokens: int) -> torch.Tensor:
    """The state of each row as its checkpoint gives it back, float32."""
    bits = None
    if any(rounding == "stochastic" for _, rounding in rows):
        bits = quantize.random_bits(key, tokens, state.shape[1:], state.device)
    out = torch.empty(state.shape)
    for number, (dtype, rounding) in enumerate(rows):
        stored = quantize.store(
            state[number : number + 1], DTYPES[dtype], dim, bits if rounding == "stochastic" else None
        )
        out[number] = quantize.read(*stored)[0]
    return out


def study_states(layers: list[Layer], args: argparse.Namespace) -> dict[str, Any]:
    rows = variants(args.checkpoint, args.rounding)
    decays = torch.cat([layer.decay() for layer in layers])
    result: dict[str, Any] = {
        "tokens": layers[0].tokens,
        "layers": [layer.name for layer in layers],
        "recurrence": layers[0].recurrence.name,
        "memory_tokens": (-1 / decays).tolist(),  # of each head: in so many tokens it forgets by a factor of e
        "runs": [],
    }
    for buffer_len in args.buffer_len:
        began = time.perf_counter()
        driven = [drive(layer, buffer_len, rows, args.seed, scale_dim=args.scale_dim) for layer in layers]
        relative = torch.cat([one["relative"] for one in driven], 1)
        windows = torch.stack([one["windows"] for one in driven]).mean(0)
        for number, (dtype, rounding) in enumerate(rows):
            heads = relative[number]
            result["runs"].append(
                {
                    "checkpoint": dtype,
                    "rounding": rounding,
                    "buffer_len": buffer_len,
                    "relative_mse": heads.mean().item(),
                    "relative_mse_of_heads": heads.tolist(),
                    "drift": [[(i + 1) * EVERY, value] for i, value in enumerate(windows[:, number].tolist())],
                }
            )
        print(f"states, buffer {buffer_len}: {time.perf_counter() - began:.0f} s", flush=True)
    return result


# ------------------------------------------------------------------------------------------------------------- logits


class RecentKeys(DynamicLayer):
    """Keys and values of attention of which the oldest are dropped in whole blocks (`trim`)."""

    dropped = 0

    def trim(self, keep: int) -> None:
        extra = self.keys.shape[-2] - keep
        if extra > 0:
            self.keys, self.values = self.keys[..., extra:, :], self.values[..., extra:, :]
            self.dropped += extra

    def get_seq_length(self) -> int:
        return self.dropped + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, self.dropped


def new_cache(model: Any, **fields: Any) -> hf_replayssm.ReplayCache:
    cache = hf_replayssm.ReplayCache(config=model.config, **fields)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = RecentKeys()
    return cache


def trim_attention(cache: hf_replayssm.ReplayCache, keep: int) -> None:
    for layer in cache.layers:
        if isinstance(layer, RecentKeys):
            layer.trim(keep)


def forward(model: Any, cache: hf_replayssm.ReplayCache, ids: torch.Tensor, begin: int) -> torch.Tensor:
    positions = {}
    if any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        positions["position_ids"] = torch.arange(begin, begin + ids.shape[1], device=ids.device).expand(len(ids), -1)
    return model(input_ids=ids, cache=cache, use_cache=True, **positions).logits


@torch.no_grad()
def teacher_forced(model: Any, streams: torch.Tensor, width: int, attention: int, **fields: Any) -> Iterator[tuple]:
    """
    (begin, logits (b, width, vocab)) over the streams (b, t) in windows of `width` tokens. The blocks at whose borders
    attention forgets are the same for every width that divides them.
    """
    cache = new_cache(model, **fields)
    for begin in range(0, streams.shape[1], width):
        ids = streams[:, begin : begin + width].to(model.device)
        yield begin, forward(model, cache, ids, begin)
        if attention and (begin + width) % attention == 0:
            trim_attention(cache, attention)


def statistics(model: Any, streams: torch.Tensor, exact: torch.Tensor, width: int, args: Any, **fields: Any) -> dict:
    """Of one setting against the log probabilities `exact` (b, t, vocab) of the model in float64."""
    targets = streams[:, 1:]
    nll, kl, agree, deviation = [], [], [], []
    began = time.perf_counter()
    for begin, logits in teacher_forced(model, streams[:, :-1], width, args.attention, **fields):
        reference = exact[:, begin : begin + width].to(logits.device).double()
        ours = torch.log_softmax(logits.double(), -1)
        at = targets[:, begin : begin + width, None].to(logits.device)
        nll.append(-ours.gather(-1, at)[..., 0].cpu())
        kl.append((reference.exp() * (reference - ours)).sum(-1).clamp(min=0).cpu())
        agree.append((ours.argmax(-1) == reference.argmax(-1)).cpu())
        deviation.append((ours - reference).square().mean(-1).cpu())
    nll, kl, agree, deviation = (torch.cat(parts, 1).double() for parts in (nll, kl, agree, deviation))
    cut = nll.shape[1] // POINTS * POINTS
    drift = kl[:, :cut].mean(0).view(POINTS, -1).mean(1).tolist()
    return {
        "perplexity": nll.mean().exp().item(),
        "nll": nll.mean().item(),
        "nll_of_streams": nll.mean(1).tolist(),
        "kl": kl.mean().item(),
        "max_kl": kl.max().item(),
        "argmax_agreement": agree.mean().item(),
        "logits_mse": deviation.mean().item(),  # of log probabilities, over the vocabulary
        "drift": [[int((i + 0.5) * cut / POINTS), value] for i, value in enumerate(drift)],
        "seconds": time.perf_counter() - began,
    }


@torch.no_grad()
def study_logits(model: Any, streams: torch.Tensor, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`streams` (b, t + 1) tokens. Yields the result so far, run by run."""
    began = time.perf_counter()
    double = copy.deepcopy(model).double()
    whole = teacher_forced(double, streams[:, :-1], 32, args.attention, checkpoint_dtype=torch.float64, backend="torch")
    # (Kept in float32: a log probability in nats then has 7 digits, and KL is far above that.)
    exact = torch.cat([torch.log_softmax(logits, -1).float().cpu() for _, logits in whole], 1)
    del double
    nll = -exact.gather(-1, streams[:, 1:, None])[..., 0].double()
    result: dict[str, Any] = {
        "streams": streams.shape[0],
        "tokens": streams.shape[1] - 1,
        "attention": args.attention,
        "float64": {"perplexity": nll.mean().exp().item(), "nll": nll.mean().item()},
        "runs": [],
    }
    print(f"float64: {time.perf_counter() - began:.0f} s, perplexity {nll.mean().exp().item():.4f}", flush=True)
    for buffer_len in sorted(args.buffer_len, reverse=True):
        for dtype, rounding in variants(args.checkpoint, args.rounding):
            run = {"checkpoint": dtype, "rounding": rounding, "buffer_len": buffer_len}
            fields = {"checkpoint_dtype": DTYPES[dtype], "rounding": rounding, "seed": args.seed}
            run |= statistics(model, streams, exact, buffer_len, args, buffer_len=buffer_len, **fields)
            result["runs"].append(run)
            base = next(r for r in result["runs"] if r["checkpoint"] == "fp32" and r["buffer_len"] == buffer_len)
            run["relative_perplexity"] = math.expm1(run["nll"] - base["nll"])
            print(
                f"logits {dtype} {rounding} {buffer_len}: {run['perplexity']:.5f} ({run['seconds']:.0f} s)", flush=True
            )
            yield result


# ------------------------------------------------------------------------------------------------------------- report


def pivot(runs: list[dict], value: str, form: str) -> list[str]:
    """A Markdown table: a line for each precision, a column for each buffer length."""
    lengths = sorted({run["buffer_len"] for run in runs})
    lines = [f"| {value.replace('_', ' ')} | " + " | ".join(f"L={length}" for length in lengths) + " |"]
    lines.append("| --- |" + " --- |" * len(lengths))
    for key in dict.fromkeys((run["checkpoint"], run["rounding"]) for run in runs):
        cells = []
        for length in lengths:
            found = [r for r in runs if (r["checkpoint"], r["rounding"]) == key and r["buffer_len"] == length]
            cells.append(form.format(found[0][value]) if found and found[0].get(value) is not None else "")
        lines.append(f"| {key[0]}{', stochastic' if key[1] == 'stochastic' else ''} | " + " | ".join(cells) + " |")
    return lines


def ratio_lines(states: dict[str, Any]) -> list[str]:
    """Per token against per flush, and which heads carry the error."""
    runs = {(r["checkpoint"], r["rounding"], r["buffer_len"]): r for r in states["runs"]}
    memory = torch.tensor(states["memory_tokens"])
    order = memory.argsort()
    quarters = order.tensor_split(4)
    lines = []
    for (dtype, rounding, length), run in runs.items():
        token = runs.get((dtype, rounding, 1))
        if length != 16 or token is None or dtype == "fp32":
            continue
        ours, theirs = (torch.tensor(r["relative_mse_of_heads"], dtype=torch.float64) for r in (run, token))
        each = theirs / ours
        share = [f"{100 * (ours[part].sum() / ours.sum()).item():.0f} %" for part in quarters]
        ratios = [f"{(theirs[part].mean() / ours[part].mean()).item():.1f}" for part in quarters]
        lines.append(
            f"{dtype} {rounding}: error per token / per flush (L=16): {theirs.mean() / ours.mean():.1f}, "
            f"median of heads {each.median():.1f}, least {each.min():.1f}; from the fastest to the slowest quarter of "
            f"heads: ratio {', '.join(ratios)}; share of the error {', '.join(share)}"
        )
    bounds = [f"{memory[part].min():.1f} to {memory[part].max():.1f}" for part in quarters]
    return [*lines, f"memory of these quarters, tokens: {'; '.join(bounds)}"]


def report(result: dict[str, Any]) -> str:
    lines = []
    for study in result["studies"]:
        lines += [f"## {study['model']}", ""]
        if "states" in study:
            states = study["states"]
            lines += [f"States ({states['recurrence']}), {states['tokens']} tokens:", ""]
            lines += [*pivot(states["runs"], "relative_mse", "{:.2e}"), "", *ratio_lines(states), ""]
        if "logits" in study:
            logits = study["logits"]
            lines += [
                f"Logits, {logits['streams']} streams of {logits['tokens']} tokens; perplexity in float64 "
                f"{logits['float64']['perplexity']:.4f}:",
                "",
            ]
            for run in logits["runs"]:
                run["relative_perplexity_percent"] = 100 * run["relative_perplexity"]
            for value, form in (
                ("relative_perplexity_percent", "{:+.3f}"),
                ("kl", "{:.2e}"),
                ("argmax_agreement", "{:.4f}"),
            ):
                lines += [*pivot(logits["runs"], value, form), ""]
    return "\n".join(lines)


COLOURS = {"fp32": "tab:gray", "bf16": "tab:blue", "fp16": "tab:green", "fp8": "tab:red", "int8": "tab:orange"}


def plot(result: dict[str, Any], path: str) -> None:
    """The drift against tokens: dashed per token, solid per flush (16), dotted the same with stochastic rounding."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "replayssm"
    from matplotlib import pyplot

    panels = [
        (study, part, label)
        for study in result["studies"]
        for part, label in (("states", "relative state error (mean square)"), ("logits", "KL to float64"))
        if part in study
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.2), squeeze=False)
    for axis, (study, part, label) in zip(axes[0], panels):
        for run in study[part]["runs"]:
            stochastic = run["rounding"] == "stochastic"
            if run["buffer_len"] not in (1, 16) or (stochastic and run["buffer_len"] == 1):
                continue
            style = ":" if stochastic else "--" if run["buffer_len"] == 1 else "-"
            name = f"{run['checkpoint']}, {'per token' if run['buffer_len'] == 1 else 'per flush'}"
            tokens, values = zip(*run["drift"])
            axis.plot(
                tokens,
                values,
                style,
                color=COLOURS[run["checkpoint"]],
                lw=1.2,
                label=name + (", stochastic" if stochastic else ""),
            )
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_title(f"{study['model']}: {label}", fontsize=9)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


# --------------------------------------------------------------------------------------------------------------- main


def load(name: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """An enabled model and its tokenizer (None with random weights)."""
    dtype = getattr(torch, args.dtype)
    if name == "bundled":
        model, tokenizer = bundled.load_target(dtype=dtype)
    elif name in geometries.GEOMETRIES:
        config = geometries.named(name) if args.whole else geometries.draft_of(name)
        model, tokenizer = geometries.build(config, args.device, dtype), None
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    return hf_replayssm.enable(model.to(args.device).eval()), tokenizer


def tokens_of(tokenizer: Any, model: Any, args: argparse.Namespace) -> torch.Tensor:
    """(t,) int64: the text, or random tokens for random weights."""
    if tokenizer is None:
        return geometries.random_prompt(model, 1, args.streams * (args.tokens + 1))[0].cpu()
    text = Path(args.text or bundled.heldout_path()).read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        default=["bundled"],
        help="bundled, a geometry, Qwen3-Next, Kimi-Linear, Jamba, slow, or an id",
    )
    add("--whole", action="store_true", help="a geometry's whole model, not two layers of 16 heads")
    add("--text", help="UTF-8 text; the held-out text of the bundled model by default")
    add("--tokens", type=int, default=16384, help="carried tokens, of each stream")
    add("--streams", type=int, default=4, help="of the text, side by side, for the logits")
    add("--what", nargs="+", choices=["states", "logits"], default=["states", "logits"])
    add("--layers", type=int, help="only so many recurrent layers, for the states")
    add("--checkpoint", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    add("--buffer-len", nargs="+", type=int, default=list(BUFFER_LENS))
    add("--rounding", nargs="+", choices=["nearest", "stochastic"], default=["nearest", "stochastic"])
    add(
        "--attention",
        type=int,
        default=512,
        help="block of tokens beyond the last of which attention forgets; 0: never",
    )
    add("--scale-dim", type=int, choices=[-1, -2], help="of a state: what shares a scale, other than in the cache")
    add("--seed", type=int, default=0, help="of stochastic rounding")
    add("--dtype", default="float32", help="of the weights")
    add("--device", default="cpu")
    add("--json", help="write the results here")
    add("--plot", help="draw the drift here (needs matplotlib)")
    add("--show", nargs="+", metavar="JSON", help="measure nothing: tables of earlier runs, put together")
    args = parser.parse_args()
    if any(SAMPLED % length or (args.attention and args.attention % length) for length in args.buffer_len):
        parser.error(f"every --buffer-len must divide {SAMPLED} and --attention")
    if "fp32" not in args.checkpoint:
        args.checkpoint.insert(0, "fp32")  # what perplexities are held against
    args.tokens = args.tokens // EVERY * EVERY
    return args


def save(result: dict[str, Any], args: argparse.Namespace) -> None:
    """As it goes: a long run that is stopped leaves what it has."""
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n")


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: those of the same model and tokens are put together."""
    whole: dict[str, Any] = {"about": results[0].get("about"), "studies": []}
    for study in (study for result in results for study in result["studies"]):
        mine = next((other for other in whole["studies"] if other["model"] == study["model"]), None)
        if mine is None:
            whole["studies"].append(study)
            continue
        for part in ("states", "logits"):
            if part not in study:
                continue
            if part not in mine:
                mine[part] = study[part]
                continue
            if mine[part]["tokens"] != study[part]["tokens"]:
                raise SystemExit(f"the runs of {study['model']} are over different numbers of tokens")
            key = lambda run: (run["checkpoint"], run["rounding"], run["buffer_len"])  # noqa: E731
            there = {key(run) for run in mine[part]["runs"]}
            mine[part]["runs"] += [run for run in study[part]["runs"] if key(run) not in there]
    return whole


def main() -> None:
    args = parse()
    if args.show:
        result = merged([json.loads(Path(path).read_text()) for path in args.show])
        save(result, args)
    else:
        result = {
            "about": {
                "date": time.strftime("%Y-%m-%d"),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
                "dtype": args.dtype,
                "sampled_tokens": [SAMPLED, EVERY],
                "seed": args.seed,
            },
            "studies": [],
        }
        for name in args.model:
            study: dict[str, Any] = {"model": name}
            result["studies"].append(study)
            if name in SYNTHETIC:
                study["states"] = study_states([synthetic(name, args.tokens)], args)
            else:
                model, tokenizer = load(name, args)
                ids = tokens_of(tokenizer, model, args)
                if "states" in args.what:
                    study["states"] = study_states(record(model, ids[: args.tokens], args.layers), args)
                if "logits" in args.what:
                    length = min(args.tokens, len(ids) // args.streams - 1) // 64 * 64 + 1
                    streams = torch.stack([ids[i * length : (i + 1) * length] for i in range(args.streams)])
                    for study["logits"] in study_logits(model, streams, args):
                        save(result, args)
            save(result, args)
    print(report(result))
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
