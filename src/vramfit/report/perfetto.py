"""A trace as Chrome's trace events (JSON), which ui.perfetto.dev and chrome://tracing show.

The form is that of the document "Trace Event Format" (Chromium project): counters (``C``) for the bytes by category,
asynchronous slices (``b`` and ``e``) for blocks, complete events (``X``) for phases, instants (``i``) for marks and
failed requests, and metadata (``M``) that names the devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from vramfit.analysis import (
    NAMES,
    DeviceTimeline,
    Lifetimes,
    short_location,
    timeline,
    user_frame,
)
from vramfit.analysis.groups import stack_frames
from vramfit.trace import Category, EventKind, MemoryTrace, TraceDevice, marks
from vramfit.units import format_bytes
from vramfit.writing import StrPath, write_file

COUNTERS = 50_000
"""At most so many values of each counter: of each stretch of events the one with the most allocated bytes."""
BLOCKS = 100_000
"""At most so many blocks of each device, the largest."""

_BATCH = 4096


def write_perfetto(trace: MemoryTrace, path: StrPath) -> None:
    """Write a trace for Perfetto.

    Raises:
        WriteError: no space, no permission, no such folder; nothing half-written is left.
    """

    def write(stream: BinaryIO) -> None:
        head = {"displayTimeUnit": "ms", "otherData": _facts(trace)}
        stream.write((json.dumps(head)[:-1] + ', "traceEvents": [\n').encode())
        batch: list[str] = []
        first = True
        for event in perfetto_events(trace):
            batch.append(json.dumps(event, separators=(",", ":")))
            if len(batch) == _BATCH:
                stream.write((("" if first else ",\n") + ",\n".join(batch)).encode())
                first = False
                batch.clear()
        if batch:
            stream.write((("" if first else ",\n") + ",\n".join(batch)).encode())
        stream.write(b"\n]}\n")

    write_file(path, write)


def perfetto_events(trace: MemoryTrace) -> Iterator[dict[str, Any]]:
    """The events, one dictionary each. ``ts`` and ``dur`` are microseconds; ``pid`` is the index of the device."""
    times = _times(trace)
    for device in _devices(trace):
        yield from _names(device)
        yield from _counters(trace, device.index, times)
        yield from _phases(trace, device.index, times)
        yield from _instants(trace, device.index, times)
        yield from _blocks(trace, device.index, times)


def _facts(trace: MemoryTrace) -> dict[str, str]:
    """What is to be known about the file as a whole."""
    facts = {key: str(value) for key, value in trace.meta.items()}
    facts["clock"] = "microseconds" if trace.time_us.any() else "one microsecond for each event"
    for device in _devices(trace):
        blocks = len(DeviceTimeline.of(trace, device.index).lives.born)
        if blocks > BLOCKS:
            facts[f"blocks of GPU {device.index}"] = f"the {BLOCKS:,} largest of {blocks:,}"
    return facts


def _devices(trace: MemoryTrace) -> list[TraceDevice]:
    known = {device.index: device for device in trace.devices}
    used = set(np.unique(trace.device).tolist()) if len(trace) else set()
    return [known.get(index, TraceDevice(index=index)) for index in sorted(used | set(known))]


def _times(trace: MemoryTrace) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The time of each event since the first; its number where the trace has no clock."""
    if not trace.time_us.any():
        return np.arange(len(trace), dtype=np.int64)
    begin = int(trace.time_us[np.flatnonzero(trace.time_us)[0]])
    return np.maximum.accumulate(np.maximum(trace.time_us - begin, 0))


