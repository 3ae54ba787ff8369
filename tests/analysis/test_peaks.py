"""Local peaks against a plain reading of the curve, and what would have to go against a run without it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.synthetic import MODEL, TRAIN, Recorder, fitting_run, gpt_training
from vramfit.analysis import Measure, curves, lifetimes, peak, peaks
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.units import MIB

LINE = Frame(TRAIN, 7, "main")


def steps(*heights: int, kept: int = 0) -> MemoryTrace:
    """Iterations that each climb to a height in MiB and fall back."""
    recorder = Recorder()
    if kept:
        recorder.alloc("", kept * MIB, Category.PARAMETERS)
    for number, height in enumerate(heights):
        recorder.phase(f"step {number}/forward")
        blocks = [
            recorder.alloc(f"float32[{part}]", MIB, Category.ACTIVATIONS, op="aten.mm.default", stack=(LINE,))
            for part in range(height)
        ]
        recorder.phase(f"step {number}/backward")
        for block in blocks:
            recorder.free(block)
    return recorder.finish()


def test_the_highest_comes_first_and_is_the_peak() -> None:
    trace = fitting_run().trace
    found = peaks(trace)
    assert found[0].row == peak(trace).moment.row
    assert found[0].allocated == peak(trace).allocated == found[0].breakdown.allocated
    assert [one.allocated for one in found] == sorted((one.allocated for one in found), reverse=True)


def test_alike_peaks_are_one_with_their_number() -> None:
    (found,) = peaks(steps(4, 9, 6, 9))
    assert (found.allocated, found.count) == (9 * MIB, 4)
    assert found.breakdown.moment.phase == "step 1/forward"


def test_how_far_a_peak_stands_out() -> None:
    recorder = Recorder()
    recorder.alloc("", 10 * MIB, Category.PARAMETERS)
    for line, height in ((1, 30), (2, 50), (3, 20)):
        block = recorder.alloc("", height * MIB, Category.ACTIVATIONS, stack=(Frame(MODEL, line, "f"),))
        recorder.free(block)
    found = peaks(recorder.finish())
    assert [(one.allocated // MIB, one.prominence // MIB) for one in found] == [(60, 60), (40, 30), (30, 20)]


def test_small_ripples_are_no_peaks() -> None:
    trace = steps(100, 4, kept=0)
    assert len(peaks(trace, prominence=0.05)) == 1
    assert peaks(trace, prominence=0.04)[0].count == 2


def test_what_was_there_before_can_be_the_peak() -> None:
    whole = steps(5)
    half = len(whole) // 3 * 2
    tail = _from(whole, half)
    (found,) = peaks(tail)
    assert found.row == -1
    assert found.allocated == peak(tail).allocated > 0


def test_nothing_has_no_peak() -> None:
    assert peaks(Recorder().finish()) == ()


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="share is"):
        peaks(steps(3), share=share)
    with pytest.raises(ValueError, match="prominence is"):
        peaks(steps(3), prominence=share)


def test_a_size_is_a_size() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        peaks(steps(3), size=0)


class TestRemoval:
    def test_a_size_may_be_wanted(self) -> None:
        found = peaks(steps(6, 8), size=2 * MIB)[0].removal
        assert (found.wanted, found.share) == (2 * MIB, 0.25)
        whole = peaks(steps(6, 8), size=100 * MIB)[0].removal
        assert (whole.wanted, whole.share, whole.freed) == (8 * MIB, 1.0, 8 * MIB)

    def test_the_fewest_groups_and_of_these_the_smallest(self) -> None:
        recorder = Recorder()
        for size in (50, 30, 12, 8):
            recorder.alloc(f"uint8[{size}]", size * MIB, Category.ACTIVATIONS)
        trace = recorder.finish()
        taken = {
            share: [g.tensor for g in peaks(trace, share=share)[0].removal.groups]
            for share in (0.1, 0.3, 0.6)
        }
        assert taken == {0.1: ["uint8[12]"], 0.3: ["uint8[30]"], 0.6: ["uint8[50]", "uint8[12]"]}

    def test_another_moment_may_stand_higher_then(self) -> None:
        recorder = Recorder()
        one = recorder.alloc("a", 100 * MIB, Category.ACTIVATIONS, stack=(Frame(MODEL, 1, "f"),))
        recorder.free(one)
        two = recorder.alloc("b", 90 * MIB, Category.ACTIVATIONS, stack=(Frame(MODEL, 2, "f"),))
        recorder.free(two)
        removal = peaks(recorder.finish(), share=0.5)[0].removal
        assert removal.freed == 100 * MIB
        assert removal.run_peak == 90 * MIB

    def test_the_same_tensors_go_everywhere(self) -> None:
        removal = peaks(steps(6, 8), share=1.0)[0].removal
        assert removal.freed == 8 * MIB
        assert removal.run_peak == 0

    def test_all_of_a_training_step(self) -> None:
        recorder = Recorder()
        gpt_training(recorder)
        trace = recorder.finish()
        found = peaks(trace, share=0.25)[0]
        assert found.removal.wanted == -(-found.allocated // 4)
        assert found.removal.freed >= found.removal.wanted
        assert (
            found.removal.run_peak <= found.allocated - found.removal.freed
            or found.removal.run_row != found.row
        )


@given(st.lists(st.integers(min_value=-6, max_value=6), min_size=1, max_size=60))
def test_prominences_are_those_of_their_definition(moves: list[int]) -> None:
    recorder, held = Recorder(), []
    for line, move in enumerate(moves):
        for _ in range(abs(move)):
            if move > 0:
                held.append(recorder.alloc("", MIB, Category.OTHER, stack=(Frame(MODEL, line, "f"),)))
            elif held:
                recorder.free(held.pop())
    trace = recorder.finish()
    found = {one.row: one.prominence for one in peaks(trace, most=1000, prominence=1e-9)}
    lives = lifetimes(trace)
    curve = curves(trace, lives)
    assert curve.start[Measure.ALLOCATED] == 0
    for row, prominence in found.items():
        assert prominence == _prominence(curve.allocated, row)
    expected = {row for row in range(len(trace)) if _is_peak(curve.allocated, row)}
    assert set(found) == expected


def test_long_traces_keep_their_highest_peak() -> None:
    generator = np.random.default_rng(0)
    recorder, held = Recorder(), []
    for line in range(12_000):
        if held and generator.random() < 0.5:
            recorder.free(held.pop(int(generator.integers(len(held)))))
        else:
            size = int(generator.integers(1, 9)) * MIB
            held.append(recorder.alloc("", size, Category.OTHER, stack=(Frame(MODEL, line, "f"),)))
    trace = recorder.finish()
    assert len(trace) > 1 << 14
    found = peaks(trace, most=1000, prominence=0.2)
    lives = lifetimes(trace)
    curve = curves(trace, lives).allocated
    for one in found:
        assert one.allocated == curve[one.row]
        assert one.prominence == _prominence(curve, one.row)
    assert found[0].row == peak(trace).moment.row


def _prominence(values: np.ndarray, row: int) -> int:
    """Height above the higher of the two lowest points towards a higher value (or the ends, where nothing is held)."""
    sides = []
    for side in (values[row::-1], values[row:]):
        higher = np.flatnonzero(side > values[row])
        sides.append(int(side[: higher[0]].min()) if len(higher) else 0)
    return int(values[row]) - max(sides)


def _is_peak(values: np.ndarray, row: int) -> bool:
    """Higher than the event before it, and than the first other value after it; held at the end counts."""
    if values[row] <= (values[row - 1] if row else 0):
        return False
    other = np.flatnonzero(values[row:] != values[row])
    return not len(other) or bool(values[row + other[0]] < values[row])


def _from(trace: MemoryTrace, row: int) -> MemoryTrace:
    from dataclasses import replace

    from vramfit.trace.model import COLUMNS

    return replace(trace, **{name: getattr(trace, name)[row:] for name in COLUMNS})
