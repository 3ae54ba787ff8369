"""The machine that a card usually stands in."""

import pytest

from vramfit.gpus import GpuKind, catalogue, find_gpu
from vramfit.gpus.nccl.node_types import CardLink, usual_node


@pytest.mark.parametrize(
    ("card", "cards", "link", "nics", "gbit"),
    [
        ("V100 SXM2 32GB", 8, CardLink.NVLINK, 4, 100),
        ("A100 SXM 80GB", 8, CardLink.NVLINK, 8, 200),
        ("H100 SXM", 8, CardLink.NVLINK, 8, 400),
        ("H20", 8, CardLink.NVLINK, 8, 400),
        ("H200 SXM", 8, CardLink.NVLINK, 8, 400),
        ("B300", 8, CardLink.NVLINK, 8, 800),
        ("GB200", 4, CardLink.NVLINK, 4, 400),
        ("H100 NVL", 8, CardLink.BRIDGE, 2, 100),
        ("L40S", 8, CardLink.PCIE, 2, 100),
        ("RTX 3090", 4, CardLink.BRIDGE, 1, 10),
        ("RTX 4090", 4, CardLink.HOST, 1, 10),
    ],
)
def test_usual_nodes(card: str, cards: int, link: CardLink, nics: int, gbit: int) -> None:
    node = usual_node(find_gpu(card))
    assert (node.cards, node.card_link, node.nics) == (cards, link, nics)
    assert node.nic_bandwidth == gbit * 1e9 / 8


def test_every_card_stands_somewhere() -> None:
    for card in catalogue():
        node = usual_node(card)
        assert node.source
        assert node.gpu_direct == (card.kind is GpuKind.DATACENTER)
