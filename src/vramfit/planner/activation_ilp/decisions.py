"""What can be decided for a block, what a decision frees and costs, and the techniques that carry it out."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
from torch import nn

from vramfit.planner.step_profiler import StepInterval, StepProfile
from vramfit.techniques import BlockOp, Choice, ModelBlock, find_technique
from vramfit.techniques.activation_checkpointing import setting_for
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.support.blocks import find_blocks, reason_against_rerun

_T = TypeVar("_T")
_P = ParamSpec("_P")

KEPT = 64
"""Answers of one function that are remembered."""


def remembered(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of a step profile, by its identity, and of what else can be hashed, which is asked often.

    A step profile holds thousands of operations: to hash it takes longer than most of what is asked about it. It is
    held as long as its answers are, so that no other has its identity.
    """
    known: OrderedDict[Hashable, tuple[object, _T]] = OrderedDict()

    @functools.wraps(function)
    def asked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        step, *others = cast("tuple[Any, ...]", args)
        key = (id(step), *others, *kwargs.items())
        if key not in known:
            known[key] = step, function(*args, **kwargs)
            while len(known) > KEPT:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    return asked


OVERHEAD_SECONDS = 30e-6
"""Estimated cost of recomputing one block beyond its operations: the checkpoint's own work on the host."""

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Positions: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


class DecisionKind(Enum):
    """What is done with what a block keeps for its backward pass."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with a block.

    Attributes:
        kind: of all that it keeps.
        saved: numbers of the operations whose results are kept all the same, where it is recomputed.
    """

    kind: DecisionKind
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class IlpSolution:
    """Decisions for all blocks.

    Attributes:
        decisions: by path; blocks that are kept are left out.
        peak_bytes: predicted, of the whole step.
        extra_seconds: predicted, beyond the plain step.
        extra_flops: predicted.
        host_bytes: that go to the host.
        gap: how far the cost may be above the best possible, as a part of it and as the program counts it; None where
            that is not known. Where copies of several blocks wait for each other, a step waits longer than that.
        status: of the solver, in words.
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
class IlpOptions:
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


def given(op: BlockOp) -> bool:
    """Whether an operation's results are there whatever is decided: others keep them, or it cannot run again."""
    return op.shared or (op.fixed and op.kept)


def savable_ops(block: ModelBlock) -> dict[int, BlockOp]:
    """The operations of a block whose results may be saved, by number: those that may have to run again."""
    needed = computed(block)
    return {
        number: op
        for number, op in enumerate(block.ops)
        if number in needed and saved_bytes(op) and (op.own_bytes or op.flops or op.fixed)
    }


def saved_bytes(op: BlockOp) -> int:
    """What it takes to save an operation's results: those that autograd keeps, or all where it keeps none."""
    return op.own_bytes or op.bytes


def computed(block: ModelBlock, saved: frozenset[int] = frozenset()) -> frozenset[int]:
    """The operations of a recomputed block that run again: what autograd keeps, and what that is computed from."""
    ahead = [number for number, op in enumerate(block.ops) if op.kept]
    found: set[int] = set()
    while ahead:
        number = ahead.pop()
        if number in saved or number in found or given(block.ops[number]):
            continue
        found.add(number)
        if not block.ops[number].fixed:
            ahead += block.ops[number].reads
    return frozenset(found)


def least_saved(block: ModelBlock) -> frozenset[int]:
    """The operations of a recomputed block that have to be saved, since they cannot run again and others need them."""
    return frozenset(number for number in computed(block) if block.ops[number].fixed)


def recompute_seconds(block: ModelBlock, saved: frozenset[int] = frozenset()) -> float:
    """What computing a block's results again takes, without what is saved."""
    return sum(block.ops[number].seconds for number in computed(block, saved)) + OVERHEAD_SECONDS


def recompute_flops(block: ModelBlock, saved: frozenset[int] = frozenset()) -> int:
    """Multiplications and additions of the same."""
    return sum(block.ops[number].flops for number in computed(block, saved))


def kept_results(block: ModelBlock, saved: frozenset[int]) -> frozenset[int]:
    """The operations of a recomputed block that do not run again, though something would need them to."""
    return frozenset(
        number for number, op in enumerate(block.ops) if number in saved or (op.kept and given(op))
    )


