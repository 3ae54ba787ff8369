from pathlib import Path

import pytest
from hypothesis import given, settings

from analysis.test_against_allocator import STEPS, Metered
from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver
from vramfit.trace import CapacitySource, MemoryTrace, Rehearsal, TraceBuilder, TraceDevice, read_any
from vramfit.units import MIB

RECORDINGS = Path(__file__).parents[1] / "data" / "traces"


class Tape:
    """An allocator whose events are written down, on a card that the trace does not name."""

    def __init__(self, total: int, conf: str = "") -> None:
        self.builder = TraceBuilder(meta={"alloc_conf": conf})
        self.allocator = CachingAllocator(
            Driver(total), config=AllocatorConfig.parse(conf), on_event=self.note
        )

    def note(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        block = 0
        if kind == AllocatorEventKind.ALLOC:
            block = self.allocator.block_size(address)
        self.builder.append(int(kind), device=0, address=address, size=size, block=block, stream=stream)

    def finish(self) -> MemoryTrace:
        return self.builder.finish((TraceDevice(index=0, segments=tuple(self.allocator.segments())),))


def test_a_cache_given_back_for_a_request_tells_the_capacity() -> None:
    tape = Tape(100 * MIB)
    kept = tape.allocator.malloc(40 * MIB)
    for size in (30, 50, 30, 50):  # each finds a cached segment of the other size in its way
        tape.allocator.free(tape.allocator.malloc(size * MIB))
    tape.allocator.free(kept)
    rehearsal = Rehearsal(tape.finish(), 0)
    assert rehearsal.capacity.source is CapacitySource.RETRIES
    assert rehearsal.capacity.bytes == 90 * MIB
    assert rehearsal.capacity.below == 120 * MIB
    played = rehearsal.play(AllocatorConfig())
    assert played.peaks == rehearsal.recorded
    assert (played.retries, played.ooms) == (1, 0)


def test_a_cache_that_the_program_emptied_is_emptied_again() -> None:
    tape = Tape(1000 * MIB)
    tape.allocator.free(tape.allocator.malloc(500 * MIB))
    tape.allocator.empty_cache()
    for size in (30, 50):
        tape.allocator.free(tape.allocator.malloc(size * MIB))
        tape.allocator.empty_cache()
    tape.allocator.malloc(40 * MIB)
    rehearsal = Rehearsal(tape.finish(), 0)
    assert rehearsal.capacity.source is CapacitySource.UNKNOWN
    player = rehearsal.what_if(AllocatorConfig())
    assert player.allocator.reserved_bytes == 40 * MIB
    assert player.counts() == (4, 3, 0)


def test_a_replay_is_broken_off_above_a_bound() -> None:
    tape = Tape(1 << 40)
    for _ in range(5000):
        tape.allocator.malloc(20 * MIB)
    rehearsal = Rehearsal(tape.finish(), 0)
    ticks: list[float] = []
    part = rehearsal.play(AllocatorConfig(), stop_above=100 * MIB, tick=ticks.append)
    assert not part.complete
    assert 100 * MIB < part.peaks.peak_reserved < 5000 * 20 * MIB
    whole = rehearsal.play(AllocatorConfig(), stop_above=5000 * 20 * MIB, tick=ticks.append)
    assert whole.complete
    assert whole.peaks.peak_reserved == 5000 * 20 * MIB
    assert ticks[-1] == 1.0


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("select-n-b", CapacitySource.RETRIES),
        ("gpt-small-forward", CapacitySource.UNKNOWN),
        ("gpt-2.7b-ctx256-train", CapacitySource.UNKNOWN),  # its releases are the program's own
    ],
)
def test_capacity_of_recordings(name: str, source: CapacitySource) -> None:
    rehearsal = Rehearsal(read_any(RECORDINGS / f"{name}.json.gz"), 0)
    assert rehearsal.capacity.source is source
    if source is CapacitySource.RETRIES:
        assert rehearsal.play(rehearsal.config).peaks.peak_reserved == rehearsal.recorded.peak_reserved


def test_the_failure_itself_is_left_to_the_caller() -> None:
    rehearsal = Rehearsal(read_any(RECORDINGS / "expandable-3gpu-oom.json.gz"), 1)
    assert rehearsal.capacity.source is CapacitySource.OOM
    player = rehearsal.until_oom(rehearsal.config, 0)
    assert player.failed is not None
    assert player.failed.size == 5_308_694_528
    assert player.allocator.reserved_bytes >= 84_063_358_976


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_recorded_settings_on_a_fresh_card_give_the_recorded_peaks(
    steps: list[tuple[str, int, int]],
) -> None:
    """Also through retries, emptied caches, failed requests and several streams, on a card that nothing names."""
    metered = Metered("")
    metered.take(steps)
    rehearsal = Rehearsal(metered.finish(with_segments=True), 0)
    assert rehearsal.play(rehearsal.config).peaks == rehearsal.recorded
