"""Runs ranks of a world side by side, each in a process of its own, with those that they wait for. No torch."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from vramfit.cudnn.asker import wanted_cudnn
from vramfit.errors import UsageError
from vramfit.files import Backend, Writes, namespace
from vramfit.launch.nursery import nursery_for
from vramfit.launch.tasks import Task, TaskPlace, TaskPool
from vramfit.trace import PROCESS_GROUPS, Run
from vramfit.virtual.ranks import rank_waits
from vramfit.virtual.ranks.made_groups import groups_of_all
from vramfit.virtual.ranks.rank_place import MOST_PER_NODE, PER_NODE, RankPlace
from vramfit.virtual.virtual_run import VirtualRun, run_in_child
from vramfit.virtual.worlds.rank_choice import MOST_BETWEEN, ChoiceKind, RankChoice, between
from vramfit.virtual.worlds.rank_places import MOST_TRIED, PlaceGuesses, rank_places

_LOOK = 0.1  # seconds between two looks at who waits
_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "vramfit.capture.kept_memory",
    "vramfit.capture.meter_figures",
    "vramfit.capture.step_counter",
    "vramfit.virtual.gpu",
    "vramfit.virtual.lazy_dynamo",
    "vramfit.virtual.ranks.one_process",
    "vramfit.virtual.virtual_child",
)
"""What a rank's process has imported when its program begins."""

_REAL = (Writes.REAL, Writes.REAL.value)
_PATCHES = (Backend.PATCHES, Backend.PATCHES.value)

