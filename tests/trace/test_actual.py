"""Reading what a run came to: recordings, figures, and what is neither."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.trace.programs import Recorder

from vramfit.errors import TraceFormatError, UsageError
from vramfit.trace import Actual, DeviceFigures, MemoryTrace, read_actual, snapshot_from_trace, write_snapshot

STATS = {
    "allocated_bytes.all.peak": 700,
    "allocated_bytes.all.current": 100,
    "reserved_bytes.all.peak": 1000,
    "reserved_bytes.all.current": 900,
    "requested_bytes.all.peak": 650,
    "num_ooms": 0,
}


@pytest.fixture
def trace() -> MemoryTrace:
    recorder = Recorder()
    recorder.run(50, 1)
    return recorder.finish()


def read(folder: Path, value: Any) -> Actual:
    file = folder / "card.json"
    file.write_text(json.dumps(value))
    return read_actual(file)


def figures(folder: Path, value: Any) -> DeviceFigures:
    (found,) = read(folder, value).figures
    return found


def test_a_recording_in_any_form_is_a_trace(trace: MemoryTrace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.vft")
    write_snapshot(trace, tmp_path / "b.pickle")
    text = json.dumps(snapshot_from_trace(trace))
    (tmp_path / "c.json").write_text(text)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(text.encode()))
    for file in sorted(tmp_path.iterdir()):
        found = read_actual(file)
        assert found.name == file.name
        assert found.figures == ()
        assert found.trace is not None
        assert len(found.trace) == len(trace)
        assert found.devices == (0,)
    assert read_actual(tmp_path / "a.vft").figures_of(0).torch == ""


def test_segments_alone_are_a_snapshot(trace: MemoryTrace, tmp_path: Path) -> None:
    snapshot = snapshot_from_trace(trace)
    for value in (snapshot["segments"], {"segments": snapshot["segments"]}):
        file = tmp_path / "old.pickle"
        file.write_bytes(pickle.dumps(value, protocol=4))
        found = read_actual(file)
        assert found.trace is not None
        assert len(found.trace) == 0
        assert found.devices == (0,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (STATS, DeviceFigures(peak_allocated=700, peak_reserved=1000, peak_requested=650)),
        (
            {**STATS, "device_used_bytes": 1300},
            DeviceFigures(peak_allocated=700, peak_reserved=1000, peak_requested=650, outside=400),
        ),
        (
            {"memory_stats": STATS, "nvidia_smi_bytes": 950, "gpu": "A100", "torch": "2.6.0"},
            DeviceFigures(
                peak_allocated=700,
                peak_reserved=1000,
                peak_requested=650,
                outside=50,
                gpu="A100",
                torch="2.6.0",
            ),
        ),
        (
            {"allocated_bytes": {"all": {"peak": 7, "current": 1}}, "reserved_bytes": {"all": {"peak": 9}}},
            DeviceFigures(peak_allocated=7, peak_reserved=9),
        ),
        (
            {"max_memory_allocated": "1 GiB", "max_memory_reserved": "1536MiB", "nvidia_smi_bytes": "2GiB"},
            DeviceFigures(peak_allocated=1 << 30, peak_reserved=3 << 29, outside=1 << 29),
        ),
        (
            {"peak_allocated_bytes": 5, "peak_reserved_bytes": 6, "outside_pytorch_bytes": 7, "device": 3},
            DeviceFigures(device=3, peak_allocated=5, peak_reserved=6, outside=7, whole_run=True),
        ),
        (
            {
                "statistics": STATS,
                "outside_bytes": {"context": 1, "end": 44},
                "device": {"name": "H100", "torch": "2.9"},
            },
            DeviceFigures(
                peak_allocated=700,
                peak_reserved=1000,
                peak_requested=650,
                outside=44,
                gpu="H100",
                torch="2.9",
            ),
        ),
    ],
)
def test_figures_by_all_their_names(value: dict[str, Any], expected: DeviceFigures, tmp_path: Path) -> None:
    assert figures(tmp_path, value) == expected


def test_our_own_report_tells_slack_and_workspaces_where_it_is_of_the_peak(tmp_path: Path) -> None:
    device = {
        "index": 2,
        "gpu": {"name": "RTX 4090", "total_bytes": 1 << 34},
        "peak": {"allocated_bytes": 100, "reserved_bytes": 200, "active_bytes": 100},
        "outside_pytorch_bytes": 50,
        "categories": {"parameters": 80, "workspaces": 20},
        "fragmentation": {"slack_bytes": 3},
    }
    report = {"schema": "vramfit.run/1", "torch": "2.13.0", "gpu": {"name": "?"}, "devices": [device]}
    assert figures(tmp_path, report) == DeviceFigures(
        device=2,
        peak_allocated=100,
        peak_reserved=200,
        outside=50,
        slack=3,
        workspaces=20,
        whole_run=True,
        gpu="RTX 4090",
        torch="2.13.0",
    )
    device["categories"] = {"parameters": 80, "workspaces": 10}
    assert figures(tmp_path, report).slack is None


def test_several_devices(tmp_path: Path) -> None:
    several = [{"max_memory_reserved": 1}, {"max_memory_reserved": 2}]
    for value in (several, {"devices": several, "torch": "2.6.0"}):
        found = read(tmp_path, value)
        assert found.devices == (0, 1)
        assert [found.figures_of(index).peak_reserved for index in (0, 1)] == [1, 2]
    assert found.figures_of(0).torch == "2.6.0"
    assert found.figures_of(7) == DeviceFigures()


def test_a_recording_and_figures_go_together(trace: MemoryTrace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.vft")
    (tmp_path / "b.json").write_text(json.dumps({**STATS, "device_used_bytes": 1000, "gpu": "A100"}))
    both = read_actual(tmp_path / "a.vft", tmp_path / "b.json")
    assert both.name == "a.vft + b.json"
    assert both.trace is not None
    assert (both.figures_of(0).outside, both.figures_of(0).gpu) == (100, "A100")
    held = sum(segment["total_size"] for segment in trace.devices[0].segments)
    (tmp_path / "c.json").write_text(json.dumps({"nvidia_smi_bytes": held + 70}))
    assert read_actual(tmp_path / "c.json", tmp_path / "a.vft").figures_of(0).outside == 70
    (tmp_path / "c.json").write_text(json.dumps({"nvidia_smi_bytes": held - 1}))
    with pytest.raises(TraceFormatError, match="less than the"):
        read_actual(tmp_path / "c.json", tmp_path / "a.vft")
    with pytest.raises(UsageError, match="two recordings"):
        read_actual(tmp_path / "a.vft", tmp_path / "a.vft")
    with pytest.raises(UsageError, match="two files of figures"):
        read_actual(tmp_path / "b.json", tmp_path / "b.json")
    with pytest.raises(UsageError, match="no file"):
        read_actual()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "no figures of memory"),
        ({"loss": 0.5}, "no figures of memory"),
        ([1, 2], "no figures of memory"),
        ({"devices": []}, "no figures of memory"),
        ({"max_memory_allocated": "plenty"}, "'plenty', not a size"),
        ({"max_memory_allocated": -1}, "-1, not a size"),
        ({"max_memory_allocated": True}, "True, not a size"),
        ({"max_memory_allocated": 1e400}, "inf, not a size"),
        ({"max_memory_allocated": None}, "None, not a size"),
        ({"device_used_bytes": 5}, "does not say how many torch had reserved"),
        ({**STATS, "device_used_bytes": 5}, "less than the 900"),
        ({"schema": "vramfit.run/2", "peak": {}}, "is a vramfit.run/2 document"),
        ({"schema": "vramfit.replay/1", "devices": []}, "is a vramfit.replay/1 document"),
        ([{"max_memory_reserved": 1, "device": 1}, {"max_memory_reserved": 1}], "the same device twice"),
    ],
)
def test_what_is_no_figures(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=reason) as caught:
        read(tmp_path, value)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"hello", b"{", b"\x80\x04}.", b"\x1f\x8b\x08nothing", b"[[[[[["])
def test_what_is_nothing_at_all(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_bytes(content)
    with pytest.raises(TraceFormatError):
        read_actual(file)


def test_a_pickle_holds_a_snapshot_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "stats.pickle"
    file.write_bytes(pickle.dumps(STATS))
    with pytest.raises(TraceFormatError, match="something else than a snapshot"):
        read_actual(file)
    file.write_bytes(pickle.dumps(Path("/")))
    with pytest.raises(TraceFormatError, match="does more than hold plain data"):
        read_actual(file)
