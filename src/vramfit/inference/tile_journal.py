"""A journal of tiles: which parts of a result are stored, so that a run that was killed goes on where it was.

NOTE [Order of writing]: a part's values are on the disk before the journal says so, and the journal's line is on the
disk before the next part's values are given back. A line that a crash tore apart fails its checksum and counts as not
written, and so do all after it. What is stored twice is the same bytes: results do not depend on where a run began.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vramfit.errors import UsageError
from vramfit.writing import refused

_SCHEMA = "vramfit/tiles/1"
_TORN_HEADER = re.compile(rb"[0-9a-f]{8} \{|[0-9a-f]{0,8} ?$")


class TileJournal:
    """The journal of one run.

    Args:
        path: its file.
        facts: what the run depends on, by name; plain values.

    Attributes:
        stored: numbers of the stored parts, by output.
        outputs: shape and dtype of each output, as the run before found them; None before they are known.
        complete: whether all is stored, and only the result's name was left to be given.

    Raises:
        UsageError: the file is the journal of another run, or no journal.
        WriteError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.stored: dict[int, set[int]] = {}
        self.outputs: list[Any] | None = None
        self.complete = False
        whole = self._read(json.loads(json.dumps(facts)))
        try:
            self._stream = self.path.open("r+b" if whole else "wb")
            self._stream.truncate(whole)
            self._stream.seek(whole)
            if not whole:
                self._write({"schema": _SCHEMA, "facts": dict(facts)})
        except OSError as error:
            raise refused(self.path, error) from error

    def _read(self, facts: Mapping[str, Any]) -> int:
        """Take over what the file says; gives the bytes of its whole lines, 0 where there is no journal yet."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UsageError(
                f"the journal {self.path} cannot be read: {error.strerror}", "Give another path"
            ) from None
        whole = 0
        for number, line in enumerate(lines[:-1]):  # after the last newline nothing is whole
            entry = _entry(line)
            if entry is None:
                break
            if number == 0:
                self._check(entry, facts)
            self.outputs = entry.get("outputs", self.outputs)
            self.complete = self.complete or entry.get("complete", False)
            for output, spans in entry.get("stored", {}).items():
                known = self.stored.setdefault(int(output), set())
                known.update(unit for first, last in spans for unit in range(first, last + 1))
            whole += len(line) + 1
        if not whole and not _TORN_HEADER.match(lines[0]):
            self._not_ours()
        return whole

    def _not_ours(self) -> None:
        raise UsageError(f"{self.path} is no journal of tiles", "Give another path, or remove the file")

    def _check(self, entry: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        if entry.get("schema") != _SCHEMA:
            self._not_ours()
        found = entry["facts"]
        for name in {**facts, **found}:
            if facts.get(name) != found.get(name):
                raise UsageError(
                    f"the journal {self.path} belongs to a run with another {name}",
                    "Remove it to begin anew, or run as before",
                )

    def note_outputs(self, outputs: list[Any]) -> None:
        """Note the shapes and dtypes of the outputs, or compare them with those of the run before.

        Raises:
            UsageError: they are others.
        """
        plain = json.loads(json.dumps(outputs))
        if self.outputs is None:
            self.outputs = plain
            self._write({"outputs": plain})
        elif self.outputs != plain:
            raise UsageError(
                f"the journal {self.path} belongs to a run whose results had other shapes",
                "Remove it to begin anew",
            )

    def note_stored(self, stored: Mapping[int, Iterable[int]]) -> None:
        """Note parts whose values are on the disk, by output."""
        entry = {}
        for output, units in stored.items():
            found = sorted(units)
            self.stored.setdefault(output, set()).update(found)
            if found:
                entry[str(output)] = _spans(found)
        if entry:
            self._write({"stored": entry})

    def note_complete(self) -> None:
        """Note that all is stored."""
        self.complete = True
        self._write({"complete": True})

    def close(self) -> None:
        """Close the file, and keep it."""
        self._stream.close()

    def remove(self) -> None:
        """The end of a run that is complete: the journal goes."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        try:
            self._stream.write(b"%08x %s\n" % (zlib.crc32(text), text))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise refused(self.path, error) from error


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is torn."""
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return found


def _spans(units: list[int]) -> list[list[int]]:
    """Sorted numbers as spans: first and last of each."""
    spans: list[list[int]] = []
    for unit in units:
        if spans and unit == spans[-1][1] + 1:
            spans[-1][1] = unit
        else:
            spans.append([unit, unit])
    return spans
