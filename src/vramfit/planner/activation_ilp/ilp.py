"""The mixed-integer program of NOTE [The program] in solver.py, for groups of equal blocks, solved by HiGHS.

NOTE [Equal blocks]: layers that do the same are interchangeable, and a program with an unknown for each of them has as
many solutions of the same cost as they can be ordered. So equal blocks are a group with one set of unknowns: how many
of them are recomputed, how many save the results of an operation, how many go to the host. Where one waits for its
backward pass whenever another does (an earlier layer whenever a later one does), the decision that frees more is best
given to the former. Then an interval in which all blocks of a group wait is exact, and for one in which some do there
are two bounds: what they free is at most what all do, and at least their share of it. With the first the program is at
least as good as any decisions; if its decisions stay within the budget, they are the best. If not, the second gives
decisions that do, and the first how far these may be from the best.

NOTE [Results]: what autograd keeps of a recomputed block is saved, or computed again when the backward pass reads it.
For operation t let s be how many blocks save its results and y how many compute them again. Where t is kept,
s + y is at least the number of blocks that are recomputed; where another operation that reads t runs again y' times,
s + y is at least y'. So a result that nothing needs is never computed, whatever lies beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from scipy import optimize, sparse

from vramfit.planner.activation_ilp.decisions import (
    OVERHEAD_SECONDS,
    Decision,
    DecisionKind,
    IlpOptions,
    choosable,
    computed,
    computed_at,
    given,
    held_in,
    kept_bytes,
    least_saved,
    may_offload,
    passes,
    recompute_seconds,
    savable_ops,
)
from vramfit.planner.activation_ilp.transfers import alone_seconds, crossing_seconds
from vramfit.planner.step_profiler import StepInterval, StepProfile
from vramfit.techniques import ModelBlock

_LOWEST_SECONDS = 1.0
"""For the lowest peak of one combination where the host is what limits it: it is asked for often."""

_ALIKE = 0.005
"""Part of their seconds by which blocks may differ that are taken to be equal."""

_MIB = float(1 << 20)
"""Conditions are in MiB: the solver's tolerances are absolute."""

Counts = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Group:
    """Equal blocks, each of which waits whenever those after it do."""

    blocks: tuple[ModelBlock, ...]

    @property
    def first(self) -> ModelBlock:
        """One of them."""
        return self.blocks[0]

    def mean(self, values: Sequence[float]) -> float:
        """What one of them costs."""
        return sum(values) / len(values)

    def waiting(self, held: Counts, *, least: bool) -> float:
        """What an interval frees of what one block frees: of all blocks together, a bound; see NOTE [Equal blocks]."""
        counts = [float(held[block.index]) for block in self.blocks]
        return self.mean(counts) if least else max(counts)


def alone(step: StepProfile) -> tuple[Group, ...]:
    """Each block by itself."""
    return tuple(Group((block,)) for block in step.blocks if choosable(step, block))


def groups_of(step: StepProfile, *, cut: bool = False) -> tuple[Group, ...]:
    """Equal blocks together, as far as they wait for one another.

    Args:
        cut: whether the last blocks of a group are apart, which are where the peak often is: bounds are closer then.
    """
    held = held_in(step)
    chains: dict[tuple[int, ...], list[list[ModelBlock]]] = {}
    blocks = [block for block in step.blocks if choosable(step, block)]
    for block in sorted(blocks, key=lambda one: -float(held[:, one.index].sum())):
        key = (block.like, block.calls, block.kept_bytes, block.new_input_bytes, block.shared_bytes)
        known = chains.setdefault(key, [])
        waits = held[:, block.index]
        chain = next(
            (
                one
                for one in known
                if bool((held[:, one[-1].index] >= waits).all()) and _as_long(one[0], block)
            ),
            None,
        )
        if chain is None:
            known.append([block])
        else:
            chain.append(block)
    return tuple(
        Group(tuple(part))
        for known in chains.values()
        for chain in known
        for part in (_cut(chain) if cut else [chain])
        if part
    )


def _as_long(one: ModelBlock, other: ModelBlock) -> bool:
    """Whether two blocks take as long, as far as it matters."""
    ours, theirs = ((recompute_seconds(block), *passes(block)) for block in (one, other))
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in zip(ours, theirs, strict=True))


