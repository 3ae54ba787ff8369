"""The communicator behind each process group: where its ranks lie, its stream, and the works that it has pending.

NOTE [Communicators of two]: torch sends and receives single tensors on a communicator of the two ranks alone, with a
stream of its own, made at the first of them; what is sent in a batch goes over that of the whole group, and so does all
once the group is bound to a card (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ``pointToPoint``). Since 2.15 that
is each group of "nccl", and groups of "nccl-lazy", since 2.14, have communicators of two for batches as well
(torch/distributed/distributed_c10d.py: ``_nccl2_device``, ``ProcessGroupNCCLLazy``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import DistBackendError, ProcessGroup

from vramfit.gpus.nccl.collective_times import NcclCollective, collective_seconds
from vramfit.gpus.nccl.communicator_log import CommunicatorLog
from vramfit.gpus.nccl.communicator_use import NOTHING, ByteRange
from vramfit.gpus.nccl.nccl_host_memory import process_host_memory
from vramfit.gpus.nccl.nccl_memory import NcclMemory, process_memory
from vramfit.gpus.nccl.nccl_settings import NcclSettings
from vramfit.gpus.nccl.node_types import usual_node
from vramfit.torch_internals.distributed import FakeProcessGroup, group_ranks
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.ranks.works import Pending, PendingWork
from vramfit.virtual.simulated_streams import HIGHEST_PRIORITY, LOWEST_PRIORITY, Engine
from vramfit.virtual.torch_cuda.properties import release_for

# The form of torch/csrc/distributed/c10d/NCCLUtils.hpp (C10D_NCCL_CHECK) and of NCCL's src/include/checks.h.
_NCCL_FAILED = (
    "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
    "{version}\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@dataclass(kw_only=True, slots=True, eq=False)
class Communicator:
    """What is known of one process group.

    Attributes:
        name: the group's.
        ranks: numbers of its ranks in the world, in the group's order.
        rank: this rank's number in the group.
        urgent: its streams are of high priority.
        split: NCCL splits it from the communicator of the world.
        streams: its stream on each card, made when it first runs there.
        pending: works for which nobody has waited.
        peers: ranks of the world that it sends to (True) or receives from (False).
        seconds: what each collective takes, by kind and bytes, once it was worked out.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    urgent: bool = False
    split: bool = False
    streams: dict[int, int] = field(default_factory=dict)
    pending: Pending = field(default_factory=Pending)
    peers: set[tuple[int, bool]] = field(default_factory=set)
    seconds: dict[tuple[NcclCollective, int], float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class Communicators:
    """The communicators of a run, by the name of the group.

    NOTE [NCCL on the card]: what NCCL takes lies outside torch's allocator, and is there from the first collective that
    needs it. The likely figure is taken of the card, as the context is; where it is not free, the collective fails as
    on a card. Nothing is given back: torch destroys communicators at the end of a program.

    Args:
        mode: of the run.
        place: which rank of it runs here.
    """

    def __init__(self, mode: OpRunner, place: RankPlace) -> None:
        self.machine = mode.machine
        self._meter = mode.meter
        self.place = place
        self.urgent: set[str] = set()
        self.lazy: set[str] = set()
        self.split: set[str] = set()
        self.batches = 0
        self._known: dict[str, tuple[Any, Communicator]] = {}
        self._pairs: dict[tuple[str, int], Communicator] = {}
        self._log: CommunicatorLog | None = None
        self._taken: dict[int, int] = {}  # by NCCL, of each card

    @property
    def log(self) -> CommunicatorLog:
        """What NCCL was asked for; its settings are those of the environment when it is first asked."""
        if self._log is None:
            card = self.machine.specs[0]
            self._log = CommunicatorLog(
                rank=self.place.rank,
                per_node=self.place.ranks_per_node,
                card=card,
                node=usual_node(card),
                settings=NcclSettings.from_environ(os.environ),
                version=release_for(self.machine.torch_version, [card.compute_capability]).nccl,
            )
        return self._log

    def note_peer(
        self, communicator: Communicator, peer: int, nbytes: int, device: int, *, sends: bool
    ) -> None:
        """Note that tensors go to a rank of the world, or come from it.

        Raises:
            DistBackendError: the card has no room for NCCL's buffers.
        """
        note = self.log.send if sends else self.log.receive
        note(communicator.name, communicator.ranks, peer, nbytes, split=communicator.split)
        if (peer, sends) not in communicator.peers:
            communicator.peers.add((peer, sends))
            self._take(device, "send and receive")

    def nccl_memory(self) -> NcclMemory | None:
        """What NCCL takes of this rank's card beside torch's allocator; None where nothing was asked of it."""
        return None if self._log is None else process_memory(self._log.uses())

    def nccl_host_memory(self) -> ByteRange:
        """Bytes that NCCL takes of this rank's host."""
        return NOTHING if self._log is None else process_host_memory(self._log.uses())

    def _take(self, device: int, op: str) -> None:
        """Take what NCCL needs by now of a card. See NOTE [NCCL on the card]."""
        memory = self.nccl_memory()
        growth = 0 if memory is None else memory.total.likely - self._taken.get(device, 0)
        if growth <= 0:
            return
        card = self.machine.device(device)
        if not card.driver.has(growth):
            version = ".".join(map(str, self.log.version))
            message = _NCCL_FAILED.format(version=version)
            self._meter.note_oom(message, device, growth, f"NCCL: {op}")
            raise DistBackendError(message)
        self._taken[device] = self._taken.get(device, 0) + growth
        card.take_outside(growth)

    def forget(self) -> None:
        """Let everything go that pending works hold, and forget all groups."""
        for known in (*(known for _, known in self._known.values()), *self._pairs.values()):
            known.pending.clear()
        self._known.clear()
        self._pairs.clear()

    def of(self, group: ProcessGroup) -> Communicator:
        """The communicator of a group."""
        ranks = group_ranks().get(group)
        source, known = self._known.get(group.group_name, (None, None))
        if known is None or source is not ranks:  # names come again once all groups were destroyed
            members = tuple(ranks) if ranks else tuple(range(group.size()))
            known = Communicator(
                name=group.group_name,
                ranks=members,
                rank=group.rank(),
                urgent=group.group_name in self.urgent,
                split=group.group_name in self.split,
            )
            self._known[group.group_name] = ranks, known
            for key in [key for key in self._pairs if key[0] == known.name]:
                del self._pairs[key]
        return known

    def towards(self, group: ProcessGroup, peer: int) -> Communicator:
        """What a tensor takes from this rank of a group to another one of the world, or back.

        See NOTE [Communicators of two].
        """
        known = self.of(group)
        whole = self.batches or group.bound_device_id is not None
        if whole and group.group_name not in self.lazy:
            return known
        if (known.name, peer) not in self._pairs:
            ranks = tuple(sorted({known.ranks[known.rank], peer}))
            self._pairs[known.name, peer] = Communicator(
                name=f"{known.name}, {ranks[0]} and {ranks[-1]}",
                ranks=ranks,
                rank=ranks.index(known.ranks[known.rank]),
                urgent=known.urgent,
            )
        return self._pairs[known.name, peer]

    def run(
        self,
        communicator: Communicator,
        kind: NcclCollective,
        nbytes: int,
        device: int,
        *,
        own_stream: bool,
    ) -> tuple[float, int]:
        """Give a stream of a card a collective; returns when it is done, in microseconds, and the stream.

        Args:
            communicator: of the group.
            kind: what NCCL is asked for.
            nbytes: see `collective_seconds`.
            device: index of the card.
            own_stream: it runs on the group's stream, which waits for the program's current one first.

        Raises:
            DistBackendError: the card has no room for NCCL's buffers.
        """
        machine, clock = self.machine, self.machine.clock
        stream = current = machine.current_stream(device)
        communicator.pending.let_go(clock.reached(device, current))
        if own_stream:
            stream = self._stream(communicator, device)
            clock.hold(device, stream, clock.reached(device, current))
        seconds = communicator.seconds.get((kind, nbytes))
        if seconds is None:
            if kind is not NcclCollective.SEND_RECEIVE:
                self.log.collective(
                    communicator.name, communicator.ranks, kind, nbytes, split=communicator.split
                )
                self._take(device, kind.value)
            layout = self.log.layout(communicator.ranks)
            seconds = communicator.seconds[kind, nbytes] = collective_seconds(kind, nbytes, layout)
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
