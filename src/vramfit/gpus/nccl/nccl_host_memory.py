"""NCCL's memory in the host: buffers that are not on a card, page-locked or in shared memory, of one rank.

Cards that cannot reach each other directly meet in host memory: the receiver's buffers lie there, in /dev/shm or in
memory of CUDA's own (src/transport/shm.cc). Connections to other nodes keep counters and, with GPUDirect RDMA, the
sender's LL buffer in the host; without it all buffers of both ends (src/transport/net.cc). torch's statistics of host
memory show none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vramfit.gpus.nccl.collective_times import EXCHANGES, NcclCollective, RankLayout
from vramfit.gpus.nccl.communicator_use import (
    NOTHING,
    ByteRange,
    CommunicatorUse,
    binomial_range,
    channels_for,
    ring_tree_range,
)
from vramfit.gpus.nccl.nccl_buffers import ConnectionEnds, cards_meet_directly, pool_bytes
from vramfit.units import MIB

_COUNTERS = 4096
"""src/include/comm.h: ncclSendMem and ncclRecvMem, each padded to MEM_ALIGN."""
_WORK_FIFO = 1 * MIB
"""src/include/comm.h: NCCL_WORK_FIFO_BYTES_DEFAULT, one a communicator, page-locked."""


def host_ends(layout: RankLayout) -> tuple[ConnectionEnds, ConnectionEnds]:
    """What the ends of a connection take of the host: inside of a node, and between nodes; bytes, not in blocks."""
    settings, node = layout.settings, layout.node
    every = settings.connection_buffers
    between = ConnectionEnds(
        send=2 * _COUNTERS + (settings.ll_buffer_size if node.gpu_direct else every),
        receive=2 * _COUNTERS + (0 if node.gpu_direct else every),
    )
    if cards_meet_directly(node, settings, local=layout.local):
        return ConnectionEnds(send=0, receive=0), between
    if not settings.shm:
        return between, between
    return ConnectionEnds(send=_COUNTERS, receive=_COUNTERS + every), between


def communicator_host_memory(use: CommunicatorUse) -> ByteRange:
    """Bytes of host memory of one communicator and rank; nothing before its first collective.

    Least is what a communicator takes that connects what it uses; the most is that of one that connects everything.
    """
    if not use.collectives:
        return NOTHING
    layout = use.layout
    inside, between = host_ends(layout)
    lazy = (
        layout.version >= (2, 22, 0)
        and layout.settings.runtime_connect
        and layout.settings.cumem is not False
    )
    low = ring_tree_range(use, inside, between, lazy=lazy) + binomial_range(use, between, lazy=lazy)
    high = ring_tree_range(use, inside, between, lazy=False) + binomial_range(use, between, lazy=False)
    if layout.settings.cumem:
        high = low
    rest = _WORK_FIFO + _peers(use, inside) + _pools(use)
    return ByteRange(low=low.low + rest, likely=low.likely + rest, high=max(low.high, high.high) + rest)


def process_host_memory(uses: Iterable[CommunicatorUse]) -> ByteRange:
    """Bytes of host memory of one process, for all of its communicators."""
    found = NOTHING
    for use in uses:
        found = found + communicator_host_memory(use)
    return found


def _peers(use: CommunicatorUse, inside: ConnectionEnds) -> int:
    senders, receivers = use.send_peers, use.receive_peers
    if NcclCollective.ALL_TO_ALL in use.collectives:
        senders = receivers = use.layout.local - 1
    elif NcclCollective.SEND_RECEIVE not in use.collectives:
        return 0
    each = channels_for(use.layout).p2p_per_peer
    return each * (senders * inside.send + receivers * inside.receive)


def _pools(use: CommunicatorUse) -> int:
    """Pools for send and receive to other nodes, where adapters do not read the card's memory."""
    layout = use.layout
    if layout.nodes == 1 or layout.node.gpu_direct or not use.collectives & EXCHANGES:
        return 0
    channels = channels_for(layout)
    return 2 * pool_bytes(channels.p2p, nodes=layout.nodes, nvlink=False, settings=layout.settings)
