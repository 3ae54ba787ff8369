"""What a replay came to: counts and peaks, recorded beside replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most bytes at any one time."""

    peak_allocated: int
    peak_reserved: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReplay:
    """One device of a replay. Sizes are in bytes.

    The ``_matched`` figures are None where the replay was not meant to match (other settings than recorded).

    Attributes:
        index: device index.
        events: events of the device.
        allocations: requests that were served.
        addresses_matched: requests that got the recorded address.
        segments: segments taken, and stretches of pages mapped.
        segments_matched: those that the replay took at the same request with the same size.
        releases: segments given back, and stretches of pages unmapped.
        releases_matched: those that the replay gave back at the same point.
        final_segments: segments at the end of the recording; 0 if it does not hold them.
        final_segments_matched: those that the replay ends with too, block by block.
        surprises: segments taken or given back by the replay that were not recorded at that point.
        ooms: requests that failed in the recording.
        ooms_replayed: requests that failed in the replay.
        unknown_frees: frees of blocks that nothing is known of.
        total_bytes: memory of the card in the replay, 0 if unknown and taken as unlimited.
        recorded: peaks of the recording, between its first and its last event.
        replayed: peaks of the replay.
        first_difference: the first allocation that differs, in words; None if there is none.
    """

    index: int
    events: int
    allocations: int
    addresses_matched: int | None
    segments: int
    segments_matched: int | None
    releases: int
    releases_matched: int | None
    final_segments: int
    final_segments_matched: int | None
    surprises: int | None
    ooms: int
    ooms_replayed: int
    unknown_frees: int
    total_bytes: int
    recorded: Peaks
    replayed: Peaks
    first_difference: str | None

    @property
    def exact(self) -> bool:
        """Whether everything that was compared is equal."""
        return (
            self.addresses_matched == self.allocations
            and self.segments_matched == self.segments
            and self.releases_matched == self.releases
            and self.final_segments_matched == self.final_segments
            and self.surprises == 0
            and self.ooms == self.ooms_replayed
            and self.recorded == self.replayed
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What a replay came to.

    Attributes:
        devices: one entry for each device that has events or segments.
        alloc_conf: settings of the replay.
        recorded_alloc_conf: settings of the recording.
        what_if: the settings differ, so that only the peaks can be compared.
        events: events of all devices.
        seconds: time the replay took.
    """

    devices: tuple[DeviceReplay, ...]
    alloc_conf: str
    recorded_alloc_conf: str
    what_if: bool
    events: int
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether every device was replayed exactly."""
        return all(device.exact for device in self.devices)
