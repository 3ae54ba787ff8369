"""A driver that behaves as the recording shows: its addresses in its order, and its failures."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from vramfit.allocator import Driver
from vramfit.errors import TraceFormatError
from vramfit.trace.events import EventKind

SegmentEvent = tuple[int, int, int]
"""Kind, address and size of an event of a segment, or of an OOM."""

# Where nothing was recorded; far from every address that CUDA gives, and within the 47 bits of user space.
_UNRECORDED_BASE = 0x2000_0000_0000
_ALIGNMENT = 2 << 20
_ADDRESS_END = 1 << 47
_BLOCK = 512

_RELEASES = (EventKind.SEGMENT_FREE, EventKind.SEGMENT_UNMAP)


def is_release(event: SegmentEvent) -> bool:
    """Whether an event gives memory back."""
    return event[0] in _RELEASES


class RecordedDriver(Driver):
    """Serves the segment events of a recording, a few at a time as the replay reaches them.

    Where the next recorded event is a release or an OOM, a request for memory fails: that is why the
    allocator released its cache, or gave up.

    Attributes:
        matched: segments and mappings that the allocator asked for as recorded.
        releases_matched: segments and pages that it gave back as recorded.
        surprises: requests and releases that were not recorded at that point.
    """

    def __init__(self, total_bytes: int) -> None:
        """Start with nothing expected."""
        super().__init__(total_bytes)
        self.matched = 0
        self.releases_matched = 0
        self.surprises = 0
        self.free_figure = 0
        self._expected: list[SegmentEvent] = []
        self._held: list[tuple[int, int]] = []  # (begin, end) of all segments and reservations, by address
        self._next_address = _UNRECORDED_BASE

    def expect(self, events: Sequence[SegmentEvent]) -> None:
        """What the recording shows for the next request."""
        self._expected = list(reversed(events))

    def hold(self, address: int, size: int) -> bool:
        """Note that a range is in use; False if it cannot be, because it overlaps another or is no address."""
        begin, end = address, address + size
        if address <= 0 or address % _BLOCK or size % _BLOCK or size <= 0 or end > _ADDRESS_END:
            return False
        index = bisect_left(self._held, (begin, end))
        if index < len(self._held) and self._held[index][0] < end:
            return False
        if index and self._held[index - 1][1] > begin:
            return False
        self._held.insert(index, (begin, end))
        return True

    @property
    def pending(self) -> int:
        """Expected events that have not happened yet."""
        return len(self._expected)

    @property
    def free_bytes(self) -> int:
        """What the recording gives as free, where it does; otherwise what is left of the card."""
        return self.free_figure or super().free_bytes

    def malloc(self, size: int) -> int | None:
        """The recorded address of the next segment; None where the recording shows a failure."""
        if self._expected:
            kind, address, recorded = self._expected[-1]
            if kind in _RELEASES or kind == EventKind.OOM:
                return None
            if kind == EventKind.SEGMENT_ALLOC and recorded == size and self.hold(address, size):
                self._expected.pop()
                self.matched += 1
                return address
        self.surprises += 1
        return self._unrecorded(size) if size <= self.total_bytes else None

    def free(self, address: int, size: int) -> None:
        """Take a segment back."""
        self._let_go(address)
        self._release((EventKind.SEGMENT_FREE, address, size))

    def reserve(self, size: int) -> int:
        """The address of the mapping that comes next: a reservation is mapped from its beginning."""
        if self._expected and self._expected[-1][0] == EventKind.SEGMENT_MAP:
            address = self._expected[-1][1]
            # Its first page stands for it: how far it reaches depends on the card, which recordings do not name.
            if self.hold(address, _ALIGNMENT):
                return address
        self.surprises += 1
        address = self._unrecorded(size) or 0
        if not address:
            raise TraceFormatError("the recording makes no sense: it maps more than any address space holds")
        return address

    def release(self, address: int, size: int) -> None:  # noqa: ARG002
        """Take a reservation back; recordings do not show it."""
        self._let_go(address)

    def map(self, address: int, size: int) -> bool:
        """Map pages; False where the recording shows a failure."""
        if self._expected:
            kind, recorded_address, recorded = self._expected[-1]
            if kind in _RELEASES or kind == EventKind.OOM:
                return False
            if kind == EventKind.SEGMENT_MAP and (recorded_address, recorded) == (address, size):
                self._expected.pop()
                self.matched += 1
                return True
        self.surprises += 1
        return size <= self.total_bytes

    def unmap(self, address: int, size: int) -> None:
        """Take pages back."""
        self._release((EventKind.SEGMENT_UNMAP, address, size))

    def _release(self, event: SegmentEvent) -> None:
        # Within one run of releases the order is the allocator's own business.
        for index in range(len(self._expected) - 1, -1, -1):
            if self._expected[index][0] not in _RELEASES:
                break
            if self._expected[index] == event:
                del self._expected[index]
                self.releases_matched += 1
                return
        self.surprises += 1

    def _unrecorded(self, size: int) -> int | None:
        address = self._next_address
        self._next_address += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self.hold(address, size):
            return address
        if self._next_address > _ADDRESS_END:
            self._next_address = address
            return None
        return self._unrecorded(size)

    def _let_go(self, address: int) -> None:
        index = bisect_left(self._held, (address, 0))
        if index < len(self._held) and self._held[index][0] == address:
            del self._held[index]
