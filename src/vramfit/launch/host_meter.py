"""Follows the host memory of this process's program from step to step, by Python's own `tracemalloc`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vramfit.trace.frames import Origin, origin
from vramfit.trace.outcome import End, HostMemory, HostSite

_FRAMES = 16
"""Frames kept of each allocation: enough to find the program's line above a library's."""

_LOOKS = 8
"""Looks kept: when there are as many again, every second one goes."""

_SITES = 30
"""Lines that are reported."""

_OURS = str(Path(__file__).resolve().parents[1])

_Place = tuple[str, int]


class HostMemoryMeter:
    """Follows what Python allocates from `start` on; it costs time, so it runs only on request.

    Args:
        pinned: gives the page-locked bytes that torch holds now.
    """

    def __init__(self, pinned: Callable[[], int] = lambda: 0) -> None:
        self._pinned = pinned
        self._began = False
        self._step = 0
        self._each = 1
        self._looks: list[tuple[int, dict[_Place, int], int]] = []

    def start(self) -> None:
        """Begin; where the program traces already, its own number of frames stays."""
        self._began = not tracemalloc.is_tracing()
        if self._began:
            tracemalloc.start(_FRAMES)

    def step(self) -> None:
        """Look at the memory after a step of the program."""
        self._step += 1
        if self._step % self._each or not tracemalloc.is_tracing():
            return
        self._looks.append((self._step, _places(), self._pinned()))
        if len(self._looks) == 2 * _LOOKS:
            self._looks = self._looks[1::2]
            self._each *= 2

    def stop(self) -> HostMemory:
        """End, and return what was seen."""
        if self._began and tracemalloc.is_tracing():
            tracemalloc.stop()
        self._began = False
        return self.seen()

    def seen(self) -> HostMemory:
        """What was seen so far."""
        places = {place for _, found, _ in self._looks for place in found}
        sites = [
            HostSite(
                file=file, line=line, bytes=tuple(found.get((file, line), 0) for _, found, _ in self._looks)
            )
            for file, line in places
        ]
        sites.sort(key=lambda site: (-_weight(site), site.file, site.line))
        return HostMemory(
            steps=tuple(step for step, _, _ in self._looks),
            bytes=tuple(sum(found.values()) for _, found, _ in self._looks),
            pinned=tuple(pinned for _, _, pinned in self._looks),
            sites=tuple(sites[:_SITES]),
        )


class HostSteps:
    """Passes the steps of a program that nobody means to end on to its `HostMemoryMeter`."""

    asked = False

    def __init__(self, meter: HostMemoryMeter) -> None:
        self.lock: Any = None
        self._meter = meter

    def note(self, **_: object) -> None:
        """Pass a step on."""
        self._meter.step()

    def enough(self) -> bool:
        """Never."""
        return False

    def stop(self, _end: End) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


def _weight(site: HostSite) -> int:
    """The weight by which sites are ranked: growth counts for more than what was there from the start."""
    return max(site.bytes) + 10 * max(0, site.bytes[-1] - site.bytes[0])


def _places() -> dict[_Place, int]:
    """Bytes by the line that a reader would look for, without what vramfit allocated or caused.

    A snapshot's data is taken raw, as Lib/tracemalloc.py keeps it (domain, bytes, frames from the innermost out, number
    of frames; one object for equal frames): its own statistics make an object for every block, and a program may have
    millions.
    """
    snapshot: Any = tracemalloc.take_snapshot()
    sums: dict[int, int] = {}
    frames: dict[int, tuple[_Place, ...]] = {}
    for _, size, traceback, _ in snapshot.traces._traces:
        key = id(traceback)
        frames[key] = traceback
        sums[key] = sums.get(key, 0) + size
    found: dict[_Place, int] = {}
    for key, size in sums.items():
        place = _place(frames[key])
        if place is not None:
            found[place] = found.get(place, 0) + size
    return found


def _place(frames: tuple[_Place, ...]) -> _Place | None:
    """The user's innermost line among some frames, else the innermost one; None where vramfit comes before it."""
    for file, line in frames:
        mine, users = _whose(file)
        if mine:
            return None
        if users:
            return file, line
    return frames[0]


@cache
def _whose(filename: str) -> tuple[bool, bool]:
    """Whether a file is vramfit's, and whether it is the user's."""
    return filename.startswith((_OURS, tracemalloc.__file__)), origin(filename) is Origin.USER
