"""Runs a program where its options say: on virtual cards, a second time where it ran out, or for real and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from vramfit.options.run_options import RunOptions
from vramfit.record import record_run
from vramfit.trace import Run
from vramfit.virtual import virtual_run
from vramfit.virtual.second_run import run_again
from vramfit.virtual.virtual_run import PLAIN, VirtualSettings


def run_program(
    command: Sequence[str],
    options: RunOptions,
    settings: VirtualSettings = PLAIN,
    *,
    around_second: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Run:
    """Run a program to its end.

    Args:
        command: what python would be given.
        options: where and how.
        settings: what the verb adds.
        around_second: entered around a second run without the card's limit, which prints nothing by itself.

    Raises:
        EnvironmentUnfitError, UsageError, VramfitError: as from `run_in_child` and `record_in_child`.
    """
    if options.gpu is None:
        return record_run.record_in_child(command, options, settings)
    first = virtual_run.run_in_child(command, options, settings)
    with around_second() if first.ran_out and options.need else nullcontext():
        return run_again(command, options, first, settings)
