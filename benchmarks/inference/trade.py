"""Peak memory against time for one network: from the whole volume to the smallest tile, as a picture.

    python benchmarks/inference/trade.py [--network NAME] [--card NAME] [--write docs/inference.svg]

A point is a tile with a number of them together; bytes are what torch reserves on the virtual card, the model included,
and seconds are simulated on it. The line joins those that no other beats in both.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_networks import NETWORKS
from tile_budgets import Bench

from vramfit.report.drawing import Area, Drawing, Label, Line, Shape, to_svg
from vramfit.units import GIB, MIB
from vramfit.writing import write_text

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 30, 44, 52
_GRID, _TEXT, _POINT, _BEST = "#d9dde3", "#3b4350", "#6fb1f2", "#0b6bcb"

_DOUBLES = [2.0**power for power in range(20)]
"""Marks in MiB."""

_DECADES = [step * 10.0**power for power in range(-5, 4) for step in (1, 2, 5)]
"""Marks in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A tile that was run.

    Attributes:
        words: the tile.
        size: bytes reserved.
        seconds: for the whole input.
    """

    words: str
    size: int
    seconds: float


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both, from the smallest on."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.size, one.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return found


def picture(title: str, points: Sequence[Point]) -> str:
    """The drawing as SVG; both axes are logarithmic."""
    sizes, times = [one.size / MIB for one in points], [one.seconds for one in points]
    x_of, x_marks = _axis(sizes, _LEFT, _WIDTH - _RIGHT, _DOUBLES)
    y_of, y_marks = _axis(times, _HEIGHT - _BOTTOM, _TOP, _DECADES)
    shapes: list[Shape] = [Label(at=(_LEFT, 24), text=title, colour=_TEXT, size=14, bold=True)]
    for mark in x_marks:
        shapes.append(Line(points=((x_of(mark), _TOP), (x_of(mark), _HEIGHT - _BOTTOM)), colour=_GRID))
        text = f"{mark * MIB / GIB:g} GiB" if mark * MIB >= GIB else f"{mark:g} MiB"
        shapes.append(
            Label(at=(x_of(mark), _HEIGHT - _BOTTOM + 18), text=text, colour=_TEXT, anchor="middle")
        )
    for mark in y_marks:
        shapes.append(Line(points=((_LEFT, y_of(mark)), (_WIDTH - _RIGHT, y_of(mark))), colour=_GRID))
        text = f"{mark:g} s" if mark >= 1 else f"{1000 * mark:g} ms"
        shapes.append(Label(at=(_LEFT - 8, y_of(mark) + 4), text=text, colour=_TEXT, anchor="end"))
    middle = ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12)
    shapes.append(Label(at=middle, text="reserved at the peak", colour=_TEXT, anchor="middle"))
    best = unbeaten(points)
    if len(best) > 1:
        line = [(x_of(one.size / MIB), y_of(one.seconds)) for one in best]
        shapes.append(Line(points=line, colour=_BEST, width=1.5))
    for one in points:
        told = f"{one.words}: {one.size / MIB:,.0f} MiB, {1000 * one.seconds:,.1f} ms"
        colour = _BEST if one in best else _POINT
        at = (x_of(one.size / MIB), y_of(one.seconds))
        shapes.append(Area(rings=[_disc(at)], colour=colour, title=told))
    told = "Peak memory against time, a point for each tile that was run."
    return to_svg(Drawing(width=_WIDTH, height=_HEIGHT, title=title, description=told, shapes=shapes))


def _axis(
    values: Sequence[float], begin: float, end: float, marks: Iterable[float]
) -> tuple[Callable[[float], float], list[float]]:
    """Where values lie between two places, on a logarithmic axis, and the marks that lie on it."""
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = low - 0.05 * (high - low) - 0.01, high + 0.05 * (high - low) + 0.01

    def place(value: float) -> float:
        return round(begin + (end - begin) * (math.log10(value) - low) / (high - low), 1)

    return place, [mark for mark in marks if low <= math.log10(mark) <= high]


def _disc(centre: tuple[float, float]) -> list[tuple[float, float]]:
    angles = (2 * math.pi * number / 12 for number in range(12))
    return [
        (round(centre[0] + 3.5 * math.cos(a), 1), round(centre[1] + 3.5 * math.sin(a), 1)) for a in angles
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the points, and draw them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", default="U-Net, volumes", choices=sorted(NETWORKS))
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the picture")
    options = parser.parse_args(arguments)
    bench = Bench(NETWORKS[options.network], options.card)
    points = []
    for option in [bench.options[0], *bench.brute()]:
        cost = bench.cost(option)
        points.append(Point(words=option.words, size=cost.total_bytes, seconds=cost.seconds))
    for one in unbeaten(points):
        print(f"{one.words}: {one.size / MIB:,.0f} MiB, {1000 * one.seconds:,.1f} ms")
    if options.write:
        shape = " x ".join(map(str, NETWORKS[options.network].shape))
        title = f"{options.network}, {shape}, on an {options.card}: the whole, and tiles"
        write_text(options.write, picture(title, points) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
