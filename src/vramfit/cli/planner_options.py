"""What the verbs of the planner share: options, and a line that shows what is going on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli.options import gpu_names, size_of
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.planner.planner_job import MemoryBudget

WorkloadName = Annotated[
    str, typer.Argument(metavar="FILE.py:WORKLOAD", help="The file and the Workload in it.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help='The virtual card: "RTX 4090", a size such as 24GiB, or a TOML file.',
        autocompletion=gpu_names,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="cpu", help="Plan for this machine's CPU instead; needs --budget, and runs for real."
    ),
]
Budget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="What the program may take, instead of the whole card.")
]
Margin = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="What is left free of it.", show_default="2 % of the card, 0 of a budget"
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory that may be spent.", show_default="what is free here"),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="NAME=N",
        help="A size of the batch, such as batch_size=64. Several times for several.",
    ),
]
OnCard = Annotated[
    bool | None,
    typer.Option(
        "--card/--no-card",
        help="Run it on this machine's card too, whatever card it is; or never.",
        show_default="if it is the same card",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result as JSON; - for standard output.")
]


def room_of(
    gpu: str | None,
    device: str | None,
    budget: str | None,
    margin: str | None,
    host_budget: str | None,
    alloc_conf: str | None,
) -> MemoryBudget:
    """What the options leave to the workload.

    Raises:
        UsageError: an option makes no sense.
        UnknownGpuError: there is no such card.
    """
    from vramfit.planner.planner_job import MemoryBudget

    if device not in (None, "cpu"):
        raise UsageError(f"cannot plan for the device {device!r}", "Give --gpu NAME, or --device cpu")
    if (gpu is None) == (device is None):
        raise UsageError("no device is given", 'Give --gpu NAME, such as --gpu "RTX 4090", or --device cpu')
    spec = None
    if gpu is not None:
        from vramfit.gpus import find_gpu

        spec = find_gpu(gpu)
    if alloc_conf is not None:
        from vramfit.allocator import AllocatorConfig

        AllocatorConfig.parse(alloc_conf)
    return MemoryBudget(
        gpu=spec,
        budget=size_of("--budget", budget),
        margin=size_of("--margin", margin, least=0),
        host_bytes=size_of("--host-budget", host_budget, least=0),
        alloc_conf=alloc_conf,
    )


def sizes_of(texts: Sequence[str]) -> dict[str, int]:
    """Sizes as ``NAME=N``.

    Raises:
        UsageError: one is written otherwise.
    """
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier() or not value.isdecimal() or not int(value):
            raise UsageError(f"--size {text} is not of the form NAME=N", "Write it as batch_size=64")
        found[name] = int(value)
    return found