def kept_bytes(block: ModelBlock, decision: Decision) -> int:
    """What a block keeps on the device between its forward and its backward pass."""
    if decision.kind is DecisionKind.KEEP:
        return block.kept_bytes
    if decision.kind is DecisionKind.OFFLOAD:
        return 0
    held = block.new_input_bytes + block.shared_bytes + unmovable_bytes(block)
    return held + sum(saved_bytes(block.ops[number]) for number in decision.saved)


def unmovable_bytes(block: ModelBlock) -> int:
    """What a block keeps for itself whether or not it is recomputed."""
    return block.kept_bytes - block.shared_bytes - sum(op.own_bytes for op in block.ops if not given(op))


def absent_bytes(block: ModelBlock, decision: Decision, positions: Positions, *, backward: bool) -> Bytes:
    """Bytes that a recomputed block has less than a plain one at positions of its own pass, negative for more.

    Args:
        positions: as `StepInterval` has them, shape [n]; 0 at negative ones.

    Returns:
        shape [n].
    """
    less = np.zeros(len(positions))
    if decision.kind is not DecisionKind.RECOMPUTE:
        return less
    less -= block.new_input_bytes if backward else 0
    less -= sum(block.ops[number].bytes for number in decision.saved if not block.ops[number].own_bytes)
    again = computed_at(block, decision.saved)
    gone = sorted(
        (position if backward else block.ops[number].last_read, block.ops[number].own_bytes)
        for number, position in again.items()
        if number not in decision.saved and block.ops[number].own_bytes
    )
    after = np.array([position for position, _ in gone], dtype=np.int64)
    total = np.cumsum([0, *(size for _, size in gone)])
    less += total[np.searchsorted(after, positions)]
    return np.where(positions >= 0, less, 0.0)


@functools.lru_cache(maxsize=4096)
def computed_at(block: ModelBlock, saved: frozenset[int]) -> Mapping[int, int]:
    """For each operation that runs again, the position of the backward pass at which it does.

    That is when its results are read, or when something is that is computed from them.
    """
    found = {number: block.ops[number].last_saved for number in sorted(computed(block, saved), reverse=True)}
    for number, position in found.items():
        for read in block.ops[number].reads:
            if read in found:
                found[read] = max(found[read], position)
    return found


def predicted_peak(step: StepProfile, decisions: Mapping[str, Decision]) -> int:
    """The peak of the step with these decisions, in bytes."""
    return int(interval_peaks(step, decisions).max(initial=0))


def interval_peaks(step: StepProfile, decisions: Mapping[str, Decision]) -> Bytes:
    """The peak of each interval of the step with these decisions, in bytes."""
    peaks = np.array([interval.peak_bytes for interval in step.intervals], dtype=np.float64)
    for block in step.blocks:
        if block.path in decisions:
            peaks -= freed_bytes(step, block, decisions[block.path])
    return peaks


def freed_bytes(step: StepProfile, block: ModelBlock, decision: Decision) -> Bytes:
    """Bytes that a decision for a block frees in each interval of the step."""
    freed = held_in(step)[:, block.index] * float(block.kept_bytes - kept_bytes(block, decision))
    for backward in (False, True):
        numbers, positions = _own_intervals(step)[block.index, backward]
        freed[numbers] += absent_bytes(block, decision, positions, backward=backward)
    return freed


@remembered
def _own_intervals(step: StepProfile) -> Mapping[tuple[int, bool], tuple[Positions, Positions]]:
    """Of each block and each of its passes, the numbers of the intervals in which it works, and their positions."""
    found: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for number, interval in enumerate(step.intervals):
        found[interval.block, interval.backward].append((number, interval.position))
    return {
        (block.index, backward): (table[:, 0], table[:, 1])
        for block in step.blocks
        for backward in (False, True)
        for table in [np.array(found[block.index, backward], dtype=np.int64).reshape(-1, 2)]
    }


