"""
Times one decode step of a model with replay and with upstream's cache, in turns in one run, and compares their logits.

    python scripts/benchmark_decode.py [--batch 1 8] [--steps 64] [--buffer-len 16] [--hidden 1024] [--layers 16] ...

The model is a Bamba of random weights (about 800 MB in float32 by default). The unit is a whole flush cycle: the steps
of a replay run are counted in cycles of `buffer_len`, with the write position really advancing. Medians over all steps,
and the mean over whole cycles (a flush costs more than the other steps).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
import transformers
from transformers import BambaConfig, BambaForCausalLM, DynamicCache

import hf_replayssm


def build(hidden: int, layers: int, device: str, dtype: torch.dtype) -> BambaForCausalLM:
    """A Bamba with one attention layer in eight and heads of 64 x 128."""
    torch.manual_seed(0)
    config = BambaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        attn_layer_indices=[i for i in range(layers) if i % 8 == 4],
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        mamba_n_heads=2 * hidden // 64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        vocab_size=4096,
    )
    return BambaForCausalLM(config).to(device, dtype).eval()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


@torch.no_grad()
def measure(model, batch: int, steps: int, buffer_len: int, prompt: int, device: str) -> dict:
    """Step times in ms of both caches, one step of each in turn, and the largest difference of their logits."""
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt + steps), device=device)
    caches = {
        "upstream": DynamicCache(config=model.config),
        "replay": hf_replayssm.ReplayCache(config=model.config, buffer_len=buffer_len),
    }
    times: dict[str, list[float]] = {name: [] for name in caches}
    difference = scale = 0.0
    for begin in range(prompt - 1, prompt + steps):
        span = slice(0, prompt) if begin == prompt - 1 else slice(begin, begin + 1)
        position_ids = torch.arange(span.start, span.stop, device=device)[None]
        logits = {}
        for name, cache in caches.items():
            synchronize(device)
            start = time.perf_counter()
            logits[name] = model(ids[:, span], cache=cache, position_ids=position_ids, logits_to_keep=1).logits
            synchronize(device)
            if begin >= prompt:
                times[name].append((time.perf_counter() - start) * 1e3)
        difference = max(difference, float((logits["replay"] - logits["upstream"]).abs().max()))
        scale = max(scale, float(logits["upstream"].abs().max()))
    whole_cycles = steps // buffer_len * buffer_len
    result = {"batch": batch, "steps": steps, "buffer_len": buffer_len, "relative_difference": difference / scale}
    for name, values in times.items():
        result[name] = {
            "median_ms": statistics.median(values),
            "cycle_mean_ms": statistics.fmean(values[:whole_cycles] or values),
        }
    result["speedup_median"] = result["upstream"]["median_ms"] / result["replay"]["median_ms"]
    result["speedup_cycle_mean"] = result["upstream"]["cycle_mean_ms"] / result["replay"]["cycle_mean_ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--buffer-len", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json")
    args = parser.parse_args()

    model = hf_replayssm.enable(build(args.hidden, args.layers, args.device, getattr(torch, args.dtype)))
    megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"{megabytes:.0f} MB of weights, {args.dtype}, {device}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    results = []
    for batch in args.batch:
        measure(model, batch, 4, args.buffer_len, 4, args.device)  # warm-up
        result = measure(model, batch, args.steps, args.buffer_len, args.prompt, args.device)
        results.append(result)
        if result["relative_difference"] > (1e-4 if args.dtype == "float32" else 0.05):
            print(f"batch {batch}: the logits differ by {result['relative_difference']:.1e}: no speed is given")
            continue
        print(
            f"batch {batch}: upstream {result['upstream']['median_ms']:.2f} ms, "
            f"replay {result['replay']['median_ms']:.2f} ms a step (median), "
            f"speedup {result['speedup_median']:.2f} (median) {result['speedup_cycle_mean']:.2f} (mean over cycles), "
            f"logits differ by {result['relative_difference']:.1e}"
        )
    if args.json:
        with open(args.json, "w") as file:
            about = {
                "date": time.strftime("%Y-%m-%d"),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "device": device,
                "threads": torch.get_num_threads(),
                "dtype": args.dtype,
                "megabytes": megabytes,
            }
            json.dump({**about, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
