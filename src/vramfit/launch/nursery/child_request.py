"""What a fork of the nursery is asked to become: a Python program, with all that a new interpreter would get."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from vramfit.plain import from_plain, to_plain

_PYTHON_SETS = {getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ")}
"""Signals that Python ignores by itself, whatever its parent does (Python/pylifecycle.c: init_signals)."""


class ProgramKind(Enum):
    """How a command line names its program."""

    MODULE = "-m"
    CODE = "-c"
    SCRIPT = "script"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRequest:
    """A program to become.

    Attributes:
        words: the whole command line.
        kind: how it names its program.
        name: a module, a path or Python source, by `kind`.
        arguments: the program's own.
        safe: whether the program's folder stays out of ``sys.path`` (``-P``).
        cwd: the folder to run in.
        environ: variables that differ from the nursery's; None removes one.
        session: whether to begin a session.
        ignored, blocked: signals that its parent ignores and blocks, which a new process inherits.
    """

    words: list[str]
    kind: ProgramKind
    name: str
    arguments: list[str]
    safe: bool = False
    cwd: str = ""
    environ: dict[str, str | None] = field(default_factory=dict)
    session: bool = False
    ignored: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)

    def packed(self) -> bytes:
        """It as bytes."""
        return json.dumps(to_plain(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """The request that `packed` made."""
        return from_plain(json.loads(data), cls)


def request_for(words: Sequence[str | os.PathLike[str]], options: Sequence[str] = ()) -> ChildRequest | None:
    """What a command line of this interpreter starts; None for any other command line.

    Args:
        words: the command line.
        options: of the nursery's interpreter, which the command line must have too.
    """
    line = [os.fspath(word) for word in words]
    own = [sys.executable, *options]
    if line[: len(own)] != own:
        return None
    rest = line[len(own) :]
    safe = rest[:1] == ["-P"]
    rest = rest[safe:]
    if len(rest) > 1 and rest[0] in (ProgramKind.MODULE.value, ProgramKind.CODE.value):
        return ChildRequest(
            words=line, kind=ProgramKind(rest[0]), name=rest[1], arguments=rest[2:], safe=safe
        )
    if rest and not rest[0].startswith("-"):
        return ChildRequest(words=line, kind=ProgramKind.SCRIPT, name=rest[0], arguments=rest[1:], safe=safe)
    return None


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What changes variables from one environment to another."""
    changed: dict[str, str | None] = {n: v for n, v in after.items() if before.get(n) != v}
    return changed | {name: None for name in before if name not in after}


def ignored_signals() -> list[int]:
    """Signals that this process ignores and that a new interpreter would ignore too."""
    found = signal.valid_signals() - _PYTHON_SETS
    return [number for number in found if signal.getsignal(number) is signal.SIG_IGN]


def surroundings() -> tuple[object, ...]:
    """What a new process inherits besides variables, folder, signals and files: umask, limits, cores, users. Linux."""
    import resource

    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    umask = next((line for line in status.splitlines() if line.startswith("Umask:")), "")
    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")]
    users = (os.getresuid(), os.getresgid(), os.getgroups())
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return umask, limits, sorted(os.sched_getaffinity(0)), priority, users, os.getsid(0), os.getpgrp()
