"""Which tiers a machine has: those of a card, or one less where the card and the host have one memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from vramfit.allocator import AllocatorConfig
from vramfit.errors import ConfigError, UsageError
from vramfit.runtime.tiers.file_tier import FileTier
from vramfit.runtime.tiers.memory_tiers import DeviceTier, PinnedTier
from vramfit.runtime.tiers.pool_tier import PoolTier
from vramfit.runtime.tiers.tier import Tier
from vramfit.runtime.tiers.unified_memory import Unified, UnifiedTier


class Allocation(Enum):
    """Where the memory of a tier comes from."""

    SEPARATE = "separate"
    """Each tensor by itself, from torch's allocator."""
    POOL = "pool"
    """One piece that is taken at the start."""


@dataclass(frozen=True, kw_only=True)
class TierBudgets:
    """Bytes of each tier, from the top down.

    Attributes:
        device: where tensors are used.
        peers: other cards, by their names, in order.
        pinned: of the host, as rounded to powers of two; 0 for none.
        more: tiers of one's own, between the host's memory and files.
        file: of memory-mapped files; 0 for none.
        folder: where these are.
        allocation: where the device's and the host's memory come from.
        unified: whether the device's is unified memory.
    """

    device: int
    peers: Mapping[str, int] = field(default_factory=dict)
    pinned: int = 0
    more: Sequence[Tier] = ()
    file: int = 0
    folder: str | os.PathLike[str] = ""
    allocation: Allocation = Allocation.SEPARATE
    unified: Unified = Unified.OFF


def has_one_memory(device: torch.device) -> bool:
    """Whether a device's memory is the host's, as on Jetson and DGX Spark.

    GH200 has one address space over two memories, each with its own speed and size: it has two tiers.
    """
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def card_tiers(device: torch.device, budgets: TierBudgets) -> list[Tier]:
    """The tiers of a store on a device.

    Where device and host have one memory, copies from one to the other would only take it twice: the budget of pinned
    memory is the device's too, and there is no such tier.

    Raises:
        UsageError: a budget cannot be had.
        WriteError: no file can be written in the folder.
    """
    one = has_one_memory(device)
    capacity = budgets.device + (budgets.pinned if one else 0)
    pool = budgets.allocation is Allocation.POOL
    tiers: list[Tier] = [_top(device, capacity, budgets)]
    for name, size in budgets.peers.items():
        peer = torch.device(name)
        if peer.type != "cuda" or peer == device:
            raise UsageError(
                f"the peer {name!r} is no other card than {device}", 'Give peers={"cuda:1": "8GiB"}'
            )
        if (peer.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"there is no {name!r}: {torch.cuda.device_count()} cards are seen", "Give another peer"
            )
        tiers.append(DeviceTier(str(peer), size, peer))
    if budgets.pinned and not one:
        pinned = device.type == "cuda"
        if pool:
            tiers.append(PoolTier("pinned", budgets.pinned, torch.device("cpu"), pinned=pinned))
        else:
            tiers.append(PinnedTier(budgets.pinned, pinned=pinned, round_limit=_round_limit()))
    tiers += budgets.more
    if budgets.file:
        tiers.append(FileTier(budgets.file, budgets.folder))
    if len(tiers) == 1 and not one:
        raise UsageError(
            "there is no tier below the device", 'Give pinned="8GiB", or file="64GiB" and a folder'
        )
    return tiers


def _top(device: torch.device, capacity: int, budgets: TierBudgets) -> Tier:
    pool = budgets.allocation is Allocation.POOL
    if budgets.unified is not Unified.OFF:
        if pool:
            raise UsageError("unified memory is not taken as a pool", 'Leave out allocation="pool"')
        return UnifiedTier(capacity, device, budgets.unified)
    return PoolTier("device", capacity, device) if pool else DeviceTier("device", capacity, device)


def _round_limit() -> int | None:
    """Pinned blocks above it are not rounded (``pinned_max_round_threshold_mb``)."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return AllocatorConfig.parse(text).pinned_max_round_threshold
    except ConfigError:  # torch refuses it, and says so
        return None
