"""The timeline as a table of comma-separated values: one line for each event of a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from vramfit.analysis import NAMES, DeviceTimeline, timeline
from vramfit.trace import EventKind, MemoryTrace
from vramfit.writing import StrPath, write_file

_LINES = 65_536


def write_csv(trace: MemoryTrace, path: StrPath) -> None:
    """Write the bytes after every event as CSV: event, device, time, kind, phase, sums and categories.

    The values are those of the device that the event is about, right after it, in bytes; the time is in microseconds
    on the clock of the trace, empty where it has none.

    Raises:
        WriteError: no space, no permission, no such folder; nothing half-written is left.
    """

    def write(stream: BinaryIO) -> None:
        stream.write((",".join(_heads()) + "\n").encode())
        for text in _lines(trace):
            stream.write(text.encode())

    write_file(path, write)


def _heads() -> list[str]:
    named = [name.replace(" ", "_") for name in NAMES.values()]
    return ["event", "device", "time_us", "kind", "phase", "allocated", "active", "reserved", *named]


def _lines(trace: MemoryTrace) -> Iterator[str]:
    """Pieces of the table, in the order of events."""
    figures = np.zeros((len(trace), 3 + len(NAMES)), dtype=np.int64)
    for device in np.unique(trace.device).tolist():
        over, sums = timeline(trace, device), DeviceTimeline.of(trace, device).curves
        mine = np.flatnonzero(trace.device == device)
        columns = [sums.allocated, sums.active, sums.reserved, *(over.categories[kind] for kind in NAMES)]
        figures[mine] = np.stack([column[mine] for column in columns], axis=1)
    kinds = {int(kind): kind.name.lower() for kind in EventKind}
    phases = {-1: "", **{index: _quoted(name) for index, name in enumerate(trace.phases)}}
    for start in range(0, len(trace), _LINES):
        part = slice(start, start + _LINES)
        rows = zip(
            range(start, len(trace)),
            trace.device[part].tolist(),
            trace.time_us[part].tolist(),
            trace.kind[part].tolist(),
            trace.phase[part].tolist(),
            figures[part].tolist(),
            strict=False,
        )
        yield "".join(
            f"{row},{device},{time or ''},{kinds[kind]},{phases[phase]},{','.join(map(str, amounts))}\n"
            for row, device, time, kind, phase, amounts in rows
        )


def _quoted(text: str) -> str:
    """A cell as RFC 4180 wants it; a name that a spreadsheet would read as a formula is marked as text."""
    if text[:1] in ("=", "+", "-", "@", "\t", "\r"):
        text = f"'{text}"
    if any(mark in text for mark in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text
