"""Chooses for each block what is kept, recomputed or offloaded: a mixed-integer program over one observed step.

NOTE [The program]: for block j let K be the bytes that it keeps in the plain program, and for each of its operations t
let b be the bytes of its results and c the seconds that it takes.

- ``r`` (0 or 1): the block is recomputed. It then keeps its input and the results of the operations that are saved.
- ``s_t`` (0 or 1, at most ``r``): the results of operation t are saved and not computed again.
- ``o`` (0 or 1, not with ``r``): what it keeps goes to the host and comes back.

A stretch of the step (see NOTE [Stretches] in observing.py) peaks at what was observed there, less what the blocks
whose forward pass is over and whose backward pass has not begun no longer keep. All stretches have to stay within the
budget. The cost is the seconds of what is computed again, and of transfers beyond what they can hide behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from scipy import optimize, sparse

from vramfit.planner.observing import Observation
from vramfit.planner.quiet import quiet_output
from vramfit.techniques import Block, BlockOp

_LOWEST_SECONDS = 1.0
"""For the lowest peak of one combination where the host is what limits it: it is asked for often."""

OVERHEAD_SECONDS = 30e-6
"""Estimated cost of recomputing one block beyond its operations: the checkpoint's own work on the host."""


class Fate(Enum):
    """What becomes of what a block keeps for its backward pass."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a block.

    Attributes:
        fate: of all that it keeps.
        saved: numbers of the operations whose results are kept all the same, where it is recomputed.
    """

    fate: Fate
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Decisions for all blocks.

    Attributes:
        decisions: by path; blocks that are kept are left out.
        peak_bytes: predicted, of the whole step.
        extra_seconds: predicted, beyond the plain step.
        extra_flops: predicted.
        host_bytes: that go to the host.
        gap: how far the cost may be above the best possible, as a part of it; None from the greedy way.
        status: of the solver, in words.
        seconds: that solving took.
    """

    decisions: Mapping[str, Decision]
    peak_bytes: int
    extra_seconds: float
    extra_flops: int
    host_bytes: int
    gap: float | None
    status: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What may be chosen.

    Attributes:
        recompute: whether blocks may be recomputed.
        select: whether results inside recomputed blocks may be saved.
        offload: whether what blocks keep may go to the host.
        host_bytes: how much may.
        link_bytes_per_second: between host and card.
        window: bytes of the device through which what goes to the host passes.
        time_limit: seconds for the solver.
        gap: a solution this close to the best, as a part of its cost, is good enough.
    """

    recompute: bool = True
    select: bool = True
    offload: bool = False
    host_bytes: int = 0
    link_bytes_per_second: float = 0.0
    window: int = 0
    time_limit: float = 10.0
    gap: float = 1e-3


def candidates(block: Block) -> dict[int, BlockOp]:
    """The operations of a block whose results may be saved, by number.

    Those after the last result that the backward pass needs are never computed again.
    """
    last = last_needed(block)
    return {
        number: op
        for number, op in enumerate(block.ops[: last + 1])
        if op.bytes and not op.mutated and op.seconds > 0
    }


def last_needed(block: Block) -> int:
    """The number of the last operation whose results the backward pass needs; -1 without one."""
    return max((number for number, op in enumerate(block.ops) if op.kept), default=-1)


def recompute_seconds(block: Block, saved: frozenset[int] = frozenset()) -> float:
    """What computing a block again takes, without what is saved."""
    return sum(op.seconds for op in _recomputed(block, saved)) + OVERHEAD_SECONDS


def recompute_flops(block: Block, saved: frozenset[int] = frozenset()) -> int:
    """Multiplications and additions of the same."""
    return sum(op.flops for op in _recomputed(block, saved))


def _recomputed(block: Block, saved: frozenset[int]) -> Iterator[BlockOp]:
    # torch.utils.checkpoint stops at the last tensor that the forward pass kept, even where that one was saved.
    end = last_needed(block) + 1
    return (op for number, op in enumerate(block.ops[:end]) if number not in saved)


