"""What passes between `runner` and a child: a job on its way in, a stage and an outcome on their way out. No torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from vramfit.errors import VramfitError, error_from_plain, error_to_plain
from vramfit.launch.limits import NO_LIMITS, Limits
from vramfit.trace import (
    ChangeKind,
    DeviceOutcome,
    Estimate,
    FileChange,
    FileChanges,
    Frame,
    MemoryTrace,
    OomReport,
    ProfileNote,
    Run,
    RunWarning,
    Source,
    StillToCome,
)
from vramfit.trace.host_memory import host_memory_from_plain
from vramfit.trace.progress import progress_from_plain

PARTIAL = "partial.vft"
"""In a job's folder: what a recording of a card held when it was last looked at."""


class Stage(Enum):
    """How far a child has come; a child that dies in a stage is explained by it."""

    IMPORTING = "importing"
    CHECKING = "checking"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a child runs.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        folder: where the results go.
        alloc_conf: allocator settings, None to read the environment.
        journal: where the trace is written while it happens; None for a file in the folder.
        limits: when the program is ended.
        host_memory: whether to follow the host's memory too.
    """

    command: list[str]
    folder: str
    alloc_conf: str | None = None
    journal: str | None = None
    limits: Limits = NO_LIMITS
    host_memory: bool = False

    @property
    def journal_file(self) -> Path:
        """Where the trace is written while it happens."""
        return Path(self.folder) / "run.journal" if self.journal is None else Path(self.journal)

    def write(self) -> Path:
        """Write the job into its folder; the file that a child is given."""
        file = Path(self.folder) / "job.json"
        file.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: str) -> Self:
        """The job that `write` wrote."""
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(**values | {"limits": Limits(**values["limits"])})

    def enter(self, stage: Stage) -> None:
        """Note how far the child has come."""
        (Path(self.folder) / "stage").write_text(stage.value, encoding="utf-8")

    def fail(self, error: VramfitError) -> None:
        """Leave an error of ours for the parent to report."""
        text = json.dumps(error_to_plain(error))
        (Path(self.folder) / "error.json").write_text(text, encoding="utf-8")

    def save(self, run: Run, *, exit_code: int) -> None:
        """Leave a run's trace and facts for the parent."""
        save_outcome(Path(self.folder), run, exit_code=exit_code, command=self.command)


def stage_of(folder: Path) -> Stage | None:
    """How far the child came, None when it never started."""
    file = folder / "stage"
    return Stage(file.read_text(encoding="utf-8")) if file.exists() else None


def raise_failure(folder: Path) -> None:
    """Raise the error that a child left, if it left one."""
    file = folder / "error.json"
    if file.exists():
        raise error_from_plain(json.loads(file.read_text(encoding="utf-8")))


def save_outcome(folder: Path, run: Run, *, exit_code: int, command: list[str]) -> None:
    """Write a run's trace and facts into a folder."""
    run = dataclasses.replace(run, exit_code=exit_code).with_ending()
    run.trace.save(folder / "run.vft")
    facts: dict[str, Any] = {
        field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "trace"
    }
    facts["exit_code"] = exit_code
    facts["program"] = command
    facts["source"] = run.source.value
    facts["progress"] = run.progress.to_plain()
    (folder / "run.json").write_text(json.dumps(facts, default=_plain), encoding="utf-8")


def load_outcome(folder: Path) -> Run | None:
    """Read what `save_outcome` wrote; None when the child ended before it could."""
    if not (folder / "run.json").exists():
        return None
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    oom = facts.pop("oom")
    if oom is not None:
        stack = tuple(Frame(*frame) for frame in oom.pop("stack"))
        line = oom.pop("user_line")
        to_come = oom.pop("to_come")
        if to_come is not None:
            to_come["optimizers"] = tuple(to_come["optimizers"])
            to_come = StillToCome(**to_come)
        oom = OomReport(stack=stack, user_line=Frame(*line) if line else None, to_come=to_come, **oom)
    profile = facts.pop("profile")
    host = facts.pop("host")
    files = facts.pop("files")
    return Run(
        trace=MemoryTrace.load(folder / "run.vft"),
        devices=tuple(DeviceOutcome(**device) for device in facts.pop("devices")),
        oom=oom,
        warnings=tuple(RunWarning(**warning) for warning in facts.pop("warnings")),
        program=tuple(facts.pop("program")),
        profile=None if profile is None else ProfileNote(**profile),
        source=Source(facts.pop("source")),
        progress=progress_from_plain(facts.pop("progress")),
        files=None if files is None else _changes(files),
        host=None if host is None else host_memory_from_plain(host),
        estimates=tuple(Estimate(*estimate) for estimate in facts.pop("estimates")),
        **facts,
    )


def _changes(values: dict[str, Any]) -> FileChanges:
    entries = tuple(
        FileChange(**entry | {"kind": ChangeKind(entry["kind"])}) for entry in values.pop("entries")
    )
    return FileChanges(entries=entries, notes=tuple(values.pop("notes")), **values)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else dataclasses.asdict(value)
