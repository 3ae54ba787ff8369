"""NCCL's memory in the host."""

from tests.gpus.nccl.layouts import layout

from vramfit.gpus.nccl.collective_times import NcclCollective
from vramfit.gpus.nccl.communicator_use import NOTHING, CommunicatorUse
from vramfit.gpus.nccl.nccl_host_memory import communicator_host_memory, host_ends
from vramfit.units import MIB

REDUCED = frozenset({NcclCollective.ALL_REDUCE})
SHARDED = frozenset({NcclCollective.ALL_GATHER})
EVERY = 9_633_792
"""Buffers of all three protocols."""


def test_a_connection_over_tcp() -> None:
    # tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8: sendProxyConnect maps 9,641,984 bytes
    _, between = host_ends(layout("DGX Spark GB10", 4, 4))
    assert (between.send, between.receive) == (9_641_984, 9_641_984)


def test_adapters_that_read_the_card_leave_little_in_the_host() -> None:
    inside, between = host_ends(layout("H100", 16, 2))
    assert (inside.send, inside.receive) == (0, 0)
    assert (between.send, between.receive) == (8192 + 524_288, 8192)


def test_cards_without_direct_links_meet_in_the_host() -> None:
    # 4 channels of one ring; a work queue of 1 MiB
    found = communicator_host_memory(
        CommunicatorUse(layout=layout("RTX 4090", 4, cumem=True), collectives=SHARDED)
    )
    assert found.likely == 4 * (4096 + 4096 + EVERY) + MIB
    over_nvlink = communicator_host_memory(
        CommunicatorUse(layout=layout("A100", 8, cumem=True), collectives=REDUCED)
    )
    assert over_nvlink.likely == MIB
    by_hand = communicator_host_memory(
        CommunicatorUse(layout=layout("A100", 8, cumem=True, p2p=False), collectives=SHARDED)
    )
    assert by_hand.likely == 4 * (4096 + 4096 + EVERY) + MIB


def test_all_to_all_through_the_host() -> None:
    exchanged = frozenset({NcclCollective.ALL_TO_ALL})
    found = communicator_host_memory(
        CommunicatorUse(layout=layout("RTX 4090", 4, cumem=True), collectives=exchanged)
    )
    assert found.likely == 3 * 2 * (4096 + 4096 + EVERY) + MIB
    far = communicator_host_memory(
        CommunicatorUse(layout=layout("RTX 4090", 8, 2, cumem=True), collectives=exchanged)
    )
    # one channel for each of three peers, and two pools: 2 channels, 16 slots, 128 KiB
    assert far.likely == 3 * (4096 + 4096 + EVERY) + 2 * 4 * MIB + MIB


def test_nothing_before_the_first_collective() -> None:
    assert communicator_host_memory(CommunicatorUse(layout=layout("RTX 4090", 4))) == NOTHING


def test_where_cumem_is_not_set_the_most_is_everything() -> None:
    use = CommunicatorUse(layout=layout("RTX 4090", 4), collectives=SHARDED)
    lazy = CommunicatorUse(layout=layout("RTX 4090", 4, cumem=True), collectives=SHARDED)
    eager = CommunicatorUse(layout=layout("RTX 4090", 4, cumem=False), collectives=SHARDED)
    found = communicator_host_memory(use)
    assert found.low == communicator_host_memory(lazy).low
    assert found.high == communicator_host_memory(eager).high
    assert found.high > communicator_host_memory(lazy).high
