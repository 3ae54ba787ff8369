"""The job of running a program, and the run that results from it. No torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vramfit.errors import VramfitError
from vramfit.launch.child_hooks import ChildHook
from vramfit.launch.job import Job, write_text
from vramfit.options.run_options import RunOptions
from vramfit.plain import from_plain, to_plain
from vramfit.trace import MemoryTrace, Run

PARTIAL = "partial.vft"
"""In a job's folder: what a recording of a card held when it was last looked at."""

_TRACE, _FACTS = "run.vft", "run.json"

_APART = ("trace", "again")
"""Fields of a run that are not among its facts: the trace is a file of its own, and a second run is the parent's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSettings:
    """What a verb sets for the child, beside the user's options.

    Attributes:
        journal: where the trace is written while it happens, in case this process is killed too; None keeps it in a
            temporary folder.
        ends_line: whether the program's output must end with a line, since a report follows on the same output.
        hooks: what the child calls before the program runs.
    """

    journal: Path | None = None
    ends_line: bool = False
    hooks: tuple[ChildHook, ...] = ()


PLAIN = ChildSettings()
"""Nothing beside the user's options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramJob(Job):
    """A program to run.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        options: how it is run, as the user chose.
        journal: where the trace is written while it happens; None for a file in the folder.
        ends_line: whether the program's output must end with a line.
        hooks: what the child calls before the program runs.
    """

    command: list[str]
    options: RunOptions
    journal: str | None = None
    ends_line: bool = False
    hooks: tuple[ChildHook, ...] = ()

    @property
    def journal_file(self) -> Path:
        """Where the trace is written while it happens."""
        return Path(self.folder) / "run.journal" if self.journal is None else Path(self.journal)

    def refuse(self, error: VramfitError) -> NoReturn:
        """End the program, which is running, with an error of vramfit's.

        Raises:
            SystemExit: always.
        """
        self.fail(error)
        raise SystemExit(error.exit_code)

    def save(self, run: Run, *, exit_code: int) -> None:
        """Leave a run's trace and facts for the parent."""
        run = dataclasses.replace(run, exit_code=exit_code, program=tuple(self.command)).with_ending()
        folder = Path(self.folder)
        run.trace.save(folder / _TRACE)
        facts = {
            field.name: to_plain(getattr(run, field.name))
            for field in dataclasses.fields(run)
            if field.name not in _APART
        }
        write_text(folder / _FACTS, json.dumps(facts))


def load_run(folder: Path) -> Run | None:
    """The run that `ProgramJob.save` left; None when the child ended before it could."""
    if not (folder / _FACTS).exists():
        return None
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    kinds = typing.get_type_hints(Run)
    values = {name: from_plain(value, kinds[name]) for name, value in facts.items()}
    return Run(trace=MemoryTrace.load(folder / _TRACE), **values)
