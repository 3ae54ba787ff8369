"""Options that several verbs have, each worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vramfit.virtual.assume import Assume

_MOST_GPUS = 8

Gpus = Annotated[
    int, typer.Option(metavar="N", help="How many of them.", min=1, max=_MOST_GPUS, show_default=True)
]
Module = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module as python -m does.")]
AllocConf = Annotated[
    str | None, typer.Option(metavar="CONF", help="Allocator settings, instead of PYTORCH_ALLOC_CONF.")
]
AssumedSizes = Annotated[
    Assume,
    typer.Option(help="What to take for sizes that depend on data: the most, or what is to be expected."),
]
Profile = Annotated[
    str,
    typer.Option(
        metavar="FILE|auto|none",
        help="What vramfit calibrate measured; auto is that of this card and this torch, if there is any.",
    ),
]
Page = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the run as one HTML page that needs no network.")
]
