"""
Times what several GPUs bring: perplexity over processes, and a model whose layers are spread over two devices.

    python scripts/benchmark_multigpu.py --device cuda --processes 1 2 --json multigpu.json
    python scripts/benchmark_multigpu.py --device cuda --documents 512 --batch 32    # small batches: bound by the host
    python scripts/benchmark_multigpu.py --device cpu --geometry tiny --dtype float32 --processes 1 2 --documents 40

*perplexity*: the same documents of random tokens by one process and by several, each with the model on a device of its
own (started with torch.distributed.run). The time is that of the whole evaluation in the main process, from when all
have loaded and warmed up, waiting for the others included. Sums that are not equal to the last bit are no speed.

*spread*: a decoding step of the model on one device, and with the second half of its layers on another (accelerate's
hooks, as `device_map` sets them up), in turns in one run; eager, mean over whole flush cycles, logits compared first.
On a CPU both halves are on the same device, and what is measured are the hooks.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from geometries import build, named, random_prompt
from model_timing import BOUNDS, DTYPES, Record, about, cell, distance, now, say

import hf_replayssm
from hf_replayssm.evaluation import Processes, evaluate_perplexity


def documents_of(vocab: int, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocab, (count, length), generator=generator).tolist()


def evaluate(args: argparse.Namespace) -> None:
    """One process of the evaluation; the main one writes what it measured to `args.worker`."""
    processes = Processes.from_environment()
    rank = 0 if processes is None else processes.rank
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = hf_replayssm.enable(build(named(args.geometry), device, DTYPES[args.dtype]))
    documents = documents_of(model.config.vocab_size, args.documents, args.length)
    settings = dict(mode="window", window=args.window, batch_size=args.batch)
    evaluate_perplexity(model, None, documents[: args.batch], **settings)  # compiles and warms up
    if processes is not None:  # all are ready
        processes.begin()
        processes.publish(f"ready {rank}", b"")
        for other in range(processes.count):
            processes.fetch(f"ready {other}")
    began = now(device)
    result = evaluate_perplexity(model, None, documents, processes=processes, **settings)
    seconds = now(device) - began
    if rank == 0:
        row = {"tokens_per_s": result.tokens / seconds, "seconds": seconds, "tokens": result.tokens, "nll": result.nll}
        Path(args.worker).write_text(json.dumps(row))
    if processes is not None:
        processes.close()


def over_processes(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """The evaluation by `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += [__file__, "--worker", str(out), "--device", args.device, "--geometry", args.geometry]
        for name in ("dtype", "documents", "length", "window", "batch"):
            command += [f"--{name}", str(getattr(args, name))]
        # As many threads for one process as for several: the launcher gives only the latter one each.
        threads = str(max(1, (os.cpu_count() or 1) // max(args.processes)))
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": threads})
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(out.read_text())


@torch.no_grad()
def spread(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Milliseconds of a step, on one device and on two, in turns."""
    from accelerate import dispatch_model

    first, second = ("cuda:0", "cuda:1") if args.device == "cuda" else ("cpu", "cpu")
    one = hf_replayssm.enable(build(named(args.geometry), first, DTYPES[args.dtype]))
    two, prefix = copy.deepcopy(one), one.base_model_prefix
    backbone = getattr(two, prefix)
    device_map = {f"{prefix}.{name}": first for name, _ in backbone.named_children() if name != "layers"}
    for number in range(len(backbone.layers)):
        device_map[f"{prefix}.layers.{number}"] = first if number < len(backbone.layers) // 2 else second
    device_map |= {name: first for name, _ in two.named_children() if name != prefix}
    two = hf_replayssm.enable(dispatch_model(two, device_map, main_device=first, force_hooks=True))

    models = {"one": one, "two": two}
    caches = {name: hf_replayssm.ReplayCache(config=model.config) for name, model in models.items()}
    cycle = caches["one"].replay_config.buffer_len
    ids = random_prompt(one, batch, 64 + cycle * (2 + args.cycles))  # (the second cycle still compiles kernels)
    times: dict[str, list[float]] = {name: [] for name in models}
    largest = 0.0
    for stop in range(64, ids.shape[1] + 1):
        start = 0 if stop == 64 else stop - 1
        logits = {}
        for name, model in models.items():
            began = now(first)
            output = model(input_ids=ids[:, start:stop], cache=caches[name], logits_to_keep=1)
            if args.device == "cuda":
                torch.cuda.synchronize(second)
            times[name].append((now(first) - began) * 1e3)
            logits[name] = output.logits.to(first)
        largest = max(largest, distance(logits["two"], logits["one"]))
    if largest > BOUNDS[DTYPES[args.dtype]]:
        raise RuntimeError(f"the logits differ by {largest:.1e} of their size: no speed")
    means = {f"{name}_ms": statistics.fmean(values[-cycle * args.cycles :]) for name, values in times.items()}
    return {**means, "ratio": means["two_ms"] / means["one_ms"], "logits": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="Nemotron-H-8B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--documents", type=int, default=4096)
    parser.add_argument("--length", type=int, default=257, help="tokens of a document")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="of the evaluation")
    parser.add_argument("--spread-batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--cycles", type=int, default=4, help="flush cycles that a step is averaged over")
    parser.add_argument("--time-limit", type=float, help="start no row after this many seconds")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        evaluate(args)
        return

    record = Record(about(args.device, DTYPES[args.dtype], geometry=args.geometry), args.json, args.time_limit)
    failed = False
    for count in args.processes:
        row = record.add({"what": "perplexity", "processes": count}, lambda count=count: over_processes(args, count))
        reference = next((r for r in record.rows if r["what"] == "perplexity" and "nll" in r), None)
        if "nll" not in row:
            failed = True
            say(f"perplexity by {count}: {row.get('error', row.get('skipped'))}")
        elif row["nll"] != reference["nll"]:
            failed = True
            row["error"] = f"the sum is {row['nll']!r}, and that of {reference['processes']} {reference['nll']!r}"
            say(f"perplexity by {count}: {row['error']}: no speed")
        else:
            row["ratio"] = row["tokens_per_s"] / reference["tokens_per_s"]
            say(
                f"perplexity by {count}: {row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.2f} times that of "
                f"{reference['processes']}; the same sum to the last bit"
            )
    for batch in args.spread_batch:
        row = record.add({"what": "spread", "batch": batch}, lambda batch=batch: spread(args, batch))
        if "ratio" in row:
            say(
                f"spread, batch {batch}: {cell(row['one_ms'])} ms on one device, {cell(row['two_ms'])} on two "
                f"({row['ratio']:.2f} times); logits differ by {row['logits']:.1e}"
            )
        else:
            failed = True
            say(f"spread, batch {batch}: {row.get('error', row.get('skipped'))}")
    record.note()
    sys.exit(failed)


if __name__ == "__main__":
    main()
