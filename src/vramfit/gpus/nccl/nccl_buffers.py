"""The buffers of NCCL's connections, and how many of them a rank holds for rings, trees and peers.

NOTE [A connection]
A channel goes from a rank to a neighbour over two ends: the sender's and the receiver's. Each end is a block of its own
on the rank's own card, in whole blocks of 2 MiB.
  Inside of a node, directly: the receiver holds the buffers of all three protocols (9.19 MiB: 10 MiB), the sender a
  block of counters (2 MiB). Between A100s with NVLink, where the receiver reads what the sender holds, the Simple
  buffer lies with the sender: 6 MiB and 6 MiB (src/transport/p2p.cc, p2pSendSetup and p2pRecvSetup; src/graph/paths.cc,
  ncclTopoCheckP2p).
  Inside of a node, through host memory (GeForce cards, NCCL_P2P_DISABLE=1): nothing on the card (src/transport/shm.cc).
  Between nodes, with GPUDirect RDMA: the sender holds LL128 and Simple (8.69 MiB: 10 MiB), the receiver all three
  (10 MiB); without it both lie in host memory (src/transport/net.cc, sendProxyConnect and recvProxyConnect).
  Send and receive between nodes: one pool for all peers and each direction (sharedNetBuffersInit).
"""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.gpus.nccl.nccl_channels import compute_number
from vramfit.gpus.nccl.nccl_settings import NcclSettings
from vramfit.gpus.nccl.node_types import CardLink, NodeType
from vramfit.gpus.spec import GpuSpec
from vramfit.units import MIB

BLOCK = 2 * MIB
"""src/include/comm.h: CUDA_IPC_MIN; also the granularity of CUDA's virtual memory management."""
_COUNTERS = 4096
"""src/include/comm.h: ncclSendMem and ncclRecvMem are padded to MEM_ALIGN."""
_SHARED_STEPS = 16
"""src/transport/net.cc: NCCL_SHARED_STEPS."""
_STEPS = 8
"""src/include/device.h: NCCL_STEPS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionEnds:
    """Bytes on the card for one channel to one neighbour: of the sender and of the receiver."""

    send: int
    receive: int

    @property
    def both(self) -> int:
        """Of a rank that sends to one neighbour and receives from one."""
        return self.send + self.receive


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes for one channel, of the rank that holds least, of the usual one, and of the one that holds most."""

    low: int
    likely: int
    high: int


