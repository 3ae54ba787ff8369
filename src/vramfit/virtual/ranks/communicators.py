"""The communicator behind each process group: where its ranks lie, its stream, and the works that it has pending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup, distributed_c10d

from vramfit.virtual.machine import Machine
from vramfit.virtual.ranks.collective_seconds import Pattern, Span, collective_seconds
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.ranks.works import Pending, PendingWork
from vramfit.virtual.simulated_streams import HIGHEST_PRIORITY, LOWEST_PRIORITY, Engine


@dataclass(kw_only=True, slots=True, eq=False)
class Communicator:
    """What is known of one process group.

    Attributes:
        name: the group's.
        ranks: numbers of its ranks in the world, in the group's order.
        rank: this rank's number in the group.
        span: how its ranks lie on nodes.
        urgent: its streams are of high priority.
        streams: its stream on each card, made when it first runs there.
        pending: works for which nobody has waited.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    span: Span
    urgent: bool = False
    streams: dict[int, int] = field(default_factory=dict)
    pending: Pending = field(default_factory=Pending)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class Communicators:
    """The communicators of a run, by the name of the group.

    Args:
        machine: the virtual machine.
        place: which rank of it runs here.
    """

    def __init__(self, machine: Machine, place: RankPlace) -> None:
        self.machine = machine
        self.place = place
        self.urgent: set[str] = set()
        self._known: dict[str, tuple[Any, Communicator]] = {}

    def forget(self) -> None:
        """Let everything go that pending works hold, and forget all groups."""
        for _, known in self._known.values():
            known.pending.clear()
        self._known.clear()

    def of(self, group: ProcessGroup) -> Communicator:
        """The communicator of a group."""
        ranks = distributed_c10d._world.pg_group_ranks.get(group)
        source, known = self._known.get(group.group_name, (None, None))
        if known is None or source is not ranks:  # names come again once all groups were destroyed
            members = tuple(ranks) if ranks else tuple(range(group.size()))
            nodes = len({self.place.node_of(rank) for rank in members})
            known = Communicator(
                name=group.group_name,
                ranks=members,
                rank=group.rank(),
                span=Span(ranks=len(members), nodes=nodes),
                urgent=group.group_name in self.urgent,
            )
            self._known[group.group_name] = ranks, known
        return known

    def run(
        self,
        communicator: Communicator,
        pattern: Pattern,
        nbytes: int,
        device: int,
        *,
        own_stream: bool,
    ) -> tuple[float, int]:
        """Give a stream of a card a collective; returns when it is done, in microseconds, and the stream.

        Args:
            communicator: of the group.
            pattern: how its bytes travel.
            nbytes: see `collective_seconds`.
            device: index of the card.
            own_stream: it runs on the group's stream, which waits for the program's current one first.
        """
        machine, clock = self.machine, self.machine.clock
        stream = current = machine.current_stream(device)
        communicator.pending.let_go(clock.reached(device, current))
        if own_stream:
            stream = self._stream(communicator, device)
            clock.hold(device, stream, clock.reached(device, current))
        spec = machine.devices[device].spec
        seconds = collective_seconds(pattern, nbytes, communicator.span, spec)
        clock.work(1e6 * seconds, device, stream, Engine.LINK)
        return clock.reached(device, stream), stream

    def _stream(self, communicator: Communicator, device: int) -> int:
        if device not in communicator.streams:
            priority = HIGHEST_PRIORITY if communicator.urgent else LOWEST_PRIORITY
            communicator.streams[device] = self.machine.new_stream(device, priority)
        return communicator.streams[device]

    def work(
        self,
        communicator: Communicator,
        device: int | None,
        until: float,
        *,
        results: list[torch.Tensor],
        tensors: list[torch.Tensor],
        let_go: Callable[[], object],
    ) -> Any:
        """A boxed work on the group's own stream of a card, or on the host (None).

        Args:
            until: when it is done, in microseconds.
            results: the tensors that it writes.
            tensors: those that stay alive until somebody waits.
            let_go: called then.
        """

        def wait(reached: float) -> None:
            if device is not None:
                self.machine.clock.hold(device, self.machine.current_stream(device), reached)

        pending = communicator.pending
        made = PendingWork(results, until, on_wait=wait, let_go=let_go, tensors=tensors, pending=pending)
        pending.add(made)
        return made.boxed()


def group_in(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group among the arguments of a ``c10d`` op."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value)
    raise AssertionError("a collective without a group")


def is_handle(backend: Any) -> bool:
    """Whether a backend is ours: it does nothing, and rules answer for it."""
    return isinstance(backend, FakeProcessGroup)
