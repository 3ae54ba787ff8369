"""Why a request could not be served, what the program needs at least, and what to try.

NOTE [What a program needs that ran out]
What it held with the request that failed is a lower bound. So is what does not depend on its batch: parameters,
gradients and the optimizer's states exist together at every step, those that were still to come included
(`vramfit.trace.StillToCome`). And from the second iteration on the states lie beside the activations of the moment at
which the first one failed: it is taken that there is a second one, of a batch as large. The larger of these bounds
counts; what later layers would have added is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vramfit.analysis.breakdown import Breakdown
from vramfit.trace import Category, OomReport, StillToCome
from vramfit.units import format_bytes

NAMES: Mapping[Category, str] = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.ACTIVATIONS: "activations",
    Category.INPUTS: "inputs",
    Category.TEMPORARIES: "temporaries",
    Category.WORKSPACES: "workspaces",
    Category.OTHER: "other",
}
"""The categories in words, in the order in which they are shown."""

LARGER_CARD = "a larger card: whatever the program does, its context stays"

_STATE = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)

_PASSES = ("torch/nn/modules/module.py", "torch/autograd/__init__.py")
"""Files through which forward and backward passes go."""

_NOTABLE = 0.02
"""Share of the card from which free gaps are named as a reason: every allocator has some."""


def context_alone(context: int, total: int) -> str:
    """Why nothing at all can be served on a card of so many bytes."""
    more = "is more than" if context > total else "takes all of"
    return f"the CUDA context ({format_bytes(context)}) alone {more} {format_bytes(total)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A request that failed, on a card. Bytes throughout.

    Attributes:
        oom: the request.
        breakdown: what the card held then.
        context: of CUDA.
        total: memory of the card.
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
        return max(self.reached + again, self.context + self.fixed)

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
        held = self.breakdown.categories
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
        held, state = self.breakdown.categories, self._state
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
        if self._fragmented():
            split = self.breakdown.fragmentation.inactive_split
            reasons.append(f"{format_bytes(split)} are reserved but lie in gaps too small for {request}")
        return reasons

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
        """What the program would have asked for after this moment, if that can be told."""
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

    def _fragmented(self) -> bool:
        """Whether the request would have been served had the free bytes, if no trifle, lain together."""
        fragments = self.breakdown.fragmentation
        if fragments.inactive_split < self.usable * _NOTABLE or self.used > self.total:
            return False
        return (
            self.oom.requested_bytes <= fragments.inactive_split + fragments.releasable + self.oom.free_bytes
        )

    def advice(self, alloc_conf: str) -> list[str]:
        """What to try, judged from what holds the card."""
        if self.total and self.context >= self.total:
            return [LARGER_CARD]
        advice = []
        if self._fragmented() and "expandable_segments:true" not in alloc_conf.replace(" ", "").lower():
            advice.append("--alloc-conf expandable_segments:True, which lets free memory be joined")
        if not self.any_batch:
            come = self.oom.to_come
            smaller = "" if come is not None and not come.training else ", or a smaller optimizer state"
            advice.append(f"a larger card, several cards{smaller}: no batch fits, however small")
        elif self.breakdown.categories[Category.ACTIVATIONS] > self.usable // 10:
            advice.append("a smaller batch, activation checkpointing or a lower precision")
        return advice


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
