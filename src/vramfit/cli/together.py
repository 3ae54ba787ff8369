"""``vramfit together``: what several programs take side by side on one card."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli import options
from vramfit.cli.printing import apart_from_json, check_outputs, interrupted, print_result, wide_console
from vramfit.cli.program import check_source, program_command
from vramfit.cli.run_parameters import with_run_options
from vramfit.errors import UsageError
from vramfit.options.run_options import NOT_TOGETHER, RunOptions

DOES_NOT_FIT = 3


@with_run_options(
    without=NOT_TOGETHER | {"clock", "kernels", "writes", "writes_through", "host_memory"},
    words={"gpu": 'The virtual card: "RTX 4090", a size such as 24GiB, or a TOML file.'},
)
def together_command(
    *,
    programs: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM...",
            help='From two on: a script, a quoted script with its arguments ("train.py --epochs 1"), '
            "a trace (.vft) or a torch snapshot.",
        ),
    ],
    run: RunOptions,
    json: options.JsonFile = None,
) -> None:
    """Tell what programs take side by side on one card, each a process of its own.

    Each script runs alone on a virtual GPU, one after the other; its files are set aside and dropped. From the traces
    follow what fits, which limit to give to each process, when their peaks meet and whether to shift them, and what
    time slicing and MPS change.

    The exit code is 0 if they fit as they are, 3 if they do not, 1 if a program failed for another reason.
    """
    if run.gpu is None:
        raise UsageError("no card is given", 'Give --gpu NAME, such as --gpu "RTX 4090"')
    check_outputs((("--json", json),))
    options.check_alloc_conf(run.alloc_conf)
    given = [_words(text) for text in programs]
    from vramfit.api.together_api import programs_together
    from vramfit.report import json_text, print_report

    try:
        with apart_from_json(json):
            found = programs_together(
                given, replace(run, need=False), lambda text: typer.echo(f"vramfit: {text}", err=True)
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
