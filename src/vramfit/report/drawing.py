"""Line drawings as values: areas, lines and labels, written as SVG or painted as PNG. The same shapes give the same
file, byte for byte as SVG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from vramfit.errors import EnvironmentUnfitError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Point: TypeAlias = tuple[float, float]

_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_PNG_SCALE = 2
"""Pixels of a PNG for each unit of the drawing: sharp on paper at half its size."""
_PNG_DPI = 192


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Filled polygons of one meaning.

    Attributes:
        colour: ``#rrggbb``.
        title: what it is, for readers who point at it.
    """

    rings: Sequence[Sequence[Point]]
    colour: str
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line through points; ``dash`` is the length of its strokes and gaps, 0 for an unbroken one."""

    points: Sequence[Point]
    colour: str
    width: float = 1.0
    dash: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A line of text; ``anchor`` is ``start``, ``middle`` or ``end``: what of it lies at ``at``."""

    at: Point
    text: str
    colour: str
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False


Shape: TypeAlias = Area | Line | Label


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Shapes on a white ground, painted one over the other.

    Attributes:
        width, height: size in units of 1/96 inch.
        description: what it shows, for readers who do not see it.
    """

    width: int
    height: int
    title: str
    description: str
    shapes: Sequence[Shape]


def to_svg(drawing: Drawing) -> str:
    """The drawing as an SVG document without scripts, styles or anything outside of it."""
    body = "\n".join(_SVG[type(shape)](shape) for shape in drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" role="img" aria-label="{escape(drawing.title)}" '
        f'font-family="{escape(_FONT)}">\n'
        f"<title>{escape(drawing.title)}</title>\n<desc>{escape(drawing.description)}</desc>\n"
        f'<rect width="{drawing.width}" height="{drawing.height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _number(value: float) -> str:
    """At most two digits after the point, and none that say nothing."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: Sequence[Point]) -> str:
    """Straight lines through points; level and plumb ones, as of steps, are written short."""
    parts = []
    before: tuple[str, str] | None = None
    for x, y in points:
        here = (_number(x), _number(y))
        if before is None:
            parts.append(f"M{here[0]} {here[1]}")
        elif here == before:
            continue
        elif here[1] == before[1]:
            parts.append(f"H{here[0]}")
        elif here[0] == before[0]:
            parts.append(f"V{here[1]}")
        else:
            parts.append(f"L{here[0]} {here[1]}")
        before = here
    return "".join(parts)


def _svg_area(area: Area) -> str:
    title = f"<title>{escape(area.title)}</title>" if area.title else ""
    rings = "".join(f"{_path(ring)}Z" for ring in area.rings)
    return f'<path d="{rings}" fill="{area.colour}">{title}</path>'


def _svg_line(line: Line) -> str:
    dash = f' stroke-dasharray="{_number(line.dash)}"' if line.dash else ""
    return (
        f'<path d="{_path(line.points)}" fill="none" stroke="{line.colour}" '
        f'stroke-width="{_number(line.width)}"{dash}/>'
    )


def _svg_label(label: Label) -> str:
    anchor = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    weight = ' font-weight="bold"' if label.bold else ""
    return (
        f'<text x="{_number(label.at[0])}" y="{_number(label.at[1])}" font-size="{_number(label.size)}" '
        f'fill="{label.colour}"{anchor}{weight}>{escape(label.text)}</text>'
    )


_SVG: dict[type, Any] = {Area: _svg_area, Line: _svg_line, Label: _svg_label}


def to_png(drawing: Drawing) -> bytes:
    """The drawing as a PNG image.

    Raises:
        EnvironmentUnfitError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise EnvironmentUnfitError(
            "writing a PNG needs Pillow, which is not installed",
            "Install it: pip install 'vramfit[pictures]'; an SVG needs nothing",
        ) from None
    image = Image.new("RGB", (drawing.width * _PNG_SCALE, drawing.height * _PNG_SCALE), "#ffffff")
    brush = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        _PNG[type(shape)](brush, shape)
    stream = io.BytesIO()
    image.save(stream, format="PNG", dpi=(_PNG_DPI, _PNG_DPI), optimize=True)
    return stream.getvalue()


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(x * _PNG_SCALE, y * _PNG_SCALE) for x, y in points]


def _png_area(brush: ImageDraw, area: Area) -> None:
    for ring in area.rings:
        brush.polygon(_scaled(ring), fill=area.colour)


def _png_line(brush: ImageDraw, line: Line) -> None:
    width = max(1, round(line.width * _PNG_SCALE))
    points = _scaled(line.points)
    if not line.dash:
        brush.line(points, fill=line.colour, width=width)
        return
    for begin, end in itertools.pairwise(points):
        for stroke in _strokes(begin, end, line.dash * _PNG_SCALE):
            brush.line(stroke, fill=line.colour, width=width)


def _strokes(begin: Point, end: Point, dash: float) -> list[list[Point]]:
    """A straight line broken into strokes as long as the gaps between them."""
    (x0, y0), (x1, y1) = begin, end
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)

    def at(along: float) -> Point:
        share = min(along, length) / length
        return (x0 + (x1 - x0) * share, y0 + (y1 - y0) * share)

    count = int(length // (2 * dash)) + 1
    return [[at(2 * dash * number), at(2 * dash * number + dash)] for number in range(count)]


def _png_label(brush: ImageDraw, label: Label) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(label.size * _PNG_SCALE)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    x, y = label.at
    # The built-in font has no bold face: twice, a pixel apart, looks like one.
    for shift in (0, 1) if label.bold else (0,):
        place = (x * _PNG_SCALE + shift, y * _PNG_SCALE)
        brush.text(place, label.text, fill=label.colour, font=font, anchor=anchor)


_PNG: dict[type, Any] = {Area: _png_area, Line: _png_line, Label: _png_label}
