"""What a recorder of a card reads and notes beside torch's memory history, and how that becomes part of the trace.

NOTE [Moments of a card's history]
A moment is a number of events: the requests and frees that a device's allocator has counted since the recording began
(``allocation.all.allocated`` plus ``.freed`` of torch.cuda.memory_stats; c10/cuda/CUDACachingAllocator.cpp counts one
for each ALLOC and FREE_REQUESTED that it records). So a moment is exact whatever the clocks say, and stays so when
the ring of events has lost its beginning: the total at the end tells how many are missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from vramfit.capture.storages import LifetimePeaks
from vramfit.torch_internals.cuda_memory import statistics
from vramfit.trace import Category, EventKind, MemoryTrace, TraceDevice
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.model import COLUMNS
from vramfit.trace.replay.rewind import StartBlock, StartSegment, start_blocks, start_segments
from vramfit.trace.segments import PENDING


def peaks_of_card(device: int) -> LifetimePeaks:
    """The highest figures of a device since torch began to count."""
    stats = torch.cuda.memory_stats(device)
    return LifetimePeaks(
        allocated=stats.get("allocated_bytes.all.peak", 0),
        reserved=stats.get("reserved_bytes.all.peak", 0),
        active=stats.get("active_bytes.all.peak", 0),
    )


class CardDemand:
    """The requests that torch's allocator has counted: how many, and of how many bytes."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()

    def take(self) -> tuple[Hashable, Hashable]:
        """The requests since the last call, and the peaks so far."""
        if not torch.cuda.is_initialized():
            return (), ()
        found, peaks = [], []
        for device in range(torch.cuda.device_count()):
            stats = statistics(device)
            kinds = [stats[name]["all"] for name in ("allocation", "requested_bytes", "reserved_bytes")]
            found += [kind["allocated"] for kind in kinds[:2]]
            peaks += [kind["peak"] for kind in kinds[1:]]
        before = self._before or (0,) * len(found)
        self._before = tuple(found)
        return tuple(now - then for now, then in zip(found, before, strict=True)), tuple(peaks)


def requests_and_frees(devices: Iterable[int]) -> dict[int, int]:
    """Requests and frees that devices' allocators have counted."""
    found = {}
    for device in devices:
        counted = statistics(device)["allocation"]["all"]
        found[device] = counted["allocated"] + counted["freed"]
    return found


def traced_device(index: int, segments: Any) -> TraceDevice:
    """A device as a trace describes it; memory outside torch is the context's and that of other processes."""
    properties = torch.cuda.get_device_properties(index)
    outside = 0
    if segments or torch.cuda.memory_reserved(index):
        free, total = torch.cuda.mem_get_info(index)
        outside = max(0, total - free - torch.cuda.memory_reserved(index))
    return TraceDevice(
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        context_bytes=outside,
        segments=segments,
    )


# -- Notes --------------------------------------------------------------------------------------------------


_SETUP = "setup"
"""The phase before the first note."""

MODULE_PREFIX = "vramfit/module:"
"""Prefix of the metadata that names the running module in torch's history."""

_COUNTED = (EventKind.ALLOC, EventKind.FREE_REQUESTED)
_OF_SEGMENTS = (
    EventKind.SEGMENT_ALLOC,
    EventKind.SEGMENT_FREE,
    EventKind.SEGMENT_MAP,
    EventKind.SEGMENT_UNMAP,
)

Moment = Mapping[int, int]
"""Events by device index; see NOTE [Moments of a card's history]."""


