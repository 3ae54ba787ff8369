"""How many channels NCCL opens, and how fast each is: its search for rings, replayed for even machines.

NCCL looks for as many rings through the cards of a node as the links carry, at the highest speed of a table that gives
the most together (src/graph/search.cc, ncclTopoCompute), and then opens two channels for each ring
(src/graph/connect.cc, ncclTopoPostset). Where each card has the same links to a switch, or the network is what limits,
the search comes down to dividing bandwidth, which is done here. Uneven machines (links of some pairs only, adapters of
some cards) may get fewer or more channels: `Channels` says so as a range.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.gpus.nccl.nccl_settings import NcclSettings, NcclVersion
from vramfit.gpus.nccl.node_types import CardLink, NodeType
from vramfit.gpus.spec import GpuSpec

# src/graph/search.cc: speedArrayIntra, sm90SpeedArrayIntra, sm100SpeedArrayIntra, and ...Inter; GB/s
_INSIDE = {
    0: (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    90: (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    100: (90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
_BETWEEN = {
    0: (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    90: (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    100: (
        *(96.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0),
        *(17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    ),
}  # fmt: skip
# src/graph/topo.h: SM60_NVLINK_BW to SM100_NVLINK_BW, what NCCL counts on of one link, GB/s one way
_LINK_GBS = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
# src/graph/topo.cc, ncclTopoAddPci: 16 lanes of 60, 120 or 240 (a hundredth of Gbit/s after encoding) over 80
_PCIE_GBS = {"PCIe 3.0": 12.0, "PCIe 4.0": 24.0, "PCIe 5.0": 48.0, "PCIe 6.0": 96.0}
_OTHER_LINK_GBS = 48.0  # cards joined to their host by NVLink-C2C have adapters behind PCI Express 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingGraph:
    """What the search finds: rings and the speed of each.

    Attributes:
        rings: how many; NCCL opens two channels for each.
        gbs: of each ring, GB/s one way.
        nvlink: they go over NVLink inside of a node.
    """

    rings: int
    gbs: float
    nvlink: bool

    @property
    def total_gbs(self) -> float:
        """Of all rings together, GB/s."""
        return self.rings * self.gbs


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """Channels of one communicator.

    Attributes:
        low, likely, high: of collectives.
        p2p: of send and receive, a power of two.
        p2p_per_peer: of these, how many one peer gets.
        nvls: of NVLink SHARP; 0 without it.
    """

    low: int
    likely: int
    high: int
    p2p: int
    p2p_per_peer: int
    nvls: int


def compute_number(card: GpuSpec) -> int:
    """NCCL's number for a compute capability: 8.6 is 86."""
    major, minor = card.compute_capability
    return major * 10 + minor


def most_channels(version: NcclVersion) -> int:
    """MAXCHANNELS of src/include/device.h: 32, and 64 from 2.25 on."""
    return 64 if version >= (2, 25, 0) else 32


def link_gbs(card: GpuSpec) -> float:
    """What NCCL counts on of one NVLink link, GB/s one way."""
    number = compute_number(card)
    # src/graph/topo.h, ncclTopoNVLinkBw: 8.6 is told apart, 8.7 and 8.9 count as 8.0
    return next((gbs for start, gbs in _LINK_GBS if number >= start), 20.0)


def pcie_gbs(card: GpuSpec) -> float:
    """What NCCL counts on of a card's PCI Express, GB/s one way."""
    return _PCIE_GBS.get(card.link.split(" x")[0], _OTHER_LINK_GBS)


