"""Several Python processes of one test, started as a launcher starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap


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
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    finished = []
    try:
        for process in started:
            out, err = process.communicate(timeout=timeout)
            finished.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return finished


def succeed(finished: list[subprocess.CompletedProcess]) -> list[str]:
    """Standard output of each process; all must have ended well."""
    for rank, process in enumerate(finished):
        assert process.returncode == 0, f"process {rank}: {process.stderr[-3000:]}"
    return [process.stdout for process in finished]
