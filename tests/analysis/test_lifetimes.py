import numpy as np

from analysis.synthetic import fitting_run
from vramfit.analysis import Measure, curves, lifetimes, timeline
from vramfit.trace import Category, EventKind, MemoryTrace, TraceBuilder, TraceDevice
from vramfit.units import MIB

A, R, C = EventKind.ALLOC, EventKind.FREE_REQUESTED, EventKind.FREE_COMPLETED


def trace_of(
    *events: tuple[EventKind, int, int], segments: tuple[dict[str, object], ...] = ()
) -> MemoryTrace:
    """A trace of (kind, address, size) events; blocks are rounded up to 512 bytes."""
    described = TraceDevice(index=0, name="card", total_bytes=0, context_bytes=0, segments=segments)
    builder = TraceBuilder(devices=(described,), meta={})
    for kind, address, size in events:
        block = -(-size // 512) * 512 if kind is A else 0
        builder.append(kind, device=0, address=address, size=size, block=block)
    return builder.finish()


def test_an_allocation_lives_from_its_event_to_its_free() -> None:
    lives = lifetimes(trace_of((A, 4096, 100), (A, 8192, 600), (R, 4096, 100), (C, 4096, 100)))
    order = np.argsort(lives.born)
    assert lives.born[order].tolist() == [0, 1]
    assert lives.freed[order].tolist() == [2, 4]
    assert lives.completed[order].tolist() == [3, 4]
    assert lives.block[order].tolist() == [512, 1024]


def test_an_address_may_be_used_again() -> None:
    lives = lifetimes(trace_of(*[(kind, 4096, 512) for kind in (A, R, C, A, R, C, A)]))
    order = np.argsort(lives.born)
    assert lives.born[order].tolist() == [0, 3, 6]
    assert lives.freed[order].tolist() == [1, 4, 7]
    assert lives.completed[order].tolist() == [2, 5, 7]


def test_a_free_that_waits_for_a_stream_is_active_until_it_completes() -> None:
    trace = trace_of((A, 4096, 512), (R, 4096, 512), (A, 8192, 512), (C, 4096, 512))
    both = curves(trace, lifetimes(trace))
    assert both.allocated.tolist() == [512, 0, 512, 512]
    assert both.active.tolist() == [512, 512, 1024, 512]


def test_a_free_that_never_completes_stays_active_to_the_end() -> None:
    trace = trace_of((A, 4096, 512), (A, 8192, 512), (R, 8192, 512), (C, 8192, 512), (R, 4096, 512))
    both = curves(trace, lifetimes(trace))
    assert both.allocated[-1] == 0
    assert both.active[-1] == 512


def test_an_address_that_is_used_again_was_free() -> None:
    trace = trace_of((A, 4096, 512), (R, 4096, 512), (A, 4096, 512))
    assert curves(trace, lifetimes(trace)).active.tolist() == [512, 512, 512]


def test_a_free_without_allocation_was_there_before() -> None:
    trace = trace_of((A, 8192, 512), (R, 4096, 600), (C, 4096, 600))
    both = curves(trace, lifetimes(trace))
    assert both.start[Measure.ALLOCATED] == 1024
    assert both.allocated.tolist() == [1536, 512, 512]


def test_a_completion_whose_request_came_before_the_trace_was_active_only() -> None:
    trace = trace_of((C, 4096, 512), (A, 4096, 512))
    both = curves(trace, lifetimes(trace))
    assert both.allocated.tolist() == [0, 512]
    assert both.active.tolist() == [0, 512]
    assert both.start[Measure.ACTIVE] == 512


def test_blocks_of_the_final_segments_that_were_never_allocated_were_there_all_along() -> None:
    blocks = [
        {"address": 1 << 30, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
        {"address": (1 << 30) + 1024, "size": 512, "requested_size": 512, "state": "active_allocated"},
        {"address": (1 << 30) + 1536, "size": 2 * MIB - 1536, "requested_size": 0, "state": "inactive"},
    ]
    segment = {"address": 1 << 30, "total_size": 2 * MIB, "blocks": blocks}
    trace = trace_of((A, (1 << 30) + 1024, 512), segments=(segment,))
    both = curves(trace, lifetimes(trace))
    assert both.start[Measure.ALLOCATED] == 1024
    assert both.allocated.tolist() == [1536]
    assert both.reserved.tolist() == [2 * MIB]


def test_an_empty_trace_has_no_blocks() -> None:
    trace = trace_of()
    lives = lifetimes(trace)
    assert len(lives.born) == 0
    assert curves(trace, lives).peak(Measure.ALLOCATED) == 0
    assert timeline(trace).categories.shape == (len(Category), 0)


def test_a_short_timeline_keeps_the_peak() -> None:
    trace = fitting_run().trace
    whole, short = timeline(trace), timeline(trace, points=20)
    assert len(short.rows) <= 22
    assert short.allocated.max() == whole.allocated.max()
    assert (np.diff(short.rows) > 0).all()
    assert (short.categories.sum(axis=0) == short.allocated).all()
