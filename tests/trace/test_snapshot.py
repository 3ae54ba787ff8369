from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trace.conftest import NAMES, RECORDINGS

from vramfit.errors import TraceFormatError
from vramfit.trace import Category, EventKind, MemoryTrace, load_snapshot, read_any, trace_from_snapshot
from vramfit.units import MIB

BASE = 0x7F00_0000_0000
FRAMES = [{"filename": "model.py", "line": 3, "name": "forward"}]


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def segment(**more: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": BASE,
        "total_size": 2 * MIB,
        "stream": 0,
        "segment_type": "small",
        "blocks": [
            {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": FRAMES},
            {"size": 2 * MIB - 1024, "state": "inactive"},
        ],
        **more,
    }


def modern() -> dict[str, Any]:
    entry = event("alloc", BASE, 1000, time_us=5, frames=FRAMES, user_metadata="", pool_id=(0, 0))
    return {
        "segments": [segment()],
        "device_traces": [[event("segment_alloc", BASE, 2 * MIB, time_us=4), entry], []],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        "external_annotations": [],
    }


@pytest.mark.parametrize("name", NAMES)
def test_recordings_read_alike_in_every_dress(name: str, tmp_path: Path) -> None:
    with gzip.open(RECORDINGS / name) as stream:
        raw = json.load(stream)
    expected = read_any(RECORDINGS / name)
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(raw))
    dresses = [plain]
    for protocol, packed in ((1, False), (2, False), (4, False), (5, True)):
        path = tmp_path / f"{protocol}.pickle"
        data = pickle.dumps(raw, protocol=protocol)
        path.write_bytes(gzip.compress(data, 1) if packed else data)
        dresses.append(path)
    for path in dresses:
        assert read_any(path).equals(expected), path.name


def test_modern_snapshot() -> None:
    trace = trace_from_snapshot(modern())
    assert [EventKind(kind).name for kind in trace.kind.tolist()] == ["SEGMENT_ALLOC", "ALLOC"]
    assert trace.block.tolist() == [0, 1024]
    assert trace.stacks[trace.stack[1]] == (0,)
    assert trace.frames[0] == ("model.py", 3, "forward")
    assert [device.index for device in trace.devices] == [0, 1]
    assert trace.meta["alloc_conf"] == "max_split_size_mb:64"
    assert trace.devices[0].segments[0]["allocated_size"] == 1024
    assert trace.devices[0].segments[0]["blocks"][0]["address"] == BASE


def test_segments_alone_as_torch_1_wrote_them() -> None:
    block = {"size": 2 * MIB, "state": "active_allocated", "history": [{"addr": BASE, "real_size": 2000000}]}
    old = [{"device": 2, "address": BASE, "total_size": 2 * MIB, "stream": 0, "blocks": [block]}]
    trace = trace_from_snapshot(load_snapshot(pickle.dumps(old)))
    assert len(trace) == 0
    assert [device.index for device in trace.devices] == [0, 1, 2]
    (found,) = trace.devices[2].segments
    assert found["segment_type"] == "small"
    assert found["segment_pool_id"] == (0, 0)
    assert found["is_expandable"] is False
    assert found["blocks"][0]["requested_size"] == 2000000


def test_history_gives_frames_too() -> None:
    history = [{"addr": BASE, "real_size": 7, "frames": FRAMES}]
    blocks = [{"size": 2 * MIB, "state": "active_awaiting_free", "history": history}]
    trace = trace_from_snapshot({"segments": [segment(blocks=blocks)]})
    (block,) = trace.devices[0].segments[0]["blocks"]
    assert (block["requested_size"], block["frames"], block["state"]) == (7, FRAMES, "active_pending_free")


def test_keys_that_old_versions_lack() -> None:
    trace = trace_from_snapshot(
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": BASE, "size": 5}]]}
    )
    assert (trace.time_us[0], trace.stream[0], trace.stack[0]) == (0, 0, -1)
    assert trace.meta["alloc_conf"] == ""


def test_oom_keeps_the_free_bytes() -> None:
    entry = {"action": "oom", "device_free": 95682560, "size": 512, "stream": 0}
    trace = trace_from_snapshot({"segments": [], "device_traces": [[entry]]})
    assert trace.address[0] == 95682560


def test_unknown_actions_become_markers() -> None:
    trace = trace_from_snapshot({"segments": [], "device_traces": [[event("workspace_snapshot", 0, 0)]]})
    assert trace.kind.tolist() == [EventKind.MARKER]


def test_devices_are_merged_by_time_and_keep_their_order() -> None:
    first = [event("alloc", BASE, 512, time_us=time) for time in (10, 9, 30)]  # a clock that steps back
    second = [event("alloc", BASE, 512, time_us=time) for time in (5, 20, 31)]
    trace = trace_from_snapshot({"segments": [], "device_traces": [first, second]})
    assert trace.device.tolist() == [1, 0, 0, 1, 0, 1]
    assert trace.time_us[trace.device == 0].tolist() == [10, 9, 30]


