"""Snapshots we write are read by torch's own tools, and by us, as the trace they came from."""

from __future__ import annotations

import io
import pickle
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trace.programs import Recorder

from vramfit.errors import WriteError
from vramfit.trace import (
    EventKind,
    Frame,
    MemoryTrace,
    TraceBuilder,
    load_snapshot,
    read_any,
    snapshot_from_trace,
    trace_from_snapshot,
    write_snapshot,
)

SHARED = ("kind", "device", "stream", "address", "size", "time_us", "category")


def events(trace: MemoryTrace, device: int) -> dict[str, Any]:
    """What a snapshot can hold of a device's events, with stacks written out."""
    rows = np.flatnonzero((trace.device == device) & (trace.kind != EventKind.MARKER))
    found: dict[str, Any] = {name: getattr(trace, name)[rows].tolist() for name in SHARED}
    found["stack"] = [
        tuple(trace.frames[frame] for frame in trace.stacks[stack]) if stack >= 0 else ()
        for stack in trace.stack[rows].tolist()
    ]
    found["block"] = trace.block[rows][trace.kind[rows] == EventKind.ALLOC].tolist()
    return found


def segments(trace: MemoryTrace, device: int) -> list[dict[str, Any]]:
    def plain(entry: Any) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key not in ("frames", "blocks")}

    return [
        {**plain(segment), "blocks": [plain(block) for block in segment["blocks"]]}
        for described in trace.devices
        if described.index == device
        for segment in described.segments
    ]


def assert_same(one: MemoryTrace, two: MemoryTrace) -> None:
    assert [device.index for device in one.devices] == [device.index for device in two.devices]
    for device in one.devices:
        assert events(one, device.index) == events(two, device.index)
        assert segments(one, device.index) == segments(two, device.index)
    assert one.meta["alloc_conf"] == two.meta["alloc_conf"]


def test_trace_to_snapshot_and_back(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    write_snapshot(rich_trace, path)
    again = read_any(path)
    assert_same(rich_trace, again)
    write_snapshot(again, path)
    assert_same(again, read_any(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot.pickle"]


def test_recordings_to_snapshots_and_back(recordings: dict[str, MemoryTrace]) -> None:
    for trace in recordings.values():
        again = trace_from_snapshot(load_snapshot(pickle.dumps(snapshot_from_trace(trace))))
        assert_same(trace, again)
        assert np.array_equal(trace.block, again.block)


def test_phases_become_annotations(rich_trace: MemoryTrace) -> None:
    notes = snapshot_from_trace(rich_trace)["external_annotations"]
    assert [(note["name"], note["stage"], note["device"]) for note in notes] == [
        ("step 0/forward", "START", 0),
        ("step 0/forward", "END", 0),
    ]
    again = trace_from_snapshot(snapshot_from_trace(rich_trace))
    assert again.phases == ("step 0/forward",)


def test_metadata_is_shown(rich_trace: MemoryTrace) -> None:
    entries = snapshot_from_trace(rich_trace)["device_traces"][0]
    assert entries[-1]["user_metadata"] == "float32[32, 32] | aten.mm.default | Net.linear"
    assert entries[-1]["category"] == "activations"


def test_final_blocks_carry_the_stack_of_their_allocation() -> None:
    builder = TraceBuilder(meta={"alloc_conf": ""})
    recorder = Recorder(builder=builder)
    address = recorder.allocator.malloc(1000)
    stack = builder.stack((Frame("a.py", 1, "f"),))
    builder.append(EventKind.ALLOC, device=0, address=address, size=1000, block=1024, stack=stack)
    snapshot = snapshot_from_trace(recorder.finish())
    blocks = {block["address"]: block for segment in snapshot["segments"] for block in segment["blocks"]}
    assert blocks[address]["frames"] == [{"filename": "a.py", "line": 1, "name": "f"}]


def test_memory_viz_reads_it(rich_trace: MemoryTrace, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz as viz

    write_snapshot(rich_trace, tmp_path / "snapshot.pickle")
    with (tmp_path / "snapshot.pickle").open("rb") as stream:
        snapshot = pickle.load(stream)

    total = sum(segment["total_size"] for segment in snapshot["segments"])
    summary = viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in summary
    assert f"total_reserved: {viz.Bytes(total)}" in summary
    active = sum(viz.calc_active(segment) for segment in snapshot["segments"])
    assert active == sum(
        segment["allocated_size"] for device in rich_trace.devices for segment in device.segments
    )

    text = viz.trace(snapshot)
    assert "Device 0" in text
    assert "Device 1" in text
    assert "cudaMalloc" in text
    assert "raise OutOfMemoryError" in text

    def identity(lines: str) -> str:
        return lines

    flame = viz.memory(snapshot, format_flamegraph=identity)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in flame.splitlines()) == total
    assert "seg_" in viz.segments(snapshot, format_flamegraph=identity)
    with redirect_stdout(io.StringIO()):
        difference = viz.compare([], snapshot["segments"], format_flamegraph=identity)
    assert difference.startswith("only_after")

    for plot in (viz.trace_plot, viz.segment_plot):
        assert "MemoryViz" in plot(snapshot)
    assert "MemoryViz" in viz.trace_plot(snapshot, plot_segments=True, filter_freed=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk(rich_trace: MemoryTrace) -> None:
    with pytest.raises(WriteError, match="no space left"):
        write_snapshot(rich_trace, "/dev/full")
