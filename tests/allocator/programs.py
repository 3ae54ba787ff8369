"""Random programs for the allocator, what has to hold after each of their steps, and a naive recount.

Each property is tried on 300 programs; with VRAMFIT_HYPOTHESIS=thorough in the environment, on 10,000.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.allocator.block import ALLOCATED, FREE, PENDING, UNMAPPED
from vramfit.units import KIB, MIB

THOROUGH = os.environ.get("VRAMFIT_HYPOTHESIS") == "thorough"

# Without a deadline: shared machines pause, and a slow example says nothing about the allocator.
many = settings(
    max_examples=10_000 if THOROUGH else 300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

STREAMS = (0, 7, 8)
POOL = (0, 1)

sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.sampled_from([512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 21 * MIB]),
    st.integers(MIB, 48 * MIB),
)
steps = st.one_of(
    st.tuples(st.just("malloc"), sizes, st.sampled_from(STREAMS)),
    st.tuples(st.just("malloc"), sizes, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 1000)),
    st.tuples(st.just("free"), st.integers(0, 1000)),
    st.tuples(st.just("record_stream"), st.integers(0, 1000), st.sampled_from(STREAMS)),
    st.tuples(st.just("process_events"), st.sampled_from(STREAMS)),
    st.tuples(st.just("complete_free"), st.integers(0, 1000)),
    st.tuples(st.just("synchronize")),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("begin_pool")),
    st.tuples(st.just("end_pool")),
    st.tuples(st.just("release_pool")),
    st.tuples(st.just("reset_peak")),
    st.tuples(st.just("reset_accumulated")),
)
programs = st.lists(steps, max_size=60)
plain_programs = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), sizes, st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=120,
)
configs = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    max_split_size=st.sampled_from([None, None, 20 * MIB, 24 * MIB]),
    max_non_split_rounding=st.sampled_from([20 * MIB, 32 * MIB]),
    large_segment_size=st.sampled_from([20 * MIB, 12 * MIB, 32 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.2, 0.8]),
    roundup_power2_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (8, 8, 4, 2) + (1,) * 12]),
    per_process_memory_fraction=st.sampled_from([1.0, 1.0, 0.5]),
    throw_on_cudamalloc_oom=st.sampled_from([False, False, True]),
)
cards = st.sampled_from([64 * MIB, 128 * MIB, 300 * MIB])

Event = tuple[AllocatorEventKind, int, int, int]


@dataclass
class Runner:
    """Runs a program, remembering what is live."""

    allocator: CachingAllocator
    live: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    capturing: bool = False
    holds: int = 0
    log: list[object] = field(default_factory=list)
    oom: OutOfMemory | None = None

    def run(self, step: tuple) -> None:
        """One step; what does not apply (nothing live, no pool) does nothing."""
        self.oom = None
        getattr(self, "_" + step[0])(*step[1:])

    def _malloc(self, size: int, stream: int) -> None:
        try:
            address = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self.oom = error
            self.log.append(str(error))
        else:
            self.live.append(address)
            self.log.append(address)

    def _free(self, which: int) -> None:
        if self.live:
            address = self.live.pop(which % len(self.live))
            self.allocator.free(address)
            self.pending.append(address)

    def _record_stream(self, which: int, stream: int) -> None:
        if self.live:
            self.allocator.record_stream(self.live[which % len(self.live)], stream)

    def _process_events(self, stream: int) -> None:
        self.allocator.process_events([stream])

    def _complete_free(self, which: int) -> None:
        if self.pending:
            self.log.append(self.allocator.complete_free(self.pending.pop(which % len(self.pending))))

    def _synchronize(self) -> None:
        self.allocator.synchronize()

    def _empty_cache(self) -> None:
        self.allocator.empty_cache()

    def _begin_pool(self) -> None:
        if not self.capturing:
            self.allocator.begin_pool(POOL)
            self.capturing = True
            self.holds += 1

    def _end_pool(self) -> None:
        if self.capturing:
            self.allocator.end_pool(POOL)
            self.capturing = False

    def _release_pool(self) -> None:
        if not self.capturing and self.holds:
            self.allocator.release_pool(POOL)
            self.holds -= 1

    def _reset_peak(self) -> None:
        self.allocator.reset_peak_stats()

    def _reset_accumulated(self) -> None:
        self.allocator.reset_accumulated_stats()


def check_structure(allocator: CachingAllocator, live: list[int]) -> None:
    """No overlap, whole segments, free neighbours merged, every free block on its shelf and nothing else."""
    blocks = allocator._blocks
    free, unmapped = Counter(), Counter()
    for address, block in blocks.items():
        assert block.address == address
        assert block.size > 0 and block.size % 512 == 0
        after = block.next
        if after is not None:
            assert after.prev is block
            assert after.address == address + block.size, "a gap or an overlap inside a segment"
            assert after.shelf is block.shelf and after.segment is block.segment
            assert not (block.state == after.state and block.state in (FREE, UNMAPPED)), "not merged"
        if block.state == FREE:
            free[id(block.shelf), block.size << 48 | address] += 1
        elif block.state == UNMAPPED:
            assert block.segment is not None
            unmapped[id(block.shelf), address] += 1
    ordered = sorted(blocks.values(), key=lambda block: block.address)
    for low, high in pairwise(ordered):
        assert low.address + low.size <= high.address, "two blocks overlap"
    pools = [allocator._small, allocator._large]
    pools += [pool for private in allocator._private.values() for pool in (private.small, private.large)]
    shelves = [shelf for pool in pools for shelf in pool.shelves.values()]
    assert free == Counter((id(shelf), key) for shelf in shelves for key in shelf.keys)
    assert unmapped == Counter((id(shelf), address) for shelf in shelves for address in shelf.unmapped)
    for shelf in shelves:
        assert shelf.keys == sorted(shelf.keys)
        assert shelf.unmapped == sorted(shelf.unmapped)
    assert sorted(a for a, b in blocks.items() if b.state == ALLOCATED) == sorted(live)


def recount(allocator: CachingAllocator) -> dict[str, int]:
    """The current figures, counted from the segments alone."""
    figures: Counter[str] = Counter()

    def add(name: str, small: bool, amount: int) -> None:
        for pool in ("all", "small_pool" if small else "large_pool"):
            figures[f"{name}.{pool}.current"] += amount

    for segment in allocator.segments():
        small = segment["segment_type"] == "small"
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        add("reserved_bytes", small, segment["total_size"])
        add("segment", small, not segment["is_expandable"])
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                add("allocation", small, 1)
                add("allocated_bytes", small, block["size"])
            if block["state"] != "inactive":
                add("active", small, 1)
                add("active_bytes", small, block["size"])
                add("requested_bytes", small, block["requested_size"])
            elif len(segment["blocks"]) > 1 and not segment["is_expandable"]:
                add("inactive_split", small, 1)
                add("inactive_split_bytes", small, block["size"])
    return figures


def check_figures(allocator: CachingAllocator) -> None:
    """The statistics equal a recount, and the driver agrees about what is taken."""
    figures = recount(allocator)
    stats = allocator.memory_stats_flat()
    for name, value in stats.items():
        if name.endswith(".current") and name.split(".")[0] not in (
            "oversize_allocations",
            "oversize_segments",
            "reserved_bytes_by_private_pools",
        ):
            assert value == figures.get(name, 0), name
            stem = name.removesuffix(".current")
            assert stats[stem + ".peak"] >= value
            assert stats[stem + ".freed"] >= 0
            assert stats[stem + ".allocated"] >= 0
    held = sum(s["total_size"] for s in allocator.segments())
    assert allocator.reserved_bytes == held
    assert allocator.driver.mapped_bytes == held
    assert allocator.driver.mapped_bytes <= allocator.driver.total_bytes
    assert sum(b.size for b in allocator._pending.values()) == (
        stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    )
    assert all(block.state == PENDING for block in allocator._pending.values())


class Ledger:
    """Peaks and accumulated figures from the events alone, as the C++ counts them."""

    def __init__(self) -> None:
        self.current: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.came: Counter[str] = Counter()
        self.went: Counter[str] = Counter()

    def __call__(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        kinds = AllocatorEventKind
        if kind == kinds.ALLOC:
            self._change("allocation", 1)
            self._change("active", 1)
            self._change("requested_bytes", size)
        elif kind == kinds.FREE_REQUESTED:
            self._change("allocation", -1)
        elif kind == kinds.FREE_COMPLETED:
            self._change("active", -1)
            self._change("requested_bytes", -size)
        elif kind in (kinds.SEGMENT_ALLOC, kinds.SEGMENT_MAP):
            self._change("reserved_bytes", size)
            self.came["num_device_alloc"] += 1
            if kind == kinds.SEGMENT_ALLOC:
                self._change("segment", 1)
        elif kind in (kinds.SEGMENT_FREE, kinds.SEGMENT_UNMAP):
            self._change("reserved_bytes", -size)
            self.came["num_device_free"] += 1
            if kind == kinds.SEGMENT_FREE:
                self._change("segment", -1)
        elif kind == kinds.OOM:
            self.came["num_ooms"] += 1

    def _change(self, name: str, amount: int) -> None:
        self.current[name] += amount
        self.peak[name] = max(self.peak[name], self.current[name])
        (self.came if amount > 0 else self.went)[name] += abs(amount)

    def reset_peak(self) -> None:
        self.peak = Counter(self.current)

    def reset_accumulated(self) -> None:
        self.came, self.went = Counter(), Counter()

    def check(self, stats: dict[str, int]) -> None:
        for name in ("allocation", "active", "requested_bytes", "reserved_bytes", "segment"):
            found = [stats[f"{name}.all.{part}"] for part in ("current", "peak", "allocated", "freed")]
            assert found == [self.current[name], self.peak[name], self.came[name], self.went[name]], name
        for name in ("num_device_alloc", "num_device_free", "num_ooms"):
            assert stats[name] == self.came[name], name


def new_allocator(card: int, config: AllocatorConfig, on_event: object = None) -> CachingAllocator:
    return CachingAllocator(Driver(card), config=config, on_event=on_event)
