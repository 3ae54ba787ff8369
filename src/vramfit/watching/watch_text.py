"""A reading as people read it: one line for a log, and a summary with all that is known."""

from __future__ import annotations

import time
from collections.abc import Iterator

from vramfit.units import counted, format_bytes
from vramfit.watching.outlooks import device_name
from vramfit.watching.watch_reading import CardState, DeviceUse, HostUse, Outlook, WatchReading


def line_of(reading: WatchReading) -> str:
    """A reading in one line: time, what is held of each device and of the host, and what runs out soonest."""
    parts = [_clock(reading.time)]
    for program in reading.programs:
        for device in program.devices:
            held = f"{format_bytes(device.allocated)} allocated, {format_bytes(device.reserved)} reserved"
            parts += [f"{device_name(device)} {held} of {format_bytes(device.total)}"]
    if not reading.programs:
        parts += [f"card {card.index} {_card_use(card)}" for card in reading.cards]
    if reading.host is not None:
        parts.append(f"host {format_bytes(reading.host.resident)}")
    soonest = soonest_of(reading)
    if soonest is not None:
        parts.append(outlook_text(soonest))
    elif any(one.trend != "unknown" for one in reading.outlooks):
        parts.append("no trend" if all(one.trend != "falling" for one in reading.outlooks) else "falling")
    return "  ".join(parts)


def summary_of(reading: WatchReading) -> Iterator[str]:
    """A reading in some lines, as torch.cuda.memory_summary has them for one device."""
    yield f"{_clock(reading.time)} summary of process {reading.pid} after {duration(reading.elapsed)}"
    for program in reading.programs:
        steps = "" if not program.steps else f", {counted(program.steps, 'step')}"
        yield f"  process {program.pid}{steps}"
        for device in program.devices:
            yield f"    {device_text(device)}"
            if device.categories:
                yield f"      {categories_text(device)}"
    for card in reading.cards:
        yield f"  {card_text(card)}"
        yield from (f"    beside it {text}" for text in neighbours_text(card))
    if reading.host is not None:
        yield f"  {host_text(reading.host)}"
    for outlook in reading.outlooks:
        yield f"  {outlook_text(outlook)}"


def device_text(device: DeviceUse) -> str:
    """What the allocator holds of a device."""
    kind = {"virtual": "virtual ", "metered": "metered "}.get(device.kind, "")
    return (
        f"{device_name(device)} ({kind}{device.name}): {format_bytes(device.allocated)} allocated, "
        f"{format_bytes(device.reserved)} reserved, peak {format_bytes(device.peak)}, "
        f"{format_bytes(device.free)} of {format_bytes(device.total)} free"
    )


def categories_text(device: DeviceUse) -> str:
    """The categories of a device, the largest first."""
    ranked = sorted(device.categories.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {format_bytes(held)}" for name, held in ranked if held)


def card_text(card: CardState) -> str:
    """A card as the driver sees it."""
    parts = [_card_use(card)]
    if card.own is not None:
        parts.append(f"{format_bytes(card.own)} of the process")
    if card.temperature is not None:
        parts.append(f"{card.temperature} °C")
    if card.watts is not None:
        most = "" if card.watts_limit is None else f" of {card.watts_limit:.0f}"
        parts.append(f"{card.watts:.0f}{most} W")
    return f"card {card.index} ({card.name}): {', '.join(parts)}"


def neighbours_text(card: CardState) -> Iterator[str]:
    """Other processes of a card, the largest first."""
    for other in sorted(card.neighbours, key=lambda one: -(one.used or 0)):
        used = "bytes unknown" if other.used is None else format_bytes(other.used)
        yield f"{used} of process {other.pid}{f' ({other.name})' if other.name else ''}"


def host_text(host: HostUse) -> str:
    """The host's memory."""
    text = (
        f"host: {format_bytes(host.resident)} resident in {_processes(host.processes)}, "
        f"{format_bytes(host.available)} of {format_bytes(host.total)} available"
    )
    if host.limit is not None and host.limit_used is not None:
        text += f"; control group {format_bytes(host.limit_used)} of {format_bytes(host.limit)}"
    return text


def outlook_text(outlook: Outlook) -> str:
    """Where a figure is heading."""
    if outlook.trend == "unknown":
        return f"{outlook.what}: too few looks for a trend"
    if outlook.trend == "none":
        return f"{outlook.what}: no trend"
    sign = "+" if outlook.trend == "rising" else ""
    text = f"{outlook.what}: {outlook.trend} {sign}{format_bytes(60 * outlook.per_second)}/min"
    if outlook.per_step is not None:
        text += f" ({format_bytes(outlook.per_step)} a step)"
    if outlook.seconds is None or outlook.seconds_low is None:
        return text
    high = "?" if outlook.seconds_high is None else duration(outlook.seconds_high)
    return f"{text}, full in {duration(outlook.seconds)} ({duration(outlook.seconds_low)} to {high})"


def soonest_of(reading: WatchReading) -> Outlook | None:
    """The figure that reaches its limit first; None where none rises."""
    rising = [one for one in reading.outlooks if one.seconds is not None]
    return min(rising, key=lambda one: one.seconds or 0.0, default=None)


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _card_use(card: CardState) -> str:
    return f"{format_bytes(card.used)} of {format_bytes(card.total)} used"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
