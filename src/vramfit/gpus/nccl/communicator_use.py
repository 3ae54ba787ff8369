"""What is done with a communicator, and which of NCCL's algorithms are connected for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vramfit.gpus.nccl.collective_times import EXCHANGES, NcclCollective, RankLayout, does, nccl_choice
from vramfit.gpus.nccl.nccl_buffers import (
    ConnectionEnds,
    RankBytes,
    local_ends,
    network_ends,
    nvls_bytes,
    ring_and_tree_bytes,
    ring_bytes,
    tree_bytes,
)
from vramfit.gpus.nccl.nccl_channels import Channels, channels_of
from vramfit.gpus.nccl.nccl_settings import NcclAlgorithm
from vramfit.gpus.nccl.node_types import CardLink
from vramfit.units import KIB, MIB

_SIZES = (4 * KIB, 1 * MIB, 64 * MIB, 1024 * MIB)
"""What collectives of a training are taken to be where nothing is known: flags, tensors, buckets, whole layers."""


_RING, _TREE, _PAT = NcclAlgorithm.RING, NcclAlgorithm.TREE, NcclAlgorithm.PAT
_NVLS_TREE = NcclAlgorithm.NVLS_TREE
SHARP = frozenset({NcclAlgorithm.NVLS, _NVLS_TREE})
"""Algorithms of NVLink SHARP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """Bytes: at least, most likely, and at most."""

    low: int
    likely: int
    high: int

    def __add__(self, other: ByteRange) -> ByteRange:
        """Both together."""
        return ByteRange(
            low=self.low + other.low, likely=self.likely + other.likely, high=self.high + other.high
        )

    def __contains__(self, nbytes: int) -> bool:
        """Whether a measured figure falls in it."""
        return self.low <= nbytes <= self.high


