"""Programs that start processes: the one process of torchrun or ``spawn`` is this one; more are refused by name.

A process that torch starts is a new interpreter, in which there is no virtual card. What it would run alone runs here:
torchrun's script with the variables that torchrun sets, and the function of ``torch.multiprocessing.spawn`` with rank
0. Where this process is one rank of several, a spawn of all ranks, or of a node's, runs the function of this rank; what
runs the others spawns them too. On a card the child of ``spawn`` would have a CUDA context of its own, beside the
parent's if that has one.

A program whose user has set ``RANK=0`` and ``WORLD_SIZE=1`` by hand finds the others of torchrun's variables as well: a
script that is written for torchrun may read any of them.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import multiprocessing.process
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed
from torch import nn

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.rank_place import ALONE, PORT, RankPlace, elastic_variables

_ONE = (
    "Run its ranks, vramfit run --ranks {processes}, or let it start one process (as it does where it asks "
    "torch.cuda.device_count() and there is one GPU, or by its own option)"
)
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ALL_GPUS = ("gpu", "auto")

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


def install(mode: OpRunner, place: RankPlace, patches: PatchStack) -> None:
    """Run this rank's process of a spawn here, and say plainly what a process of the program's own cannot be given."""
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
        if nprocs > 0:
            _run_here(fn, _number(place, nprocs), tuple(args))
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


def _number(place: RankPlace, processes: int) -> int:
    """The number that a spawn of so many processes gives this rank.

    Raises:
        UsageError: it starts another number of processes than there are ranks.
    """
    if processes == 1:
        return 0
    if processes == place.world_size:
        return place.rank
    if processes == place.cards:
        return place.local_rank
    if place.world_size == 1:
        raise UsageError(
            f"torch.multiprocessing is to start {processes} processes, and a virtual run is one process",
            _ONE.format(processes=processes),
        )
    raise UsageError(
        f"torch.multiprocessing is to start {processes} processes, and the virtual run is rank {place.rank} of "
        f"{place.world_size}",
        f"Run it with --ranks {processes}, or let it start as many processes as there are ranks",
    )


def _run_here(fn: Callable[..., Any], number: int, args: tuple[Any, ...]) -> None:
    """Run a function as the process of that number would; its process group ends with it, as with its process."""
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        fn(number, *args)
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


# -- torchrun ------------------------------------------------------------------------------------------------


def alone(command: list[str], gpus: int) -> list[str]:
    """The command that torchrun would start, and its variables in this process; other commands as they are.

    Args:
        command: what python would be given: a script and its arguments, or ``-m``, a module and its arguments.
        gpus: how many virtual GPUs there are, which is what ``--nproc-per-node=gpu`` means.

    Raises:
        UsageError: torchrun is to start more processes than one.
    """
    arguments = _torchrun_arguments(command)
    if arguments is None:
        _complete()
        return command
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    nodes, processes = str(options.nnodes).split(":")[-1], str(options.nproc_per_node)
    processes = str(gpus) if processes in _ALL_GPUS else processes
    if (nodes, processes) != ("1", "1"):
        raise UsageError(
            f"torchrun is to start {processes} process(es) on {nodes} node(s), and a virtual run is one process",
            f"Run its ranks, vramfit run --ranks {_ranks(nodes, processes)}, or give it --nproc-per-node 1: DDP's "
            "buckets and collectives are then those of one rank",
        )
    if options.no_python:
        raise UsageError(
            "torchrun --no-python starts a program that is not Python's", "Give its Python script itself"
        )
    os.environ.update(elastic_variables(options, 1))
    os.environ.update(ALONE.environment(options.master_addr or "127.0.0.1", options.master_port or PORT))
    script = [options.training_script, *options.training_script_args]
    return ["-m", *script] if options.module else script


def _ranks(nodes: str, processes: str) -> str:
    return str(int(nodes) * int(processes)) if nodes.isdecimal() and processes.isdecimal() else "N"


def _complete() -> None:
    """Add what is missing of torchrun's variables where the user set some of them for one process."""
    if os.environ.get("WORLD_SIZE") == "1" and os.environ.get("RANK") == "0":
        for name, value in ALONE.environment().items():
            os.environ.setdefault(name, value)


def _torchrun_arguments(command: list[str]) -> list[str] | None:
    if command[:1] == ["-m"] and len(command) > 1 and command[1] in _MODULES:
        return command[2:]
    if command and Path(command[0]).name == "torchrun":
        return command[1:]
    return None
