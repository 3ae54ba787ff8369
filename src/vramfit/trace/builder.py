"""TraceBuilder: writes a MemoryTrace event by event, cheaply enough for a dispatch mode."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.trace.journal import TraceJournal
from vramfit.trace.model import COLUMNS, TEARDOWN, Category, EventKind, Frame, MemoryTrace, TraceDevice

# Events lie one after the other, all columns of one in 64 bytes: packing them takes a quarter of the time that an
# append to each column would.
_ROW_TYPE = np.dtype([(name, np.dtype(dtype).newbyteorder("<")) for name, dtype in COLUMNS.items()])
_ROW = struct.Struct("<BhqQqqqBiiiii")
_SIZE = _ROW.size
_PACK = _ROW.pack_into
_PACK_INDEX = struct.Struct("<i").pack_into
_CATEGORY_AT, _MODULE_AT, _TENSOR_AT = (
    struct.calcsize("<BhqQqqq"),
    struct.calcsize("<BhqQqqqBii"),
    struct.calcsize("<BhqQqqqBiiii"),
)
_FIRST_ROOM = 1 << 15
_REQUESTED, _COMPLETED = int(EventKind.FREE_REQUESTED), int(EventKind.FREE_COMPLETED)
_RECATEGORIZED = int(EventKind.RECATEGORIZED)
_LETS_GO = (
    EventKind.FREE_REQUESTED,
    EventKind.FREE_COMPLETED,
    EventKind.SEGMENT_FREE,
    EventKind.SEGMENT_UNMAP,
    EventKind.SNAPSHOT,
)


class _Table:
    """Distinct strings in the order of their first use."""

    __slots__ = ("entries", "ids", "journal", "name")

    def __init__(self, name: str, journal: TraceJournal | None) -> None:
        self.ids: dict[str, int] = {}
        self.entries: list[str] = []
        self.name = name
        self.journal = journal

    def intern(self, text: str) -> int:
        found = self.ids.get(text)
        if found is None:
            found = self.ids[text] = len(self.entries)
            self.entries.append(text)
            if self.journal is not None:
                self.journal.text(self.name, text)
        return found


class TraceBuilder:
    """Collects events in order. Not thread-safe: callers that share a builder hold a lock.

    Args:
        devices: the devices of the trace; `finish` can replace them when the final segments are known.
        meta: facts about the source: ``torch_version``, ``alloc_conf``, ``source``, ``program``.
        journal: written as the events come, for the case that the process is killed; None without.
    """

    def __init__(
        self,
        devices: Iterable[TraceDevice] = (),
        meta: Mapping[str, str | int | float] | None = None,
        journal: TraceJournal | None = None,
    ) -> None:
        """Start without events."""
        self.devices = tuple(devices)
        self.meta: dict[str, str | int | float] = dict(meta or {})
        self._rows = bytearray(_FIRST_ROOM)
        self._room = _FIRST_ROOM - 2 * _SIZE  # events that begin up to there fit, two at once
        self._at = 0
        self.journal = journal
        self._ops, self._modules = _Table("op", journal), _Table("module", journal)
        self._phases, self._tensors = _Table("phase", journal), _Table("tensor", journal)
        self.op = self._ops.intern
        """Index of an operator's name, entered into the table on first use."""
        self.module = self._modules.intern
        """Index of a module's dotted path."""
        self.phase = self._phases.intern
        """Index of a phase's name."""
        self.tensor = self._tensors.intern
        """Index of a tensor's description, such as ``bfloat16[4, 1024, 768]``."""
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._stack_of: dict[tuple[Frame, ...], int] = {}
        self._frames_of: list[tuple[Frame, ...]] = []
        self._rest = 0

    def __len__(self) -> int:
        """Number of events so far."""
        return self._at // _SIZE

    def stack(self, frames: tuple[Frame, ...]) -> int:
        """Index of a stack, innermost frame first."""
        found = self._stack_of.get(frames)
        if found is None:
            known, journal, before = self._frames, self.journal, len(self._frames)
            key = tuple([known.setdefault(frame, len(known)) for frame in frames])
            found = self._stack_of[frames] = self._stacks.setdefault(key, len(self._stacks))
            if found == len(self._frames_of):
                self._frames_of.append(frames)
                if journal is not None:
                    for frame in list(known)[before:] if len(known) > before else ():
                        journal.frame(frame)
                    journal.stack(key)
        return found

    def frames_of(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack by its index; none for -1."""
        return () if stack < 0 else self._frames_of[stack]

    def append(
        self,
        kind: int,
        *,
        device: int,
        address: int = 0,
        size: int = 0,
        block: int = 0,
        stream: int = 0,
        time_us: int = 0,
        category: int = 0,
        op: int = -1,
        stack: int = -1,
        module: int = -1,
        phase: int = -1,
        tensor: int = -1,
    ) -> int:
        """Add an event; the arguments are the columns of `MemoryTrace`. Returns its row."""
        return self.add(
            kind, device, stream, address, size, block, time_us, category, op, stack, module, phase, tensor
        )

    def add(
        self,
        kind: int,
        device: int,
        stream: int,
        address: int,
        size: int,
        block: int,
        time_us: int,
        category: int,
        op: int,
        stack: int,
        module: int,
        phase: int,
        tensor: int,
    ) -> int:
        """`append` with all columns by position, for callers that run for every op. Returns the row."""
        at = self._at
        if at > self._room:
            self._grow()
        row = kind, device, stream, address, size, block, time_us, category, op, stack, module, phase, tensor
        _PACK(self._rows, at, *row)
        self._at = at + _SIZE
        if self.journal is not None:
            self.journal.row(*row)
        return at // _SIZE

    def freed(self, device: int, stream: int, address: int, size: int, time_us: int, phase: int) -> None:
        """Add both events of a block that is given back and free at once."""
        at = self._at
        if at > self._room:
            self._grow()
        rows, second = self._rows, at + _SIZE
        _PACK(rows, at, _REQUESTED, device, stream, address, size, 0, time_us, 0, -1, -1, -1, phase, -1)
        _PACK(rows, second, _COMPLETED, device, stream, address, size, 0, time_us, 0, -1, -1, -1, phase, -1)
        self._at = second + _SIZE
        if (journal := self.journal) is not None:
            for kind in (_REQUESTED, _COMPLETED):
                journal.row(kind, device, stream, address, size, 0, time_us, 0, -1, -1, -1, phase, -1)

    def recategorize(self, row: int, category: int, time_us: int, phase: int) -> int:
        """Let the block of a row count as another category from now on. Returns the row that tells so."""
        before = _ROW.unpack_from(self._rows, self._offset(row))
        _, device, stream, address, size, block, _, _, op, stack, module, _, tensor = before
        return self.append(
            _RECATEGORIZED,
            device=device,
            stream=stream,
            address=address,
            size=size,
            block=block,
            time_us=time_us,
            category=category,
            op=op,
            stack=stack,
            module=module,
            phase=phase,
            tensor=tensor,
        )

    def _grow(self) -> None:
        self._rows.extend(bytes(max(_FIRST_ROOM, len(self._rows) // 2)))
        self._room = len(self._rows) - 2 * _SIZE

    def _offset(self, row: int) -> int:
        """Where an event lies; negative rows count from the end, as those of a list do."""
        at = row * _SIZE if row >= 0 else self._at + row * _SIZE
        if not 0 <= at < self._at:
            raise IndexError(f"row {row} of {len(self)}")
        return at

    def category(self, row: int) -> Category:
        """Category of an event."""
        return Category(self._rows[self._offset(row) + _CATEGORY_AT])

    def stack_of(self, row: int) -> int:
        """Index of the stack of an event, -1 for none."""
        return int(_ROW.unpack_from(self._rows, self._offset(row))[9])

    def module_of(self, row: int) -> int:
        """Index of the module of an event, -1 for none."""
        return int(_ROW.unpack_from(self._rows, self._offset(row))[10])

    def set_category(self, row: int, category: int) -> None:
        """Replace the category of an event."""
        self._rows[self._offset(row) + _CATEGORY_AT] = category
        if self.journal is not None:
            self.journal.change(row, "category", category)

    def set_module(self, row: int, module: int) -> None:
        """Replace the module of an event."""
        _PACK_INDEX(self._rows, self._offset(row) + _MODULE_AT, module)
        if self.journal is not None:
            self.journal.change(row, "module", module)

    def set_tensor(self, row: int, tensor: int) -> None:
        """Replace the tensor description of an event."""
        _PACK_INDEX(self._rows, self._offset(row) + _TENSOR_AT, tensor)
        if self.journal is not None:
            self.journal.change(row, "tensor", tensor)

    def requests(self, start: int) -> bytes:
        """The requests since an event: size, stream and device of each, in order.

        Args:
            start: row of the first event that counts.
        """
        rows = np.frombuffer(bytes(memoryview(self._rows)[start * _SIZE : self._at]), dtype=_ROW_TYPE)
        asked = rows[rows["kind"] == EventKind.ALLOC]
        return b"".join(asked[name].tobytes() for name in ("size", "stream", "device"))

    def rest(self) -> None:
        """Note that the program is between two of its works: what it frees from here to the end is teardown."""
        self._rest = len(self)

    def _teardown(self, kind: NDArray[np.uint8]) -> int:
        """The event with which the program began to let go of what it held; their number if it did not."""
        if not self._rest:
            return len(kind)
        works = np.flatnonzero(~np.isin(kind, _LETS_GO))
        return max(self._rest, int(works[-1]) + 1 if len(works) else 0)

    def finish(self, devices: Iterable[TraceDevice] | None = None, *, ended: bool = False) -> MemoryTrace:
        """The trace so far; the builder can go on afterwards.


        Args:
            devices: the devices with their final segments; None keeps those given at the start.
            ended: the program is over: what it let go of since its last work is of the phase `TEARDOWN`.
        """
        rows = np.frombuffer(bytes(memoryview(self._rows)[: self._at]), dtype=_ROW_TYPE)
        columns: dict[str, Any] = {name: rows[name].astype(dtype) for name, dtype in COLUMNS.items()}
        phases = self._phases.entries
        if ended and (begin := self._teardown(columns["kind"])) < len(rows):
            phases = phases if TEARDOWN in phases else [*phases, TEARDOWN]
            columns["phase"][begin:] = phases.index(TEARDOWN)
        return MemoryTrace(
            **columns,
            ops=tuple(self._ops.entries),
            modules=tuple(self._modules.entries),
            phases=tuple(phases),
            tensors=tuple(self._tensors.entries),
            frames=tuple(self._frames),
            stacks=tuple(self._stacks),
            devices=self.devices if devices is None else tuple(devices),
            meta=dict(self.meta),
        )
