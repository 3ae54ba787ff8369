"""Options that several verbs have, each worded once, with what they mean and how the shell completes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.arguments import LONGEST
from vramfit.errors import UsageError
from vramfit.units import parse_bytes

if TYPE_CHECKING:
    from vramfit.gpus import GpuSpec
    from vramfit.planner.planner_job import MemoryBudget


WITH_PLAN = "A plan"
WRITTEN = "What is written"
COMPARED = "A real run to compare with"
"""Panels of options in the help of verbs with many."""


def span(value: float | None) -> float | None:
    """A callback for options that are a span of time: the largest numbers would overflow in what waits for them.

    Raises:
        typer.BadParameter: the number is too large, or is not one.
    """
    if value is not None and not value <= LONGEST:
        raise typer.BadParameter(f"{value:g} is not a span of time: give a number of at most {LONGEST:g}.")
    return value


def check_alloc_conf(alloc_conf: str | None) -> None:
    """Report allocator settings that cannot be read, or that torch reads differently, before the work starts."""
    if alloc_conf is not None:
        from vramfit.allocator.config import misread_numbers

        for note in misread_numbers(alloc_conf):
            typer.echo(f"note: {note}", err=True)


def size_of(option: str, text: str | None, *, least: int = 1) -> int | None:
    """Bytes that an option names; None where it was not given.

    Raises:
        UsageError: the text is not a size, or too small a one.
    """
    if text is None:
        return None
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if found < least:
        raise UsageError(f"{option} {text} leaves no memory: it must be more than 0", "Write it as 2GiB")
    return found


def card_of(gpu: str | GpuSpec | None) -> GpuSpec | None:
    """The card that ``--gpu`` names; None where it was not given.

    Raises:
        UnknownGpuError: there is no such card.
    """
    if gpu is None:
        return None
    from vramfit.gpus import find_gpu

    return find_gpu(gpu)


def gpu_names(incomplete: str) -> list[tuple[str, str]]:
    """Cards of the catalogue whose names begin with what was typed, each with its memory.

    They are written with hyphens instead of spaces, which need no quotes in any shell, and begin as they were typed:
    ``rtx-40`` is completed to ``rtx-4090``. After a digit the series is left out: ``4090`` is the RTX 4090.
    Nothing is offered for a size or for a file, whose names the shell completes itself.
    """
    from vramfit.gpus import catalogue
    from vramfit.units import format_bytes

    typed = incomplete.lower().replace(" ", "-")
    digits = typed[:1].isdigit()
    return [
        (incomplete + name[len(typed) :], format_bytes(spec.total_bytes))
        for spec in catalogue()
        for name in _spellings(spec.name, digits=digits)
        if name.lower().startswith(typed)
    ]


def _spellings(name: str, *, digits: bool) -> Iterator[str]:
    words = name.split()
    if not digits:
        yield "-".join(words)
    elif words[0] in ("RTX", "GTX") and words[1][0].isdigit():
        yield "-".join(words[1:])


Recording = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A trace (.vft) or a torch snapshot: pickle or JSON, gzipped or plain."
    ),
]
Module = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module as python -m does.")]
AllocConf = Annotated[
    str | None, typer.Option(metavar="CONF", help="Allocator settings, instead of PYTORCH_ALLOC_CONF.")
]
Page = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the run as one HTML page that needs no network.",
        rich_help_panel=WRITTEN,
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.toml",
        help="Run it with a plan's techniques, attached without an edit of the program.",
        rich_help_panel=WITH_PLAN,
    ),
]
WorkloadName = Annotated[
    str, typer.Argument(metavar="FILE.py:WORKLOAD", help="The file and the Workload in it.")
]
WorkloadOrScript = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT | FILE.py:WORKLOAD",
        help="The program, or a file and the Workload in it.",
        show_default=False,
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="The program's own: all that follows it.", show_default=False),
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
    gpu: str | GpuSpec | None,
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
    spec = card_of(gpu)
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