@remembered
def held_in(step: StepProfile) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Matrix of shape [intervals, blocks]: how many calls of a block wait for their backward pass."""
    held = np.zeros((len(step.intervals), len(step.blocks)))
    for block in step.blocks:
        waiting = waits(step, block)
        if waiting is not None:
            held[:, block.index] = waiting
    held.setflags(write=False)
    return held


def waits(step: StepProfile, block: ModelBlock) -> list[int] | None:
    """How many calls of a block wait for their backward pass in each interval; None where that is not known."""
    return _all_waits(step)[block.index]


@remembered
def _all_waits(step: StepProfile) -> tuple[list[int] | None, ...]:
    return tuple(_waits(step, block) for block in step.blocks)


def _waits(step: StepProfile, block: ModelBlock) -> list[int] | None:
    """The calls of a block that wait.

    With micro-batches a block goes forward and backward in turn. One that several layers share, or a discriminator that
    judges two batches, goes forward more than once before it goes backward: each call then waits by itself. A call that
    never goes backward keeps what it keeps until its result is dropped, whenever that is.
    """
    waiting, seen, counts = 0, set(), []
    intervals = step.intervals
    for interval, following in zip(intervals, (*intervals[1:], None), strict=True):
        mine = interval.block == block.index
        if mine and interval.backward and interval.call not in seen:
            waiting -= bool(waiting)
            seen.add(interval.call if interval.call >= 0 else None)
        counts.append(waiting)
        if mine and not interval.backward and not _goes_on(interval, following):
            waiting += 1
    return counts if waiting == 0 and any(counts) else None


def _goes_on(interval: StepInterval, following: StepInterval | None) -> bool:
    """Whether the next interval belongs to the same pass of the same call."""
    if following is None or interval.call < 0:
        return False
    here, ahead = ((one.block, one.backward, one.call) for one in (interval, following))
    return here == ahead


def overlaps(step: StepProfile, block: ModelBlock) -> bool:
    """Whether several calls of a block wait at once."""
    return max(waits(step, block) or [0]) > 1


def choosable(step: StepProfile, block: ModelBlock) -> bool:
    """Whether anything can be chosen for a block."""
    return bool(block.kept_bytes) and waits(step, block) is not None


def may_offload(step: StepProfile, block: ModelBlock, options: IlpOptions) -> bool:
    """Whether what a block keeps may go to the host; what goes there is counted once for each block."""
    return options.offload and options.link_bytes_per_second > 0 and not overlaps(step, block)


def passes(block: ModelBlock) -> tuple[float, float]:
    """Seconds of a block's forward and of its backward pass."""
    return block.forward_seconds, block.backward_seconds


_LEAST_WINDOW = 1 << 20

_LAYERS = 400
"""Of a model whose results are decided on one by one; with more there are too many for the solver."""


def places(model: nn.Module) -> Sequence[str]:
    """The paths of a model's blocks."""
    return [place.path for place in find_blocks(model)]


def finer_places(model: nn.Module) -> Sequence[str]:
    """The model as a whole, whose results are then decided on one by one; of a large one, the parts of its blocks."""
    layers = sum(1 for module in model.modules() if next(module.children(), None) is None)
    if layers <= _LAYERS and reason_against_rerun(model) is None:
        return [""]
    found: list[str] = []
    for place in find_blocks(model):
        found += place.parts or (place.path,)
    return found


def window_bytes(step: StepProfile) -> int:
    """The window through which activations go to the host: what two blocks keep, within bounds."""
    most = max((block.kept_bytes for block in step.blocks), default=0)
    return min(max(2 * most, _LEAST_WINDOW), ActivationOffloadSetting().window)


def activation_choices(step: StepProfile, decisions: Mapping[str, Decision]) -> tuple[Choice, ...]:
    """The techniques that carry decisions out."""
    choices = []
    recomputed = {
        block.path: kept_results(block, decisions[block.path].saved)
        for block in step.blocks
        if block.path in decisions and decisions[block.path].kind is DecisionKind.RECOMPUTE
    }
    offloaded = tuple(path for path, decision in decisions.items() if decision.kind is DecisionKind.OFFLOAD)
    if recomputed:
        setting = setting_for(recomputed, step.blocks)
        choices.append(Choice(technique=find_technique("activation-checkpointing"), setting=setting))
    if offloaded:
        choices.append(
            Choice(
                technique=find_technique("activation-offload"),
                setting=ActivationOffloadSetting(modules=offloaded, window=window_bytes(step)),
            )
        )
    return tuple(choices)
