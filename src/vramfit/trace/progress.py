"""How far a program came: who ended its run, the steps that were seen, and for how many its memory had been steady."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """What ended a run."""

    PROGRAM = "end"
    """The program itself, well or not."""
    STEPS = "steps"
    """It had made the steps that were asked for, or its memory was steady."""
    TIME = "time"
    """The time that it was given was over."""
    INTERRUPTED = "interrupted"
    """SIGINT, as Ctrl-C sends it, which it did not handle itself."""
    TERMINATED = "terminated"
    """SIGTERM, which it did not handle itself."""


class Unit(Enum):
    """What counts as a step."""

    OPTIMIZER = "optimizer_step"
    """A round in which each optimizer in use has stepped."""
    FORWARD = "forward_pass"
    """A call of the largest module, where there is no optimizer."""


STEADY = 3
"""Steps in a row that must ask for the same memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a program came.

    Attributes:
        end: what ended the run.
        steps: whole steps that were seen.
        unit: what they are; None where there were none.
        steady: how many of them, up to the last, asked for the same memory in the same order, the peak staying as it
            was; 0 without steps.
        module: the class of the module whose calls were counted, empty for other steps.
    """

    end: End = End.PROGRAM
    steps: int = 0
    unit: Unit | None = None
    steady: int = 0
    module: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether the run was ended from outside, so that what came later is unknown."""
        return self.end is not End.PROGRAM

    @property
    def was_asked_for(self) -> bool:
        """Whether the user asked beforehand that the run ends there."""
        return self.end in (End.STEPS, End.TIME)

    @property
    def is_steady(self) -> bool:
        """Whether enough steps asked for the same memory."""
        return self.steady >= STEADY

    def to_plain(self) -> dict[str, str | int | None]:
        """As plain values that JSON can hold."""
        return {
            "end": self.end.value,
            "steps": self.steps,
            "unit": None if self.unit is None else self.unit.value,
            "steady": self.steady,
            "module": self.module,
        }


UNTOLD = Progress()
"""A run that ended by itself, of whose steps nobody told."""


def progress_from_plain(values: dict[str, object]) -> Progress:
    """The progress that `Progress.to_plain` described."""
    unit = values["unit"]
    return Progress(
        end=End(values["end"]),
        steps=int(str(values["steps"])),
        unit=None if unit is None else Unit(unit),
        steady=int(str(values["steady"])),
        module=str(values["module"]),
    )
