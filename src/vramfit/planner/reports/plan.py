"""A plan: in the terminal, as JSON, and the frontier as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any
from xml.sax.saxutils import escape

from rich.text import Text

from vramfit.masking import mask_arguments
from vramfit.planner.plan_file import OtherWay, PlanFigures
from vramfit.planner.plans import Plan
from vramfit.planner.search import FrontierPoint
from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import seconds
from vramfit.techniques import setting_to_plain
from vramfit.units import counted, format_bytes

PLAN_SCHEMA = "vramfit.plan/2"

_SHOWN = 8
"""Ways that are not the plan and are shown in the terminal; files hold all."""


@printed_as_lines(Plan)
def _lines(plan: Plan, frontier: Sequence[FrontierPoint] = (), *, width: int) -> Iterator[Text]:
    """The verdict, the techniques with what each does, and the frontier."""
    for sentence in _head(plan):
        yield from broken(sentence, width)
    yield Text()
    yield from table(
        ("", "total", "reserved", "allocated", "on the host", "step (est.)"), _figures(plan), width
    )
    if plan.entries:
        yield Text()
        yield from table(*_techniques(plan), width)
        yield Text()
        for sentence in _promises(plan):
            yield from broken(sentence, width)
    for note in plan.notes:
        yield from broken(Text(note, style="yellow"), width)
    yield from _others("tried, and not the plan", plan.rejected, width)
    yield from _others("with more freedom", plan.freedom, width)
    if frontier:
        yield Text()
        yield from table(("frontier (predicted)", "total", "step"), _points(frontier), width)
    yield Text()
    yield from broken(Text(_footer(plan), style="dim"), width)


def _head(plan: Plan) -> Iterator[Text]:
    aim = plan.aim
    at = " ".join(mask_arguments(aim.program))
    at = at or "at " + ", ".join(f"{name} {value:,}" for name, value in aim.sizes.items())
    margin = f" less {format_bytes(aim.margin_bytes)} margin" if aim.margin_bytes else ""
    of = f"{format_bytes(plan.after.total_bytes)} of {format_bytes(aim.budget_bytes)}{margin}"
    if plan.fits:
        free = format_bytes(plan.free_bytes)
        yield Text.assemble(("✓ fits ", "bold green"), (aim.device, "bold"), f" {at}: {of}, {free} free")
    else:
        yield Text.assemble(("✗ does not fit ", "bold red"), (aim.device, "bold"), f" {at}: at best {of}")
    if not plan.entries:
        if plan.fits:
            yield Text("  Nothing has to be changed.")
        return
    saved = plan.before.total_bytes - plan.after.total_bytes
    yield Text(
        f"  {format_bytes(saved)} less than without the plan; results: {_results(plan)}{_slower(plan)}"
    )
    if retries := plan.after.retries:
        yield Text(
            f"  In each step the allocator empties its cache {counted(retries, 'time')}, which takes "
            f"{seconds(plan.after.retry_seconds)} (estimated)",
            style="yellow",
        )


def _results(plan: Plan) -> str:
    """What the plan changes in the results: a promise only where it was compared."""
    if plan.compared == "":
        return f"{plan.numerics.value} by construction, not compared"
    return plan.numerics.value + (f", compared with {plan.compared}" if plan.compared else "")


def _slower(plan: Plan) -> str:
    before, after = plan.before.step_seconds, plan.after.step_seconds
    if not before or not after:
        return ""
    change = after / before - 1
    if abs(change) < 0.0005:
        return "; the step takes as long (estimated)"
    return f"; the step takes {abs(change):.1%} {'longer' if change > 0 else 'less'} (estimated)"


def _figures(plan: Plan) -> list[list[Text]]:
    return [_row("before", plan.before), _row("after", plan.after)]


def _row(name: str, figures: PlanFigures) -> list[Text]:
    return [
        Text(name),
        Text(format_bytes(figures.total_bytes)),
        Text(format_bytes(figures.peak_reserved_bytes)),
        Text(format_bytes(figures.peak_allocated_bytes)),
        Text(format_bytes(figures.host_bytes) if figures.host_bytes else "0"),
        Text(seconds(figures.step_seconds) if figures.step_seconds else ""),
    ]


def _techniques(plan: Plan) -> tuple[tuple[str, ...], list[list[Text]]]:
    """Headings and rows; what techniques save and cost only where any of it is known."""
    words = [[Text(entry.choice.words)] for entry in plan.entries]
    figures = [
        [
            Text("" if entry.saves_bytes is None else format_bytes(entry.saves_bytes)),
            Text("" if entry.costs_seconds is None else _signed_seconds(entry.costs_seconds)),
        ]
        for entry in plan.entries
    ]
    promises = [[Text(_promised(plan, entry.choice.promise.numerics.value))] for entry in plan.entries]
    if any(text.plain for row in figures for text in row):
        parts = zip(words, figures, promises, strict=True)
        return ("technique", "saves", "step", "promise"), [[*one, *two, *three] for one, two, three in parts]
    return ("technique", "promise"), [[*one, *two] for one, two in zip(words, promises, strict=True)]


def _promised(plan: Plan, level: str) -> str:
    """A technique's promise; in brackets where it was not compared."""
    return f"({level})" if plan.compared == "" else level


