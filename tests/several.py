"""Several Python processes of one test, started as a launcher starts them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from typing import IO


def launch(source: str, *arguments: object, count: int = 2, timeout: float = 240) -> list[subprocess.CompletedProcess]:
    """Runs the Python text `source` in `count` processes at once; `arguments` are its sys.argv[1:].

    They find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What outlives the time is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    with contextlib.ExitStack() as files:
        # Into files: a pipe that nobody reads yet fills up, and its process stands still, as do those that wait for it.
        outputs = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(count)]
        started = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out,
                stderr=err,
                text=True,
            )
            for rank, (out, err) in enumerate(outputs)
        ]
        try:
            for process in started:
                process.wait(timeout)
        finally:
            for process in started:
                process.kill()
        return [
            subprocess.CompletedProcess(command, process.returncode, _text(out), _text(err))
            for process, (out, err) in zip(started, outputs)
        ]


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def succeed(finished: list[subprocess.CompletedProcess]) -> list[str]:
    """Standard output of each process; all must have ended well."""
    for rank, process in enumerate(finished):
        assert process.returncode == 0, f"process {rank}: {process.stderr[-3000:]}"
    return [process.stdout for process in finished]
