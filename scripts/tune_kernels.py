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


def tiles(geometry, most: int):
    """Tiles of at most `most` elements of the state a thread."""
    from replayssm_kernels._configs import Tile

    for block_p, warps, columns in itertools.product((16, 32, 64), (1, 2, 4), (32, 64, 128)):
        elements = block_p * geometry.state / (32 * warps)
        if block_p <= geometry.head_dim and 16 <= elements <= most and columns <= max(geometry.state, 32):
            if columns < 128 or elements >= 128:
                yield Tile(block_p, warps, columns)


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table: a shape, and how many tokens."""

    case: Case
    tokens: int

    def steps(self) -> dict[str, Step]:
        """A call with the buffer half full, and one that flushes."""
        if self.tokens == 1:
            return {"plain": Step(64, 0, 8, 1, 0), "flush": Step(64, 0, 15, 1, 16)}
        return {"plain": Step(64, 0, 16, self.tokens, 0), "flush": Step(64, 0, 24, self.tokens, 24 - self.tokens)}

    @property
    def slots(self) -> int:
        return 16 if self.tokens == 1 else 40

    @property
    def cycle(self) -> int:
        """Calls from one flush to the next."""
        return 16 if self.tokens == 1 else 4

    def cost(self, us: dict[str, float]) -> float:
        return ((self.cycle - 1) * us["plain"] + us["flush"]) / self.cycle

    def candidates(self) -> list:
        """Every configuration that may be tried."""
        from replayssm_kernels._configs import Config

        geometry = self.case.geometry
        rows = self.case.batch * geometry.heads
        plain = list(tiles(geometry, 128))
        evict = [dataclasses.replace(tile, evict="evict_first") for tile in plain]
        found = [Config(tile, flush=plain[0]) for tile in (plain if rows >= 4096 else evict)]
        found += [Config(plain[0], flush=tile, flush_programs=n) for tile in plain for n in (4, 12)]
        if rows < 8192:
            found += [Config(tile) for tile in evict]
            if self.tokens == 1:
                found += [Config(tile, fused=True) for tile in evict]
        return found

    def tune(self, bench: Bench) -> list[tuple]:
        """(configuration, microseconds) of what was tried, best first."""
        tried = []
        apart = [config for config in self.candidates() if config.flush is not None]
        together = [config for config in self.candidates() if config.flush is None]
        first = apart[0].flush
        measure = self.measure(bench)
        best = min(
            (
                (config, measure(config, "plain"))
                for config in apart
                if config.flush == first and config.flush_programs == 8
            ),
            key=lambda item: item[1],
        )[0]
        for config in {(config.flush, config.flush_programs): config for config in apart}.values():
            config = dataclasses.replace(best, flush=config.flush, flush_programs=config.flush_programs)
            tried.append((config, {"flush": measure(config, "flush")}))
        tried = sorted(tried, key=lambda item: item[1]["flush"])[:3]
        tried = [(config, {"plain": measure(config, "plain"), **us}) for config, us in tried]
        tried += [(config, {name: measure(config, name) for name in self.steps()}) for config in together]
        return sorted(tried, key=lambda item: self.cost(item[1]))

    def measure(self, bench: Bench):
        """measure(config, step's name) -> microseconds."""
        from replayssm_kernels import _configs

        p, steps = bench.parameters(self.case), self.steps()
        launch = bench.step(self.case, p, bench.positions(self.case, list(steps.values())))
        sets = bench.make_sets(self.case, self.slots, self.tokens)

        def measure(config, name: str) -> float:
            _configs.OVERRIDE = config
            try:
                expected = bench.expected_us(benchmark.step_bytes(self.case, steps[name]))
                return bench.time(launch, sets, [steps[name]], expected)
            except Exception as error:
                print(f"{self.case} {config}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
                return math.inf
            finally:
                _configs.OVERRIDE = None

        return measure


def compile_candidate(job: Job, config) -> None:
    """In a worker: launches what `config` launches once, so that it lies in triton's cache."""
    small = dataclasses.replace(job, case=dataclasses.replace(job.case, batch=2))
    measure = small.measure(benchmark._worker_bench)
    for name in job.steps():
        measure(config, name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--geometry", nargs="+", default=["Nemotron-H-8B"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--checkpoint", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--activation", default="bf16")
    parser.add_argument("--budget-ms", type=float, default=4)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json")
    args = parser.parse_args()
    jobs = [
        Job(Case(GEOMETRIES[name], batch, checkpoint, args.activation), tokens)
        for name, checkpoint, tokens, batch in itertools.product(
            args.geometry, args.checkpoint, args.tokens, args.batch
        )
        if tokens == 1 or batch in (8, 128)
    ]
    began = time.time()
    unique = {
        (job.case.geometry, job.case.checkpoint, job.tokens, config): (job, config)
        for job in jobs
        for config in job.candidates()
    }
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
        found = job.tune(bench)
        bound = {
            name: benchmark.bound_us(benchmark.step_bytes(job.case, step), bench.bandwidth)
            for name, step in job.steps().items()
        }
        print(f"\n{job.case} T={job.tokens}  bound {bound['plain']:.1f} / {bound['flush']:.1f} / {job.cost(bound):.1f}")
        for config, us in found[:5]:
            print(
                f"  {job.cost(us):8.2f} ({job.cost(bound) / job.cost(us):.3f}) = {us['plain']:8.2f} & {us['flush']:8.2f}"
                f"  {show(config)}",
                flush=True,
            )
        results.append({**job.case.row(), "tokens": job.tokens, "bound_us": bound, "found": [
            {**dataclasses.asdict(config), **us} for config, us in found[:8]]})  # fmt: skip
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "results": results}, file)
    print(f"{time.time() - began:.0f} s")


def show(config) -> str:
    tile = lambda t: f"{t.block_p}x{t.columns} w{t.warps}{' ' + t.evict if t.evict else ''}"  # noqa: E731
    if config.flush is None:
        return f"{tile(config.tile)}{' fused' if config.fused else ''}"
    return f"{tile(config.tile)}, flush {tile(config.flush)} n{config.flush_programs}"


if __name__ == "__main__":
    main()
