"""The picture: peak memory to the right, extra time upwards, a colour for each kind of way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frontier_parts.peers import AUTO_SAC, COMPILER, EAGER, SELECTIVE, UNIFORM
from frontier_parts.rows import CUT_PLAN, PLAN
from vramfit.report.drawing import Area, Drawing, Label, Line, Shape, to_svg

_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 44, 52
_RADIUS = 4.0
_GRID, _TEXT = "#d9dde3", "#3b4350"
_COLOURS = {
    PLAN: "#0b6bcb",
    CUT_PLAN: "#6fb1f2",
    EAGER: "#3b4350",
    UNIFORM: "#c77700",
    SELECTIVE: "#2a8f4f",
    COMPILER: "#a03bbf",
    AUTO_SAC: "#cc3344",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One way that was measured.

    Attributes:
        kind: of the ways.
        peak: in MiB.
        extra: in percent of the plain program's time; negative for less.
        name: for readers who point at it.
    """

    kind: str
    peak: float
    extra: float
    name: str


def picture(title: str, dots: Sequence[Dot]) -> str:
    """The drawing as SVG."""
    right = _ceiling(max(dot.peak for dot in dots))
    top = _ceiling(max(10.0, *(dot.extra for dot in dots)))
    below = (
        top / 5 * math.ceil(-min(0.0, *(dot.extra for dot in dots)) / (top / 5))
    )  # whole lines of the grid

    def place(peak: float, extra: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * peak / right
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (extra + below) / (top + below)
        return round(x, 1), round(y, 1)

    shapes: list[Shape] = [Label(at=(_LEFT, 24), text=title, colour=_TEXT, size=14, bold=True)]
    for number in range(6):
        x, _ = place(right * number / 5, 0.0)
        shapes.append(Line(points=((x, _TOP), (x, _HEIGHT - _BOTTOM)), colour=_GRID))
        under = (x, _HEIGHT - _BOTTOM + 18)
        shapes.append(Label(at=under, text=f"{right * number / 5:g}", colour=_TEXT, anchor="middle"))
    for number in range(-round(5 * below / top), 6):
        _, y = place(0.0, top * number / 5)
        shapes.append(Line(points=((_LEFT, y), (_WIDTH - _RIGHT, y)), colour=_GRID))
        shapes.append(
            Label(at=(_LEFT - 8, y + 4), text=f"{top * number / 5:g} %", colour=_TEXT, anchor="end")
        )
    middle = ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12)
    shapes.append(
        Label(at=middle, text="peak above parameters and gradients, MiB", colour=_TEXT, anchor="middle")
    )
    plans = sorted((dot for dot in dots if dot.kind == PLAN), key=lambda dot: dot.peak)
    if len(plans) > 1:
        shapes.append(
            Line(points=[place(dot.peak, dot.extra) for dot in plans], colour=_COLOURS[PLAN], width=1.5)
        )
    # Plans last: they lie on top.
    kinds = [kind for kind in reversed(_COLOURS) if any(dot.kind == kind for dot in dots)]
    for number, kind in enumerate(kinds):
        for dot in (dot for dot in dots if dot.kind == kind):
            told = f"{dot.name}: {dot.peak:,.1f} MiB, {dot.extra:+.1f} %"
            shapes.append(Area(rings=[_disc(place(dot.peak, dot.extra))], colour=_COLOURS[kind], title=told))
        at = (_WIDTH - _RIGHT + 24.0, _TOP + 14.0 + 22 * number)
        shapes.append(Area(rings=[_disc(at)], colour=_COLOURS[kind]))
        shapes.append(Label(at=(at[0] + 12, at[1] + 4), text=kind, colour=_TEXT))
    told = "Peak memory against extra time, a point for each way that was measured; the compiler aside."
    return to_svg(Drawing(width=_WIDTH, height=_HEIGHT, title=title, description=told, shapes=shapes))


def _disc(centre: tuple[float, float]) -> list[tuple[float, float]]:
    angles = (2 * math.pi * number / 12 for number in range(12))
    return [
        (round(centre[0] + _RADIUS * math.cos(a), 1), round(centre[1] + _RADIUS * math.sin(a), 1))
        for a in angles
    ]


def _ceiling(value: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 times a power of ten that holds it."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value)
