"""Writes a trace as a torch memory snapshot, which torch.cuda._memory_viz and pytorch.org/memory_viz read."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import numpy as np

from vramfit.trace.fileformat import EMBEDDED, packed_trace
from vramfit.trace.model import Category, EventKind, MemoryTrace, TraceDevice
from vramfit.trace.segments import check_segment
from vramfit.trace.settings import settings_from_conf
from vramfit.writing import StrPath, write_file

_ACTIONS = {kind.value: kind.name.lower() for kind in EventKind if kind < EventKind.MARKER}
_CATEGORIES = {category.value: category.name.lower() for category in Category}


def write_snapshot(trace: MemoryTrace, path: StrPath) -> None:
    """Write a trace as a torch snapshot pickle, whole or not at all.

    The file also holds the trace itself, as text under a key that torch's tools pass over: what a snapshot has no
    place for comes back when `vramfit.trace.read_any` reads it.

    Raises:
        WriteError: the file cannot be written.
    """
    snapshot = snapshot_from_trace(trace)
    # Text, since the web viewer's own reader of pickles knows no bytes.
    snapshot[EMBEDDED] = base64.b64encode(packed_trace(trace)).decode("ascii")
    # Protocol 4 as Python's default for `torch.cuda.memory._dump_snapshot`: the web viewer reads none newer.
    write_file(path, lambda stream: pickle.dump(snapshot, stream, protocol=4))


def snapshot_from_trace(trace: MemoryTrace) -> dict[str, Any]:
    """The trace as the dictionary that ``torch.cuda.memory._snapshot()`` returns.

    A snapshot has no place for operators, modules and tensors: they stand in ``user_metadata``, which the
    viewers show. Phases stand in ``external_annotations``, which the viewers show too.
    """
    count = 1 + max([-1, *(device.index for device in trace.devices), *np.unique(trace.device).tolist()])
    stacks = _stacks(trace)
    described = {device.index: device for device in trace.devices}
    return {
        "segments": [
            segment
            for index in range(count)
            if index in described
            for segment in _segments(trace, described[index], stacks)
        ],
        "device_traces": [_entries(trace, index, stacks) for index in range(count)],
        "allocator_settings": settings_from_conf(str(trace.meta.get("alloc_conf", ""))),
        "external_annotations": [note for index in range(count) for note in _annotations(trace, index)],
    }


def _stacks(trace: MemoryTrace) -> list[list[dict[str, Any]]]:
    """The stacks as lists of frames; equal ones are shared, so that a pickle holds them once."""
    frames = [{"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in trace.frames]
    return [[frames[index] for index in stack] for stack in trace.stacks]


def _entries(trace: MemoryTrace, device: int, stacks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = np.flatnonzero((trace.device == device) & (trace.kind < EventKind.MARKER))
    metadata = _Metadata(trace)
    entries = []
    for kind, address, size, stream, time, stack, category, row in zip(
        trace.kind[rows].tolist(),
        trace.address[rows].tolist(),
        trace.size[rows].tolist(),
        trace.stream[rows].tolist(),
        trace.time_us[rows].tolist(),
        trace.stack[rows].tolist(),
        trace.category[rows].tolist(),
        rows.tolist(),
        strict=True,
    ):
        entry = {
            "action": _ACTIONS[kind],
            "device_free" if kind == EventKind.OOM else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time,
            "frames": stacks[stack] if stack >= 0 else [],
        }
        if category:
            entry["category"] = _CATEGORIES[category]
        if kind == EventKind.ALLOC and (text := metadata.of(row)):
            entry["user_metadata"] = text
        entries.append(entry)
    return entries


class _Metadata:
    """What a trace knows of an allocation beyond torch's snapshots, as one line of text."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.columns = [
            (trace.tensor.tolist(), trace.tensors),
            (trace.op.tolist(), trace.ops),
            (trace.module.tolist(), trace.modules),
        ]
        self.cache: dict[tuple[int, ...], str] = {}

    def of(self, row: int) -> str:
        key = tuple([column[row] for column, _ in self.columns])
        text = self.cache.get(key)
        if text is None:
            words = [table[index] for index, (_, table) in zip(key, self.columns, strict=True) if index >= 0]
            text = self.cache[key] = " | ".join(words)
        return text


def _segments(
    trace: MemoryTrace, device: TraceDevice, stacks: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The final segments; a block without frames of its own gets those of its allocation."""
    rows = np.flatnonzero((trace.device == device.index) & (trace.kind == EventKind.ALLOC))
    last = dict(zip(trace.address[rows].tolist(), trace.stack[rows].tolist(), strict=True))
    segments = []
    for number, segment in enumerate(device.segments):
        checked = check_segment(dict(segment), f"segment {number} of device {device.index}")
        checked.setdefault("frames", [])
        for block in checked["blocks"]:
            stack = last.get(block["address"], -1)
            if not block.get("frames"):
                block["frames"] = stacks[stack] if stack >= 0 and block["state"] != "inactive" else []
        segments.append(checked)
    return segments


def _annotations(trace: MemoryTrace, device: int) -> list[dict[str, Any]]:
    """Where each phase begins and ends."""
    rows = np.flatnonzero(trace.device == device)
    phases = trace.phase[rows]
    if not (phases >= 0).any():
        return []
    turns = np.flatnonzero(np.diff(phases, prepend=np.int32(-1)))
    notes: list[dict[str, Any]] = []
    current = -1
    for phase, time in zip(phases[turns].tolist(), trace.time_us[rows][turns].tolist(), strict=True):
        for index, stage in zip((current, phase), ("END", "START"), strict=True):
            if index >= 0:
                notes.append({"name": trace.phases[index], "stage": stage, "device": device, "time_us": time})
        current = phase
    if current >= 0 and len(rows):
        end = int(trace.time_us[rows[-1]])
        notes.append({"name": trace.phases[current], "stage": "END", "device": device, "time_us": end})
    return notes
