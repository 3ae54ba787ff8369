"""Ranks that run out of memory at different moments: none hangs, and all end with the same parameters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import vramfit
from vramfit.errors import UsageError

ROOT = Path(__file__).parents[2]


def ran_on(ranks: int, steps: int) -> str:
    """What the first rank prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.rank_inside", str(steps)],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, ends
    return ends[0][0]


def test_two_ranks_agree_before_each_collective() -> None:
    words, shortages, _ = ran_on(2, 25).split()
    assert words == "equal"
    assert int(shortages) >= 20


class Sharded(nn.Linear, FSDPModule):
    """What FSDP2 makes of a layer: its class, and one more."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)


def test_a_sharded_model_is_refused_before_the_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].__class__ = Sharded
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="Sharded is sharded"):
        vramfit.survive(model, optimizer)
