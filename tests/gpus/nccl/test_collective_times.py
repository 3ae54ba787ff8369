"""Times of collectives, against values worked out by hand from the tables of NCCL's tuning.cc."""

import pytest
from tests.gpus.nccl.layouts import layout

from vramfit.gpus.nccl.collective_times import (
    NcclCollective,
    RankLayout,
    algorithm_seconds,
    collective_seconds,
    exchange_seconds,
    nccl_choice,
)
from vramfit.gpus.nccl.nccl_settings import NcclAlgorithm, NcclProtocol
from vramfit.units import GIB, KIB, MIB

ALL_REDUCE, ALL_GATHER = NcclCollective.ALL_REDUCE, NcclCollective.ALL_GATHER
RING, TREE, NVLS = NcclAlgorithm.RING, NcclAlgorithm.TREE, NcclAlgorithm.NVLS
NVLS_TREE, PAT = NcclAlgorithm.NVLS_TREE, NcclAlgorithm.PAT
LL, LL128, SIMPLE = NcclProtocol.LL, NcclProtocol.LL128, NcclProtocol.SIMPLE


@pytest.mark.parametrize(
    ("of", "collective", "nbytes", "algorithm", "protocol", "microseconds"),
    [
        # 12 rings of 30 GB/s, 14 steps: 8.4 + 14 x 3.4, and 360 x 8/14 GB/s
        (layout("H100", 8), ALL_REDUCE, GIB, RING, SIMPLE, 56.0 + GIB / 205_714.2857142857),
        # 12 rings of 20 GB/s, 7 steps: 8.4 + 7 x 3.4, and 240 x 8/7
        (layout("A100", 8), ALL_GATHER, 64 * MIB, RING, SIMPLE, 32.2 + 64 * MIB / 274_285.7142857143),
        # at most 87.7 GB/s by LL: 6.6 + 14 x 0.6, and 87.7 x 8/14
        (layout("A100", 8), ALL_REDUCE, 4 * KIB, RING, LL, 15.0 + 4096 / 50_114.28571428571),
        # LL128 carries 120 of 128 bytes, 0.92 of 360, 8/14 of it: 14 + 14 x 1.9
        (layout("H100", 8), ALL_REDUCE, MIB, RING, LL128, 40.6 + MIB / 189_257.142857142857),
        # 8 heads of 40 GB/s, 0.85 of it, 7/8, both ways at once: 476 x 8/14
        (layout("H100", 8), ALL_REDUCE, GIB, NVLS, SIMPLE, 25.0 + GIB / 272_000),
        # per channel 36 GB/s over four nodes or more, LL128 29; half of it; 0.6 at 1 MiB: 14 + 2 (7 x 1.25 + 3 x 8.5)
        (layout("H100", 64, 8), ALL_REDUCE, MIB, TREE, LL128, 82.5 + MIB / 69_600),
        # 8 rings of 48 GB/s; 126 steps, of which 14 between nodes: (8.4 + 112 x 3.4 + 14 x 14) x 1.4
        (layout("H100", 64, 8), ALL_REDUCE, GIB, RING, SIMPLE, 819.28 + GIB / 195_047.61904761905),
        # two rings of 24 GB/s, 0.75 of it: 8 + 2 x 14 / 3.5 + 4 x 2.8
        (layout("GH200", 4, 4), ALL_GATHER, MIB, PAT, SIMPLE, 27.2 + MIB / 36_000),
        # PCI Express 4.0: two rings of 12 GB/s, 6 steps of 5.7
        (layout("RTX 4090", 4), ALL_REDUCE, GIB, RING, SIMPLE, 42.6 + GIB / 16_000),
        # a chain of 8: 6.8 + 2 x 7 x 0.6, 0.92 x 240 / 3.8 / 2, and 0.9 at 1 KiB
        (layout("A100", 8), ALL_REDUCE, KIB, TREE, LL, 15.2 + 1024 / (29_052.631578947 * 0.9)),
        # broadcast: one step and the bandwidth of the rings
        (layout("A100", 8), NcclCollective.BROADCAST, GIB, RING, SIMPLE, 11.8 + GIB / 240_000),
        # 8 heads, 45 GB/s and more leave a node for two: min(66.9, 90, 57.7) x 8 x 16/30; 25 + 2 x 20.9
        (layout("H100", 16, 2), ALL_REDUCE, GIB, NVLS_TREE, SIMPLE, 66.8 + GIB / 246_186.666666667),
    ],
    ids=lambda value: value.value if isinstance(value, NcclAlgorithm | NcclProtocol) else "",
)  # fmt: skip
def test_by_hand(
    of: RankLayout,
    collective: NcclCollective,
    nbytes: int,
    algorithm: NcclAlgorithm,
    protocol: NcclProtocol,
    microseconds: float,
) -> None:
    found = algorithm_seconds(collective, nbytes, of, algorithm, protocol)
    assert found == pytest.approx(microseconds * 1e-6, rel=1e-9)


