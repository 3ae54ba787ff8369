from __future__ import annotations

import errno
import json
import resource
import signal
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from vramfit.errors import TraceFormatError, WriteError
from vramfit.trace import EventKind, MemoryTrace, TraceBuilder, fileformat, read_any
from vramfit.trace.fileformat import MAGIC, parse_trace

HEAD = struct.Struct("<8sIIQ")


def saved(trace: MemoryTrace, folder: Path) -> Path:
    path = folder / "run.vft"
    trace.save(path)
    return path


def rebuilt(data: bytes, **changes: object) -> bytes:
    """The file with its header changed, and a checksum that fits again."""
    _, version, _, size = HEAD.unpack_from(data)
    header = json.loads(zlib.decompress(data[HEAD.size : HEAD.size + size]))
    header.update(changes)
    text = zlib.compress(json.dumps(header).encode())
    return HEAD.pack(MAGIC, version, zlib.crc32(text), len(text)) + text + data[HEAD.size + size :]


def test_round_trip_keeps_everything(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    path = saved(rich_trace, tmp_path)
    assert MemoryTrace.load(path).equals(rich_trace)
    assert read_any(path).equals(rich_trace)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.vft"]


def test_round_trip_of_an_empty_trace(tmp_path: Path) -> None:
    empty = TraceBuilder().finish()
    assert MemoryTrace.load(saved(empty, tmp_path)).equals(empty)


def test_round_trip_of_recordings(recordings: dict[str, MemoryTrace], tmp_path: Path) -> None:
    for trace in recordings.values():
        path = saved(trace, tmp_path)
        assert MemoryTrace.load(path).equals(trace)
        assert path.stat().st_size < 10 * len(trace) + 300_000


def test_a_million_events_take_a_moment(tmp_path: Path) -> None:
    one = TraceBuilder()
    for row in range(1000):
        one.append(EventKind.ALLOC, device=0, address=0x7F0000000000 + row * 512, size=row, time_us=row)
    small = one.finish()
    columns = {name: np.tile(getattr(small, name), 1000) for name in fileformat.COLUMNS}
    trace = MemoryTrace(**columns)
    began = time.process_time()
    path = saved(trace, tmp_path)
    loaded = MemoryTrace.load(path)
    assert time.process_time() - began < 5  # about 0.7 s; far beyond that, something is wrong
    assert loaded.equals(trace)


def test_every_truncation_is_refused(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    data = saved(rich_trace, tmp_path).read_bytes()
    for length in [*range(1, 40), *range(40, len(data), 97), len(data) - 1]:
        with pytest.raises(TraceFormatError, match=r"truncated|not a vramfit trace|damaged"):
            parse_trace(data[:length], "run.vft")


def test_flipped_bytes_never_do_more_than_fail(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    data = saved(rich_trace, tmp_path).read_bytes()
    failed = 0
    for at in range(0, len(data), 53):
        changed = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        try:
            parse_trace(changed, "run.vft")
        except TraceFormatError:
            failed += 1
    assert failed == len(range(0, len(data), 53))  # adler32 and crc32 find every single changed byte


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 10**12}, "cannot hold"),
        ({"rows": -1}, "makes no sense"),
        ({"rows": "many"}, "makes no sense"),
        ({"columns": {"kind": 3}}, "other columns"),
        ({"ops": []}, "points outside its table"),
        ({"frames": []}, "points outside its table"),
        ({"frames": [[1]]}, "makes no sense"),
        ({"stacks": 0}, "damaged"),
        ({"devices": [{"index": 0}]}, "makes no sense"),
        ({"devices": 7}, "makes no sense"),
        ({"meta": {"a": [1]}}, "makes no sense"),
        ({"modules": [1]}, "makes no sense"),
        ({"segment_frames": []}, None),
    ],
)
def test_senseless_headers(
    rich_trace: MemoryTrace, tmp_path: Path, changes: dict[str, object], reason: str | None
) -> None:
    data = rebuilt(saved(rich_trace, tmp_path).read_bytes(), **changes)
    if reason is None:  # the trace has no frames in its segments, so none are missing
        assert parse_trace(data, "run.vft").equals(rich_trace)
        return
    with pytest.raises(TraceFormatError, match=reason):
        parse_trace(data, "run.vft")


def test_newer_version_asks_for_an_upgrade(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    data = bytearray(saved(rich_trace, tmp_path).read_bytes())
    data[8:12] = struct.pack("<I", 99)
    with pytest.raises(TraceFormatError, match=r"version 99.*Upgrade"):
        parse_trace(bytes(data), "run.vft")


def test_trailing_bytes_are_refused(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="4 bytes follow"):
        parse_trace(saved(rich_trace, tmp_path).read_bytes() + b"more", "run.vft")


def test_header_bomb_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileformat, "_MAX_HEADER_BYTES", 1 << 16)
    text = zlib.compress(b" " * (1 << 20))
    with pytest.raises(TraceFormatError, match="another length"):
        parse_trace(HEAD.pack(MAGIC, 1, zlib.crc32(text), len(text)) + text, "bomb.vft")


@pytest.mark.parametrize("content", [b"", b"\x93vram"])
def test_not_a_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.vft"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError):
        MemoryTrace.load(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="no such file"):
        MemoryTrace.load(tmp_path / "nothing.vft")
    with pytest.raises(TraceFormatError, match="folder"):
        MemoryTrace.load(tmp_path)


def test_unwritable_places(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="no such file"):
        rich_trace.save(tmp_path / "no" / "run.vft")
    with pytest.raises(WriteError, match="is a directory"):
        rich_trace.save(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_device_is_reported(rich_trace: MemoryTrace) -> None:
    with pytest.raises(WriteError, match="no space left") as caught:
        rich_trace.save("/dev/full")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_a_full_disk_leaves_the_old_file(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    path = tmp_path / "run.vft"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with pytest.raises(WriteError, match="too large"):
            rich_trace.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.vft"]


def test_a_link_stays_a_link(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    target, link = tmp_path / "target.vft", tmp_path / "link.vft"
    target.write_text("old")
    link.symlink_to(target)
    rich_trace.save(link)
    assert link.is_symlink()
    assert MemoryTrace.load(target).equals(rich_trace)
