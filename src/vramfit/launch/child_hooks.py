"""What other parts of vramfit let a program's child do beside running it: named in the job, imported by the child.

So a plan reaches the program, and a question its steps, while what runs and measures imports neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from vramfit.errors import VramfitError
from vramfit.patching import PatchStack
from vramfit.trace import Run
from vramfit.trace.observed_program import ObservedProgram


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildHook:
    """A function that the child calls before the program runs.

    Attributes:
        name: as ``MODULE:FUNCTION``.
        values: plain values that it is given.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    """What observes the program; see `vramfit.capture.observing.program_observer`.

    Attributes:
        on_training: called with a model before its first training pass.
        finder: knows the program's optimizers.
    """

    on_training: Callable[[Any], object]
    finder: Any

    def replaced(self, optimizer: Any) -> None:
        """Hear that another optimizer takes the steps of the program's own."""
        ...

    def observed(self) -> ObservedProgram:
        """What was seen so far."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedProgram:
    """What the child gives its hooks.

    Attributes:
        observer: observes what the program trains.
        patches: undone when the program is over.
        gpu: the virtual GPU; None in a recorded run.
        refuse: ends the program with an error that the user sees.
    """

    observer: Observer
    patches: PatchStack
    gpu: Any = None
    refuse: Callable[[VramfitError], NoReturn]


Leave = Callable[[], Any]
"""Gives what a hook leaves for the parent, as plain values, once the program is over."""


def install_hooks(hooks: Sequence[ChildHook], child: HookedProgram) -> dict[str, Leave]:
    """Call the hooks of a job; what they leave is asked for later, by their names."""
    found: dict[str, Leave] = {}
    for hook in hooks:
        module, _, name = hook.name.partition(":")
        function: Callable[[HookedProgram, dict[str, Any]], Leave] = getattr(
            importlib.import_module(module), name
        )
        found[hook.name] = function(child, hook.values)
    return found


def with_hooks(run: Run, observer: Observer | None, left: dict[str, Leave]) -> Run:
    """A run with what was observed, and with what its hooks left."""
    observed = None if observer is None else observer.observed()
    return replace(run, observed=observed, left={name: leave() for name, leave in left.items()})
