"""Annotations of GitHub Actions: lines that its runner reads from the output of a step, and shows beside the source.

The form and its escaping are those of ``@actions/core`` (github.com/actions/toolkit, packages/core/src/command.ts);
docs.github.com describes them as "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vramfit.analysis import Bound
from vramfit.report.check import Check
from vramfit.report.ci.words import place_of, sentence_of, title_of
from vramfit.trace import Frame
from vramfit.trace.frames import short_location


class Level(Enum):
    """How GitHub shows an annotation."""

    ERROR = "error"
    NOTICE = "notice"


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """One message.

    Attributes:
        level: how bad it is.
        title: a few words.
        message: the rest; it may have several lines.
        file: of the repository, relative to its root; empty where none is known.
        line: of the file, from 1; 0 for the file as a whole.
    """

    level: Level
    title: str
    message: str
    file: str = ""
    line: int = 0

    def command(self) -> str:
        """The line that the runner reads, without its end."""
        given = {
            "title": self.title,
            "file": self.file,
            "line": str(self.line) if self.file and self.line else "",
        }
        properties = ",".join(f"{name}={_property(value)}" for name, value in given.items() if value)
        return f"::{self.level.value} {properties}::{_data(self.message)}"


def annotations_of(check: Check, *, repository: Path) -> Iterator[Annotation]:
    """An error for each gate that failed, and a notice where a baseline could be lowered.

    Args:
        check: what was found.
        repository: its root; files outside of it are named in the message instead.
    """
    for gate in check.gates:
        if not gate.passed:
            place = place_of(check, gate)
            message = sentence_of(check, gate)
            file, line = ("", 0) if place is None else _within(place.frame, repository)
            if place is not None:
                where = "" if file else f" ({short_location(place.frame)})"
                message = f"{message}\n{place.reason[0].upper()}{place.reason[1:]}{where}."
            yield Annotation(level=Level.ERROR, title=title_of(gate), message=message, file=file, line=line)
        elif gate.bound is Bound.BASELINE and gate.note:
            yield Annotation(
                level=Level.NOTICE,
                title="GPU memory below its baseline",
                message=f"{sentence_of(check, gate)}\n{gate.note[0].upper()}{gate.note[1:]}.",
            )


def failure_annotation(target: str, reason: str) -> Annotation:
    """An error for a target that could not be checked."""
    return Annotation(level=Level.ERROR, title="GPU memory not checked", message=f"{target}: {reason}")


def _within(frame: Frame, repository: Path) -> tuple[str, int]:
    """The file as GitHub wants it, and the line; nothing for a file that is not in the repository."""
    for name, root in (
        (os.path.abspath(frame.filename), os.path.abspath(repository)),
        (os.path.realpath(frame.filename), os.path.realpath(repository)),
    ):
        if name.startswith(root.rstrip(os.sep) + os.sep) and Path(name).is_file():
            return Path(os.path.relpath(name, root)).as_posix(), frame.line
    return "", 0


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
