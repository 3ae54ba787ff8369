"""The local peaks of a trace: when memory stood high, what was alive then, and what would have to go to lower it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Curves, Ints, Lifetimes, Measure, running
from vramfit.analysis._phases import split_name
from vramfit.analysis.breakdown import Breakdown, at, moment
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import Grouping, TensorGroup
from vramfit.trace import MemoryTrace

_PROMINENCE = 0.05
"""A local peak stands out by this share of the highest, unless the caller says else."""
_SHARE = 0.1
_STRETCHES = 1 << 12
"""Longer traces are cut into so many stretches, of which the highest and the lowest event are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """The fewest groups of tensors without which a peak would be lower by what is wanted. Bytes throughout.

    Attributes:
        share: by which the peak should be lower, 0.1 for ten percent.
        wanted: the bytes of that.
        groups: what would have to go, largest first.
        freed: bytes of the groups at the peak, at least ``wanted``.
        run_peak: what the highest point of the whole run would then be: the same tensors are gone everywhere, and
            another moment may stand higher than this one.
        run_row: the event of that highest point; -1 before the first.
    """

    share: float
    wanted: int
    groups: tuple[TensorGroup, ...]
    freed: int
    run_peak: int
    run_row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPeak:
    """A moment at which the allocated bytes were higher than around it.

    Attributes:
        prominence: by how many bytes it stands out from what lies between it and any higher peak.
        count: how many local peaks of the run are of this kind: in the same part of the iterations, or, where the
            trace names no phases, at the same operator and line. This is the highest of them, the first of equals.
        removal: what would have to go to lower it.
    """

    allocated: int
    prominence: int
    count: int
    breakdown: Breakdown
    removal: Removal

    @property
    def row(self) -> int:
        """The event of the trace."""
        return self.breakdown.moment.row


