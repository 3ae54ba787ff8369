"""How long a collective takes: NCCL's own model of its rings and trees, from the links of cards and adapters.

    seconds = latency + bytes / bandwidth

with latency and bandwidth as src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime, computes them in order to
choose an algorithm and a protocol. `bytes` is that of the whole: of the tensor for an all-reduce, a broadcast and a
reduction; of the gathered result for an all-gather, and of the whole input for a reduce-scatter. Left out: CollNet
(off unless asked for), registered buffers, other traffic on the links, and the latency that an adapter states itself.
NCCL has no model of send and receive; that of `exchange_seconds` is a simple one of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vramfit.gpus.nccl import nccl_tuning as tuning
from vramfit.gpus.nccl.nccl_channels import (
    RingGraph,
    channels_of,
    compute_number,
    link_gbs,
    ring_graph,
    search_speeds,
)
from vramfit.gpus.nccl.nccl_settings import (
    REFERENCE_NCCL,
    NcclAlgorithm,
    NcclProtocol,
    NcclSettings,
    NcclVersion,
)
from vramfit.gpus.nccl.nccl_tuning import LatencyPath
from vramfit.gpus.nccl.node_types import NodeType
from vramfit.gpus.spec import GpuSpec


class NcclCollective(Enum):
    """What NCCL is asked for; torch makes the others of these."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all-to-all"
    """Also gather and scatter: groups of sends and receives (ProcessGroupNCCL.cpp)."""
    SEND_RECEIVE = "send and receive"


_GATHERED = frozenset({NcclCollective.ALL_GATHER, NcclCollective.REDUCE_SCATTER})
_ROOTED = frozenset({NcclCollective.BROADCAST, NcclCollective.REDUCE})
EXCHANGES = frozenset({NcclCollective.ALL_TO_ALL, NcclCollective.SEND_RECEIVE})
"""What goes from one rank to another and not over rings or trees."""

_NETWORK_OVERHEAD = 1.0
"""Microseconds of posting to the network on hosts of Intel; of AMD it is 2 (getNetOverhead)."""
_MICRO = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Ranks on cards: what the model needs to know.

    Attributes:
        card, node: what each rank runs on.
        ranks: of the communicator.
        nodes: over which they are spread evenly.
        settings, version: of NCCL.
    """

    card: GpuSpec
    node: NodeType
    ranks: int
    nodes: int = 1
    settings: NcclSettings = field(default_factory=NcclSettings)
    version: NcclVersion = REFERENCE_NCCL

    @property
    def local(self) -> int:
        """Ranks in one node."""
        return self.ranks // self.nodes

    @property
    def graph(self) -> RingGraph:
        """Its rings."""
        return ring_graph(self.card, self.node, ranks=self.ranks, nodes=self.nodes, p2p=self.settings.p2p)

    @property
    def generation(self) -> int:
        """The row of NCCL's tables."""
        return tuning.generation_of(compute_number(self.card))


class CollectiveChoice(NamedTuple):
    """What NCCL would choose for a call, and how long it expects it to take."""

    algorithm: NcclAlgorithm
    protocol: NcclProtocol
    seconds: float


def collective_seconds(collective: NcclCollective, nbytes: int, layout: RankLayout) -> float:
    """Seconds that a collective takes, by the fastest of NCCL's algorithms; 0 for one rank.

    Args:
        nbytes: of the whole, as this module's docstring says. For an all-to-all and a send, what one rank sends.
    """
    if layout.ranks <= 1:
        return 0.0
    if collective in EXCHANGES:
        return exchange_seconds(collective, nbytes, layout)
    return nccl_choice(collective, nbytes, layout).seconds


def nccl_choice(collective: NcclCollective, nbytes: int, layout: RankLayout) -> CollectiveChoice:
    """The algorithm and protocol that NCCL's model favours for this size. Not for exchanges.

    Raises:
        ValueError: the settings leave no algorithm that does this.
    """
    found = [
        CollectiveChoice(algorithm, protocol, seconds)
        for algorithm, protocol in _allowed(collective, layout)
        if (seconds := algorithm_seconds(collective, nbytes, layout, algorithm, protocol)) is not None
    ]
    if not found:
        raise ValueError(f"NCCL_ALGO leaves no algorithm for {collective.value}")
    return min(found, key=lambda choice: choice.seconds)


def _allowed(collective: NcclCollective, layout: RankLayout) -> Iterator[tuple[NcclAlgorithm, NcclProtocol]]:
    for algorithm in NcclAlgorithm:
        if algorithm in layout.settings.algorithms and does(algorithm, collective, layout):
            for protocol in NcclProtocol:
                if _speaks(algorithm, protocol, layout):
                    yield algorithm, protocol


