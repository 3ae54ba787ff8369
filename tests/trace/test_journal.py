"""A journal holds, wherever it is cut off, the trace up to there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.errors import TraceFormatError, WriteError
from vramfit.trace import Category, EventKind, Frame, TraceBuilder, TraceDevice, read_any
from vramfit.trace.journal import TraceJournal, parse_journal
from vramfit.trace.model import COLUMNS

DEVICE = TraceDevice(index=0, name="a card", total_bytes=1 << 34, context_bytes=7)


def write(path: Path) -> TraceBuilder:
    """A journal with events, names long and short, stacks and corrections."""
    builder = TraceBuilder(devices=(DEVICE,), meta={"source": "cpu"}, journal=TraceJournal(path))
    assert builder.journal is not None
    builder.journal.facts(builder.meta, builder.devices)
    for number in range(30):
        frames = tuple(
            Frame(f"/home/someone/{'deep/' * (number % 7)}train.py", line, "f") for line in range(number % 4)
        )
        builder.append(
            EventKind.ALLOC if number % 3 else EventKind.FREE_REQUESTED,
            device=0,
            address=(1 << 47) + 512 * number,
            size=number * 1000,
            block=number * 1024,
            stream=-number,
            time_us=number * 10,
            category=number % 8,
            op=builder.op(f"aten.op{number % 5}" + "x" * (number * 9)),
            stack=builder.stack(frames),
            module=builder.module(f"Net.layer.{number % 3}"),
            phase=builder.phase(f"step {number // 10}/forward"),
            tensor=builder.tensor(f"float32[{number}]"),
        )
        if number % 4 == 3:
            builder.set_category(number - 1, Category.GRADIENTS)
            builder.set_module(number - 2, builder.module("Net.late"))
            builder.set_tensor(number, builder.tensor("int8[1]"))
    return builder


def test_a_journal_is_the_trace(tmp_path: Path) -> None:
    builder = write(tmp_path / "run.journal")
    assert read_any(tmp_path / "run.journal").equals(builder.finish()), "also while it is being written"
    assert builder.journal is not None
    builder.journal.close()
    assert read_any(tmp_path / "run.journal").equals(builder.finish())
    assert (tmp_path / "run.journal").stat().st_size % 64 == 0
    builder.append(EventKind.ALLOC, device=0)  # goes on without
    assert len(read_any(tmp_path / "run.journal")) == len(builder) - 1
    builder.journal.delete()
    assert list(tmp_path.iterdir()) == []


def test_cut_off_anywhere_it_holds_what_was_whole(tmp_path: Path) -> None:
    builder = write(tmp_path / "run.journal")
    assert builder.journal is not None
    builder.journal.close()
    data, whole = (tmp_path / "run.journal").read_bytes(), builder.finish()
    rows = 0
    for size in range(64, len(data) + 1):
        if size % 64 not in (0, 1, 63):
            continue  # the same slots as one of these
        trace = parse_journal(data[:size], "it")
        assert len(trace) >= rows
        rows = len(trace)
        for name in COLUMNS:
            if name not in ("category", "module", "tensor"):  # which may be corrected later
                assert np.array_equal(getattr(trace, name), getattr(whole, name)[:rows]), (size, name)
        for table in ("ops", "modules", "phases", "tensors", "frames", "stacks"):
            assert getattr(trace, table) == getattr(whole, table)[: len(getattr(trace, table))]
    assert rows == len(whole)


@given(at=st.integers(0, 1 << 14), value=st.integers(0, 255), cut=st.integers(0, 1 << 14))
@settings(max_examples=150, deadline=None)
def test_damage_never_gives_more_than_an_error_of_ours(damaged: bytes, at: int, value: int, cut: int) -> None:
    data = bytearray(damaged[: cut % len(damaged) + 1])
    data[at % len(data)] = value
    try:
        trace = parse_journal(bytes(data), "it")
    except TraceFormatError:
        return
    assert (trace.kind < len(EventKind)).all() and (trace.op < len(trace.ops)).all()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "run.journal"
    journal = write(path).journal
    assert journal is not None
    journal.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x94vram", "ends before its first event"),
        (b"\x94vramfit" + bytes(20), "ends before its first event"),
        (b"\x94vramfit" + b"\x63\0\0\0" + bytes(52), "version 99"),
        (b"something else, and long enough to hold a header of such a file..", "is no"),
    ],
    ids=["magic", "header", "newer", "other"],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(TraceFormatError, match=reason):
        parse_journal(data, "it")
    if data.startswith(b"\x94"):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(TraceFormatError, match=reason):
            read_any(tmp_path / "x")


def test_a_killed_process_leaves_every_event(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from vramfit.trace import EventKind, TraceBuilder
from vramfit.trace.journal import TraceJournal
builder = TraceBuilder(journal=TraceJournal(Path({str(tmp_path / "run.journal")!r})))
for number in range(70_000):  # more than the file holds before it grows
    builder.append(EventKind.ALLOC, device=0, address=number, size=number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    trace = read_any(tmp_path / "run.journal")
    assert trace.address.tolist() == list(range(70_000))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    builder = TraceBuilder(journal=TraceJournal(tmp_path / "run.journal"))
    child = os.fork()
    if child == 0:
        builder.append(EventKind.ALLOC, device=0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    builder.append(EventKind.OOM, device=0)
    assert read_any(tmp_path / "run.journal").kind.tolist() == [EventKind.OOM]


def test_a_full_disk_ends_the_journal_and_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = TraceBuilder(journal=TraceJournal(tmp_path / "run.journal"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number in range(70_000):
        builder.append(EventKind.ALLOC, device=0, address=number)
    assert len(builder) == 70_000
    trace = read_any(tmp_path / "run.journal")
    assert 0 < len(trace) < 70_000 and trace.address.tolist() == list(range(len(trace)))


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="missing"):
        TraceJournal(tmp_path / "missing" / "run.journal")