def _names(device: TraceDevice) -> Iterator[dict[str, Any]]:
    name = f"GPU {device.index} {device.name}".strip()
    yield {"ph": "M", "name": "process_name", "pid": device.index, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": device.index, "tid": 1, "args": {"name": "phases"}}


def _counters(trace: MemoryTrace, device: int, times: Any) -> Iterator[dict[str, Any]]:
    over = timeline(trace, device, points=COUNTERS)
    active = DeviceTimeline.of(trace, device).curves.active
    kinds = [kind for kind in NAMES if over.categories[kind].any()]
    for at, row in enumerate(over.rows.tolist()):
        base = {"ph": "C", "pid": device, "tid": 0, "ts": int(times[row])}
        amounts = {NAMES[kind]: int(over.categories[kind, at]) for kind in kinds}
        if amounts:
            yield {**base, "name": "allocated bytes by category", "args": amounts}
        yield {**base, "name": "reserved bytes", "args": {"reserved": int(over.reserved[at])}}
        yield {**base, "name": "active bytes", "args": {"active": int(active[row])}}


def _phases(trace: MemoryTrace, device: int, times: Any) -> Iterator[dict[str, Any]]:
    if not len(trace):
        return
    starts = np.flatnonzero(np.concatenate([[True], trace.phase[1:] != trace.phase[:-1]]))
    ends = np.append(starts[1:], len(trace) - 1)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        phase = int(trace.phase[start])
        if phase >= 0:
            yield {
                "ph": "X",
                "cat": "phase",
                "name": trace.phases[phase],
                "pid": device,
                "tid": 1,
                "ts": int(times[start]),
                "dur": int(times[end] - times[start]),
            }


def _instants(trace: MemoryTrace, device: int, times: Any) -> Iterator[dict[str, Any]]:
    mine = trace.device == device
    for row in np.flatnonzero(mine & (trace.kind == EventKind.OOM)).tolist():
        asked = int(trace.size[row])
        name = f"out of memory: asked for {format_bytes(asked)}"
        yield _instant(name, "oom", device, int(times[row]), {"requested_bytes": asked})
    for mark in marks(trace):
        if mark.device == device:
            yield _instant(mark.tag, "mark", device, int(times[mark.row]), {})


def _instant(name: str, category: str, device: int, time: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "p",
        "cat": category,
        "name": name,
        "pid": device,
        "tid": 1,
        "ts": time,
        "args": args,
    }


def _blocks(trace: MemoryTrace, device: int, times: Any) -> Iterator[dict[str, Any]]:
    """Each block as a slice from its allocation to the free; those that were never freed end with the trace."""
    lives = DeviceTimeline.of(trace, device).lives
    order = np.lexsort((lives.born - lives.freed, -lives.block))[:BLOCKS]
    last = len(trace) - 1
    for block in np.sort(order).tolist():
        born, freed = int(lives.born[block]), int(lives.freed[block])
        if freed < 0:
            continue
        args = {
            "bytes": int(lives.block[block]),
            "requested_bytes": int(lives.size[block]),
            "address": hex(int(lives.address[block])),
            **_origin(trace, lives, block),
        }
        if freed > last:
            args["never_freed"] = True
        name = str(args.get("tensor") or args.get("op") or args["category"])
        # Identifiers count for all devices of the file.
        base = {"cat": "block", "name": name, "id": f"{device}.{block}", "pid": device, "tid": 0}
        yield {**base, "ph": "b", "ts": int(times[max(0, born)]) if last >= 0 else 0, "args": args}
        yield {**base, "ph": "e", "ts": int(times[min(freed, last)]) if last >= 0 else 0}


def _origin(trace: MemoryTrace, lives: Lifetimes, block: int) -> dict[str, Any]:
    """What made a block."""
    born = int(lives.born[block])
    found: dict[str, Any] = {"category": NAMES[Category(int(lives.category[block]))]}
    if born < 0:
        found["since"] = "before the recording"
    for column, table in (("op", trace.ops), ("module", trace.modules), ("tensor", trace.tensors)):
        index = int(getattr(trace, column)[born]) if born >= 0 else -1
        if index >= 0:
            found[column] = table[index]
    line = user_frame(stack_frames(trace, int(lives.stack[block])))
    if line is not None:
        found["line"] = short_location(line)
    return found
