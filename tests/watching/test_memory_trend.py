"""Trends and times to a limit on series whose slope is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from scipy.stats import theilslopes

from vramfit.units import GIB, MIB
from vramfit.watching.memory_trend import maxima, step_maxima, thinned, trend_of
from vramfit.watching.outlooks import OutlookKeeper
from vramfit.watching.watch_reading import DeviceUse, HostUse, Outlook, ProgramReading, WatchReading


def device(allocated: float, *, after: float | None = None, peak: float = 0.0, total: int = 24 * GIB):
    held = int(allocated)
    return DeviceUse(
        index=0,
        name="card",
        kind="card",
        allocated=held,
        reserved=held,
        peak=max(held, int(peak)),
        free=total - held,
        total=total,
        after_step=None if after is None else int(after),
        step_peak=None if after is None else max(int(after), int(peak)),
    )


def reading(time: float, steps: int, figures: DeviceUse) -> WatchReading:
    program = ProgramReading(time=time, pid=1, steps=steps, devices=(figures,))
    return WatchReading(time=time, elapsed=time, pid=1, programs=(program,))


def host(time: float, resident: int, available: int) -> WatchReading:
    use = HostUse(resident=resident, processes=1, available=available, total=resident + available)
    return WatchReading(time=time, elapsed=time, pid=1, host=use)


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_and_its_interval_are_those_of_scipy(seed: int) -> None:
    draw = random.Random(seed)
    points = [(float(t), 3.0 * t + draw.gauss(0, 20)) for t in range(40)]
    found = trend_of(points)
    theirs = theilslopes([y for _, y in points], [x for x, _ in points], 0.95)
    assert found is not None
    assert found.slope == pytest.approx(theirs.slope, rel=1e-12)
    # Ours takes one rank more on each side where the rank is no whole number.
    assert found.low <= theirs.low_slope and found.high >= theirs.high_slope
    assert found.high - found.low < 1.25 * (theirs.high_slope - theirs.low_slope)


def test_few_points_and_points_at_one_time_make_no_line() -> None:
    assert trend_of([(float(t), float(t)) for t in range(7)]) is None
    assert trend_of([(1.0, float(t)) for t in range(20)]) is None


def test_outliers_do_not_move_the_line() -> None:
    points = [(float(t), 5.0 * t) for t in range(40)]
    for place in range(3, 40, 5):
        points[place] = (points[place][0], 1e9)
    found = trend_of(points)
    assert found is not None and found.slope == pytest.approx(5.0, rel=0.02)


def test_maxima_are_the_tops_of_a_sawtooth_at_their_times() -> None:
    series = [(t / 10, 100.0 * (t % 10) + t) for t in range(480)]
    found = maxima(series, parts=24)
    assert len(found) == 24
    assert all(round(time * 10) % 10 == 9 for time, _ in found)


def test_the_step_that_still_runs_is_left_out() -> None:
    series = [(0.0, 5.0, 0), (1.0, 9.0, 0), (2.0, 4.0, 1), (3.0, 8.0, 1), (4.0, 99.0, 2)]
    assert step_maxima(series) == [(1.0, 9.0), (3.0, 8.0)]


def test_thinned_points_keep_both_ends() -> None:
    points = [(float(t), 0.0) for t in range(1000)]
    found = thinned(points)
    assert len(found) == 60 and found[0] == points[0] and found[-1] == points[-1]


SERIES = [
    (slope, noise, teeth, seed)
    for slope in (2 * MIB, 20 * MIB, 200 * MIB)
    for noise in (0.0, 0.3)
    for teeth in (0, 2 * GIB)
    for seed in (0, 1)
    if noise or not seed  # nothing is drawn without noise
]


@pytest.mark.parametrize(("slope", "noise", "teeth", "seed"), SERIES)
def test_time_to_the_limit_of_linear_leaks(slope: int, noise: float, teeth: int, seed: int) -> None:
    """Looks at a process that tells no steps: at two thirds of its way, within 20 % of the time that is left."""
    draw = random.Random(seed)
    begin, total = 4 * GIB, 24 * GIB
    out = (total - begin - teeth) / slope  # when the tops reach the end of the card
    keeper, every = OutlookKeeper(window=out), out / 150
    found = None
    moment = 0.0
    while moment < out * 2 / 3:
        tooth = teeth * ((moment / (out / 97)) % 1)
        held = begin + slope * moment + tooth + noise * slope * every * draw.gauss(0, 5)
        (found,) = keeper.look(reading(moment, 0, device(held)))
        moment += every
    assert found is not None and found.trend == "rising" and found.seconds is not None
    left = out - (moment - every)
    assert abs(found.seconds - left) <= 0.2 * left
    assert found.seconds_low is not None and found.seconds_low <= found.seconds


@pytest.mark.parametrize("leak", [8 * MIB, 64 * MIB])
def test_steps_make_their_sawtooth_harmless(leak: int) -> None:
    """A step's activations rise 6 GiB above what stays; the leak is what stays after a step."""
    keeper, step = OutlookKeeper(), 0.0
    total, base, height = 24 * GIB, 2 * GIB, 6 * GIB
    draw, found = random.Random(0), None
    for look in range(200):
        moment = look * 0.77  # steps take a second: looks fall anywhere in them
        step = math.floor(moment)
        after = base + leak * step
        held = after + height * draw.random()
        figures = device(held, after=after, peak=after + height)
        (found,) = keeper.look(reading(moment, step, figures))
    assert found is not None and found.seconds is not None
    left = (total - height - base - leak * step) / leak
    assert abs(found.seconds - left) <= 0.05 * left + 1.5
    assert found.per_step == leak