def kept_bytes(block: Block, decision: Decision) -> int:
    """What a block keeps on the device between its forward and its backward pass."""
    if decision.fate is Fate.KEEP:
        return block.kept_bytes
    if decision.fate is Fate.OFFLOAD:
        return 0
    held = block.new_input_bytes + block.shared_bytes
    return held + sum(block.ops[number].bytes for number in decision.saved)


def predicted_peak(observation: Observation, decisions: Mapping[str, Decision]) -> int:
    """The peak of the step with these decisions, in bytes."""
    return int(stretch_peaks(observation, decisions).max(initial=0))


def stretch_peaks(
    observation: Observation, decisions: Mapping[str, Decision]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The peak of each stretch of the step with these decisions, in bytes."""
    held = _held(observation)
    less = np.array(
        [
            block.kept_bytes - kept_bytes(block, decisions[block.path]) if block.path in decisions else 0
            for block in observation.blocks
        ],
        dtype=np.float64,
    )
    peaks = np.array([stretch.peak_bytes for stretch in observation.stretches], dtype=np.float64)
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = peaks - held @ less
    return found


def _held(observation: Observation) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Matrix of shape [stretches, blocks]: how many calls of a block wait for their backward pass."""
    held = np.zeros((len(observation.stretches), len(observation.blocks)))
    for block in observation.blocks:
        waiting = _waits(observation, block)
        if waiting is not None:
            held[:, block.index] = waiting
    return held


def _waits(observation: Observation, block: Block) -> list[int] | None:
    """How many calls of a block wait for their backward pass in each stretch; None where it cannot be told.

    With micro-batches a block goes forward and backward in turn. One that several layers share, or a discriminator that
    judges two batches, goes forward more than once before it goes backward: each call then waits by itself. A call that
    never goes backward keeps what it keeps until its result is dropped, whenever that is.
    """
    waiting, seen, counts = 0, set(), []
    for stretch in observation.stretches:
        mine = stretch.block == block.index
        if mine and stretch.backward and stretch.call not in seen:
            waiting -= bool(waiting)
            seen.add(stretch.call if stretch.call >= 0 else None)
        counts.append(waiting)
        if mine and not stretch.backward:
            waiting += 1
    return counts if waiting == 0 and any(counts) else None


def overlaps(observation: Observation, block: Block) -> bool:
    """Whether several calls of a block wait at once."""
    return max(_waits(observation, block) or [0]) > 1


def choosable(observation: Observation, block: Block) -> bool:
    """Whether anything can be chosen for a block."""
    return bool(block.kept_bytes) and _waits(observation, block) is not None


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

    def add(self, terms: Mapping[int, float], bound: float) -> None:
        row = len(self.bounds)
        self.entries += [(row, column, value) for column, value in terms.items()]
        self.bounds.append(bound)


def solve(observation: Observation, budget: int, terms: Terms) -> Solution | None:
    """The cheapest decisions with which the step's peak stays within a budget of bytes; None if there are none.

    The solver is HiGHS, through `scipy.optimize.milp`. If it finds nothing within its time, the greedy way is taken.
    """
    began = time.perf_counter()
    if predicted_peak(observation, {}) <= budget:
        return _solution(observation, {}, 0.0, "nothing to do", began, terms)
    columns, rows = _Columns(), _Rows()
    recompute, saves, offload = _unknowns(observation, terms, columns, rows)
    window = _window(terms, columns, rows, offload)
    _within_budget(observation, budget, rows, recompute, saves, offload, window)
    _transfers(observation, terms, columns, rows, offload)
    if not columns.cost:
        return None
    found = _solved(columns, rows, terms)
    if found.x is None:
        if found.status == 2:  # infeasible
            return None
        return greedy(observation, budget, terms) or _lowest(observation, budget, terms, began)
    decisions = _read(observation, found.x, recompute, saves, offload)
    status = "optimal" if found.status == 0 else "stopped at the time limit"
    return _solution(observation, decisions, float(found.mip_gap or 0.0), status, began, terms)


def _solved(columns: _Columns, rows: _Rows, terms: Terms) -> optimize.OptimizeResult:
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
            options={"time_limit": terms.time_limit, "mip_rel_gap": terms.gap},
        )


