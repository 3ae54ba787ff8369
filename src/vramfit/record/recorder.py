"""What recorders of real programs have in common: they start, can be asked in between, and end with a Run."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from vramfit.capture.step_counter import StepCounter
from vramfit.errors import UsageError
from vramfit.launch.stopping import StepSink
from vramfit.patching import PatchStack
from vramfit.trace import Run

T = TypeVar("T")
Models: TypeAlias = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module] | None
Optimizers: TypeAlias = (
    torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorFigures:
    """What torch's allocator holds at a moment, in bytes.

    Attributes:
        allocated: in tensors.
        reserved: held from the device, the cache included.
        peak_allocated: the highest of `allocated` since the recording began.
        peak_reserved: the highest of `reserved` since then.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Subjects:
    """What the user named: whose tensors are parameters, gradients and optimizer state.

    Attributes:
        models: by the name that begins the paths of their modules; an empty name stands for the class's.
        optimizers: in the order given.
    """

    models: tuple[tuple[str, nn.Module], ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    @classmethod
    def of(cls, model: Models, optimizer: Optimizers) -> Subjects:
        """From what `vramfit.track` is given.

        Raises:
            UsageError: one of them is something else.
        """
        models = tuple(_named(model, nn.Module, "model"))
        optimizers = tuple(value for _, value in _named(optimizer, torch.optim.Optimizer, "optimizer"))
        return cls(models=models, optimizers=optimizers)

    def __bool__(self) -> bool:
        """Whether anything was named."""
        return bool(self.models or self.optimizers)


def _named(given: object, kind: type[T], what: str) -> Iterable[tuple[str, T]]:
    if given is None:
        return
    if isinstance(given, kind):
        yield "", given
        return
    # nn.ModuleDict and nn.ModuleList are modules; what is left are plain containers.
    if isinstance(given, Mapping):
        pairs = [(str(name), value) for name, value in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [("", value) for value in given]
    else:
        pairs = [("", given)]
    for name, value in pairs:
        if not isinstance(value, kind):
            raise UsageError(
                f"{what}= holds a {type(value).__name__}, which is no {kind.__module__}.{kind.__name__}",
                f"Give one, or a list or a dict of them, or leave {what}= out",
            )
        yield name, value


class Recorder(ABC):
    """Records what happens to memory between `start` and `stop`.

    Attributes:
        last_told: tag and allocated bytes of the last line that `vramfit.snapshot` told of this recording.
    """

    last_told: tuple[str, int] | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin; what it installs is undone by `stop`.

        Raises:
            EnvironmentUnfitError: this process cannot be recorded so.
            torch.OutOfMemoryError: what is alive already exceeds the budget; `run` tells of it.
        """

    @abstractmethod
    def stop(self, error: BaseException | None = None) -> Run:
        """End; ``error`` is what ended the recorded code, None if it ended well."""

    @abstractmethod
    def run(self) -> Run:
        """What was recorded so far."""

    @abstractmethod
    def count_steps(self, stopping: StepSink, patches: PatchStack) -> StepCounter:
        """Count the program's steps until `patches` are undone; `stopping` is told of each."""

    @abstractmethod
    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give back the allocator's segments that hold nothing."""

    def pinned_bytes(self) -> int:
        """Page-locked bytes that torch holds of the host."""
        return 0

    @abstractmethod
    def figures(self, device: int = 0) -> AllocatorFigures:
        """What the allocator holds now."""


running: list[Recorder] = []
"""The recordings of this process that run, innermost last."""


def error_line(error: BaseException | None) -> str | None:
    """An exception as a run tells it."""
    return None if error is None else f"{type(error).__name__}: {error}"


def program_of_process() -> tuple[str, ...]:
    """The command line of this process's program."""
    return tuple(sys.argv)
