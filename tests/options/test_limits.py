"""How long a program may run, as users write it, and what a child and its parent tell each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.errors import UsageError
from vramfit.launch.status import (
    ChildState,
    Order,
    Status,
    StatusWriter,
    read_order,
    read_status,
    write_order,
)
from vramfit.options.limits import Limits, limits_from
from vramfit.plain import from_plain, to_plain
from vramfit.trace.outcome import End, Progress, Unit


@pytest.mark.parametrize(
    ("steps", "time", "expected"),
    [
        (None, None, Limits()),
        ("3", None, Limits(steps=3)),
        (12, None, Limits(steps=12)),
        ("steady", "90s", Limits(steady=True, seconds=90)),
        (None, "10m", Limits(seconds=600)),
        (None, "1.5h", Limits(seconds=5400)),
        (None, 20, Limits(seconds=20)),
    ],
)
def test_limits_are_read(steps: str | int | None, time: str | float | None, expected: Limits) -> None:
    assert limits_from(steps, time) == expected


@pytest.mark.parametrize("steps", ["0", "-1", "3.5", "all", "", "٣", "9" * 5000, True])
def test_steps_that_are_none(steps: str) -> None:
    with pytest.raises(UsageError, match="Give a number of steps, such as 3, or steady"):
        limits_from(steps, None)


@pytest.mark.parametrize("time", ["0s", "ten", "10d", "-5m", "", "1h30m", "9" * 400 + "h", True])
def test_times_that_are_none(time: str) -> None:
    with pytest.raises(UsageError, match="Write it as 90s, 10m or 1h"):
        limits_from(None, time)


def test_a_status_is_read_as_it_was_told(tmp_path: Path) -> None:
    assert read_status(tmp_path) == Status()
    progress = Progress(end=End.TIME, steps=1 << 40, unit=Unit.FORWARD, steady=7, module="GPTModel")
    told = Status(state=ChildState.STOPPING, own_terminate=True, progress=progress)
    StatusWriter(tmp_path).write(told)
    assert read_status(tmp_path) == told
    assert from_plain(to_plain(progress), Progress) == progress


def test_the_last_order_counts(tmp_path: Path) -> None:
    assert read_order(tmp_path) is None
    write_order(tmp_path, Order.STOP, End.TIME)
    write_order(tmp_path, Order.LEAVE, End.INTERRUPTED)
    assert read_order(tmp_path) == (Order.LEAVE, End.INTERRUPTED)
