"""How long a step waits for what goes to the host: the copies of activation-offload beside the computation.

NOTE [Copies beside the computation]: each result that goes to the host is one copy, and the window holds a few of them.
So a step waits not only where the link is slower than the computation as a whole: in the forward pass as soon as more
than the window is on its way, in the backward pass for each result that could not be called back in time. What one
block leaves in the window when its pass is over, the next one cannot use. So the copies of all blocks are followed one
by one, in the order of `vramfit.techniques.activation_offload.Ledger`, from when each result was saved and needed in
the profiled step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vramfit.planner.activation_ilp.decisions import (
    OVERHEAD_SECONDS,
    Decision,
    DecisionKind,
    IlpOptions,
    recompute_seconds,
)
from vramfit.planner.step_profiler import BETWEEN, StepProfile
from vramfit.techniques import ModelBlock
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.core.model_profile import Saved

_LEAST_BYTES = ActivationOffloadSetting().min_bytes

Decisions = Mapping[str, Decision]


@dataclass(slots=True)
class _Copy:
    """One result that goes to the host and comes back."""

    nbytes: int
    out: float = 0.0
    there: bool = True  # on the card
    back: float | None = None


@dataclass(slots=True)
class _Lane:
    """The window and the link, as `vramfit.techniques.activation_offload.Ledger` uses them.

    Attributes:
        now: what the device has computed so far, in seconds, with all waiting.
    """

    window: int
    rate: float
    now: float = 0.0
    _out_free: float = 0.0
    _in_free: float = 0.0
    _order: list[_Copy] = field(default_factory=list)
    _leaving: deque[_Copy] = field(default_factory=deque)

    def send(self, nbytes: int) -> _Copy:
        """A result goes; older ones have to be out where the window is full."""
        made = _Copy(nbytes)
        made.out = self._out_free = max(self._out_free, self.now) + nbytes / self.rate
        under_way = sum(one.nbytes for one in self._leaving)
        while under_way > self.window:
            first = self._leaving.popleft()
            self.now = max(self.now, first.out)
            first.there = False
            under_way -= first.nbytes
        self._leaving.append(made)
        self._order.append(made)
        return made

    def fetch(self, wanted: _Copy) -> None:
        """A result is needed, and those before it are called back as far as the window allows."""
        if not wanted.there:
            self._call(wanted)
            self.now = max(self.now, wanted.back or 0.0)
        elif wanted in self._leaving:
            self._leaving.remove(wanted)
        place = self._order.index(wanted)
        del self._order[place]
        ahead = sum(one.nbytes for one in self._order if one.back is not None)
        for one in reversed(self._order[:place]):
            if one.there or one.back is not None:
                continue
            if ahead + one.nbytes > self.window and (ahead or not self.window):
                break
            self._call(one)
            ahead += one.nbytes

    def _call(self, wanted: _Copy) -> None:
        if wanted.back is None:
            wanted.back = self._in_free = max(self._in_free, self.now) + wanted.nbytes / self.rate


def crossing(block: ModelBlock) -> tuple[Saved, ...]:
    """What of a block goes to the host: what is not too small for it."""
    return tuple(one for one in block.saves if one.bytes >= _LEAST_BYTES)


def crossing_seconds(block: ModelBlock, options: IlpOptions) -> float:
    """Seconds that what a block sends to the host takes over the link, one way."""
    return sum(one.bytes for one in crossing(block)) / options.link_bytes_per_second


def waiting_seconds(step: StepProfile, decisions: Decisions, options: IlpOptions) -> float:
    """Seconds that a step waits for the link with these decisions, with the host's part in it."""
    away = {path for path, decision in decisions.items() if decision.kind is DecisionKind.OFFLOAD}
    if not away:
        return 0.0
    passes = tuple(_passes(step))
    waited = sum(_waits(passes, decisions, options))
    offloaded = [block for block in step.blocks if block.path in away]
    # A few micro-batches stand for all of them.
    seen = sum(1 for block, backward in passes if block.path in away and not backward)
    calls = sum(block.calls for block in offloaded)
    return waited * calls / max(1, seen) + OVERHEAD_SECONDS * calls


