"""The .vft file: a trace as a small JSON header and one compressed stretch of bytes per column.

    magic       8 bytes   b"\\x93vramfit"
    version     u32       little endian, as all numbers
    header CRC  u32       of the compressed header
    header size u64       bytes of the compressed header
    header      zlib      JSON: number of rows, tables, devices, meta, size of each column in the file
    columns     zlib      one after the other in the order of the header

Numbers of a column are stored byte plane by byte plane (all lowest bytes first), times as differences:
neighbours are then alike, and a million events shrink to a few megabytes in a fraction of a second. Nothing
in the file is executed, and every length and index is checked before it is used.
"""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vramfit.errors import TraceFormatError, UsageError
from vramfit.trace.model import COLUMNS, TABLES, Category, EventKind, Frame, MemoryTrace, Segment, TraceDevice
from vramfit.writing import StrPath, write_file

MAX_FILE_BYTES = 16 << 30
"""Larger files are refused before they are read: no trace is that long, and memory would not hold it."""


def read_file(path: StrPath) -> bytes:
    """The content of a trace or snapshot file.

    Raises:
        TraceFormatError: it is missing, a folder or a device, not readable, empty or too large.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise TraceFormatError(f"cannot read {path}: it is a folder", "Give the file inside it")
        described = path.stat()
        if stat.S_ISCHR(described.st_mode) and not path.samefile(os.devnull):
            raise TraceFormatError(
                f"cannot read {path}: it is a device, which may have no end", "Give a file, or a pipe"
            )
        size = described.st_size
        if size > MAX_FILE_BYTES:
            raise TraceFormatError(f"cannot read {path}: its {size} bytes are more than a trace can have")
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TraceFormatError(
            f"cannot read {path}: {reason}", "Check the path and its permissions"
        ) from error
    if not data:
        raise TraceFormatError(f"cannot read {path}: the file is empty", "Record or copy it again")
    return data


MAGIC = b"\x93vramfit"
VERSION = 2
"""Version 2 has blocks that come to count as another category, and the categories of programs on several cards; a file
without either is of version 1, which older readers know."""
EMBEDDED = "vramfit_trace"
"""Key under which a torch snapshot that vramfit wrote holds the trace itself, in base64."""

_HEAD = struct.Struct("<8sIIQ")
_MAX_HEADER_BYTES = 1 << 30
# Deflate cannot shrink further than this (RFC 1951: 258 bytes for about two bits), which bounds what a file may claim.
_MAX_RATIO = 1040
_OTHER_FORMS = frozenset({".csv", ".gz", ".html", ".json", ".pickle", ".pkl", ".png", ".svg"})
"""Endings of what `vramfit export` writes and torch dumps."""

_STACK_COLUMNS: Mapping[str, DTypeLike] = {"stack_lengths": np.int32, "stack_frames": np.int32}


# -- writing -------------------------------------------------------------------------------------------------


def save_trace(trace: MemoryTrace, path: StrPath) -> None:
    """Write ``trace`` to ``path``, whole or not at all.

    Raises:
        UsageError: the ending is that of another form.
        WriteError: the file cannot be written.
    """
    check_trace_name(path)
    write_file(path, lambda stream: _write(trace, stream))


def check_trace_name(path: StrPath) -> None:
    """Refuse a file name that stands for another format.

    Raises:
        UsageError: its ending is that of another form.
    """
    ending = Path(path).suffix.lower()
    if ending in _OTHER_FORMS:
        raise UsageError(
            f"{path} ends in {ending}, and a trace is another form",
            "End it in .vft; vramfit export writes the other forms, by their endings",
        )


def packed_trace(trace: MemoryTrace) -> bytes:
    """The content of the file that `save_trace` would write."""
    stream = io.BytesIO()
    _write(trace, stream)
    return stream.getvalue()


def _write(trace: MemoryTrace, stream: BinaryIO) -> None:
    lengths = np.fromiter(map(len, trace.stacks), dtype=np.int32, count=len(trace.stacks))
    flat = np.fromiter((frame for stack in trace.stacks for frame in stack), dtype=np.int32)
    packed = {name: _pack(name, getattr(trace, name)) for name in COLUMNS}
    packed["stack_lengths"] = _pack("stack_lengths", lengths)
    packed["stack_frames"] = _pack("stack_frames", flat)
    frames = _FrameLists()
    header = {
        "rows": len(trace),
        "columns": {name: len(data) for name, data in packed.items()},
        "stacks": len(lengths),
        "stack_frames": len(flat),
        **{table: list(getattr(trace, table)) for table in TABLES.values() if table != "stacks"},
        "frames": [list(frame) for frame in trace.frames],
        "meta": dict(trace.meta),
        "devices": [
            {
                "index": device.index,
                "name": device.name,
                "total_bytes": device.total_bytes,
                "context_bytes": device.context_bytes,
                "segments": [frames.fold(segment) for segment in device.segments],
            }
            for device in trace.devices
        ],
        "segment_frames": frames.lists,
    }
    text = zlib.compress(json.dumps(header, separators=(",", ":")).encode("ascii"), 1)
    plain = (
        trace.category.max(initial=0) <= Category.WORKSPACES and trace.kind.max(initial=0) <= EventKind.MARKER
    )
    stream.write(_HEAD.pack(MAGIC, 1 if plain else VERSION, zlib.crc32(text), len(text)))
    stream.write(text)
    for data in packed.values():
        stream.write(data)


def _pack(name: str, column: NDArray[Any]) -> bytes:
    if name == "time_us":
        column = np.diff(column, prepend=np.zeros(1, column.dtype))
    column = column.astype(column.dtype.newbyteorder("<"), copy=False)
    planes = column.view(np.uint8).reshape(len(column), column.itemsize).T
    return zlib.compress(planes.tobytes(), 1)


class _FrameLists:
    """The stacks inside segments, each distinct list written once."""

    def __init__(self) -> None:
        self.lists: list[Any] = []
        self._index_of: dict[int, int] = {}

    def fold(self, segment: Segment) -> dict[str, Any]:
        folded = self._without(segment)
        if "blocks" in folded:
            folded["blocks"] = [self._without(block) for block in folded["blocks"]]
        return folded

    def _without(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        folded = dict(entry)
        frames = folded.get("frames")
        if frames:
            # By identity: torch shares one list among the blocks of one stack, and the trace keeps all of
            # them alive.
            index = self._index_of.setdefault(id(frames), len(self.lists))
            if index == len(self.lists):
                self.lists.append(frames)
            folded["frames"] = index
        return folded


# -- reading -------------------------------------------------------------------------------------------------


def load_trace(path: StrPath) -> MemoryTrace:
    """Read a .vft file.

    Raises:
        TraceFormatError: the file is missing, not a .vft file, of a newer version, truncated or damaged.
    """
    return parse_trace(read_file(path), str(path))


def parse_trace(data: bytes, name: str) -> MemoryTrace:
    """Read the content of a .vft file; ``name`` is for messages.

    Raises:
        TraceFormatError: as for `load_trace`.
    """
    try:
        return _TraceReader(data, name).trace()
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise TraceFormatError(
            f"{name} is damaged: its header makes no sense ({type(error).__name__}: {error})",
            "Record or copy it again",
        ) from error


class _TraceReader:
    def __init__(self, data: bytes, name: str) -> None:
        self.data = memoryview(data)
        self.name = name

    def fail(self, what: str, hint: str = "Record or copy it again") -> NoReturn:
        raise TraceFormatError(f"{self.name} {what}", hint)

    def trace(self) -> MemoryTrace:
        header, at = self.header()
        rows, stacks, stack_frames = (_natural(header[key]) for key in ("rows", "stacks", "stack_frames"))
        shapes: dict[str, tuple[DTypeLike, int]] = {name: (dtype, rows) for name, dtype in COLUMNS.items()}
        shapes["stack_lengths"] = (_STACK_COLUMNS["stack_lengths"], stacks)
        shapes["stack_frames"] = (_STACK_COLUMNS["stack_frames"], stack_frames)
        columns: dict[str, NDArray[Any]] = {}
        sizes = header["columns"]
        if set(sizes) != set(shapes):
            self.fail("is damaged: it has other columns than it should")
        for name, size in sizes.items():
            dtype, length = shapes[name]
            columns[name] = self.column(name, at, _natural(size), np.dtype(dtype), length)
            at += size
        if at != len(self.data):
            self.fail(f"is damaged: {len(self.data) - at} bytes follow its end")
        return self.assemble(header, columns)

    def header(self) -> tuple[dict[str, Any], int]:
        if self.data[: len(MAGIC)] != MAGIC:
            self.fail("is not a vramfit trace", "Give a file that vramfit run --trace wrote")
        if len(self.data) < _HEAD.size:
            self.fail("is truncated: it ends in its first bytes")
        _, version, crc, size = _HEAD.unpack_from(self.data)
        if version > VERSION:
            self.fail(f"has format version {version}, newer than {VERSION}", "Upgrade vramfit")
        text = self.data[_HEAD.size : _HEAD.size + size]
        if len(text) < size:
            self.fail("is truncated: it ends in its header")
        if version < 1 or zlib.crc32(text) != crc:
            self.fail("is damaged: its header does not match its checksum")
        raw = self.inflate(text, min(_MAX_HEADER_BYTES, size * _MAX_RATIO), "header")
        header = json.loads(raw)
        if not isinstance(header, dict):
            self.fail("is damaged: its header is not an object")
        return header, _HEAD.size + size

    def inflate(self, packed: memoryview, limit: int, what: str) -> bytes:
        stream = zlib.decompressobj()
        try:
            raw = stream.decompress(packed, limit + 1)
        except zlib.error as error:
            self.fail(f"is damaged: its {what} cannot be decompressed ({error})")
        if len(raw) > limit or not stream.eof or stream.unused_data:
            self.fail(f"is damaged: its {what} has another length than it should")
        return raw

    def column(self, name: str, at: int, size: int, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        packed = self.data[at : at + size]
        if len(packed) < size:
            self.fail(f"is truncated: it ends in column {name}")
        expected = length * dtype.itemsize
        if expected > size * _MAX_RATIO:
            self.fail(f"is damaged: {size} bytes cannot hold the {length} entries of column {name}")
        raw = self.inflate(packed, expected, f"column {name}")
        if len(raw) != expected:
            self.fail(f"is damaged: column {name} has {len(raw)} bytes instead of {expected}")
        planes = np.frombuffer(raw, dtype=np.uint8).reshape(dtype.itemsize, length)
        column = np.ascontiguousarray(planes.T).reshape(-1).view(dtype.newbyteorder("<"))
        return np.cumsum(column, dtype=np.int64) if name == "time_us" else column

    def assemble(self, header: dict[str, Any], columns: dict[str, NDArray[Any]]) -> MemoryTrace:
        tables = {table: _strings(header[table]) for table in TABLES.values() if table != "stacks"}
        frames = tuple(Frame(str(file), int(line), str(name)) for file, line, name in header["frames"])
        lengths, flat = columns.pop("stack_lengths"), columns.pop("stack_frames")
        self.check("stack_lengths", lengths, 0, len(flat) + 1)
        self.check("stack_frames", flat, 0, len(frames))
        if int(lengths.sum(dtype=np.int64)) != len(flat):
            self.fail("is damaged: its stacks have other lengths than they should")
        bounds, ids = [0, *np.cumsum(lengths, dtype=np.int64).tolist()], flat.tolist()
        stacks = tuple(tuple(ids[low:high]) for low, high in pairwise(bounds))
        self.check("kind", columns["kind"], 0, len(EventKind))
        self.check("category", columns["category"], 0, len(Category))
        self.check("device", columns["device"], 0, 1 << 15)
        for name, table in TABLES.items():
            self.check(name, columns[name], -1, len(stacks) if table == "stacks" else len(tables[table]))
        devices = tuple(self.device(entry, header["segment_frames"]) for entry in header["devices"])
        return MemoryTrace(
            **cast("dict[str, Any]", {**columns, **tables}),
            frames=frames,
            stacks=stacks,
            devices=devices,
            meta=_meta(header["meta"]),
        )

    def check(self, name: str, column: NDArray[Any], low: int, high: int) -> None:
        if len(column) and not (low <= int(column.min()) and int(column.max()) < high):
            self.fail(f"is damaged: column {name} points outside its table")

    def device(self, entry: dict[str, Any], frame_lists: list[Any]) -> TraceDevice:
        from vramfit.trace.segments import check_segment

        def unfold(part: dict[str, Any]) -> dict[str, Any]:
            index = part.get("frames")
            return {**part, "frames": frame_lists[_natural(index)]} if isinstance(index, int) else part

        segments = []
        for number, segment in enumerate(entry["segments"]):
            whole = unfold(segment)
            whole["blocks"] = [unfold(block) for block in segment["blocks"]]
            if "segment_pool_id" in whole:  # JSON knows no tuples
                whole["segment_pool_id"] = tuple(whole["segment_pool_id"])
            segments.append(check_segment(whole, f"{self.name}: segment {number}"))
        return TraceDevice(
            index=_natural(entry["index"]),
            name=str(entry["name"]),
            total_bytes=_natural(entry["total_bytes"]),
            context_bytes=_natural(entry["context_bytes"]),
            segments=tuple(segments),
        )


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _strings(values: Iterable[object]) -> tuple[str, ...]:
    found = tuple(values)
    if not all(type(value) is str for value in found):
        raise ValueError("a table holds something else than text")
    return tuple(str(value) for value in found)


def _meta(values: dict[str, Any]) -> dict[str, str | int | float]:
    if not all(isinstance(value, str | int | float) for value in values.values()):
        raise ValueError("meta holds something else than text and numbers")
    return dict(values)
