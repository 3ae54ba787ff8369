"""How a child process tells its parent what it is doing: a line in a file, looked at now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "progress.txt"
_LOOK = 0.2
"""Seconds between two looks."""


def tell(folder: Path, text: str) -> None:
    """Say what is being done, in a child's folder."""
    beside = folder / f"{_NAME}.new"
    beside.write_text(text, encoding="utf-8")
    beside.replace(folder / _NAME)


@contextmanager
def listening(folder: Path, progress: Callable[[str], object] | None) -> Iterator[None]:
    """Pass on what a child tells meanwhile, each text once.

    Args:
        folder: the child's.
        progress: called with each new text; None listens to nothing.
    """
    if progress is None:
        yield
        return
    done = threading.Event()

    def look() -> None:
        last = ""
        while not done.wait(_LOOK):
            try:
                text = (folder / _NAME).read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            if text != last:
                progress(text)
            last = text

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
