import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import fragmentation_cases as cases
from analysis.fragmentation_cases import CASES, Case
from analysis.synthetic import no_room_run
from analysis.test_against_allocator import STEPS, Metered
from vramfit.allocator import AllocatorConfig
from vramfit.analysis import (
    CauseKind,
    Fit,
    Measure,
    OomVerdict,
    RemedyKind,
    WhatIf,
    causes,
    curves,
    lifetimes,
)
from vramfit.report import render
from vramfit.trace import CapacitySource, EventKind, MemoryTrace, TraceBuilder, read_any, replay
from vramfit.units import GIB, MIB, parse_bytes

BESIDE_LIVE_BLOCKS = (
    CauseKind.LONG_LIVED_IN_HOLE,
    CauseKind.INTERLEAVED,
    CauseKind.PAGE_EDGES,
    CauseKind.CACHED,
    CauseKind.OTHER_STREAM,
    CauseKind.OTHER_POOL,
)
"""Of free memory that may lie beside live blocks."""
RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.json.gz"))


def peak_reserved(trace: MemoryTrace) -> int:
    return curves(trace, lifetimes(trace)).peak(Measure.RESERVED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_known_cause_is_found_and_its_remedy_lowers_reserved(case: Case) -> None:
    trace = case.make()
    assert replay(trace).exact
    found = causes(trace)
    assert found.main is not None
    assert found.main.kind is case.cause
    remedy = found.main.remedies[0]
    assert remedy.kind is case.remedy
    before = peak_reserved(trace)
    if remedy.alloc_conf is not None:
        assert remedy.baseline == before
        assert remedy.helps
        (again,) = replay(trace, AllocatorConfig.parse(remedy.alloc_conf)).devices
        assert again.replayed.peak_reserved == remedy.peak_reserved
        assert again.replayed.peak_reserved < before
    else:
        assert case.cured is not None
    if case.cured is not None:
        assert peak_reserved(case.cured()) < before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_causes_account_for_every_byte(case: Case) -> None:
    found = causes(case.make(), proven=False)
    assert sum(cause.bytes for cause in found.causes) == found.fragmentation.reserved - found.requested


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".json")[0])
def test_the_causes_of_recordings_account_for_every_byte(path: Path) -> None:
    trace = read_any(path)
    for device in sorted(set(trace.device.tolist())):
        found = causes(trace, device, proven=False)
        free = [cause for cause in found.causes if cause.kind is not CauseKind.LIVE_MEMORY]
        assert sum(cause.bytes for cause in free) == found.fragmentation.reserved - found.requested
        assert sum(pin.pinned for pin in found.pins) <= found.fragmentation.reserved


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:30", "roundup_power2_divisions:4"]),
    st.floats(0, 1),
)
def test_the_causes_of_any_moment_account_for_every_byte(
    steps: list[tuple[str, int, int]], conf: str, share: float
) -> None:
    metered = Metered(conf)
    metered.builder.meta["alloc_conf"] = conf
    metered.take(steps)
    trace = metered.finish(with_segments=True)
    for row in (None, round(share * len(trace)) - 1):
        found = causes(trace, row=row, proven=False)
        free = [cause for cause in found.causes if cause.kind is not CauseKind.LIVE_MEMORY]
        assert sum(cause.bytes for cause in free) == found.fragmentation.reserved - found.requested
        pinned = sum(pin.pinned for pin in found.pins)
        assert pinned <= found.fragmentation.reserved - found.fragmentation.occupied
        if found.oom is not None and found.oom.reproduced:
            assert found.oom.largest_request < found.oom.requested


def test_a_recorded_mismatch_of_streams() -> None:
    found = causes(read_any(next(path for path in RECORDINGS if "select-n-b" in path.name)))
    assert found.main is not None
    assert found.main.kind is CauseKind.OTHER_STREAM
    assert found.main.bytes == 5_028_267_008
    assert "would have served" in found.main.evidence
    assert found.capacity.source is CapacitySource.RETRIES


def test_the_recorded_out_of_memory_is_no_fragmentation() -> None:
    trace = read_any(next(path for path in RECORDINGS if "expandable" in path.name))
    found = causes(trace, 1)
    assert found.main is not None
    assert found.main.kind is CauseKind.LIVE_MEMORY
    assert [remedy.kind for remedy in found.main.remedies] == [
        RemedyKind.SPREAD,
        RemedyKind.HOLD_LESS,
        RemedyKind.SMALLER_REQUEST,
    ]
    assert "GPU 0 holds 7.54 GiB and GPU 2 holds 18.84 GiB" in found.main.evidence
    oom = found.oom
    assert oom is not None
    assert oom.reproduced
    assert oom.verdict is OomVerdict.NOT_AT_ALL
    assert oom.requested == 5_308_694_528
    assert oom.capacity.bytes == 84_202_749_952 + 95_682_560
    packed = oom.answer(WhatIf.DEFRAGMENTED)
    assert packed is not None
    assert packed.margin == oom.capacity.bytes - 84_063_358_976 - oom.requested
    recorded = oom.answer(WhatIf.AS_RECORDED)
    assert recorded is not None
    assert recorded.fit is Fit.MISSES
    assert oom.answer(WhatIf.EXPANDABLE_SEGMENTS) is None  # they were on
    assert 0 < oom.largest_request < 100 * MIB


