"""Follows the steps of a program that runs in this process, and ends it after some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramfit.capture.attribution import PhaseTracker, ProgramPhase
from vramfit.patching import PatchStack


class EnoughSteps(SystemExit):
    """Ends a program in which nothing more is to be seen."""


class ScriptSteps:
    """Counts the rounds of a program's optimizers, and ends it where the pass after the last of them begins.

    Args:
        last: how many are wanted.
        on_step: called with the number of each that has ended.

    Attributes:
        count: steps so far.
    """

    def __init__(self, last: int, on_step: Callable[[int], object]) -> None:
        self.count = 0
        self.last = last
        self._on_step = on_step

    def install(self, phases: PhaseTracker, patches: PatchStack) -> None:
        """Follow the steps until `patches` are undone."""
        before: Any = phases.before
        on_step = phases.on_step

        def begin(phase: ProgramPhase) -> None:
            if self.count >= self.last and phase is not ProgramPhase.OPTIMIZER:
                raise EnoughSteps(0)
            if before is not None:
                before(phase)

        def stepped(ends_round: bool) -> None:
            on_step(ends_round)
            if ends_round:
                self.count += 1
                self._on_step(self.count)

        patches.set(phases, "before", begin)
        patches.set(phases, "on_step", stepped)
