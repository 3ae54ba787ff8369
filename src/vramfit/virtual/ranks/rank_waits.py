"""Which rank waits for which other, and which have ended: told by files beside the ranks' mailbox. No torch.

A rank that waits is no load, so another may run meanwhile; a rank that is waited for is started; and nobody waits for
one that has ended, or in a circle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vramfit.launch.job import write_text

_FOLDER = "ranks"
_WAITING, _ENDED = "waiting", "ended"


def prepare(mailbox: Path) -> None:
    """Make the folder of these files."""
    (mailbox / _FOLDER).mkdir(parents=True, exist_ok=True)


def are_told(mailbox: Path) -> bool:
    """Whether whoever started the ranks tells which have ended."""
    return (mailbox / _FOLDER).is_dir()


@contextlib.contextmanager
def waiting_for(mailbox: Path, rank: int, other: int) -> Iterator[None]:
    """Tell during the block that a rank waits for another."""
    file = _file(mailbox, rank, _WAITING)
    write_text(file, str(other))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def note_ended(mailbox: Path, rank: int) -> None:
    """The process of a rank has ended, and waits no longer."""
    _file(mailbox, rank, _WAITING).unlink(missing_ok=True)
    write_text(_file(mailbox, rank, _ENDED), "")


def has_ended(mailbox: Path, rank: int) -> bool:
    """Whether the process of a rank has ended."""
    return _file(mailbox, rank, _ENDED).exists()


def waiting(mailbox: Path) -> dict[int, int]:
    """The ranks that wait, each with the one that it waits for."""
    found = {}
    for file in (mailbox / _FOLDER).glob(f"*.{_WAITING}"):
        with contextlib.suppress(FileNotFoundError):  # it goes on meanwhile
            found[int(file.name.split(".")[0])] = int(file.read_text(encoding="utf-8"))
    return found


def in_circle(mailbox: Path, rank: int) -> tuple[int, ...]:
    """The ranks that wait for one another, from this one on; empty where one of them runs."""
    waits, chain = waiting(mailbox), [rank]
    while (other := waits.get(chain[-1])) is not None:
        if other == rank:
            return tuple(chain)
        if other in chain:  # a circle behind: its own members tell
            return ()
        chain.append(other)
    return ()


def _file(mailbox: Path, rank: int, what: str) -> Path:
    return mailbox / _FOLDER / f"{rank}.{what}"
