"""How far a tiled run is: told to a function, or shown as a bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vramfit.arguments import call_argument
from vramfit.console import SafeConsole


@contextlib.contextmanager
def tile_progress(given: Any) -> Iterator[Callable[[int, int], None] | None]:
    """What is called with the tiles that are done and the tiles in all.

    Args:
        given: None or False for nothing, True for a bar on standard error, or a function.

    Raises:
        UsageError: it is something else.
    """
    if given is None or given is False:
        yield None
        return
    if given is not True:
        yield call_argument("progress", given)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tiles"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True)) as bar:
        task = bar.add_task("tiles", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
