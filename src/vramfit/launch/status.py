"""What a child reports to its parent at every moment, and what the parent orders: two small files in a job's folder.

The status lies in memory that the system shares with its file (mmap), so that a store costs no system call and a killed
child leaves its last report.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from vramfit.launch.job import write_text
from vramfit.trace.outcome import UNTOLD, End, Progress, Unit

_STATUS, _ORDER = "status", "order"
_FORM = struct.Struct("<BBBBBQQ64s")
_ENDS, _UNITS = tuple(End), (None, *Unit)


class ChildState(IntEnum):
    """What a child is doing."""

    STARTING = 0
    RUNNING = 1
    """The program runs."""
    STOPPING = 2
    """It has been told to end."""
    SAVING = 3
    """The results are being written."""


class Order(IntEnum):
    """What the parent wants of a child."""

    STOP = 1
    """End the program as `sys.exit` would."""
    LEAVE = 2
    """Save the results and end the process at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What a child reports.

    Attributes:
        own_interrupt, own_terminate: the program handles SIGINT or SIGTERM itself.
    """

    state: ChildState = ChildState.STARTING
    own_interrupt: bool = False
    own_terminate: bool = False
    progress: Progress = UNTOLD


class StatusWriter:
    """Keeps the status of a child up to date."""

    def __init__(self, folder: Path) -> None:
        file = os.open(folder / _STATUS, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, _FORM.size)
            self._map = mmap.mmap(file, _FORM.size)
        finally:
            os.close(file)

    def write(self, status: Status) -> None:
        """Store the whole status."""
        progress = status.progress
        _FORM.pack_into(
            self._map,
            0,
            status.state,
            status.own_interrupt,
            status.own_terminate,
            _ENDS.index(progress.end),
            _UNITS.index(progress.unit),
            progress.steps,
            progress.steady,
            progress.module.encode()[:64],
        )


def read_status(folder: Path) -> Status:
    """The last status of a child; the initial one where it has reported nothing yet."""
    try:
        data = (folder / _STATUS).read_bytes()
    except FileNotFoundError:
        return Status()
    if len(data) < _FORM.size:
        return Status()
    state, interrupt, terminate, end, unit, steps, steady, module = _FORM.unpack(data)
    return Status(
        state=ChildState(state),
        own_interrupt=bool(interrupt),
        own_terminate=bool(terminate),
        progress=Progress(
            end=_ENDS[end],
            unit=_UNITS[unit],
            steps=steps,
            steady=steady,
            module=module.rstrip(b"\0").decode(errors="ignore"),
        ),
    )


def write_order(folder: Path, order: Order, end: End) -> None:
    """Leave an order, and the end that the program will have had by it."""
    write_text(folder / _ORDER, f"{order.name} {end.name}")


def read_order(folder: Path) -> tuple[Order, End] | None:
    """The last order."""
    try:
        order, end = (folder / _ORDER).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return None
    return Order[order], End[end]