def ring_graph(card: GpuSpec, node: NodeType, *, ranks: int, nodes: int, p2p: bool = True) -> RingGraph:
    """The rings of a communicator.

    Args:
        ranks: of the communicator, over all nodes.
        nodes: over which its ranks are spread evenly.
        p2p: cards may reach each other directly.
    """
    number, local = compute_number(card), max(1, ranks // nodes)
    nvlink = p2p and card.nvlink is not None and _all_nvlink(node, local)
    inside = card.nvlink.links * link_gbs(card) if nvlink and card.nvlink is not None else pcie_gbs(card)
    if nodes == 1:
        rings, gbs = _most(search_speeds(number, nodes), inside, 1, number)
        return RingGraph(rings=rings, gbs=gbs, nvlink=nvlink)
    nics = max(1, min(node.nics, local))
    each = min(node.nic_bandwidth / 1e9, pcie_gbs(card), inside)
    rings, gbs = _most(search_speeds(number, nodes), each, nics, number)
    return RingGraph(rings=rings, gbs=gbs, nvlink=nvlink)


def _all_nvlink(node: NodeType, local: int) -> bool:
    return node.card_link is CardLink.NVLINK or (node.card_link is CardLink.BRIDGE and local <= 2)


def search_speeds(number: int, nodes: int) -> tuple[float, ...]:
    """The speeds that the search tries, GB/s, for a compute number of 80, 90, ... and for one node or several."""
    tables = _INSIDE if nodes == 1 else _BETWEEN
    return tables[100 if number >= 100 else 90 if number >= 90 else 0]


def _most(speeds: tuple[float, ...], gbs: float, links: int, number: int) -> tuple[int, float]:
    """Rings and their speed that use ``links`` links of ``gbs`` best; fast ones are doubled at half the speed."""
    best = (0, 0.0)
    for speed in (speed for speed in speeds if speed <= gbs):
        if (
            best[0] and speed / best[1] <= 0.49
        ):  # src/graph/search.cc, ncclTopoCompute: slower ones are not tried
            break
        rings = int(gbs / speed + 1e-6) * links
        if rings * speed > best[0] * best[1]:
            best = rings, speed
    rings, speed = best if best[0] else (links, gbs)
    # src/graph/search.cc, ncclTopoDupChannels
    if speed >= 25.0 and not (number > 80 and speed < 50.0 and rings > 4):
        rings, speed = rings * 2, speed / 2
    return rings, speed


def channels_of(
    card: GpuSpec, node: NodeType, *, ranks: int, nodes: int, settings: NcclSettings, version: NcclVersion
) -> Channels:
    """The channels of a communicator, bounded by the settings."""
    top = most_channels(version)
    if (
        ranks == 1
    ):  # src/graph/search.cc: one card has the bandwidth of its own memory, so the search ends at the bound
        likely = low = high = top
    else:
        graph = ring_graph(card, node, ranks=ranks, nodes=nodes, p2p=settings.p2p)
        likely = min(top, 2 * graph.rings)
        if compute_number(card) >= 90 and nodes > 1 and graph.gbs > 45.0 and likely < 16:
            likely *= 2  # src/graph/connect.cc: more channels to reach the peak where few adapters are used
        # each card has an adapter of its own, and all of a node's cards take part
        rails = node.nics >= node.cards and ranks // nodes == node.cards
        even = graph.nvlink and (nodes == 1 or rails)
        low, high = (likely, likely) if even else (max(1, likely // 2), min(top, likely * 2))
    low, likely, high = (_bounded(count, settings, top) for count in (low, likely, high))
    p2p, per_peer = _p2p_channels(card, node, likely, ranks, nodes, settings=settings, top=top)
    return Channels(
        low=low,
        likely=likely,
        high=high,
        p2p=p2p,
        p2p_per_peer=per_peer,
        nvls=_nvls_channels(card, node, ranks=ranks, nodes=nodes, settings=settings, version=version),
    )


def _bounded(count: int, settings: NcclSettings, top: int) -> int:
    """What the settings leave: first the upper bounds, then the lower ones (src/graph/connect.cc, ncclTopoPostset)."""
    upper = min(settings.max_channels or top, settings.max_ctas or top, top)
    lower = min(max(settings.min_channels or 0, settings.min_ctas or 0), top)
    return max(min(count, upper), lower)


def _p2p_channels(
    card: GpuSpec, node: NodeType, count: int, ranks: int, nodes: int, *, settings: NcclSettings, top: int
) -> tuple[int, int]:
    """Channels of send and receive, in all and for a peer (src/graph/paths.cc, ncclTopoComputeP2pChannels)."""
    total = max(min(count, settings.max_p2p_channels or top), settings.min_p2p_channels)
    least = total
    local = ranks // nodes
    if local > 1:
        nvlink = settings.p2p and card.nvlink is not None and _all_nvlink(node, local)
        least = min(least, 2 * card.nvlink.links if nvlink and card.nvlink is not None else 2)
    if nodes > 1:
        by_scale = 1 if 2 * ranks > total * 4 else 2
        least = min(least, settings.channels_per_net_peer or by_scale)
    total = min(_power_of_two(total), top)
    return total, min(_power_of_two(least), total)


def _nvls_channels(
    card: GpuSpec, node: NodeType, *, ranks: int, nodes: int, settings: NcclSettings, version: NcclVersion
) -> int:
    """Channels of NVLink SHARP, which needs Hopper or later, an NVSwitch and two cards (src/transport/nvls.cc)."""
    number, local = compute_number(card), ranks // nodes
    switch = node.card_link is CardLink.NVLINK and number >= 90
    if not (switch and settings.nvls and local > 1 and version >= (2, 17, 0)):
        return 0
    count = 16  # NVLS_NCHANNELS_SM90
    if number >= 100 and version >= (2, 25, 0):
        count = (
            24 if nodes == 1 and version >= (2, 27, 0) else 32
        )  # NVLS_NCHANNELS_SM100_NVL, NVLS_NCHANNELS_SM100
    count = settings.nvls_channels or count
    return max(settings.min_ctas or 1, min(count, settings.max_ctas or count))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