def test_holes_that_no_peak_has_used_are_taken_off() -> None:
    keeper, found = OutlookKeeper(), None
    leak, holes, total = 50 * MIB, 200 * MIB, 8 * GIB
    for step in range(100):
        held = GIB + leak * step
        figures = replace(
            device(held, after=held, peak=held, total=total), reserved=held + holes, free=total - held - holes
        )
        (found,) = keeper.look(reading(float(step), step, figures))
    assert found is not None
    assert found.seconds == pytest.approx((total - holes - GIB - 99 * leak) / leak)


def looks_at(leak: int, hole: int, total: int, steps: int) -> Outlook:
    """The outlook after steps of a second each that leave a leak, and a hole beside it that nothing fills."""
    keeper, found = OutlookKeeper(), None
    for step in range(steps):
        held, peak = GIB + leak * step, GIB + leak * step + 300 * MIB
        figures = device(held, after=held, peak=peak, total=total)
        reserved = peak + hole * step
        (found,) = keeper.look(
            reading(float(step), step, replace(figures, reserved=reserved, free=total - reserved))
        )
    assert found is not None
    return found


def test_holes_that_grow_with_a_leak_count_towards_the_limit() -> None:
    """A leak of 15 MiB takes a segment of 20 MiB each time."""
    leak, hole, total = 15 * MIB, 5 * MIB, 8 * GIB
    found = looks_at(leak, hole, total, 100)
    left = (total - GIB - 300 * MIB - 99 * (leak + hole)) / (leak + hole)
    assert found.seconds == pytest.approx(left)
    assert found.per_step == leak and found.per_second == pytest.approx(leak)
    assert found.seconds_low == pytest.approx(left) and found.seconds_high == pytest.approx(left)


def test_holes_without_a_leak_make_no_trend() -> None:
    """A cache that fills is given back before memory runs out."""
    assert looks_at(0, 20 * MIB, 8 * GIB, 100).trend == "none"


def test_noise_makes_no_trend_but_by_chance() -> None:
    """The interval is one of 95 %: two of forty series without a trend may show one; four are allowed."""

    def trend_of_noise(seed: int) -> str:
        draw, keeper = random.Random(seed), OutlookKeeper()
        for look in range(240):
            (found,) = keeper.look(reading(float(look), 0, device(8 * GIB + 3 * GIB * draw.random())))
        assert found is not None
        return found.trend

    assert [trend_of_noise(seed) for seed in range(40)].count("none") >= 36


def test_falling_memory_has_no_time_to_a_limit() -> None:
    keeper, found = OutlookKeeper(), None
    for look in range(60):
        (found,) = keeper.look(reading(float(look), 0, device(16 * GIB - look * 64 * MIB)))
    assert found is not None and found.trend == "falling" and found.seconds is None


def test_a_leak_that_begins_late_is_seen_within_the_window() -> None:
    keeper, found = OutlookKeeper(window=60.0), None
    for look in range(400):
        held = 8 * GIB + max(0, look - 300) * 32 * MIB
        (found,) = keeper.look(reading(float(look), 0, device(held)))
    assert found is not None and found.seconds == pytest.approx(
        (16 * GIB - 99 * 32 * MIB) / (32 * MIB), rel=0.01
    )


def test_the_host_runs_out_at_what_is_available() -> None:
    keeper, found = OutlookKeeper(), None
    for look in range(50):
        (found,) = keeper.look(host(float(look), GIB + look * 16 * MIB, 4 * GIB - look * 16 * MIB))
    assert found is not None and found.what == "host"
    assert found.seconds == pytest.approx((4 * GIB - 49 * 16 * MIB) / (16 * MIB), rel=0.01)


def test_imports_of_a_program_make_no_estimate() -> None:
    """The host rises by 40 MiB a second for 20 seconds, then stays: no look hears of an end."""
    keeper, told = OutlookKeeper(), []
    for look in range(200):
        held = GIB // 4 + min(look, 20) * 40 * MIB
        (found,) = keeper.look(host(float(look), held, 8 * GIB - held))
        told.append((found.trend, found.seconds))
    assert {trend for trend, _ in told} == {"unknown", "none"}
    assert {seconds for _, seconds in told} == {None}


def test_a_host_that_rises_until_the_first_step_makes_no_estimate() -> None:
    """A data set that takes a minute to load; training begins after it."""
    keeper, told = OutlookKeeper(), []
    for look in range(240):
        held = GIB // 4 + min(look, 60) * 40 * MIB
        stepping = max(0, look - 60)
        program = reading(float(look), stepping, device(8 * GIB, after=8 * GIB, peak=8 * GIB))
        found = keeper.look(replace(program, host=host(float(look), held, 8 * GIB - held).host))
        told += [one.trend for one in found if one.what == "host" and look > 60]
    assert set(told) == {"unknown", "none"}


def test_a_model_that_is_loaded_makes_no_estimate() -> None:
    keeper, told = OutlookKeeper(), []
    for look in range(120):
        (found,) = keeper.look(reading(float(look), 0, device(min(look, 25) * 400 * MIB)))
        told.append(found.trend)
    assert set(told) == {"unknown", "none"}
