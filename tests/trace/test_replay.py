from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace.conftest import NAMES
from tests.trace.programs import SIZES, Recorder

from vramfit.allocator import AllocatorConfig, CachingAllocator, Driver
from vramfit.allocator.restore import restore
from vramfit.errors import TraceFormatError
from vramfit.trace import EventKind, MemoryTrace, TraceBuilder, read_any, replay, write_snapshot
from vramfit.units import GIB, MIB

# Allocations, segments taken, segments given back, final segments, failed requests by device.
COUNTS = {
    "eor-nn.json.gz": [(1935, 7, 0, 10, 0)],
    "expandable-3gpu-oom.json.gz": [(2434, 175, 0, 2, 0), (199, 40, 6, 8, 1), (392, 78, 0, 2, 0)],
    "finetune-course.json.gz": [(3505, 152, 0, 215, 0)],
    "gpt-2.7b-ctx128-forward-bf16.json.gz": [(2703, 461, 0, 688, 0)],
    "gpt-2.7b-ctx128-forward.json.gz": [(2058, 289, 0, 516, 0)],
    "gpt-2.7b-ctx128-train-after-forward.json.gz": [(6770, 782, 430, 1010, 0)],
    "gpt-2.7b-ctx128-train.json.gz": [(6771, 783, 0, 1010, 0)],
    "gpt-2.7b-ctx256-forward.json.gz": [(2057, 471, 287, 700, 0)],
    "gpt-2.7b-ctx256-train.json.gz": [(6769, 791, 780, 1021, 0)],
    "gpt-small-forward.json.gz": [(2998, 3, 0, 30, 0)],
    "lm-course-b.json.gz": [(2162, 0, 0, 96, 0)],
    "select-n-a.json.gz": [(1497, 13, 0, 82, 0)],
    "select-n-b.json.gz": [(3058, 584, 579, 136, 0)],
}


@pytest.mark.parametrize("name", NAMES)
def test_recordings_replay_exactly(recordings: dict[str, MemoryTrace], name: str) -> None:
    report = replay(recordings[name])
    assert not report.what_if
    for device, (allocations, taken, released, final, ooms) in zip(report.devices, COUNTS[name], strict=True):
        assert (device.allocations, device.addresses_matched) == (allocations, allocations)
        assert (device.segments, device.segments_matched) == (taken, taken)
        assert (device.releases, device.releases_matched) == (released, released)
        assert (device.final_segments, device.final_segments_matched) == (final, final)
        assert (device.ooms, device.ooms_replayed) == (ooms, ooms)
        assert (device.surprises, device.unknown_frees, device.first_difference) == (0, 0, None)
        assert device.recorded == device.replayed
        assert device.exact
    assert report.exact


def test_published_peaks(recordings: dict[str, MemoryTrace]) -> None:
    (device,) = replay(recordings["gpt-2.7b-ctx128-train.json.gz"]).devices
    assert device.replayed.peak_allocated // MIB == 52_527
    assert device.replayed.peak_reserved // MIB == 58_280
    failing = replay(recordings["expandable-3gpu-oom.json.gz"]).devices[1]
    assert failing.replayed.peak_reserved // MIB == 80_302


def changed(trace: MemoryTrace, row: int, **values: int) -> MemoryTrace:
    columns = {}
    for name, value in values.items():
        columns[name] = getattr(trace, name).copy()
        columns[name][row] = value
    return dataclasses.replace(trace, **columns)


