"""
Finds the launch configurations that the kernels ship with: every candidate is timed on this GPU, L2 cold, and the
fastest is written to a JSON file in the form of `replayssm_kernels/configs.json`.

    PYTHONPATH=src:kernels/torch-ext python scripts/tune_kernels.py --json nvidia-h200.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time

import benchmark_kernels as benchmark
import torch
from benchmark_kernels import GEOMETRIES, Bench, Case, Step


# One token: block_p, warps, columns (for a state of 128), how a flush comes by the state, limits on registers.
STEP = [
    (32, 1, 64, "again", (0,)),
    (32, 1, 64, "stream", (0, 128)),
    (32, 1, 64, "keep", (0, 128)),
    (32, 2, 64, "keep", (0, 128)),
    (64, 2, 64, "keep", (128,)),
    (64, 4, 64, "keep", (0, 96)),
    (64, 4, 32, "keep", (0,)),
]
# In 8 bits a head of 64 rows of 128 is one tile of one warp: as many bytes under way, and all that a program does
# besides is done half as often. A flush reads again whatever the kind ("keep" is here for the fused kernel).
STEP_8_BITS = [
    (64, 1, 64, "stream", (0, 128)),
    (64, 1, 128, "stream", (0, 128)),
    (64, 1, 128, "prefetch", (0, 128)),
    (64, 1, 64, "again", (128,)),
    (32, 1, 64, "keep", (0,)),
]
# Windows: block_p, warps, columns, slots at a time, limits on registers.
WINDOW = [
    (64, 2, 64, 32, (0, 128)),
    (64, 2, 32, 16, (0, 96)),
    (64, 4, 64, 32, (0, 96)),
]


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table: a shape, and how many tokens."""

    case: Case
    tokens: int

    def steps(self) -> dict[str, Step]:
        """A call with the buffer half full, and one that flushes."""
        if self.tokens == 1:
            return {"plain": Step(64, 0, 8, 1, 0), "flush": Step(64, 0, 15, 1, 16)}
        return {"plain": Step(64, 0, 24, self.tokens, 0), "flush": Step(64, 0, 40, self.tokens, 32)}

    @property
    def slots(self) -> int:
        return 16 if self.tokens == 1 else 64

    @property
    def cycle(self) -> int:
        """Calls from one flush to the next."""
        return 16 if self.tokens == 1 else 4

    def cost(self, us: dict[str, float]) -> float:
        return ((self.cycle - 1) * us["plain"] + us["flush"]) / self.cycle

    @property
    def small(self) -> bool:
        """Whether launches overlap at first, and state that was read once is given up first in the cache."""
        return self.heads < 8192

    def tiles(self) -> list:
        """In a form that the shape takes; where rows of a head are left over, also as they are (its last rows idle)."""
        from replayssm_kernels._configs import Tile, fit

        evict = "evict_first" if self.small else ""
        if self.tokens == 1:
            shapes = STEP_8_BITS if self.case.checkpoint in benchmark.SCALED else STEP
            tiles = [Tile(p, w, c, evict, 16, state, r) for p, w, c, state, limits in shapes for r in limits]
        else:
            tiles = [Tile(p, w, c, evict, slots, registers=r) for p, w, c, slots, limits in WINDOW for r in limits]
        geometry = self.case.geometry
        fitted = [fit(tile, geometry.head_dim, geometry.state, tuned_for=128) for tile in tiles]
        if geometry.state == 128 and geometry.head_dim % 32:
            fitted += tiles
        return list(dict.fromkeys(fitted))

    def candidates(self) -> list:
        from replayssm_kernels._configs import Config

        append = {"append_block": 2048, "append_warps": 8} if self.small else {"append_block": 512}
        found = [Config(tile, overlap=self.small, **append) for tile in self.tiles()]
        if self.small and self.tokens == 1:
            found += [Config(tile, fused=True) for tile in self.tiles() if tile.state == "keep"]
        return found

    def all_candidates(self) -> list:
        """Enough of them that every kernel is compiled."""
        apart = [config for config in self.candidates() if not config.fused]
        return [
            *self.candidates(), *self.appends(apart[0]),
            *(self.otherwise(config) for config in apart),
        ]  # fmt: skip

    def otherwise(self, config):
        """`config` with launches that overlap, if they do not, and the other way round."""
        return dataclasses.replace(config, overlap=not config.overlap)

    def appends(self, config) -> list:
        """`config` with other sizes of the append kernel."""
        return [
            dataclasses.replace(config, append_block=block, append_warps=warps)
            for block, warps in ((128, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 8))
        ]

    @property
    def heads(self) -> int:
        return self.case.batch * self.case.geometry.heads

    def tune(self, bench: Bench) -> list[tuple]:
        """(configuration, microseconds) of what was tried, best first."""
        measure = self.measure(bench)
        tried = {}

        def try_(configs: list) -> None:
            for config in configs:
                tried[config] = {name: measure(config, name) for name in self.steps()}

        def best(count: int) -> list:
            return sorted(tried, key=lambda config: self.cost(tried[config]))[:count]

        try_(self.candidates())
        try_([self.otherwise(config) for config in best(2) if not config.fused])
        try_([option for config in best(1) if not config.fused for option in self.appends(config)])
        return [(config, tried[config]) for config in best(5)]

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
    parser.add_argument("--checkpoint", nargs="+", choices=benchmark.CHECKPOINTS, default=["fp32", "bf16"])
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
        if tokens == 1 or batch > 1
    ]
    began = time.time()
    unique = {
        (job.case.geometry, job.case.checkpoint, job.tokens, config): (job, config)
        for job in jobs
        for config in job.all_candidates()
    }
    benchmark.in_workers(compile_candidate, list(unique.values()), args.workers)
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
        for config, us in found:
            print(
                f"  {job.cost(us):8.2f} ({job.cost(bound) / job.cost(us):.3f})",
                f"{us['plain']:8.2f} & {us['flush']:8.2f}  {show(config)}",
                flush=True,
            )
        config, us = found[0]
        results.append(
            {
                "device": torch.cuda.get_device_name(),
                "tokens": job.tokens,
                "state_bytes": benchmark.SIZE[job.case.checkpoint],
                "heads": job.heads,
                "head_dim": job.case.geometry.head_dim,
                "state": job.case.geometry.state,
                "us": {name: round(value, 2) for name, value in us.items()},
                "config": fields(config),
            }
        )
        if args.json:
            with open(args.json, "w") as file:
                file.write("[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")
    print(f"{time.time() - began:.0f} s")


def fields(config) -> dict:
    """What differs from the defaults."""
    default = type(config)(config.tile)
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name == "tile" or getattr(config, field.name) != getattr(default, field.name)
    }
    return {name: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for name, v in values.items()}


def show(config) -> str:
    tile = config.tile
    limit = f" registers {tile.registers}" if tile.registers else ""
    overlap = "overlap " if config.overlap else ""
    how = "fused" if config.fused else f"{overlap}append {config.append_block} w{config.append_warps}"
    return f"{tile.block_p}x{tile.columns} w{tile.warps} j{tile.slots} {tile.evict} {tile.state}{limit}, {how}"


if __name__ == "__main__":
    main()
