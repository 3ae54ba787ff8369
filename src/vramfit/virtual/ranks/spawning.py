"""``torch.multiprocessing.spawn``: its one process is this one, which is on the virtual GPU; more are refused by name.

A process that torch starts is a new interpreter, in which there is no virtual card. What it would run alone runs here,
with rank 0. On a card the child would have a CUDA context of its own, beside the parent's where that one has any.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import multiprocessing.process
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner

_ONE = (
    "Let it start one process (as it does where it asks torch.cuda.device_count() and there is one GPU, or by its own "
    "option for the number of processes or the world size): that one runs on the virtual GPU"
)


# By its full name: the attribute `spawn` of torch.multiprocessing is the function of that name.
_spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
_Context: Any = _spawning.ProcessContext


class Ended(_Context):  # type: ignore[misc]
    """What ``spawn(..., join=False)`` gives: its process has run already."""

    def __init__(self) -> None:
        super().__init__([], [])

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True: everything has ended."""
        return True


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Run the one process of a spawn here, and say plainly what a process of the program's own cannot be given."""
    start_processes: Callable[..., Any] = _spawning.start_processes
    spawn: Callable[..., Any] = _spawning.spawn

    @functools.wraps(start_processes)
    def start_here(
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **named: Any,
    ) -> Ended | None:
        if nprocs > 1:
            raise UsageError(
                f"torch.multiprocessing is to start {nprocs} processes, and a virtual run is one process",
                _ONE,
            )
        if nprocs == 1:
            _run_as_first(fn, tuple(args))
        return None if join else Ended()

    @functools.wraps(spawn)
    def spawn_here(
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **named: Any,
    ) -> Ended | None:
        return start_here(fn, args, nprocs, join)

    patches.rebind([(start_processes, start_here), (spawn, spawn_here)])
    _refuse_virtual_arguments(patches)


def _run_as_first(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run a function as the process of rank 0 would; its process group ends with it, as it would with its process."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        fn(0, *args)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not grouped:
            torch.distributed.destroy_process_group()


def _refuse_virtual_arguments(patches: PatchStack) -> None:
    """A tensor of the virtual GPU cannot be handed to another interpreter: say so before pickle does."""
    start = multiprocessing.process.BaseProcess.start

    def checked(self: Any) -> None:
        given = (*getattr(self, "_args", ()), *getattr(self, "_kwargs", {}).values())
        method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
        if method != "fork" and any(map(_is_virtual, given)):
            raise UsageError(
                "the program hands a model or tensors of the virtual GPU to a process that it starts, and a virtual "
                "run is one process",
                "Call the function of that process from the program itself, or leave it out: memory that processes "
                "share is counted once, in the process that made it",
            )
        start(self)

    patches.set(multiprocessing.process.BaseProcess, "start", checked)


def _is_virtual(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(isinstance(tensor, FakeTensor) for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_virtual, value))
    if isinstance(value, dict):
        return any(map(_is_virtual, value.values()))
    return isinstance(value, FakeTensor)
