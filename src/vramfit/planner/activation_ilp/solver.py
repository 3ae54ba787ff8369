"""Chooses for each block what is kept, recomputed or offloaded: a mixed-integer program over one profiled step.

NOTE [The program]: for block j let K be the bytes that it keeps in the plain program, and for each of its operations t
let b be the bytes of its results and c the seconds that it takes.

- ``r`` (0 or 1): the block is recomputed. It then keeps its input and the results of the operations that are saved.
- ``s_t`` (0 or 1, at most ``r``): the results of operation t are saved and not computed again.
- ``y_t``: operation t runs again, since its results are needed and not saved; see NOTE [Results] in ilp.py.
- ``o`` (0 or 1, not with ``r``): what it keeps goes to the host and comes back.

An interval of the step (see NOTE [Intervals] in step_profiler.py) peaks at what was profiled there, less what blocks
whose forward pass is over and whose backward pass has not begun no longer keep, and less what the block at work does
not hold yet, or no more. All intervals have to stay within the budget. The cost is the seconds of what is computed
again, and of transfers beyond what they can hide behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vramfit.planner.activation_ilp import ilp
from vramfit.planner.activation_ilp.decisions import (
    Decision,
    DecisionKind,
    IlpOptions,
    IlpSolution,
    choosable,
    freed_bytes,
    interval_peaks,
    kept_bytes,
    least_saved,
    may_offload,
    predicted_peak,
    recompute_flops,
    recompute_seconds,
    remembered,
    savable_ops,
)
from vramfit.planner.activation_ilp.transfers import spread, waiting_seconds
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import ModelBlock

_NEAR = 2.0
"""Of the gap that is good enough: decisions for equal blocks have it between two bounds, each solved up to that gap."""

_RUNGS = 64
"""Sets of saved operations, at most, that the greedy way looks at for one block."""

_LEAST_SHARE = 0.1
"""Of the solver's time that each of several programs has at least."""


def solve(step: StepProfile, budget: int, options: IlpOptions) -> IlpSolution | None:
    """The cheapest decisions with which the step's peak stays within a budget of bytes; None if there are none.

    The solver is HiGHS, through `scipy.optimize.milp`. If it finds nothing within its time, the greedy way is taken.
    """
    began = time.perf_counter()
    if predicted_peak(step, {}) <= budget:
        return _solution(step, {}, 0.0, "nothing to do", began, options)
    if not _anything(step, options):
        return None
    found = _equal_together(step, budget, options, began)
    if found is None:
        return None
    if not _near(found, options):
        found += [one for one in [_apart(step, budget, options, began)] if one is not None]
    if not found:
        return None
    best = min(found, key=lambda one: (one.extra_seconds, 1.0 if one.gap is None else one.gap))
    # With its copies followed one by one it is quicker than the others, which may be nearer to the program's best.
    return replace(best, gap=min((one.gap for one in found if one.gap is not None), default=None))


def _remaining(options: IlpOptions, began: float) -> IlpOptions:
    """The same, with what is left of the solver's time: several programs share it, and none is left without any."""
    left = options.time_limit - (time.perf_counter() - began)
    return replace(options, time_limit=max(left, _LEAST_SHARE * options.time_limit))


def _near(found: Sequence[IlpSolution], options: IlpOptions) -> bool:
    """Whether one of these is near enough to the best."""
    return any(one.gap is not None and one.gap <= _NEAR * options.gap for one in found)


def _equal_together(
    step: StepProfile, budget: int, options: IlpOptions, began: float
) -> list[IlpSolution] | None:
    """Decisions for equal blocks as one, in groups that become smaller; None where there are none at all."""
    found: list[IlpSolution] = []
    for cut in (False, True):
        groups = ilp.groups_of(step, cut=cut)
        if all(len(group.blocks) == 1 for group in groups) or _near(found, options):
            break
        best = ilp.Program(step, groups, _remaining(options, began)).cheapest(budget, least=False)
        if best.infeasible:  # though more counts as freed than any decisions free
            return None
        together = _together(step, budget, options, groups, best, began)
        found += [together] if together is not None else []
    return found