class NotedInterval(Enum):
    """What a program does in a stretch of time, which decides the categories of its allocations."""

    OTHER = Category.OTHER
    """Setup, and what lies between steps."""
    FORWARD = Category.ACTIVATIONS
    """A forward pass that records a graph: what it drops before the backward pass was temporary."""
    INFERENCE = "inference"
    """A forward pass without a graph."""
    BUSY = Category.TEMPORARIES
    """A backward pass or an optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseNote:
    """The beginning of a phase, or of another stretch of it.

    Attributes:
        name: ``step 1/forward``.
        stretch: what the program does then.
    """

    moment: Moment
    name: str
    stretch: NotedInterval


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkNote:
    """A mark that the program set."""

    moment: Moment
    tag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNotes:
    """The category of some tensors, at one or more moments at which they lay at the same addresses.

    Attributes:
        devices, addresses: where their storages lay.
        modules: dotted paths, empty where none is known.
    """

    category: Category
    devices: tuple[int, ...]
    addresses: tuple[int, ...]
    modules: tuple[str, ...]
    moments: list[Moment] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """All notes of a recording.

    Attributes:
        total: the moment of the snapshot.
        phases, marks, tensors: in order.
    """

    total: Moment
    phases: Sequence[PhaseNote]
    marks: Sequence[MarkNote]
    tensors: Sequence[TensorNotes]


def annotate(trace: MemoryTrace, snapshot: Mapping[str, Any], notes: Notes) -> MemoryTrace:
    """Add phases, modules, categories, marks and the blocks from before the recording to the trace of a snapshot.

    Args:
        trace: as `vramfit.trace.trace_from_snapshot` read it.
    """
    page = _TraceColumns(trace, notes)
    page.add_metadata(snapshot.get("device_traces", ()))
    for device in page.devices:
        page.add_phases(device)
    for device in page.devices:
        page.add_earlier_blocks(device)
    page.add_tensors()
    return page.finish()


class _TraceColumns:
    """The columns of the trace while they are filled, and the rows to insert."""

    def __init__(self, trace: MemoryTrace, notes: Notes) -> None:
        self.trace, self.notes = trace, notes
        self.columns: dict[str, NDArray[Any]] = {name: getattr(trace, name).copy() for name in COLUMNS}
        self.ops: dict[str, int] = {name: index for index, name in enumerate(trace.ops)}
        self.modules: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.devices = sorted({*np.unique(trace.device).tolist(), *(d.index for d in trace.devices)})
        counted = np.isin(trace.kind, _COUNTED)
        self.counted = {device: np.flatnonzero(counted & (trace.device == device)) for device in self.devices}
        self.lost = {
            device: max(0, notes.total.get(device, 0) - len(rows)) for device, rows in self.counted.items()
        }
        self.inserted: list[tuple[int, dict[str, int]]] = []
        self.earlier: dict[tuple[int, int], dict[str, int]] = {}

    def row_of(self, moment: Moment, device: int) -> int:
        """The first row of a device that comes after a moment; the number of rows where none does."""
        at = max(0, moment.get(device, 0) - self.lost[device])
        rows = self.counted[device]
        if at >= len(rows):
            return len(self.trace)
        row = int(rows[at])
        kinds, devices = self.trace.kind, self.trace.device
        # A segment is taken for the request that follows it.
        while row and devices[row - 1] == device and kinds[row - 1] in _OF_SEGMENTS:
            row -= 1
        return row

    def intern(self, table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table))

    def add_metadata(self, traces: Sequence[Any]) -> None:
        """Add the modules that torch's history names."""
        module = self.columns["module"]
        for device, entries in enumerate(traces):
            rows = np.flatnonzero((self.trace.device == device) & (self.trace.kind != EventKind.MARKER))
            if len(rows) != len(entries):
                continue  # an action that torch has added since: the two cannot be laid side by side
            for row, entry in zip(rows.tolist(), entries, strict=True):
                text = entry.get("user_metadata")
                if isinstance(text, str) and text.startswith(MODULE_PREFIX) and entry["action"] == "alloc":
                    module[row] = self.intern(self.modules, text[len(MODULE_PREFIX) :])

    def add_phases(self, device: int) -> None:
        """Add phases, marks, and the categories that follow from the time of an allocation."""
        notes = self.notes
        starts = [0, *(self.row_of(note.moment, device) for note in notes.phases)]
        names = [_SETUP, *(note.name for note in notes.phases)]
        stretches = [NotedInterval.OTHER, *(note.stretch for note in notes.phases)]
        ids = np.array([self.intern(self.phases, name) for name in names], dtype=np.int32)
        mine = np.flatnonzero(self.trace.device == device)
        # The last note of a row counts: several may fall between the same two events.
        visit = np.searchsorted(np.array(starts), mine, side="right") - 1
        self.columns["phase"][mine] = ids[visit]
        first = np.array([_FIRST[stretch] for stretch in stretches], dtype=np.uint8)
        allocs = self.trace.kind[mine] == EventKind.ALLOC
        self.columns["category"][mine[allocs]] = first[visit[allocs]]
        self._demote(
            device, mine, visit, np.array([stretch is NotedInterval.FORWARD for stretch in stretches])
        )
        time = self.trace.time_us
        last_name = None
        for start, name, index in zip(starts, names, ids.tolist(), strict=True):
            if name != last_name and name != _SETUP:
                self.insert(start, device, time, phase=index)
            last_name = name
        for mark in notes.marks:
            row = self.row_of(mark.moment, device)
            held = ids[int(np.searchsorted(np.array(starts), row, side="right")) - 1]
            self.insert(row, device, time, phase=int(held), op=self.intern(self.ops, mark.tag))

    def _demote(
        self, device: int, mine: NDArray[np.intp], visit: NDArray[np.intp], forward: NDArray[np.bool_]
    ) -> None:
        """Make temporaries of what a forward pass freed before its end."""
        events = DeviceEvents(self.trace, device)
        order = events.by_address
        born, gone = order[:-1][events.continues], order[1:][events.continues]
        pair = (events.kinds[born] == EventKind.ALLOC) & (events.kinds[gone] == EventKind.FREE_REQUESTED)
        born, gone = born[pair], gone[pair]
        visit_of = np.full(len(self.trace), -1, dtype=np.intp)
        visit_of[mine] = visit
        rows, frees = events.rows[born], events.rows[gone]
        same = (visit_of[rows] == visit_of[frees]) & (visit_of[rows] >= 0)
        same &= forward[visit_of[rows]]
        self.columns["category"][rows[same]] = Category.TEMPORARIES

    def insert(self, row: int, device: int, time: NDArray[np.int64], *, phase: int, op: int = -1) -> None:
        near = min(row, len(time) - 1)
        self.inserted.append(
            (
                row,
                {
                    "kind": EventKind.MARKER,
                    "device": device,
                    "time_us": int(time[near]) if len(time) else 0,
                    "op": op,
                    "phase": phase,
                },
            )
        )

    def add_earlier_blocks(self, device: int) -> None:
        """Insert the blocks from before the first event, as if they were allocated at the beginning."""
        events = DeviceEvents(self.trace, device)
        blocks, segments = start_blocks(events), start_segments(events)
        time = int(self.trace.time_us[0]) if len(self.trace) else 0
        common = {
            "device": device,
            "time_us": time,
            "phase": self.intern(self.phases, _SETUP),
        }
        for segment in sorted(segments, key=lambda one: one.address):
            kind = EventKind.SEGMENT_MAP if segment.expandable else EventKind.SEGMENT_ALLOC
            place = {"address": segment.address, "size": segment.size, "stream": segment.stream}
            self.inserted.append((0, {**common, **place, "kind": kind}))
        for block in blocks:
            found = _row_of_block(block, segments)
            alloc = {**common, **found, "kind": EventKind.ALLOC}
            self.earlier[device, block.address] = alloc
            self.inserted.append((0, alloc))
            if block.state == PENDING:
                self.inserted.append((0, {**common, **found, "kind": EventKind.FREE_REQUESTED}))

    def add_tensors(self) -> None:
        """Set the categories and modules of the tensors that were noted."""
        finders = {device: _AllocationFinder(self.trace, device) for device in self.devices}
        for note in self.notes.tensors:
            modules = np.array(
                [self.intern(self.modules, name) if name else -1 for name in note.modules], dtype=np.int32
            )
            for device in set(note.devices) & set(finders):
                chosen = np.flatnonzero(np.array(note.devices) == device)
                addresses = np.array(note.addresses, dtype=np.uint64)[chosen]
                for moment in note.moments:
                    rows = finders[device].alive(addresses, self.row_of(moment, device))
                    self._name(note.category, rows, modules[chosen])
                    if note.moments[0] is moment:
                        self._name_earlier(
                            note.category, device, addresses[rows < 0], modules[chosen][rows < 0]
                        )

    def _name(self, category: Category, rows: NDArray[np.int64], modules: NDArray[np.int32]) -> None:
        known = rows >= 0
        at, names = rows[known], modules[known]
        if category is Category.INPUTS:  # an input is not what something else is known to be
            held = self.columns["category"][at]
            unsettled = (held == Category.OTHER) | (held == Category.TEMPORARIES)
            unsettled |= (held == Category.ACTIVATIONS) & (self.columns["module"][at] < 0)
            at, names = at[unsettled], names[unsettled]
        self.columns["category"][at] = category
        self.columns["module"][at[names >= 0]] = names[names >= 0]

    def _name_earlier(
        self, category: Category, device: int, addresses: NDArray[np.uint64], modules: NDArray[np.int32]
    ) -> None:
        for address, module in zip(addresses.tolist(), modules.tolist(), strict=True):
            row = self.earlier.get((device, address))
            if row is not None and "category" not in row:
                row["category"], row["module"] = category, module

    def finish(self) -> MemoryTrace:
        """The finished trace."""
        columns = self.columns
        if self.inserted:
            order = sorted(range(len(self.inserted)), key=lambda index: self.inserted[index][0])
            at = [self.inserted[index][0] for index in order]
            for name, dtype in COLUMNS.items():
                missing = -1 if name in ("op", "stack", "module", "phase", "tensor") else 0
                values = np.array(
                    [self.inserted[index][1].get(name, missing) for index in order], dtype=dtype
                )
                columns[name] = np.insert(columns[name], at, values)
        return replace(
            self.trace,
            **cast("dict[str, Any]", columns),
            ops=tuple(self.ops),
            modules=tuple(self.modules),
            phases=tuple(self.phases),
        )


