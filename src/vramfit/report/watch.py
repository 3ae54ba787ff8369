"""A watch on a terminal: a panel that is drawn anew, or lines where nothing can be drawn."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from vramfit.units import counted, format_bytes
from vramfit.watching.outlooks import device_name
from vramfit.watching.watch_reading import DeviceUse, WatchReading
from vramfit.watching.watch_text import (
    card_text,
    categories_text,
    duration,
    host_text,
    line_of,
    neighbours_text,
    outlook_text,
    summary_of,
)

_BAR = 32
_STYLES = {"rising": "yellow", "falling": "green"}


def watch_panel(reading: WatchReading, *, notes: tuple[str, ...] = ()) -> RenderableType:
    """What is known now.

    Args:
        notes: lines about what cannot be seen, and why.
    """
    return Panel(
        Group(*_rows(reading), *(Text(note, style="dim") for note in notes)),
        title=f"vramfit watch {reading.pid}  {duration(reading.elapsed)}",
        title_align="left",
    )


def _rows(reading: WatchReading) -> Iterator[RenderableType]:
    for program in reading.programs:
        steps = f"  {counted(program.steps, 'step')}" if program.steps else ""
        yield Text(f"process {program.pid}{steps}", style="bold")
        for device in program.devices:
            yield Text.assemble(f"  {device_name(device)}  ", _bar(device), f"  {_figures(device)}")
            if device.categories:
                yield Text(f"    {categories_text(device)}", style="dim")
    for card in reading.cards:
        yield Text(card_text(card))
        for text in neighbours_text(card):
            yield Text(f"  beside it {text}", style="dim")
    if reading.host is not None:
        yield Text(host_text(reading.host))
    for outlook in reading.outlooks:
        style = "bold red" if outlook.seconds is not None and outlook.seconds < 600 else ""
        yield Text(outlook_text(outlook), style=style or _STYLES.get(outlook.trend, "dim"))


def _bar(device: DeviceUse) -> Text:
    """Allocated, cached and other processes' parts of a device; what is free stays light."""
    total = max(1, device.total)
    allocated = round(_BAR * device.allocated / total)
    cached = round(_BAR * device.reserved / total) - allocated
    outside = round(_BAR * (device.total - device.free) / total) - allocated - cached
    free = _BAR - allocated - max(0, cached) - max(0, outside)
    return Text.assemble(
        ("█" * allocated, "cyan"),
        ("▓" * max(0, cached), "blue"),
        ("▒" * max(0, outside), "magenta"),
        ("░" * free, "dim"),
    )


def _figures(device: DeviceUse) -> str:
    return (
        f"{format_bytes(device.allocated)} allocated, {format_bytes(device.reserved)} reserved "
        f"of {format_bytes(device.total)}  {device.name}"
    )


class LivePanel:
    """Draws each reading in place of the one before, in a terminal.

    Args:
        console: a terminal.
        notes: lines about what cannot be seen.
    """

    def __init__(self, console: Console, notes: tuple[str, ...] = ()) -> None:
        self._notes = notes
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def take(self, reading: WatchReading) -> None:
        """Draw it."""
        self._live.update(watch_panel(reading, notes=self._notes), refresh=True)

    def print_above(self, line: str) -> None:
        """Print a line of the program's above the panel."""
        self._live.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Leave the last one standing."""
        self._live.stop()


class PlainLines:
    """Prints a line every so often, and a summary at the end.

    Args:
        console: where it is no terminal.
        every: seconds between two lines.
    """

    def __init__(self, console: Console, *, every: float = 10.0) -> None:
        self._console, self._every = console, every
        self._next = 0.0
        self._last: WatchReading | None = None

    def take(self, reading: WatchReading) -> None:
        """Print it, if it is time."""
        self._last = reading
        if reading.elapsed >= self._next:
            self._next = reading.elapsed + self._every
            self._console.print(Text(line_of(reading)), soft_wrap=True)

    def close(self) -> None:
        """Print the summary."""
        if self._last is not None:
            for line in summary_of(self._last):
                self._console.print(Text(line), soft_wrap=True)
