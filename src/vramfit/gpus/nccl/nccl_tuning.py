"""The constants of NCCL's model of time: latencies in microseconds and bandwidths in GB/s.

NCCL chooses an algorithm and a protocol for each call by this model. Tables: src/graph/tuning.cc of NCCL 2.28.9,
ncclTunerConstantsDefaults, nvlsEfficiency, treeCorrectionFactor.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from vramfit.gpus.nccl.nccl_settings import NcclAlgorithm, NcclProtocol


class LatencyPath(Enum):
    """What a step goes over; the slowest on the way decides."""

    NVLINK = "NVLink"
    PCIE = "PCI Express"
    NETWORK = "network"


_PROTOCOLS = (NcclProtocol.LL, NcclProtocol.LL128, NcclProtocol.SIMPLE)
_Row = tuple[float, float, float]


def _by_protocol(rows: Mapping[NcclAlgorithm, _Row]) -> Mapping[tuple[NcclAlgorithm, NcclProtocol], float]:
    """Give a figure of each algorithm and protocol; 0 stands for a protocol that the algorithm lacks."""
    return MappingProxyType(
        {
            (algorithm, protocol): figure
            for algorithm, row in rows.items()
            for protocol, figure in zip(_PROTOCOLS, row, strict=True)
        }
    )


BASE_LATENCY = _by_protocol(
    {
        NcclAlgorithm.TREE: (6.8, 14.0, 8.4),
        NcclAlgorithm.RING: (6.6, 14.0, 8.4),
        NcclAlgorithm.NVLS: (0.0, 0.0, 0.0),
        NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 0.0),
        NcclAlgorithm.PAT: (8.0, 8.0, 8.0),
    }
)
"""baseLatencies: of starting, for LL, LL128 and Simple."""

STEP_LATENCY = MappingProxyType(
    {
        LatencyPath.NVLINK: _by_protocol(
            {
                NcclAlgorithm.TREE: (0.6, 1.25, 4.0),
                NcclAlgorithm.RING: (0.6, 1.9, 3.4),
                NcclAlgorithm.NVLS: (0.0, 0.0, 25.0),
                NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 25.0),
                NcclAlgorithm.PAT: (0.0, 0.0, 4.0),
            }
        ),
        LatencyPath.PCIE: _by_protocol(
            {
                NcclAlgorithm.TREE: (1.0, 1.9, 4.0),
                NcclAlgorithm.RING: (1.0, 2.5, 5.7),
                NcclAlgorithm.NVLS: (0.0, 0.0, 0.0),
                NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 0.0),
                NcclAlgorithm.PAT: (0.0, 0.0, 4.0),
            }
        ),
        LatencyPath.NETWORK: _by_protocol(
            {
                NcclAlgorithm.TREE: (5.0, 8.5, 14.0),
                NcclAlgorithm.RING: (2.7, 4.0, 14.0),
                NcclAlgorithm.NVLS: (0.0, 0.0, 18.0),
                NcclAlgorithm.NVLS_TREE: (0.0, 0.0, 20.9),
                NcclAlgorithm.PAT: (0.0, 0.0, 14.0),
            }
        ),
    }
)
"""hwLatencies: of one step."""

_GENERATIONS = (100, 90, 80, 0)  # NCCL_BLACKWELL_COMPCAP_IDX to NCCL_VOLTA_COMPCAP_IDX


def generation_of(number: int) -> int:
    """The row of the tables for a compute capability of 86, 90, ...: 0 (up to Turing), 80, 90 or 100."""
    return next(start for start in _GENERATIONS if number >= start)


def scale_of(nodes: int) -> int:
    """The column of the tables: one node, two, or more."""
    return min(nodes, 3) - 1


LL_MOST = {
    0: (39.0, 39.0, 20.4),
    80: (87.7, 22.5, 19.0),
    90: (141.0, 45.0, 35.0),
    100: (282.0, 90.0, 70.0),
}
"""llMaxBws: what the LL protocol moves at most, by generation in one node. With several nodes NCCL takes the row by the
host's maker: the first for Intel, the second for AMD."""

RING_LL128_MOST = {
    0: (20.0, 20.0, 20.0),
    80: (20.0, 20.0, 20.0),
    90: (36.7, 36.7, 36.7),
    100: (73.4, 34.6, 73.4),
}
"""perChMaxRingLL128Bws: of one channel."""

TREE_LL128_MOST = {
    0: (20.0, 20.0, 20.0),
    80: (20.0, 20.0, 20.0),
    90: (36.7, 36.7, 29.0),
    100: (55.6, 31.67, 20.0),
}
"""perChMaxTreeLL128Bws: of one channel."""

TREE_MOST = {
    0: (26.5, 18.5, 10.0),
    80: (24.0, 23.6, 17.8),
    90: (38.7, 41.4, 36.0),
    100: (70.0, 42.8, 24.0),
}
"""perChMaxTreeBws: of one channel."""

NVLS_TREE_MOST = {
    0: (26.5, 18.5, 10.0),
    80: (24.0, 23.6, 17.8),
    90: (0.0, 57.7, 45.5),
    100: (0.0, 96.0, 43.8),
}
"""perChMaxNVLSTreeBws: of one channel."""

NVLS_EFFICIENCY = {0: 0.0, 80: 0.0, 90: 0.85, 100: 0.74}

TREE_CORRECTION = {
    NcclProtocol.LL: (
        *(1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    ),
    NcclProtocol.LL128: (
        *(1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    ),
    NcclProtocol.SIMPLE: (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
"""treeCorrectionFactor: trees fall short of the model at middle sizes; by powers of two from 64 bytes on."""