NOTHING = ByteRange(low=0, likely=0, high=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicatorUse:
    """A communicator and what is done with it.

    Attributes:
        layout: its ranks on cards.
        collectives: what it was asked for; none so far means that it takes nothing.
        calls: collectives with the bytes of each, of the whole; for those without one, sizes of a usual training are
            assumed.
        send_peers, receive_peers: ranks of this node that this rank sends to, or receives from, for sends and receives;
            an all-to-all reaches all.
        split: it was split from a communicator that exists (``ncclCommSplit``): ``split_group``, and ``new_group``
            where ``init_process_group`` was given a ``device_id``. It shares its parent's buffers only where
            NCCL_COMM_SPLIT_SHARE_RESOURCES asks for it: torch does not (a program that sets ``split_share`` is not
            followed).
    """

    layout: RankLayout
    collectives: frozenset[NcclCollective] = frozenset()
    calls: frozenset[tuple[NcclCollective, int]] = frozenset()
    send_peers: int = 0
    receive_peers: int = 0
    split: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedAlgorithms:
    """The algorithms that are connected: at least, most likely and at most."""

    low: frozenset[NcclAlgorithm]
    likely: frozenset[NcclAlgorithm]
    high: frozenset[NcclAlgorithm]


def connected_algorithms(use: CommunicatorUse, *, lazy: bool) -> ConnectedAlgorithms:
    """What is connected: everything where nothing is lazy, else what the collectives are done by.

    With known sizes that is what NCCL's model chooses for them. Without, the cheapest of what it chooses may do for
    all; the most that can be is every algorithm that does one of them.
    """
    layout = use.layout
    if not lazy:
        every = frozenset(NcclAlgorithm)
        return ConnectedAlgorithms(low=every, likely=every, high=every)
    wanted = use.collectives - EXCHANGES
    if layout.ranks == 1 or not wanted:
        return ConnectedAlgorithms(low=frozenset(), likely=frozenset(), high=frozenset())
    allowed = layout.settings.algorithms
    done = [
        wish for wish in wanted if any(one in allowed and does(one, wish, layout) for one in NcclAlgorithm)
    ]
    chosen = frozenset(
        nccl_choice(collective, size, layout).algorithm
        for collective in done  # of the others NCCL says that NCCL_ALGO leaves no way
        for size in _sizes(use, collective)
    )
    if wanted <= {kind for kind, _ in use.calls}:
        return ConnectedAlgorithms(low=chosen, likely=chosen, high=chosen)
    possible = frozenset(one for one in allowed if any(does(one, wish, layout) for wish in wanted))
    for_all = [one for one in chosen if all(does(one, wish, layout) for wish in done)]
    cheapest = min(for_all, key=lambda one: _cost(one, layout), default=None)
    return ConnectedAlgorithms(
        low=chosen if cheapest is None else frozenset({cheapest}), likely=chosen, high=possible | chosen
    )


def _sizes(use: CommunicatorUse, collective: NcclCollective) -> tuple[int, ...]:
    return tuple(nbytes for kind, nbytes in use.calls if kind is collective) or _SIZES


def _cost(algorithm: NcclAlgorithm, layout: RankLayout) -> tuple[int, str]:
    """What an algorithm alone takes in the least case, to find the cheapest; its name decides among equals."""
    channels = channels_for(layout)
    inside, between = connection_ends(layout)
    if algorithm in SHARP:
        chunked = layout.version >= (2, 21, 0)
        sharp = nvls_bytes(channels.nvls, min(32, layout.local), chunked=chunked, settings=layout.settings)
        trees = channels.nvls * between.both if algorithm is _NVLS_TREE else 0
        return sharp + trees, algorithm.value
    kind = tree_bytes if algorithm is _TREE else ring_bytes
    doublings = 2 * (layout.ranks - 1).bit_length() if algorithm is _PAT else 1
    taken = kind(inside, between, local=layout.local, nodes=layout.nodes).low
    return channels.low * taken * doublings, algorithm.value


def channels_for(layout: RankLayout) -> Channels:
    """The channels of a communicator."""
    return channels_of(
        layout.card,
        layout.node,
        ranks=layout.ranks,
        nodes=layout.nodes,
        settings=layout.settings,
        version=layout.version,
    )


def connection_ends(layout: RankLayout) -> tuple[ConnectionEnds, ConnectionEnds]:
    """What the ends of a connection take of a card: inside of a node, and between nodes."""
    inside = local_ends(layout.card, layout.node, layout.settings, local=layout.local)
    return inside, network_ends(layout.node, layout.settings)


def ring_tree_range(
    use: CommunicatorUse, inside: ConnectionEnds, between: ConnectionEnds, *, lazy: bool
) -> ByteRange:
    """What one rank holds for connections of rings and trees, by the ends of one connection.

    Args:
        lazy: only what is used is connected.
    """
    layout, channels = use.layout, channels_for(use.layout)
    local, nodes = layout.local, layout.nodes
    if layout.ranks == 1:
        return NOTHING
    kinds = {
        _RING: ring_bytes(inside, between, local=local, nodes=nodes),
        _TREE: tree_bytes(inside, between, local=local, nodes=nodes),
    }
    even = layout.node.card_link is CardLink.NVLINK and nodes == 1
    both = ring_and_tree_bytes(inside, between, local=local, nodes=nodes, even=even)

    def of(algorithms: Collection[NcclAlgorithm]) -> RankBytes:
        found = [kind for one, kind in kinds.items() if one in algorithms]
        return both if len(found) == 2 else found[0] if found else RankBytes(low=0, likely=0, high=0)

    connected = connected_algorithms(use, lazy=lazy)
    return ByteRange(
        low=channels.low * of(connected.low).low,
        likely=channels.likely * of(connected.likely).likely,
        high=channels.high * of(connected.high).high,
    )


def binomial_range(use: CommunicatorUse, between: ConnectionEnds, *, lazy: bool) -> ByteRange:
    """What one rank holds for binomial trees (PAT), where each node has one rank: neighbours at 1, 2, 4, ... ranks."""
    layout, channels = use.layout, channels_for(use.layout)
    if layout.local > 1 or layout.ranks == 1 or layout.version < (2, 23, 0):
        return NOTHING
    connected = connected_algorithms(use, lazy=lazy)
    whole = 2 * (layout.ranks - 1).bit_length() * between.both
    return ByteRange(
        low=channels.low * whole if _PAT in connected.low else 0,
        likely=channels.likely * whole if _PAT in connected.likely else 0,
        high=channels.high * whole if _PAT in connected.high else 0,
    )
