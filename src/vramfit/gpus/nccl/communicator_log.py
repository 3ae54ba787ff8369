"""What one rank asks of NCCL, group by group, as torch's ops name it: what its communicators take follows from it.

A communicator of torch belongs to a group and is made at its first collective. A send or a receive that is not batched
has one of its own for the two ranks, unless ``init_process_group`` was given a ``device_id``
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vramfit.gpus.nccl.collective_times import NcclCollective, RankLayout
from vramfit.gpus.nccl.communicator_use import CommunicatorUse
from vramfit.gpus.nccl.nccl_settings import REFERENCE_NCCL, NcclSettings, NcclVersion
from vramfit.gpus.nccl.node_types import NodeType
from vramfit.gpus.spec import GpuSpec

_KINDS = {
    NcclCollective.ALL_REDUCE: (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "allreduce_"),
        *("allreduce_coalesced_", "barrier"),  # ProcessGroupNCCL::barrier reduces one element
    ),
    NcclCollective.ALL_GATHER: (
        *("_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
        *("all_gather_into_tensor_out", "allgather_", "allgather_coalesced_"),
        "allgather_into_tensor_coalesced_",
    ),
    NcclCollective.REDUCE_SCATTER: (
        *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor", "reduce_scatter_tensor_out"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced_"),
    ),
    NcclCollective.BROADCAST: ("broadcast", "broadcast_"),
    NcclCollective.REDUCE: ("reduce_",),
    NcclCollective.ALL_TO_ALL: (
        *("all_to_all_single", "alltoall_", "alltoall_base_", "gather_", "gather_into_tensor_", "scatter_"),
    ),
    NcclCollective.SEND_RECEIVE: ("batch_p2p_ops", "irecv", "isend", "recv_", "recv_any_source_", "send"),
}
COLLECTIVE_OF_OP: Mapping[str, NcclCollective] = MappingProxyType(
    {name: kind for kind, names in _KINDS.items() for name in names}
)
"""By the name of an op of ``c10d::`` or ``_c10d_functional::``, without overload: what NCCL is asked for."""


@dataclass(kw_only=True, slots=True)
class _Asked:
    ranks: tuple[int, ...]
    split: bool
    sizes: dict[NcclCollective, set[int]] = field(default_factory=dict)
    sends: set[int] = field(default_factory=set)
    receives: set[int] = field(default_factory=set)


@dataclass(kw_only=True, slots=True)
class CommunicatorLog:
    """Collectives of one rank, as they come.

    Attributes:
        rank: the rank, in the world.
        per_node: ranks of the world in each node.
        card, node: what each rank runs on.
        settings, version: of NCCL.
    """

    rank: int
    per_node: int
    card: GpuSpec
    node: NodeType
    settings: NcclSettings = field(default_factory=NcclSettings)
    version: NcclVersion = REFERENCE_NCCL
    _asked: dict[str, _Asked] = field(default_factory=dict)

    def collective(
        self, group: str, ranks: tuple[int, ...], kind: NcclCollective, nbytes: int, *, split: bool = False
    ) -> None:
        """Note a collective.

        Args:
            group: any name that tells this communicator from others.
            ranks: its members, as ranks of the world.
            nbytes: of the whole, as `collective_seconds` has it.
            split: the communicator was split from another.
        """
        self._of(group, ranks, split).sizes.setdefault(kind, set()).add(nbytes)

    def send(
        self, group: str, ranks: tuple[int, ...], peer: int, nbytes: int, *, split: bool = False
    ) -> None:
        """Note a send to a rank of the world; of one that is not batched, ``ranks`` are the two."""
        asked = self._of(group, ranks, split)
        asked.sizes.setdefault(NcclCollective.SEND_RECEIVE, set()).add(nbytes)
        asked.sends.add(peer)

    def receive(
        self, group: str, ranks: tuple[int, ...], peer: int, nbytes: int, *, split: bool = False
    ) -> None:
        """Note a receive from a rank of the world; of one that is not batched, ``ranks`` are the two."""
        asked = self._of(group, ranks, split)
        asked.sizes.setdefault(NcclCollective.SEND_RECEIVE, set()).add(nbytes)
        asked.receives.add(peer)

    def _of(self, group: str, ranks: tuple[int, ...], split: bool) -> _Asked:
        return self._asked.setdefault(group, _Asked(ranks=ranks, split=split))

    def uses(self) -> tuple[CommunicatorUse, ...]:
        """The communicators that were made, in the order of their first use, for `process_memory`."""
        return tuple(
            CommunicatorUse(
                layout=self.layout(asked.ranks),
                collectives=frozenset(asked.sizes),
                calls=frozenset((kind, size) for kind, sizes in asked.sizes.items() for size in sizes),
                send_peers=self._near(asked.sends),
                receive_peers=self._near(asked.receives),
                split=asked.split,
            )
            for asked in self._asked.values()
        )

    def layout(self, ranks: tuple[int, ...]) -> RankLayout:
        """Where ranks of the world lie: over how many nodes, evenly or nearly so."""
        nodes = len({rank // self.per_node for rank in ranks})
        return RankLayout(
            card=self.card,
            node=self.node,
            ranks=len(ranks),
            nodes=nodes,
            settings=self.settings,
            version=self.version,
        )

    def _near(self, peers: set[int]) -> int:
        own = self.rank // self.per_node
        return sum(peer // self.per_node == own and peer != self.rank for peer in peers)
