"""Segments, blocks and gaps of a moment are those of the allocator that wrote the trace."""

from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.test_against_allocator import STEPS, Metered
from vramfit.analysis import lifetimes
from vramfit.analysis.occupancy import held_segments, occupancy
from vramfit.trace import EventKind, TraceBuilder
from vramfit.units import MIB


@settings(max_examples=80, deadline=None)
@given(STEPS, st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:30"]), st.booleans())
def test_the_end_of_a_trace_is_what_the_allocator_holds(
    steps: list[tuple[str, int, int]], conf: str, with_segments: bool
) -> None:
    metered = Metered(conf)
    metered.builder.meta["alloc_conf"] = conf
    metered.take(steps)
    segments = metered.allocator.segments()
    trace = metered.finish(with_segments=with_segments)
    held = occupancy(trace, lifetimes(trace), len(trace) - 1)
    assert [
        (one.address, one.size, one.stream, "small" if one.small else "large", one.expandable)
        for one in held.segments
    ] == [
        (one["address"], one["total_size"], one["stream"], one["segment_type"], one["is_expandable"])
        for one in segments
    ]
    free = [
        (block["address"], block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    assert [(gap.address, gap.size) for gap in held.gaps] == free
    for segment, blocks in zip(segments, held.blocks, strict=True):
        assert len(blocks) == sum(block["state"] != "inactive" for block in segment["blocks"])


def test_rows_tell_when_a_segment_was_taken_and_last_grew() -> None:
    builder = TraceBuilder()
    for kind, offset, size in (
        (EventKind.SEGMENT_ALLOC, 0, 20),
        (EventKind.SEGMENT_MAP, 100, 20),
        (EventKind.SEGMENT_MAP, 120, 40),
        (EventKind.SEGMENT_MAP, 160, 2),
    ):
        builder.append(kind, device=0, address=(1 << 40) + offset * MIB, size=size * MIB)
    whole, large, small = held_segments(builder.finish(), 0, 3)
    assert (whole.born, whole.newest, whole.page) == (0, 0, 0)
    assert (large.size, large.born, large.newest, large.page) == (60 * MIB, 1, 2, 20 * MIB)
    assert (small.size, small.born, small.page) == (2 * MIB, 3, 2 * MIB)