def _cut(chain: Sequence[ModelBlock]) -> list[Sequence[ModelBlock]]:
    count = len(chain)
    ends = sorted({0, count // 2, max(0, count - 2), count - 1, count})
    return [chain[begin:end] for begin, end in pairwise(ends)]


@dataclass(slots=True)
class _Columns:
    """The unknowns of the program."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)

    def add(self, cost: float, *, whole: bool = True, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.cost) - 1


@dataclass(slots=True)
class _Rows:
    """The conditions: the sum of coefficient times unknown is at most a bound."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def add(self, coefficients: Mapping[int, float], bound: float) -> None:
        row = len(self.bounds)
        self.entries += [(row, column, value) for column, value in coefficients.items()]
        self.bounds.append(bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """What the solver found.

    Attributes:
        decisions: by path; None where it found none in its time.
        infeasible: whether there are none.
        cost: in seconds, as the program has it.
        waiting: of it, that for the link.
        bound: seconds below which nothing costs.
    """

    decisions: dict[str, Decision] | None
    infeasible: bool
    cost: float = 0.0
    waiting: float = 0.0
    bound: float = 0.0
    complete: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupSizes:
    """What a recomputed block of a group has less, and more, than a plain one, in MiB.

    Attributes:
        freed: of all its results.
        results: that only it keeps: of each the operation, the size, and the unknown of saving it, if there is one.
        others: that may be saved in the place of what is computed from them: of each the size and the unknown.
        saved: of each unknown of saving, the size.
    """

    input: float
    freed: float
    results: tuple[tuple[int, float, int | None], ...]
    others: tuple[tuple[float, int], ...]
    saved: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Program:
    """The unknowns of all groups, and what they have to obey."""

    step: StepProfile
    groups: Sequence[Group]
    options: IlpOptions
    _columns: _Columns = field(default_factory=_Columns)
    _rows: _Rows = field(default_factory=_Rows)
    _recompute: dict[int, int] = field(default_factory=dict)
    _saves: dict[tuple[int, int], int] = field(default_factory=dict)
    _offload: dict[int, int] = field(default_factory=dict)
    _window: dict[int, float] = field(default_factory=dict)
    _again: dict[int, dict[int, int]] = field(default_factory=dict)
    _sizes: dict[int, _GroupSizes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the unknowns."""
        for number, group in enumerate(self.groups):
            self._add_unknowns(number, group)
        if not self._offload or not self.options.window:
            return
        # The coefficient in MiB of the unknown that says whether anything goes to the host.
        anything = self._columns.add(0.0)
        for number, column in self._offload.items():
            self._rows.add({column: 1.0, anything: -float(len(self.groups[number].blocks))}, 0.0)
        self._window[anything] = self.options.window / _MIB

    def _add_unknowns(self, number: int, group: Group) -> None:
        options, columns, rows, blocks = self.options, self._columns, self._rows, group.blocks
        most, first = float(len(blocks)), group.first
        if options.recompute:
            overhead = OVERHEAD_SECONDS * group.mean([block.calls for block in blocks])
            self._recompute[number] = columns.add(overhead, upper=most)
            self._add_results(number, group)
            self._sizes[number] = self._sizes_of(number, group.first)
        if may_offload(self.step, first, options):
            away = [(OVERHEAD_SECONDS + sum(alone_seconds(block, options))) * block.calls for block in blocks]
            self._offload[number] = columns.add(group.mean(away), upper=most)
        both = [unknown[number] for unknown in (self._recompute, self._offload) if number in unknown]
        if len(both) > 1:
            rows.add(dict.fromkeys(both, 1.0), most)

    def _add_results(self, number: int, group: Group) -> None:
        """What is saved of a recomputed block, and what has to run again for the rest. See NOTE [Results]."""
        columns, rows, most, first = self._columns, self._rows, float(len(group.blocks)), group.first
        recompute, again = self._recompute[number], self._again.setdefault(number, {})
        if not self.options.select:  # all runs again
            columns.cost[recompute] = group.mean([recompute_seconds(one) * one.calls for one in group.blocks])
            columns.upper[recompute] = 0.0 if least_saved(first) else most
            return
        savable = savable_ops(first)
        for op in savable:
            self._saves[number, op] = column = columns.add(0.0, upper=most)
            rows.add({column: 1.0, recompute: -1.0}, 0.0)
        for op in sorted(computed(first)):
            seconds = group.mean([block.ops[op].seconds * block.calls for block in group.blocks])
            upper = 0.0 if first.ops[op].fixed else most
            again[op] = columns.add(seconds, whole=False, upper=upper)
        for op, column in again.items():
            if first.ops[op].kept:  # a block that is recomputed has it saved or computes it again
                rows.add(self._lacking(number, op, recompute, column), 0.0)
            for read in first.ops[op].reads:
                if read in again:
                    rows.add(self._lacking(number, read, column, again[read]), 0.0)

    def _sizes_of(self, number: int, first: ModelBlock) -> _GroupSizes:
        results, others = [], []
        for op, known in enumerate(first.ops):
            column = self._saves.get((number, op))
            if known.own_bytes and not given(known):
                results.append((op, known.own_bytes / _MIB, column))
            elif column is not None:
                others.append((known.bytes / _MIB, column))
        saved = [(column, size) for _, size, column in results if column is not None]
        return _GroupSizes(
            input=first.new_input_bytes / _MIB,
            freed=sum(size for _, size, _ in results),
            results=tuple(results),
            others=tuple(others),
            saved=(*saved, *((column, size) for size, column in others)),
        )

    def _lacking(self, number: int, op: int, needed: int, again: int) -> dict[int, float]:
        """The condition that a result is saved or computed again as often as it is needed."""
        entries = {needed: 1.0, again: -1.0}
        if (number, op) in self._saves:
            entries[self._saves[number, op]] = -1.0
        return entries

    def cheapest(self, budget: int, *, least: bool) -> Solved:
        """The cheapest decisions within a budget of bytes.

        Args:
            budget: bytes that no interval may exceed.
            least: where some blocks of a group wait, count what they free at least, not at most.
        """
        rows = _Rows(list(self._rows.entries), list(self._rows.bounds))
        columns = replace(self._columns, cost=list(self._columns.cost), upper=list(self._columns.upper))
        columns.whole = list(self._columns.whole)
        for entries, bound in self._interval_conditions(budget, columns, rows, least=least):
            rows.add(entries, bound)
        self._add_transfers(columns, rows)
        return self._read(columns, _solved(columns, rows, self.options))

    def lowest(self) -> Solved:
        """The decisions with the lowest peak."""
        columns = _Columns([0.0] * len(self._columns.cost), [*self._columns.upper], [*self._columns.whole])
        rows = _Rows(list(self._rows.entries), list(self._rows.bounds))
        peak = columns.add(1.0, whole=False, upper=np.inf)
        for entries, bound in self._interval_conditions(0, columns, rows, least=True):
            rows.add({**entries, peak: -1.0}, bound)
        self._add_host(rows)
        return self._read(columns, _solved(columns, rows, self.options))

    def _interval_conditions(
        self, budget: int, columns: _Columns, rows: _Rows, *, least: bool
    ) -> list[tuple[dict[int, float], float]]:
        """A condition for each interval that could exceed the budget, in MiB."""
        window_bytes = round(sum(self._window.values()) * _MIB)
        held = held_in(self.step)
        more = np.array([_most_more(block) for block in self.step.blocks], dtype=np.float64)
        seen: dict[tuple[bytes, StepInterval | None], int] = {}
        for number, interval in enumerate(self.step.intervals):
            own = more[interval.block] if interval.position >= 0 else 0.0
            if interval.peak_bytes + window_bytes + held[number] @ more + own <= budget:
                continue
            # Of several intervals with the same blocks waiting only the highest counts, but for those of a block's own.
            working = replace(interval, peak_bytes=0) if interval.position >= 0 else None
            key = held[number].tobytes(), working
            seen[key] = max(seen.get(key, 0), interval.peak_bytes)
        return [
            (self._freed(np.frombuffer(waiting), own, columns, rows, least=least), (budget - peak) / _MIB)
            for (waiting, own), peak in seen.items()
        ]

    def _freed(
        self, held: Counts, own: StepInterval | None, columns: _Columns, rows: _Rows, *, least: bool
    ) -> dict[int, float]:
        entries = dict(self._window)
        for number, group in enumerate(self.groups):
            count, first = group.waiting(held, least=least), group.first
            working = own if own is not None and any(own.block == one.index for one in group.blocks) else None
            if not count and working is None:
                continue
            if number in self._recompute:
                entries |= self._recomputed(number, held, working, least=least)
                if working is not None and working.backward and (least or len(group.blocks) == 1):
                    for column, size in self._there_again(number, working.position, columns, rows).items():
                        entries[column] = entries.get(column, 0.0) + size
            if count and number in self._offload:
                entries[self._offload[number]] = -count * first.kept_bytes / _MIB
        return entries

    def _recomputed(
        self, number: int, held: Counts, own: StepInterval | None, *, least: bool
    ) -> dict[int, float]:
        """What recomputing blocks of a group frees in an interval, negative, and what saving results takes of that."""
        group = self.groups[number]

        def times(*, absent: bool) -> float:
            """For how many of the blocks a result is not there, or what is there in its place is."""
            counts = [
                float(held[one.index]) + (absent and own is not None and own.block == one.index)
                for one in group.blocks
            ]
            return group.mean(counts) if least else max(counts)

        more = times(absent=own is not None and own.backward)
        away, there = times(absent=True), times(absent=False)
        recompute, sizes = self._recompute[number], self._sizes[number]
        if own is None:  # all the same, as often as blocks wait
            entries = {column: away * size for column, size in sizes.saved}
            entries[recompute] = more * sizes.input - away * sizes.freed
            return entries
        entries = {recompute: more * sizes.input}
        for op, size, column in sizes.results:
            count = away if group.first.ops[op].absent(own.position, backward=own.backward) else there
            entries[recompute] -= count * size
            if column is not None:
                entries[column] = count * size
        for size, column in sizes.others:
            entries[column] = away * size
        return entries

    def _there_again(self, number: int, position: int, columns: _Columns, rows: _Rows) -> dict[int, float]:
        """What is there at a position of a block's backward pass because something was computed from it.

        Of a group of blocks one is at work, and its decisions are taken to be the mean of all.
        """
        group, again = self.groups[number], self._again[number]
        first, most = group.first, float(len(group.blocks))
        if not self.options.select:
            size = sum(
                first.ops[op].own_bytes
                for op, ran in computed_at(first, frozenset()).items()
                if position <= ran and first.ops[op].absent(position, backward=True)
            )
            return {self._recompute[number]: size / most / _MIB}
        there: dict[int, int] = {}
        entries = {}
        for op in sorted(again):
            known = first.ops[op]
            if known.absent(position, backward=True):
                there[op] = columns.add(0.0, whole=False, upper=most)
                if known.own_bytes:
                    entries[there[op]] = known.own_bytes / most / _MIB
        for op in again:
            for read in first.ops[op].reads:
                if read in there:
                    rows.add(self._lacking(number, read, there.get(op, again[op]), there[read]), 0.0)
        return entries

    def _add_transfers(self, columns: _Columns, rows: _Rows) -> None:
        """What a block cannot hide behind its own pass costs by itself; the rest, where all passes cannot hide it."""
        if not self._offload:
            return
        self._add_host(rows)
        options, gap = self.options, self.options.window / self.options.link_bytes_per_second
        for backward in (False, True):
            rest = {}
            for number, column in self._offload.items():
                group = self.groups[number]
                rest[column] = group.mean(
                    [
                        block.calls
                        * (
                            crossing_seconds(block, options)
                            - alone_seconds(block, options)[backward]
                            - max(0.0, passes(block)[backward] - gap)
                        )
                        for block in group.blocks
                    ]
                )
            # Behind the pass of another block no more is hidden than the window holds, and the last one's window stays.
            hidden = [block.calls * min(passes(block)[backward], gap) for block in self.step.blocks]
            calls = max(block.calls for block in self.step.blocks)
            exposed = columns.add(1.0, whole=False, upper=np.inf)
            rows.add({**rest, exposed: -1.0}, sum(hidden) + calls * gap)

    def _add_host(self, rows: _Rows) -> None:
        """The condition in MiB that the host can hold what goes there."""
        sizes = {
            column: self.groups[number].first.kept_bytes / _MIB for number, column in self._offload.items()
        }
        rows.add(sizes, self.options.host_bytes / _MIB)

    def _read(self, columns: _Columns, found: optimize.OptimizeResult) -> Solved:
        if found.x is None:
            return Solved(decisions=None, infeasible=found.status == 2)
        scale = max(columns.cost) or 1.0
        again = [
            *self._recompute.values(),
            *(column for ops in self._again.values() for column in ops.values()),
        ]
        decisions: dict[str, Decision] = {}
        for number, group in enumerate(self.groups):
            decisions |= self._apart(number, group, found.x)
        bound = getattr(found, "mip_dual_bound", None)
        return Solved(
            decisions=decisions,
            infeasible=False,
            cost=float(found.fun) * scale,
            waiting=float(found.fun) * scale - sum(columns.cost[one] * float(found.x[one]) for one in again),
            bound=(float(found.fun) if bound is None else float(bound)) * scale,
            complete=found.status == 0,
        )

    def _apart(self, number: int, group: Group, values: Counts) -> dict[str, Decision]:
        """The decisions for the blocks of a group, those that free the most first."""

        def count(column: int | None) -> int:
            return 0 if column is None else round(float(values[column]))

        recomputed = count(self._recompute.get(number))
        saved: list[set[int]] = [set() for _ in range(recomputed)]
        for (owner, op), column in self._saves.items():
            for place in range(count(column) if owner == number else 0):
                saved[-1 - place].add(op)
        found = [Decision(DecisionKind.RECOMPUTE, frozenset(ops)) for ops in saved]
        found += [Decision(DecisionKind.OFFLOAD)] * count(self._offload.get(number))
        found.sort(key=lambda decision: kept_bytes(group.first, decision))
        return {block.path: decision for block, decision in zip(group.blocks, found, strict=False)}


def _most_more(block: ModelBlock) -> int:
    """Bytes by which a recomputed block may keep more than a plain one, at most."""
    saved = sum(op.bytes for op in savable_ops(block).values() if not op.own_bytes)
    return block.new_input_bytes + saved


def _solved(columns: _Columns, rows: _Rows, options: IlpOptions) -> optimize.OptimizeResult:
    """What HiGHS makes of a program."""
    matrix = sparse.csr_array(
        (
            [value for _, _, value in rows.entries],
            ([row for row, _, _ in rows.entries], [column for _, column, _ in rows.entries]),
        ),
        shape=(len(rows.bounds), len(columns.cost)),
    )
    scale = max(columns.cost) or 1.0
    with quiet_output():
        return optimize.milp(
            np.array(columns.cost) / scale,
            integrality=np.array(columns.whole),
            bounds=optimize.Bounds(0, np.array(columns.upper)),
            constraints=optimize.LinearConstraint(matrix, ub=np.array(rows.bounds)),
            options={"time_limit": options.time_limit, "mip_rel_gap": options.gap},
        )


def lowest_shared(step: StepProfile, options: IlpOptions) -> Mapping[str, Decision] | None:
    """Decisions with the lowest peak where the host holds a part of what could go there; None where none was found."""
    # What is saved only ever adds, as far as what waits is concerned.
    options = replace(options, select=False, time_limit=min(options.time_limit, _LOWEST_SECONDS))
    return Program(step, alone(step), options).lowest().decisions


def lowest_inside(step: StepProfile, options: IlpOptions) -> Mapping[str, Decision] | None:
    """Decisions with the lowest peak where a block's own pass may be it; None where none was found.

    What is computed again there is there all at once, if it is computed from one another: saving some of it is less.
    """
    options = replace(options, offload=False, time_limit=min(options.time_limit, _LOWEST_SECONDS))
    return Program(step, groups_of(step), options).lowest().decisions


@contextmanager
def quiet_output() -> Iterator[None]:
    """Send what is written to the process's standard output meanwhile nowhere.

    HiGHS as scipy carries it writes a line of its own debugging now and then, whatever its options say
    (``HighsMipSolverData::transformNewIntegerFeasibleSolution``), which would spoil ``--json -``.
    """
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output to spoil
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
