"""What is known of a watched program at one moment: plain values, in bytes, watts and degrees Celsius."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """What the allocator of one process holds of one device.

    Attributes:
        index: of the device, as the process numbers them.
        name: of the card.
        kind: ``card``, ``virtual`` (a virtual GPU) or ``metered`` (CPU tensors, counted as a card would).
        allocated: in tensors.
        reserved: held from the device, the cache included.
        peak: the most that tensors held since the start, or since the program last reset it.
        free: for anyone.
        total: of the device.
        after_step: allocated when the last step of an optimizer ended; None before the first.
        step_peak: `peak` at that moment.
        split: free bytes in segments that hold something else too, which cannot be given back (torch's
            ``inactive_split_bytes``); None where it is not told.
        step_split: the same when the last step ended.
        categories: allocated bytes by what they are for.
    """

    index: int
    name: str
    kind: str
    allocated: int
    reserved: int
    peak: int
    free: int
    total: int
    after_step: int | None = None
    step_peak: int | None = None
    split: int | None = None
    step_split: int | None = None
    categories: dict[str, int] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """The most that this process' tensors can hold, were all that is free in one piece."""
        return self.free + self.reserved

    @property
    def holes(self) -> int:
        """What is reserved and of no use to a step that takes as much as the largest did: at most so many bytes."""
        unused = max(0, self.reserved - self.peak)
        known = [one for one in (self.step_split, self.split) if one is not None]
        return min(unused, known[0]) if known else unused


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramReading:
    """What one process says of itself.

    Attributes:
        time: of the look, in seconds since the epoch.
        pid: of the process.
        steps: of its optimizers that have ended.
        devices: those that it uses.
    """

    time: float
    pid: int
    steps: int
    devices: tuple[DeviceUse, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUse:
    """The host's memory.

    Attributes:
        resident: of the watched process and its children; pages that they share count in each.
        processes: how many these are.
        available: what the system could still give without swapping.
        total: of the machine.
        limit: of the control group, None without one.
        limit_used: what the group holds of that, without file pages that can be dropped.
    """

    resident: int
    processes: int
    available: int
    total: int
    limit: int | None = None
    limit_used: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardNeighbour:
    """Another process on a card.

    Attributes:
        pid: of the process.
        name: of its program; empty where it is hidden.
        used: bytes; None where the driver does not tell.
    """

    pid: int
    name: str
    used: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """A card as the driver sees it.

    Attributes:
        index: as the driver numbers them.
        name: of the card.
        total, used, free: bytes.
        own: bytes of the watched process and its children, context included; None where the driver hides processes.
        neighbours: other processes on it.
        temperature: in degrees Celsius, or None.
        watts: that it draws now, or None.
        watts_limit: that it may draw, or None.
    """

    index: int
    name: str
    total: int
    used: int
    free: int
    own: int | None
    neighbours: tuple[CardNeighbour, ...]
    temperature: int | None = None
    watts: float | None = None
    watts_limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where a figure is heading.

    Attributes:
        what: the figure, such as ``allocated cuda:0``.
        trend: ``rising``, ``falling``, ``none``, or ``unknown`` while there are too few looks.
        per_second: bytes, with the bounds of its 95 % interval.
        per_step: bytes at each step of the optimizer; None without steps.
        seconds: until the limit is reached, with bounds; None where it does not rise. The upper bound may be None.
        limit: bytes.
    """

    what: str
    trend: str
    per_second: float = 0.0
    per_second_low: float = 0.0
    per_second_high: float = 0.0
    per_step: float | None = None
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchReading:
    """All that is known of a watched program at one moment.

    Attributes:
        time: in seconds since the epoch.
        elapsed: seconds since the watch began.
        pid: of the process that is watched.
        programs: what its processes say of themselves.
        cards: as the driver sees them.
        host: memory of the host; None once the process has ended.
        outlooks: where figures are heading.
    """

    time: float
    elapsed: float
    pid: int
    programs: tuple[ProgramReading, ...] = ()
    cards: tuple[CardState, ...] = ()
    host: HostUse | None = None
    outlooks: tuple[Outlook, ...] = ()

    @property
    def share(self) -> float:
        """The fullest device's or host's share in use, from 0 to 1: what thresholds look at."""
        shares = [0.0]
        for program in self.programs:
            shares += [one.allocated / one.limit for one in program.devices if one.limit]
        shares += [card.used / card.total for card in self.cards if card.total]
        if self.host is not None and self.host.limit and self.host.limit_used is not None:
            shares.append(self.host.limit_used / self.host.limit)
        elif self.host is not None and self.host.total:
            shares.append(1 - self.host.available / self.host.total)
        return max(shares)
