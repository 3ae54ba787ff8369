"""Runs a program as several ranks of a group on this machine, for tests and benchmarks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def ran_on_ranks(ranks: int, module: str, *arguments: object, seconds: float = 400) -> str:
    """What the first rank prints; all have to end well.

    Args:
        module: is run as ``python -m``.
        seconds: that they may take.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        warm.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        ends = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            if process.poll() is None:  # its group hangs: the others would wait for it
                process.kill()
    assert [process.returncode for process in started] == [0] * ranks, ends
    return ends[0][0]
