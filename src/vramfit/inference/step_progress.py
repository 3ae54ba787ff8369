"""What a search tells of its steps while it goes on: to a function, or on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vramfit.arguments import call_argument
from vramfit.console import SafeConsole


@contextmanager
def step_progress(given: object, name: str) -> Iterator[Callable[[str], None]]:
    """What is called with a line for each step.

    Args:
        given: a function; None or True for standard error: a line that changes on a terminal, else one for each step;
            False for nothing.
        name: of what goes on.

    Raises:
        UsageError: it is something else.
    """
    if given is False:
        yield lambda _text: None
        return
    if given is not None and given is not True:
        yield call_argument("progress", given)
        return
    console, began = SafeConsole(stderr=True), time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(f"{name}: {text}", markup=False, highlight=False)
        return
    with console.status(f"{name} ...") as status:
        yield lambda text: status.update(f"{name}: {text} ({time.monotonic() - began:.0f} s)")
