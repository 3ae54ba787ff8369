"""How each pool of a device is used at one moment: its segments, what is in use, and what is free in which way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.occupancy import COMMON_POOL, Occupancy, PoolId, occupancy
from vramfit.trace import MemoryTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUse:
    """One pool of the allocator on one stream. Bytes: ``reserved = occupied + releasable + inactive_split``.

    Attributes:
        stream: the stream whose requests it serves.
        small: the pool of blocks of at most 1 MiB.
        pool_id: a private pool (of CUDA graphs, or ``torch.cuda.MemPool``); (0, 0) for the common one.
        expandable: its segments grow by pages.
        segments: segments held, or mapped stretches of expandable ones.
        blocks: blocks that are allocated or wait for a stream.
        occupied: bytes of these.
        free_segments: segments without a block.
        releasable: bytes of these, or of whole free pages.
        inactive_split: free bytes beside live blocks, which cannot be given back.
    """

    stream: int
    small: bool
    pool_id: PoolId
    expandable: bool
    segments: int
    blocks: int
    reserved: int
    occupied: int
    free_segments: int
    releasable: int
    inactive_split: int

    @property
    def is_private(self) -> bool:
        """Whether only its owner is served from it, and ``empty_cache`` leaves it alone while the owner lives."""
        return self.pool_id != COMMON_POOL


def pool_uses(trace: MemoryTrace, device: int, row: int) -> tuple[PoolUse, ...]:
    """The pools of a device right after event ``row`` (-1: before the first), the largest first."""
    return pools_of(occupancy(trace, DeviceTimeline.of(trace, device).lives, row))


def pools_of(held: Occupancy) -> tuple[PoolUse, ...]:
    """The pools of what a device holds, the largest first."""
    members: dict[tuple[int, bool, PoolId, bool], list[int]] = {}
    for index, segment in enumerate(held.segments):
        key = (segment.stream, segment.small, segment.pool_id, segment.expandable)
        members.setdefault(key, []).append(index)
    free: dict[int, int] = {}
    pages: dict[int, int] = {}
    for gap in held.gaps:
        free[gap.segment] = free.get(gap.segment, 0) + gap.size
        pages[gap.segment] = pages.get(gap.segment, 0) + held.whole_pages(gap)
    found = []
    for (stream, small, pool_id, expandable), indices in members.items():
        reserved = sum(held.segments[index].size for index in indices)
        unused = sum(free.get(index, 0) for index in indices)
        releasable = sum(pages.get(index, 0) for index in indices)
        found.append(
            PoolUse(
                stream=stream,
                small=small,
                pool_id=pool_id,
                expandable=expandable,
                segments=len(indices),
                blocks=sum(len(held.blocks[index]) for index in indices),
                reserved=reserved,
                occupied=reserved - unused,
                free_segments=sum(not held.blocks[index] for index in indices),
                releasable=releasable,
                inactive_split=unused - releasable,
            )
        )
    return tuple(sorted(found, key=lambda pool: (-pool.reserved, pool.stream, pool.small, pool.pool_id)))


def given_back_by_empty_cache(pools: Sequence[PoolUse]) -> int:
    """Bytes that ``torch.cuda.empty_cache()`` would give back to the driver: free segments of no private pool."""
    return sum(pool.releasable for pool in pools if not pool.is_private)
