"""What a stress test found: the memory of a workload at first, at its limit, and over rounds of changing sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from vramfit.trace import RunWarning
from vramfit.units import MIB


class RoundOutcome(Enum):
    """How a round ended."""

    FITS = "fits"
    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"
    """The workload itself raised another error at these sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One step at some sizes. Bytes throughout.

    Attributes:
        sizes: the value of each size.
        peak_allocated, peak_reserved: the most during the round.
        allocated, reserved: what was left afterwards, the batch and the gradients gone, the cache kept.
        message: why it was refused, or the text of the out-of-memory; empty where it fitted.
    """

    sizes: Mapping[str, int]
    outcome: RoundOutcome
    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int
    message: str = ""

    @property
    def fits(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome is RoundOutcome.FITS


class LimitReason(Enum):
    """What ended a ramp."""

    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"
    NOT_REACHED = "not reached"
    """The largest size that was to be tried fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How far one size can go, the others being as usual.

    Attributes:
        usual: its value in the workload.
        largest: the largest value that fits; 0 if none does.
        failing: the smallest value tried that does not; None if all did.
        reason: why that does not.
        rounds: all that was tried, in order, each on an empty cache.
    """

    name: str
    usual: int
    largest: int
    failing: int | None
    reason: LimitReason
    rounds: tuple[Round, ...]


class Trend(Enum):
    """Where memory goes over the rounds."""

    STEADY = "steady"
    RESERVED_GROWS = "reserved grows"
    """The allocator takes more and more for the same sizes: fragmentation."""
    ALLOCATED_GROWS = "allocated grows"
    """The program keeps more and more: a leak."""
    RUNS_OUT = "runs out"
    """Sizes that fit by themselves run out of memory after others, and the program kept less than the allocator wasted:
    fragmentation."""
    UNKNOWN = "unknown"
    """Too few cycles to tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """How memory behaves while sizes change. Bytes throughout.

    Attributes:
        trend: how memory develops.
        cycles: how often the sizes were repeated.
        reserved: the most that was reserved in each cycle.
        allocated: what was left allocated after each cycle.
        growth_per_cycle: of reserved bytes, or of allocated ones if those grow, over the cycles after the first.
        overhead: how far the peak of reserved bytes exceeds that of allocated bytes, as a share of the latter.
        ooms: rounds that ran out of memory.
        ooms_by_history: of those, sizes that fitted in another round or on an empty cache: only what came before made
            them fail.
    """

    trend: Trend
    cycles: int
    reserved: tuple[int, ...]
    allocated: tuple[int, ...]
    growth_per_cycle: int
    overhead: float
    ooms: int
    ooms_by_history: int


LEAST_CYCLES = 4
"""Fewest cycles that show a trend: the first is warm-up, and three more rise by chance only in one case of six."""

_NOTABLE = 2 * MIB
"""Less growth per cycle is no trend of reserved memory, which comes in segments of at least 2 MiB."""


def stability(rounds: Sequence[Round], length: int, *, tried: Iterable[Round] = ()) -> Stability:
    """Judge rounds that go through the same sizes again and again.

    A size that fits by itself and runs out after others is fragmentation, unless the program kept more over the rounds
    than the allocator wasted in those that failed. Reserved memory grows
    when it is higher in the last cycle than in the second, never falls on the way, and goes on rising in the second
    half of the cycles. What stays allocated is judged in the same way. The first cycle is warm-up.

    Args:
        rounds: the rounds in order.
        length: rounds of one cycle; an unfinished one at the end is left out.
        tried: steps on an empty cache, which tell sizes that fit by themselves.
    """
    cycles = [rounds[begin : begin + length] for begin in range(0, len(rounds) - length + 1, length)]
    reserved = tuple(max(one.peak_reserved for one in cycle) for cycle in cycles)
    allocated = tuple(cycle[-1].allocated for cycle in cycles)
    fitting = {tuple(sorted(one.sizes.items())) for one in (*rounds, *tried) if one.fits}
    failed = [one for one in rounds if one.outcome is RoundOutcome.OUT_OF_MEMORY]
    by_history = sum(tuple(sorted(one.sizes.items())) in fitting for one in failed)
    trend, series = Trend.STEADY, reserved
    if by_history and _kept(rounds) > max(one.peak_reserved - one.peak_allocated for one in failed):
        trend, series = Trend.ALLOCATED_GROWS, allocated
    elif by_history:
        trend = Trend.RUNS_OUT
    elif len(cycles) < LEAST_CYCLES:
        trend = Trend.UNKNOWN
    elif _grows(allocated, 1):
        trend, series = Trend.ALLOCATED_GROWS, allocated
    elif _grows(reserved, _NOTABLE):
        trend = Trend.RESERVED_GROWS
    growth = (series[-1] - series[1]) // (len(series) - 2) if len(series) > 2 else 0
    return Stability(
        trend=trend,
        cycles=len(cycles),
        reserved=reserved,
        allocated=allocated,
        growth_per_cycle=growth,
        overhead=_overhead(rounds),
        ooms=len(failed),
        ooms_by_history=by_history,
    )


def _kept(rounds: Sequence[Round]) -> int:
    """Bytes that were left allocated after the rounds beyond what the first one left."""
    return max(one.allocated for one in rounds) - rounds[0].allocated


def _overhead(rounds: Sequence[Round]) -> float:
    reserved = max((one.peak_reserved for one in rounds), default=0)
    allocated = max((one.peak_allocated for one in rounds), default=0)
    return (reserved - allocated) / allocated if allocated else 0.0


def _grows(series: Sequence[int], least: int) -> bool:
    """Whether a series, its first value apart, rises without falling, and still does in its second half."""
    settled = series[1:]
    steps = [after - before for before, after in pairwise(settled)]
    late = steps[len(steps) // 2 :]
    total = settled[-1] - settled[0]
    return min(steps) >= 0 and sum(step > 0 for step in late) * 2 > len(late) and total >= least * len(steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StressReport:
    """A stress test.

    Attributes:
        target: the workload, as ``FILE.py:NAME``.
        device: name of the card, or ``cpu``.
        source: what it ran on: ``virtual``, ``card`` or ``cpu``.
        total_bytes: memory for the program: of the card without its context, or the budget; 0 if unknown.
        alloc_conf: allocator settings; empty for the defaults.
        baseline: the second of two steps at the usual sizes (the first makes the optimizer's state), or the first that
            failed.
        limits: one for each size that was varied.
        cycle: the sizes that the rounds go through.
        rounds: the rounds, on a cache that is never emptied.
        stability: what the rounds show; None without rounds.
        warnings: what the virtual GPU did differently from a card.
    """

    target: str
    device: str
    source: str
    total_bytes: int
    alloc_conf: str
    torch_version: str
    sizes: Mapping[str, int]
    baseline: Round
    limits: tuple[Limit, ...]
    cycle: tuple[Mapping[str, int], ...]
    rounds: tuple[Round, ...]
    stability: Stability | None
    seconds: float
    warnings: tuple[RunWarning, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the workload fits at its usual sizes."""
        return self.baseline.fits
