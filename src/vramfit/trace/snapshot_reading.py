"""Reads torch's memory snapshots (any version; pickle or JSON, gzipped or plain) as traces."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import json
import pickletools
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from vramfit.errors import TraceFormatError
from vramfit.trace.fileformat import EMBEDDED, MAGIC, parse_trace, read_file
from vramfit.trace.frame_categories import BY_FRAMES, category_of
from vramfit.trace.journal import MAGIC as JOURNAL
from vramfit.trace.journal import parse_journal
from vramfit.trace.model import COLUMNS, Category, EventKind, Frame, MemoryTrace, TraceDevice
from vramfit.trace.pickles import load_plain, looks_like_a_pickle
from vramfit.trace.replay.rewind import fill_block_sizes
from vramfit.trace.segments import INACTIVE, check_frames, check_segment
from vramfit.trace.settings import conf_from_settings
from vramfit.writing import StrPath

Snapshot: TypeAlias = dict[str, Any]

ACTIONS: Mapping[str, EventKind] = {kind.name.lower(): kind for kind in EventKind if kind < EventKind.MARKER}
"""How torch's traces call the kinds of events."""

MAX_UNPACKED_BYTES = 8 << 30
"""A gzipped snapshot that unpacks to more is refused: a few kilobytes can be made to unpack to terabytes."""

_CHECKED_BYTES = 64 << 20
_MOST_EXPANSION = 200
"""From ``_CHECKED_BYTES`` on, a gzipped snapshot may unpack to so many times what was read of it: recordings reach
about 60, a file made to fill the memory 1000."""

_PIECE = 1 << 16

_HINT = "Give a file that torch.cuda.memory._dump_snapshot wrote"
KINDS = "Give a .vft trace of vramfit run --trace, or a torch snapshot (torch.cuda.memory._dump_snapshot)"
"""What can be replayed."""
_CATEGORIES = {category.name.lower(): category for category in Category}
_GZIP = b"\x1f\x8b"
_FIRST_BYTES = frozenset({*(ord(opcode.code) for opcode in pickletools.opcodes), *b"{[ \t\r\n"})
"""What a pickle or JSON can begin with."""


def read_any(path: StrPath) -> MemoryTrace:
    """The trace in a file: .vft, the journal of a killed process, or a torch snapshot as pickle or JSON, gzipped or
    plain, told by its content.

    Raises:
        TraceFormatError: it is none of these, or damaged.
    """
    path = Path(path)
    data = read_file(path)
    own = parse_own(data, str(path))
    if own is not None:
        return own
    with _collector_paused():
        return trace_of(_parse(data, str(path)), str(path))


def parse_own(data: bytes, name: str) -> MemoryTrace | None:
    """The trace in a file of our own, .vft or journal; None where it is neither.

    Raises:
        TraceFormatError: it is damaged.
    """
    if data.startswith(MAGIC[: len(data)]):
        return parse_trace(data, name)
    if data.startswith(JOURNAL[: len(data)]):
        return parse_journal(data, name)
    return None


def trace_of(snapshot: Snapshot, name: str) -> MemoryTrace:
    """The trace of a snapshot: the very one it was written from, where it holds that.

    Raises:
        TraceFormatError: it contradicts itself.
    """
    return _embedded(snapshot, name) or trace_from_snapshot(snapshot)


def _embedded(snapshot: Snapshot, name: str) -> MemoryTrace | None:
    """The trace inside a snapshot of our own; None where there is none, or the events differ."""
    text = snapshot.get(EMBEDDED)
    if not isinstance(text, str):
        return None
    try:
        trace = parse_trace(base64.b64decode(text, validate=True), f"the trace in {name}")
    except (ValueError, TraceFormatError):
        return None
    entries = sum(len(events) for events in snapshot["device_traces"] if isinstance(events, list))
    return trace if int((trace.kind < EventKind.MARKER).sum()) == entries else None


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: looking for cycles, of which a snapshot has none, takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_snapshot(source: StrPath | bytes) -> Snapshot:
    """A torch snapshot as a dictionary, always with the keys ``segments`` and ``device_traces``.

    Nothing in the file is executed: see `vramfit.trace.pickles`.

    Args:
        source: path of the file, or its content.

    Raises:
        TraceFormatError: it is not a snapshot, or damaged.
    """
    if isinstance(source, bytes):
        return _parse(source, "the snapshot")
    return _parse(read_file(Path(source)), str(source))


