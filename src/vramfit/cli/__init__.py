"""The command line: one thin file per verb, assembled here. Importing it imports neither torch nor numpy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vramfit import __version__
from vramfit.cli.calibrate import calibrate_command
from vramfit.cli.check import CheckCommand, check_command
from vramfit.cli.diff import diff_command
from vramfit.cli.doctor import doctor_command
from vramfit.cli.explain import explain_command
from vramfit.cli.export import export_command
from vramfit.cli.fit import fit_command
from vramfit.cli.gpus import gpus_command
from vramfit.cli.plan import plan_command
from vramfit.cli.printing import (
    INTERNAL_ERROR,
    GuardedStream,
    guarded_streams,
    interrupted,
    print_bug,
    print_error,
)
from vramfit.cli.program import PlannedCommand, ProgramCommand, TargetCommand, Verb, Verbs
from vramfit.cli.replay import replay_command
from vramfit.cli.run import run_command
from vramfit.cli.stress import stress_command
from vramfit.cli.together import together_command
from vramfit.cli.tune import tune_command
from vramfit.cli.verify import verify_command
from vramfit.cli.watch import watch_command
from vramfit.errors import UsageError, VramfitError
from vramfit.launch.interrupts import programs_run, terminated_by_exit

__all__ = ["app", "main"]

app = typer.Typer(
    name="vramfit",
    cls=Verbs,
    help="Make PyTorch programs fit the GPU they have.",
    epilog=(
        "Exit codes: 0 fine; 1 the program failed (or its own code); 2 usage, or a report could not be written "
        "after the program ran; 3 does not fit, or differs from --against."
    ),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUNNING_PROGRAMS = ("run", "check", "together", "watch")
"""Verbs that run a program as it is."""

_ANYWHERE = ("gpus", "doctor")
"""Verbs that need no current folder."""

_PROGRAMS = "See what a program takes"
_RECORDINGS = "Look into what was recorded"
_PLANS = "Make it fit"
_MACHINES = "Cards and machines"

_COMMANDS = (
    (run_command, ProgramCommand, _PROGRAMS, 'run --gpu "RTX 4090" --json report.json train.py --epochs 3'),
    (check_command, CheckCommand, _PROGRAMS, "check train.py --budget 20GiB --gpu 'RTX 4090' -- --epochs 1"),
    (together_command, Verb, _PROGRAMS, 'together train.py "other.py --epochs 1" --gpu "RTX 4090"'),
    (watch_command, TargetCommand, _PROGRAMS, "watch -- python train.py --epochs 3"),
    (stress_command, Verb, _PROGRAMS, 'stress --gpu "RTX 4090" workloads.py:gpt2'),
    (plan_command, PlannedCommand, _PLANS, 'plan --gpu "RTX 4090" -o plan.toml train.py'),
    (fit_command, Verb, _PLANS, 'fit workloads.py:gpt2 --gpu "RTX 4090"'),
    (verify_command, Verb, _PLANS, "verify plan.toml"),
    (explain_command, Verb, _RECORDINGS, "explain run.vft"),
    (diff_command, Verb, _RECORDINGS, "diff before.vft after.vft"),
    (export_command, Verb, _RECORDINGS, "export snapshot.pickle -o page.html -o timeline.svg"),
    (tune_command, Verb, _RECORDINGS, "tune snapshot.pickle"),
    (replay_command, Verb, _RECORDINGS, "replay snapshot.pickle"),
    (gpus_command, Verb, _MACHINES, 'gpus "RTX 4090"'),
    (doctor_command, Verb, _MACHINES, "doctor --strict"),
    (calibrate_command, Verb, _MACHINES, "calibrate --minutes 5"),
)
"""Each verb with how its arguments are read, where the help lists it, and an example."""

for _command, _kind, _panel, _example in _COMMANDS:
    app.command(
        _command.__name__.removesuffix("_command"),
        cls=_kind,
        rich_help_panel=_panel,
        epilog=f"Example: vramfit {_example}",
    )(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        python = ".".join(str(part) for part in sys.version_info[:3])
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "missing"
        typer.echo(f"vramfit {__version__} (torch {torch}, Python {python})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _vramfit(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Make PyTorch programs fit the GPU they have: exact CUDA memory on a virtual GPU, anywhere."""
    del version  # handled by its callback, before anything else
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in _ANYWHERE:
        _check_folder()


def _check_folder() -> None:
    """Make sure that there is a current folder: paths on the command line and in output are relative to it."""
    try:
        os.getcwd()
    except OSError as error:
        reason = (
            "was deleted" if isinstance(error, FileNotFoundError) else f"cannot be used: {error.strerror}"
        )
        raise UsageError(
            f"the current folder {reason}", "Change to another folder and call vramfit there"
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends with SystemExit.

    Args:
        arguments: without the name of the program; None takes those of the process.
    """
    with guarded_streams() as output, terminated_by_exit():
        try:
            _run(arguments, output)
        except VramfitError as error:
            print_error(error)
            raise SystemExit(error.exit_code) from None
        except (
            Exception
        ):  # the last place where a bug of ours can be kept apart from a failure of the user's program
            raise SystemExit(_tell_failure()) from None


def _tell_failure() -> int:
    """Say that this torch is too old, if it is, for then our own modules fail on it; else that this is a bug."""
    from vramfit.torch_internals.releases import refuse_older

    try:
        refuse_older()
    except VramfitError as error:
        print_error(error)
        return error.exit_code
    print_bug()
    return INTERNAL_ERROR


def _run(arguments: Sequence[str] | None, output: GuardedStream) -> None:
    try:
        app(args=None if arguments is None else list(arguments), prog_name="vramfit")
    except SystemExit as end:
        if _is_of_interrupt(end):
            words = sys.argv[1:] if arguments is None else list(arguments)
            begins = words[:1] and words[0] in _RUNNING_PROGRAMS and not programs_run
            raise interrupted("before the program began" if begins else "before there was a result") from None
        output.check()
        raise


def _is_of_interrupt(end: BaseException) -> bool:
    """Whether typer made this end of a ``KeyboardInterrupt``, in silence."""
    error: BaseException | None = end
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
