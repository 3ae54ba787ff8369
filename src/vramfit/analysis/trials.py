"""Allocator settings worth trying for a recording, and the peaks of its requests under each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.config import NO_ROUNDUP, ROUNDUP_INTERVALS
from vramfit.allocator.core import SMALL_REQUEST, Rounding
from vramfit.analysis._lifetimes import Ints
from vramfit.trace import EventKind, MemoryTrace, Peaks, Played, Rehearsal
from vramfit.units import MIB

_LEAST_MIB = 20
"""``max_split_size_mb`` below the size of segments (20) is refused (c10/core/AllocatorConfig.cpp)."""
_COARSE_LIMITS = (64, 128, 256, 512, 1024, 2048)
_COARSE_PAGES = (12, 32, 64, 128)
_DIVISIONS = (2, 4, 8, 16)
_OWN_SIZES = 4
"""How many of the trace's own sizes become limits: those with the most bytes in total."""
_SPLIT_SHARES = (0.25, 0.5, 0.75)


class Sizes:
    """The requests of a trace by size.

    Attributes:
        sizes: distinct sizes of large requests, ascending.
        weights: bytes asked for of each size over the whole trace.
        segment: bytes of the largest segment that any request takes.
    """

    def __init__(self, rehearsals: Sequence[Rehearsal]) -> None:
        """Count the requests of some devices."""
        found = [_requests(rehearsal.trace, rehearsal.device) for rehearsal in rehearsals]
        everything = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        self.every = everything
        large = everything[everything > SMALL_REQUEST]
        self.sizes, counts = np.unique(large, return_counts=True)
        self.weights = self.sizes * counts
        largest = int(self.sizes.max(initial=0))
        self.segment = Rounding(AllocatorConfig()).segment(largest) if largest else 0

    def heaviest(self, count: int) -> list[int]:
        """Sizes that take the most bytes, in MiB rounded up."""
        order = np.argsort(-self.weights, kind="stable")[:count]
        return sorted({-(-int(size) // MIB) for size in self.sizes[order].tolist()})

    def varied_intervals(self) -> list[int]:
        """Power-of-two intervals (index as in the settings) with at least three sizes, the most bytes first."""
        interval = np.minimum(
            np.maximum(np.floor(np.log2(np.maximum(self.sizes, 1))).astype(np.int64) - 20, 0),
            ROUNDUP_INTERVALS - 1,
        )
        found = []
        for index in np.unique(interval).tolist():
            inside = interval == index
            if inside.sum() >= 3:
                found.append((int(self.weights[inside].sum()), index))
        return [index for _, index in sorted(found, reverse=True)]

    def power_of_two_share(self) -> float:
        """Share of the bytes of large requests whose size is a power of two already."""
        powers = (self.sizes & (self.sizes - 1)) == 0
        total = int(self.weights.sum())
        return float(self.weights[powers].sum() / total) if total else 0.0


def _requests(trace: MemoryTrace, device: int) -> Ints:
    found: Ints = trace.size[(trace.device == device) & (trace.kind == EventKind.ALLOC)]
    return found


def first_candidates(sizes: Sizes, *, segments: bool, limited: bool) -> Iterator[tuple[str, AllocatorConfig]]:
    """Settings of one kind each, by family.

    Args:
        segments: torch knows ``large_segment_size_mb``.
        limited: the card's memory is known, so that garbage collection can act.
    """
    plain, pages = AllocatorConfig(), AllocatorConfig(expandable_segments=True)
    yield "defaults", plain
    yield "expandable", pages
    for limit in _limits(sizes, (*_COARSE_LIMITS, *sizes.heaviest(_OWN_SIZES))):
        yield "max_split", replace(plain, max_split_size=limit * MIB)
    for divisions in _DIVISIONS:
        yield "roundup", replace(plain, roundup_power2_divisions=(divisions,) * ROUNDUP_INTERVALS)
    for table in _tables(sizes, 8):
        yield "roundup", replace(plain, roundup_power2_divisions=table)
    if segments:
        for size in _COARSE_PAGES:
            yield "segments", _with_segment(plain, size)
            yield "pages", _with_segment(pages, size)
    if limited:
        for threshold in (0.6, 0.8, 0.95):
            yield (
                "collection",
                replace(plain, garbage_collection_threshold=threshold, per_process_memory_fraction=0.999),
            )


def finer_candidates(best: dict[str, AllocatorConfig], sizes: Sizes) -> Iterator[tuple[str, AllocatorConfig]]:
    """Settings around the best of each family, and the best of several families together.

    Args:
        best: the best settings so far, by family; only of families that gained something.
    """
    yield from _around(best, sizes)
    parts = [best[family] for family in ("max_split", "roundup", "segments") if family in best]
    for index, one in enumerate(parts):
        for other in parts[index + 1 :]:
            yield "together", _merged(one, other)
    if len(parts) == 3:
        yield "together", _merged(_merged(parts[0], parts[1]), parts[2])
    expandable = [best[family] for family in ("expandable", "pages") if family in best]
    roundups = [best["roundup"]] if "roundup" in best else []
    for pages in expandable:
        for rounded in roundups:
            yield "expandable together", _merged(pages, rounded)


def _around(best: dict[str, AllocatorConfig], sizes: Sizes) -> Iterator[tuple[str, AllocatorConfig]]:
    if (chosen := best.get("max_split")) is not None and chosen.max_split_size is not None:
        middle = chosen.max_split_size // MIB
        near = {middle + round(share * middle) for share in _SPLIT_SHARES}
        near |= {middle - round(share * middle / 2) for share in _SPLIT_SHARES}
        for limit in _limits(sizes, sorted(near)):
            yield "max_split", replace(chosen, max_split_size=limit * MIB)
        for slack in (64, 256):
            yield "max_split", replace(chosen, max_non_split_rounding=slack * MIB)
    if (chosen := best.get("roundup")) is not None:
        for divisions in _DIVISIONS:
            for table in _tables(sizes, divisions):
                yield "roundup", replace(chosen, roundup_power2_divisions=table)
    for family in ("segments", "pages"):
        if (chosen := best.get(family)) is not None:
            size = chosen.large_segment_size // MIB
            for near_size in (size * 3 // 4, size * 5 // 4, size * 3 // 2):
                if near_size > 10:
                    yield family, _with_segment(chosen, near_size)


def _limits(sizes: Sizes, limits: Iterable[int]) -> list[int]:
    """Limits that torch takes and that can make a difference: no block is larger than the largest segment."""
    return [limit for limit in sorted(set(limits)) if limit >= _LEAST_MIB and limit * MIB <= sizes.segment]


def _tables(sizes: Sizes, divisions: int) -> Iterator[tuple[int, ...]]:
    """Divisions only where the trace has many sizes: in the heaviest such interval, and in all of them."""
    intervals = sizes.varied_intervals()
    for count in sorted({1, len(intervals)}):
        if chosen := intervals[:count]:
            table = list(NO_ROUNDUP)
            for index in chosen:
                table[index] = divisions
            yield tuple(table)


def _with_segment(config: AllocatorConfig, size: int) -> AllocatorConfig:
    # Without a setting of its own, max_non_split_rounding follows the segment size.
    return replace(config, large_segment_size=size * MIB, max_non_split_rounding=size * MIB)


def _merged(one: AllocatorConfig, other: AllocatorConfig) -> AllocatorConfig:
    """Both settings: what ``other`` has that is not the default, on top of ``one``."""
    plain = AllocatorConfig()
    names = (
        "max_split_size",
        "max_non_split_rounding",
        "large_segment_size",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments",
        "per_process_memory_fraction",
    )
    changes = {name: getattr(other, name) for name in names if getattr(other, name) != getattr(plain, name)}
    merged = replace(one, **changes)
    if merged.max_split_size is not None and merged.max_split_size < merged.large_segment_size:
        return replace(merged, max_split_size=merged.large_segment_size)
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The requests served under one configuration, on fresh cards. Bytes throughout.

    Attributes:
        alloc_conf: the settings; empty for the defaults.
        family: what kind of settings these are.
        peak_reserved: peak of the device that needs the most.
        peak_allocated: peak of the device that needs the most.
        devices: peaks of each device, in the order of `Tuning.devices`.
        device_allocs: calls of cudaMalloc, or of mapping pages, on all devices after the start of the trace.
        device_frees: calls of cudaFree, or of unmapping.
        retries: how often all of the cache was given back for want of memory: each waits for the card.
        complete: whether it was served to the end; otherwise it was broken off above ``peak_reserved``.
    """

    alloc_conf: str
    config: AllocatorConfig
    family: str
    peak_reserved: int
    peak_allocated: int
    devices: tuple[Peaks, ...]
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    complete: bool
    seconds: float

    @property
    def settings(self) -> int:
        """How many settings differ from the defaults."""
        return len(self.alloc_conf.split(":")) - 1 if self.alloc_conf else 0


Progress = Callable[[float, str], None]
"""Called with the share that is done (a guess that never falls) and the settings being tried."""


class TrialSearch:
    """Trials by their settings, each served once."""

    def __init__(self, rehearsals: Sequence[Rehearsal], progress: Progress | None) -> None:
        self.rehearsals = rehearsals
        self.progress = progress
        self.sizes = Sizes(rehearsals)
        self.limit: int | None = None
        self.trials: dict[str, Trial] = {}
        self.done, self.planned = 0, 1
        self._shown = 0.0

    def run(self, candidates: Sequence[tuple[str, AllocatorConfig]]) -> None:
        """Try all that have not been tried."""
        self.planned = self.done + len(candidates)
        for family, config in candidates:
            self.try_(family, config)

    def try_(self, family: str, config: AllocatorConfig) -> Trial:
        """Serve all devices under one configuration."""
        conf = config.to_string()
        if conf not in self.trials:
            self.trials[conf] = self._serve(family, conf, config)
        self.done += 1
        self._tell(0.0, conf)
        return self.trials[conf]

    def _tell(self, share: float, conf: str) -> None:
        if self.progress is not None:
            self._shown = max(self._shown, min(1.0, (self.done + share) / max(1, self.planned)))
            self.progress(self._shown, conf)

    def _serve(self, family: str, conf: str, config: AllocatorConfig) -> Trial:
        played: list[Played] = []
        count = len(self.rehearsals)
        for number, rehearsal in enumerate(self.rehearsals):

            def tick(share: float, number: int = number) -> None:
                self._tell((number + share) / count, conf)

            played.append(rehearsal.play(config, stop_above=self.limit, tick=tick))
        return Trial(
            alloc_conf=conf,
            config=config,
            family=family,
            peak_reserved=max(one.peaks.peak_reserved for one in played),
            peak_allocated=max(one.peaks.peak_allocated for one in played),
            devices=tuple(one.peaks for one in played),
            device_allocs=sum(one.device_allocs for one in played),
            device_frees=sum(one.device_frees for one in played),
            retries=sum(one.retries for one in played),
            ooms=sum(one.ooms for one in played),
            complete=all(one.complete for one in played),
            seconds=sum(one.seconds for one in played),
        )


def rank(trial: Trial) -> tuple[int, int, int, int, int, str]:
    """What trials are sorted by, the best first."""
    return (
        trial.ooms if trial.complete else 1 << 40,
        trial.peak_reserved,
        trial.retries,
        trial.device_allocs + trial.device_frees,
        trial.settings,
        trial.alloc_conf,
    )
