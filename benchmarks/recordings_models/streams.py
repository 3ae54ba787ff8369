"""Compares two recordings of one device: peaks, start, segments, and the streams of requests, request by request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vramfit.analysis import Fragmentation, Measure, curves, fragmentation, lifetimes
from vramfit.trace import EventKind, MemoryTrace, load_snapshot, trace_from_snapshot

WORKSPACES = (8_519_680, 33_554_432)
"""Bytes of a cuBLAS workspace on most cards, and on Hopper."""

MOST_EDITS = 3000
"""Streams that differ in more requests are not aligned; their sizes are counted instead."""

Request = tuple[bool, int]  # whether it takes or gives back, and bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Segments that a recording takes from the driver and gives back, and their bytes."""

    taken: int
    taken_bytes: int
    released: int
    released_bytes: int


class Recording:
    """The first device of a snapshot file."""

    def __init__(self, path: Path) -> None:
        snapshot = load_snapshot(path)
        self.trace: MemoryTrace = trace_from_snapshot(snapshot)
        self.requests: list[Request] = []
        self.labels: list[str] = []
        self._collect(snapshot["device_traces"][0])

    def _collect(self, entries: list[dict[str, Any]]) -> None:
        made: dict[int, str] = {}
        for entry in entries:
            if entry["action"] == "alloc":
                label = made[entry["addr"]] = str(entry.get("user_metadata", ""))
            elif entry["action"] == "free_requested":
                label = made.pop(entry["addr"], "")
            else:
                continue
            self.requests.append((entry["action"] == "alloc", int(entry["size"])))
            self.labels.append(label)

    @cached_property
    def peaks(self) -> dict[Measure, int]:
        """The highest figures from the first event to the last."""
        return {measure: self._curves.peak(measure) for measure in Measure}

    @property
    def start(self) -> dict[Measure, int]:
        """The figures before the first event."""
        return self._curves.start

    @cached_property
    def _lives(self) -> Any:
        return lifetimes(self.trace)

    @cached_property
    def _curves(self) -> Any:
        return curves(self.trace, self._lives)

    @cached_property
    def at_peak(self) -> Fragmentation:
        """How the reserved memory is used at the first peak of allocated bytes."""
        return fragmentation(self.trace, self._lives, int(self._curves.allocated.argmax()))

    @property
    def workspaces(self) -> int:
        """Blocks of a cuBLAS workspace's size that are held at the end (some activations are of that size too)."""
        blocks = [block for segment in self.trace.devices[0].segments for block in segment["blocks"]]
        return sum(
            block["state"] == "active_allocated" and block.get("requested_size") in WORKSPACES
            for block in blocks
        )

    @property
    def segments(self) -> Segments:
        """Segments taken and given back while it ran."""
        kind, size = self.trace.kind, self.trace.size
        taken, released = kind == EventKind.SEGMENT_ALLOC, kind == EventKind.SEGMENT_FREE
        return Segments(
            taken=int(taken.sum()),
            taken_bytes=int(size[taken].sum()),
            released=int(released.sum()),
            released_bytes=int(size[released].sum()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Requests of one kind that only one of the recordings makes."""

    extra: bool
    takes: bool
    size: int
    count: int
    label: str

    def __str__(self) -> str:
        """One line of the table."""
        side = "extra" if self.extra else "missing"
        kind = "block taken" if self.takes else "block given back"
        return f"{side} x{self.count}: {kind}, {self.size:,} B {self.label}".rstrip()


def differences(recorded: Recording, predicted: Recording) -> list[Difference]:
    """What the prediction lacks or has too many of, the most frequent first; empty when the streams are equal."""
    edits = align(recorded.requests, predicted.requests)
    found: Counter[tuple[bool, Request, str]] = Counter()
    if edits is None:
        counts = Counter(predicted.requests)
        counts.subtract(recorded.requests)
        for request, count in counts.items():
            found[count > 0, request, "(not aligned)"] = abs(count)
    else:
        for extra, index in edits:
            side = predicted if extra else recorded
            found[extra, side.requests[index], side.labels[index]] += 1
    return [
        Difference(extra=extra, takes=takes, size=size, count=count, label=label)
        for (extra, (takes, size), label), count in found.most_common()
        if count
    ]


def align(first: list[Request], second: list[Request]) -> list[tuple[bool, int]] | None:
    """The fewest edits that turn one stream into the other: (in the second only, its index).

    Myers, "An O(ND) Difference Algorithm and Its Variations" (1986): cheap where streams hardly differ. None if
    more than `MOST_EDITS` are needed.
    """
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(MOST_EDITS):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(furthest, diagonal, edits)
            y = x - diagonal
            while x < len(first) and y < len(second) and first[x] == second[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(first) and y >= len(second):
                return _trace_back(history, x, y)
    return None


def _step(furthest: dict[int, int], diagonal: int, edits: int) -> int:
    down = diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])
    return furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1


def _trace_back(history: list[dict[int, int]], x: int, y: int) -> list[tuple[bool, int]]:
    found: list[tuple[bool, int]] = []
    for edits in range(len(history) - 1, 0, -1):
        furthest, diagonal = history[edits], x - y
        down = diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        x = furthest[before]
        y = x - before
        found.append((True, y) if down else (False, x))
    return found[::-1]