_MOST_AT_ONCE = 256
"""Processes at once, most of which wait: as many stages of pipelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A distributed program's ranks.

    Attributes:
        size: how many.
        per_node: ranks, and cards, of a node.

    Raises:
        UsageError: there can be no such world.
    """

    size: int
    per_node: int = PER_NODE

    def __post_init__(self) -> None:
        """Refuse nodes that are not full."""
        if self.per_node > MOST_PER_NODE:
            raise UsageError(
                f"{self.per_node} ranks on a node are more than the {MOST_PER_NODE} cards that it can have here",
                f"Write {MOST_PER_NODE} on each (--per-node, torchrun's --nproc-per-node), on more nodes",
            )
        RankPlace(rank=0, world_size=self.size, ranks_per_node=self.per_node)
        if self.size > self.per_node and self.size % self.per_node:
            raise UsageError(
                f"{self.size} ranks cannot be divided among nodes of {self.per_node}",
                f"Give --per-node a divisor of {self.size}, at most {MOST_PER_NODE}, or another number of ranks",
            )

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return -(-self.size // self.per_node)

    def place(self, rank: int, mailbox: str | None = None) -> RankPlace:
        """One of the ranks."""
        return RankPlace(rank=rank, world_size=self.size, ranks_per_node=self.per_node, mailbox=mailbox)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldRun:
    """What ranks of a world did.

    Attributes:
        world: the world.
        choice: how the ranks were chosen.
        runs: those that ran, by rank.
        waited_for: those that ran since another waited for them.
    """

    world: World
    choice: RankChoice
    runs: Mapping[int, Run]
    waited_for: tuple[int, ...] = ()


def kind_of(run: Run, place: RankPlace) -> tuple[object, ...]:
    """What makes ranks alike: the peaks of their card and of page-locked memory, and how they ended."""
    own = [device for device in run.devices if device.index == place.local_rank] or run.devices
    peaks = [(device.peak_allocated_bytes, device.peak_reserved_bytes) for device in own]
    return (*peaks, run.host_pinned_peak_bytes, run.exit_code, run.ran_out)


def kinds_of(runs: Mapping[int, Run], world: World) -> dict[int, tuple[object, ...]]:
    """What makes ranks alike, of each that ran."""
    return {rank: kind_of(run, world.place(rank)) for rank, run in runs.items()}


def places_of(runs: Mapping[int, Run], world: World) -> PlaceGuesses:
    """Which places ranks hold in the groups that those that ran tell of."""
    groups = groups_of_all(str(run.trace.meta.get(PROCESS_GROUPS, "")) for run in runs.values())
    return rank_places(groups, world.size, world.per_node)


def run_world(
    command: Callable[[RankPlace], list[str]],
    options: VirtualRun,
    world: World,
    choice: RankChoice = RankChoice(),  # noqa: B008 - frozen
    progress: Callable[[str], object] | None = None,
    executor: Executor | None = None,
) -> WorldRun:
    """Run ranks of a program; see NOTE [Kinds of ranks] in rank_choice.py and NOTE [Places] in rank_places.py.

    Once a rank has failed for another reason than memory, no further one is started.

    Args:
        command: what python would be given, for a rank.
        options: how each is run; its place is set here.
        world: the world.
        choice: which ranks.
        progress: called with a line before each rank.
        executor: where ranks run; None for threads of this process. It must be of this machine: ranks leave objects
            for one another in a folder.

    Raises:
        UsageError, VramfitError, KeyboardInterrupt: as from `run_in_child`.
    """
    with tempfile.TemporaryDirectory(prefix="vramfit-ranks-", ignore_cleanup_errors=True) as folder:
        side = _SideBySide(command, options, world, Path(folder), progress or (lambda _: None), executor)
        first = choice.first(world.size)
        with _nursery(options) if len(first) > 1 else nullcontext():
            side.run(first)
            if choice.kind is ChoiceKind.AUTO:
                _run_kinds(side, world)
        return WorldRun(
            world=world,
            choice=choice,
            runs=dict(sorted(side.runs.items())),
            waited_for=tuple(sorted(side.waited_for - set(first))),
        )


def _nursery(options: VirtualRun) -> AbstractContextManager[object]:
    """Lets ranks be forks of a process that has imported what they begin with, where that changes nothing.

    A child that asks cuDNN does so before torch is imported, as does one whose files are protected by patches; and one
    that meters its memory counts what it shares.
    """
    in_namespace = options.backend not in _PATCHES and namespace.why_not() is None
    is_protected_late = options.writes in _REAL or in_namespace
    if wanted_cudnn(options.cudnn) is not None or options.host_memory or not is_protected_late:
        return nullcontext()
    return nursery_for(_IMPORTS, options.environ)


def _run_kinds(side: _SideBySide, world: World) -> None:
    """Run further ranks, until kinds are known or enough have run."""
    tries, left = MOST_TRIED, MOST_BETWEEN
    while not side.failed:
        kinds, places = kinds_of(side.runs, world), places_of(side.runs, world)
        untried = places.untried(kinds) if tries else None
        if untried is not None:
            side.run((untried,))
            tries -= 1
            continue
        further = between(kinds, places.order(kinds))[:left]
        if not further:
            break
        side.run(further)
        left -= len(further)


class _SideBySide:
    """The processes of a world: as many busy at once as this machine has cores, those that wait aside."""

    def __init__(
        self,
        command: Callable[[RankPlace], list[str]],
        options: VirtualRun,
        world: World,
        mailbox: Path,
        progress: Callable[[str], object],
        executor: Executor | None,
    ) -> None:
        self.runs: dict[int, Run] = {}
        self.waited_for: set[int] = set()
        self.failed = False
        self._command = command
        self._options = options
        self._world = world
        self._mailbox = mailbox
        self._progress = progress
        self._executor = executor
        rank_waits.prepare(mailbox)

    def run(self, ranks: Iterable[int]) -> None:
        """Run ranks to their ends, and those that they wait for."""
        queue = deque(rank for rank in ranks if rank not in self.runs)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with TaskPool(self._executor, at_once=_MOST_AT_ONCE) as pool:
            while queue or pool.running:
                waits = rank_waits.waiting(self._mailbox)
                for other in () if pool.interrupted else set(waits.values()):
                    if self._is_new(other, pool):
                        self.waited_for.add(other)
                        self._start(other, pool)
                if (self.failed or pool.interrupted) and queue:
                    queue.clear()
                while queue and sum(int(key) not in waits for key in pool.running) < cores:
                    rank = queue.popleft()
                    if self._is_new(rank, pool):
                        self._start(rank, pool)
                self._collect(pool)

    def _is_new(self, rank: int, pool: TaskPool) -> bool:
        return rank not in self.runs and str(rank) not in pool.running

    def _start(self, rank: int, pool: TaskPool) -> None:
        self._progress(f"rank {rank} of {self._world.size}")
        place = self._world.place(rank, str(self._mailbox))
        call = self._command(place), replace(self._options, place=place)
        pool.start(Task(key=str(rank), function=run_in_child, arguments=call, place=TaskPlace.EXECUTOR))

    def _collect(self, pool: TaskPool) -> None:
        """Wait a moment, and take what has ended.

        Raises:
            BaseException: what a rank's run raised.
        """
        for result in pool.collect(_LOOK):
            rank = int(result.key)
            rank_waits.note_ended(self._mailbox, rank)
            if result.error is not None:
                raise result.error
            self.runs[rank] = run = result.value
            self.failed = self.failed or (run.exit_code != 0 and not run.ran_out)
