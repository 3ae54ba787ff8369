"""What torch's allocator says of a real card: its counters and peaks, and the memory outside of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.trace import TraceDevice


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakBytes:
    """The highest figures of a device since torch began to count, in bytes."""

    allocated: int = 0
    reserved: int = 0
    active: int = 0


def peaks_of_card(device: int) -> PeakBytes:
    """The highest figures of a device so far."""
    stats = torch.cuda.memory_stats(device)
    return PeakBytes(
        allocated=stats.get("allocated_bytes.all.peak", 0),
        reserved=stats.get("reserved_bytes.all.peak", 0),
        active=stats.get("active_bytes.all.peak", 0),
    )


class CardDemand:
    """The requests that torch's allocator has counted: how many, and of how many bytes."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()

    def take(self) -> tuple[Hashable, Hashable]:
        """The requests since the last call, and the peaks so far."""
        if not torch.cuda.is_initialized():
            return (), ()
        found, peaks = [], []
        for device in range(torch.cuda.device_count()):
            stats = torch._C._cuda_memoryStats(device)
            kinds = [stats[name]["all"] for name in ("allocation", "requested_bytes", "reserved_bytes")]
            found += [kind["allocated"] for kind in kinds[:2]]
            peaks += [kind["peak"] for kind in kinds[1:]]
        before = self._before or (0,) * len(found)
        self._before = tuple(found)
        return tuple(now - then for now, then in zip(found, before, strict=True)), tuple(peaks)


def requests_and_frees(devices: Iterable[int]) -> dict[int, int]:
    """Requests and frees that devices' allocators have counted."""
    found = {}
    for device in devices:
        counted = torch._C._cuda_memoryStats(device)["allocation"]["all"]
        found[device] = counted["allocated"] + counted["freed"]
    return found


def traced_device(index: int, segments: Any) -> TraceDevice:
    """A device as the trace tells of it; what lies outside torch is the context, and what other processes hold."""
    properties = torch.cuda.get_device_properties(index)
    outside = 0
    if segments or torch.cuda.memory_reserved(index):
        free, total = torch.cuda.mem_get_info(index)
        outside = max(0, total - free - torch.cuda.memory_reserved(index))
    return TraceDevice(
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        context_bytes=outside,
        segments=segments,
    )
