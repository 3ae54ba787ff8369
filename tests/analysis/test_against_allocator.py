"""The analysis of a trace agrees with the statistics of the allocator that wrote it."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.analysis import Measure, curves, fragmentation, lifetimes, peak
from vramfit.trace import MemoryTrace, TraceBuilder, TraceDevice
from vramfit.trace.model import COLUMNS
from vramfit.units import KIB, MIB

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("malloc"),
            st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB)),
            st.integers(0, 1),
        ),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 100), st.just(7)),
        st.tuples(st.sampled_from(["synchronize", "empty_cache"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


class Metered:
    """An allocator on a card of 300 MiB that writes its own trace."""

    def __init__(self, settings_text: str) -> None:
        self.builder = TraceBuilder(devices=(TraceDevice(index=0),), meta={})
        self.blocks: dict[int, int] = {}
        self.allocator = CachingAllocator(
            Driver(300 * MIB), config=AllocatorConfig.parse(settings_text), on_event=self.note
        )
        self.alive: list[int] = []

    def note(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        block = 0
        if kind == AllocatorEventKind.ALLOC:
            block = self.blocks[address] = self.allocator.block_size(address)
        elif kind in (AllocatorEventKind.FREE_REQUESTED, AllocatorEventKind.FREE_COMPLETED):
            block = self.blocks[address]
        self.builder.append(int(kind), device=0, address=address, size=size, block=block, stream=stream)

    def take(self, steps: list[tuple[str, int, int]]) -> None:
        for verb, amount, stream in steps:
            if verb == "malloc":
                try:
                    self.alive.append(self.allocator.malloc(amount, stream))
                except OutOfMemory:
                    continue
            elif verb == "free" and self.alive:
                self.allocator.free(self.alive.pop(amount % len(self.alive)))
            elif verb == "record_stream" and self.alive:
                self.allocator.record_stream(self.alive[amount % len(self.alive)], stream)
            elif verb in ("synchronize", "empty_cache"):
                getattr(self.allocator, verb)()

    def finish(self, *, with_segments: bool) -> MemoryTrace:
        segments = tuple(self.allocator.segments()) if with_segments else ()
        return self.builder.finish(devices=(TraceDevice(index=0, segments=segments),))


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from(["", "expandable_segments:True"]), st.booleans())
def test_peaks_and_fragmentation_equal_the_allocators(
    steps: list[tuple[str, int, int]], conf: str, with_segments: bool
) -> None:
    metered = Metered(conf)
    metered.take(steps)
    trace, allocator = metered.finish(with_segments=with_segments), metered.allocator
    lives = lifetimes(trace)
    both = curves(trace, lives)
    assert both.peak(Measure.ALLOCATED) == peak(trace).allocated == allocator.peak_allocated_bytes
    assert both.peak(Measure.ACTIVE) == allocator.peak_active_bytes
    assert both.peak(Measure.RESERVED) == allocator.peak_reserved_bytes
    found = fragmentation(trace, lives, len(trace) - 1)
    assert found.reserved == allocator.reserved_bytes
    assert found.occupied == allocator.active_bytes
    assert found.segments == len(allocator.segments())
    free = [
        (block["size"], block["size"] == segment["total_size"])
        for segment in allocator.segments()
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    assert found.largest_free == max((size for size, _ in free), default=0)
    before = allocator.reserved_bytes
    waiting = allocator.active_bytes - allocator.allocated_bytes
    if not conf:
        assert found.releasable == sum(size for size, is_whole in free if is_whole)
        assert found.inactive_split == allocator.memory_stats_flat()["inactive_split_bytes.all.current"]
    if not waiting:  # what waits for a stream is free once the cache is emptied
        allocator.empty_cache()
        assert found.releasable == before - allocator.reserved_bytes


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from(["", "expandable_segments:True"]), st.floats(0, 1))
def test_a_recording_that_began_late_has_the_same_curves(
    steps: list[tuple[str, int, int]], conf: str, share: float
) -> None:
    metered = Metered(conf)
    metered.take(steps)
    whole = metered.finish(with_segments=True)
    cut = int(share * len(whole))
    late = replace(whole, **{name: getattr(whole, name)[cut:] for name in COLUMNS})
    lives = lifetimes(late)
    expected, found = curves(whole, lifetimes(whole)), curves(late, lives)
    for measure in Measure:
        assert np.array_equal(found.of(measure), expected.of(measure)[cut:])
        if cut:
            assert found.start[measure] == expected.of(measure)[cut - 1]
    if len(late):
        begins = fragmentation(late, lives, -1)
        assert begins.reserved == found.start[Measure.RESERVED]
        assert begins.occupied == found.start[Measure.ACTIVE]
