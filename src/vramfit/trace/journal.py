"""The journal of a trace: written while a program runs, so that a killed process leaves what happened up to then.

The file is a row of slots of 64 bytes, little endian, the last byte of each a tag:

    0  nothing was written here yet: the end
    1  an event, all columns of a trace
    2  an entry of a table (its number, its length, its first bytes), continued by slots of tag 3
    4  a correction: the category, module or tensor of an event that was written before
    5  the header: magic and version

It lies in memory that the system shares with the file (mmap): a store is enough for the file to have it, whatever
becomes of the process, and costs no system call. The tag is stored last, so that a slot which a kill interrupts does
not count. Wherever the file is cut off, what is whole before the cut is the trace up to there.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import weakref
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vramfit.errors import TraceFormatError, WriteError
from vramfit.trace.model import COLUMNS, TABLES, Category, EventKind, Frame, MemoryTrace, TraceDevice

MAGIC = b"\x94vramfit"
VERSION = 1

_SLOT = 64
_ROW = struct.Struct("<hBqQqqqiiiiiB")
_ENTRY = struct.Struct("<BI58sB")
_MORE = struct.Struct("<63sB")
_CHANGE = struct.Struct("<QBi50xB")
_HEADER = struct.Struct("<8sI51xB")
_PACK_ROW = _ROW.pack_into
_IS_ROW, _IS_ENTRY, _IS_MORE, _IS_CHANGE, _IS_HEADER = 1, 2, 3, 4, 5
_ROW_TYPE = np.dtype(
    [
        ("device", "<i2"),
        ("what", "u1"),  # category x 16 + kind
        ("stream", "<i8"),
        ("address", "<u8"),
        ("size", "<i8"),
        ("block", "<i8"),
        ("time_us", "<i8"),
        ("op", "<i4"),
        ("stack", "<i4"),
        ("module", "<i4"),
        ("phase", "<i4"),
        ("tensor", "<i4"),
        ("tag", "u1"),
    ]
)
_FACTS, _FRAMES = 0, 6
_TABLES = {"op": 1, "module": 2, "phase": 3, "tensor": 4, "stack": 5}
_CHANGED = ("category", "module", "tensor")
_GROWTH = 4 << 20  # bytes by which the file grows


class TraceJournal:
    """Writes a trace to a file as it happens.

    A disk that is full ends the journal, not the program. Forked children do not write.

    Args:
        path: the file; what it held is lost.

    Raises:
        WriteError: it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        self._lock = threading.RLock()  # a signal handler of the program may come in between
        self._at = 0
        try:
            self._file = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o644
            )
            self._size = 0
            self._map = self._grow()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise WriteError(f"cannot write {path}: {reason}", "Choose another path") from error
        self._store(_HEADER, MAGIC, VERSION, _IS_HEADER)
        _open.add(self)

    def facts(self, meta: Mapping[str, object], devices: Iterable[TraceDevice]) -> None:
        """Write the origin of the trace; the last such entry counts."""
        told = {
            "meta": dict(meta),
            "devices": [[d.index, d.name, d.total_bytes, d.context_bytes] for d in devices],
        }
        self._entry(_FACTS, json.dumps(told).encode())

    def row(
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
    ) -> None:
        """Write an event."""
        # What `_store` does, once more in full: this is called for every event.
        with self._lock:
            at = self._at
            if at + _SLOT > self._size and not self._make_room():
                return
            what = category << 4 | kind
            where = self._map, at, device, what, stream, address, size, block
            _PACK_ROW(*where, time_us, op, stack, module, phase, tensor, _IS_ROW)
            self._at = at + _SLOT

    def text(self, table: str, text: str) -> None:
        """Write the next entry of a table of names: ``op``, ``module``, ``phase`` or ``tensor``."""
        self._entry(_TABLES[table], text.encode("utf-8", "surrogatepass"))

    def frame(self, frame: Frame) -> None:
        """Write the next stack frame."""
        self._entry(_FRAMES, json.dumps(list(frame)).encode())

    def stack(self, frames: Iterable[int]) -> None:
        """Write the next stack, as indices of frames."""
        self._entry(_TABLES["stack"], array("i", frames).tobytes())

    def change(self, row: int, column: str, value: int) -> None:
        """Write a correction of an event."""
        self._store(_CHANGE, row, _CHANGED.index(column), value, _IS_CHANGE)

    def close(self) -> None:
        """Stop writing; the file stays."""
        with self._lock:
            self._shut()

    def delete(self) -> None:
        """Remove the file: the trace is saved elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _entry(self, table: int, data: bytes) -> None:
        self._store(_ENTRY, table, len(data), data[:58], _IS_ENTRY)
        for start in range(58, len(data), 63):
            self._store(_MORE, data[start : start + 63], _IS_MORE)

    def _store(self, kind: struct.Struct, *values: Any) -> None:
        with self._lock:
            if self._at + _SLOT > self._size and not self._make_room():
                return
            kind.pack_into(self._map, self._at, *values)
            self._at += _SLOT

    def _make_room(self) -> bool:
        """Whether there is room for a slot, if need be in a longer file; a closed journal has none."""
        if self.closed:
            return False
        try:
            self._map = self._grow()
        except OSError:
            self._shut()
            return False
        return True

    def _grow(self) -> mmap.mmap:
        """Make the file longer. The bytes are written, not left out: a hole on a full disk would kill the program."""
        os.lseek(self._file, self._size, os.SEEK_SET)
        zeros, left = bytes(1 << 20), _GROWTH
        while left:
            left -= os.write(self._file, zeros[:left])
        self._size += _GROWTH
        return mmap.mmap(self._file, self._size)

    def _shut(self) -> None:
        if not self.closed:
            self.closed = True
            self._map.close()
            os.ftruncate(self._file, self._at)
            os.close(self._file)
            self._size = self._at

    def _forget(self) -> None:
        """Let go of the file in a forked child: it belongs to the parent."""
        self._lock = threading.RLock()
        self.closed = True
        self._map.close()
        os.close(self._file)
        self._size = self._at


_open: weakref.WeakSet[TraceJournal] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for journal in _open:
        if not journal.closed:
            journal._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


# -- reading -------------------------------------------------------------------------------------------------


def parse_journal(data: bytes, name: str) -> MemoryTrace:
    """The trace in a journal, up to its last whole record; ``name`` is for messages.

    Raises:
        TraceFormatError: it is not a journal, or of a newer version.
    """
    hint = "Give the file that a recording left"
    if len(data) < _SLOT or not data.startswith(MAGIC):
        raise TraceFormatError(
            f"{name} ends before its first event"
            if MAGIC.startswith(data[:8])
            else f"{name} is not the journal of a trace",
            hint,
        )
    version = _HEADER.unpack_from(data)[1]
    if version > VERSION:
        raise TraceFormatError(
            f"{name} has journal version {version}, newer than {VERSION}", "Upgrade vramfit"
        )
    slots = np.frombuffer(data, dtype=np.uint8)[: len(data) // _SLOT * _SLOT].reshape(-1, _SLOT)
    tags = slots[:, -1]
    strange = np.flatnonzero((tags == 0) | (tags > _IS_HEADER))
    end = int(strange[0]) if len(strange) else len(tags)
    return _JournalReader(slots[:end], tags[:end]).trace()


class _JournalReader:
    def __init__(self, slots: NDArray[np.uint8], tags: NDArray[np.uint8]) -> None:
        self.slots, self.tags = slots, tags
        self.texts: dict[str, list[str]] = {name: [] for name in _TABLES if name != "stack"}
        self.stacks: list[tuple[int, ...]] = []
        self.frames: list[Frame] = []
        self.meta: dict[str, str | int | float] = {}
        self.devices: tuple[TraceDevice, ...] = ()

    def trace(self) -> MemoryTrace:
        """The trace of all whole records."""
        for start in np.flatnonzero(self.tags == _IS_ENTRY).tolist():
            if not self.entry(start):
                break
        rows = np.ascontiguousarray(self.slots[self.tags == _IS_ROW]).reshape(-1).view(_ROW_TYPE)
        columns = {name: rows[name].copy() for name in COLUMNS if name not in ("kind", "category")}
        columns["kind"], columns["category"] = rows["what"] & 15, rows["what"] >> 4
        for start in np.flatnonzero(self.tags == _IS_CHANGE).tolist():
            row, column, value, _ = _CHANGE.unpack(self.slots[start].tobytes())
            if row < len(rows) and column < len(_CHANGED):
                columns[_CHANGED[column]][row] = value
        whole = self.whole(columns)
        return MemoryTrace(
            **{name: column[:whole] for name, column in columns.items()},
            ops=tuple(self.texts["op"]),
            modules=tuple(self.texts["module"]),
            phases=tuple(self.texts["phase"]),
            tensors=tuple(self.texts["tensor"]),
            frames=tuple(self.frames),
            stacks=tuple(self.stacks),
            devices=self.devices,
            meta=self.meta,
        )

    def whole(self, columns: dict[str, NDArray[Any]]) -> int:
        """How many events make sense: all that point into their tables, up to the first that does not."""
        wrong = (columns["kind"] >= len(EventKind)) | (columns["category"] >= len(Category))
        wrong |= columns["device"] < 0
        for name in TABLES:
            size = len(self.stacks) if name == "stack" else len(self.texts[name])
            wrong |= (columns[name] < -1) | (columns[name] >= size)
        found = np.flatnonzero(wrong)
        return int(found[0]) if len(found) else len(wrong)

    def entry(self, start: int) -> bool:
        """Read an entry of a table; False where it is not whole."""
        table, length, data, _ = _ENTRY.unpack(self.slots[start].tobytes())
        more = -(-max(0, length - 58) // 63)
        if start + more >= len(self.tags) or (self.tags[start + 1 : start + 1 + more] != _IS_MORE).any():
            return False
        data += self.slots[start + 1 : start + 1 + more, :-1].tobytes()
        try:
            self.take(table, data[:length])
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        return True

    def take(self, table: int, data: bytes) -> None:
        if table == _FACTS:
            told = json.loads(data)
            self.meta = {str(k): v for k, v in told["meta"].items() if isinstance(v, str | int | float)}
            self.devices = tuple(
                TraceDevice(index=int(i), name=str(n), total_bytes=int(t), context_bytes=int(c))
                for i, n, t, c in told["devices"]
            )
        elif table == _FRAMES:
            file, line, name = json.loads(data)
            self.frames.append(Frame(str(file), int(line), str(name)))
        elif table == _TABLES["stack"]:
            stack = tuple(array("i", data))
            if stack and not (min(stack) >= 0 and max(stack) < len(self.frames)):
                raise ValueError("a stack of frames that are not there")
            self.stacks.append(stack)
        else:
            names = {number: name for name, number in _TABLES.items()}
            self.texts[names[table]].append(data.decode("utf-8", "surrogatepass"))
