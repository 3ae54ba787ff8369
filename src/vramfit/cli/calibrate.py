"""``vramfit calibrate``: measures a card, says where the virtual GPU disagrees, and writes what it then prefers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.options import card_of, gpu_names, size_of, span
from vramfit.cli.printing import STANDARD_OUTPUT, check_outputs, wide_console
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vramfit.calibrate.calibration_result import Calibration
    from vramfit.calibrate.measurement_journal import About, CalibrationJournal

_JOURNAL_SUFFIX = ".measured.jsonl"


def calibrate_command(
    device: Annotated[int, typer.Option(metavar="N", help="Index of the card.", min=0)] = 0,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Let this virtual GPU take the card's place, to try the command.",
            autocompletion=gpu_names,
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(metavar="M", help="Begin no case after so many minutes.", min=0, callback=span)
    ] = 10.0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most that a case may allocate, such as 8GiB; half of what is free."
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this family of ops; may be given more than once."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The profile; else one in the user's folder."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as JSON; - is standard output.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure nothing: compare what was measured earlier, perhaps elsewhere."
        ),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the cases and leave.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
) -> None:
    """Measure a grid of ops on this machine's card, and compare it with the virtual GPU.

    What each op allocates and takes, what the CUDA context and its libraries hold, and how fast the card and its link
    are, go into a profile that `vramfit run` then prefers for that card and this torch. A run that was stopped goes
    on where it was.
    """
    check_outputs((("-o", output), ("--json", json)))
    memory_bytes = size_of("--memory", memory)
    spec = card_of(gpu)
    names = _cases(family or [])
    if listing:
        for name in names:
            typer.echo(name)
        typer.echo(f"{len(names)} cases", err=True)
        return

    console = wide_console(stderr=json == STANDARD_OUTPUT)
    try:
        if measured is not None:
            found = _again(measured, names, console)
        else:
            found = _measure(
                console,
                cases=names,
                device=device,
                gpu=spec,
                minutes=minutes,
                memory_bytes=memory_bytes,
                fresh=fresh,
                journal=lambda about: _journal_of(_profile_of(output, about)),
                surroundings=not family,
            )
    except KeyboardInterrupt:
        console.print("stopped; what was measured is kept, the same command goes on")
        raise typer.Exit(130) from None
    _finish(found, console, output if measured is not None else _profile_of(output, found.about), json)


def _finish(found: Calibration, console: Console, profile: Path | None, json: Path | None) -> None:
    """Write the files and print the report."""
    from vramfit.gpus.measured_profile import save_profile
    from vramfit.report import json_text, print_report
    from vramfit.writing import write_text

    made = found.profile()
    if profile is not None:
        save_profile(made, profile)
    print_report(found, console=console)
    if profile is not None:
        console.print(f"profile: {profile} ({made.calls} calls as measured)", soft_wrap=True)
    text = json_text(found, None if profile is None else str(profile), indent=1)
    if json == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
    elif json is not None:
        write_text(json, text)


def _measure(console: Console, **options: Any) -> Calibration:
    from vramfit.calibrate.calibration_run import Options, calibrate

    with _Progress(console) as progress:
        return calibrate(Options(**options), progress)


def _again(measured: Path, names: Sequence[str], console: Console) -> Calibration:
    from vramfit.calibrate.calibration_run import compare_again
    from vramfit.calibrate.measurement_journal import CalibrationJournal

    journal = CalibrationJournal.read(measured)
    with _Progress(console) as progress:
        return compare_again(journal, names, progress)


class _Progress:
    """A bar on a terminal; failures in lines of their own, elsewhere too."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def about(self, about: About, journal: CalibrationJournal) -> None:
        """Say what is measured, and what is known already."""
        if journal.set_aside:
            self._console.print(
                f"{journal.path} was of another card, torch or grid: measured afresh", markup=False
            )
        elif journal.records:
            self._console.print(
                f"{about.name}: {len(journal.records)} cases were measured before", markup=False
            )

    def doing(self, what: str) -> None:
        """A step of its own begins."""
        self._bar.update(self._task, description=what)

    def case(self, number: int, of: int, name: str, note: str) -> None:
        """A case is done."""
        self._bar.update(self._task, completed=number, total=of, description=name)
        if note:
            self._console.print(f"{name}: {note}", soft_wrap=True, markup=False)


def _cases(families: Sequence[str]) -> list[str]:
    """Names of the cases of some families, in the order of measurement."""
    from vramfit.calibrate.cases import OpFamily, grid

    known = {family.value: family for family in OpFamily}
    for name in families:
        if name not in known:
            raise UsageError(
                f"there is no family of ops called {name!r}", f"The families are {', '.join(known)}"
            )
    return [case.name for case in grid(known[name] for name in families)]


def _profile_of(output: Path | None, about: About) -> Path:
    """Where the profile goes. One of a virtual card is not put where it would be found for the real one."""
    from vramfit.gpus.measured_profile import profile_file

    if output is not None:
        return output
    usual = profile_file(about.name, about.total_bytes, about.torch)
    return usual if about.source == "card" else usual.parent / "virtual" / usual.name


def _journal_of(profile: Path) -> Path:
    """The measurements lie beside the profile."""
    return profile.with_name(profile.stem + _JOURNAL_SUFFIX)
