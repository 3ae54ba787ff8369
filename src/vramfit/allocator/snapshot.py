"""The memory as torch's snapshots show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vramfit.allocator.block import ALLOCATED, FREE, PENDING, UNMAPPED, Block

Segment = dict[str, Any]
"""One entry of ``torch.cuda.memory._snapshot()["segments"]``."""

_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


def describe_segments(blocks: Iterable[Block], device: int) -> list[Segment]:
    """All segments by address, in the layout of torch/csrc/cuda/Module.cpp (``segmentInfoToDict``).

    An expandable segment gives one entry for each range of mapped pages.
    """
    heads = [
        block
        for block in blocks
        if block.state != UNMAPPED and (block.prev is None or block.prev.state == UNMAPPED)
    ]
    return [_describe(head, device) for head in sorted(heads, key=lambda block: block.address)]


def _describe(head: Block, device: int) -> Segment:
    blocks: list[dict[str, Any]] = []
    total = allocated = active = requested = 0
    step: Block | None = head
    while step is not None and step.state != UNMAPPED:
        in_use = step.state == ALLOCATED
        total += step.size
        allocated += step.size if in_use else 0
        if in_use or step.state == PENDING:
            active += step.size
            requested += step.requested
        blocks.append(
            {
                "address": step.address,
                "size": step.size,
                "requested_size": step.requested,
                "state": _STATES[step.state],
                "frames": [],
            }
        )
        step = step.next
    pool = head.shelf.pool
    return {
        "device": device,
        "address": head.address,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": active,
        "requested_size": requested,
        "stream": head.shelf.stream,
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": (0, 0) if pool.owner is None else pool.owner.pool_id,
        "is_expandable": head.segment is not None,
        "frames": [],
        "blocks": blocks,
    }