def _anything(step: StepProfile, options: IlpOptions) -> bool:
    """Whether there is anything to choose."""
    blocks = [block for block in step.blocks if choosable(step, block)]
    return any(options.recompute or may_offload(step, block, options) for block in blocks)


def _together(
    step: StepProfile,
    budget: int,
    options: IlpOptions,
    groups: Sequence[ilp.Group],
    best: ilp.Solved,
    began: float,
) -> IlpSolution | None:
    """Decisions for equal blocks as one; None where that finds none. See NOTE [Equal blocks]."""
    if best.decisions is None:
        return None
    found = best
    if _peak_with(step, best.decisions, options) > budget:
        found = ilp.Program(step, groups, _remaining(options, began)).cheapest(budget, least=True)
    if found.decisions is None or _peak_with(step, found.decisions, options) > budget:
        return None
    # Blocks of a group that save different results may have to compute more again than the program has it.
    again = sum(
        block.calls * recompute_seconds(block, decision.saved)
        for block in step.blocks
        if (decision := found.decisions.get(block.path)) is not None
        and decision.kind is DecisionKind.RECOMPUTE
    )
    cost = max(found.cost, again + found.waiting)
    gap = max(0.0, cost - best.bound) / cost if cost > 0 else 0.0
    # The program of the upper bound may have been stopped, and the gap be as small as it was to be all the same.
    status = "optimal" if found.complete or gap <= options.gap else _STOPPED
    decisions = _spread(step, found.decisions, budget, options)
    return _solution(step, decisions, gap, status, began, options)


def _spread(
    step: StepProfile, decisions: Mapping[str, Decision], budget: int, options: IlpOptions
) -> Mapping[str, Decision]:
    """The same decisions for other ones of equal blocks, where the step then waits less."""
    return spread(step, decisions, options, lambda changed: _peak_with(step, changed, options) <= budget)


def _apart(step: StepProfile, budget: int, options: IlpOptions, began: float) -> IlpSolution | None:
    """Decisions for each block by itself."""
    limited = _remaining(options, began)
    found = ilp.Program(step, ilp.alone(step), limited).cheapest(budget, least=True)
    if found.infeasible:
        return None
    if found.decisions is None:
        return greedy(step, budget, options) or _lowest(step, budget, options, began)
    gap = max(0.0, found.cost - found.bound) / found.cost if found.cost > 0 else 0.0
    status = "optimal" if found.complete else _STOPPED
    decisions = _spread(step, found.decisions, budget, options)
    return _solution(step, decisions, gap, status, began, options)


_STOPPED = "stopped at the time limit"


def _lowest(step: StepProfile, budget: int, options: IlpOptions, began: float) -> IlpSolution | None:
    """The decisions with the lowest peak, where they do and nothing cheaper was found."""
    decisions = lowest_decisions(step, options)
    if _peak_with(step, decisions, options) > budget:
        return None
    return _solution(step, decisions, None, "the lowest peak", began, options)


def greedy(step: StepProfile, budget: int, options: IlpOptions) -> IlpSolution | None:
    """Blocks one after another, those that free the most bytes per second of cost first; None if that is not enough."""
    began = time.perf_counter()
    decisions: dict[str, Decision] = {}
    choices = []
    for block in step.blocks:
        if not options.recompute or not choosable(step, block):
            continue
        for saved in _ladder(block) if options.select else [least_saved(block)]:
            decision = Decision(DecisionKind.RECOMPUTE, saved)
            freed = block.kept_bytes - kept_bytes(block, decision)
            if freed > 0:
                choices.append((freed / recompute_seconds(block, saved), freed, block, decision))
    peaks = interval_peaks(step, decisions)
    for _, freed, block, decision in sorted(choices, key=lambda choice: -choice[0]):
        if peaks.max(initial=0) <= budget:
            break
        before = decisions.get(block.path, Decision(DecisionKind.KEEP))
        if freed > block.kept_bytes - kept_bytes(block, before):
            peaks += freed_bytes(step, block, before) - freed_bytes(step, block, decision)
            decisions[block.path] = decision
    if predicted_peak(step, decisions) > budget:
        return None
    return _solution(step, decisions, None, "greedy", began, options)


