"""A request that could not be served: why, what would have served it, and what the program needs at least.

NOTE [What a program needs that ran out]
What it held with the request that failed is a lower bound. So is what does not depend on its batch: parameters,
gradients and the optimizer's states exist together at every step, those still to come included
(`vramfit.trace.StillToCome`). And from the second iteration on the states lie beside the activations of the moment at
which the first one failed, provided that there is a second one with a batch as large. The largest of these bounds
counts; what later layers would have added is not known. What only reference cycles hold is not needed.

Where the program was run again without the card's limit, that shows what it needs in all (`vramfit.analysis.need`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.allocator import AllocatorConfig, CachingAllocator, OutOfMemory
from vramfit.allocator.core import MIN_BLOCK
from vramfit.analysis._lifetimes import Lifetimes
from vramfit.analysis.breakdown import Breakdown
from vramfit.analysis.need import Need
from vramfit.searching.largest import halved, largest_where
from vramfit.trace import Capacity, Category, EventKind, MemoryTrace, OomReport, Rehearsal, StillToCome
from vramfit.trace.replay.players import OomPlayer
from vramfit.units import format_bytes

_LARGER_CARD = 16
"""How many times the card's memory and the failed request it is tried with, to see what it lacked."""


class WhatIf(Enum):
    """What could have been otherwise."""

    AS_RECORDED = "as recorded"
    """Nothing: the same settings on an empty card. The request must fail again, or the replay proves nothing."""
    EMPTY_CACHE = "after empty_cache"
    """The program had called ``torch.cuda.empty_cache()`` right before."""
    EXPANDABLE_SEGMENTS = "with expandable segments"
    """Segments had grown by pages from the start of the trace, without a limit to splitting."""
    DEFAULT_SETTINGS = "with the default settings"
    """No setting had been given."""
    DEFRAGMENTED = "defragmented"
    """All blocks had lain side by side, each only as large as its request rounded to 512 bytes."""


class Fit(Enum):
    """Whether it would have fitted."""

    FITS = "fits"
    MISSES = "misses"
    MISSES_EARLIER = "misses earlier"
    """Another request would have failed before this one was reached."""


