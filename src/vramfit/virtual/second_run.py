"""Runs a program that ran out once more, on the same cards without their limit, to see what it needs in all.

NOTE [The second run]
The program is told the same figures of the card (its name, its memory, how much of it is free), so that one that reads
them takes the same way; only that no request fails. It reads an empty input, prints to nobody, reaches no other
machine, and its writes are set aside: what the user keeps is what the first run did. One that needs any of these ends
otherwise, and then what it needs is known as a lower bound only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vramfit.errors import VramfitError
from vramfit.files import Writes
from vramfit.launch.child_hooks import ChildHook
from vramfit.launch.offline import OFFLINE
from vramfit.options.run_options import RunOptions
from vramfit.trace import CardLimit, DeadMemory, Run, SecondRun
from vramfit.trace.outcome import GARBAGE_BYTES
from vramfit.virtual import virtual_run
from vramfit.virtual.virtual_run import PLAIN, VirtualSettings

_TIMES, _LEAST_SECONDS = 4.0, 60.0
"""How long the second run may take: so many times the first one's time, and no less than so many seconds."""

_NOTABLE = 0.02
"""Share of the card from which memory that only reference cycles hold is collected in the second run."""

SWITCHED_OFF = "--no-need (need=False) switches that off"


def run_again(
    command: Sequence[str], options: RunOptions, first: Run, settings: VirtualSettings = PLAIN
) -> Run:
    """A run with what came of a second one, where it ran out; see NOTE [The second run].

    Args:
        command: what python was given.
        options: how it was run.
        first: what came of it.
        settings: what the verb added.
    """
    if not first.ran_out or first.oom is None:
        return first
    if why_not := _why_not(options, settings):
        return replace(first, again=SecondRun(run=None, why_not=why_not))
    oom = first.oom
    if is_notable(oom.dead, oom.total_bytes):
        again = _run_aside(command, options, first, CardLimit.COLLECTED, settings.hooks)
        if (
            again.run is None
            or again.run.progress.is_cut
            or collected_bytes(again) >= notable(oom.total_bytes)
        ):
            return replace(first, again=again)
    return replace(first, again=_run_aside(command, options, first, CardLimit.SERVED, settings.hooks))


def _run_aside(
    command: Sequence[str],
    options: RunOptions,
    first: Run,
    limit: CardLimit,
    hooks: tuple[ChildHook, ...],
) -> SecondRun:
    """Run a program with nothing of what it does to be seen."""
    longest = max(_LEAST_SECONDS, _TIMES * first.seconds_wall)
    allowed = options.time
    again = replace(
        options,
        environ={**(options.environ or {}), **OFFLINE},
        host_memory=False,
        time=longest if allowed is None else min(allowed, longest),
        writes=Writes.DISCARD,
        writes_through=(),
    )
    settings = VirtualSettings(
        limit=limit,
        begins_at=_living(first) if limit is CardLimit.COLLECTED else None,
        aside=True,
        hooks=hooks,
    )
    try:
        return SecondRun(run=virtual_run.run_in_child(command, again, settings), limit=limit)
    except (
        KeyboardInterrupt,
        SystemExit,
    ):  # before the program began; the first run has its report all the same
        return SecondRun(run=None, limit=limit, why_not="it was interrupted")
    except VramfitError as error:
        return SecondRun(run=None, limit=limit, why_not=error.message)


def _living(first: Run) -> int:
    """Bytes of the card that the program needs at least when what is dead is not counted."""
    oom = first.oom
    assert oom is not None and oom.dead is not None  # it is notable
    context = next(device.context_bytes for device in first.devices if device.index == oom.device)
    return context + max(0, oom.reserved_bytes - oom.dead.total_bytes - oom.dead.graphs_bytes)


def notable(total: int) -> int:
    """Bytes of dead memory from which the second run does not count them, on a card of ``total`` bytes."""
    return int(_NOTABLE * total)


def is_notable(dead: DeadMemory | None, total: int) -> bool:
    """Whether so much may be dead at a shortage that the second run must not count it."""
    return dead is not None and dead.total_bytes + dead.graphs_bytes >= notable(total)


def collected_bytes(again: SecondRun) -> int:
    """The most bytes that one collection of garbage freed in a second run."""
    return 0 if again.run is None else int(again.run.trace.meta.get(GARBAGE_BYTES, 0))


def _why_not(options: RunOptions, settings: VirtualSettings) -> str:
    """Why a program cannot be run again; empty where it can."""
    if not options.need:
        return SWITCHED_OFF
    if settings.place is not None:
        return "it is one rank of several"
    if options.writes is Writes.REAL:
        return "it wrote its files for real (--writes real) and would find them"
    return ""
