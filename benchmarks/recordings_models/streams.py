"""Compares two recordings of one device: peaks, start, segments, and the streams of requests, request by request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.analysis import Fragmentation, Measure, align, curves, fragmentation, lifetimes
from vramfit.trace import EventKind, MemoryTrace, load_snapshot, trace_from_snapshot

WORKSPACES = (8_519_680, 33_554_432)
"""Bytes of a cuBLAS workspace on most cards, and on Hopper."""

LEAST_ALIKE = 0.5
"""Streams that have a smaller share of requests in common are not aligned; their sizes are counted instead."""

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
    first, second = recorded.requests, predicted.requests
    aligned = align(_tokens(first), _tokens(second))
    found: Counter[tuple[bool, Request, str]] = Counter()
    if len(aligned.first) < LEAST_ALIKE * min(len(first), len(second)):
        counts = Counter(second)
        counts.subtract(first)
        for request, count in counts.items():
            found[count > 0, request, "(not aligned)"] = abs(count)
    else:
        for index in np.setdiff1d(np.arange(len(second)), aligned.second).tolist():
            found[True, second[index], predicted.labels[index]] += 1
        for index in np.setdiff1d(np.arange(len(first)), aligned.first).tolist():
            found[False, first[index], recorded.labels[index]] += 1
    return [
        Difference(extra=extra, takes=takes, size=size, count=count, label=label)
        for (extra, (takes, size), label), count in found.most_common()
        if count
    ]


def _tokens(requests: list[Request]) -> NDArray[np.int64]:
    return np.array([2 * size + takes for takes, size in requests], dtype=np.int64)
