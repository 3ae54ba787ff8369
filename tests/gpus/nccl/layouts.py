"""Layouts of ranks that several tests ask about."""

from typing import Any

from vramfit.gpus import find_gpu
from vramfit.gpus.nccl.collective_times import RankLayout
from vramfit.gpus.nccl.nccl_settings import REFERENCE_NCCL, NcclSettings, NcclVersion
from vramfit.gpus.nccl.node_types import usual_node


def layout(
    card: str, ranks: int, nodes: int = 1, version: NcclVersion = REFERENCE_NCCL, **settings: Any
) -> RankLayout:
    """Ranks on cards in the machines that they usually stand in."""
    spec = find_gpu(card)
    return RankLayout(
        card=spec,
        node=usual_node(spec),
        ranks=ranks,
        nodes=nodes,
        version=version,
        settings=NcclSettings(**settings),
    )
