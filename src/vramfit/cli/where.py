"""Runs a program for a verb, and compares it with the real run that its options name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.analysis import Reconciliation, Tolerance
    from vramfit.options.run_options import RunOptions
    from vramfit.planner.planned_program import PlannedProgram
    from vramfit.trace import Actual, Run
    from vramfit.virtual.virtual_run import VirtualSettings


def run_program(command: list[str], options: RunOptions, settings: VirtualSettings | None = None) -> Run:
    """Run a program to its end; see `vramfit.api.program_run`. A second run shows on a terminal."""
    from vramfit.api import program_run
    from vramfit.virtual.virtual_run import PLAIN

    return program_run.run_program(command, options, settings or PLAIN, around_second=_telling)


def load_planned(file: Path) -> PlannedProgram:
    """A plan on its way to a program.

    Raises:
        UsageError: there is no such file, it is no plan, or a technique of it changes the training loop.
    """
    from vramfit.planner.planned_program import PlannedProgram

    return PlannedProgram.load(file)


def with_plan(settings: VirtualSettings, planned: PlannedProgram | None) -> VirtualSettings:
    """The settings of a run that a plan is attached to, if there is one."""
    return settings if planned is None else replace(settings, hooks=(*settings.hooks, planned.hook))


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Show on a terminal that a program is run again, which prints nothing by itself."""
    if not sys.stderr.isatty():
        yield
        return
    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=True)
    with console.status("It ran out of memory: running it again without the card's limit"):
        yield


DEFAULT_TOLERANCE = "1%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The run to compare with, read before the program starts: a wrong file should not cost a run."""

    actual: Actual
    device: int | None
    tolerance: Tolerance

    def reconcile(self, run: Run) -> Reconciliation:
        """Compare a prediction with it.

        Raises:
            UsageError: the two have no device in common.
        """
        from vramfit.analysis import reconcile

        return reconcile(run, self.actual, device=self.device, tolerance=self.tolerance)


def compare(reference: Reference | None, run: Run) -> tuple[Reconciliation | None, UsageError | None]:
    """The comparison, or why there can be none: the run's own report should not be lost by that."""
    if reference is None:
        return None, None
    try:
        return reference.reconcile(run), None
    except UsageError as error:
        return None, error


def read_reference(files: Sequence[Path], device: int | None, tolerance: str | None) -> Reference | None:
    """Read what the options name; None where there is nothing to compare with.

    Raises:
        UsageError: a file or an option cannot be used, or options stand without ``--against``.
    """
    if not files:
        if device is not None or tolerance is not None:
            option = "--tolerance" if device is None else "--against-device"
            raise UsageError(f"{option} has nothing to compare with", "Name the real run: --against SNAPSHOT")
        return None
    from vramfit.analysis import Tolerance, check_device
    from vramfit.trace import read_actual

    bound = Tolerance.parse(DEFAULT_TOLERANCE if tolerance is None else tolerance)
    actual = read_actual(*files)
    check_device(actual, device)
    return Reference(actual=actual, device=device, tolerance=bound)