def _signed_seconds(value: float) -> str:
    if not value:
        return ""
    return f"{'+' if value > 0 else '-'}{seconds(abs(value))}"


def _promises(plan: Plan) -> Iterator[Text]:
    for choice in plan.choices:
        if note := choice.promise.note:
            yield Text(f"{choice.name}: {note}.", style="dim")


def _others(title: str, ways: Sequence[OtherWay], width: int) -> Iterator[Text]:
    """What is not the plan: recipes first, whose names people know, then what else was run."""
    if not ways:
        return
    shown = sorted((way for way in ways if not way.predicted), key=lambda way: way.why.startswith("not run"))
    shown = shown[:_SHOWN]
    if shown:
        yield Text()
        rows = [
            [
                Text(way.name),
                Text(format_bytes(way.total_bytes) if way.total_bytes else ""),
                Text(seconds(way.step_seconds) if way.step_seconds else ""),
            ]
            for way in shown
        ]
        yield from table(
            (title, "total", "step"), rows, width, notes=[Text(way.why, style="dim") for way in shown]
        )
    if rest := len(ways) - len(shown):
        yield from broken(Text(f"{counted(rest, 'more combination')} in the plan's file", style="dim"), width)


def _points(frontier: Sequence[FrontierPoint]) -> list[list[Text]]:
    return [
        [
            Text(", ".join(point.techniques) or "nothing"),
            Text(format_bytes(point.total_bytes)),
            Text(seconds(point.step_seconds)),
        ]
        for point in frontier
    ]


def _footer(plan: Plan) -> str:
    solved = plan.solved
    gap = "" if solved.gap is None else f", gap {solved.gap:.2%}"
    solver = f"; solver: {solved.status}{gap}, {seconds(solved.seconds)}" if solved.status else ""
    more = f" and {solved.remembered} of an earlier search" if solved.remembered else ""
    return f"{solved.runs} runs{more} in {seconds(solved.search_seconds)}{solver}; torch {plan.aim.torch}"


@json_values.register(Plan)
def _json_values(plan: Plan, frontier: Sequence[FrontierPoint] = ()) -> dict[str, Any]:
    """The plan as plain values; docs/json.md describes them."""
    return {
        "schema": PLAN_SCHEMA,
        "fits": plan.fits,
        "numerics": plan.numerics.value,
        "compared": plan.compared,
        "aim": asdict(plan.aim) | {"numerics": plan.aim.numerics.value},
        "before": asdict(plan.before),
        "after": asdict(plan.after),
        "free_bytes": plan.free_bytes,
        "techniques": [
            {
                "name": entry.choice.name,
                "setting": setting_to_plain(entry.choice.setting),
                "saves_bytes": entry.saves_bytes,
                "costs_seconds": entry.costs_seconds,
                "promise": entry.choice.promise.numerics.value,
                "note": entry.choice.promise.note,
            }
            for entry in plan.entries
        ],
        "solved": asdict(plan.solved),
        "rejected": [_way(way) for way in plan.rejected],
        "freedom": [_way(way) for way in plan.freedom],
        "notes": list(plan.notes),
        "frontier": [asdict(point) | {"techniques": list(point.techniques)} for point in frontier],
    }


def _way(way: OtherWay) -> dict[str, Any]:
    return asdict(way) | {"numerics": way.numerics.value}


# -- the frontier as a picture -----------------------------------------------------------------------------------

_PICTURE = (720, 360)
_EDGE = (70, 50, 24, 50)  # left, right, top, bottom


def render_frontier_svg(plan: Plan, frontier: Sequence[FrontierPoint]) -> str:
    """Peak against step time: the frontier, the plain program and the plan."""
    marks = [("before", plan.before.total_bytes, plan.before.step_seconds)]
    marks += [("plan", plan.after.total_bytes, plan.after.step_seconds)]
    points = [(point.total_bytes, point.step_seconds) for point in frontier]
    shown = [*points, *((total, time) for _, total, time in marks if time)]
    (width, height), (left, right, top, bottom) = _PICTURE, _EDGE
    low, high = min(x for x, _ in shown), max(x for x, _ in shown)
    least, most = min(y for _, y in shown), max(y for _, y in shown)

    def place(total: float, time: float) -> tuple[float, float]:
        across = (total - low) / ((high - low) or 1)
        up = (time - least) / ((most - least) or 1)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>Memory against time of a step on {escape(plan.aim.device)}</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" stroke="#555"/>',
    ]
    for share in (0, 0.5, 1):
        total, time = low + share * (high - low), least + share * (most - least)
        x, y = place(total, time)
        parts.append(
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{format_bytes(total)}</text>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds(time)}</text>')
    if points:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f6feb"/>'
            for x, y in (place(*p) for p in points)
        ]
    for name, total, time in marks:
        if time:
            x, y = place(total, time)
            anchor = "end" if x > width / 2 else "start"
            shift = -8 if anchor == "end" else 8
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="#b3261e" stroke-width="2"/>'
            )
            parts.append(f'<text x="{x + shift:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">{name}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 12}" text-anchor="middle">memory of the device</text>')
    parts.append(f'<text x="{left}" y="{top - 6}">seconds of a step (estimated)</text></svg>')
    return "\n".join(parts) + "\n"
