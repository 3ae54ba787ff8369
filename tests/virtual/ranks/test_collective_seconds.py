"""Seconds of collectives: bytes over links as NCCL counts them, rings and trees, nodes and networks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vramfit.gpus import find_gpu
from vramfit.virtual.ranks import collective_seconds as costs
from vramfit.virtual.ranks.collective_seconds import Pattern, Span, collective_seconds

H100, A100, RTX = find_gpu("H100"), find_gpu("A100 SXM 80GB"), find_gpu("RTX 4090")
GIB = 1 << 30
NODE = Span(ranks=8, nodes=1)


def rate(pattern: Pattern, span: Span, nbytes: int = 1 << 40) -> float:
    """Bytes a second of something so large that latencies do not count."""
    return nbytes / collective_seconds(pattern, nbytes, span, H100)


def test_links_of_the_catalogue_are_half_of_what_is_advertised() -> None:
    # NVIDIA's data sheets: NVLink 900 GB/s on H100, 600 on A100, 1800 on B200, both directions together.
    assert (H100.peer_bandwidth, A100.peer_bandwidth) == (450e9, 300e9)
    assert find_gpu("B200").peer_bandwidth == 900e9
    assert (H100.network_bandwidth, A100.network_bandwidth) == (50e9, 25e9)  # 400 and 200 Gb/s a card
    assert RTX.peer_bandwidth is None and costs.peer_rate(RTX) == RTX.host_link


@pytest.mark.parametrize(
    ("pattern", "factor"),
    [
        (Pattern.ALL_REDUCE, 2 * 7 / 8),
        (Pattern.ALL_GATHER, 7 / 8),
        (Pattern.REDUCE_SCATTER, 7 / 8),
        (Pattern.ALL_TO_ALL, 7 / 8),
        (Pattern.BROADCAST, 1.0),
    ],
)
def test_large_messages_move_what_nccl_counts(pattern: Pattern, factor: float) -> None:
    # nccl-tests, doc/PERFORMANCE.md: the factor between algorithm and bus bandwidth.
    assert rate(pattern, NODE) == pytest.approx(costs.EFFICIENCY * 450e9 / factor, rel=1e-4)


def test_between_nodes_the_network_of_all_cards_of_a_node_is_shared() -> None:
    across = Span(ranks=64, nodes=8)
    assert rate(Pattern.ALL_GATHER, across) == pytest.approx(costs.EFFICIENCY * 400e9 * 64 / 63, rel=1e-3)
    # One rank of each node: its own network card.
    thin = Span(ranks=8, nodes=8)
    assert rate(Pattern.ALL_GATHER, thin) == pytest.approx(costs.EFFICIENCY * 50e9 * 8 / 7, rel=1e-3)
    # 56 of the 63 others are on other nodes.
    exchanged = rate(Pattern.ALL_TO_ALL, across)
    assert exchanged == pytest.approx(costs.EFFICIENCY * 50e9 * 63 / 56 * 64 / 63, rel=1e-3)


def test_small_messages_cost_latency_of_the_quicker_of_ring_and_tree() -> None:
    few, many = (
        collective_seconds(Pattern.ALL_REDUCE, 8, Span(ranks=8 * n, nodes=n), H100) for n in (2, 128)
    )
    ring_of_many = 2 * (127 * 14.0e-6 + 7 * 128 * 3.4e-6)
    tree_of_many = 2 * (7 * 4.0e-6 + 7 * 14.0e-6)
    assert few < many < ring_of_many
    assert many == pytest.approx(costs.BASE_SECONDS + tree_of_many, rel=1e-3)
    assert math.isclose(collective_seconds(Pattern.ALL_REDUCE, 8, Span(ranks=1, nodes=1), H100), 0.0)
    assert collective_seconds(Pattern.NOTHING, GIB, NODE, H100) == 0.0


def test_cards_without_nvlink_use_the_link_to_the_host() -> None:
    slow = collective_seconds(Pattern.ALL_GATHER, GIB, NODE, replace(H100, peer_bandwidth=None))
    fast = collective_seconds(Pattern.ALL_GATHER, GIB, NODE, H100)
    assert slow / fast == pytest.approx(450e9 / H100.host_link, rel=0.02)
