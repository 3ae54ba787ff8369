"""The timeline as a drawing for a paper or a notebook: bytes by category, stacked, with the reserved line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vramfit.analysis import NAMES, DeviceTimeline, Timeline, timeline
from vramfit.analysis._lifetimes import Ints, Measure, trace_device
from vramfit.report.drawing import Area, Drawing, Label, Line, Point, Shape
from vramfit.trace import Category, MemoryTrace
from vramfit.units import GIB, KIB, MIB, TIB, counted, format_bytes

COLOURS = {
    Category.OTHER: "#8d8d8d",
    Category.PARAMETERS: "#0072b2",
    Category.GRADIENTS: "#56b4e9",
    Category.OPTIMIZER_STATE: "#cc79a7",
    Category.ACTIVATIONS: "#009e73",
    Category.INPUTS: "#f0e442",
    Category.TEMPORARIES: "#d55e00",
    Category.WORKSPACES: "#e69f00",
    Category.COMMUNICATION_BUFFERS: "#9b2c5a",
    Category.UNSHARDED_PARAMETERS: "#5a1fd0",
    Category.PREFETCH: "#9a9a33",
}
"""Okabe and Ito's palette, which people with any kind of colour blindness can tell apart, and for what only programs on
several cards hold wine, violet and olive."""

STACKING = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.GRADIENTS,
    Category.INPUTS,
    Category.WORKSPACES,
    Category.OTHER,
    Category.COMMUNICATION_BUFFERS,
    Category.UNSHARDED_PARAMETERS,
    Category.PREFETCH,
    Category.ACTIVATIONS,
    Category.TEMPORARIES,
)
"""From the bottom to the top: what stays lies below what comes and goes."""

_INK, _QUIET, _GRID, _LIMIT = "#16191d", "#565d66", "#d9dde2", "#b3261e"
_POINTS = 700
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 58, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where on the drawing events and bytes lie."""

    width: int
    height: int
    events: int
    most: float

    def x(self, event: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * event / max(1, self.events)

    def y(self, amount: float) -> float:
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * amount / self.most


def draw_timeline(
    trace: MemoryTrace,
    device: int = 0,
    *,
    title: str = "",
    width: int = 860,
    height: int = 380,
) -> Drawing:
    """Draw the memory of one device over the events of a trace.

    Args:
        trace: what happened. Of long ones each point of the drawing is the fullest moment of a stretch of events.
        title: what to write above; by default the device and its peaks.
        width, height: of the drawing, in units of 1/96 inch.
    """
    over = timeline(trace, device, points=_POINTS)
    found = DeviceTimeline.of(trace, device).curves
    allocated, reserved = found.peak(Measure.ALLOCATED), found.peak(Measure.RESERVED)
    described = trace_device(trace, device)
    limit = max(0, described.total_bytes - described.context_bytes) if described else 0
    most = max(allocated, reserved, 1)
    if limit and limit < 1.5 * most:
        most = max(most, limit)
    frame = _Frame(width=width, height=height, events=len(trace), most=most * 1.06)
    name = f"GPU {device}" + (f" ({described.name})" if described and described.name else "")
    peaks = f"peak allocated {format_bytes(allocated)}, peak reserved {format_bytes(reserved)}"
    shapes: list[Shape] = [*_grid(frame), *_areas(frame, over), *_reserved(frame, over)]
    if limit and limit <= most:
        shapes += _limit_line(frame, limit)
    shapes += [*_axes(frame), *_legend(over)]
    shapes.append(Label(at=(_LEFT, 20), text=title or f"{name}: {peaks}", colour=_INK, size=14, bold=True))
    return Drawing(
        width=width,
        height=height,
        title=title or f"Memory of {name} over {counted(len(trace), 'event')}",
        description=f"{name}: {peaks}. {_categories_at_peak(over)}",
        shapes=shapes,
    )


def _categories_at_peak(over: Timeline) -> str:
    if not len(over.rows):
        return "There are no events."
    column = int(np.argmax(over.allocated))
    held = [(int(over.categories[kind, column]), NAMES[kind]) for kind in STACKING]
    said = ", ".join(
        f"{name} {format_bytes(amount)}" for amount, name in sorted(held, reverse=True) if amount
    )
    return f"At the peak: {said}." if said else "Nothing is allocated."


def _steps(
    frame: _Frame, rows: Sequence[int], amounts: Sequence[int], last: int | None = None
) -> list[Point]:
    """A line that holds each amount until the next event, and the last one until ``last`` or the end."""
    points: list[Point] = []
    ends = [*rows[1:], frame.events if last is None else last]
    for row, end, amount in zip(rows, ends, amounts, strict=True):
        height = frame.y(amount)
        points += [(frame.x(row), height), (frame.x(end), height)]
    return points


def _areas(frame: _Frame, over: Timeline) -> Iterator[Area]:
    rows = over.rows.tolist()
    if not rows:
        return
    below = np.zeros(len(rows), dtype=np.int64)
    for kind in STACKING:
        amounts = over.categories[kind]
        if not amounts.any():
            continue
        above = below + amounts
        rings = []
        # Where there is nothing of a category its polygon would still be drawn, as a hair.
        for start, end in _stretches(amounts):
            part, last = rows[start:end], (rows[end] if end < len(rows) else frame.events)
            upper = _steps(frame, part, above[start:end].tolist(), last)
            lower = _steps(frame, part, below[start:end].tolist(), last)
            rings.append([*upper, *reversed(lower)])
        title = f"{NAMES[kind]}: at most {format_bytes(int(amounts.max()))}"
        yield Area(rings=rings, colour=COLOURS[kind], title=title)
        below = above


def _stretches(amounts: Ints) -> list[tuple[int, int]]:
    """The runs of positive amounts: the first index and that after the last."""
    turns = np.diff(np.concatenate([[False], amounts > 0, [False]]).astype(np.int8))
    return list(zip(np.flatnonzero(turns == 1).tolist(), np.flatnonzero(turns == -1).tolist(), strict=True))


def _reserved(frame: _Frame, over: Timeline) -> Iterator[Line]:
    if len(over.rows) and over.reserved.any():
        points = _steps(frame, over.rows.tolist(), over.reserved.tolist())
        yield Line(points=points, colour=_INK, width=1.5)


def _limit_line(frame: _Frame, limit: int) -> list[Shape]:
    height = frame.y(limit)
    ends = [(float(_LEFT), height), (float(frame.width - _RIGHT), height)]
    text = f"the card less its context: {format_bytes(limit)}"
    return [
        Line(points=ends, colour=_LIMIT, width=1.2, dash=6),
        Label(at=(frame.width - _RIGHT - 4, height - 4), text=text, colour=_LIMIT, size=11, anchor="end"),
    ]


def _grid(frame: _Frame) -> Iterator[Shape]:
    step = 1
    while frame.most / step > 6:
        step *= 2
    amount = 0
    while amount <= frame.most:
        height = frame.y(amount)
        ends = [(float(_LEFT), height), (float(frame.width - _RIGHT), height)]
        yield Line(points=ends, colour=_GRID)
        yield Label(at=(_LEFT - 6, height + 4), text=_tick(amount), colour=_QUIET, anchor="end")
        amount += step


def _tick(amount: int) -> str:
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if amount >= factor:
            return f"{amount / factor:g} {name}"
    return f"{amount} B" if amount else "0"


def _axes(frame: _Frame) -> Iterator[Shape]:
    floor = frame.y(0)
    yield Line(points=[(float(_LEFT), floor), (float(frame.width - _RIGHT), floor)], colour=_QUIET)
    for part in range(5):
        event = round(frame.events * part / 4)
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        at = (frame.x(event), frame.height - _BOTTOM + 18)
        yield Label(at=at, text=f"{event:,}", colour=_QUIET, anchor=anchor)
    middle = (_LEFT + frame.width - _RIGHT) / 2
    yield Label(at=(middle, frame.height - 6), text="events", colour=_QUIET, anchor="middle")


def _legend(over: Timeline) -> Iterator[Shape]:
    x, y = float(_LEFT), 40.0
    for kind in reversed(STACKING):
        if not over.categories[kind].any():
            continue
        square = [(x, y - 9), (x + 10, y - 9), (x + 10, y + 1), (x, y + 1)]
        yield Area(rings=[square], colour=COLOURS[kind])
        yield Label(at=(x + 14, y), text=NAMES[kind], colour=_INK)
        x += 26 + 6.4 * len(NAMES[kind])
    yield Line(points=[(x, y - 4), (x + 14, y - 4)], colour=_INK, width=1.5)
    yield Label(at=(x + 18, y), text="reserved", colour=_INK)
