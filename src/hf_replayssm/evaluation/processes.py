"""Several processes at one evaluation, as `torchrun` and `accelerate launch` start them.

They share a key-value store and nothing else: no collective operation, in which a process that has died would hold up
the others until a time-out of many minutes. A batch belongs to the process that claims it first, so a fast process does
more of them; what it found is published in the store, and in the end each process adds up all of it, in the same order.

    with Processes.from_environment() as processes:
        result = evaluate_perplexity(model, tokenizer, documents, processes=processes)
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


BEAT_SECONDS = 0.5
POLL_SECONDS = 0.02
CHUNK = 2**20  # bytes of one value: the store takes 8 MiB at most
CONNECT_SECONDS = 300
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
GOES_ON = "With `resume` (--resume FOLDER) what is finished is kept, and the next run goes on from there."


class Processes:
    """The processes of one evaluation, seen from one of them.

    Args:
        store: a `torch.distributed.Store` that all of them reach.
        rank: this process, from 0 to count - 1. Process 0 is the main one.
        count: how many there are.
        timeout: seconds without a sign of life after which a process counts as dead.
    """

    def __init__(self, store: Any, rank: int, count: int, timeout: float = 60.0):
        # A store may outlive its users (a launcher holds it, or a process group): of each process the first ones, the
        # second ones and so on meet among themselves, and never find what those before them left behind.
        self.store = dist.PrefixStore(f"seats/{_reached(store.add, f'seats/{rank}', 1)}", store)
        self.rank, self.count, self.timeout = rank, count, timeout
        self._work = self.store  # of one evaluation; see `begin`
        self._evaluations = 0
        self._seen: dict[int, tuple[int, float]] = {}  # of each process, its last beat and when it was new
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, timeout: float = 60.0) -> Processes | None:
        """The processes that a launcher started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or those of the process
        group, where there is one; None for a process that is alone. May be called again, for another evaluation: by all
        of them, in the same order.

        Raises:
            RuntimeError: the others cannot be reached.
        """
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() == 1:
                return None
            store = dist.PrefixStore("replayssm", dist.distributed_c10d._get_default_store())
            return cls(store, dist.get_rank(), dist.get_world_size(), timeout)
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return None
        try:
            store, rank, count = _rendezvous(*map(os.environ.get, RENDEZVOUS))
        except (dist.DistError, ValueError, OSError) as error:
            raise RuntimeError(
                f"This is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), and the others cannot be reached "
                f"({str(error).splitlines()[0]}). Start them together, with torchrun or accelerate launch."
            ) from error
        return cls(dist.PrefixStore("replayssm", store), rank, count, timeout)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Takes leave; with an error, the others are told. The main process, which may hold the store, leaves last."""
        try:
            if error is not None:
                self.abort(error)
            self.store.set(f"left/{self.rank}", "1")
            if self.is_main:
                self._seen.clear()
                others = set(range(self.count)) - {self.rank}
                while others := {rank for rank in others if not self.store.check([f"left/{rank}"])}:
                    if others <= set(self._dead()):
                        break
                    time.sleep(POLL_SECONDS)
        except dist.DistError:
            pass  # the store is gone, and with it everyone who could be told
        finally:
            self._stop.set()
            self._thread.join()

    # ------------------------------------------------------------------------------------------------- one evaluation
    def begin(self) -> None:
        """A new evaluation. All processes take part in the same ones, in the same order."""
        self._work = dist.PrefixStore(f"evaluation/{self._evaluations}", self.store)
        self._evaluations += 1

    def claim(self) -> int:
        """The number of the next batch that nobody has claimed yet."""
        self.check()
        return _reached(self._work.add, "claimed", 1) - 1

    def publish(self, name: str, value: bytes) -> None:
        """Makes a value known to all processes."""
        pieces = range(0, len(value), CHUNK)
        for number, start in enumerate(pieces):
            _reached(self._work.set, f"{name}/{number}", value[start : start + CHUNK])
        _reached(self._work.set, name, str(len(pieces)))  # last: who sees it finds the rest

    def fetch(self, name: str) -> bytes:
        """A value that some process makes known; waits for it.

        Raises:
            RuntimeError: a process has died or ended with an error meanwhile.
        """
        self._seen.clear()
        while not _reached(self._work.check, [name]):
            self.check()
            if dead := _reached(self._dead):
                raise RuntimeError(
                    f"Process {' and '.join(map(str, dead))} of {self.count} has given no sign of life for "
                    f"{self.timeout:g} s: it has died, and what it was at is missing. {GOES_ON}"
                )
            time.sleep(POLL_SECONDS)
        pieces = int(_reached(self._work.get, name))
        return b"".join(_reached(self._work.get, f"{name}/{number}") for number in range(pieces))

    def count_tokens(self, tokens: int) -> int:
        """Adds to the tokens that all processes have scored, and gives their number."""
        return _reached(self._work.add, "tokens", tokens)

    def abort(self, error: BaseException) -> None:
        """Tells the others that this process ends with an error. The first one that is told counts."""
        if self.store.add("aborted", 1) == 1:
            self.store.set("abort", f"{self.rank} {type(error).__name__}: {error}")

    def check(self) -> None:
        """Raises RuntimeError if another process has ended with an error."""
        if _reached(self.store.check, ["abort"]):
            rank, message = _reached(self.store.get, "abort").decode().split(" ", 1)
            if int(rank) != self.rank:
                raise RuntimeError(f"Process {rank} of {self.count} has ended with an error: {message}")

    # ------------------------------------------------------------------------------------------------- signs of life
    def _beat(self) -> None:
        while True:
            try:
                self.store.add(f"beat/{self.rank}", 1)
            except dist.DistError:
                return  # the main thread meets the same error, and says so
            if self._stop.wait(BEAT_SECONDS):
                return

    def _dead(self) -> list[int]:
        """The others that have given no sign of life for too long, counted from when this process began to look."""
        now, dead = time.monotonic(), []
        for rank in set(range(self.count)) - {self.rank}:
            beat = self.store.add(f"beat/{rank}", 0)
            last, since = self._seen.get(rank, (None, now))
            if beat != last:
                self._seen[rank] = (beat, now)
            elif now - since > self.timeout and not self.store.check([f"left/{rank}"]):
                dead.append(rank)
        return dead


@functools.lru_cache(maxsize=1)
def _rendezvous(*where: str | None) -> tuple[Any, int, int]:
    """Store, rank and count of the launched processes. Kept: a second one would find the server of the first, or none
    where that is just being closed."""
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=CONNECT_SECONDS))))


def _reached(operation: Callable[..., Any], *arguments: Any) -> Any:
    """An operation of the store; RuntimeError with the remedy where the store is gone."""
    try:
        return operation(*arguments)
    except dist.DistError as error:
        raise RuntimeError(
            "The process that holds the others together (number 0, or the launcher) has ended or cannot be reached. "
            f"{GOES_ON}"
        ) from error
