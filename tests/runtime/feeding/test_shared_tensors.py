"""Tensors that processes share: the same memory, and nothing left behind however they end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vramfit
from vramfit.errors import UsageError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in memory where there is one."""
    return tmp_path if not os.access("/dev/shm", os.W_OK) else Path("/dev/shm")


def left(folder: Path) -> list[str]:
    return sorted(
        one.name for one in folder.iterdir() if f"-{os.getpid()}-" in one.name or "vramfit" in one.name
    )


def add_one(ticket: Any) -> None:
    ticket.open()["x"].add_(1)


def open_and_die(ticket: Any) -> None:
    opened = ticket.open()
    opened["x"].add_(1)
    os.kill(os.getpid(), signal.SIGKILL)


def own_and_end(folder: Path, how: str, told: Any) -> None:
    shared = vramfit.SharedTensors({"x": torch.zeros(1024)}, folder=folder)
    told.put(shared.ticket)
    told.close()
    told.join_thread()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "error":
        sys.stderr = None  # type: ignore[assignment]
        raise ZeroDivisionError


def test_processes_have_the_same_memory_and_a_killed_one_leaves_nothing(folder: Path) -> None:
    before = left(folder)
    given = {"x": torch.arange(6.0).reshape(2, 3).t(), "more": [torch.tensor(1), "text"]}
    with vramfit.SharedTensors(given, folder=folder) as shared:
        ticket = pickle.loads(pickle.dumps(shared.ticket))
        assert ticket.open()["x"].stride() == given["x"].stride()
        assert ticket.open()["more"][1] == "text"
        for target, code in ((add_one, 0), (open_and_die, -signal.SIGKILL)):
            child = FORK.Process(target=target, args=(ticket,))
            child.start()
            child.join()
            assert child.exitcode == code
        assert torch.equal(shared.tensors["x"], given["x"] + 2)
        assert len(left(folder)) == len(before) + 1
        mine = ticket.open()
    assert left(folder) == before
    assert torch.equal(mine["x"], given["x"] + 2)  # who has it keeps it
    with pytest.raises(UsageError, match="no longer shared"):
        ticket.open()


@pytest.mark.parametrize("how", ["end", "error", "kill"])
def test_nothing_is_left_however_an_owner_ends(folder: Path, how: str) -> None:
    before = left(folder)
    told = FORK.Queue()
    child = FORK.Process(target=own_and_end, args=(folder, how, told))
    child.start()
    ticket = told.get(timeout=30)
    child.join()
    with vramfit.SharedTensors(
        torch.zeros(1), folder=folder
    ):  # the next start removes what a killed one left
        assert len(left(folder)) == len(before) + 1
    assert left(folder) == before
    with pytest.raises(UsageError, match="no longer shared"):
        ticket.open()


def test_what_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tensors"):
        vramfit.SharedTensors({"x": 1}, folder=tmp_path)
    with pytest.raises(UsageError, match="no one piece"):
        vramfit.SharedTensors([torch.zeros(2), torch.zeros(2).to_sparse()], folder=tmp_path)
    with pytest.raises(vramfit.VramfitError):
        vramfit.SharedTensors(torch.zeros(1), folder=tmp_path / "no")
    assert not list(tmp_path.iterdir())
