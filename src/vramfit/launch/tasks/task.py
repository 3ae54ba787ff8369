"""One thing of many that is to be done, and what came of it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

LINE = 300
"""Characters of the line that says why a task failed."""


class TaskPlace(Enum):
    """Where the function of a task runs."""

    PROCESS = "process"
    """In a process of its own, which is started for it."""
    EXECUTOR = "executor"
    """Where the executor runs it: it starts a process itself, as that of a rank does."""


class Ending(Enum):
    """How a task ended."""

    DONE = "done"
    KEPT = "kept"
    """An earlier run did it."""
    FAILED = "failed"
    """Its function raised an exception."""
    DIED = "died"
    """Its process ended before it had a result."""
    LATE = "late"
    """It took too long, and was ended."""
    STOPPED = "stopped"
    """It was interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A call of a function.

    Attributes:
        key: its name among the others, by which its result is kept.
        function: what is called. In a process of its own it may be any that cloudpickle can pass on, a script's too.
        arguments: of the call.
        place: where it runs.
    """

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    place: TaskPlace = TaskPlace.PROCESS


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """What came of a task.

    Attributes:
        key: the task's.
        ending: how it ended.
        value: what the function returned; None unless it is done or kept.
        failure: why the function did not return, in a line; empty if it did.
        error: the exception that the function raised; None where it raised none, or one that cannot be passed on.
        seconds: of wall time.
    """

    key: str
    ending: Ending
    value: Any = None
    failure: str = ""
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def has_value(self) -> bool:
        """Whether the function returned."""
        return self.ending in (Ending.DONE, Ending.KEPT)


def failed(key: str, error: BaseException, seconds: float = 0.0) -> TaskResult:
    """The result of a function that raised an exception."""
    lines = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return TaskResult(key=key, ending=Ending.FAILED, failure=why[:LINE], error=error, seconds=seconds)