def does(algorithm: NcclAlgorithm, collective: NcclCollective, layout: RankLayout) -> bool:
    """Whether an algorithm does a collective on this layout (ncclTopoTuneModel's conditions)."""
    if algorithm is NcclAlgorithm.RING:
        return collective not in EXCHANGES
    if algorithm is NcclAlgorithm.TREE:
        return collective is NcclCollective.ALL_REDUCE
    if algorithm is NcclAlgorithm.PAT:
        return collective in _GATHERED and layout.ranks == layout.nodes
    nvls = _nvls_graph(layout) is not None
    if algorithm is NcclAlgorithm.NVLS:
        return (
            nvls
            and layout.nodes == 1
            and (collective is NcclCollective.ALL_REDUCE or collective in _GATHERED)
        )
    return nvls and layout.nodes > 1 and collective is NcclCollective.ALL_REDUCE


def _speaks(algorithm: NcclAlgorithm, protocol: NcclProtocol, layout: RankLayout) -> bool:
    if algorithm not in (NcclAlgorithm.RING, NcclAlgorithm.TREE):
        return protocol is NcclProtocol.SIMPLE
    if protocol is NcclProtocol.LL128:  # on by default over NVLink from Volta on
        return layout.graph.nvlink and compute_number(layout.card) >= 70
    return True


def _nvls_graph(layout: RankLayout) -> RingGraph | None:
    """Heads of NVLink SHARP and the speed of each: one head a card."""
    channels = channels_of(
        layout.card,
        layout.node,
        ranks=layout.ranks,
        nodes=layout.nodes,
        settings=layout.settings,
        version=layout.version,
    )
    nvlink = layout.card.nvlink
    if not channels.nvls or nvlink is None:
        return None
    heads = min(32, layout.local)  # NCCL_MAX_NVLS_ARITY
    share = nvlink.links * link_gbs(layout.card) / heads
    if layout.nodes > 1:
        share = min(share, layout.node.nic_bandwidth / 1e9 * layout.node.nics / layout.node.cards)
    speeds = tuple(
        speed for speed in search_speeds(compute_number(layout.card), layout.nodes) if speed <= share
    )
    return RingGraph(rings=heads, gbs=max(speeds, default=share), nvlink=True)


def algorithm_seconds(
    collective: NcclCollective,
    nbytes: int,
    layout: RankLayout,
    algorithm: NcclAlgorithm,
    protocol: NcclProtocol,
) -> float | None:
    """Seconds of one algorithm with one protocol; None where NCCL's tables rule it out."""
    gbs = _algorithm_gbs(collective, layout, algorithm, protocol)
    if gbs <= 0:
        return None
    latency = _latency(collective, layout, algorithm, protocol)
    size = (nbytes >> 6).bit_length() - 1  # log2i(nBytes >> 6)
    if algorithm is NcclAlgorithm.TREE and 0 <= size < len(tuning.TREE_CORRECTION[protocol]):
        gbs *= tuning.TREE_CORRECTION[protocol][size]
    if (
        algorithm is NcclAlgorithm.RING
        and protocol is NcclProtocol.SIMPLE
        and layout.nodes > 1
        and collective is NcclCollective.ALL_REDUCE
        and nbytes // (2 * layout.graph.rings * layout.ranks) >= 64
    ):
        latency *= 1.4 if compute_number(layout.card) >= 80 else 1.9  # "plateau effect of ring"
    return (latency + nbytes / (1000 * gbs)) * _MICRO


def _algorithm_gbs(
    collective: NcclCollective, layout: RankLayout, algorithm: NcclAlgorithm, protocol: NcclProtocol
) -> float:
    """Bytes of the whole per time, GB/s: what the bus carries, by how often each byte crosses it."""
    bus = _bus_gbs(collective, layout, algorithm, protocol)
    if algorithm is not NcclAlgorithm.RING and collective in _GATHERED:
        return bus
    if algorithm is NcclAlgorithm.TREE:
        return bus * 0.5
    return bus * layout.ranks / _steps(collective, layout.ranks)


def _steps(collective: NcclCollective, ranks: int) -> int:
    if collective is NcclCollective.ALL_REDUCE:
        return 2 * (ranks - 1)
    return ranks - 1 if collective in _GATHERED else ranks


