"""Where a program runs (virtual cards, the card of this machine, its CPU), and which real run it is compared with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.cli.options import size_of
from vramfit.cudnn.found_library import NONE
from vramfit.errors import UsageError
from vramfit.files.policy import Writes
from vramfit.virtual.clock_choice import program_clock
from vramfit.virtual.data_dependent.assume import Assume, assumption

if TYPE_CHECKING:
    from vramfit.analysis import Reconciliation, Tolerance
    from vramfit.record.record_run import RecordedRun
    from vramfit.trace import Actual, Run
    from vramfit.virtual.virtual_run import VirtualRun


_DEVICES = "Write --device cuda, --device cuda:1 or --device cpu"


def run_program(command: list[str], where: VirtualRun | RecordedRun, *, need: bool = False) -> Run:
    """Run a program to its end; see `vramfit.virtual.virtual_run` and `vramfit.record.record_run`.

    Args:
        need: run it again without the card's limit where it ran out; see `vramfit.virtual.second_run`.
    """
    from vramfit.virtual.virtual_run import VirtualRun

    if isinstance(where, VirtualRun):
        from vramfit.virtual.second_run import run_again
        from vramfit.virtual.virtual_run import run_in_child

        run = run_in_child(command, where)
        with _telling(run.ran_out and need):
            return run_again(command, where, run, wanted=need)
    from vramfit.record.record_run import record_in_child

    return record_in_child(command, where)


@contextlib.contextmanager
def _telling(runs_again: bool) -> Iterator[None]:
    """Show on a terminal that a program is run again, which prints nothing by itself."""
    if not (runs_again and sys.stderr.isatty()):
        yield
        return
    from vramfit.console import SafeConsole

    console = SafeConsole(stderr=True)
    with console.status("It ran out of memory: running it again without the card's limit"):
        yield


def chosen(
    gpu: str | None,
    *,
    gpus: int,
    device: str | None,
    budget: str | None,
    assume: str,
    profile: str,
    writes: Writes | None = None,
    through: Sequence[Path] = (),
) -> VirtualRun | RecordedRun:
    """What the options choose.

    Raises:
        UsageError: two of them contradict each other, or one cannot be read.
        UnknownGpuError: no such card.
    """
    if gpu is not None:
        if device is not None or budget is not None:
            given = "--device" if device is not None else "--budget"
            raise UsageError(
                f"{given} is for recording a real run, and --gpu for a virtual GPU",
                "Leave one of them out; a virtual GPU of any size is --gpu 20GiB",
            )
        from vramfit.gpus import find_gpu
        from vramfit.virtual.virtual_run import VirtualRun

        if writes is Writes.REAL and through:
            raise UsageError(
                "--writes real writes all files, so --writes-through has no effect",
                "Leave --writes-through out",
            )
        return VirtualRun(
            gpu=find_gpu(gpu),
            gpus=gpus,
            assume=assumption(assume).text,
            profile=profile,
            writes=writes or Writes.DISCARD,
            through=tuple(through),
        )
    for option, is_default in (
        ("--gpus", gpus == 1),
        ("--assume", assume == Assume.UPPER.value),
        ("--profile", profile == "auto"),
    ):
        if not is_default:
            raise UsageError(f"{option} is for a virtual GPU", "Choose one with --gpu NAME")
    for option, is_given in (("--writes", writes is not None), ("--writes-through", bool(through))):
        if is_given:
            raise UsageError(
                f"{option} is for a virtual GPU: a recorded program writes its files as usual",
                "Choose a card with --gpu NAME, or leave it out",
            )
    from vramfit.record.record_run import RecordedRun

    return RecordedRun(device=_device(device), budget=size_of("--budget", budget))


def with_cudnn(where: VirtualRun | RecordedRun, cudnn: str | None) -> VirtualRun | RecordedRun:
    """The same, with the cuDNN that is to be asked.

    Raises:
        UsageError: there is nothing at that path, or the run is a real one.
    """
    if cudnn is None:
        return where
    from vramfit.cudnn.asker import wanted_cudnn
    from vramfit.virtual.virtual_run import VirtualRun

    if not isinstance(where, VirtualRun):
        raise UsageError("--cudnn is for a virtual GPU", "Choose one with --gpu NAME")
    return replace(where, cudnn=wanted_cudnn(cudnn) or NONE)


def with_clock(where: VirtualRun | RecordedRun, clock: str | None) -> VirtualRun | RecordedRun:
    """The same, with what the program's clocks are to follow.

    Raises:
        UsageError: there is no such clock, or the run is a real one.
    """
    if clock is None:
        return where
    from vramfit.virtual.virtual_run import VirtualRun

    chosen_clock = program_clock(clock)
    if not isinstance(where, VirtualRun):
        raise UsageError("--clock is for a virtual GPU", "Choose one with --gpu NAME")
    return replace(where, clock=chosen_clock.value)


def _device(text: str | None) -> str:
    if text is None:
        return "auto"
    name, _, index = text.partition(":")
    known = text in ("cpu", "cuda") or (name == "cuda" and index.isdecimal())
    if not known:
        raise UsageError(f"--device {text} cannot be recorded", _DEVICES)
    return text


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
