"""How far the peak of reserved memory may be off: requests replayed with their estimated sizes at other values.

NOTE [Bars of reserved memory]
By how much the peak of *allocated* bytes may be off follows from sums. That of *reserved* bytes does not: a workspace
that is larger or smaller, and gone at once, decides which free blocks are cut and which segments are taken, and so
moves the peak long before or after its own moment. So the run is replayed with every estimate at its least and at its
most, half-way to both, and with each kind of estimate at one of these levels of its own: what a library decides for
one shape it need not decide for another, and it decides for one engine or another, not for something between them.

What one choice of a library decides for many shapes (`Estimate.choice`) is off for all of them at once, so there each
choice is also replayed at either end alone. How the blocks then fit into what is free hangs on bytes that no estimate
knows: RegNetX 400MF reserves 4.8 to 5.8 MiB an image at neighbouring batches on a virtual RTX 3060, while what it
allocates hardly differs. So further replays (_SCALED) draw the choices with all sizes, and the card, up to _SCALES
smaller or larger, and count at the run's own scale. Where fragmentation is the same there, this widens nothing.

The bar holds all of these. Where there are several kinds of estimate it reaches to either side at least as far as
_SHARE and _SPANS say: by so much do trainings that others measured differ without any replay telling why. Nine in ten
are to lie within; since those that the estimates were chosen by come out better than others will, _SHARE is what 95 %
of these 81 are off by at most (benchmarks/measured_by_others.py counts how many lie within on either card). It is a
bar of what was tried and measured, not a proof. Where choices matter, _CHOSEN_SHARE takes the place of _SHARE: what
95 % of those trainings are off by at most that have such shapes, on either card; none of the RTX 4060's chose a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vramfit.allocator import OutOfMemory
from vramfit.trace.model import COLUMNS, EventKind, MemoryTrace
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.trace.replay.replaying import UNKNOWN_TOTAL, Rehearsal
from vramfit.trace.replay.steps import FREE, ReplaySteps

_TOGETHER = (-1.0, 1.0, -0.5, 0.5)
"""Levels that all estimates take in common: -1 is the least that each may be, 0 the estimate itself, 1 the most."""

_LEVELS = (0.0, *_TOGETHER)

_SHARE = 0.054
"""How far a bar of several kinds of estimate reaches at least, as a share of the peak ..."""

_CHOSEN_SHARE = 0.073
"""The same where choices decide many shapes at once ..."""

_SPANS = 2
"""... but by no more than so many times what the replays differ: where estimates hardly matter the bar stays narrow."""

_APART = (4, 24)
"""Fewest and most replays in which each kind of estimate has a level of its own."""

_SCALED = 2 / 3
"""Replays at other scales, for each that has a level of its own for each kind. See NOTE [Bars of reserved memory]."""

_SCALES = 0.08
"""Farthest of these scales from the run's own."""

_DRAWN = (-1.0, *(0.0,) * 6, 1.0)
"""Levels that choices are drawn from in these: three in four as told."""

_EVENTS = 250_000
"""Events that these replays serve in all, so that a long run is judged in a second or two."""

_LEAST = 1
"""Bytes of a request of which nothing may be left: the allocator has no request for none, and rounds this to 512."""

_UNTAKEN = 1 << 50
"""Address from which blocks lie that the run did not take: above all that a card has."""


class Estimate(NamedTuple):
    """One request whose size is an estimate.

    Attributes:
        row: of the request in the trace; where none was made, the row before which it would have been made.
        below: bytes by which it may be smaller.
        above: bytes by which it may be larger.
        kind: those of one kind are off by the same share: one library decides them for the same op on the same shapes.
        spare: its kernel does without where it does not fit.
        taken: the request was made; otherwise the estimate was that nothing is needed.
        choice: of a library, which decides several kinds at once, so that they are off the same way; empty for none.
    """

    row: int
    device: int
    below: int
    above: int
    kind: int = 0
    spare: bool = False
    taken: bool = True
    choice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedBar:
    """How far estimates let a device's peak of reserved memory be off.

    Attributes:
        below: bytes by which it may be lower.
        above: bytes by which it may be higher.
        serves: a request that failed is served at some values of the estimates.
        allocated_below: bytes by which the peak of allocated memory was lower in these replays. It counts what blocks
            have beyond their requests, so other sizes before the peak move it, too.
        allocated_above: bytes by which it was higher.
    """

    below: int = 0
    above: int = 0
    serves: bool = False
    allocated_below: int = 0
    allocated_above: int = 0


