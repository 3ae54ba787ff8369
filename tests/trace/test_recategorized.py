"""A block that comes to count as another category: in files, in sums, in replays and for torch's tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vramfit.analysis import Curves, curves, lifetimes, timeline
from vramfit.analysis.breakdown import at
from vramfit.analysis.requests import Requests
from vramfit.report.html.columns import device_view, origins
from vramfit.trace import (
    Category,
    EventKind,
    Frame,
    MemoryTrace,
    TraceBuilder,
    TraceDevice,
    read_any,
    snapshot_from_trace,
)
from vramfit.trace.device_events import DeviceEvents
from vramfit.trace.journal import TraceJournal

DEVICE = TraceDevice(index=0, name="card", total_bytes=1 << 30)
BASE = 1 << 32


def built(journal: TraceJournal | None = None) -> MemoryTrace:
    """A gathered block of 600 bytes that is used, beside one that stays what it is."""
    builder = TraceBuilder(devices=(DEVICE,), meta={"source": "virtual", "alloc_conf": ""}, journal=journal)
    if journal is not None:
        journal.facts(builder.meta, builder.devices)
    place = {"device": 0, "stream": 7, "address": BASE}
    builder.append(EventKind.SEGMENT_ALLOC, device=0, address=BASE, size=2 << 20, stream=7)
    ahead = builder.append(
        EventKind.ALLOC,
        **place,
        size=600,
        block=1024,
        category=Category.PREFETCH,
        op=builder.op("aten.empty"),
        stack=builder.stack((Frame("train.py", 3, "main"),)),
        module=builder.module("Net.layer"),
        tensor=builder.tensor("float32[150]"),
    )
    builder.append(EventKind.ALLOC, device=0, stream=7, address=BASE + 4096, size=512, block=512, category=4)
    builder.recategorize(ahead, Category.UNSHARDED_PARAMETERS, 99, builder.phase("step 1/forward"))
    builder.append(EventKind.FREE_REQUESTED, **place, size=600)
    builder.append(EventKind.FREE_COMPLETED, **place, size=600)
    return builder.finish()


@pytest.fixture(scope="module")
def trace() -> MemoryTrace:
    return built()


def test_it_is_told_by_an_event_with_all_that_is_known_of_the_block(trace: MemoryTrace) -> None:
    row = int(np.flatnonzero(trace.kind == EventKind.RECATEGORIZED)[0])
    for name in ("device", "stream", "address", "size", "block", "op", "stack", "module", "tensor"):
        assert getattr(trace, name)[row] == getattr(trace, name)[1], name
    assert (trace.time_us[row], trace.phases[trace.phase[row]]) == (99, "step 1/forward")


def test_sums_of_categories_change_and_their_total_does_not(trace: MemoryTrace) -> None:
    over = timeline(trace)
    assert over.categories[Category.PREFETCH].tolist() == [0, 1024, 1024, 0, 0, 0]
    assert over.categories[Category.UNSHARDED_PARAMETERS].tolist() == [0, 0, 0, 1024, 0, 0]
    assert over.allocated.tolist() == over.categories.sum(axis=0).tolist() == [0, 1024, 1536, 1536, 512, 512]
    held: Curves = curves(trace, lifetimes(trace))
    assert held.active.tolist() == [0, 1024, 1536, 1536, 1536, 512]
    one, two = at(trace, 2), at(trace, 3)
    assert (one.allocated, one.slack) == (two.allocated, two.slack) == (1536, 424)
    assert one.categories[Category.PREFETCH] == two.categories[Category.UNSHARDED_PARAMETERS] == 1024
    assert two.modules.total_bytes == 1536
    assert two.tensors[0].module == "Net.layer"


def test_the_page_draws_it_as_two_blocks(trace: MemoryTrace) -> None:
    view = device_view(trace, DEVICE, 0)
    assert (view.lives.born.tolist(), view.lives.freed.tolist()) == ([1, 2, 3], [3, 6, 4])
    assert len(origins(trace, [view]).columns["category"]) == 3


def test_it_is_no_request(trace: MemoryTrace) -> None:
    assert Requests(trace, 0).rows.tolist() == [1, 2, 4]
    assert EventKind.RECATEGORIZED not in DeviceEvents(trace, 0).kinds.tolist()


def test_files_keep_it_and_torchs_tools_see_none(trace: MemoryTrace, tmp_path: Path) -> None:
    trace.save(tmp_path / "a.vft")
    assert read_any(tmp_path / "a.vft").equals(trace)
    assert (tmp_path / "a.vft").read_bytes()[8] == 2
    actions = [entry["action"] for entry in snapshot_from_trace(trace)["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed"]
    journal = TraceJournal(tmp_path / "run.journal")
    built(journal)
    journal.close()
    read = read_any(tmp_path / "run.journal")
    assert (read.kind.tolist(), read.category.tolist()) == (trace.kind.tolist(), trace.category.tolist())


def test_a_file_without_it_is_one_that_older_readers_know(tmp_path: Path) -> None:
    builder = TraceBuilder(devices=(DEVICE,))
    builder.append(EventKind.ALLOC, device=0, size=512, category=Category.WORKSPACES)
    builder.finish().save(tmp_path / "a.vft")
    assert (tmp_path / "a.vft").read_bytes()[8] == 1
