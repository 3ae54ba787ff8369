from vramfit.analysis import fragmentation, lifetimes
from vramfit.trace import EventKind, MemoryTrace, TraceBuilder, TraceDevice
from vramfit.units import MIB

BASE = 0x7F0000000000
SEGMENT, FREED, MAP, UNMAP = (
    EventKind.SEGMENT_ALLOC,
    EventKind.SEGMENT_FREE,
    EventKind.SEGMENT_MAP,
    EventKind.SEGMENT_UNMAP,
)


def trace_of(
    *events: tuple[EventKind, int, int], segments: tuple[dict[str, object], ...] = ()
) -> MemoryTrace:
    """Events of (kind, MiB from the base, MiB)."""
    described = TraceDevice(index=0, name="card", total_bytes=0, context_bytes=0, segments=segments)
    builder = TraceBuilder(devices=(described,), meta={})
    for kind, offset, size in events:
        block = size * MIB if kind is EventKind.ALLOC else 0
        builder.append(kind, device=0, address=BASE + offset * MIB, size=size * MIB, block=block)
    return builder.finish()


def at_end(trace: MemoryTrace) -> tuple[int, int, int, int, int]:
    """Reserved, occupied, in gaps, releasable and the largest free range, in MiB."""
    found = fragmentation(trace, lifetimes(trace), len(trace) - 1)
    figures = (
        found.reserved,
        found.occupied,
        found.inactive_split,
        found.releasable,
        found.largest_free,
    )
    assert all(figure % MIB == 0 for figure in figures)
    reserved, occupied, split, releasable, largest = (figure // MIB for figure in figures)
    return reserved, occupied, split, releasable, largest


def test_gaps_beside_live_blocks_are_fragmentation() -> None:
    trace = trace_of((SEGMENT, 0, 20), (EventKind.ALLOC, 2, 4), (EventKind.ALLOC, 10, 4), (SEGMENT, 20, 20))
    assert at_end(trace) == (40, 8, 12, 20, 20)


def test_adjacent_segments_are_not_one() -> None:
    trace = trace_of((SEGMENT, 0, 20), (SEGMENT, 20, 20), (EventKind.ALLOC, 0, 10), (EventKind.ALLOC, 30, 10))
    assert at_end(trace) == (40, 20, 20, 0, 10)


def test_a_released_segment_is_gone() -> None:
    trace = trace_of((SEGMENT, 0, 20), (SEGMENT, 20, 20), (EventKind.ALLOC, 0, 20), (FREED, 20, 20))
    assert at_end(trace) == (20, 20, 0, 0, 0)


def test_mapped_pages_join_and_give_back_whole_pages() -> None:
    # Pages of the large pool are of 20 MiB, those of the small one of 2 MiB.
    trace = trace_of((MAP, 0, 40), (MAP, 40, 20), (EventKind.ALLOC, 0, 5), (EventKind.ALLOC, 59, 1))
    assert at_end(trace) == (60, 6, 34, 20, 54)
    trace = trace_of((MAP, 0, 2), (MAP, 2, 2), (MAP, 4, 2), (EventKind.ALLOC, 0, 1), (EventKind.ALLOC, 5, 1))
    assert at_end(trace) == (6, 2, 2, 2, 4)


def test_unmapped_pages_part_a_range() -> None:
    trace = trace_of((MAP, 0, 40), (EventKind.ALLOC, 0, 10), (EventKind.ALLOC, 30, 10), (UNMAP, 10, 20))
    assert at_end(trace) == (20, 20, 0, 0, 0)


def test_a_block_that_waits_for_a_stream_still_occupies() -> None:
    trace = trace_of(
        (SEGMENT, 0, 20),
        (EventKind.ALLOC, 0, 10),
        (EventKind.ALLOC, 10, 10),
        (EventKind.FREE_REQUESTED, 10, 10),
        (EventKind.FREE_COMPLETED, 10, 10),
        (EventKind.FREE_REQUESTED, 0, 10),
    )
    assert at_end(trace) == (20, 10, 10, 0, 10)


def test_segments_from_before_the_trace_are_walked_back_from_its_end() -> None:
    final = tuple(
        {
            "address": BASE + offset * MIB,
            "total_size": 20 * MIB,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": expandable,
            "blocks": [{"address": BASE + offset * MIB, "size": 20 * MIB, "state": "inactive"}],
        }
        for offset, expandable in ((0, False), (20, False), (100, True))
    )
    trace = trace_of((SEGMENT, 20, 20), (FREED, 40, 20), (MAP, 100, 10), segments=final)
    lives = lifetimes(trace)
    reserved = [fragmentation(trace, lives, row).reserved // MIB for row in (-1, 0, 1, 2)]
    assert reserved == [50, 70, 50, 60]


def test_nothing_reserved_is_nothing() -> None:
    assert at_end(trace_of()) == (0, 0, 0, 0, 0)
    trace = trace_of()
    assert fragmentation(trace, lifetimes(trace), -1).ratio == 0.0
