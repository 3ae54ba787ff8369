"""What recorders of real programs share: the interface that their users see, and watching what a program does.

NOTE [Watching a program]
Two functions of torch are replaced while a recording lasts (``nn.Module.__call__`` and the one entry of the autograd
engine), each with its undo; torch's own global optimizer hooks report steps. Nothing is put on the program's objects.
Code that torch.compile traces runs as if none of this were here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vramfit.capture.kept_memory import KeptWatch
from vramfit.capture.observing.program_observer import ProgramObserver
from vramfit.capture.step_counter import StepCounter
from vramfit.errors import UsageError
from vramfit.failure_line import failure_line
from vramfit.launch.stopping import StepSink
from vramfit.patching import PatchStack
from vramfit.torch_internals import releases
from vramfit.torch_internals.autograd_engine import current_graph_task_id, engine_runs
from vramfit.trace import Run, RunWarning
from vramfit.watching.torch_figures import FigureSource

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
    """The models and optimizers that the user named.

    Attributes:
        models: by the name that begins the paths of their modules; an empty name stands for the class's.
        optimizers: in the order given.
    """

    models: tuple[tuple[str, nn.Module], ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    @classmethod
    def of(cls, model: Models, optimizer: Optimizers) -> Subjects:
        """Read the arguments of `vramfit.track`.

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
        last_told: tag and allocated bytes of the last line that `vramfit.snapshot` printed for this recording.
    """

    last_told: tuple[str, int] | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin; `stop` undoes what this installs.

        Raises:
            EnvironmentUnfitError: this process cannot be recorded so.
            torch.OutOfMemoryError: what is alive already exceeds the budget; `run` tells of it.
        """

    @abstractmethod
    def stop(self, error: BaseException | None = None) -> Run:
        """End; ``error`` is what ended the recorded code, None if it ended well."""

    @abstractmethod
    def run(self) -> Run:
        """The recording so far."""

    @abstractmethod
    def count_steps(self, stopping: StepSink, patches: PatchStack) -> StepCounter:
        """Count the program's steps until `patches` are undone; `stopping` receives each."""

    def watch_kept(self, patches: PatchStack) -> KeptWatch | None:
        """Watch for memory held beyond its use until `patches` are undone; None where storages are not followed."""
        del patches
        return None

    @abstractmethod
    def observe(self, patches: PatchStack) -> ProgramObserver:
        """Observe what the program trains until `patches` are undone."""

    @abstractmethod
    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give back the allocator's segments that hold nothing."""

    def pinned_bytes(self) -> int:
        """Page-locked bytes that torch holds of the host."""
        return 0

    def watched_figures(self) -> FigureSource | None:
        """Where a watch of this process finds its figures; None where torch tells them."""
        return None

    @abstractmethod
    def figures(self, device: int = 0) -> AllocatorFigures:
        """What the allocator holds now."""


running: list[Recorder] = []
"""The recordings of this process that run, innermost last."""


def error_line(error: BaseException | None) -> str | None:
    """Why a run failed, None for one that did not."""
    return None if error is None else failure_line(error)


def release_warnings() -> tuple[RunWarning, ...]:
    """What a recording says of a torch that is newer than any that was tried."""
    told = releases.untried()
    return () if told is None else (RunWarning(code=releases.UNTRIED, message=told, location=None, count=1),)


# -- Watchers: see NOTE [Watching a program] -----------------------------------------------------------------


class Watcher(Protocol):
    """Receives what a program does. No method may raise, but SystemExit where a phase begins, to end the program."""

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's call begins."""

    def leave_module(self) -> None:
        """The call that began last on this thread ends."""

    def begin_backward(self) -> None:
        """The program calls the autograd engine."""

    def end_backward(self) -> None:
        """The autograd engine returns."""

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step ends."""

    def new_parameter(self, tensor: torch.Tensor) -> None:
        """A module was given a parameter or a buffer."""


def watch(watcher: Watcher, patches: PatchStack) -> None:
    """Call `watcher` for what the program does, until `patches` are undone."""
    _watch_modules(watcher, patches)
    _watch_engine(watcher, patches)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        watcher.begin_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        watcher.end_step(optimizer)

    def registered(_: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        del name
        if isinstance(tensor, torch.Tensor):
            watcher.new_parameter(tensor)

    patches.call(register_optimizer_step_pre_hook(before).remove)
    patches.call(register_optimizer_step_post_hook(after).remove)
    patches.call(register_module_parameter_registration_hook(registered).remove)
    patches.call(register_module_buffer_registration_hook(registered).remove)


def _watch_modules(watcher: Watcher, patches: PatchStack) -> None:
    original = nn.Module.__call__
    is_compiling = torch.compiler.is_compiling

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        try:
            watcher.enter_module(self, args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            watcher.leave_module()

    patches.set(nn.Module, "__call__", call)


def _watch_engine(watcher: Watcher, patches: PatchStack) -> None:
    original = engine_runs[0].get()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if current_graph_task_id() != -1:  # reentrant, as in checkpointing
            return original(*args, **kwargs)
        watcher.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            watcher.end_backward()

    for place in engine_runs:
        place.replace(patches, run_backward)
