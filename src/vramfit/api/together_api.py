"""Several programs on one card, from Python: each run by itself on the virtual GPU, and told side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from vramfit.analysis import CardSharing, check_count, run_from_trace, share_card, used_device
from vramfit.api.program_run import run_program
from vramfit.api.programs import Report, command_of
from vramfit.arguments import call_argument, path_argument, shown
from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.options.option_keywords import takes_options
from vramfit.options.run_options import KEYWORDS, NOT_TOGETHER, RunOptions, WorldKeywords, read_options
from vramfit.report import json_text, print_report, render, to_json
from vramfit.trace import MemoryTrace, Run, read_any

_RECORDINGS = (".vft", ".pickle", ".pkl", ".gz", ".json")
"""Endings of files that are read, not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """What several programs take side by side; `together` makes it.

    >>> _ = Path("train.py").write_text("import torch; torch.nn.Linear(4096, 4096).cuda()")
    >>> alone = vramfit.run("train.py", gpu="RTX 4090")
    >>> both = vramfit.together(alone, alone, gpu="RTX 4090")
    >>> [process.fraction for process in both.sharing.processes]
    [0.483808, 0.483808]

    Attributes:
        sharing: what was found.
        runs: each program by itself.
    """

    sharing: CardSharing
    runs: tuple[Run, ...]

    @property
    def fits(self) -> bool:
        """Whether they fit the card as they are."""
        return self.sharing.fits

    @property
    def total_bytes(self) -> int:
        """Contexts and peaks of reserved memory of all."""
        return self.sharing.total

    def to_dict(self) -> dict[str, Any]:
        """The report as ``vramfit together --json`` writes it."""
        return to_json(self.sharing)

    def to_json(self) -> str:
        """The same as text."""
        return json_text(self.sharing)

    def print(self) -> None:
        """Print the report as ``vramfit together`` does."""
        from vramfit.console import SafeConsole

        with SafeConsole(force_jupyter=False) as console:
            print_report(self.sharing, console=console, root=Path.cwd())

    def __repr__(self) -> str:
        return f"<Together: {render(self.sharing, width=10_000).splitlines()[0][2:]}>"

    def __str__(self) -> str:
        """The report as plain text."""
        return render(self.sharing)


Program = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | MemoryTrace | Run | Report


@takes_options(without=NOT_TOGETHER, own=("gpu",))
def together(
    *programs: Program,
    gpu: str | os.PathLike[str] | GpuSpec,
    progress: Callable[[str], object] | None = None,
    **options: Unpack[WorldKeywords],
) -> Together:
    """What programs take side by side on one card, each a process of its own.

    Each script runs alone on the virtual GPU, one after the other. What fits follows from their traces: contexts and
    peaks of reserved memory add up, for a process keeps what it once reserved; docs/language.md tells more.

    >>> _ = Path("train.py").write_text("import torch; torch.nn.Linear(4096, 4096).cuda()")
    >>> both = vramfit.together("train.py", ["train.py", "--epochs", "3"], gpu="RTX 4090")
    >>> both.fits, both.total_bytes
    (True, 960495616)

    Args:
        programs: from two on. Each a script, a list of a script and its arguments, a trace (``.vft``) or torch
            snapshot, or the `Report`, run or `MemoryTrace` of one that ran already.
        gpu: a card's name, a size (``"24GiB"``), a TOML file or a `GpuSpec`.
        progress: called with a line before each run.
        options: those of `RunOptions` for a virtual card.

    Raises:
        UnknownGpuError: no such card.
        UsageError: there is no such script, there are fewer than two, or one is of another card, of several or none.
        TraceFormatError: a file cannot be read.
        VramfitError: a program failed for another reason than memory.
    """
    chosen = read_options(KEYWORDS, {"gpu": find_gpu(gpu), **options}, without=NOT_TOGETHER)
    told = None if progress is None else call_argument("progress", progress)
    return programs_together(programs, replace(chosen, need=False), told)


def programs_together(
    programs: Sequence[Program], options: RunOptions, progress: Callable[[str], object] | None
) -> Together:
    """See `together`."""
    spec = options.card
    given = [_checked(one, at) for at, one in enumerate(programs)]
    if len(given) < 2:
        raise UsageError("programs are told side by side from two on", "Give another, or use vramfit.run")
    check_count(len(given))
    names = _distinct([one.name for one in given])
    for one, name in zip(given, names, strict=True):  # nothing runs where one is wrong already
        if isinstance(one.source, Run):
            used_device(one.source, name, spec)
    runs = []
    for number, (one, name) in enumerate(zip(given, names, strict=True)):
        if isinstance(one.source, Run):
            runs.append(one.source)
            continue
        if progress is not None:
            progress(f"program {number + 1} of {len(given)}: {one.name}")
        runs.append(_run_of(one.name, one.source, options))
        used_device(runs[-1], name, spec)
    return Together(sharing=share_card(runs, names, spec), runs=tuple(runs))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """One program: a command to run, or a run."""

    name: str
    source: list[str] | Run


def _checked(program: Any, at: int) -> _Given:
    """What was given as a program, looked at and read before any runs."""
    what = f"programs[{at}]"
    if isinstance(program, Report):
        program = program.run
    if isinstance(program, MemoryTrace):
        program = run_from_trace(program, name=f"trace {at + 1}")
    if isinstance(program, Run):
        return _Given(name=" ".join(program.program) or f"program {at + 1}", source=program)
    listed = isinstance(program, Sequence) and not isinstance(program, str | bytes)
    words = [path_argument(what, one) for one in (program if listed else (program,))]
    if not words:
        raise UsageError(
            f"{what}={shown(program)} names no program", "Give a script, or a list that begins with one"
        )
    name = Path(words[0])
    if not name.is_file():
        raise UsageError(f"there is no script {name}", "Give the path of a Python file, or of a trace")
    if name.suffix in _RECORDINGS:
        if len(words) > 1:
            raise UsageError(f"{name} is a recording, and takes no arguments", "Give its path alone")
        return _Given(name=name.name, source=run_from_trace(read_any(name), name=name.name))
    return _Given(name=" ".join([name.name, *words[1:]]), source=words)


def _run_of(name: str, command: list[str], options: RunOptions) -> Run:
    """The run of a script by itself.

    Raises:
        VramfitError: it failed, and not for want of memory.
    """
    found = run_program(command_of(command[0], command[1:], options.cwd, module=False), options)
    if found.exit_code != 0 and not found.ran_out:
        raise VramfitError(
            f"{name} failed: {found.error or f'its exit code is {found.exit_code}'}",
            f'Try it alone: vramfit run --gpu "{options.card.name}" {command[0]}',
        )
    return found


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, those that repeat numbered."""
    return [
        f"{name} ({names[:at].count(name) + 1})" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]
