"""NCCL's memory on a card, outside torch's allocator: of the library once, and of each communicator.

Nothing is taken before the first collective: a communicator is made when it is first used (with ``device_id`` given to
``init_process_group``, at once), and a process without one has not loaded NCCL's kernels. The CUDA context is not part
of any figure here; `GpuSpec.typical_context_bytes` has it.

NOTE [When connections are made]
Up to 2.21, and where CUDA's virtual memory management is not used for NCCL's buffers (``NCCL_CUMEM_ENABLE=0``, a driver
before CUDA 12, some containers), a new communicator connects its rings and trees at once and takes a pool for send and
receive over the network, though it may never send (src/init.cc, initTransportsRank). From 2.22 on with virtual memory
management (the default since 2.19) an algorithm is connected when a call first uses it (src/enqueue.cc,
ncclPrepareTasks). There every small array that NCCL keeps on the card takes a whole block of 2 MiB
(src/include/alloc.h, ncclCuMemAlloc): three for each channel. So what a communicator takes depends on a setting that
NCCL decides by itself, and an estimate covers both unless it is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vramfit.gpus.nccl.collective_times import EXCHANGES, NcclCollective
from vramfit.gpus.nccl.communicator_use import (
    NOTHING,
    SHARP,
    ByteRange,
    CommunicatorUse,
    binomial_range,
    channels_for,
    connected_algorithms,
    connection_ends,
    ring_tree_range,
)
from vramfit.gpus.nccl.nccl_buffers import BLOCK, in_blocks, nvls_bytes, pool_bytes
from vramfit.gpus.nccl.nccl_channels import Channels, compute_number
from vramfit.gpus.nccl.nccl_settings import NcclAlgorithm
from vramfit.gpus.nccl.node_types import CardLink
from vramfit.gpus.spec import GpuSpec
from vramfit.units import KIB, MIB

_DEVICE_PEER = 640
"""sizeof(ncclDevChannelPeer) of src/include/device.h: four ncclConnInfo."""
_CODE = ((120, 164, 1280), (100, 186, 2040), (90, 193, 1976), (80, 88, 1504), (0, 89, 1072))
"""From a compute number on: MiB of kernels that NCCL loads, and bytes of stack of one thread.

Sections that are loaded, and EIATTR_MIN_STACK_SIZE, of the kernels of libnccl.so.2 in the wheel nvidia-nccl-cu13
2.28.9.
All are loaded with the first communicator (src/enqueue.cc, ncclInitKernelsForDevice). Other versions may differ.
"""
_USUAL_STACK = 1024
"""CUDA C++ Programming Guide, cudaLimitStackSize: what a context has set aside for each thread anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclPart:
    """One thing that NCCL keeps on the card.

    Attributes:
        name: what it is, in words.
        nbytes: how much.
        source: where the figure comes from.
    """

    name: str
    nbytes: ByteRange
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclMemory:
    """What NCCL takes on one card, by parts."""

    parts: tuple[NcclPart, ...] = ()

    @property
    def total(self) -> ByteRange:
        """All parts."""
        found = NOTHING
        for part in self.parts:
            found = found + part.nbytes
        return found


def process_memory(uses: Iterable[CommunicatorUse]) -> NcclMemory:
    """NCCL's memory of one process: the library once, and each communicator that did anything.

    Args:
        uses: the communicators of the process, all on one card.
    """
    used = [use for use in uses if use.collectives]
    if not used:
        return NcclMemory()
    parts = [library_part(used[0].layout.card)]
    for use in used:
        parts += communicator_memory(use).parts
    return NcclMemory(parts=tuple(parts))


def library_part(card: GpuSpec) -> NcclPart:
    """NCCL's kernels on the card, and the stack that they need beyond what a context has: once a process.

    Low is the kernels alone. Likely adds the stack of all threads that the card keeps resident, beyond CUDA's default;
    high the whole stack, for a context that had set aside none.
    """
    number = compute_number(card)
    code, stack = next((mib * MIB, stack) for start, mib, stack in _CODE if number >= start)
    threads = card.sm_count * card.max_threads_per_sm
    return NcclPart(
        name="NCCL's kernels and their stack",
        nbytes=ByteRange(
            low=code,
            likely=code + threads * max(0, stack - _USUAL_STACK),
            high=code + threads * stack,
        ),
        source="libnccl.so.2 of nvidia-nccl-cu13 2.28.9: loaded sections and stack of its kernels",
    )