def test_a_wrong_address_is_found(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["gpt-small-forward.json.gz"]
    allocations = np.flatnonzero(trace.kind == EventKind.ALLOC)
    row = int(allocations[1000])
    report = replay(changed(trace, row, address=int(trace.address[row]) + (1 << 40)))
    (device,) = report.devices
    assert not report.exact
    assert device.addresses_matched is not None
    assert device.addresses_matched < device.allocations
    assert device.first_difference is not None
    assert hex(int(trace.address[row]) + (1 << 40)) in device.first_difference


def test_a_wrong_segment_is_found(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["finetune-course.json.gz"]
    row = int(np.flatnonzero(trace.kind == EventKind.SEGMENT_ALLOC)[10])
    (device,) = replay(changed(trace, row, size=int(trace.size[row]) + 2 * MIB)).devices
    assert device.segments_matched is not None
    assert device.segments_matched < device.segments
    assert device.surprises
    assert not device.exact


def test_a_wrong_size_is_found(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["lm-course-b.json.gz"]
    row = int(np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.size > 4 * MIB))[0])
    assert not replay(changed(trace, row, size=int(trace.size[row]) + 8 * MIB)).exact


PROGRAMS: list[dict[str, Any]] = [
    {},
    {"streams": (0, 0, 7)},
    {"streams": (5,)},
    {"crossing": True},
    {"empties": True},
    {"streams": (0, 3), "crossing": True, "empties": True},
]
CONFS = ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    conf=st.sampled_from(CONFS),
    how=st.sampled_from(PROGRAMS),
    total=st.sampled_from([64 * GIB, GIB]),
)
def test_any_program_from_the_start(seed: int, conf: str, how: dict[str, Any], total: int) -> None:
    recorder = Recorder(conf=conf, total_bytes=total)
    recorder.run(250, seed, **how)
    (device,) = replay(recorder.finish()).devices
    assert device.exact, device


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("how", PROGRAMS[:5])
def test_recording_switched_on_late(conf: str, how: dict[str, Any]) -> None:
    for seed in range(4):
        recorder = Recorder(conf=conf)
        recorder.recording = False
        recorder.run(300, seed, **how)
        recorder.recording = True
        recorder.run(300, seed + 1, **how)
        (device,) = replay(recorder.finish()).devices
        assert device.exact, device


