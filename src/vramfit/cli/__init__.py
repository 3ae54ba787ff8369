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
from vramfit.cli.printing import INTERNAL_ERROR, GuardedStream, guarded_streams, print_bug, print_error
from vramfit.cli.program import ProgramCommand, Verb, Verbs
from vramfit.cli.replay import replay_command
from vramfit.cli.run import run_command
from vramfit.cli.stress import stress_command
from vramfit.cli.tune import tune_command
from vramfit.cli.verify import verify_command
from vramfit.errors import UsageError, VramfitError
from vramfit.launch.interrupts import terminated_by_exit

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

_ANYWHERE = ("gpus", "doctor")
"""Verbs that need no current folder."""

_PROGRAMS = "See what a program takes"
_RECORDINGS = "Look into what was recorded"
_PLANS = "Make it fit"
_MACHINES = "Cards and machines"

app.command(
    "run",
    cls=ProgramCommand,
    rich_help_panel=_PROGRAMS,
    context_settings={"allow_interspersed_args": False},
    epilog='Example: vramfit run --gpu "RTX 4090" --json report.json train.py --epochs 3',
)(run_command)
app.command(
    "check",
    cls=CheckCommand,
    rich_help_panel=_PROGRAMS,
    epilog="Example: vramfit check train.py --budget 20GiB --gpu 'RTX 4090' -- --epochs 1",
)(check_command)
app.command(
    "stress",
    cls=Verb,
    rich_help_panel=_PROGRAMS,
    epilog='Example: vramfit stress --gpu "RTX 4090" workloads.py:gpt2',
)(stress_command)
app.command(
    "plan",
    cls=Verb,
    rich_help_panel=_PLANS,
    epilog='Example: vramfit plan workloads.py:gpt2 --gpu "RTX 4090" -o plan.toml',
)(plan_command)
app.command(
    "fit",
    cls=Verb,
    rich_help_panel=_PLANS,
    epilog='Example: vramfit fit workloads.py:gpt2 --gpu "RTX 4090"',
)(fit_command)
app.command("verify", cls=Verb, rich_help_panel=_PLANS, epilog="Example: vramfit verify plan.toml")(
    verify_command
)
app.command("explain", cls=Verb, rich_help_panel=_RECORDINGS, epilog="Example: vramfit explain run.vft")(
    explain_command
)
app.command(
    "diff", cls=Verb, rich_help_panel=_RECORDINGS, epilog="Example: vramfit diff before.vft after.vft"
)(diff_command)
app.command(
    "export",
    cls=Verb,
    rich_help_panel=_RECORDINGS,
    epilog="Example: vramfit export snapshot.pickle -o page.html -o timeline.svg",
)(export_command)
app.command("tune", cls=Verb, rich_help_panel=_RECORDINGS, epilog="Example: vramfit tune snapshot.pickle")(
    tune_command
)
app.command(
    "replay", cls=Verb, rich_help_panel=_RECORDINGS, epilog="Example: vramfit replay snapshot.pickle"
)(replay_command)
app.command("gpus", cls=Verb, rich_help_panel=_MACHINES, epilog='Example: vramfit gpus "RTX 4090"')(
    gpus_command
)
app.command("doctor", cls=Verb, rich_help_panel=_MACHINES, epilog="Example: vramfit doctor --strict")(
    doctor_command
)
app.command(
    "calibrate", cls=Verb, rich_help_panel=_MACHINES, epilog="Example: vramfit calibrate --minutes 5"
)(calibrate_command)


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
            print_bug()
            raise SystemExit(INTERNAL_ERROR) from None


def _run(arguments: Sequence[str] | None, output: GuardedStream) -> None:
    try:
        app(args=None if arguments is None else list(arguments), prog_name="vramfit")
    except SystemExit:
        output.check()
        raise