class OomVerdict(Enum):
    """What would have served the request; of several the first in this order."""

    EMPTY_CACHE = "after empty_cache"
    EXPANDABLE_SEGMENTS = "with expandable segments"
    DEFAULT_SETTINGS = "with the default settings"
    DEFRAGMENTED = "only defragmented"
    """No setting tried would, but the bytes would suffice."""
    NOT_AT_ALL = "not at all"
    """What is alive and the request are more than there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfAnswer:
    """One what-if.

    Attributes:
        what: what is changed.
        fit: whether the request is served then.
        margin: bytes that would be left on the card when it is served and the cache given back; negative: bytes
            that are missing.
        alloc_conf: the settings it was tried with, None where it was no matter of settings.
    """

    what: WhatIf
    fit: Fit
    margin: int
    alloc_conf: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OomExplanation:
    """A request that failed, and what would have served it.

    Attributes:
        requested: bytes of the request, rounded.
        capacity: memory for the allocator, and what tells it.
        answers: one for each what-if.
        largest_request: the largest request that could have been served then, on this stream, in bytes.
        reproduced: the request also fails under the same settings on an empty card; False means that the answers
            prove nothing.
        verdict: what would have served the request.
    """

    row: int
    requested: int
    stream: int
    capacity: Capacity
    answers: tuple[WhatIfAnswer, ...]
    largest_request: int
    reproduced: bool
    verdict: OomVerdict

    def answer(self, what: WhatIf) -> WhatIfAnswer | None:
        """The answer to one what-if; None if it was not tried."""
        return next((found for found in self.answers if found.what is what), None)


def explain_oom(trace: MemoryTrace, lives: Lifetimes, row: int) -> OomExplanation:
    """What would have served the request that failed at event ``row`` of ``lives.device``.

    The requests of the whole trace up to there are served again for each what-if, on a card with as much memory as
    there was at that moment.
    """
    device = lives.device
    rehearsal = Rehearsal(trace, device)
    failures = np.flatnonzero((trace.device == device) & (trace.kind == EventKind.OOM))
    which = int(np.searchsorted(failures, row))
    config = rehearsal.config
    player = rehearsal.until_oom(config, which)
    recorded = _try(player, which, WhatIf.AS_RECORDED, None)
    largest = _largest(player) if recorded.fit is Fit.MISSES else 0
    answers = [recorded]
    emptied = rehearsal.until_oom(config, which)
    emptied.allocator.empty_cache()
    answers.append(_try(emptied, which, WhatIf.EMPTY_CACHE, None))
    for what, other in _settings(config):
        tried = rehearsal.until_oom(other, which)
        answers.append(_try(tried, which, what, other.to_string()))
    size = int(trace.size[row])
    packed = _packed(lives, row)
    margin = rehearsal.capacity.bytes - packed - _rounded(size)
    answers.append(
        WhatIfAnswer(
            what=WhatIf.DEFRAGMENTED,
            fit=Fit.FITS if margin >= 0 else Fit.MISSES,
            margin=margin,
        )
    )
    return OomExplanation(
        row=row,
        requested=size,
        stream=int(trace.stream[row]),
        capacity=rehearsal.capacity,
        answers=tuple(answers),
        largest_request=largest,
        reproduced=recorded.fit is Fit.MISSES,
        verdict=_verdict(answers),
    )


def _settings(config: AllocatorConfig) -> list[tuple[WhatIf, AllocatorConfig]]:
    """Other settings worth a try."""
    found = []
    plain = AllocatorConfig()
    if not config.expandable_segments or config.max_split_size is not None:
        pages = replace(config, expandable_segments=True, max_split_size=None)
        found.append((WhatIf.EXPANDABLE_SEGMENTS, pages))
    if config.to_string() and config != plain:
        found.append((WhatIf.DEFAULT_SETTINGS, plain))
    return found


def _packed(lives: Lifetimes, row: int) -> int:
    """Bytes of everything that is in use, each block only as large as it has to be."""
    sizes = lives.size[lives.active(row)]
    return int((-(-sizes // MIN_BLOCK) * MIN_BLOCK).sum())


def _rounded(size: int) -> int:
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _try(player: OomPlayer, before: int, what: WhatIf, alloc_conf: str | None) -> WhatIfAnswer:
    """Serve the request that failed, or find out what it lacks."""
    allocator, driver, failed = player.allocator, player.allocator.driver, player.failed
    assert failed is not None  # the trace has the event
    if player.ooms > before:
        return WhatIfAnswer(what=what, fit=Fit.MISSES_EARLIER, margin=0, alloc_conf=alloc_conf)
    try:
        address = allocator.malloc(failed.size, failed.stream)
    except OutOfMemory:
        card = driver.total_bytes
        # A segment may be larger than the card itself.
        driver.total_bytes = (card + failed.size + allocator.config.large_segment_size) * _LARGER_CARD
        address = allocator.malloc(failed.size, failed.stream)
        margin = card - driver.mapped_bytes
        _undo(allocator, address)
        driver.total_bytes = card
        return WhatIfAnswer(what=what, fit=Fit.MISSES, margin=margin, alloc_conf=alloc_conf)
    allocator.empty_cache()
    return WhatIfAnswer(what=what, fit=Fit.FITS, margin=driver.free_bytes, alloc_conf=alloc_conf)


def _undo(allocator: CachingAllocator, address: int) -> None:
    allocator.free(address)
    allocator.empty_cache()


def _largest(player: OomPlayer) -> int:
    """The largest request that is served, found by asking; one of 512 bytes more fails."""
    assert player.failed is not None
    allocator, stream = player.allocator, player.failed.stream

    def is_served(blocks: int) -> bool:
        try:
            _undo(allocator, allocator.malloc(blocks * MIN_BLOCK, stream))
        except OutOfMemory:
            return False
        return True

    failing = _rounded(player.failed.size) // MIN_BLOCK
    return largest_where(is_served, halved(failing - 1)).value * MIN_BLOCK


def _verdict(answers: list[WhatIfAnswer]) -> OomVerdict:
    fits = {answer.what for answer in answers if answer.fit is Fit.FITS}
    for what, verdict in (
        (WhatIf.EMPTY_CACHE, OomVerdict.EMPTY_CACHE),
        (WhatIf.EXPANDABLE_SEGMENTS, OomVerdict.EXPANDABLE_SEGMENTS),
        (WhatIf.DEFAULT_SETTINGS, OomVerdict.DEFAULT_SETTINGS),
        (WhatIf.DEFRAGMENTED, OomVerdict.DEFRAGMENTED),
    ):
        if what in fits:
            return verdict
    return OomVerdict.NOT_AT_ALL


NAMES: Mapping[Category, str] = {
    Category.PARAMETERS: "parameters",
    Category.UNSHARDED_PARAMETERS: "unsharded parameters",
    Category.PREFETCH: "prefetch",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.ACTIVATIONS: "activations",
    Category.INPUTS: "inputs",
    Category.TEMPORARIES: "temporaries",
    Category.WORKSPACES: "workspaces",
    Category.COMMUNICATION_BUFFERS: "communication buffers",
    Category.OTHER: "other",
}
"""The categories in words, in the order in which they are shown."""

_STATE = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)

_PASSES = ("torch/nn/modules/module.py", "torch/autograd/__init__.py")
"""Files through which forward and backward passes go."""

_NOTABLE = 0.02
"""Share of the card from which free gaps and dead memory are named as reasons: every allocator has some of the one, and
most programs some of the other."""


def context_alone(context: int, total: int) -> str:
    """Why nothing at all can be served on a card of so many bytes."""
    more = "is more than" if context > total else "takes all of"
    return f"the CUDA context ({format_bytes(context)}) alone {more} {format_bytes(total)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A request that failed, on a card. Bytes throughout.

    Attributes:
        breakdown: what the card held at that moment.
        used: most that was reserved, with the context.
    """

    oom: OomReport
    breakdown: Breakdown
    context: int
    total: int
    used: int

    @property
    def usable(self) -> int:
        """What the card has for the program."""
        return self.total - self.context

    @property
    def reached(self) -> int:
        """What the card would have needed for this request, as if it had got a segment of its own."""
        fragments = self.breakdown.fragmentation
        return self.context + fragments.reserved - fragments.releasable + self.oom.requested_bytes

    @property
    def needed(self) -> int:
        """What the program needs at least. See NOTE [What a program needs that ran out]."""
        come = self.oom.to_come or StillToCome()
        again = come.states_bytes if self._in_pass else 0
        return max(self.reached + again - sum(self.dead.values()), self.context + self.fixed)

    @property
    def dead(self) -> Mapping[Category, int]:
        """What only reference cycles held, by what it was for; empty where that is a trifle or unknown."""
        dead = self.oom.dead
        if dead is None or dead.total_bytes < self.total * _NOTABLE:
            return {}
        return {Category[name.upper()]: amount for name, amount in dead.categories.items()}

    @property
    def _living(self) -> dict[Category, int]:
        """What the card held without what was dead."""
        dead = self.dead
        return {kind: amount - dead.get(kind, 0) for kind, amount in self.breakdown.categories.items()}

    @property
    def fixed(self) -> int:
        """What is there, or is known to come, whatever the batch."""
        return sum(self._state.values()) + self._fixed_to_come

    @property
    def any_batch(self) -> bool:
        """Whether there may be a batch that fits."""
        return self.fixed <= self.usable

    @property
    def _state(self) -> dict[Category, int]:
        held = self._living
        return {kind: held[kind] for kind in _STATE if held[kind]}

    @property
    def _fixed_to_come(self) -> int:
        come = self.oom.to_come
        known = 0 if come is None else come.total_bytes
        # A request of an optimizer's step, or of a model that is being built, does not depend on the batch either.
        return max(known, self.oom.requested_bytes) if self._stepping or (come and come.building) else known

    @property
    def _stepping(self) -> bool:
        if self.oom.to_come is not None:
            return self.oom.to_come.stepping
        for frame in self.oom.stack:
            file = frame.filename.replace("\\", "/")
            if file.endswith(_PASSES):
                return False  # of a closure that an optimizer calls
            if "torch/optim/" in file:
                return True
        return False

    @property
    def _in_pass(self) -> bool:
        """Whether it ran out in a forward or a backward pass of a training."""
        come = self.oom.to_come
        return come is not None and come.training and not come.building and not self._stepping

    def reasons(self) -> list[str]:
        """Why the request could not be served: what holds the card, in words."""
        if self.total and self.context >= self.total:
            return [context_alone(self.context, self.total)]
        request, usable = format_bytes(self.oom.requested_bytes), self.usable
        held, state = self._living, self._state
        reasons = []
        if self.oom.requested_bytes > usable:
            reasons.append(f"this one request is larger than the {format_bytes(usable)} that the card offers")
        elif not self.any_batch:
            reasons.append(self._no_batch())
        elif sum(state.values()) > usable // 2:
            listed, taken = _listed(state), format_bytes(sum(state.values()))
            sums = f"{listed} = {taken}" if len(state) > 1 else listed
            reasons.append(f"{sums} of the usable {format_bytes(usable)}, whatever the batch size")
        largest = sorted(
            (kind for kind in NAMES if held[kind] and kind not in _STATE), key=lambda kind: -held[kind]
        )
        if self.oom.requested_bytes <= usable and (not reasons or held[Category.ACTIVATIONS] > usable // 20):
            kinds = largest[:2] if reasons else sorted((*largest, *state), key=lambda kind: -held[kind])[:3]
            named = ", ".join(f"{NAMES[kind]} {format_bytes(held[kind])}" for kind in kinds)
            reasons.append(f"held at that moment{' too' if reasons else ''}: {named}")
        if still := self._still_to_come():
            reasons.append(still)
        if self.is_fragmented:
            split = self.breakdown.fragmentation.inactive_split
            reasons.append(f"{format_bytes(split)} are reserved but lie in gaps too small for {request}")
        return [*self._dead_reason(), *reasons]

    def _dead_reason(self) -> list[str]:
        """That much is dead, where it is."""
        dead = sum(self.dead.values())
        if not dead:
            return []
        text = "are held by reference cycles alone: the program cannot reach them any more, and gc.collect() frees them"
        return [f"{format_bytes(dead)} {text}"]

    def _no_batch(self) -> str:
        """Why no batch fits, with the request that failed where nothing more is known to come."""
        listed, room = (
            _listed(self._state),
            f"the usable {format_bytes(self.usable)}, whatever the batch size",
        )
        come = self.oom.to_come
        coming = "" if come is None else _coming(come)
        if not coming:
            return f"{listed} leave no room for {format_bytes(self.oom.requested_bytes)} more in {room}"
        return f"{listed + ' and ' if listed else ''}{coming} are more than {room}"

    def _still_to_come(self) -> str:
        """What the program would have asked for after this moment, as far as that is known."""
        held, come = self.breakdown.categories, self.oom.to_come
        if self._stepping:
            return "the optimizer was still at its step" if held[Category.OPTIMIZER_STATE] else ""
        if come is not None:
            rest = "the model was not whole yet" if come.building else ""
            coming = _coming(come) if self.any_batch else ""
            return "; ".join(text for text in (rest, coming) if text)
        training = (
            self.breakdown.moment.phase.endswith(("forward", "backward")) and held[Category.ACTIVATIONS] > 0
        )
        missing = held[Category.PARAMETERS] - held[Category.GRADIENTS]
        if training and missing > held[Category.PARAMETERS] // 2:
            return f"gradients (up to {format_bytes(missing)} more) were still to come, if it trains"
        return ""

    @property
    def is_fragmented(self) -> bool:
        """Whether the request would have been served had the free bytes, if no trifle, lain together."""
        fragments = self.breakdown.fragmentation
        if fragments.inactive_split < self.usable * _NOTABLE or self.used > self.total:
            return False
        return (
            self.oom.requested_bytes <= fragments.inactive_split + fragments.releasable + self.oom.free_bytes
        )

    def advice(self, need: Need) -> list[str]:
        """What was run and helps, as far as that was a second run with garbage collected in time."""
        if not (need.collected and need.whole):
            return []
        line = self.oom.user_line
        where = "" if line is None else f" before {line.filename.rpartition('/')[2]}:{line.line}"
        used = f"{format_bytes(need.bytes)} of {format_bytes(self.total)}"
        if need.bytes > self.total:
            return []
        return [
            f"gc.collect(){where}: run again with garbage collected where memory ran short, the program fits ({used})"
        ]


def _listed(state: Mapping[Category, int]) -> str:
    return " + ".join(f"{NAMES[kind]} {format_bytes(amount)}" for kind, amount in state.items())


def _coming(come: StillToCome) -> str:
    """What is known to come, in words; empty if nothing is."""
    states = f"the states of {' and '.join(come.optimizers)}" if come.optimizers else "optimizer states"
    parts = (
        ("parameters", come.parameters_bytes),
        ("gradients", come.gradients_bytes),
        (states, come.states_bytes),
    )
    named = " + ".join(f"{name} {format_bytes(amount)}" for name, amount in parts if amount)
    return f"{named} still to come" if named else ""