NO_BAR = ReservedBar()
"""The bar of a device without estimates."""


def reserved_bar(trace: MemoryTrace, device: int, estimates: Sequence[Estimate]) -> ReservedBar:
    """Replay a device's requests with their estimated sizes at both ends and in between.

    A card that has no room then gives its cache back first, as the allocator does. Where even that is not enough, the
    peak is that on a card without a limit, so that the bar reaches beyond the card.

    Args:
        estimates: of all devices, each by its row in the trace.

    Raises:
        TraceFormatError: the trace contradicts itself.
    """
    mine = [estimate for estimate in estimates if estimate.device == device]
    if not mine:
        return NO_BAR
    rehearsal = Rehearsal(_with_untaken(trace, mine), device)
    variants = _Variants(rehearsal.plan, _ordinals(trace, device, mine), mine)
    # A recording does not show all that its program did, so the variants are compared with a replay of the same kind.
    plain = Rehearsal(trace, device).what_if(rehearsal.config)
    told, serves = plain.allocator.peak_reserved_bytes, False
    peaks, allocated = [told], [_allocated(plain)]
    for levels in variants.levels():
        plan, spare = variants.plan(levels)
        player = _played(rehearsal, plan, spare, rehearsal.capacity.known)
        serves = serves or player.ooms < plain.ooms
        if player.ooms > plain.ooms:
            player = _played(rehearsal, plan, spare, None)
        peaks.append(player.allocator.peak_reserved_bytes)
        allocated.append(_allocated(player))
    low, high = told - min(peaks), max(peaks) - told
    least = min(int(_SHARE * told), _SPANS * (low + high)) if variants.draws else 0
    chosen = [_at_scale(rehearsal, variants, levels) for levels in variants.choices_alone()]
    if chosen:
        span = max(told, *chosen) - min(told, *chosen)
        least = max(least, min(int(_CHOSEN_SHARE * told), _SPANS * span))
        chosen += [_at_scale(rehearsal, variants, *drawn) for drawn in variants.choices_drawn()]
        low, high = max(low, told - min(chosen)), max(high, max(chosen) - told)
    return ReservedBar(
        below=max(low, least),
        above=max(high, least),
        serves=serves,
        allocated_below=allocated[0] - min(allocated),
        allocated_above=max(allocated) - allocated[0],
    )


def _allocated(player: WhatIfPlayer) -> int:
    peak: int = player.allocator.memory_stats_flat()["allocated_bytes.all.peak"]
    return peak


def _at_scale(
    rehearsal: Rehearsal, variants: _Variants, levels: NDArray[np.float64], scale: float = 1.0
) -> int:
    """Peak of a replay with everything, the card included, larger by a factor, brought back to the run's scale."""
    plan, spare = variants.plan(levels, scale)
    known = rehearsal.capacity.known
    player = _played(rehearsal, plan, spare, None if known is None else int(scale * known))
    if player.ooms:
        player = _played(rehearsal, plan, spare, None)
    return int(player.allocator.peak_reserved_bytes / scale)