@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (cases.oom_of_holes, OomVerdict.EXPANDABLE_SEGMENTS),
        (cases.oom_of_alternating_blocks, OomVerdict.DEFRAGMENTED),
        (cases.oom_of_live_memory, OomVerdict.NOT_AT_ALL),
        (cases.oom_of_rounding, OomVerdict.DEFAULT_SETTINGS),
    ],
)
def test_what_would_have_served_a_request_that_failed(make: object, verdict: OomVerdict) -> None:
    trace = make()  # type: ignore[operator]
    found = causes(trace)
    oom = found.oom
    assert oom is not None
    assert trace.kind[found.moment.row] == EventKind.OOM
    assert oom.reproduced
    assert oom.verdict is verdict
    for answer in oom.answers:
        assert (answer.margin >= 0) == (answer.fit is Fit.FITS)
    assert (found.causes[0].kind is CauseKind.LIVE_MEMORY) == (verdict is OomVerdict.NOT_AT_ALL)


def test_by_how_much_each_answer_misses() -> None:
    oom = causes(cases.oom_of_alternating_blocks()).oom
    assert oom is not None
    margins = {answer.what: answer.margin // MIB for answer in oom.answers}
    assert margins == {
        WhatIf.AS_RECORDED: -80,
        WhatIf.EMPTY_CACHE: -80,
        WhatIf.EXPANDABLE_SEGMENTS: -80,
        WhatIf.DEFRAGMENTED: 120,
    }
    assert oom.largest_request == 20 * MIB


def test_a_card_without_room_for_anything_needs_to_be_larger() -> None:
    trace = no_room_run().trace
    found = causes(trace)
    assert (found.capacity.bytes, found.capacity.source) == (0, CapacitySource.CARD)
    assert found.oom is not None
    assert found.oom.verdict is OomVerdict.NOT_AT_ALL
    assert found.oom.reproduced
    assert found.main is not None
    assert found.main.evidence.startswith("the CUDA context takes all of the card")
    assert [remedy.kind for remedy in found.main.remedies] == [RemedyKind.LARGER_CARD]
    assert "at most 0 B" not in render(found, width=100)
    (device,) = replay(trace).devices
    assert (device.ooms, device.ooms_replayed) == (1, 1)


def test_which_blocks_pin_which_segments_and_how_that_came() -> None:
    found = causes(cases.checkpoint_in_a_step())
    (pin,) = [pin for pin in found.pins if pin.in_holes]
    assert (pin.group.tensor, pin.phase, pin.group.line) == (
        "copy of weight",
        "step 1/checkpoint",
        cases.Frame("/home/ada/train.py", 30, "main"),
    )
    assert (pin.group.count, pin.in_holes) == (20, 7)  # three to a segment of 40 MiB: 7 lie beside a gap
    worst = found.segments[0]
    assert worst.taken_for is not None
    assert (worst.taken_for.tensor, worst.taken_for.phase) == ("activation", "step 0/forward")
    assert worst.last_freed_phase == "step 1/checkpoint"
    assert all(holder.freed is None for holder in worst.pins)
    assert worst.gone > 0


def test_the_rest_of_the_newest_segment_has_no_culprit() -> None:
    program = cases.Program()
    program.take(6 * MIB)  # of a segment of 20 MiB
    found = causes(program.finish(), proven=False)
    assert [(cause.kind, cause.bytes) for cause in found.causes] == [(CauseKind.SEGMENT_REST, 14 * MIB)]
    assert found.pins == found.segments == ()


def test_the_culprits_of_a_recording_pin_no_more_than_their_causes() -> None:
    found = causes(read_any(next(path for path in RECORDINGS if "eor-nn" in path.name)), proven=False)
    assert CauseKind.SEGMENT_REST in {cause.kind for cause in found.causes}
    pinned = sum(cause.bytes for cause in found.causes if cause.kind in BESIDE_LIVE_BLOCKS)
    assert sum(pin.pinned for pin in found.pins) <= pinned


def test_each_cause_names_what_lies_beside_its_own_ranges() -> None:
    found = causes(cases.two_streams_with_gaps(), proven=False)
    assert found.pins[0].group.tensor == "side"
    cause = found.cause(CauseKind.INTERLEAVED)
    assert cause is not None
    assert cause.evidence.endswith("the most, 40.00 MiB, beside main ×10 made in build")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".json")[0])
def test_no_block_lies_beside_more_than_its_cause_has(path: Path) -> None:
    trace = read_any(path)
    for device in sorted(set(trace.device.tolist())):
        for cause in causes(trace, device, proven=False).causes:
            beside = re.search(r"; the most, ([0-9.]+ \wi?B), beside", cause.evidence)
            assert beside is None or parse_bytes(beside[1]) <= cause.bytes * 1.01


def test_what_could_still_be_served() -> None:
    found = causes(cases.equal_segments())
    assert found.largest.from_cache == 20 * MIB
    # 80 GiB less the 900 MiB that are alive; all else can be given back.
    assert found.largest.after_release == 80 * GIB - 900 * MIB
    unknown = read_any(next(path for path in RECORDINGS if "gpt-small" in path.name))
    assert causes(unknown, proven=False).largest.after_release is None


def test_any_moment_can_be_asked_for() -> None:
    trace = cases.interleaved()
    assert causes(trace, row=-1).causes == ()
    assert causes(trace, row=0).moment.row == 0
    with pytest.raises(IndexError, match="has no event 100000"):
        causes(trace, row=100_000)


def test_nothing_is_wrong_with_nothing() -> None:
    found = causes(TraceBuilder().finish())
    assert found.main is None
    assert found.request is None
    assert found.pins == found.segments == ()