def communicator_memory(use: CommunicatorUse) -> NcclMemory:
    """What one communicator keeps on the card of one rank; nothing before its first collective.

    Where NCCL decides by itself whether it uses virtual memory management, low and high cover both.
    """
    if not use.collectives:
        return NcclMemory()
    layout = use.layout
    if layout.version < (2, 19, 0) and layout.settings.cumem is None:
        return _with_cumem(use, cumem=False)  # src/misc/cudawrap.cc: off by default before 2.19
    if layout.settings.cumem is not None:
        return _with_cumem(use, cumem=layout.settings.cumem)
    virtual, plain = _with_cumem(use, cumem=True), _with_cumem(use, cumem=False)
    return _covering(virtual, plain)


def _covering(virtual: NcclMemory, plain: NcclMemory) -> NcclMemory:
    """The parts with virtual memory management, and one more for what the other way may take beyond them."""
    one, other = virtual.total, plain.total
    arrays, *parts = virtual.parts
    less = min(arrays.nbytes.low, max(0, one.low - other.low))  # without it only the arrays are smaller
    parts.insert(0, replace(arrays, nbytes=replace(arrays.nbytes, low=arrays.nbytes.low - less)))
    if other.high > one.high:
        parts.append(
            NcclPart(
                name="more without virtual memory management (NCCL_CUMEM_ENABLE=0, or where it is not supported)",
                nbytes=ByteRange(low=0, likely=0, high=other.high - one.high),
                source="src/init.cc, initTransportsRank: everything is connected at once",
            )
        )
    return NcclMemory(parts=tuple(parts))


def _with_cumem(use: CommunicatorUse, *, cumem: bool) -> NcclMemory:
    layout = use.layout
    channels = channels_for(layout)
    # A parent's connections may be there already; cards in slots below different host bridges meet in the host.
    shared = use.split and bool(layout.settings.split_shares)
    maybe = shared or (layout.node.card_link is CardLink.PCIE and layout.nodes == 1)
    parts = [
        _arrays(use, channels, cumem=cumem, shared=shared),
        *_rings_and_trees(use, lazy=_lazy(use, cumem=cumem), maybe=maybe),
        *_nvls(use, channels, lazy=_lazy(use, cumem=cumem), shared=shared),
        *_pools(use, channels, lazy=_lazy(use, cumem=cumem), shared=shared),
        *_peers(use, channels, maybe=maybe),
    ]
    return NcclMemory(parts=tuple(part for part in parts if part.nbytes != NOTHING))


def _lazy(use: CommunicatorUse, *, cumem: bool) -> bool:
    return cumem and use.layout.settings.runtime_connect and use.layout.version >= (2, 22, 0)


def _arrays(use: CommunicatorUse, channels: Channels, *, cumem: bool, shared: bool) -> NcclPart:
    """Small arrays of the channels and of the communicator, each in a block of its own with virtual memory."""
    layout = use.layout
    peers = _DEVICE_PEER * layout.ranks
    block = in_blocks if cumem else int
    of_channel = block(8 * (layout.ranks + 1 + layout.local)) + block(4 * layout.ranks)
    if not shared:
        of_channel += block(peers)
    of_nvls = block(_DEVICE_PEER * layout.local)
    whole = block(64 * KIB) + block(4 * layout.ranks)  # devCommAndChans, rankToLocalRank

    def taken(count: int) -> int:
        most = max(count, channels.p2p if count == channels.likely else _at_least(count))
        found = most * of_channel + channels.nvls * of_nvls + whole
        return found if cumem else in_blocks(found)

    return NcclPart(
        name="arrays of the channels",
        nbytes=ByteRange(
            # without virtual memory they may all fit into a block that the process has
            low=taken(channels.low) if cumem else 0,
            likely=taken(channels.likely),
            high=taken(channels.high),
        ),
        source="src/channel.cc, initChannel and initNvlsChannel; src/init.cc, devCommSetup",
    )


