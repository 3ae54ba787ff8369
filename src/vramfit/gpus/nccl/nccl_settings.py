"""NCCL's settings that decide about memory, read from environment variables as NCCL reads them.

NCCL takes numbers with ``strtoll(text, NULL, 0)`` (src/misc/param.cc, ncclLoadParam): it reads digits from the left and
ignores what follows, so that ``NCCL_BUFFSIZE=4MB`` means 4 bytes and a word means 0. Files and functions here and in
the modules beside this one are those of NCCL 2.28.9 unless a version is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from vramfit.units import KIB, MIB

NcclVersion = tuple[int, int, int]
"""As ``torch.cuda.nccl.version()`` gives it."""

REFERENCE_NCCL: NcclVersion = (2, 28, 9)
"""What torch 2.11 for CUDA 13 brings along, and the source that the constants were read from."""


class NcclProtocol(Enum):
    """How data is passed on; each has its own buffer in every connection."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


class NcclAlgorithm(Enum):
    """How a collective goes over the ranks; each has connections of its own."""

    RING = "Ring"
    TREE = "Tree"
    NVLS = "NVLS"
    NVLS_TREE = "NVLSTree"
    PAT = "PAT"


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclSettings:
    """What is set; None is NCCL's own choice. Sizes in bytes.

    Attributes:
        buffer_size: NCCL_BUFFSIZE, of the Simple protocol, for one channel and direction.
        ll_buffer_size, ll128_buffer_size: NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE.
        min_channels, max_channels: NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS, or the older ..._NRINGS.
        min_ctas, max_ctas: NCCL_MIN_CTAS, NCCL_MAX_CTAS, which bound channels too.
        min_p2p_channels, max_p2p_channels: NCCL_MIN_P2P_NCHANNELS, NCCL_MAX_P2P_NCHANNELS.
        nvls_channels: NCCL_NVLS_NCHANNELS.
        channels_per_net_peer: NCCL_NCHANNELS_PER_NET_PEER.
        p2p: cards of a node reach each other directly (not NCCL_P2P_DISABLE, and no NCCL_P2P_LEVEL=LOC).
        shm: ranks of a node may meet in host memory (not NCCL_SHM_DISABLE).
        cumem: NCCL_CUMEM_ENABLE.
        nvls: NVLink SHARP (not NCCL_NVLS_ENABLE=0).
        runtime_connect: NCCL_RUNTIME_CONNECT: connections are made when an algorithm is first used.
        split_shares: NCCL_COMM_SPLIT_SHARE_RESOURCES: split communicators use their parent's buffers.
        p2p_nvl_chunk, p2p_pci_chunk, p2p_net_chunk: NCCL_P2P_NVL_CHUNKSIZE, ..._PCI_..., ..._NET_...
        nvls_chunk: NCCL_NVLS_CHUNKSIZE.
        algorithms: what NCCL_ALGO allows.
    """

    buffer_size: int = 4 * MIB  # src/init.cc: DEFAULT_BUFFSIZE
    ll_buffer_size: int = (
        8 * 512 * 8 * 16
    )  # DEFAULT_LL_BUFFSIZE: lines a thread, threads, steps, bytes of a line
    ll128_buffer_size: int = (
        120 * 640 * 8 * 8
    )  # DEFAULT_LL128_BUFFSIZE: elements a thread, threads, steps, bytes
    min_channels: int | None = None
    max_channels: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    min_p2p_channels: int = 1
    max_p2p_channels: int | None = None
    nvls_channels: int | None = None
    channels_per_net_peer: int | None = None
    p2p: bool = True
    shm: bool = True
    cumem: bool | None = None
    nvls: bool = True
    runtime_connect: bool = True
    split_shares: bool | None = None
    p2p_nvl_chunk: int = 512 * KIB
    p2p_pci_chunk: int = 128 * KIB
    p2p_net_chunk: int = 128 * KIB
    nvls_chunk: int = 128 * KIB
    algorithms: frozenset[NcclAlgorithm] = frozenset(NcclAlgorithm)

    @property
    def connection_buffers(self) -> int:
        """Buffers of all three protocols of one connection, 9.19 MiB by default.

        All are taken whatever NCCL_PROTO allows (src/transport/p2p.cc, p2pRecvSetup).
        """
        return self.ll_buffer_size + self.ll128_buffer_size + self.buffer_size

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> NcclSettings:
        """Read what is set.

        Args:
            environ: variables with their values; the others are left out.
        """
        given = {
            name: number for name in environ if (number := nccl_number(environ.get(name, ""))) is not None
        }
        base = cls()

        def size(name: str, default: int) -> int:
            return max(0, given.get(name, default))

        def count(*names: str) -> int | None:
            found = [given[name] for name in names if given.get(name, 0) > 0]
            return found[0] if found else None

        def switch(name: str) -> bool | None:
            return given[name] != 0 if given.get(name, -1) >= 0 else None

        level = environ.get("NCCL_P2P_LEVEL", "")
        return cls(
            buffer_size=size("NCCL_BUFFSIZE", base.buffer_size),
            ll_buffer_size=size("NCCL_LL_BUFFSIZE", base.ll_buffer_size),
            ll128_buffer_size=size("NCCL_LL128_BUFFSIZE", base.ll128_buffer_size),
            min_channels=count("NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS"),
            max_channels=count("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS"),
            min_ctas=count("NCCL_MIN_CTAS"),
            max_ctas=count("NCCL_MAX_CTAS"),
            min_p2p_channels=count("NCCL_MIN_P2P_NCHANNELS") or 1,
            max_p2p_channels=count("NCCL_MAX_P2P_NCHANNELS"),
            nvls_channels=count("NCCL_NVLS_NCHANNELS"),
            channels_per_net_peer=count("NCCL_NCHANNELS_PER_NET_PEER"),
            p2p=not given.get("NCCL_P2P_DISABLE") and level.upper() != "LOC" and level.strip() != "0",
            shm=not given.get("NCCL_SHM_DISABLE"),
            cumem=switch("NCCL_CUMEM_ENABLE"),
            nvls=given.get("NCCL_NVLS_ENABLE", 2) != 0,
            runtime_connect=given.get("NCCL_RUNTIME_CONNECT", 1) != 0,
            split_shares=switch("NCCL_COMM_SPLIT_SHARE_RESOURCES"),
            p2p_nvl_chunk=size("NCCL_P2P_NVL_CHUNKSIZE", base.p2p_nvl_chunk),
            p2p_pci_chunk=size("NCCL_P2P_PCI_CHUNKSIZE", base.p2p_pci_chunk),
            p2p_net_chunk=size("NCCL_P2P_NET_CHUNKSIZE", base.p2p_net_chunk),
            nvls_chunk=size("NCCL_NVLS_CHUNKSIZE", base.nvls_chunk),
            algorithms=_algorithms(environ.get("NCCL_ALGO", "")),
        )


_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)")


def nccl_number(text: str) -> int | None:
    """The number that NCCL takes from a text, as C's ``strtoll`` with base 0; None for an empty text (unset)."""
    if not text:
        return None
    match = _NUMBER.match(text)
    if match is None:
        return 0
    sign, digits = match.groups()
    if digits[:2].lower() == "0x":
        value = int(digits, 16)
    elif digits.startswith("0"):
        octal = re.match(r"[0-7]+", digits)
        value = int(octal.group(), 8) if octal else 0
    else:
        value = int(digits)
    return -value if sign == "-" else value


def _algorithms(text: str) -> frozenset[NcclAlgorithm]:
    """What NCCL_ALGO allows (src/graph/tuning.cc, parseList), for all collectives: ``Ring``, ``Ring,Tree``, ``^NVLS``.

    A list by collective (``allreduce:tree;...``) is taken to restrict nothing.
    """
    if not text or ":" in text or ";" in text:
        return frozenset(NcclAlgorithm)
    words = {word.strip().lower() for word in text.removeprefix("^").split(",")}
    named = frozenset(one for one in NcclAlgorithm if one.value.lower() in words)
    return frozenset(NcclAlgorithm) - named if text.startswith("^") else named
