"""Finds leaks: growth across steps, distinguished from warm-up and plateau by a statistical test, by allocating stack.

NOTE [How a leak is told]
1. The trace is cut into steps (`vramfit.analysis.steps`). The level of an allocating stack in a step is its low-water
   mark: the bytes that it held at every moment of that step. What lives for less than a step does not count, wherever
   exactly in the program the boundary lies.
2. The first third of the steps is warm-up and left out (at least the first, and never so many that fewer than six
   levels remain).
3. A stack grows where the rest of its levels reject both kinds of innocent series of `vramfit.analysis.trend`
   (fluctuation, and a running maximum of fluctuation), corrected after Holm for the number of stacks whose levels
   changed at all: a constant level can reject nothing and is no test (R. E. Tarone, Biometrics 46, 1990).
4. Growth has to go on: its last third makes at least half of its share, it is not fading (the same exact test on the
   increments, at 1 %), and it ends above all that the warm-up reached. A cache that has filled, and a sawtooth, fail.
5. Half of the level of significance (1 % in all) is kept for one test of the whole device. Where that one rejects, a
   leak there is, and the question left is who: then the stacks are held to their own p values, uncorrected.
   This is what lets five rounds suffice for a leak that a hundred lines take part in, as a kept graph is.
6. What is left once an epoch rises in few of the steps, which these tests cannot tell from a buffer that grows to the
   largest batch. But it rises at even distances, by like amounts, to the last step, and all of it stays. Three such
   rises or more are growth, too; the first two steps are left out.
7. Where the steps had to be guessed (passes of inference, a line that repeats), growth only raises suspicion, and only
   where the whole device grows while three times as much is allocated, in nearly every step: a model that is being
   loaded grows, too, and is no iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from vramfit.analysis._growth import ALPHA, LEAST_LEVELS, goes_on, warmup_of
from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes, born_column
from vramfit.analysis._steps import LEAST_STEPS, Steps, StepSource, given, steps
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import entry, fold_path, lines_of, stack_frames
from vramfit.analysis.trend import growth_p_value, holm, theil_sen
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.holders.chains import OwnerChain


class LeakVerdict(Enum):
    """What can be said of a trace."""

    GROWING = "growing"
    """Memory grows from step to step, beyond chance."""
    SUSPECTED = "suspected"
    """It grows, but the steps of the program had to be guessed."""
    NO_STEPS = "no steps"
    """Nothing in the trace repeats: what grew over equal parts of it is listed, but any program builds something."""
    STEADY = "steady"
    """No growth beyond chance."""
    TOO_FEW_STEPS = "too few steps"
    """Not enough steps to distinguish growth from chance; what grew in each of them is still listed."""


class Release(Enum):
    """What would free the memory that grows."""

    HELD = "held"
    """Something reaches it, or nothing is known."""
    COLLECTOR = "garbage collector"
    """Nothing reaches it: dead reference cycles, which only a collection frees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakPlace:
    """What allocates: a stack, and what most of its bytes are.

    Attributes:
        stack: index into the trace's table, -1 where the trace has no stack; then blocks of one size are meant.
        frames: the stack, innermost first.
        line: the user's line.
        library_line: the innermost line outside torch, where that is in another package.
        category: what most of the bytes are used for.
        op: the operator that made most.
        module: dotted path with layer numbers replaced by ``*``.
        tensor: dtype and shape of most.
        kinds: number of different (category, op, module, tensor).
    """

    stack: int
    frames: tuple[Frame, ...]
    line: Frame | None
    library_line: Frame | None
    category: Category
    op: str
    module: str
    tensor: str
    kinds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingStack:
    """A stack whose memory grows from step to step.

    Attributes:
        bytes_per_step: median slope, in bytes of blocks as torch counts them; exact where growth is constant.
        requested_per_step: median slope of the requested bytes.
        grown_bytes: growth from the end of the warm-up to the last step.
        blocks: blocks allocated since the warm-up that were alive at the last boundary.
        first_step: number of the step from which on it grows.
        p_value: the chance of such growth where there is none.
        adjusted_p: the same for any of all the stacks that were tested (Holm).
        levels: low-water mark of every step, warm-up included.
        release: what would free the memory.
        rows: rows of the trace at which those blocks were allocated, oldest first.
        every: steps from one rise to the next, where it rises at even distances only, as once an epoch; else 1.
        owners: who holds samples of it, where a live process could be asked.
    """

    place: LeakPlace
    bytes_per_step: float
    requested_per_step: float
    grown_bytes: int
    blocks: int
    first_step: int
    p_value: float
    adjusted_p: float
    levels: tuple[int, ...]
    rows: tuple[int, ...]
    release: Release = Release.HELD
    every: int = 1
    owners: tuple[OwnerChain, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledStack:
    """A stack that grew after the warm-up, and stopped or slowed down: a cache that filled.

    Attributes:
        grown_bytes: bytes by which it grew.
        last_step: number of the last step in which it grew.
    """

    place: LeakPlace
    grown_bytes: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sawtooth:
    """A stack whose blocks from three or more steps are freed all at once, one or more times.

    Reference cycles that wait for the garbage collector look so, and lists that are emptied once an epoch.

    Attributes:
        most_bytes: most that it held at a boundary.
        times: how often blocks were freed all at once.
        steps: most steps whose blocks were freed at once.
    """

    place: LeakPlace
    most_bytes: int
    times: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeakReport:
    """Whether a device's memory grows from step to step, and what makes it grow.

    Attributes:
        steps: the steps that were told apart.
        warmup: number of steps left out at the beginning.
        alpha: chance of calling growth where there is none, for the whole report.
        tested: stacks whose levels changed after the warm-up.
        p_value: p value of growth of the whole device.
        bytes_per_step: median slope of the whole device after the warm-up.
        levels: low-water mark of the device in every step, warm-up included.
        growing: stacks that grow, fastest first. With too few steps: all that grew in every one of them.
        settled: stacks that grew and stopped, largest first.
        sawteeth: stacks freed all at once, largest first.
    """

    device: int
    verdict: LeakVerdict
    steps: Steps
    warmup: int
    alpha: float
    tested: int
    p_value: float
    bytes_per_step: float
    levels: tuple[int, ...]
    growing: tuple[GrowingStack, ...]
    settled: tuple[SettledStack, ...]
    sawteeth: tuple[Sawtooth, ...]

    def __repr__(self) -> str:
        grows = f", {format_bytes(round(self.bytes_per_step))} a step" if self.leaks else ""
        return f"<LeakReport of GPU {self.device}: {self.verdict.value}{grows}, {counted(len(self.levels), 'step')}>"

    @property
    def leaks(self) -> bool:
        """Whether memory grows beyond chance, over known steps."""
        return self.verdict is LeakVerdict.GROWING

    @property
    def least_steps(self) -> int:
        """Fewest steps that distinguish growth from chance."""
        return LEAST_STEPS


_RISES = 3
"""Fewest rises at even distances that are growth,"""
_ALIKE = 2
"""the largest at most so many times as large as the smallest."""
_CHURN = 3  # where steps are guessed: bytes allocated for each byte of growth,
_CHURNING = 0.75  # in at least this share of the steps
_SHOWN_SAWTEETH = 20


def leaks(
    trace: MemoryTrace,
    device: int = 0,
    *,
    alpha: float = ALPHA,
    by: StepSource | None = None,
    boundaries: Ints | None = None,
    warmup: int | None = None,
) -> LeakReport:
    """Find what grows from step to step.

    At least `LEAST_STEPS` steps are needed (with ``boundaries`` and ``warmup`` given, six levels after the warm-up);
    with fewer the verdict says so.

    Args:
        alpha: chance of calling growth where there is none, for the whole trace.
        by: take the steps from this source; None takes the best that the trace has.
        boundaries: rows after which steps begin, ascending, instead; the last one may be given twice, so that the
            state at it counts as a level of its own.
        warmup: steps to leave out at the beginning; None leaves out a third.

    Raises:
        ValueError: ``alpha`` is not between 0 and 1, or ``warmup`` is negative.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha} is not between 0 and 1")
    if warmup is not None and warmup < 0:
        raise ValueError(f"warmup {warmup} is negative")
    found = (
        steps(trace, device, by=by) if boundaries is None else given(np.asarray(boundaries, dtype=np.int64))
    )
    return _LeakSearch(trace, device, found, alpha, warmup).report()


class _LeakSearch:
    """One search through one trace."""

    def __init__(
        self, trace: MemoryTrace, device: int, found: Steps, alpha: float, warmup: int | None
    ) -> None:
        self.trace, self.steps, self.alpha = trace, found, alpha
        timeline = DeviceTimeline.of(trace, device)
        self.lives, self.category = timeline.lives, timeline.categories
        self.count = max(0, len(found) - 1)  # levels: the last step's end is not known
        self.start = min(self.count, warmup_of(self.count) if warmup is None else warmup)
        self.keys, self.stack_of = _keys(trace, self.lives)

    def report(self) -> LeakReport:
        window = slice(self.start, None)
        everything = np.zeros(len(self.keys), dtype=np.int64)
        total = next((found for _, found in self._levels(everything, self.lives.block)), self._nothing())
        enough = self.count - self.start >= LEAST_LEVELS
        p_total = growth_p_value(total[window])
        names: list[int] = []
        series: list[Ints] = []
        for name, found in self._levels(self.keys, self.lives.block, self._crossing()):
            if np.ptp(found[window]) > 0:
                names.append(name)
                series.append(found)
        p_values = [growth_p_value(found[window]) for found in series]
        adjusted = holm(p_values)
        device_grows = enough and p_total <= self.alpha / 2 and goes_on(total, self.start)
        growing, settled, evenly = [], [], False
        for name, found, p, p_all in zip(names, series, p_values, adjusted, strict=True):
            called = p_all <= self.alpha / 2 or (device_grows and p <= self.alpha)
            every = 1 if called or not self._numbered else period(found)
            if every > 1 and (grown := self._growing(name, found, p, p_all, every)).blocks >= _RISES:
                growing.append(grown)
                evenly = True
                continue
            if not enough:
                called = len(found[window]) > 1 and bool((np.diff(found[window]) > 0).all())
            if called and (goes_on(found, self.start) if enough else True):
                growing.append(self._growing(name, found, p, p_all))
            elif called:
                settled.append(self._settled(name, found))
        verdict = self._verdict(enough, bool(growing) or device_grows, device_grows, self._churns(total))
        if evenly:
            verdict = LeakVerdict.GROWING
        if verdict is LeakVerdict.STEADY:
            growing.clear()
        rate = theil_sen(total[window], self.steps.numbers[:-1][window])
        if evenly and rate <= 0:  # most pairs of steps lie between two rises
            rate = sum(stack.bytes_per_step for stack in growing)
        growing.sort(key=lambda one: (-one.bytes_per_step, -one.grown_bytes, one.first_step))
        settled.sort(key=lambda one: -one.grown_bytes)
        return LeakReport(
            device=self.lives.device,
            verdict=verdict,
            steps=self.steps,
            warmup=self.start,
            alpha=self.alpha,
            tested=len(series),
            p_value=p_total,
            bytes_per_step=rate,
            levels=tuple(total.tolist()),
            growing=tuple(growing),
            settled=tuple(settled),
            sawteeth=self._sawteeth({one.place.stack for one in growing}),
        )

    @property
    def _numbered(self) -> bool:
        """Whether the steps are those of the program, so that a distance between them means something."""
        return self.steps.source in (StepSource.PHASES, StepSource.MARKS)

    def _verdict(self, enough: bool, grows: bool, device_grows: bool, churns: bool) -> LeakVerdict:
        if not enough:
            return LeakVerdict.TOO_FEW_STEPS
        if self.steps.source is StepSource.QUANTILES:
            return LeakVerdict.NO_STEPS
        if self.steps.source in (StepSource.PASSES, StepSource.REPEATS):
            if not device_grows:
                return LeakVerdict.STEADY
            return LeakVerdict.SUSPECTED if churns else LeakVerdict.NO_STEPS
        return LeakVerdict.GROWING if grows else LeakVerdict.STEADY

    def _churns(self, total: Ints) -> bool:
        """Whether most of what is allocated is freed again, in nearly every step: a loop, not a model being built."""
        bounds = self.steps.rows[self.start :]
        if len(bounds) < 2:
            return False
        born = np.histogram(self.lives.born, bins=bounds, weights=self.lives.block)[0]
        rises = (total[-1] - total[self.start]) / (len(bounds) - 1)
        return bool(np.mean(born >= _CHURN * rises) >= _CHURNING)

    # -- levels --------------------------------------------------------------------------------------------------

    def _nothing(self) -> Ints:
        return np.zeros(self.count, dtype=np.int64)

    def _crossing(self) -> Flags:
        """Which blocks belong to a stack that has a block alive at some boundary: no other stack has a level."""
        bounds = self.steps.rows
        crosses = np.searchsorted(bounds, self.lives.born) < np.searchsorted(bounds, self.lives.freed)
        return np.isin(self.keys, np.unique(self.keys[crosses]))

    def _levels(self, keys: Ints, amounts: Ints, keep: Flags | None = None) -> Iterator[tuple[int, Ints]]:
        """The low-water mark of each step, key by key.

        Args:
            keys: one for each block; the blocks of equal keys are summed.
        """
        chosen = np.arange(len(keys)) if keep is None else np.flatnonzero(keep)
        if not self.count or not len(chosen):
            return
        rows = np.concatenate([self.lives.born[chosen], self.lives.freed[chosen]])
        both = np.concatenate([keys[chosen], keys[chosen]])
        delta = np.concatenate([amounts[chosen], -amounts[chosen]])
        order = np.lexsort((rows, both))
        rows, both, delta = rows[order], both[order], delta[order]
        starts = np.flatnonzero(np.concatenate([[True], both[1:] != both[:-1]]))
        for start, end in zip(starts.tolist(), np.append(starts[1:], len(both)).tolist(), strict=True):
            held = np.concatenate([[0], np.cumsum(delta[start:end])])
            at = np.searchsorted(rows[start:end], self.steps.rows, side="right")  # events up to each boundary
            # reduceat gives the minimum of held[at[j] : at[j + 1]], and held[at[j]] itself where that is empty.
            lows = np.minimum.reduceat(np.append(held, 0), at)[:-1]
            yield int(both[start]), np.minimum(lows, held[at[1:]])

    # -- results -------------------------------------------------------------------------------------------------

    def _growing(self, name: int, found: Ints, p: float, p_all: float, every: int = 1) -> GrowingStack:
        start = self.start if every == 1 else 1
        window, numbers = found[start:], self.steps.numbers[:-1]
        mine = self.keys == name
        requested = next(level for _, level in self._levels(self.keys, self.lives.size, mine))
        grown = self._grown(mine, start)
        rises = np.diff(found) > 0
        first = int(np.argmax(rises[start:])) + start if rises[start:].any() else start
        while first > 0 and rises[first - 1]:  # it began before the warm-up was over
            first -= 1
        born = self.lives.born[grown]
        slope = theil_sen if every == 1 else _mean_rise
        return GrowingStack(
            place=self._place(name, grown if len(grown) else np.flatnonzero(mine)),
            bytes_per_step=slope(window, numbers[start:]),
            requested_per_step=slope(requested[start:], numbers[start:]),
            grown_bytes=int(window[-1] - window[0]),
            blocks=len(grown),
            first_step=int(numbers[first]),
            p_value=p,
            adjusted_p=p_all,
            levels=tuple(found.tolist()),
            rows=tuple(np.sort(born[born >= 0]).tolist()),
            every=every,
        )

    def _grown(self, mine: Flags, start: int) -> Ints:
        """The blocks of a stack that came after so many levels and were there at the last boundary."""
        first, last = int(self.steps.rows[start]), int(self.steps.rows[-1])
        return np.flatnonzero(
            mine & (self.lives.born > first) & (self.lives.born <= last) & (self.lives.freed > last)
        )

    def _settled(self, name: int, found: Ints) -> SettledStack:
        window = found[self.start :]
        rises = np.flatnonzero(np.diff(found) > 0)
        mine = self.keys == name
        grown = self._grown(mine, self.start)
        return SettledStack(
            place=self._place(name, grown if len(grown) else np.flatnonzero(mine)),
            grown_bytes=int(window.max() - window[0]),
            last_step=int(self.steps.numbers[rises[-1]]) if len(rises) else 0,
        )

    def _place(self, name: int, blocks: Ints) -> LeakPlace:
        """What most bytes of some blocks of one stack are."""
        trace, born = self.trace, self.lives.born[blocks]
        sums: dict[tuple[int, int, str, int], int] = {}
        for row, category, size in zip(
            born.tolist(), self.category[blocks].tolist(), self.lives.block[blocks].tolist(), strict=True
        ):
            key = (category, -1, "", -1)
            if row >= 0:
                path = fold_path(entry(trace.modules, int(trace.module[row])))
                key = (category, int(trace.op[row]), path, int(trace.tensor[row]))
            sums[key] = sums.get(key, 0) + size
        kind, op, module_path, tensor = max(sums, key=lambda one: sums[one])
        stack = int(self.stack_of[name])
        frames = stack_frames(trace, stack)
        line, library = lines_of(frames)
        return LeakPlace(
            stack=stack,
            frames=frames,
            line=line,
            library_line=library,
            category=Category(kind),
            op=entry(trace.ops, op),
            module=module_path,
            tensor=entry(trace.tensors, tensor),
            kinds=len(sums),
        )

    def _sawteeth(self, growing: set[int]) -> tuple[Sawtooth, ...]:
        """Stacks that mostly free the blocks of several steps all at once, with no allocation in between."""
        lives, bounds = self.lives, self.steps.rows
        if len(bounds) < 2:
            return ()
        birth, death = np.searchsorted(bounds, lives.born), np.searchsorted(bounds, lives.freed)
        inside = (birth < death) & (lives.freed < bounds[-1]) & (lives.born >= 0)
        allocations = np.cumsum(self.trace.kind == EventKind.ALLOC)
        found = []
        for mine in _grouped(np.flatnonzero(inside), self.keys):
            name = int(self.keys[mine[0]])
            if int(self.stack_of[name]) in growing or len(mine) < 3:
                continue
            blow = allocations[lives.freed[mine]]
            pairs = np.unique(np.stack([blow, birth[mine]]), axis=1)
            blows, spans = np.unique(pairs[0], return_counts=True)
            late = np.isin(blow, blows[spans >= 3])
            if 2 * int(lives.block[mine][late].sum()) <= int(lives.block[mine].sum()):
                continue
            found.append(
                Sawtooth(
                    place=self._place(name, mine[late]),
                    most_bytes=self._most(mine),
                    times=int((spans >= 3).sum()),
                    steps=int(spans.max()),
                )
            )
        found.sort(key=lambda one: -one.most_bytes)
        return tuple(found[:_SHOWN_SAWTEETH])

    def _most(self, blocks: Ints) -> int:
        """Most bytes of some blocks that were alive at one boundary."""
        bounds = self.steps.rows
        change = np.zeros(len(bounds) + 1, dtype=np.int64)
        np.add.at(change, np.searchsorted(bounds, self.lives.born[blocks]), self.lives.block[blocks])
        np.add.at(change, np.searchsorted(bounds, self.lives.freed[blocks]), -self.lives.block[blocks])
        return int(np.cumsum(change).max())


def period(levels: Ints) -> int:
    """Steps from one rise to the next; 1 where a series does not rise evenly. See NOTE [How a leak is told], 6."""
    later = levels[1:]
    changes = np.diff(later)
    at = np.flatnonzero(changes > 0)
    if len(at) < _RISES or (changes < 0).any():
        return 1
    gaps, rises = np.diff(at), changes[at]
    usual = float(np.median(gaps))
    slack = max(1.0, usual / 4)
    even = usual >= 2 and np.abs(gaps - usual).max() <= slack
    lasts = len(changes) - 1 - at[-1] <= usual + slack
    return round(usual) if even and lasts and rises.max() <= _ALIKE * rises.min() else 1


def _mean_rise(levels: Ints, at: Ints) -> float:
    """Bytes per step from the first rise to the last, of a series that rises evenly."""
    rises = np.flatnonzero(np.diff(levels) > 0)
    if len(rises) < 2:
        return 0.0
    first, last = int(rises[0]), int(rises[-1])
    return float(levels[last] - levels[first]) / float(at[last] - at[first])


def _grouped(blocks: Ints, keys: Ints) -> list[Ints]:
    """Split blocks by their keys."""
    if not len(blocks):
        return []
    ordered = blocks[np.argsort(keys[blocks], kind="stable")]
    return np.split(ordered, np.flatnonzero(np.diff(keys[ordered])) + 1)


def _keys(trace: MemoryTrace, lives: Lifetimes) -> tuple[Ints, Ints]:
    """What each block is grouped by, numbered from 0, and the stack of each number.

    Blocks without a stack are told apart by their size.
    """
    stack = born_column(trace.stack, lives.born)
    size = np.where(stack >= 0, 0, lives.block)
    pairs, index = np.unique(np.stack([stack, size]), axis=1, return_inverse=True)
    return index.reshape(-1).astype(np.int64), pairs[0]