def test_the_fastest_is_chosen() -> None:
    for nbytes in (KIB, 64 * KIB, MIB, 64 * MIB, GIB):
        for of in (layout("H100", 8), layout("A100", 64, 8), layout("RTX 3090", 2)):
            choice = nccl_choice(ALL_REDUCE, nbytes, of)
            every = [
                found
                for algorithm in NcclAlgorithm
                for protocol in NcclProtocol
                if (found := algorithm_seconds(ALL_REDUCE, nbytes, of, algorithm, protocol)) is not None
                and algorithm in (RING, TREE)
            ]
            assert choice.seconds <= min(every)
            assert collective_seconds(ALL_REDUCE, nbytes, of) == choice.seconds


def test_large_reductions_of_hopper_go_through_the_switch() -> None:
    assert nccl_choice(ALL_REDUCE, GIB, layout("H100", 8))[:2] == (NVLS, SIMPLE)
    assert nccl_choice(ALL_REDUCE, GIB, layout("H100", 8, nvls=False))[:2] == (RING, SIMPLE)
    assert nccl_choice(ALL_GATHER, GIB, layout("H100", 8))[:2] == (RING, SIMPLE)
    assert nccl_choice(ALL_REDUCE, 4 * KIB, layout("H100", 64, 8))[:2] == (TREE, LL)


def test_protocols_that_a_link_does_not_carry_are_not_chosen() -> None:
    over_pcie = {nccl_choice(ALL_REDUCE, 1 << size, layout("RTX 4090", 4)).protocol for size in range(8, 31)}
    assert over_pcie == {LL, SIMPLE}


def test_the_settings_choose() -> None:
    tree = layout("A100", 8, algorithms=frozenset({TREE}))
    assert nccl_choice(ALL_REDUCE, GIB, tree).algorithm is TREE
    with pytest.raises(ValueError, match="NCCL_ALGO leaves no algorithm for all-gather"):
        nccl_choice(ALL_GATHER, GIB, tree)


@pytest.mark.parametrize("collective", NcclCollective)
def test_one_rank_takes_no_time_and_more_bytes_more(collective: NcclCollective) -> None:
    assert collective_seconds(collective, GIB, layout("H100", 1)) == 0
    times = [collective_seconds(collective, 1 << size, layout("H100", 64, 8)) for size in range(12, 33)]
    assert times == sorted(times)
    assert times[0] > 0


def test_exchanges() -> None:
    inside = layout("H100", 8)
    # 7/8 of what a rank sends leaves it, at 12 x 30 GB/s
    expected = 8.4 + 3.4 + GIB * 7 / 8 / 360_000
    found = exchange_seconds(NcclCollective.ALL_TO_ALL, GIB, inside)
    assert found == pytest.approx(expected * 1e-6, rel=1e-9)
    # over 8 nodes 56/64 leave the node by an adapter of 50 GB/s
    far = exchange_seconds(NcclCollective.ALL_TO_ALL, GIB, layout("H100", 64, 8))
    assert far == pytest.approx((8.4 + 14 + GIB * 56 / 64 / 50_000) * 1e-6, rel=1e-9)
    near = exchange_seconds(NcclCollective.SEND_RECEIVE, MIB, inside)
    assert near == pytest.approx((8.4 + 3.4 + MIB / 360_000) * 1e-6, rel=1e-9)
    next_node = exchange_seconds(NcclCollective.SEND_RECEIVE, MIB, layout("H100", 2, 2))
    assert next_node == pytest.approx((8.4 + 14 + MIB / 50_000) * 1e-6, rel=1e-9)
