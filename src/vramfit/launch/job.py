"""What passes between a parent and its child processes: a job on its way in, a result or a failure on their way out.

A job has a folder, in which each of them is a file of plain values. Every verb that starts a child has its own kind of
`Job` and of result, which are dataclasses: what was written as one is read as one. No torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar

from vramfit.errors import KINDS, UsageError, VramfitError
from vramfit.plain import from_plain, to_plain

Value = TypeVar("Value")

_JOB, _RESULT, _FAILURE, _STAGE = "job.json", "result.json", "failure.json", "stage"


class Stage(Enum):
    """How far a child has come; the stage in which it dies explains its death."""

    IMPORTING = "importing"
    CHECKING = "checking"
    RUNNING = "running"
    DONE = "done"


def job_file(folder: Path) -> Path:
    """The file of the job of a folder."""
    return folder / _JOB


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a child process is asked to do.

    Attributes:
        folder: where the job, its progress and its results lie.
    """

    folder: str

    def write(self) -> Path:
        """Write the job into its folder; the file is what the child is given."""
        file = job_file(Path(self.folder))
        file.write_text(json.dumps(to_plain(self)), encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """The job that `write` wrote."""
        return from_plain(json.loads(Path(file).read_text(encoding="utf-8")), cls)

    def enter(self, stage: Stage) -> None:
        """Note how far the child has come."""
        (Path(self.folder) / _STAGE).write_text(stage.value, encoding="utf-8")

    def answer(self, result: Any) -> None:
        """Leave a result, a dataclass, for the parent."""
        write_text(Path(self.folder) / _RESULT, json.dumps(to_plain(result)))

    def fail(self, error: VramfitError) -> None:
        """Leave an error of ours for the parent, which raises it."""
        Failure.of(error).write(Path(self.folder))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error on its way to another process.

    Attributes:
        kind: the name of its class; empty for a `UsageError` or a `VramfitError`, by its ``code``.
        message, hint: its own.
        code: its exit code.
        found: what was found all the same, by name.
    """

    kind: str = ""
    message: str
    hint: str
    code: int
    found: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: VramfitError) -> Self:
        """The failure for an error; a class that `vramfit.errors` does not have goes as the nearest base there."""
        kind = next(base.__name__ for base in type(error).__mro__ if base in KINDS.values())
        found = getattr(error, "found", {})
        return cls(kind=kind, message=error.message, hint=error.hint, code=error.exit_code, found=found)

    def error(self) -> VramfitError:
        """The error, to be raised."""
        plain = UsageError if self.code == UsageError.exit_code else VramfitError
        error = KINDS.get(self.kind, plain)(self.message, self.hint)
        if self.code != error.exit_code:
            error.exit_code = self.code
        return error

    def write(self, folder: Path) -> None:
        """Leave it in a job's folder."""
        write_text(folder / _FAILURE, json.dumps(to_plain(self)))


def failure_of(folder: Path) -> Failure | None:
    """The failure that a child left, None if it left none."""
    return _read(folder / _FAILURE, Failure)


def write_text(file: Path, text: str) -> None:
    """Write a small file so that a process that is killed meanwhile leaves no half of it."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def result_of(folder: Path, kind: type[Value]) -> Value | None:
    """The result that a child left; None when it ended before it could."""
    return _read(folder / _RESULT, kind)


def has_answered(folder: Path) -> bool:
    """Whether a child left a result or a failure."""
    return (folder / _RESULT).exists() or (folder / _FAILURE).exists()


def stage_of(folder: Path) -> Stage | None:
    """How far the child came, None when it never started."""
    file = folder / _STAGE
    return Stage(file.read_text(encoding="utf-8")) if file.exists() else None


def _read(file: Path, kind: type[Value]) -> Value | None:
    if not file.exists():
        return None
    return from_plain(json.loads(file.read_text(encoding="utf-8")), kind)


# -- Progress: a line in a file that the child writes and the parent reads now and then ------------------------


_NAME = "progress.txt"
_LOOK = 0.2
"""Seconds between two looks."""


def tell(folder: Path, text: str) -> None:
    """Leave a line for the parent in a child's folder, saying what is being done."""
    write_text(folder / _NAME, text)


@contextmanager
def listening(folder: Path, progress: Callable[[str], object] | None) -> Iterator[None]:
    """Call `progress` with each new text that a child leaves meanwhile; None listens to nothing."""
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