def peaks(
    trace: MemoryTrace,
    device: int = 0,
    *,
    most: int = 5,
    prominence: float = _PROMINENCE,
    share: float = _SHARE,
    size: int | None = None,
    tensors: int = 20,
) -> tuple[LocalPeak, ...]:
    """The local peaks of allocated bytes, highest first; one for each kind.

    Traces of more than some thousand events are looked at in stretches: of two peaks within one stretch (1/4096 of
    the events) only the higher is seen. The highest peak of all is always the first of the result.

    Args:
        most: at most so many.
        prominence: share of the highest peak by which a peak has to stand out.
        share: by which each peak should be lower, for `Removal`.
        size: the same in bytes instead; of a peak with less than that all of it.
        tensors: how many groups of tensors each breakdown keeps.

    Raises:
        ValueError: a share is not between 0 and 1, or the size not positive.
    """
    for name, value in (("prominence", prominence), ("share", share)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}, not a share between 0 and 1")
    if size is not None and size <= 0:
        raise ValueError(f"size is {size}, not a number of bytes above 0")
    timeline = DeviceTimeline.of(trace, device)
    found = _kinds(trace, _standing_out(timeline.curves, prominence))[:most]
    removals = _Removals(trace, timeline.lives, share, size)
    return tuple(
        LocalPeak(
            allocated=one.allocated,
            prominence=one.prominence,
            count=count,
            breakdown=at(trace, one.row, device, tensors=tensors),
            removal=removals.at(one),
        )
        for one, count in found
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FoundPeak:
    """A local peak of the curve."""

    row: int
    allocated: int
    prominence: int


def _standing_out(bytes_over: Curves, prominence: float) -> list[_FoundPeak]:
    """The local peaks of the allocated bytes, in order of time."""
    chosen = _extremes(bytes_over.allocated)
    rows = np.concatenate([[-1], chosen])
    values = np.concatenate([[bytes_over.start[Measure.ALLOCATED]], bytes_over.allocated[chosen]])
    if not values.max():
        return []
    # A curve that ends at its highest has a peak there too.
    padded = np.concatenate([[-1], values, [-1]])
    least = max(1, prominence * int(values.max()))
    # Of a plateau its first event: there the last of its bytes was asked for.
    from scipy.signal import find_peaks  # takes a second to import, and most commands ask for no peaks

    _, told = find_peaks(padded, prominence=least, plateau_size=1)
    return [
        _FoundPeak(
            row=int(rows[left]), allocated=int(values[left]), prominence=min(int(height), int(values[left]))
        )
        for left, height in zip((told["left_edges"] - 1).tolist(), told["prominences"].tolist(), strict=True)
    ]


def _extremes(values: Ints) -> Ints:
    """The rows that matter for peaks: all of a short trace, the highest and lowest of each stretch of a long one."""
    if len(values) <= 2 * _STRETCHES:
        return np.arange(len(values), dtype=np.int64)
    starts = np.linspace(0, len(values), _STRETCHES, endpoint=False).astype(np.int64)
    lengths = np.diff(np.append(starts, len(values)))
    stretch = np.repeat(np.arange(_STRETCHES), lengths)
    rows = []
    for extreme in (np.maximum, np.minimum):
        hits = np.flatnonzero(values == np.repeat(extreme.reduceat(values, starts), lengths))
        rows.append(hits[np.unique(stretch[hits], return_index=True)[1]])
    return np.unique(np.concatenate(rows)).astype(np.int64)


def _kinds(trace: MemoryTrace, found: list[_FoundPeak]) -> list[tuple[_FoundPeak, int]]:
    """The highest peak of each kind, with how many are of its kind; highest first."""
    kinds: dict[tuple[object, ...], list[_FoundPeak]] = {}
    for one in found:
        then = moment(trace, one.row)
        key = (split_name(then.phase)[1],) if then.phase else (then.op, then.line)
        kinds.setdefault(key, []).append(one)
    highest = [
        (max(alike, key=lambda one: (one.allocated, -one.row)), len(alike)) for alike in kinds.values()
    ]
    return sorted(highest, key=lambda one: (-one[0].allocated, one[0].row))


class _Removals:
    """Finds what would have to go, for one peak after the other."""

    def __init__(self, trace: MemoryTrace, lives: Lifetimes, share: float, size: int | None) -> None:
        self.lives = lives
        self.share, self.size = share, size
        self.grouping = Grouping.of(trace, lives, np.arange(len(lives.born), dtype=np.int64))

    def at(self, peak: _FoundPeak) -> Removal:
        """What would have to go to lower this peak by the share, or the size."""
        lives = self.lives
        if self.size is None:
            share, wanted = self.share, math.ceil(self.share * peak.allocated)
        else:
            wanted = min(self.size, peak.allocated)
            share = wanted / peak.allocated
        alive = (lives.born <= peak.row) & (peak.row < lives.freed)
        chosen = _fewest(self.grouping.with_members(alive), wanted)
        gone = np.zeros(len(lives.born), dtype=np.bool_)
        for _, key in chosen:
            gone |= self.grouping.alike(key)
        left, start = running(lives.born[~gone], lives.freed[~gone], lives.block[~gone], lives.rows)
        stays = not len(left) or int(left.max()) < start
        return Removal(
            share=share,
            wanted=wanted,
            groups=tuple(group for group, _ in chosen),
            freed=sum(group.total_bytes for group, _ in chosen),
            run_peak=start if stays else int(left.max()),
            run_row=-1 if stays else int(left.argmax()),
        )


def _fewest(groups: list[tuple[TensorGroup, Ints]], wanted: int) -> list[tuple[TensorGroup, Ints]]:
    """The fewest groups (sorted by bytes, largest first) that hold ``wanted`` bytes; of these those with least."""
    chosen: list[tuple[TensorGroup, Ints]] = []
    missing = wanted
    for position, (group, _) in enumerate(groups):
        if group.total_bytes >= missing:
            enough = [one for one in groups[position:] if one[0].total_bytes >= missing]
            return [*chosen, enough[-1]]
        chosen.append(groups[position])
        missing -= group.total_bytes
    return chosen