def test_ring_buffer_that_lost_its_beginning(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["gpt-2.7b-ctx128-train.json.gz"]
    for start in (5_000, 9_999, 15_000):
        columns = {name: getattr(trace, name)[start:] for name in ("kind", "device", "address", "size")}
        builder = TraceBuilder(meta=trace.meta)
        for kind, device, address, size in zip(*(columns[name].tolist() for name in columns), strict=True):
            builder.append(kind, device=device, address=address, size=size)
        (found,) = replay(builder.finish(trace.devices)).devices
        assert found.exact, found


def test_frees_of_blocks_that_nothing_is_known_of() -> None:
    recorder = Recorder()
    builder = recorder.builder
    builder.append(EventKind.FREE_REQUESTED, device=0, address=1 << 30, size=700)
    builder.append(EventKind.FREE_COMPLETED, device=0, address=1 << 30, size=700)
    builder.append(EventKind.FREE_COMPLETED, device=0, address=1 << 31, size=700)
    recorder.run(50, seed=1)
    (device,) = replay(recorder.finish()).devices
    assert device.unknown_frees == 2, "a request with its completion, and a completion alone"
    assert device.exact


@pytest.mark.parametrize("seed", range(12))
def test_damaged_recordings_end_in_a_report_or_a_reason(
    recordings: dict[str, MemoryTrace], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    trace = recordings[["select-n-b.json.gz", "expandable-3gpu-oom.json.gz"][seed % 2]]
    rows = chance.integers(0, len(trace), 60)
    columns = {}
    for name, values in (
        ("kind", chance.integers(0, 9, 20)),
        ("address", chance.integers(0, 1 << 47, 20)),
        ("size", chance.integers(0, 1 << 44, 20)),
    ):
        columns[name] = getattr(trace, name).copy()
        columns[name][rows[:20] if name == "kind" else rows[20:40]] = values
    damaged = dataclasses.replace(trace, **columns)
    for config in (None, AllocatorConfig(max_split_size=32 * MIB)):
        try:
            report = replay(damaged, config)
        except TraceFormatError as error:
            assert "contradicts itself" in error.message
        else:
            assert not (config is None and report.exact)


def test_several_devices_and_streams(tmp_path: Any) -> None:
    first = Recorder()
    second = Recorder(device=1, builder=first.builder, conf="")
    for seed in range(20):
        first.run(20, seed, streams=(0, 4))
        second.run(10, seed + 50, streams=(8,), crossing=True)
    trace = first.builder.finish((first.described(), second.described()))
    assert replay(trace).exact
    write_snapshot(trace, tmp_path / "two.pickle")
    assert replay(read_any(tmp_path / "two.pickle")).exact


def test_private_pools() -> None:
    recorder = Recorder()
    recorder.run(60, seed=1)
    recorder.allocator.begin_pool((0, 1))
    graph = [recorder.allocator.malloc(size) for size in SIZES]
    recorder.allocator.end_pool()
    recorder.run(60, seed=2)
    recorder.allocator.free(graph[3])
    recorder.run(60, seed=3)
    (device,) = replay(recorder.finish()).devices
    assert device.addresses_matched == device.allocations
    assert device.final_segments_matched == device.final_segments
    assert device.recorded == device.replayed


def test_a_private_pool_may_lie_where_another_segment_was() -> None:
    recorder = Recorder()
    allocator = recorder.allocator
    allocator.free(allocator.malloc(70 * MIB))
    parts = [allocator.malloc(size * MIB) for size in (25, 25, 15)]  # of the segment that is cached
    for part in parts:
        allocator.free(part)
    allocator.empty_cache()
    allocator.begin_pool((0, 1))
    shorter = allocator.malloc(30 * MIB)
    allocator.end_pool()
    recorder.run(60, seed=1)
    assert parts[1] < shorter < parts[2], "one part lies where the pool's segment is, the others do not"
    (device,) = replay(recorder.finish()).devices
    assert device.addresses_matched == device.allocations
    assert device.recorded == device.replayed


def test_trace_without_events_or_segments() -> None:
    report = replay(TraceBuilder().finish())
    assert report.devices == ()
    assert report.exact


def test_what_if_on_a_card_of_its_own(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["gpt-2.7b-ctx256-train.json.gz"]
    report = replay(trace, AllocatorConfig(expandable_segments=True))
    (device,) = report.devices
    assert report.what_if
    assert device.addresses_matched is None
    assert device.recorded == replay(trace).devices[0].recorded
    assert device.recorded.peak_reserved - device.replayed.peak_reserved > 4 * GIB
    assert device.ooms_replayed == 0


def test_what_if_with_the_recorded_settings_is_a_plain_replay(recordings: dict[str, MemoryTrace]) -> None:
    trace = recordings["expandable-3gpu-oom.json.gz"]
    assert replay(trace, AllocatorConfig(expandable_segments=True)).exact


def test_what_if_knows_the_size_of_a_card_that_ran_out(recordings: dict[str, MemoryTrace]) -> None:
    device = replay(recordings["expandable-3gpu-oom.json.gz"], AllocatorConfig()).devices[1]
    assert device.total_bytes == 84_202_749_952 + 95_682_560
    assert device.replayed.peak_reserved <= device.total_bytes
    assert device.ooms_replayed > device.ooms == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), conf=st.sampled_from(CONFS), how=st.sampled_from(PROGRAMS))
def test_restored_allocator_equals_the_original(seed: int, conf: str, how: dict[str, Any]) -> None:
    recorder = Recorder(conf=conf)
    recorder.run(200, seed, **how)
    original = recorder.allocator
    segments = original.segments()
    driver = Driver(64 * GIB)
    again = CachingAllocator(driver, config=original.config)
    restore(again, segments)
    assert again.segments() == segments
    now, then = again.memory_stats_flat(), original.memory_stats_flat()
    assert {key: value for key, value in now.items() if key.endswith(".current")} == {
        key: value for key, value in then.items() if key.endswith(".current")
    }


def test_only_a_fresh_allocator_can_be_restored() -> None:
    recorder = Recorder()
    recorder.run(20, seed=1)
    with pytest.raises(ValueError, match="not used yet"):
        restore(recorder.allocator, recorder.allocator.segments())
