"""
Times the Mamba-2 scan of a prompt: ours (`ops.mamba2.scan`) against transformers' PyTorch code, which is what a prompt
goes through where no package has kernels for it. Outputs and states are compared with float64 first.

    python scripts/benchmark_scan.py                                    # 2,048 tokens, 32 heads, float32, on the CPU
    python scripts/benchmark_scan.py --device cuda --tokens 8192 --heads 128 --groups 8 --dtype bfloat16 --fla WHEEL

With --fla, or where it is installed, the chunked scan of flash-linear-attention is a third, called as the package does
(`ops.flash_linear.scan`). Its first call compiles and tunes its kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from benchmark_gated_delta import unpacked
from benchmark_kernels import table
from model_timing import DTYPES, now, say
from torch.nn import functional as F
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from hf_replayssm.models.mixer import is_reference
from hf_replayssm.ops import flash_linear, mamba2


def inputs(args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """x (b, t, h, p), final dt (b, t, h), A (h,), B and C (b, t, g, n), D (h,), initial state (b, h, p, n)."""
    torch.manual_seed(0)
    dtype, shape = DTYPES[args.dtype], (args.batch, args.tokens)
    x = torch.randn(*shape, args.heads, args.head_dim).to(dtype)
    B, C = (torch.randn(*shape, args.groups, args.state).to(dtype) for _ in range(2))
    dt, A, D = (
        F.softplus(torch.randn(*shape, args.heads) - 3),
        -torch.rand(args.heads) * 15 - 0.1,
        torch.randn(args.heads),
    )
    state = torch.randn(args.batch, args.heads, args.head_dim, args.state)
    return tuple(tensor.to(args.device) for tensor in (x, dt, A, B, C, D, state))


def ours(x, dt, A, B, C, D, state) -> tuple[torch.Tensor, torch.Tensor]:
    return mamba2.scan(x, dt, A, B, C, D, state)


def transformers(x, dt, A, B, C, D, state) -> tuple[torch.Tensor, torch.Tensor]:
    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=256, D=D, initial_states=state, return_final_states=True)


def flash_linear_attention(x, dt, A, B, C, D, state) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_linear.scan(x, dt, A, B, C, D, state)


def off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@torch.no_grad()
def run(args: argparse.Namespace) -> str:
    arguments, rows = inputs(args), []
    exact = ours(*(tensor.double() for tensor in arguments))
    scans = [ours, transformers]
    if args.fla:
        sys.path.insert(0, str(unpacked(args.fla)))
    if flash_linear.serves(arguments[0]):
        scans.append(flash_linear_attention)
    for scan in scans:
        begin = now(args.device)
        y, state = scan(*arguments)
        first = now(args.device) - begin
        errors = off(y, exact[0]), off(state, exact[1])
        if max(errors) > 1e-2:
            rows.append([scan.__name__, "-", *(f"{error:.0e}" for error in errors), "-", "-"])
            continue
        peak, seconds = "-", []
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(args.repeats):
            begin = now(args.device)
            scan(*arguments)
            seconds.append(now(args.device) - begin)
        if args.device == "cuda":
            peak = f"{(torch.cuda.max_memory_allocated() - before) / 1e9:.2f}"
        median = f"{statistics.median(seconds) * 1e3:.1f}"
        rows.append([scan.__name__, median, *(f"{error:.0e}" for error in errors), peak, f"{first:.1f}"])
    title = (
        f"Scan of {args.batch} x {args.tokens} tokens, {args.heads} x {args.head_dim} x {args.state}, "
        f"{args.groups} groups, {args.dtype}, {args.device}, torch {torch.__version__}"
    )
    return table(title, ["scan", "ms", "error of y", "of the state", "peak, GB", "first call, s"], rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", default="float32", choices=DTYPES)
    for name, value in (("batch", 1), ("tokens", 2048), ("heads", 32), ("head-dim", 64), ("state", 128), ("groups", 2)):
        add(f"--{name}", type=int, default=value)
    add("--fla", help="a wheel of fla-core, or a folder that holds `fla`")
    add("--repeats", type=int, default=5)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    if not is_reference(mamba2_chunk_scan):
        say("transformers has kernels for the scan here: its time is theirs.")
    say(run(parse(arguments)))


if __name__ == "__main__":
    main()