def _lowest(observation: Observation, budget: int, terms: Terms, began: float) -> Solution | None:
    """The decisions with the lowest peak, where they do and nothing cheaper was found."""
    decisions = lowest_decisions(observation, terms)
    if _peak_with(observation, decisions, terms) > budget:
        return None
    return _solution(observation, decisions, None, "the lowest peak", began, terms)


def _unknowns(
    observation: Observation, terms: Terms, columns: _Columns, rows: _Rows
) -> tuple[dict[int, int], dict[tuple[int, int], int], dict[int, int]]:
    recompute: dict[int, int] = {}
    saves: dict[tuple[int, int], int] = {}
    offload: dict[int, int] = {}
    for block in observation.blocks:
        if not choosable(observation, block):
            continue
        if terms.recompute:
            recompute[block.index] = columns.add(recompute_seconds(block) * block.calls)
            for number, op in candidates(block).items() if terms.select else ():
                saves[block.index, number] = column = columns.add(-op.seconds * block.calls)
                rows.add({column: 1.0, recompute[block.index]: -1.0}, 0.0)
        if _may_offload(observation, block, terms):
            alone = sum(_exposed(block, terms, seconds) for seconds in _passes(block))
            offload[block.index] = columns.add((OVERHEAD_SECONDS + alone) * block.calls)
        both = [unknown[block.index] for unknown in (recompute, offload) if block.index in unknown]
        if len(both) > 1:
            rows.add(dict.fromkeys(both, 1.0), 1.0)
    return recompute, saves, offload


def _window(terms: Terms, columns: _Columns, rows: _Rows, offload: Mapping[int, int]) -> dict[int, float]:
    """The coefficient in MiB of the unknown that says whether anything goes to the host."""
    if not offload or not terms.window:
        return {}
    anything = columns.add(0.0, whole=False)
    for column in offload.values():
        rows.add({column: 1.0, anything: -1.0}, 0.0)
    return {anything: terms.window / (1 << 20)}


def _within_budget(
    observation: Observation,
    budget: int,
    rows: _Rows,
    recompute: Mapping[int, int],
    saves: Mapping[tuple[int, int], int],
    offload: Mapping[int, int],
    window: Mapping[int, float],
) -> None:
    """Conditions in MiB: the solver's tolerances are absolute."""
    mib = float(1 << 20)
    room = round(sum(window.values()) * mib)
    held = _held(observation)
    seen: dict[bytes, int] = {}
    for number, stretch in enumerate(observation.stretches):
        if stretch.peak_bytes + room <= budget:
            continue
        # Of several stretches with the same blocks waiting only the highest counts.
        key = held[number].tobytes()
        seen[key] = max(seen.get(key, 0), stretch.peak_bytes)
    for key, peak in seen.items():
        waiting = np.frombuffer(key)  # calls of each block
        terms: dict[int, float] = dict(window)
        for block in observation.blocks:
            count = waiting[block.index]
            if not count:
                continue
            if block.index in recompute:
                rest = kept_bytes(block, Decision(Fate.RECOMPUTE))
                terms[recompute[block.index]] = count * (rest - block.kept_bytes) / mib
            if block.index in offload:
                terms[offload[block.index]] = -block.kept_bytes / mib
        for (index, op), column in saves.items():
            if waiting[index]:
                terms[column] = waiting[index] * observation.blocks[index].ops[op].bytes / mib
        rows.add(terms, (budget - peak) / mib)


def _transfers(
    observation: Observation, terms: Terms, columns: _Columns, rows: _Rows, offload: Mapping[int, int]
) -> None:
    """What a block cannot hide behind its own pass costs by itself; the rest, where all passes cannot hide it."""
    if not offload:
        return
    blocks = {column: observation.blocks[index] for index, column in offload.items()}
    _within_host(observation, terms, rows, offload)
    for backward in (False, True):
        rest = {
            column: block.calls * (_crossing(block, terms) - _exposed(block, terms, _passes(block)[backward]))
            for column, block in blocks.items()
        }
        hidden = sum(block.calls * _passes(block)[backward] for block in observation.blocks)
        exposed = columns.add(1.0, whole=False, upper=np.inf)
        rows.add({**rest, exposed: -1.0}, hidden)


