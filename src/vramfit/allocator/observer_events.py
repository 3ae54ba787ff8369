"""What the allocator tells an observer: the kinds of event in a torch memory trace."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class AllocatorEventKind(IntEnum):
    """The actions of a torch memory trace (c10/core/CachingDeviceAllocator.h, ``TraceEntry::Action``).

    The meaning of an event's address and size follows torch: `ALLOC` and both frees carry the *requested*
    size, segment events the bytes of the segment or mapping, `OOM` the free bytes of the device as address
    and the rounded request as size, `SNAPSHOT` the active bytes as size.
    """

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8

    @property
    def torch_name(self) -> str:
        """The action as torch spells it in a snapshot, for instance ``free_requested``."""
        return self.name.lower()


EventCallback = Callable[[AllocatorEventKind, int, int, int], None]
"""Called as ``(kind, address, size, stream)`` after each event."""

FreedCallback = Callable[[int, int, int], None]
"""Called as ``(address, requested size, stream)`` when a block is given back and free at once."""
