import pytest

from vramfit.stress.stability import Round, RoundOutcome, Trend, stability
from vramfit.units import MIB


def one(size: int, reserved: int, allocated: int = 10, *, outcome: RoundOutcome = RoundOutcome.FITS) -> Round:
    """A round; reserved and what is left allocated in MiB."""
    return Round(
        sizes={"batch_size": size},
        outcome=outcome,
        peak_allocated=100 * MIB,
        peak_reserved=reserved * MIB,
        allocated=allocated * MIB,
        reserved=reserved * MIB,
    )


def cycles(*reserved: int, allocated: tuple[int, ...] = ()) -> list[Round]:
    """Cycles of two sizes, the larger of which reserves so much."""
    left = allocated or (10,) * len(reserved)
    return [
        one(size, peak if size == 2 else 100, kept)
        for peak, kept in zip(reserved, left, strict=True)
        for size in (1, 2)
    ]


@pytest.mark.parametrize(
    ("reserved", "trend"),
    [
        ((110, 200, 200, 200), Trend.STEADY),  # warm-up in the first cycle
        ((110, 120, 140, 160), Trend.RESERVED_GROWS),
        ((110, 120, 140, 160, 180, 200), Trend.RESERVED_GROWS),
        ((110, 120, 140, 160, 160, 160), Trend.STEADY),  # a plateau
        ((110, 120, 200, 150, 210, 160), Trend.STEADY),  # up and down
        ((110, 120, 120, 121), Trend.STEADY),  # less than a segment
        ((110, 120, 140), Trend.UNKNOWN),
    ],
)
def test_trends_of_reserved_memory(reserved: tuple[int, ...], trend: Trend) -> None:
    found = stability(cycles(*reserved), 2)
    assert found.trend is trend
    assert found.reserved == tuple(peak * MIB for peak in reserved)


def test_growth_of_what_stays_allocated_is_told_first() -> None:
    found = stability(cycles(110, 120, 130, 140, allocated=(10, 11, 12, 13)), 2)
    assert found.trend is Trend.ALLOCATED_GROWS
    assert found.growth_per_cycle == 1 * MIB


def test_growth_per_cycle_leaves_the_first_cycle_out() -> None:
    assert stability(cycles(10, 100, 130, 160), 2).growth_per_cycle == 30 * MIB


def test_rounds_that_only_history_made_fail() -> None:
    rounds = cycles(110, 120, 120, 120)
    rounds[5] = one(2, 120, outcome=RoundOutcome.OUT_OF_MEMORY)
    rounds[7] = one(3, 120, outcome=RoundOutcome.OUT_OF_MEMORY)
    found = stability(rounds, 2)
    assert (found.ooms, found.ooms_by_history) == (2, 1)
    assert found.trend is Trend.RUNS_OUT
    assert found.overhead == pytest.approx(0.2)
    assert stability(rounds, 2, tried=[one(3, 120)]).ooms_by_history == 2


def test_an_unfinished_cycle_is_left_out() -> None:
    assert stability(cycles(110, 120, 120, 120)[:-1], 2).cycles == 3
    assert stability([], 3).trend is Trend.UNKNOWN


def test_rounds_that_fail_because_tensors_are_kept_are_no_fragmentation() -> None:
    """What is kept (30 MiB) is more than the allocator had free (20 MiB) in the round that failed."""
    rounds = cycles(110, 120, 120, 120, allocated=(10, 20, 30, 40))
    rounds[7] = one(2, 120, 40, outcome=RoundOutcome.OUT_OF_MEMORY)
    assert stability(rounds, 2).trend is Trend.ALLOCATED_GROWS
    rounds = cycles(110, 120, 120, 120, allocated=(10, 20, 30, 30))
    rounds[7] = one(2, 120, 30, outcome=RoundOutcome.OUT_OF_MEMORY)
    assert stability(rounds, 2).trend is Trend.RUNS_OUT
