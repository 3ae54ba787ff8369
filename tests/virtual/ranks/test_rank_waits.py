"""Ranks that wait for letters of one another, where it is told which have ended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from vramfit.errors import PeerEnded, UsageError
from vramfit.virtual.ranks import mailbox, rank_waits
from vramfit.virtual.ranks.mailbox import Mailbox
from vramfit.virtual.ranks.rank_place import RankPlace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rank_waits.prepare(tmp_path)
    return tmp_path


def of_rank(folder: Path, rank: int) -> Mailbox:
    return Mailbox(RankPlace(rank=rank, world_size=2, mailbox=str(folder), patience=0.01))


def test_circles(folder: Path) -> None:
    assert rank_waits.are_told(folder) and not rank_waits.are_told(folder / "other")
    with rank_waits.waiting_for(folder, 0, 2), rank_waits.waiting_for(folder, 2, 5):
        with rank_waits.waiting_for(folder, 5, 0), rank_waits.waiting_for(folder, 7, 0):
            assert rank_waits.in_circle(folder, 0) == (0, 2, 5)
            assert rank_waits.in_circle(folder, 7) == ()  # its members tell
            assert rank_waits.waiting(folder) == {0: 2, 2: 5, 5: 0, 7: 0}
        assert rank_waits.in_circle(folder, 0) == ()
    assert rank_waits.waiting(folder) == {}


def test_a_circle_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_CIRCLE", 0.05)
    told = "rank 0 of 2 waits for rank 1, and ranks wait in a circle: rank 0, rank 1: on cards the program would hang"
    with rank_waits.waiting_for(folder, 1, 0), pytest.raises(UsageError, match=told):
        of_rank(folder, 0).receive("world", 1)
    assert rank_waits.waiting(folder) == {}


def test_whoever_has_ended_sends_nothing(folder: Path) -> None:
    with rank_waits.waiting_for(folder, 1, 0):
        rank_waits.note_ended(folder, 1)  # killed, and left that behind
        assert rank_waits.waiting(folder) == {}
    told = "rank 0 of 2 waits for rank 1, which has ended without sending what it waits for"
    with pytest.raises(PeerEnded, match=told):
        of_rank(folder, 0).receive("world", 1)


def test_a_letter_that_comes_late_is_read(folder: Path) -> None:
    """Also beyond the patience of ranks that nobody tells of others."""
    timer = threading.Timer(0.1, lambda: of_rank(folder, 1).send("world", 0, ["late"]))
    timer.start()
    assert of_rank(folder, 0).receive("world", 1) == ["late"]
    timer.join()
