"""The ladder: what is done so that a step fits, one rung after the other, and back down when there is room again.

NOTE [Back down]: a rung costs time, so it is left again; and a step that runs out costs more than many slower ones, so
it is not tried too often. After a number of good steps one rung is left on trial. If a step runs out within as many
steps again, it was too early: the rung is taken again, and the wait doubles. If not, the wait halves, to no less than
the first. So a lasting shortage is tried ever more rarely (no swinging), and one that has passed is noticed soon. Where
a card tells how much is free, the trial waits until what the failed step needed is within reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vramfit.runtime.survival.leftovers import MemoryNow


class Rung(Enum):
    """What is done on a rung.

    Attributes:
        PLAIN: nothing.
        AGAIN: the same once more, in cleaned memory.
        DEFRAGMENT: states of the optimizer go to the host and come back, so that what is free is in one piece.
        MICRO_BATCHES: the batch in more pieces, with the same gradients but for rounding.
        CHECKPOINTING: blocks keep their input and run again in the backward pass.
        OFFLOAD: saved tensors wait on the host.
        STATES: the optimizer's states are on the host, where its step is done.
    """

    PLAIN = "plain"
    AGAIN = "again"
    DEFRAGMENT = "defragment"
    MICRO_BATCHES = "micro-batches"
    CHECKPOINTING = "checkpointing"
    OFFLOAD = "activation-offload"
    STATES = "optimizer-states"


@dataclass(frozen=True, kw_only=True, slots=True)
class RungLevel:
    """How a step is run.

    Attributes:
        rung: the rung that it stands on.
        pieces: micro-batches.
        checkpointing, offload: whether blocks are recomputed, and saved tensors wait on the host.
        states: whether the optimizer's states are on the host.
    """

    rung: Rung
    pieces: int = 1
    checkpointing: bool = False
    offload: bool = False
    states: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivalEvent:
    """Something that the ladder did.

    Attributes:
        step: the number of the step, from 0.
        kind: ``retry`` (the same again), ``up`` (more is done), ``down`` (on trial), ``hosted`` (states of so many
            parameters went to the host), ``back`` (they came back), ``host-pressure`` (the host's memory is nearly
            used up, and room was made there, or there is none to be made), ``reserve`` (what is kept back for the
            optimizer's step is used for good, or whole again), ``given-up``.
        rung: that it stands on now.
        cause: the first line of the error; empty for a way down.
        evidence: what the device held, and what was asked for.
        pieces: micro-batches now.
    """

    step: int
    kind: str
    rung: Rung
    cause: str = ""
    evidence: str = ""
    pieces: int = 1

    def __str__(self) -> str:
        words = f"step {self.step}: {self.kind} {self.rung.value}"
        if self.pieces > 1:
            words += f", {self.pieces} micro-batches"
        return "; ".join(part for part in (words, self.cause, self.evidence) if part)


class Ladder:
    """Where a loop stands, and when it moves.

    Args:
        levels: from the plain step up.
        patience: good steps before a rung is left on trial.

    Attributes:
        place: the level of the next attempt.
    """

    def __init__(self, levels: tuple[RungLevel, ...], *, patience: int) -> None:
        self.levels, self._least = levels, patience
        self.place = 0
        self._patience = patience
        self._good = 0
        self._trial = False
        self._needed: list[int] = [0] * len(levels)
        """What a step of each level needed at least where it ran out, in bytes within reach."""

    @property
    def level(self) -> RungLevel:
        """How the next attempt is run."""
        return self.levels[self.place]

    def shortage(self, level: int, needed: int) -> None:
        """Note that a step ran out on a level.

        Args:
            needed: bytes that would have had to be within reach, as far as is known.
        """
        self._good = 0
        self._needed[level] = max(self._needed[level], needed)
        if self._trial:
            self._patience *= 2
            self._trial = False

    def climb(self, place: int) -> None:
        """Stand on a level from now on."""
        self.place = place

    def after_good_step(self) -> None:
        """Count a step that went well."""
        self._good += 1
        if self._trial and self._good >= self._patience:
            self._patience = max(self._least, self._patience // 2)
            self._trial = False

    def may_go_down(self, below: int, now: MemoryNow | None) -> bool:
        """Whether a rung may be left on trial: steps went well for long enough, and there is room.

        Args:
            below: the level that would be stood on then.
            now: what the device holds between steps; None where nobody knows.
        """
        if below >= self.place or self._good < self._patience:
            return False
        return now is None or self.has_room(below, now)

    def has_room(self, level: int, now: MemoryNow) -> bool:
        """Whether what a level is known to need is within reach."""
        return self._needed[level] <= now.within_reach + now.allocated

    def go_down(self, below: int) -> None:
        """Leave a rung on trial, for a level below."""
        self.place = below
        self._good = 0
        self._trial = True
