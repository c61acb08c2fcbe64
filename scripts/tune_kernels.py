"""
Finds the launch configurations that the kernels ship with: every candidate is timed on this GPU, L2 cold, and the
fastest is written to a JSON file in the form of `replayssm_kernels/configs/`.

    PYTHONPATH=src:kernels/torch-ext python scripts/tune_kernels.py --json nvidia-h200.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import sys
import time

import benchmark_kernels as benchmark
import torch
from benchmark_kernels import GEOMETRIES, Bench, Case, Step


@dataclasses.dataclass(frozen=True)
class Job:
    case: Case
    tokens: int
    fused: bool

    def candidates(self):
        from replayssm_kernels._configs import Config

        geometry = self.case.geometry
        tiles = [(16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4)]
        fp32 = self.case.checkpoint == "fp32"
        for (block_p, warps), columns in itertools.product(tiles, (32, 64)):
            elements = block_p * geometry.state / (32 * warps)  # per thread
            if block_p > geometry.head_dim or not 16 <= elements <= 128 or columns > geometry.state:
                continue
            if self.tokens > 1:
                if elements > (64 if fp32 else 128):
                    continue
                for registers, block_j in itertools.product((None, 128), (16, 64)):
                    yield Config(block_p, warps, columns, block_j=block_j, registers=registers)
                continue
            limits = (None,) if self.fused else (None, 96) if fp32 else (None, 64)
            for registers in limits if elements <= 64 else (None,):
                for evict in ("", "evict_first"):
                    yield Config(block_p, warps, columns, fused=self.fused, registers=registers, evict=evict)

    def steps(self) -> dict[str, Step]:
        if self.tokens == 1:
            return {"plain": Step(64, 0, 8, 1, 0), "flush": Step(64, 0, 15, 1, 16)}
        held = 16
        return {"plain": Step(64, 0, held, self.tokens, 0), "flush": Step(64, 0, held, self.tokens, held - 5)}

    def slots(self) -> int:
        return 16 if self.tokens == 1 else 40

    def times(self, bench: Bench, configs=None) -> list[tuple]:
        from replayssm_kernels import _configs

        p = bench.parameters(self.case)
        steps = self.steps()
        launch = bench.step(self.case, p, bench.positions(self.case, list(steps.values())), fused=self.fused)
        sets = bench.make_sets(self.case, self.slots(), self.tokens)
        found = []
        for config in configs or self.candidates():
            _configs.OVERRIDE = config
            try:
                us = {
                    name: bench.time(launch, sets, [step], bench.expected_us(benchmark.step_bytes(self.case, step)))
                    for name, step in steps.items()
                }
            except Exception as error:
                print(f"{self.case} {config}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
                continue
            finally:
                _configs.OVERRIDE = None
            found.append((config, us))
        return found


def compile_candidate(job: Job, config) -> None:
    bench = benchmark._worker_bench
    try:
        dataclasses.replace(job, case=dataclasses.replace(job.case, batch=2)).times(bench, [config])
    except Exception as error:
        print(f"{job} {config}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--geometry", nargs="+", default=["Nemotron-H-8B"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 128])
    parser.add_argument("--checkpoint", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 5, 8])
    parser.add_argument("--budget-ms", type=float, default=15)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json")
    args = parser.parse_args()
    jobs = []
    for name, ck, tokens, batch in itertools.product(args.geometry, args.checkpoint, args.tokens, args.batch):
        for fused in (True, False) if tokens == 1 and batch <= 32 else (False,):
            if tokens > 1 and batch == 1:
                continue
            jobs.append(Job(Case(GEOMETRIES[name], batch, ck, "bf16"), tokens, fused))
    began = time.time()
    unique = {}
    for job in jobs:
        for config in job.candidates():
            unique[(job.case.geometry.name, job.case.checkpoint, job.tokens, job.fused, config)] = (job, config)
    with concurrent.futures.ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=benchmark.start_worker,
        initargs=(None,),
    ) as pool:
        list(pool.map(compile_candidate, *zip(*unique.values()), chunksize=2))
    print(f"compiled {len(unique)} in {time.time() - began:.0f} s", flush=True)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    bench = Bench(benchmark.load_ours(), None, "cuda", args.budget_ms, l2)
    bench.bandwidth = benchmark.read_bandwidth(bench)["bytes_per_s"]
    print(f"read {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for job in jobs:
        found = job.times(bench)
        bound = {
            name: benchmark.bound_us(benchmark.step_bytes(job.case, step), bench.bandwidth)
            for name, step in job.steps().items()
        }
        found.sort(key=lambda item: 15 * item[1]["plain"] + item[1]["flush"])
        print(f"\n{job.case} T={job.tokens} fused={job.fused}  bound {bound['plain']:.1f} / {bound['flush']:.1f}")
        if found and not job.fused:
            found += job.times(bench, [dataclasses.replace(found[0][0], overlap=False)])
        best_plain = min(found, key=lambda item: item[1]["plain"])
        for config, us in [*found[:4], best_plain, found[-1]]:
            print(
                f"  {us['plain']:8.2f} ({bound['plain'] / us['plain']:.2f}) flush {us['flush']:8.2f} "
                f"({bound['flush'] / us['flush']:.2f})  p{config.block_p} w{config.warps} c{config.columns} j{config.block_j} "
                f"r{config.registers} {config.evict} {config.overlap}",
                flush=True,
            )
        results.append(
            {**job.case.row(), "tokens": job.tokens, "fused": job.fused, "bound_us": bound,
             "found": [{**dataclasses.asdict(c), **us} for c, us in found]}
        )  # fmt: skip
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
