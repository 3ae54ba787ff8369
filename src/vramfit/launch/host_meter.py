"""Looks at the host memory of the program of this process after its steps, by Python's own `tracemalloc`."""

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
    """Follows what Python allocates, from `start` on; costs time, so it runs where it is asked for.

    Args:
        pinned: page-locked bytes that torch holds now.
    """

    def __init__(self, pinned: Callable[[], int] = lambda: 0) -> None:
        self._pinned = pinned
        self._began = False
        self._step = 0
        self._each = 1
        self._looks: list[tuple[int, dict[_Place, int], int]] = []

    def start(self) -> None:
        """Begin; a program that traces already goes on with its own number of frames."""
        self._began = not tracemalloc.is_tracing()
        if self._began:
            tracemalloc.start(_FRAMES)

    def step(self) -> None:
        """A step of the program has ended."""
        self._step += 1
        if self._step % self._each or not tracemalloc.is_tracing():
            return
        self._looks.append((self._step, _places(), self._pinned()))
        if len(self._looks) == 2 * _LOOKS:
            self._looks = self._looks[1::2]
            self._each *= 2

    def stop(self) -> HostMemory:
        """End, and what was seen."""
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
    """Hears of the steps of a program that nobody means to end, for its `HostMemoryMeter`."""

    asked = False

    def __init__(self, meter: HostMemoryMeter) -> None:
        self.lock: Any = None
        self._meter = meter

    def note(self, **_: object) -> None:
        """A step has ended."""
        self._meter.step()

    def enough(self) -> bool:
        """There are never enough."""
        return False

    def stop(self, _end: End) -> None:
        """Nothing is ended."""

    def check(self) -> None:
        """Nothing is ended."""


def _weight(site: HostSite) -> int:
    """By which sites are ranked: growth counts for more than what was there from the first."""
    return max(site.bytes) + 10 * max(0, site.bytes[-1] - site.bytes[0])


def _places() -> dict[_Place, int]:
    """Bytes by the line that a reader would look for, without what vramfit made or had made.

    What a snapshot holds is taken raw, as Lib/tracemalloc.py keeps it (domain, bytes, frames from the innermost out,
    number of frames; one object for equal frames): its own statistics make objects of every block, and a program may
    have millions.
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
    """The innermost line of the user among some frames, else the innermost; None where vramfit stands before it."""
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
