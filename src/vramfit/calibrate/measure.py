"""Measures cases on the card of this process, which may be the virtual GPU: the code is the same.

What an op takes comes from torch's own memory history. Two marks on a stream of their own, one when an op begins and
one when it ends, cut the history into the parts of single ops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vramfit.calibrate.cases import Case, Flag
from vramfit.calibrate.op_watching import Event, Given, OpWatch, Taken, WatchedCall, op_record
from vramfit.calibrate.records import CaseRecord, OpRecord

_HISTORY = 1_000_000  # events that torch keeps of one case
_GIVEN = frozenset({"free_requested", "free"})
_TIMING_SECONDS = 0.03
_FEWEST_RUNS, _MOST_RUNS = 3, 20


class _Marks:
    """Marks the history: blocks of one byte on a stream that nothing else uses."""

    def __init__(self, device: int) -> None:
        self.stream: int = torch.cuda.Stream(device).cuda_stream
        self._device = device

    def set(self) -> None:
        """Leave a mark."""
        address = torch.cuda.caching_allocator_alloc(1, self._device, self.stream)
        torch.cuda.caching_allocator_delete(address)


class _History:
    """A listener that marks the history around each op."""

    def __init__(self, marks: _Marks) -> None:
        self.calls: list[WatchedCall] = []
        self._marks = marks

    def begin(self) -> None:
        """Mark the begin of an op."""
        self._marks.set()

    def end(self, call: WatchedCall) -> None:
        """Mark its end."""
        self._marks.set()
        self.calls.append(call)


class CaseMeter:
    """Measures one case after the other on a device of this process.

    Args:
        device: its index.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._marks = _Marks(device)

    def measure(self, case: Case, *, timed: bool = True) -> CaseRecord:
        """What a case does with memory once it is warm, and how long it takes.

        Args:
            case: the case.
            timed: whether its time is measured as well.

        Raises:
            Exception: whatever the case raises, out of memory for one.
        """
        torch.cuda.reset_peak_memory_stats(self._device)
        with case.switched():
            run = case.build()
            first = self.watch(run) if Flag.SEARCHES in case.flags else None
            if first is None:
                run()
            torch.cuda.synchronize(self._device)
            ops = self.watch(run)
            if first is not None:
                ops = with_first(ops, first)
            peak = torch.cuda.max_memory_allocated(self._device)
            seconds = self.time(run) if timed and Flag.UNTIMED not in case.flags else None
        return CaseRecord(case=case.name, ops=tuple(ops), seconds=seconds, peak_bytes=peak)

    def watch(self, run: Callable[[], object]) -> list[OpRecord]:
        """Run something once and tell what each of its ops did with memory."""
        listener = _History(self._marks)
        memory = torch.cuda.memory
        memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_HISTORY, clear_history=True
        )
        try:
            self._marks.set()
            with OpWatch(listener):
                run()
            torch.cuda.synchronize(self._device)
            events = memory._snapshot()["device_traces"][self._device]
        finally:
            memory._record_memory_history(None)
        parts = list(_parts(events))
        if len(parts) != len(listener.calls):
            raise RuntimeError(f"{len(listener.calls)} ops ran, but the history shows {len(parts)}")
        return [op_record(call, part) for call, part in zip(listener.calls, parts, strict=True)]

    def time(self, run: Callable[[], object]) -> float:
        """Median seconds of a run that is warm, between two events of the card."""
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        once = time.perf_counter() - began
        count = int(max(_FEWEST_RUNS, min(_MOST_RUNS, _TIMING_SECONDS / max(once, 1e-6))))
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def with_first(ops: Sequence[OpRecord], first: Sequence[OpRecord]) -> list[OpRecord]:
    """Records of warm ops, with what the first call of each did where that differs."""
    from dataclasses import replace

    if [(op.op, op.signature) for op in ops] != [(op.op, op.signature) for op in first]:
        return list(ops)
    return [
        warm if warm.steps == cold.steps else replace(warm, first=cold.steps)
        for warm, cold in zip(ops, first, strict=True)
    ]


def _parts(events: Sequence[dict[str, Any]]) -> Iterator[list[Event]]:
    """Events between each mark that begins an op and the one that ends it; the first mark names the stream."""
    marked = next(event["stream"] for event in events if event["action"] == "alloc")
    part: list[Event] | None = None
    skipped_first = False
    for event in events:
        action = event["action"]
        if event["stream"] == marked:
            if action != "alloc":
                continue
            if not skipped_first:
                skipped_first = True
            elif part is None:
                part = []
            else:
                yield part
                part = None
        elif part is not None:
            if action == "alloc":
                part.append(Taken(event["addr"], event["size"]))
            elif action in _GIVEN:
                part.append(Given(event["addr"]))
