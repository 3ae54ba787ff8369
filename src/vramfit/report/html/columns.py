"""What the pictures of a page are drawn from: columns of integers, packed small.

NOTE [Form of the packed columns]
All of it is deflated (zlib): the length of the header (four bytes, little endian), the header (JSON, UTF-8), then the
columns one after the other; the page's decode.js reads them. The header's ``columns`` lists for each its name, the
number of elements, the number of bytes of one element and whether the elements are differences to the one before. A
column holds the lowest byte of every element, then the next byte of every element, and so on: planes of like bytes
deflate far better than whole numbers.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.analysis import (
    Curves,
    DeviceTimeline,
    Lifetimes,
    Measure,
    SegmentSpans,
    Timeline,
    origin,
    timeline,
)
from vramfit.analysis._lifetimes import born_column
from vramfit.analysis.device_timeline import joined_ranges
from vramfit.analysis.occupancy import span_segments
from vramfit.errors import TraceFormatError
from vramfit.trace import EventKind, Frame, MemoryTrace, TraceDevice, marks

_LEVEL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Natural numbers below 2^53.

    Attributes:
        rising: whether the numbers never fall, so that their differences are smaller than they are.
    """

    values: NDArray[Any]
    rising: bool = False


def pack(columns: Mapping[str, Column], facts: Mapping[str, Any]) -> bytes:
    """Columns and what goes with them as one deflated block: see NOTE [Form of the packed columns].

    Args:
        facts: anything that JSON can say; the reader finds it beside the columns.

    Raises:
        TraceFormatError: a column holds a negative number, or one that is not exact as a double.
    """
    described, planes = [], []
    for name, column in columns.items():
        values = np.asarray(column.values).astype(np.int64)
        if column.rising and len(values):
            values = np.diff(values, prepend=0)
        if len(values) and (int(values.min()) < 0 or int(values.max()) >= 1 << 53):
            raise TraceFormatError(
                f"the recording cannot be drawn: its column {name} holds numbers that no GPU has",
                "Record it again, or look at what wrote the file",
            )
        width = max(1, (int(values.max(initial=0)).bit_length() + 7) // 8)
        described.append([name, len(values), width, int(column.rising)])
        whole = values.astype("<i8").view(np.uint8).reshape(-1, 8)
        planes.append(np.ascontiguousarray(whole[:, :width].T).tobytes())
    header = json.dumps({"columns": described, "facts": facts}, separators=(",", ":")).encode()
    return zlib.compress(len(header).to_bytes(4, "little") + header + b"".join(planes), _LEVEL)


def to_text(block: bytes) -> str:
    """A packed block as text that may stand in a page."""
    return base64.b64encode(block).decode("ascii")


Ints = NDArray[np.int64]

_KNOTS = 16_384
"""Events of which the page knows the time; of others it says the time between two of these."""
_POINTS = 4_000
"""Points of the timeline where the page does not hold every block."""
_UNIT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceView:
    """A device with what was computed of it once, for its pictures and its tables.

    Attributes:
        lives: its blocks, in the order in which they were allocated.
        row: the event that the page shows first.
    """

    device: TraceDevice
    lives: Lifetimes
    bytes_over: Curves
    spans: SegmentSpans
    row: int


def device_view(trace: MemoryTrace, device: TraceDevice, row: int) -> DeviceView:
    """Compute what all parts of the page need of a device."""
    timeline_of = DeviceTimeline.of(trace, device.index)
    return DeviceView(
        device=device,
        lives=_in_order(timeline_of.lives),
        bytes_over=timeline_of.curves,
        spans=timeline_of.spans,
        row=row,
    )


def _in_order(lives: Lifetimes) -> Lifetimes:
    order = np.lexsort((lives.address, lives.born))
    columns = ("born", "freed", "completed", "address", "size", "block", "stack", "category")
    return replace(lives, **{name: getattr(lives, name)[order] for name in columns})


def largest(lives: Lifetimes, count: int) -> Ints:
    """The ``count`` largest blocks (among equals, the longest-lived), in the order of `Lifetimes`."""
    if count >= len(lives.born):
        return np.arange(len(lives.born), dtype=np.int64)
    order = np.lexsort((lives.born - lives.freed, -lives.block))
    return np.sort(order[:count])


@dataclass(frozen=True, kw_only=True, slots=True)
class Origins:
    """The distinct origins of blocks (category, op, module, tensor, stack, stream), and those of the devices.

    Attributes:
        columns: one array for each property, one element for each origin; names are -1 for none.
        of_device: for each device, the origin of each of its blocks.
    """

    columns: dict[str, Ints]
    of_device: tuple[Ints, ...]


_PROPERTIES = {"category": 0, "op": -1, "module": -1, "tensor": -1, "stack": -1, "stream": 0}
"""Each with what stands for blocks from before the trace."""


def origins(trace: MemoryTrace, views: Sequence[DeviceView]) -> Origins:
    """Find the distinct origins of the blocks of all devices."""
    born = np.concatenate([view.lives.born for view in views]) if views else np.zeros(0, dtype=np.int64)
    index = np.zeros(len(born), dtype=np.int64)
    of_block = {
        name: born_column(getattr(trace, name), born, unknown=unknown)
        for name, unknown in _PROPERTIES.items()
    }
    for name in ("category", "stack"):  # known of blocks from before the trace too
        of_block[name] = np.concatenate([born[:0], *(getattr(view.lives, name) for view in views)])
    for column in of_block.values():
        values, place = np.unique(column, return_inverse=True)
        _, index = np.unique(index * (len(values) + 1) + place, return_inverse=True)
    _, first = np.unique(index, return_index=True)
    columns = {name: column[first] for name, column in of_block.items()}
    ends = np.cumsum([len(view.lives.born) for view in views])[:-1]
    return Origins(columns=columns, of_device=tuple(np.split(index, ends)) if views else ())


def shared_columns(trace: MemoryTrace, found: Origins) -> tuple[dict[str, Column], dict[str, Any]]:
    """What all devices share: the origins with their names and stacks, phases, marks and times."""
    tables: dict[str, list[str]] = {}
    columns: dict[str, Column] = {"origin_category": Column(values=found.columns["category"])}
    for name, table in (("op", trace.ops), ("module", trace.modules), ("tensor", trace.tensors)):
        used, index = _used(found.columns[name])
        tables[f"{name}s"] = [table[entry] for entry in used]
        columns[f"origin_{name}"] = Column(values=index)
    streams, of_stream = np.unique(found.columns["stream"], return_inverse=True)
    columns["origin_stream"] = Column(values=of_stream)
    used, index = _used(found.columns["stack"])
    columns["origin_stack"] = Column(values=index)
    stack_columns, names = _stack_columns(trace, used)
    columns |= stack_columns
    columns |= _phase_columns(trace)
    tags = marks(trace)
    columns["mark_row"] = Column(values=np.array([mark.row for mark in tags], dtype=np.int64), rising=True)
    columns |= _time_columns(trace)
    facts: dict[str, Any] = {
        "rows": len(trace),
        "streams": [str(stream) for stream in streams.tolist()],
        "phases": list(trace.phases),
        "marks": [mark.tag for mark in tags],
        **tables,
        **names,
    }
    return columns, facts


def _used(column: Ints) -> tuple[list[int], Ints]:
    """The entries of a table that are used, and the column as 1 + index among them; 0 for none."""
    used, index = np.unique(column, return_inverse=True)
    if len(used) and used[0] < 0:
        return used[1:].tolist(), index.astype(np.int64)
    return used.tolist(), index.astype(np.int64) + 1


def _stack_columns(trace: MemoryTrace, used: Iterable[int]) -> tuple[dict[str, Column], dict[str, Any]]:
    """The stacks as runs of frames, and each frame as file, line and function."""
    frame_of: dict[int, int] = {}
    lengths, flat = [], []
    for stack in used:
        entries = trace.stacks[stack]
        lengths.append(len(entries))
        flat.extend([frame_of.setdefault(frame, len(frame_of)) for frame in entries])
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    frames: list[Frame] = [trace.frames[frame] for frame in frame_of]
    columns = {
        "stack_length": Column(values=np.array(lengths, dtype=np.int64)),
        "stack_frame": Column(values=np.array(flat, dtype=np.int64)),
        "frame_file": Column(
            values=np.array([files.setdefault(f.filename, len(files)) for f in frames], dtype=np.int64)
        ),
        "file_origin": Column(values=np.array([int(origin(name)) for name in files], dtype=np.int64)),
        "frame_line": Column(values=np.array([max(0, f.line) for f in frames], dtype=np.int64)),
        "frame_function": Column(
            values=np.array([functions.setdefault(f.name, len(functions)) for f in frames], dtype=np.int64)
        ),
    }
    return columns, {"files": list(files), "functions": list(functions)}


def _phase_columns(trace: MemoryTrace) -> dict[str, Column]:
    """Where each phase is entered: the row and 1 + the phase, 0 for none."""
    changes = np.ones(len(trace), dtype=bool)
    changes[1:] = trace.phase[1:] != trace.phase[:-1]
    starts = np.flatnonzero(changes)
    return {
        "phase_row": Column(values=starts, rising=True),
        "phase": Column(values=trace.phase[starts].astype(np.int64) + 1),
    }


def _time_columns(trace: MemoryTrace) -> dict[str, Column]:
    """Events and their microseconds since the first that has a time; none where the source has no clock."""
    timed = np.flatnonzero(trace.time_us)
    if not len(timed):
        rows = np.zeros(0, dtype=np.int64)
    elif len(trace) <= _KNOTS:
        rows = np.arange(len(trace), dtype=np.int64)
    else:
        rows = np.unique(np.linspace(0, len(trace) - 1, _KNOTS).astype(np.int64))
    begin = int(trace.time_us[timed[0]]) if len(timed) else 0
    since = np.maximum.accumulate(np.maximum(trace.time_us[rows] - begin, 0)) if len(rows) else rows
    return {"time_row": Column(values=rows, rising=True), "time_us": Column(values=since, rising=True)}


def device_columns(
    trace: MemoryTrace, view: DeviceView, origin: Ints, kept: Ints
) -> tuple[dict[str, Column], dict[str, Any]]:
    """What the page holds of one device.

    Args:
        origin: the origin of each of its blocks.
        kept: the blocks that the page holds; of the others it holds their number and sum.
    """
    lives, spans = view.lives, view.spans
    arena_start, arena_end = _arena(view)
    position = _in_arena(arena_start, arena_end, lives.address[kept].astype(np.int64))
    unit = _UNIT if not (position % _UNIT).any() else 1
    positions, place = np.unique(position // unit, return_inverse=True)
    sizes, size_of = np.unique(np.stack([lives.block[kept], lives.size[kept]]), axis=1, return_inverse=True)
    rows = lives.rows
    # Numbers that say "never" must be small to pack well: 0 is never, else 1 + the distance.
    life = np.where(lives.freed < rows, lives.freed - lives.born + 1, 0)[kept]
    wait = np.where(lives.completed < rows, np.maximum(lives.completed - lives.freed, 0) + 1, 0)[kept]
    page, kind = _pages(trace, spans)
    ooms = np.flatnonzero((trace.device == view.device.index) & (trace.kind == EventKind.OOM))
    columns = {
        "born": Column(values=lives.born[kept] + 1, rising=True),
        "life": Column(values=life),
        "wait": Column(values=wait),
        "place": Column(values=place.astype(np.int64)),
        "position": Column(values=positions, rising=True),
        "size_of": Column(values=size_of.reshape(-1).astype(np.int64)),
        "block": Column(values=sizes[0], rising=True),
        "size": Column(values=sizes[1]),
        "origin": Column(values=origin[kept]),
        "arena_start": Column(values=arena_start, rising=True),
        "arena_size": Column(values=arena_end - arena_start),
        "span_start": Column(values=spans.start, rising=True),
        "span_size": Column(values=spans.end - spans.start),
        "span_born": Column(values=spans.born + 1),
        "span_freed": Column(values=spans.freed),
        "span_page": Column(values=page),
        "span_kind": Column(values=kind),
        "oom_row": Column(values=ooms, rising=True),
        "oom_size": Column(values=np.maximum(trace.size[ooms], 0)),
    }
    facts: dict[str, Any] = {
        "index": view.device.index,
        "name": view.device.name,
        "total": view.device.total_bytes,
        "context": view.device.context_bytes,
        "unit": unit,
        "row": view.row,
        "start_reserved": view.bytes_over.start[Measure.RESERVED],
        "blocks": len(lives.born),
        "left_out": len(lives.born) - len(kept),
    }
    if len(kept) < len(lives.born):
        left = np.ones(len(lives.born), dtype=bool)
        left[kept] = False
        facts["left_out_below"] = int(lives.block[left].max())
        columns |= _points(timeline(trace, view.device.index, points=_POINTS))
    return columns, facts


def _pages(trace: MemoryTrace, spans: SegmentSpans) -> tuple[Ints, Ints]:
    """Bytes of a page of each span, 0 for segments of cudaMalloc; and its kind: like neighbours are one stretch."""
    kinds: dict[tuple[int, bool], int] = {}
    pages, found = [], []
    for segment in span_segments(trace, spans, np.arange(len(spans.start), dtype=np.int64)):
        pages.append(segment.page)
        found.append(kinds.setdefault((segment.stream, segment.small), len(kinds)))
    return np.array(pages, dtype=np.int64), np.array(found, dtype=np.int64)


def _points(over: Timeline) -> dict[str, Column]:
    """The timeline where it cannot be summed up from the blocks of the page."""
    columns = {
        "point_row": Column(values=over.rows, rising=True),
        "point_reserved": Column(values=over.reserved),
    }
    for category, amounts in enumerate(over.categories):
        columns[f"point_{category}"] = Column(values=amounts)
    return columns


def _arena(view: DeviceView) -> tuple[Ints, Ints]:
    """The address ranges that were ever held or used, joined: what lies between them is not drawn."""
    address = view.lives.address.astype(np.int64)
    low = np.concatenate([view.spans.start, address])
    high = np.concatenate([view.spans.end, address + view.lives.block])
    order = np.argsort(low, kind="stable")
    return joined_ranges(low[order], high[order])


def _in_arena(start: Ints, end: Ints, address: Ints) -> Ints:
    """Addresses as offsets into the joined ranges, laid one after the other."""
    before = np.cumsum(end - start) - (end - start)
    home = np.searchsorted(start, address, side="right") - 1
    return before[home] + address - start[home] if len(home) else address