def alone_seconds(block: ModelBlock, options: IlpOptions) -> tuple[float, float]:
    """Seconds that a block's forward and its backward pass wait where it is the only one that goes to the host."""
    forward, backward = _waits(
        ((block, False), (block, True)), {block.path: Decision(DecisionKind.OFFLOAD)}, options
    )
    return forward, backward


def _waits(
    passes: Sequence[tuple[ModelBlock, bool]], decisions: Decisions, options: IlpOptions
) -> tuple[float, float]:
    """Seconds that forward passes wait, and backward passes."""
    lane = _Lane(options.window, options.link_bytes_per_second)
    here: dict[int, list[tuple[_Copy, Saved]]] = {}
    found = [0.0, 0.0]
    for block, backward in passes:
        decision = decisions.get(block.path, Decision(DecisionKind.KEEP))
        began, seconds = lane.now, block.backward_seconds if backward else block.forward_seconds
        if decision.kind is DecisionKind.OFFLOAD and not backward:
            here[block.index] = _forward(block, lane)
        elif decision.kind is DecisionKind.OFFLOAD:
            _backward(block, lane, here.pop(block.index, []))
        else:
            if backward and decision.kind is DecisionKind.RECOMPUTE:
                seconds += recompute_seconds(block, decision.saved)
            lane.now += seconds
        found[backward] += max(0.0, lane.now - began - seconds)
    return found[0], found[1]


def _forward(block: ModelBlock, lane: _Lane) -> list[tuple[_Copy, Saved]]:
    sent, ran = [], 0.0
    for one in crossing(block):
        lane.now += one.saved_at - ran
        sent.append((lane.send(one.bytes), one))
        ran = one.saved_at
    lane.now += max(0.0, block.forward_seconds - ran)
    return sent


def _backward(block: ModelBlock, lane: _Lane, sent: Sequence[tuple[_Copy, Saved]]) -> None:
    ran = 0.0
    for copy, one in sorted(
        sent, key=lambda pair: pair[1].needed_at
    ):  # of an operation, the first saved first
        if one.needed_at < 0:
            continue
        lane.now += one.needed_at - ran
        lane.fetch(copy)
        ran = one.needed_at
    lane.now += max(0.0, block.backward_seconds - ran)


def _passes(step: StepProfile) -> Iterator[tuple[ModelBlock, bool]]:
    """The passes of blocks, in order: each with whether it is backward."""
    before, seen = None, set()
    for interval in step.intervals:
        key = (interval.block, interval.backward, interval.call)
        again = key == before or (interval.backward and interval.call >= 0 and key in seen)
        before = key
        seen.add(key)
        if interval.block != BETWEEN and not again:
            yield step.blocks[interval.block], interval.backward


def spread(
    step: StepProfile, decisions: Decisions, options: IlpOptions, fits: Callable[[Decisions], bool]
) -> Decisions:
    """The same decisions for other ones of equal blocks, where the step then waits less for the link.

    What one block leaves in the window is on its way while the next one computes: so blocks that go to the host are
    best apart from one another.
    """
    alike: dict[tuple[int, int], list[str]] = {}
    for block in step.blocks:
        alike.setdefault((block.like, block.calls), []).append(block.path)
    best, least = decisions, waiting_seconds(step, decisions, options)
    for paths in alike.values():
        away = sum(_away(decisions, path) for path in paths)
        for shift in (0.0, 0.5) if 0 < away < len(paths) else ():
            chosen = {int((number + shift) * len(paths) / away) for number in range(away)}
            changed = _moved(best, paths, chosen)
            waits = waiting_seconds(step, changed, options)
            if waits < least and fits(changed):
                best, least = changed, waits
    return best


def _away(decisions: Decisions, path: str) -> bool:
    return path in decisions and decisions[path].kind is DecisionKind.OFFLOAD


def _moved(decisions: Decisions, paths: Sequence[str], chosen: set[int]) -> Decisions:
    """Decisions in which those of equal blocks that are chosen go to the host, and the others have the others' ones."""
    rest = iter([decisions.get(path) for path in paths if not _away(decisions, path)])
    changed = dict(decisions)
    for number, path in enumerate(paths):
        decision = Decision(DecisionKind.OFFLOAD) if number in chosen else next(rest)
        if decision is None:
            changed.pop(path, None)
        else:
            changed[path] = decision
    return changed