def _with_untaken(trace: MemoryTrace, estimates: Sequence[Estimate]) -> MemoryTrace:
    """The trace with a request and a free of each block that the run did not take."""
    untaken = [estimate for estimate in estimates if not estimate.taken]
    if not untaken:
        return trace
    before = np.repeat([estimate.row for estimate in untaken], 3)
    count = len(untaken)
    values: dict[str, NDArray[np.int64]] = {
        "kind": np.tile([EventKind.ALLOC, EventKind.FREE_REQUESTED, EventKind.FREE_COMPLETED], count),
        "device": np.full(3 * count, untaken[0].device),
        "address": np.repeat(_UNTAKEN + 512 * np.arange(count), 3),
        "size": np.full(3 * count, _LEAST),
        "block": np.full(3 * count, 512),
    }
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = getattr(trace, name)
        missing = np.full(3 * count, -1 if name in ("op", "stack", "module", "phase", "tensor") else 0)
        if name == "stream":
            missing = _streams_before(trace, untaken)
        columns[name] = np.insert(column, before, values.get(name, missing).astype(column.dtype))
    return replace(trace, **columns)


def _streams_before(trace: MemoryTrace, untaken: Sequence[Estimate]) -> NDArray[np.int64]:
    """The stream of the last request before each block that was not taken."""
    requests = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == untaken[0].device))
    if not len(requests):
        return np.zeros(3 * len(untaken), dtype=np.int64)
    last = np.searchsorted(requests, [estimate.row for estimate in untaken]) - 1
    return np.repeat(trace.stream[requests[np.maximum(last, 0)]], 3)


def _ordinals(trace: MemoryTrace, device: int, estimates: Sequence[Estimate]) -> NDArray[np.intp]:
    """The number of each estimate among the requests of the device, those that were not taken included."""
    requests = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
    rows = np.array([estimate.row for estimate in estimates])
    untaken = np.sort(rows[[not estimate.taken for estimate in estimates]])
    found = np.searchsorted(requests, rows)
    # What was not taken stands before the request of the same row.
    taken = np.array([estimate.taken for estimate in estimates])
    found += np.searchsorted(untaken, rows, side="right")
    seen: dict[int, int] = {}
    for index in np.flatnonzero(
        ~taken
    ).tolist():  # several of one row stand in the order in which they were noted
        row = int(rows[index])
        first = int(np.searchsorted(requests, row) + np.searchsorted(untaken, row))
        found[index] = first + seen.get(row, 0)
        seen[row] = seen.get(row, 0) + 1
    return found


