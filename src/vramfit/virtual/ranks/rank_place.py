"""Which rank of which world a virtual run is, on which node, and where ranks that run beside it leave objects."""

from __future__ import annotations

import argparse
import os
import uuid
from dataclasses import dataclass
from typing import Any

from vramfit.arguments import path_argument, whole_argument
from vramfit.errors import UsageError

MOST_RANKS = 1 << 20
MOST_PER_NODE = 8
"""Cards of one node that a process sees (c10/core/impl/FakeGuardImpl.h: kFakeGuardImplMaxDevices)."""
PER_NODE = 8  # HGX and DGX boards of V100 to B300 carry eight cards
PORT = 29500  # torch/distributed/run.py: where torchrun's workers meet


_OF_LAUNCHER = {
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "OMP_NUM_THREADS": "1",
}
"""Variables of every rank that options of the launcher decide, or the user, and what they are otherwise."""


def elastic_variables(options: argparse.Namespace, nodes: int) -> dict[str, str]:
    """What torchrun's options say of a job: its id, how often it may be started again, the role of its processes.

    One node without an address meets at a place that torchrun makes up, under an id that it makes up too
    (torch/distributed/run.py: run). Here that is the same for the same script each time.
    """
    given = {
        name: getattr(options, name, None) or os.environ.get(f"PET_{name.upper()}")
        for name in ("rdzv_id", "max_restarts", "role", "rdzv_backend", "rdzv_endpoint", "master_port")
    }
    meets = (given["rdzv_backend"] or "static") != "static" or given["rdzv_endpoint"] or given["master_port"]
    if options.standalone or (nodes == 1 and not meets):
        given["rdzv_id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, str(options.training_script)))
    return {
        "ROLE_NAME": str(given["role"] or "default"),
        "TORCHELASTIC_RUN_ID": str(given["rdzv_id"] or "none"),
        "TORCHELASTIC_MAX_RESTARTS": str(given["max_restarts"] or 0),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank of a distributed program.

    Ranks are numbered node by node, as torchrun does: rank r is the card ``r % ranks_per_node`` of node
    ``r // ranks_per_node``.

    Attributes:
        rank: its number, from 0.
        world_size: how many ranks the program has.
        ranks_per_node: ranks, and cards, of a node. The last node may have fewer ranks.
        mailbox: a folder through which ranks that run side by side hand one another Python objects; None where this
            rank runs alone.
        patience: seconds for which a rank waits there for an object of another.

    Raises:
        UsageError: there is no such rank, or a node cannot have so many.
    """

    rank: int
    world_size: int
    ranks_per_node: int = PER_NODE
    mailbox: str | None = None
    patience: float = 120.0

    def __post_init__(self) -> None:
        """Refuse a rank that does not exist."""
        whole_argument("world_size", self.world_size, least=1, most=MOST_RANKS)
        whole_argument("ranks_per_node", self.ranks_per_node, least=1, most=MOST_PER_NODE)
        whole_argument("rank", self.rank, least=0)
        if self.rank >= self.world_size:
            raise UsageError(
                f"rank={self.rank} is beyond a world of {self.world_size} ranks",
                f"Ranks count from 0 to {self.world_size - 1}",
            )
        if self.mailbox is not None:
            path_argument("mailbox", self.mailbox)

    @property
    def local_rank(self) -> int:
        """Its number within its node, which is that of its card."""
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        """The number of its node."""
        return self.rank // self.ranks_per_node

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def cards(self) -> int:
        """Cards of its node, of which it uses one."""
        return min(self.ranks_per_node, self.world_size)

    def node_of(self, rank: int) -> int:
        """The number of the node on which another rank runs."""
        return rank // self.ranks_per_node

    def arguments(self) -> dict[str, Any]:
        """The arguments of `VirtualGPU` that name it."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "mailbox": self.mailbox,
        }

    def environment(self, address: str = "127.0.0.1", port: int = PORT) -> dict[str, str]:
        """The variables that torchrun sets for this rank.

        Those of torch/distributed/elastic/agent/server/local_elastic_agent.py.
        """
        of_node = min(self.ranks_per_node, self.world_size - self.node * self.ranks_per_node)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(of_node),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            **{name: os.environ.get(name, value) for name, value in _OF_LAUNCHER.items()},
        }


ALONE = RankPlace(rank=0, world_size=1, ranks_per_node=1)
"""The one rank of a program that is not distributed, or that is its only process."""


def place_of(
    rank: int | None,
    world_size: int | None,
    ranks_per_node: int = PER_NODE,
    mailbox: str | os.PathLike[str] | None = None,
) -> RankPlace:
    """The place that arguments name; `ALONE` without a rank and a world.

    Raises:
        UsageError: one of the two is missing, or there is no such rank.
    """
    if rank is None and world_size is None:
        return ALONE
    if rank is None or world_size is None:
        missing, given = ("rank", "world_size") if rank is None else ("world_size", "rank")
        raise UsageError(
            f"{given} is given without {missing}", f"Give both, as in rank=0, world_size={PER_NODE}"
        )
    folder = None if mailbox is None else path_argument("mailbox", mailbox)
    return RankPlace(rank=rank, world_size=world_size, ranks_per_node=ranks_per_node, mailbox=folder)