def _ladder(block: ModelBlock) -> Iterator[frozenset[int]]:
    """Sets of saved operations, each without those of the last that cost least per byte."""
    saved = sorted(savable_ops(block).items(), key=lambda item: item[1].seconds / item[1].bytes)
    for count in range(0, len(saved) + 1, 1 + len(saved) // _RUNGS):
        yield frozenset(number for number, _ in saved[count:]) | least_saved(block)


def _solution(
    step: StepProfile,
    decisions: Mapping[str, Decision],
    gap: float | None,
    status: str,
    began: float,
    options: IlpOptions,
) -> IlpSolution:
    recomputed = [
        (block, decisions[block.path].saved)
        for block in step.blocks
        if block.path in decisions and decisions[block.path].kind is DecisionKind.RECOMPUTE
    ]
    offloaded = [
        block
        for block in step.blocks
        if block.path in decisions and decisions[block.path].kind is DecisionKind.OFFLOAD
    ]
    return IlpSolution(
        decisions=decisions,
        peak_bytes=predicted_peak(step, decisions) + (options.window if offloaded else 0),
        extra_seconds=sum(block.calls * recompute_seconds(block, saved) for block, saved in recomputed)
        + waiting_seconds(step, decisions, options),
        extra_flops=sum(block.calls * recompute_flops(block, saved) for block, saved in recomputed),
        host_bytes=sum(block.kept_bytes for block in offloaded),
        gap=gap,
        status=status,
        seconds=time.perf_counter() - began,
    )


def lowest_peak(step: StepProfile, options: IlpOptions, *, enough: int = 0) -> int:
    """The lowest peak that any decisions reach, in bytes, as predicted; any at which they do, where that is enough."""
    quick = _peak_with(step, lowest_decisions(step, options, inside=False), options)
    if quick <= enough:
        return quick
    return _peak_with(step, lowest_decisions(step, options), options)


@remembered
def lowest_decisions(
    step: StepProfile, options: IlpOptions, *, inside: bool = True
) -> Mapping[str, Decision]:
    """The decisions with the lowest peak.

    Without offload, or where the host can hold all that might go there, each block is best by itself: the least that it
    can keep. Where the host cannot, which blocks go there is a program of its own: the lowest bound that all intervals
    stay within. So are the results that a block saves where its own pass is the peak, with `inside`: computed again
    they may be there all at once. If that is not solved to its end within the time limit, the best that is known is
    taken.
    """
    blocks = [block for block in step.blocks if choosable(step, block)]
    least = {block.path: Decision(DecisionKind.RECOMPUTE, least_saved(block)) for block in blocks}
    alone = {
        block.path: least[block.path]
        for block in blocks
        if options.recompute and kept_bytes(block, least[block.path]) < block.kept_bytes
    }
    known: list[Mapping[str, Decision]] = [{}, alone]
    movable = [block for block in blocks if may_offload(step, block, options)]
    if movable and sum(block.kept_bytes for block in movable) <= options.host_bytes:
        known.append(alone | {block.path: Decision(DecisionKind.OFFLOAD) for block in movable})
    elif movable:
        known.append(ilp.lowest_shared(step, options) or {})
    inside = inside and options.recompute and options.select
    if inside and any(one.position >= 0 for one in step.intervals):
        known.append(ilp.lowest_inside(step, options) or {})
    return min(known, key=lambda decisions: _peak_with(step, decisions, options))


def _peak_with(step: StepProfile, decisions: Mapping[str, Decision], options: IlpOptions) -> int:
    """The peak with the window through which offloaded bytes pass."""
    away = any(decision.kind is DecisionKind.OFFLOAD for decision in decisions.values())
    return predicted_peak(step, decisions) + (options.window if away else 0)