class _Variants:
    """The steps of a replay with the estimated sizes at other levels.

    Attributes:
        draws: how many replays have a level of its own for each kind of estimate.
    """

    def __init__(self, plan: ReplaySteps, ordinals: NDArray[np.intp], estimates: Sequence[Estimate]) -> None:
        self._plan = plan
        self._estimates = estimates
        steps, specials = _requests(plan)
        self._steps = [steps[ordinal] for ordinal in ordinals.tolist()]
        self._specials = [specials.get(step) for step in self._steps]
        self._told = [self._size(index) for index in range(len(estimates))]
        self._spare = frozenset(
            step for step, estimate in zip(self._steps, estimates, strict=True) if estimate.spare
        )
        kinds, self._kinds = np.unique([estimate.kind for estimate in estimates], return_inverse=True)
        self._count = len(kinds)
        fewest, most = _APART
        enough = max(fewest, min(most, _EVENTS // max(1, len(plan.sizes))))
        self.draws = enough if self._count > 1 else 0
        self._choices = self._by_choice()

    def _by_choice(self) -> list[NDArray[np.intp]]:
        """The kinds that each choice decides, those first that move most bytes."""
        moved: dict[str, int] = {}
        kinds: dict[str, set[int]] = {}
        for kind, estimate in zip(self._kinds.tolist(), self._estimates, strict=True):
            if estimate.choice:
                moved[estimate.choice] = moved.get(estimate.choice, 0) + estimate.below + estimate.above
                kinds.setdefault(estimate.choice, set()).add(kind)
        order = sorted(kinds, key=lambda choice: -moved[choice])
        return [np.array(sorted(kinds[choice]), dtype=np.intp) for choice in order]

    def _size(self, index: int) -> int:
        """Bytes of an estimated request as the run made it; 0 if it was not made."""
        if not self._estimates[index].taken:
            return 0
        special = self._specials[index]
        return self._plan.sizes[self._steps[index]] if special is None else self._plan.specials[special].size

    def levels(self) -> Iterator[NDArray[np.float64]]:
        """For each replay, the level of each kind of estimate."""
        for level in _TOGETHER:
            yield np.full(self._count, level)
        chance = np.random.default_rng(0)  # the same in every run: a bar does not change by itself
        for _ in range(self.draws):
            yield chance.choice(_LEVELS, self._count)

    def choices_alone(self) -> Iterator[NDArray[np.float64]]:
        """Levels of each kind with one choice at one end, as many as the run's length allows."""
        for kinds in self._choices[: self.draws]:
            for level in (-1.0, 1.0):
                levels = np.zeros(self._count)
                levels[kinds] = level
                yield levels

    def choices_drawn(self) -> Iterator[tuple[NDArray[np.float64], float]]:
        """Levels of each kind with each choice at one end or as it is told, and the scale of all sizes."""
        chance = np.random.default_rng(0)
        for scale in 1 + np.linspace(-_SCALES, _SCALES, round(_SCALED * self.draws)):
            levels = np.zeros(self._count)
            for kinds in self._choices:
                levels[kinds] = chance.choice(_DRAWN)
            yield levels, float(scale)

    def plan(self, levels: NDArray[np.float64], scale: float = 1.0) -> tuple[ReplaySteps, frozenset[int]]:
        """The steps at these levels, and those whose kernels do without the memory where it does not fit."""
        sizes, specials = list(self._plan.sizes), list(self._plan.specials)
        for index, (estimate, level) in enumerate(
            zip(self._estimates, levels[self._kinds].tolist(), strict=True)
        ):
            change = level * (estimate.above if level > 0 else estimate.below)
            size = max(_LEAST, self._told[index] + int(change))
            special = self._specials[index]
            if special is None:
                sizes[self._steps[index]] = size
            else:
                specials[special] = specials[special]._replace(size=size)
        if scale != 1.0:
            sizes = [max(_LEAST, int(size * scale)) if size > 0 else size for size in sizes]
            specials = [
                step._replace(size=max(_LEAST, int(step.size * scale)))
                if step.kind == EventKind.ALLOC
                else step
                for step in specials
            ]
        return replace(self._plan, sizes=sizes, specials=specials), self._spare


def _requests(plan: ReplaySteps) -> tuple[list[int], Mapping[int, int]]:
    """The steps that are requests, in order, and the number of the special step for those that are one."""
    steps, special_of, special = [], {}, -1
    for step, size in enumerate(plan.sizes):
        if size > 0:
            steps.append(step)
        elif size != FREE:
            special += 1
            if plan.specials[special].kind == EventKind.ALLOC:
                special_of[step] = special
                steps.append(step)
    return steps, special_of


def _played(
    rehearsal: Rehearsal, plan: ReplaySteps, spare: frozenset[int], capacity: int | None
) -> _SparingPlayer:
    total = UNKNOWN_TOTAL if capacity is None else max(1, capacity)
    player = _SparingPlayer(plan, rehearsal.config, rehearsal.version, total)
    player.spare = spare
    rehearsal.run(player)
    return player


class _SparingPlayer(WhatIfPlayer):
    """A `WhatIfPlayer` that counts no failure where the kernel can do without the memory.

    Attributes:
        spare: steps whose requests are done without.
    """

    spare: frozenset[int] = frozenset()

    def run(self) -> None:
        """Serve all steps."""
        moved, specials, spare = self.moved, iter(self.plan.specials), self.spare
        malloc, free = self._malloc(), self.allocator.free
        for step, (address, size) in enumerate(zip(self.plan.addresses, self.plan.sizes, strict=True)):
            if size > 0:
                try:
                    moved[address] = malloc(size)
                except OutOfMemory:
                    moved[address] = 0
                    self.ooms += step not in spare
            elif size == FREE:
                try:
                    free(moved.pop(address, 0))
                except ValueError:
                    self.unknown_frees += 1
            else:
                before = self.ooms
                self.special(next(specials), address)
                if step in spare:
                    self.ooms = before