_FIRST = {
    NotedInterval.OTHER: Category.OTHER,
    NotedInterval.FORWARD: Category.ACTIVATIONS,
    NotedInterval.INFERENCE: Category.ACTIVATIONS,
    NotedInterval.BUSY: Category.TEMPORARIES,
}


def _row_of_block(block: StartBlock, segments: Sequence[StartSegment]) -> dict[str, int]:
    stream = next((s.stream for s in segments if s.address <= block.address < s.end), 0)
    size = block.requested or block.size
    return {"address": block.address, "size": size, "block": block.size or size, "stream": stream}


class _AllocationFinder:
    """Finds the allocation that lay at an address at a row of the trace."""

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        rows = np.flatnonzero((trace.device == device) & (trace.kind == EventKind.ALLOC))
        self._scale = len(trace) + 1
        self._addresses, ranks = np.unique(trace.address[rows], return_inverse=True)
        self._keys = np.sort(ranks.astype(np.int64) * self._scale + rows)

    def alive(self, addresses: NDArray[np.uint64], row: int) -> NDArray[np.int64]:
        """The last allocation at each address before a row, -1 where the trace holds none."""
        if not len(self._keys):
            return np.full(len(addresses), -1, dtype=np.int64)
        ranks = np.searchsorted(self._addresses, addresses)
        ranks = np.minimum(ranks, len(self._addresses) - 1)
        known = self._addresses[ranks] == addresses
        at = np.searchsorted(self._keys, ranks.astype(np.int64) * self._scale + row) - 1
        found = self._keys[np.maximum(at, 0)]
        known &= (at >= 0) & (found // self._scale == ranks)
        return np.where(known, found % self._scale, -1)
