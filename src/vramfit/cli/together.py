"""``vramfit together``: what several programs take side by side on one card."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli import options
from vramfit.cli.printing import apart_from_json, check_outputs, interrupted, print_result, wide_console
from vramfit.cli.program import check_source, program_command
from vramfit.errors import UsageError
from vramfit.virtual.data_dependent.assume import Assume

DOES_NOT_FIT = 3


def together_command(
    programs: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM...",
            help='From two on: a script, a quoted script with its arguments ("train.py --epochs 1"), '
            "a trace (.vft) or a torch snapshot.",
        ),
    ],
    gpu: options.Gpu = None,
    alloc_conf: options.AllocConf = None,
    assume: options.AssumedSizes = Assume.UPPER.value,
    profile: options.Profile = "auto",
    cudnn: options.Cudnn = None,
    steps: options.Steps = None,
    time: options.Time = None,
    json: options.JsonFile = None,
) -> None:
    """Tell what programs take side by side on one card, each a process of its own.

    Each script runs alone on a virtual GPU, one after the other; its files are set aside and dropped. From the traces
    follow what fits, which limit to give to each process, when their peaks meet and whether to shift them, and what
    time slicing and MPS change.

    The exit code is 0 if they fit as they are, 3 if they do not, 1 if a program failed for another reason.
    """
    if gpu is None:
        raise UsageError("no card is given", 'Give --gpu NAME, such as --gpu "RTX 4090"')
    check_outputs((("--json", json),))
    options.check_alloc_conf(alloc_conf)
    given = [_words(text) for text in programs]
    from vramfit.api.together_api import together
    from vramfit.report import json_text, print_report

    try:
        with apart_from_json(json):
            found = together(
                *given,
                gpu=gpu,
                progress=lambda text: typer.echo(f"vramfit: {text}", err=True),
                alloc_conf=alloc_conf,
                assume=assume,
                profile=profile,
                cudnn=cudnn,
                steps=steps,
                time=time,
            )
    except KeyboardInterrupt:
        raise interrupted("before all programs had run") from None
    sharing = found.sharing
    print_result(
        json,
        lambda: json_text(sharing),
        lambda: print_report(sharing, console=wide_console(), root=Path.cwd()),
    )
    if not sharing.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _words(text: str) -> list[str]:
    """A program and its arguments; a path may hold spaces.

    Raises:
        UsageError: there is no such script, or its quotes do not end.
        VramfitError: python could not compile it.
    """
    if text and Path(text).exists():
        words = [text]
    else:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"{text!r} cannot be read: {error}", "Quote it as a shell would") from None
    command = program_command(None, words)
    if Path(command[0]).suffix == ".py":
        check_source(command)
    return command