def _within_host(observation: Observation, terms: Terms, rows: _Rows, offload: Mapping[int, int]) -> None:
    """The condition in MiB that the host can hold what goes there."""
    mib = float(1 << 20)
    sizes = {column: observation.blocks[index].kept_bytes / mib for index, column in offload.items()}
    rows.add(sizes, terms.host_bytes / mib)


def _waiting(observation: Observation, offloaded: Sequence[Block], terms: Terms) -> float:
    """Seconds that a step waits for the link, with the host's part in it."""
    total = 0.0
    for backward in (False, True) if offloaded else ():
        alone = sum(block.calls * _exposed(block, terms, _passes(block)[backward]) for block in offloaded)
        crossing = sum(block.calls * _crossing(block, terms) for block in offloaded)
        hidden = sum(block.calls * _passes(block)[backward] for block in observation.blocks)
        total += alone + max(0.0, crossing - alone - hidden)
    return total + OVERHEAD_SECONDS * sum(block.calls for block in offloaded)


def _passes(block: Block) -> tuple[float, float]:
    return block.forward_seconds, block.backward_seconds


def _crossing(block: Block, terms: Terms) -> float:
    """Seconds that what a block keeps takes from the device to the host."""
    return block.kept_bytes / terms.link_bytes_per_second


def _exposed(block: Block, terms: Terms, seconds: float) -> float:
    """Seconds of a pass that wait for the link: no more than the window may be under way when the pass is over."""
    return max(0.0, _crossing(block, terms) - seconds - terms.window / terms.link_bytes_per_second)


def _read(
    observation: Observation,
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
    recompute: Mapping[int, int],
    saves: Mapping[tuple[int, int], int],
    offload: Mapping[int, int],
) -> dict[str, Decision]:
    decisions: dict[str, Decision] = {}
    for index, column in offload.items():
        if values[column] > 0.5:
            decisions[observation.blocks[index].path] = Decision(Fate.OFFLOAD)
    for index, column in recompute.items():
        if values[column] > 0.5:
            saved = frozenset(op for (block, op), c in saves.items() if block == index and values[c] > 0.5)
            decisions[observation.blocks[index].path] = Decision(Fate.RECOMPUTE, saved)
    return decisions


def greedy(observation: Observation, budget: int, terms: Terms) -> Solution | None:
    """Blocks one after another, those that free the most bytes per second of cost first; None if that is not enough."""
    began = time.perf_counter()
    decisions: dict[str, Decision] = {}
    choices = []
    for block in observation.blocks:
        if not terms.recompute or not choosable(observation, block):
            continue
        for saved in _ladder(block) if terms.select else [frozenset[int]()]:
            decision = Decision(Fate.RECOMPUTE, saved)
            freed = block.kept_bytes - kept_bytes(block, decision)
            if freed > 0:
                choices.append((freed / recompute_seconds(block, saved), freed, block, decision))
    for _, freed, block, decision in sorted(choices, key=lambda choice: -choice[0]):
        if predicted_peak(observation, decisions) <= budget:
            break
        before = decisions.get(block.path)
        if before is None or freed > block.kept_bytes - kept_bytes(block, before):
            decisions[block.path] = decision
    if predicted_peak(observation, decisions) > budget:
        return None
    return _solution(observation, decisions, None, "greedy", began, terms)


def _ladder(block: Block) -> Iterator[frozenset[int]]:
    """Sets of saved operations, each without the one of the last that costs least per byte."""
    saved = sorted(candidates(block).items(), key=lambda item: item[1].seconds / item[1].bytes)
    for count in range(len(saved) + 1):
        yield frozenset(number for number, _ in saved[count:])


