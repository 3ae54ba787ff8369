"""``torchrun`` with one process: its script runs in this process, with the variables that torchrun would set.

torchrun starts its workers as processes of their own, which would not be on the virtual GPU. A program whose user has
set ``RANK=0`` and ``WORLD_SIZE=1`` by hand finds the others of torchrun's variables as well: a script that is written
for torchrun may read any of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from vramfit.errors import UsageError

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ALL_GPUS = ("gpu", "auto")


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
            "Give it --nproc-per-node 1: DDP's buckets and collectives are then those of one rank",
        )
    if options.no_python:
        raise UsageError(
            "torchrun --no-python starts a program that is not Python's", "Give its Python script itself"
        )
    os.environ.update(_variables(options.master_addr or "127.0.0.1", options.master_port or 29500))
    script = [options.training_script, *options.training_script_args]
    return ["-m", *script] if options.module else script


def _complete() -> None:
    """Add what is missing of torchrun's variables where the user set some of them for one process."""
    if os.environ.get("WORLD_SIZE") == "1" and os.environ.get("RANK") == "0":
        for name, value in _variables("127.0.0.1", 29500).items():
            os.environ.setdefault(name, value)


def _torchrun_arguments(command: list[str]) -> list[str] | None:
    if command[:1] == ["-m"] and len(command) > 1 and command[1] in _MODULES:
        return command[2:]
    if command and Path(command[0]).name == "torchrun":
        return command[1:]
    return None


def _variables(address: str, port: int) -> dict[str, str]:
    """What torch/distributed/elastic/agent/server/local_elastic_agent.py sets for a worker."""
    zero = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    )
    one = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zero, "0"),
        **dict.fromkeys(one, "1"),
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
