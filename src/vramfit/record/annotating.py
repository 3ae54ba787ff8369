"""Named ranges around modules and phases, for the profilers that people have: NVTX for Nsight Systems, torch.profiler.

NOTE [Which ranges there are]
``step 3`` is the third round of the optimizers (capture/optimizer_rounds.py); within it ``forward``, ``backward`` and
``optimizer`` follow each other. A forward phase begins with the first call of a module outside another and ends where
the backward pass begins; without one it lasts until that call ends. Each call of a module is a range with its path,
nested as the calls are.
The backward pass has no ranges of modules: the engine runs nodes, not modules (``emit_nvtx`` shows the nodes).
A range is closed on the thread that opened it, so ranges of modules that other threads run nest there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vramfit.capture.optimizer_rounds import OptimizerRounds
from vramfit.errors import EnvironmentUnfitError, UsageError
from vramfit.patching import PatchStack
from vramfit.record.recorder import watch
from vramfit.torch_internals.cuda_device import has_nvtx

Opened = Callable[[], object]
"""Closes a range."""


@contextmanager
def annotate(
    model: nn.Module | None = None, *, nvtx: bool = True, profiler: bool = False, prefix: str = ""
) -> Iterator[None]:
    """Give the phases and modules of a program named ranges that profilers show.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    >>> with torch.profiler.profile() as profile, vramfit.annotate(model, nvtx=False, profiler=True):
    ...     _ = model(torch.ones(1, 8))
    >>> sorted(event.key for event in profile.key_averages() if "Sequential" in event.key)
    ['Sequential', 'Sequential.0']

    With NVTX, ``nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py`` shows kernels and memory
    below ``step 1`` > ``forward`` > ``GPT.blocks.0.attention``. Everything installed is gone after the block.

    Args:
        model: its modules are named by their paths, all other modules by their class.
        nvtx: make NVTX ranges.
        profiler: make ranges of `torch.profiler.record_function`.
        prefix: put before each name, to filter by (``nsys stats --filter-nvtx``).

    Raises:
        EnvironmentUnfitError: NVTX is wanted, but this torch is a CPU build without it.
        UsageError: neither kind of range is wanted, or ``model`` is not a module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"annotate was given a {type(model).__name__}", "Give a torch.nn.Module, or none")
    if not nvtx and not profiler:
        raise UsageError("annotate would make no ranges", "Leave nvtx=True, or set profiler=True")
    if nvtx and not has_nvtx():
        raise EnvironmentUnfitError(
            f"torch {torch.__version__} was built without NVTX",
            "Use a CUDA build, or annotate(model, nvtx=False, profiler=True) with torch.profiler",
        )
    ranges = _Ranges(_paths(model), _openers(nvtx, profiler), prefix)
    with PatchStack() as patches:
        patches.call(ranges.close)
        watch(ranges, patches)
        ranges.rounds.follow(patches)
        yield


def _openers(nvtx: bool, profiler: bool) -> list[Callable[[str], Opened]]:
    found: list[Callable[[str], Opened]] = []
    if nvtx:
        found.append(_open_nvtx)
    if profiler:
        found.append(_open_record_function)
    return found


def _open_nvtx(name: str) -> Opened:
    torch.cuda.nvtx.range_push(name)
    return torch.cuda.nvtx.range_pop


def _open_record_function(name: str) -> Opened:
    opened = torch.profiler.record_function(name)
    opened.__enter__()
    return lambda: opened.__exit__(None, None, None)


def _paths(model: nn.Module | None) -> WeakIdKeyDictionary:
    """The names of modules, held weakly: a module made later at the same address is not mistaken for the first."""
    found = WeakIdKeyDictionary()
    if model is not None:
        root = type(model).__name__
        for name, module in model.named_modules():
            found[module] = f"{root}.{name}" if name else root
    return found


class _Ranges:
    """Opens and closes ranges as the program runs; a watcher of `vramfit.record.recorder`."""

    def __init__(
        self, paths: WeakIdKeyDictionary, openers: list[Callable[[str], Opened]], prefix: str
    ) -> None:
        self._paths, self._openers, self._prefix = paths, openers, prefix
        self._threads = threading.local()
        self._owner = threading.get_ident()
        self._phases: list[list[Opened]] = []
        self._phase = ""
        self._step = 1
        self._round_over = False
        self.rounds = OptimizerRounds()
        self.rounds.on_step = self._end_round

    # -- what the program does ---------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the range of a module's call, and the forward phase with the first."""
        del args, kwargs
        stack = self._modules()
        if not stack and self._is_owner() and self._phase not in ("forward", "backward"):
            self._begin("forward")
        stack.append(self._open(self._paths.get(module, type(module).__name__)))

    def leave_module(self) -> None:
        """Close the range of a call; without gradients no backward pass will end the phase."""
        stack = self._modules()
        if stack:
            _close(stack.pop())
        if not stack and self._is_owner() and self._phase == "forward" and not torch.is_grad_enabled():
            self._end_phase()

    def begin_backward(self) -> None:
        """Open the backward phase."""
        if self._is_owner():
            self._begin("backward")

    def end_backward(self) -> None:
        """Close the backward phase."""
        if self._is_owner() and self._phase == "backward":
            self._end_phase()

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Open the phase of an optimizer's step."""
        del optimizer
        if self._is_owner():
            self._begin("optimizer")

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Close the optimizer phase; the step of training ends when the next phase begins."""
        del optimizer
        if self._is_owner():
            self._end_phase()

    def _end_round(self, ended: bool) -> None:
        self._round_over = self._round_over or (ended and self._is_owner())

    def new_parameter(self, tensor: torch.Tensor) -> None:
        """Do nothing: parameters have no range."""

    # -- ranges --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the ranges that are open on the thread that annotates."""
        for stack in (self._modules(), self._phases):
            while stack:
                _close(stack.pop())
        self._phase = ""

    def _begin(self, phase: str) -> None:
        if (
            self._modules() and self._phase
        ):  # a backward pass or a step within a module's call: it stays a part
            return
        self._end_phase()
        if self._round_over and phase != "optimizer":
            self._round_over = False
            self._step += 1
            while self._phases:
                _close(self._phases.pop())
        if not self._phases:
            self._phases.append(self._open(f"step {self._step}"))
        self._phases.append(self._open(phase))
        self._phase = phase

    def _end_phase(self) -> None:
        if self._phase and len(self._phases) == 2:
            _close(self._phases.pop())
        self._phase = ""

    def _open(self, name: str) -> list[Opened]:
        return [opener(self._prefix + name) for opener in self._openers]

    def _modules(self) -> list[list[Opened]]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[list[Opened]] = self._threads.stack
        return stack

    def _is_owner(self) -> bool:
        return threading.get_ident() == self._owner


def _close(opened: list[Opened]) -> None:
    for close in reversed(opened):
        close()