def _solution(
    observation: Observation,
    decisions: Mapping[str, Decision],
    gap: float | None,
    status: str,
    began: float,
    terms: Terms,
) -> Solution:
    recomputed = [
        (block, decisions[block.path].saved)
        for block in observation.blocks
        if block.path in decisions and decisions[block.path].fate is Fate.RECOMPUTE
    ]
    offloaded = [
        block
        for block in observation.blocks
        if block.path in decisions and decisions[block.path].fate is Fate.OFFLOAD
    ]
    return Solution(
        decisions=decisions,
        peak_bytes=predicted_peak(observation, decisions) + (terms.window if offloaded else 0),
        extra_seconds=sum(block.calls * recompute_seconds(block, saved) for block, saved in recomputed)
        + _waiting(observation, offloaded, terms),
        extra_flops=sum(block.calls * recompute_flops(block, saved) for block, saved in recomputed),
        host_bytes=sum(block.kept_bytes for block in offloaded),
        gap=gap,
        status=status,
        seconds=time.perf_counter() - began,
    )


def lowest_peak(observation: Observation, terms: Terms) -> int:
    """The lowest peak that any decisions reach, in bytes, as predicted."""
    return _peak_with(observation, lowest_decisions(observation, terms), terms)


def lowest_decisions(observation: Observation, terms: Terms) -> Mapping[str, Decision]:
    """The decisions that reach it.

    Without offload, or where the host can hold all that might go there, each block is best by itself: the least that it
    can keep. Where the host cannot, which blocks go there is a program of its own: the lowest bound that all stretches
    stay within. If that is not solved to its end within the time limit, the best that is known is taken.
    """
    blocks = [block for block in observation.blocks if choosable(observation, block)]
    alone = {
        block.path: Decision(Fate.RECOMPUTE)
        for block in blocks
        if terms.recompute and kept_bytes(block, Decision(Fate.RECOMPUTE)) < block.kept_bytes
    }
    known: list[Mapping[str, Decision]] = [{}, alone]
    movable = [block for block in blocks if _may_offload(observation, block, terms)]
    if movable and sum(block.kept_bytes for block in movable) <= terms.host_bytes:
        known.append(alone | {block.path: Decision(Fate.OFFLOAD) for block in movable})
    elif movable:
        known.append(_lowest_shared(observation, terms) or {})
    return min(known, key=lambda decisions: _peak_with(observation, decisions, terms))


def _may_offload(observation: Observation, block: Block, terms: Terms) -> bool:
    """Whether what a block keeps may go to the host; what goes there is counted once for each block."""
    return terms.offload and terms.link_bytes_per_second > 0 and not overlaps(observation, block)


def _peak_with(observation: Observation, decisions: Mapping[str, Decision], terms: Terms) -> int:
    """The peak with the window through which offloaded bytes pass."""
    away = any(decision.fate is Fate.OFFLOAD for decision in decisions.values())
    return predicted_peak(observation, decisions) + (terms.window if away else 0)


def _lowest_shared(observation: Observation, terms: Terms) -> Mapping[str, Decision] | None:
    """Decisions with the lowest peak where the host holds a part of what could go there; None where none was found."""
    # What is saved only ever adds.
    terms = replace(terms, select=False, time_limit=min(terms.time_limit, _LOWEST_SECONDS))
    columns, rows = _Columns(), _Rows()
    recompute, saves, offload = _unknowns(observation, terms, columns, rows)
    window = _window(terms, columns, rows, offload)
    columns.cost = [0.0] * len(columns.cost)
    peak = columns.add(1.0, whole=False, upper=np.inf)
    within = _Rows()
    _within_budget(observation, 0, within, recompute, saves, offload, window)
    for row, bound in enumerate(within.bounds):
        entries = {column: value for number, column, value in within.entries if number == row}
        rows.add(entries | {peak: -1.0}, bound)
    _within_host(observation, terms, rows, offload)
    found = _solved(columns, rows, terms)
    return None if found.x is None else _read(observation, found.x, recompute, saves, offload)
