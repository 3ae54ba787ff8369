"""Joint peaks of several curves, shifted or not, against brute force; curves of traces against figures by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.synthetic import fitting_run
from vramfit.analysis import Measure
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.live_curves import (
    TICKS,
    LiveCurve,
    best_shifts,
    run_curve,
    started_peak,
    step_curve,
    stepped_peak,
)

LENGTH = 24


@st.composite
def curves(draw: st.DrawFn, length: int | None = LENGTH) -> LiveCurve:
    whole = length or draw(st.integers(1, 30))
    later = draw(st.sets(st.integers(1, whole - 1), max_size=6)) if whole > 1 else set()
    times = np.array([0, *sorted(later)], dtype=np.int64)
    values = draw(st.lists(st.integers(0, 100), min_size=len(times), max_size=len(times)))
    return LiveCurve(
        times=times,
        bytes=np.array(values, dtype=np.int64),
        rows=np.arange(len(times), dtype=np.int64),
        length=whole,
    )


def value_at(curve: LiveCurve, moment: int) -> int:
    """The last value that began by then."""
    return next(
        int(value)
        for time, value in reversed(list(zip(curve.times.tolist(), curve.bytes.tolist(), strict=True)))
        if time <= moment
    )


@given(st.lists(st.tuples(curves(None), st.integers(0, 40)), min_size=1, max_size=4))
def test_runs_that_start_at_their_times_hold_what_adding_up_every_moment_gives(
    given_: list[tuple[LiveCurve, int]],
) -> None:
    found = started_peak([one for one, _ in given_], [start for _, start in given_])
    sums = [
        sum(value_at(one, t - start) for one, start in given_ if start <= t < start + one.length)
        for t in range(80)
    ]
    assert found.bytes == max(sums)
    assert sums[found.moment] == found.bytes == sum(found.parts)
    for (one, _), part, row in zip(given_, found.parts, found.rows, strict=True):
        assert part == (0 if row < 0 else one.bytes[row])


@given(st.lists(st.tuples(curves(), st.integers(0, LENGTH - 1)), min_size=1, max_size=4))
def test_steps_that_repeat_hold_what_adding_up_every_moment_gives(
    given_: list[tuple[LiveCurve, int]],
) -> None:
    found = stepped_peak([one for one, _ in given_], [shift for _, shift in given_])
    sums = [sum(value_at(one, (t - shift) % LENGTH) for one, shift in given_) for t in range(LENGTH)]
    assert found.bytes == max(sums)
    assert sums[found.moment] == found.bytes


@given(curves(), curves())
def test_the_best_shift_of_two_is_that_of_all_shifts(one: LiveCurve, two: LiveCurve) -> None:
    shifts, peak = best_shifts([one, two], tries=LENGTH)
    every = [stepped_peak([one, two], [0, shift]).bytes for shift in range(LENGTH)]
    assert peak.bytes == min(every) == every[shifts[1]]
    assert shifts[0] == 0


@settings(max_examples=30)
@given(st.lists(curves(), min_size=3, max_size=4))
def test_shifts_of_more_are_never_worse_than_none_nor_below_the_largest(several: list[LiveCurve]) -> None:
    shifts, peak = best_shifts(several, tries=LENGTH)
    assert peak.bytes <= stepped_peak(several, [0] * len(several)).bytes
    assert peak.bytes == stepped_peak(several, shifts).bytes
    assert peak.bytes >= max(one.peak for one in several)


@given(curves(), st.integers(1, 60))
def test_other_units_keep_the_peak(curve: LiveCurve, parts: int) -> None:
    found = curve.divided(parts)
    assert found.peak == curve.peak
    assert found.length == parts
    assert np.all(np.diff(found.times) > 0)
    assert found.times[0] == 0


def test_long_curves_are_searched_by_the_highest_of_several_pieces() -> None:
    times = np.arange(0, TICKS, TICKS // 8192, dtype=np.int64)
    half = np.where(times < TICKS // 2, 100, 10).astype(np.int64)
    one = LiveCurve(times=times, bytes=half, rows=np.arange(len(times)), length=TICKS)
    shifts, peak = best_shifts([one, one])
    assert (shifts, peak.bytes) == ((0, TICKS // 2), 110)


def test_the_curve_of_a_run_is_that_of_its_device() -> None:
    trace = fitting_run().trace
    curve = run_curve(trace)
    assert curve.peak == DeviceTimeline.of(trace).curves.peak(Measure.ALLOCATED)
    assert np.array_equal(DeviceTimeline.of(trace).curves.allocated[curve.rows[1:]], curve.bytes[1:])


def test_the_last_whole_step_is_taken() -> None:
    trace = fitting_run().trace
    curve = step_curve(trace)
    assert curve is not None
    numbers = {trace.phases[trace.phase[row]].split("/")[0] for row in curve.rows[1:].tolist()}
    assert len(numbers) == 1
    assert curve.peak <= run_curve(trace).peak