def _parse(data: bytes, name: str) -> Snapshot:
    return as_snapshot(parse_plain(data, name), name)


class Plain(NamedTuple):
    """A value of plain data, and what it was read from.

    Attributes:
        value: dictionaries, lists, text, numbers. Those of a pickle may be shared, so that a walk through them has no
            end; see `as_snapshot`.
        size: bytes of the document, unpacked.
        is_json: JSON, where nothing is shared; else a pickle.
    """

    value: Any
    size: int
    is_json: bool


def parse_plain(data: bytes, name: str, *, kinds: str = KINDS) -> Plain:
    """The value in a pickle or JSON document, gzipped or plain.

    Args:
        kinds: what may be given instead, for a file that is neither.

    Raises:
        TraceFormatError: it is neither, or damaged, or wants more than plain data.
    """
    if data.startswith(_GZIP):
        data = _gunzip(data, name)
    if not data:
        raise TraceFormatError(f"{name} is empty", _HINT)
    start = data[:64].lstrip()[:1]
    # A pickle of protocol 0 may begin with "(", one of protocol 1 with "}" or "]"; JSON with "{" or "[".
    is_json = start in (b"{", b"[")
    try:
        value = _load_json(data, name) if is_json else load_plain(data, name)
    except TraceFormatError:
        if is_json or looks_like_a_pickle(data):
            raise
        raise TraceFormatError(f"{name} is no known kind of recording", kinds) from None
    return Plain(value, len(data), is_json)


def as_snapshot(plain: Plain, name: str) -> Snapshot:
    """Plain data as a snapshot that can be walked through; ``name`` is for messages.

    Raises:
        TraceFormatError: it is something else.
    """
    value = plain.value
    if isinstance(value, list):  # torch before 2.0: the segments alone
        value = {"segments": value, "device_traces": []}
    if not isinstance(value, dict) or not {"segments", "device_traces"} & set(value):
        raise TraceFormatError(f"{name} holds something else than a snapshot", _HINT)
    snapshot = {"segments": [], "device_traces": [], **value}
    _check_extent(snapshot, plain.size, name)
    return snapshot


def _gunzip(data: bytes, name: str) -> bytes:
    """Unpack piece by piece, and stop as soon as the content is not a snapshot's or grows as none does."""
    unpacked = io.BytesIO()  # gives its content without a copy
    position = 0
    for piece, position in _pieces(data, name):
        if not unpacked.tell() and piece[0] not in _FIRST_BYTES:
            raise TraceFormatError(f"{name} is no known kind of recording inside its gzip", KINDS)
        unpacked.write(piece)
        size = unpacked.tell()
        if size > MAX_UNPACKED_BYTES:
            raise TraceFormatError(f"{name} unpacks to more than {MAX_UNPACKED_BYTES} bytes", _HINT)
        if size > _CHECKED_BYTES and size > _MOST_EXPANSION * position:
            raise TraceFormatError(
                f"{name} unpacks to more than {_MOST_EXPANSION} times its size, as no snapshot does", _HINT
            )
    return unpacked.getvalue()


def _pieces(data: bytes, name: str) -> Iterator[tuple[bytes, int]]:
    """The content of a gzip file of one or more members, none empty, and how much of the file was read for it."""
    view, position = memoryview(data), 0
    while position < len(view):
        stream = zlib.decompressobj(wbits=31)
        rest = b""
        while not stream.eof:
            if not rest:
                rest = bytes(view[position : position + _PIECE])
                position += len(rest)
                if not rest:
                    raise TraceFormatError(
                        f"{name} is truncated: its gzip stream has no end", "Copy it again"
                    )
            try:
                piece = stream.decompress(rest, 1 << 20)
            except zlib.error as error:
                raise TraceFormatError(
                    f"{name} is damaged: it cannot be decompressed ({error})", "Copy it again"
                ) from None
            rest = stream.unconsumed_tail
            if piece:
                yield piece, position
        position -= len(stream.unused_data)
        while data[position : position + 1] == b"\0":  # padding after a member
            position += 1