def _bus_gbs(
    collective: NcclCollective, layout: RankLayout, algorithm: NcclAlgorithm, protocol: NcclProtocol
) -> float:
    row, column = layout.generation, tuning.scale_of(layout.nodes)
    if algorithm in (NcclAlgorithm.NVLS, NcclAlgorithm.NVLS_TREE):
        return _nvls_bus_gbs(collective, layout, algorithm)
    graph = layout.graph
    bus = graph.total_gbs
    if algorithm is NcclAlgorithm.PAT:
        return bus * 0.75
    ll_most = tuning.LL_MOST[row if layout.nodes == 1 else 0][column]
    if algorithm is NcclAlgorithm.RING:
        if protocol is NcclProtocol.LL:
            return min(ll_most, bus * 0.5)
        if protocol is NcclProtocol.LL128:
            return min(bus * 0.92, graph.rings * tuning.RING_LL128_MOST[row][column])
        return bus
    bus = min(bus * 0.92, graph.rings * tuning.TREE_MOST[row][column])
    if protocol is NcclProtocol.LL:
        return min(bus / 3.8, ll_most)
    if protocol is NcclProtocol.LL128:
        share = 7 / 9 if layout.nodes == 1 else 120 / 128
        return min(bus * share, graph.rings * tuning.TREE_LL128_MOST[row][column])
    return bus


def _nvls_bus_gbs(collective: NcclCollective, layout: RankLayout, algorithm: NcclAlgorithm) -> float:
    graph = _nvls_graph(layout)
    if graph is None or graph.rings < 2:
        return 0.0
    inside = graph.gbs * tuning.NVLS_EFFICIENCY[layout.generation] * (graph.rings - 1) / graph.rings
    inside *= 2.0 if collective is NcclCollective.ALL_REDUCE else (layout.local - 1) / layout.local
    if algorithm is NcclAlgorithm.NVLS:
        return graph.rings * min(inside, graph.gbs if layout.nodes > 1 else math.inf)
    between = graph.gbs * (2 if layout.nodes <= 2 else 1)
    most = tuning.NVLS_TREE_MOST[layout.generation][tuning.scale_of(layout.nodes)]
    return graph.rings * min(inside, between, most)


def _latency(
    collective: NcclCollective, layout: RankLayout, algorithm: NcclAlgorithm, protocol: NcclProtocol
) -> float:
    """Microseconds before the first byte of the result is there."""
    key = algorithm, protocol
    base = tuning.BASE_LATENCY[key]
    path = LatencyPath.NVLINK if layout.graph.nvlink else LatencyPath.PCIE
    inside = tuning.STEP_LATENCY[path][key]
    network = tuning.STEP_LATENCY[LatencyPath.NETWORK]
    between = network[(NcclAlgorithm.TREE, protocol) if layout.local == 1 else key]
    doublings = layout.nodes.bit_length() - 1
    if algorithm is NcclAlgorithm.RING:
        if collective in _ROOTED:
            return base + (inside if layout.nodes == 1 else network[key])
        crossings = 0
        if layout.nodes > 1:
            inside = max(inside, _NETWORK_OVERHEAD * (3 if protocol is NcclProtocol.SIMPLE else 1))
            crossings = _steps(collective, layout.nodes)
        return base + (_steps(collective, layout.ranks) - crossings) * inside + crossings * between
    if algorithm is NcclAlgorithm.TREE:
        return base + 2 * ((layout.local - 1) * inside + doublings * between)
    if algorithm is NcclAlgorithm.NVLS:
        return inside
    if algorithm is NcclAlgorithm.NVLS_TREE:
        return base + inside + 2 * doublings * between
    return base + doublings * between / 3.5 + layout.ranks * 2.8


def exchange_seconds(collective: NcclCollective, nbytes: int, layout: RankLayout) -> float:
    """Seconds of an all-to-all, or of a send to one peer: each rank's bytes over its own link or adapter.

    What stays in the node and what leaves it go at the same time. Latency is that of starting a ring with the Simple
    protocol and of one step.

    Args:
        nbytes: what one rank sends, in all.
    """
    key = NcclAlgorithm.RING, NcclProtocol.SIMPLE
    inside_gbs = layout.graph.total_gbs if layout.nodes == 1 else _inside_gbs(layout)
    outside_gbs = layout.node.nic_bandwidth / 1e9 * layout.node.nics / layout.node.cards
    if collective is NcclCollective.SEND_RECEIVE:
        far = float(nbytes) if layout.nodes > 1 else 0.0
        near = nbytes - far
    else:
        near = nbytes * (layout.local - 1) / layout.ranks
        far = nbytes * (layout.ranks - layout.local) / layout.ranks
    path = LatencyPath.NVLINK if layout.graph.nvlink else LatencyPath.PCIE
    step = tuning.STEP_LATENCY[LatencyPath.NETWORK if layout.nodes > 1 else path][key]
    slowest = max(near / (1000 * inside_gbs), far / (1000 * outside_gbs))
    return (tuning.BASE_LATENCY[key] + step + slowest) * _MICRO


def _inside_gbs(layout: RankLayout) -> float:
    graph = ring_graph(layout.card, layout.node, ranks=layout.local, nodes=1, p2p=layout.settings.p2p)
    return graph.total_gbs
