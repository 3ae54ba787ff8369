"""What stands around a card in a node: how many cards, what joins them, and the network adapters.

A node type is an assumption: a card does not say which machine it is in. `usual_node` gives the machine that its maker
sells it in, and every figure can be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vramfit.gpus.spec import GpuKind, GpuSpec


class CardLink(Enum):
    """How the cards of a node reach each other."""

    NVLINK = "NVLink"
    """All of them, by NVSwitch or by links to each: each card has its whole NVLink for any pattern."""
    BRIDGE = "NVLink bridge"
    """By pairs; further cards over PCI Express."""
    PCIE = "PCI Express"
    """Directly, below one switch: data centre cards and, on AMD hosts, pairs of cards."""
    HOST = "host memory"
    """Through host memory: GeForce cards without a bridge, and cards below different host bridges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """A machine with cards.

    Attributes:
        name: what it is called.
        cards: cards of one node.
        card_link: how they reach each other.
        nics: network adapters that carry collectives.
        nic_bandwidth: of one adapter, B/s one way.
        gpu_direct: adapters read the cards' memory themselves (GPUDirect RDMA), so that buffers lie on the card.
        source: where the figures were read.
    """

    name: str
    cards: int
    card_link: CardLink
    nics: int
    nic_bandwidth: float
    gpu_direct: bool
    source: str


_ASSUMED = {
    "H20": "assumed: the board and the adapters of the DGX H100",
    "GH200": "assumed: one card and one adapter of 400 Gbit/s a server",
}
_GBIT = 1e9 / 8

_SERVERS = (
    ("V100", "DGX-1 (V100)", 8, 4, 100),
    ("A100 SXM", "DGX A100", 8, 8, 200),
    ("H100 SXM", "DGX H100", 8, 8, 400),
    ("H200 SXM", "DGX H200", 8, 8, 400),
    ("H20", "HGX H20", 8, 8, 400),
    ("B200", "DGX B200", 8, 8, 400),
    ("B300", "DGX B300", 8, 8, 800),
    ("GB200", "GB200 NVL72 compute tray", 4, 4, 400),
    ("GB300", "GB300 NVL72 compute tray", 4, 4, 800),
    ("GH200", "GH200 server", 1, 1, 400),
)
"""By the start of a card's name: machine, cards, adapters for collectives and Gbit/s of each, from the data sheets.

An NVL72 rack joins its trays by NVLink, which is not modelled:
ranks of other trays count as reached by network.
"""


def usual_node(card: GpuSpec) -> NodeType:
    """The machine that a card usually stands in: its maker's server, else eight cards in PCI Express slots."""
    for start, name, cards, nics, gbit in _SERVERS:
        if card.name.startswith(start) and card.nvlink is not None and not card.nvlink.bridged:
            return NodeType(
                name=name,
                cards=cards,
                card_link=CardLink.NVLINK,
                nics=nics,
                nic_bandwidth=gbit * _GBIT,
                gpu_direct=True,
                source=_ASSUMED.get(start, f"NVIDIA {name} data sheet"),
            )
    return _slots(card)


def _slots(card: GpuSpec) -> NodeType:
    """Cards in slots. GeForce cards without a bridge may not read each other: the driver does not let them."""
    server = card.kind is GpuKind.DATACENTER
    link = CardLink.PCIE if server else CardLink.HOST
    if card.nvlink is not None and card.nvlink.bridged:
        link = CardLink.BRIDGE
    return NodeType(
        name="PCI Express server" if server else "workstation",
        cards=8 if server else 4,
        card_link=link,
        nics=2 if server else 1,
        nic_bandwidth=(100 if server else 10) * _GBIT,
        gpu_direct=server,
        source="assumed: two adapters of 100 Gbit/s in a server, one of 10 Gbit/s in a workstation",
    )