def _load_json(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(f"{name} is damaged: it is no JSON ({error!s:.80})", _HINT) from None


def _check_extent(snapshot: Snapshot, size: int, name: str) -> None:
    """Refuse a pickle that repeats the same list so often that walking through it would never end."""
    entries = 0
    for key in ("segments", "device_traces"):
        if not isinstance(snapshot[key], list):
            raise TraceFormatError(f"{name}: {key} is no list", _HINT)
        entries += len(snapshot[key])
    entries += sum(len(trace) for trace in snapshot["device_traces"] if isinstance(trace, list))
    for segment in snapshot["segments"]:
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        entries += len(blocks) if isinstance(blocks, list) else 0
    if entries > size:
        raise TraceFormatError(f"{name} has {entries} entries in {size} bytes: it repeats itself", _HINT)


def trace_from_snapshot(snapshot: Mapping[str, Any]) -> MemoryTrace:
    """The trace of a snapshot: its events, merged by time over the devices, and its final segments.

    The sizes of blocks, which snapshots do not hold, are worked out from where the blocks lie.

    Raises:
        TraceFormatError: an entry has missing or senseless values.
    """
    return _Importer(snapshot).trace()


class _Importer:
    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.snapshot = snapshot
        self.seen: set[int] = set()
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}
        self.stack_of: dict[int, int] = {}
        self.phases: dict[str, int] = {}

    def trace(self) -> MemoryTrace:
        segments: dict[int, list[dict[str, Any]]] = {}
        for number, raw in enumerate(self.snapshot.get("segments", ())):
            segment = check_segment(raw, f"segments[{number}]", self.seen)
            segments.setdefault(segment["device"], []).append(segment)
            for block in segment["blocks"]:
                if block["state"] != INACTIVE and block.get("frames"):
                    self.stack(block["frames"], f"segments[{number}]")
        traces = self.snapshot.get("device_traces", ())
        parts = [self.columns(index, entries) for index, entries in enumerate(traces)]
        parts.append(self.annotations())
        columns = _merge(parts)
        categories = self.categorise(columns)
        settings = self.snapshot.get("allocator_settings")
        devices = range(max([len(traces), *(index + 1 for index in segments)]))
        trace = MemoryTrace(
            **cast("dict[str, Any]", columns),
            frames=tuple(self.frames),
            stacks=tuple(self.stacks),
            phases=tuple(self.phases),
            devices=tuple(
                TraceDevice(index=index, segments=tuple(segments.get(index, ()))) for index in devices
            ),
            meta={
                "source": "snapshot",
                "alloc_conf": conf_from_settings(settings if isinstance(settings, dict) else {}),
                **({"categories": BY_FRAMES} if categories else {}),
            },
        )
        return fill_block_sizes(trace)

    def columns(self, device: int, entries: object) -> dict[str, NDArray[Any]]:
        """The events of one device as columns."""
        where = f"device_traces[{device}]"
        if not isinstance(entries, list):
            _fail(where, f"is a {type(entries).__name__}, not a list")
        if not all(type(entry) is dict for entry in entries):
            _fail(where, "has an entry that is no dictionary")
        get = {key: _values(entries, key, 0) for key in ("addr", "size", "stream", "time_us")}
        # An action that torch has added since is not known to be about memory.
        kinds = np.array(
            [ACTIONS.get(action, EventKind.MARKER) for action in _values(entries, "action", "")],
            dtype=np.uint8,
        )
        for row in np.flatnonzero(kinds == EventKind.OOM).tolist():  # "device_free" instead of "addr"
            get["addr"][row] = entries[row].get("device_free", 0) or get["addr"][row]
        columns = _empty(len(entries))
        columns["kind"][:] = kinds
        columns["device"][:] = device
        columns["address"] = _integers(get["addr"], "Q", where, "addr")
        for key in ("size", "stream", "time_us"):
            columns[key] = _integers(get[key], "q", where, key)
        if len(entries) and int(columns["size"].min()) < 0:
            _fail(f"{where}[{int(columns['size'].argmin())}]", "has a negative size")
        named = [(row, entry["category"]) for row, entry in enumerate(entries) if "category" in entry]
        for row, name in named:
            columns["category"][row] = _category(name)
        columns["stack"][:] = [
            self.stack(entry["frames"], where) if entry.get("frames") else -1 for entry in entries
        ]
        return columns

    def categorise(self, columns: dict[str, NDArray[Any]]) -> bool:
        """Give requests without a category what their stacks tell; whether any stack of the snapshot tells one."""
        frames = list(self.frames)
        told = [category_of([frames[index] for index in stack]) for stack in self.stacks]
        of_stack = np.array([*told, Category.OTHER], dtype=np.uint8)
        silent = (columns["kind"] == EventKind.ALLOC) & (columns["category"] == Category.OTHER)
        columns["category"][silent] = of_stack[columns["stack"][silent]]
        return bool(of_stack.any())

    def stack(self, raw: object, where: str) -> int:
        """Index of the stack of a list of frames."""
        found = self.stack_of.get(id(raw))
        if found is None:
            known = self.frames
            names = [
                Frame(frame["filename"], frame["line"], frame["name"])
                for frame in check_frames(raw, where, self.seen)
            ]
            key = tuple([known.setdefault(frame, len(known)) for frame in names])
            found = self.stack_of[id(raw)] = self.stacks.setdefault(key, len(self.stacks))
        return found

    def annotations(self) -> dict[str, NDArray[Any]]:
        """The named beginnings and ends that torch's profiler leaves in a snapshot, as markers."""
        found: list[tuple[int, int, int]] = []
        for entry in self.snapshot.get("external_annotations") or ():
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                continue
            device, time = entry.get("device", 0), entry.get("time_us", 0)
            if type(device) is not int or type(time) is not int or not 0 <= device < 1 << 15:
                continue
            ends = entry.get("stage") == "END"
            found.append(
                (device, time, -1 if ends else self.phases.setdefault(entry["name"], len(self.phases)))
            )
        columns = _empty(len(found))
        columns["kind"][:] = EventKind.MARKER
        for name, values in zip(("device", "time_us", "phase"), zip(*found, strict=True), strict=False):
            columns[name] = _integers(values, "q", "external_annotations", name).astype(COLUMNS[name])
        return columns


