"""The child's side of a rank of a world: how it waits for others, what it spawns, and whether it ever joined them."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.virtual.ranks.mailbox import Expected, Mailbox
from vramfit.virtual.ranks.one_process import Ended
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.worlds import rank_waits

NEVER_JOINED = (
    "no-process-group",
    "the program never calls torch.distributed.init_process_group: each rank does all of the work by itself",
)
"""Code and text of the warning."""

_PAUSE = 0.02  # seconds between two looks
_CIRCLE = 5.0  # seconds for which ranks must wait for one another: a letter may have come just now


class Joining:
    """Whether the program has made a process group."""

    def __init__(self) -> None:
        self.joined = False


def install(place: RankPlace, patches: PatchStack) -> Joining:
    """Let a program be one rank of several that are run side by side, until the patches are undone."""
    if place.mailbox is not None:
        _wait_for_the_living(Path(place.mailbox), place, patches)
    _spawn_one(place, patches)
    return _note_joining(patches)


def _wait_for_the_living(folder: Path, place: RankPlace, patches: PatchStack) -> None:
    """Wait for a letter as long as its sender may still send it, and tell the parent who is waited for."""

    def take(self: Mailbox, expected: Expected) -> list[Any]:
        if not expected.path.exists():
            rank_waits.note_waiting(folder, place.rank, expected.rank)
            try:
                _wait(folder, place, expected)
            finally:
                rank_waits.note_going_on(folder, place.rank)
        return original(self, expected)

    original: Callable[[Mailbox, Expected], list[Any]] = Mailbox.take
    patches.set(Mailbox, "take", take)


def _wait(folder: Path, place: RankPlace, expected: Expected) -> None:
    """Wait until a letter is there.

    Raises:
        UsageError: its sender has ended, or waits for this rank.
    """
    since: float | None = None
    while not expected.path.exists():
        if rank_waits.has_ended(folder, expected.rank) and not expected.path.exists():
            raise UsageError(
                f"rank {place.rank} of {place.world_size} waits for rank {expected.rank}, which has ended without "
                "sending what it waits for",
                f"See why rank {expected.rank} sent nothing: it may have failed, or taken another branch",
            )
        circle = rank_waits.in_circle(folder, place.rank)
        since = None if not circle else since or time.monotonic()
        if since is not None and time.monotonic() - since > _CIRCLE:
            told = ", ".join(f"rank {one}" for one in circle[1:])
            raise UsageError(
                f"rank {place.rank} of {place.world_size} waits for rank {expected.rank}, and ranks wait in a circle: "
                f"rank {place.rank}, {told}: on cards the program would hang here",
                "Let one of them send before it receives",
            )
        time.sleep(_PAUSE)


def _spawn_one(place: RankPlace, patches: PatchStack) -> None:
    """Run the function of ``torch.multiprocessing.spawn`` as this rank's process would.

    The parent of the spawn is this process too: on cards it would be another one, without tensors of its own.
    """
    spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
    start_processes: Callable[..., Any] = spawning.start_processes
    spawn: Callable[..., Any] = spawning.spawn

    @functools.wraps(start_processes)
    def start_here(
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if nprocs <= 1:
            return start_processes(fn, args, nprocs, join, *rest, **named)
        _run_worker(fn, _number(place, nprocs), tuple(args))
        return None if join else Ended()

    @functools.wraps(spawn)
    def spawn_here(
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        return start_here(fn, args, nprocs, join, daemon, start_method)

    patches.rebind([(start_processes, start_here), (spawn, spawn_here)])


def _number(place: RankPlace, processes: int) -> int:
    """The number that a spawn of so many processes gives this rank.

    Raises:
        UsageError: it starts another number of processes than there are ranks.
    """
    if processes == place.world_size:
        return place.rank
    if processes == place.cards:
        return place.local_rank
    raise UsageError(
        f"torch.multiprocessing is to start {processes} processes, and the virtual run is rank {place.rank} of "
        f"{place.world_size}",
        f"Run it with --ranks {processes}, or let it start as many processes as there are ranks",
    )


def _run_worker(fn: Callable[..., Any], number: int, args: tuple[Any, ...]) -> None:
    """Run a function as the process of that number would; its process group ends with it."""
    from torch import distributed

    grouped = distributed.is_initialized()
    try:
        fn(number, *args)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
    finally:
        if distributed.is_initialized() and not grouped:
            distributed.destroy_process_group()


def _note_joining(patches: PatchStack) -> Joining:
    """Note whether a process group is ever made."""
    from torch.distributed import distributed_c10d

    found = Joining()
    original = distributed_c10d._new_process_group_helper

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.joined = True
        return original(*args, **kwargs)

    patches.set(distributed_c10d, "_new_process_group_helper", noted)
    return found
