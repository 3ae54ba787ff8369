"""Readings in files: a log for people, and JSON lines for programs. Both grow line by line, whole lines only."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

from vramfit.plain import to_plain
from vramfit.watching.watch_reading import WatchReading
from vramfit.watching.watch_text import line_of, outlook_text, summary_of
from vramfit.writing import refused

SCHEMA = "vramfit.watch/1"


class WatchLog:
    """A log with a line every so often, and a summary less often, at each change of a trend and at the end.

    Args:
        path: it is appended to.
        line_every, summary_every: seconds.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, line_every: float = 10.0, summary_every: float = 300.0
    ) -> None:
        self._file = _opened(path)
        self._line_every, self._summary_every = line_every, summary_every
        self._line = self._summary = -1e9
        self._trends: dict[str, str] = {}
        self._last: WatchReading | None = None

    def take(self, reading: WatchReading) -> None:
        """Write what is due."""
        self._last = reading
        for outlook in reading.outlooks:
            if self._trends.get(outlook.what, "unknown") != outlook.trend != "unknown":
                self._write(f"{line_of(reading).split('  ')[0]}  trend: {outlook_text(outlook)}")
            self._trends[outlook.what] = outlook.trend
        if reading.elapsed - self._summary >= self._summary_every:
            self._summary = self._line = reading.elapsed
            self._write("\n".join(summary_of(reading)))
        elif reading.elapsed - self._line >= self._line_every:
            self._line = reading.elapsed
            self._write(line_of(reading))

    def close(self) -> None:
        """Write a last summary."""
        if self._last is not None:
            self._write("\n".join(summary_of(self._last)))
            self._write(f"{line_of(self._last).split('  ')[0]}  the watch has ended")
            self._last = None
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()


class WatchLines:
    """A reading a line, as JSON. See docs/json.md.

    Args:
        path: it is appended to.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _opened(path)

    def take(self, reading: WatchReading) -> None:
        """Write a line."""
        self._file.write(json.dumps(document_of(reading)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def document_of(reading: WatchReading) -> dict[str, Any]:
    """A reading as a JSON document."""
    return {"schema": SCHEMA, **to_plain(reading), "share": reading.share}


def _opened(path: str | os.PathLike[str]) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise refused(path, error) from error