def _at_least(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _rings_and_trees(use: CommunicatorUse, *, lazy: bool, maybe: bool) -> Iterator[NcclPart]:
    inside, between = connection_ends(use.layout)
    yield NcclPart(
        name="connections of rings and trees",
        nbytes=_or_none(ring_tree_range(use, inside, between, lazy=lazy), maybe=maybe),
        source="src/transport/p2p.cc and net.cc; see the note in nccl_buffers.py",
    )
    yield NcclPart(
        name="connections of binomial trees (PAT)",
        nbytes=_or_none(binomial_range(use, between, lazy=lazy), maybe=maybe),
        source="src/transport/generic.cc, ncclTransportPatConnect",
    )


def _or_none(found: ByteRange, *, maybe: bool) -> ByteRange:
    """The same, or from nothing where it may take nothing."""
    return replace(found, low=0) if maybe else found


def _nvls(use: CommunicatorUse, channels: Channels, *, lazy: bool, shared: bool) -> Iterator[NcclPart]:
    layout = use.layout
    if not channels.nvls:
        return
    chunked = layout.version >= (2, 21, 0)
    heads = min(32, layout.local)
    whole = nvls_bytes(channels.nvls, heads, chunked=chunked, settings=layout.settings)
    counters = BLOCK if layout.version >= (2, 22, 0) else 0
    connected = connected_algorithms(use, lazy=lazy)
    yield NcclPart(
        name="buffers of NVLink SHARP",
        nbytes=ByteRange(
            low=0 if shared else counters + (whole if connected.low & SHARP else 0),
            likely=counters + (whole if connected.likely & SHARP else 0),
            high=counters + (whole if connected.high & SHARP else 0),
        ),
        source="src/transport/nvls.cc, ncclNvlsSetup and ncclNvlsBufferSetup",
    )
    if layout.nodes > 1:
        tree = channels.nvls * connection_ends(layout)[1].both
        # a leaf of one tree and an inner node of the other, in turn: two neighbours on average
        usual = min(2, layout.nodes - 1)
        yield NcclPart(
            name="connections of NVLink SHARP trees",
            nbytes=ByteRange(
                low=0 if shared or NcclAlgorithm.NVLS_TREE not in connected.low else tree,
                likely=usual * tree if NcclAlgorithm.NVLS_TREE in connected.likely else 0,
                high=usual * tree if NcclAlgorithm.NVLS_TREE in connected.high else 0,
            ),
            source="src/graph/connect.cc, connectNvls; src/transport/nvls.cc, ncclNvlsTreeConnect",
        )


def _pools(use: CommunicatorUse, channels: Channels, *, lazy: bool, shared: bool) -> Iterator[NcclPart]:
    """Pools for send and receive over the network: at once where nothing is lazy, else where something is sent."""
    layout = use.layout
    sends = layout.nodes > 1 and bool(use.collectives & EXCHANGES) and layout.node.gpu_direct
    if lazy and not sends:
        return
    nvlink = layout.graph.nvlink if layout.ranks > 1 else layout.card.nvlink is not None or layout.ranks == 1
    one = pool_bytes(channels.p2p, nodes=layout.nodes, nvlink=nvlink, settings=layout.settings)
    few = one * (2 if sends else 1)
    many = few
    if sends and layout.graph.nvlink and layout.node.nics > 1 and layout.local > 1:
        # PXN: a card next to an adapter keeps a pool for each rank of its node that sends through it
        many = one * (layout.local + 1)
    all_to_all = NcclCollective.ALL_TO_ALL in use.collectives
    yield NcclPart(
        name="pools for send and receive over the network",
        nbytes=ByteRange(low=0 if shared else few, likely=many if all_to_all else few, high=many),
        source="src/transport/net.cc, sharedNetBuffersInit",
    )


def _peers(use: CommunicatorUse, channels: Channels, *, maybe: bool) -> Iterator[NcclPart]:
    """Connections of send and receive inside of a node: to each peer, on all channels that a peer gets."""
    layout = use.layout
    senders, receivers = use.send_peers, use.receive_peers
    if NcclCollective.ALL_TO_ALL in use.collectives:
        senders = receivers = layout.local - 1
    elif NcclCollective.SEND_RECEIVE not in use.collectives:
        return
    inside, _ = connection_ends(layout)
    whole = channels.p2p_per_peer * (senders * inside.send + receivers * inside.receive)
    yield NcclPart(
        name="connections to peers for send and receive",
        nbytes=ByteRange(low=0 if maybe else whole, likely=whole, high=whole),
        source="src/transport/p2p.cc; src/graph/paths.cc, ncclTopoComputeP2pChannels",
    )