def in_blocks(nbytes: int) -> int:
    """Rounded up to whole blocks of 2 MiB."""
    return -(-nbytes // BLOCK) * BLOCK


def local_ends(card: GpuSpec, node: NodeType, settings: NcclSettings, *, local: int) -> ConnectionEnds:
    """A connection inside of a node.

    Args:
        local: ranks of the communicator in the node: a bridge joins two.
    """
    if not cards_meet_directly(node, settings, local=local):
        if not settings.shm:  # NCCL_P2P_DISABLE and NCCL_SHM_DISABLE: over the network, to itself
            return network_ends(node, settings)
        return ConnectionEnds(send=0, receive=0)
    reads = compute_number(card) == 80 and node.card_link is not CardLink.PCIE and card.nvlink is not None
    simple = settings.buffer_size
    return ConnectionEnds(
        send=in_blocks(_COUNTERS + (simple if reads else 0)),
        receive=in_blocks(_COUNTERS + settings.connection_buffers - (simple if reads else 0)),
    )


def cards_meet_directly(node: NodeType, settings: NcclSettings, *, local: int) -> bool:
    """Whether cards of a node reach each other without going through the host; a bridge joins two."""
    bridged = node.card_link is CardLink.BRIDGE and local <= 2
    return settings.p2p and (bridged or node.card_link in (CardLink.NVLINK, CardLink.PCIE))


def network_ends(node: NodeType, settings: NcclSettings) -> ConnectionEnds:
    """A connection between nodes, of a ring or a tree."""
    if not node.gpu_direct:
        return ConnectionEnds(send=0, receive=0)
    return ConnectionEnds(
        send=in_blocks(settings.ll128_buffer_size + settings.buffer_size),
        receive=in_blocks(settings.connection_buffers),
    )


def ring_bytes(inside: ConnectionEnds, between: ConnectionEnds, *, local: int, nodes: int) -> RankBytes:
    """What a ring takes: one neighbour to send to, and one to receive from.

    In each channel one rank of a node sends out of it and one receives into it, in turn: the mean is likely. The rank
    that does so most is taken to do it twice as often as the mean.

    Args:
        inside, between: ends of connections in a node and between nodes.
        local: ranks of the communicator in a node.
    """
    if nodes == 1:
        return RankBytes(low=inside.both, likely=inside.both, high=inside.both)
    if local == 1:
        return RankBytes(low=between.both, likely=between.both, high=between.both)
    mean = ((local - 1) * inside.both + between.both) // local
    outermost = max(between.send + inside.receive, inside.send + between.receive)
    return RankBytes(low=min(inside.both, mean), likely=mean, high=max(mean, min(outermost, 2 * mean)))


def tree_bytes(inside: ConnectionEnds, between: ConnectionEnds, *, local: int, nodes: int) -> RankBytes:
    """What a tree takes alone: both directions to each neighbour.

    Inside of a node the ranks form a chain, whose two ends have one neighbour. Between nodes it is a binary tree, which
    has up to three; from the third node on a node has two on average (src/graph/trees.cc, ncclGetDtree: each node is a
    leaf in one of two trees). This is why memory grows no further with the number of nodes.
    """
    chain = RankBytes(low=inside.both, likely=2 * inside.both, high=2 * inside.both)
    if local == 2:
        chain = RankBytes(low=inside.both, likely=inside.both, high=inside.both)
    if nodes == 1:
        return chain
    mean, most = (1, 1) if nodes == 2 else (2, 3)
    if local == 1:
        return RankBytes(low=between.both, likely=mean * between.both, high=most * between.both)
    usual = (2 * (local - 1) * inside.both + mean * between.both) // local
    return RankBytes(
        low=min(chain.low, usual), likely=usual, high=min(chain.high + most * between.both, 2 * usual)
    )


def ring_and_tree_bytes(
    inside: ConnectionEnds, between: ConnectionEnds, *, local: int, nodes: int, even: bool
) -> RankBytes:
    """What a ring and a tree take together, where both use a connection that they share once.

    Args:
        even: both go through the cards in one order, as they do over NVSwitch; else they may have no link in common.
    """
    ring = ring_bytes(inside, between, local=local, nodes=nodes)
    tree = tree_bytes(inside, between, local=local, nodes=nodes)
    apart = ring.high + tree.high
    if nodes == 1:
        if local == 2:
            return ring
        ends = min(inside.send + 2 * inside.receive, 2 * inside.send + inside.receive)
        both = 2 * inside.both
        return RankBytes(low=ends, likely=both, high=both if even else apart)
    if local == 1:
        return RankBytes(low=max(ring.low, tree.low), likely=ring.likely + tree.likely, high=apart)
    shared = (local - 1) * inside.both // local  # the ring's links inside are half of the tree's
    return RankBytes(low=max(ring.low, tree.low), likely=ring.likely + tree.likely - shared, high=apart)


def pool_bytes(p2p_channels: int, *, nodes: int, nvlink: bool, settings: NcclSettings) -> int:
    """A pool for send and receive over the network, of one direction; at 64 channels over NVLink 512 MiB.

    Args:
        p2p_channels: of the communicator.
        nvlink: all cards of the node are joined by NVLink.
    """
    # src/init.cc, computeBuffSizes
    if nodes > 1:
        chunk = settings.p2p_net_chunk
    else:
        chunk = settings.p2p_nvl_chunk if nvlink else settings.p2p_pci_chunk
    return p2p_channels * _SHARED_STEPS * min(chunk, settings.buffer_size // _STEPS)


def nvls_bytes(channels: int, heads: int, *, chunked: bool, settings: NcclSettings) -> int:
    """Buffers of NVLink SHARP on one card (src/transport/nvls.cc, ncclNvlsBufferSetup).

    Args:
        heads: cards of the node that take part.
        chunked: from 2.21 on buffers are eight chunks of 128 KiB; before, they were of NCCL_BUFFSIZE.
    """
    buffer = settings.nvls_chunk * _STEPS if chunked else settings.buffer_size
    return in_blocks(channels * 2 * buffer * heads)
