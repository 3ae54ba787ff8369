"""Simulated seconds of a collective: rings and trees over the links of a node and the network between nodes.

The bytes that cross each link are those of NCCL's own model (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"): of S
bytes on n ranks an all-reduce moves 2 S (n-1)/n, an all-gather, a reduce-scatter and an all-to-all S (n-1)/n, where S
is the whole of what all ranks hold together, a broadcast and a reduction S. Latencies are those of its protocol Simple
(nccl, src/graph/tuning.cc, ``baseLat`` and ``hwLat``). A ring takes n-1 steps (2(n-1) for an all-reduce), a tree
2 log2(n); the quicker one is taken, as NCCL does.

Not modelled: NVLink SHARP, copies that share a link with others, slow nodes, topologies with fewer network cards than
GPUs. An all-to-all between nodes is taken to be limited by each rank's own network card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from vramfit.gpus import GpuSpec

# What NCCL reaches of a link's rate in large messages: nccl-tests shows about 370 of 450 GB/s on H100 with NVLink 4.
EFFICIENCY = 0.8
BASE_SECONDS = 8.4e-6  # nccl, src/graph/tuning.cc: baseLat, ring, Simple
_RING = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "network": 14.0e-6}  # tuning.cc: hwLat, ring, Simple
_TREE = {"NVLink": 4.0e-6, "PCIe": 4.0e-6, "network": 14.0e-6}  # tuning.cc: hwLat, tree, Simple
# Assumed where the catalogue has none: one 100 Gb/s port for each card, the least that is sold for clusters today.
DEFAULT_NIC = 12.5e9


class Pattern(Enum):
    """How the bytes of a collective travel."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SEND = "send"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """How the ranks of a group lie.

    Attributes:
        ranks: how many there are.
        nodes: on how many nodes.
    """

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on each node."""
        return max(1, self.ranks // self.nodes)


def collective_seconds(pattern: Pattern, nbytes: int, span: Span, spec: GpuSpec) -> float:
    """Estimated seconds of a collective of a group.

    Args:
        pattern: how its bytes travel.
        nbytes: what all ranks hold together at its end (all-gather), or at its start on one rank (the others).
        span: how the group lies.
        spec: the card of each rank.
    """
    if span.ranks == 1 or pattern is Pattern.NOTHING:
        return 0.0
    rate = EFFICIENCY * _rate(pattern, span, spec)
    share = (span.ranks - 1) / span.ranks
    if pattern is Pattern.ALL_REDUCE:
        ring = 2 * nbytes * share / rate + 2 * _ring_latency(span, spec)
        # A tree sends everything up and down once.
        tree = 2 * nbytes / rate + _tree_latency(span, spec)
        return BASE_SECONDS + min(ring, tree)
    if pattern in (Pattern.BROADCAST, Pattern.SEND):
        return BASE_SECONDS + nbytes / rate + _tree_latency(span, spec) / 2
    if pattern is Pattern.ALL_TO_ALL:
        return BASE_SECONDS + nbytes * share / rate + _hop(span, spec, _RING)
    return BASE_SECONDS + nbytes * share / rate + _ring_latency(span, spec)


def peer_rate(spec: GpuSpec) -> float:
    """Rate in B/s one way at which a card reaches the others of its node: NVLink's, or that of the link to the host."""
    return spec.peer_bandwidth or spec.host_link


def network_rate(spec: GpuSpec) -> float:
    """Rate in B/s one way of the network of one card."""
    return spec.network_bandwidth or DEFAULT_NIC


def _rate(pattern: Pattern, span: Span, spec: GpuSpec) -> float:
    """What one rank moves in a second."""
    inside = peer_rate(spec)
    if span.nodes == 1:
        return inside
    network = network_rate(spec)
    if pattern is Pattern.ALL_TO_ALL:
        outside = (span.ranks - span.per_node) / (span.ranks - 1)
        return min(inside, network / outside)
    # The rings of a node leave it through the network cards of all its ranks.
    return min(inside, network * span.per_node)


def _hop(span: Span, spec: GpuSpec, latencies: dict[str, float]) -> float:
    if span.nodes > 1:
        return latencies["network"]
    return latencies["NVLink" if spec.peer_bandwidth else "PCIe"]


def _ring_latency(span: Span, spec: GpuSpec) -> float:
    inside = latency_inside(spec)
    return (span.ranks - span.nodes) * inside + (span.nodes - 1) * _RING["network"]


def latency_inside(spec: GpuSpec) -> float:
    """Seconds of one step of a ring within a node."""
    return _RING["NVLink" if spec.peer_bandwidth else "PCIe"]


def _tree_latency(span: Span, spec: GpuSpec) -> float:
    inside = (span.per_node - 1) * _TREE["NVLink" if spec.peer_bandwidth else "PCIe"]
    return 2 * (inside + math.ceil(math.log2(span.nodes)) * _TREE["network"])