def _values(entries: list[dict[str, Any]], key: str, default: object) -> list[Any]:
    """The value of a key in every entry, fast for the usual case that all entries have it."""
    try:
        return list(map(itemgetter(key), entries))
    except KeyError:
        return [entry.get(key, default) for entry in entries]


def _category(name: object) -> Category:
    return _CATEGORIES.get(name, Category.OTHER) if isinstance(name, str) else Category.OTHER


def _empty(length: int) -> dict[str, NDArray[Any]]:
    missing = {"op", "stack", "module", "phase", "tensor"}
    return {
        name: np.full(length, -1 if name in missing else 0, dtype=dtype) for name, dtype in COLUMNS.items()
    }


def _integers(values: Sequence[object], code: str, where: str, key: str) -> NDArray[Any]:
    # An array of integers takes neither text nor fractions, which numpy would quietly convert.
    make: Callable[..., array[int]] = array
    try:
        return np.array(make(code, values))
    except (TypeError, OverflowError):
        pass
    for row, value in enumerate(values):
        try:
            make(code, [value])
        except (TypeError, OverflowError):
            _fail(f"{where}[{row}]", f"has {key} {value!r:.40}, not an integer in range")
    raise AssertionError("the values fit one by one")


def _merge(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """One trace from several: by time, never changing the order within a device."""
    parts = [part for part in parts if len(part["kind"])]
    if not parts:
        return _empty(0)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    if len(parts) > 1:
        # A clock that steps back must not reorder a device's own events.
        key = np.concatenate([np.maximum.accumulate(part["time_us"]) for part in parts])
        order = np.argsort(key, kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    _spread_phases(columns)
    return columns


def _spread_phases(columns: dict[str, NDArray[Any]]) -> None:
    """Give every event the phase of the last marker before it on its device."""
    markers = columns["kind"] == EventKind.MARKER
    if not (columns["phase"][markers] >= 0).any():
        return
    for device in np.unique(columns["device"]):
        rows = np.flatnonzero(columns["device"] == device)
        # Index of the last marker at or before each row; rows before the first marker stay without a phase.
        last = np.maximum.accumulate(np.where(markers[rows], np.arange(len(rows)), -1))
        known = last >= 0
        columns["phase"][rows[known]] = columns["phase"][rows[last[known]]]


def _fail(where: str, what: str) -> NoReturn:
    raise TraceFormatError(f"{where} {what}", _HINT)