def test_annotations_become_phases() -> None:
    snapshot = modern()
    snapshot["external_annotations"] = [
        {"name": "step 0", "stage": "START", "device": 0, "time_us": 4},
        {"name": "step 0", "stage": "END", "device": 0, "time_us": 6},
        {"name": 5, "device": 0, "time_us": 4},
        "nonsense",
    ]
    trace = trace_from_snapshot(snapshot)
    allocation = int(np.flatnonzero(trace.kind == EventKind.ALLOC)[0])
    assert trace.phases[trace.phase[allocation]] == "step 0"
    assert trace.phase[-1] == -1


def test_categories_are_read() -> None:
    entries = [event("alloc", BASE, 1, category=name) for name in ("gradients", "unheard of", 7)]
    trace = trace_from_snapshot({"segments": [], "device_traces": [entries]})
    assert trace.category.tolist() == [Category.GRADIENTS, Category.OTHER, Category.OTHER]


@pytest.mark.parametrize(
    ("settings", "conf"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1}, ""),
        ({"max_split_size": 128 * MIB}, "max_split_size_mb:128"),
        ({"garbage_collection_threshold": 0.8}, "garbage_collection_threshold:0.8"),
        ({"expandable_segments": True}, "expandable_segments:True"),
        ({"roundup_power2_divisions": {"1": 0, "2": 4}}, "roundup_power2_divisions:[2:4]"),
    ],
)
def test_settings_in_force(settings: dict[str, Any], conf: str) -> None:
    trace = trace_from_snapshot({"segments": [], "device_traces": [], "allocator_settings": settings})
    assert trace.meta["alloc_conf"] == conf


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_traces": {}}, "no list"),
        ({"segments": "all"}, "no list"),
        ({"segments": [7]}, r"segments\[0\] is a int"),
        ({"segments": [{}]}, r"segments\[0\] has no address"),
        ({"segments": [segment(total_size=4 * MIB)]}, "has blocks of"),
        ({"segments": [segment(address="low")]}, "'low', not a natural number"),
        ({"segments": [segment(address=True)]}, "True, not a natural number"),
        ({"segments": [segment(segment_type="tiny")]}, "segment_type 'tiny'"),
        ({"segments": [segment(segment_pool_id="x")]}, "segment_pool_id"),
        ({"segments": [segment(blocks=[{"size": 2 * MIB, "state": "gone"}])]}, "state 'gone'"),
        ({"segments": [segment(frames=[{}])]}, "frame without"),
        ({"device_traces": [7]}, "is a int, not a list"),
        ({"device_traces": [[7]]}, "no dictionary"),
        (
            {"device_traces": [[event("alloc", BASE, 1), event("alloc", BASE, "2")]]},
            r"\[0\]\[1\] has size '2'",
        ),
        ({"device_traces": [[event("alloc", 1.5, 1)]]}, "has addr 1.5"),
        ({"device_traces": [[event("alloc", -1, 1)]]}, "has addr -1"),
        ({"device_traces": [[event("alloc", 1, -1)]]}, "negative size"),
        ({"device_traces": [[event("alloc", 1 << 70, 1)]]}, "not an integer in range"),
        ({"device_traces": [[event("alloc", 1, 1, frames="none")]]}, "is a str, not a list"),
    ],
)
def test_senseless_snapshots_say_where(change: dict[str, Any], reason: str) -> None:
    data = pickle.dumps({**modern(), **change})
    with pytest.raises(TraceFormatError, match=reason):
        trace_from_snapshot(load_snapshot(data))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"{", "no JSON"),
        (b"[1, 2", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": ' * 100_000, "no JSON"),
        (b'{"a": 1}', "something else than a snapshot"),
        (b'{"segments": 1}', "no list"),
        (b"GIF89a;", "no known kind of recording"),
        (bytes(range(256)), "."),
        (gzip.compress(b"", mtime=0), "empty"),
        (gzip.compress(json.dumps(modern()).encode(), mtime=0)[:-9], "truncated"),
        (gzip.compress(json.dumps(modern()).encode(), mtime=0)[:30], "truncated"),
        (b"\x1f\x8b" + b"\0" * 30, "decompressed"),
    ],
)
def test_what_is_no_snapshot(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=reason):
        read_any(path)


def test_no_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="no such file"):
        read_any(tmp_path / "missing.pickle")
    with pytest.raises(TraceFormatError, match="is a folder"):
        load_snapshot(tmp_path)


def test_block_sizes_agree_with_the_final_segments(recordings: dict[str, MemoryTrace]) -> None:
    for trace in recordings.values():
        for device in trace.devices:
            rows = np.flatnonzero(trace.device == device.index)
            live: dict[int, tuple[int, int]] = {}
            for kind, address, size, block in zip(
                trace.kind[rows].tolist(),
                trace.address[rows].tolist(),
                trace.size[rows].tolist(),
                trace.block[rows].tolist(),
                strict=True,
            ):
                if kind == EventKind.ALLOC:
                    live[address] = (size, block)
                elif kind == EventKind.FREE_COMPLETED:
                    assert live.pop(address, (size, block)) == (size, block)
            final = {
                block["address"]: (block["requested_size"], block["size"])
                for segment in device.segments
                for block in segment["blocks"]
                if block["state"] != "inactive"
            }
            assert {address: final.get(address) for address in live} == live
