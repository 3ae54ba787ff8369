"""Channels, against what NCCL wrote into the logs of other people's machines."""

from typing import Any

import pytest
from tests.gpus.nccl.layouts import layout

from vramfit.gpus.nccl.nccl_channels import Channels, channels_of
from vramfit.gpus.nccl.nccl_settings import NcclVersion


def channels(
    card: str, ranks: int, nodes: int = 1, version: NcclVersion = (2, 28, 9), **settings: Any
) -> Channels:
    of = layout(card, ranks, nodes, version, **settings)
    return channels_of(of.card, of.node, ranks=ranks, nodes=nodes, settings=of.settings, version=of.version)


def test_four_a100_on_nvlink_have_24() -> None:
    # github.com/NVIDIA/nccl/issues/1785: "24 NCCL channels ... on a 4xA100 system connected via NVLink"
    found = channels("A100", 4)
    assert (found.low, found.likely, found.high) == (24, 24, 24)


@pytest.mark.parametrize(("card", "ranks", "nodes"), [("H100", 24, 3), ("A100", 64, 8)])
def test_nodes_of_eight_cards_with_an_adapter_each_have_16(card: str, ranks: int, nodes: int) -> None:
    # nccl#1453 (3 x 8 H100) and nccl#820 (nodes of 8 A100): "Channel 00/16 : 0 7 6 5 ..."
    found = channels(card, ranks, nodes)
    assert (found.low, found.likely, found.high) == (16, 16, 16)


def test_rings_of_four_v100_with_six_links() -> None:
    # nccl#713, the dumped graph of server A: nchannels="6"; NCCL opens two channels for each
    assert layout("V100 SXM2", 4).graph.rings == 6
    assert channels("V100 SXM2", 4).likely == 12


def test_every_pair_of_eight_h100_gets_32_for_send_and_receive() -> None:
    # nccl#1685: "Channel 00/1 : 0[0] -> 2[2] via P2P/CUMEM" to "Channel 31/1"
    found = channels("H100", 8)
    assert (found.likely, found.p2p, found.p2p_per_peer) == (24, 32, 32)


def test_two_cards_in_slots_have_4_and_2_a_peer() -> None:
    # nccl#1706: "4 coll channels, 4 collnet channels, 0 nvls channels, 4 p2p channels, 2 p2p channels per peer"
    found = channels("RTX 4090", 2)
    assert (found.likely, found.p2p, found.p2p_per_peer, found.nvls) == (4, 4, 2, 0)
    assert (found.low, found.high) == (2, 8)


def test_peers_in_other_nodes_get_two_channels() -> None:
    # nccl#1189 (2 x 2 H20): "8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per
    # peer"; which adapters it had is not said, so the collective channels are a range
    found = channels("H20", 4, 2, (2, 19, 3), nvls=False)
    assert found.low <= 8 <= found.high
    assert (found.p2p_per_peer, found.nvls) == (2, 0)


def test_one_rank_has_as_many_as_there_are() -> None:
    # nccl#2363: its pool has room for 64 channels
    assert channels("B300", 1).p2p == 64
    assert channels("A100", 1, version=(2, 18, 3)).p2p == 32


def test_a_bound_that_is_no_power_of_two_leaves_more_for_send_and_receive() -> None:
    # nccl#1598: NCCL_MAX_NCHANNELS=10, and 16 blocks of the grid for an all-to-all
    found = channels("A100", 8, max_channels=10)
    assert (found.likely, found.p2p) == (10, 16)


@pytest.mark.parametrize(
    ("settings", "likely", "p2p"),
    [
        ({"max_channels": 2}, 2, 2),
        ({"max_ctas": 8}, 8, 8),
        ({"min_channels": 40}, 40, 64),
        ({"max_channels": 4, "min_channels": 6}, 6, 8),
        ({"min_ctas": 100}, 64, 64),
        ({"max_p2p_channels": 4}, 24, 4),
        ({"min_p2p_channels": 64}, 24, 64),
    ],
    ids=str,
)
def test_settings_bound_channels(settings: dict[str, int], likely: int, p2p: int) -> None:
    # src/graph/connect.cc: upper bounds first, then lower ones; src/graph/paths.cc: a power of two
    found = channels("A100", 8, **settings)
    assert (found.likely, found.p2p) == (likely, p2p)


def test_older_versions_stop_at_32() -> None:
    assert channels("A100", 8, version=(2, 24, 3), min_channels=64).likely == 32
    assert channels("A100", 8, version=(2, 25, 1), min_channels=64).likely == 64


@pytest.mark.parametrize(
    ("card", "nodes", "version", "nvls"),
    [
        ("A100", 1, (2, 28, 9), 0),
        ("H100", 1, (2, 28, 9), 16),
        ("H100", 1, (2, 16, 5), 0),
        ("B200", 1, (2, 28, 9), 24),
        ("B200", 1, (2, 26, 2), 32),
        ("B200", 2, (2, 28, 9), 32),
        ("H100 NVL", 1, (2, 28, 9), 0),
    ],
)
def test_channels_of_nvlink_sharp(card: str, nodes: int, version: NcclVersion, nvls: int) -> None:
    # src/transport/nvls.cc: NVLS_NCHANNELS_SM90, _SM100 and _SM100_NVL
    assert channels(card, 8 * nodes, nodes, version).nvls == nvls


def test_many_ranks_get_one_channel_a_peer() -> None:
    # src/graph/paths.cc: halved while two channels of all ranks are more than four times the channels
    assert channels("H100", 32, 4).p2p_per_peer == 2
    assert channels("H100", 40, 5).p2p_per_peer == 1
    assert channels("H100", 40, 5, channels_per_net_peer=4).p2p_per_peer == 4
