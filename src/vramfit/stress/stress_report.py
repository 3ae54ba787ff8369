"""What `vramfit stress` found: in the terminal, as JSON and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from rich.text import Text

from vramfit.plain import to_plain
from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import seconds
from vramfit.stress.stability import Limit, LimitReason, Round, RoundOutcome, StressReport, Trend
from vramfit.units import GIB, MIB, counted, format_bytes

STRESS_SCHEMA = "vramfit.stress/1"
_BAR, _LEAST_BAR = 30, 8
_SETTINGS = "Try --alloc-conf expandable_segments:True; vramfit tune on a trace finds other settings."
_HINTS = " If reserved but unallocated memory is large"
"""Where they begin: c10/cuda/CUDACachingAllocator.cpp, malloc."""
_WARNINGS = 5
_SHOWN = 40
"""Rounds that the terminal shows: the last ones."""


@printed_as_lines(StressReport)
def _lines(report: StressReport, width: int) -> Iterator[Text]:
    """Baseline, limits, and the rounds as bars."""
    yield from _broken(_head(report), width)
    yield Text()
    yield from _table(report, width)
    if report.rounds:
        yield Text()
        yield from _rounds(report, width)
        yield Text()
        yield from _broken(_verdict(report), width)
    if report.warnings:
        yield Text()
        yield from _broken(_warnings(report), width)
    yield Text()
    yield Text(_footer(report), style="dim")


def _broken(sentences: Iterator[Text], width: int) -> Iterator[Text]:
    for sentence in sentences:
        yield from broken(sentence, width)


def _head(report: StressReport) -> Iterator[Text]:
    baseline = report.baseline
    sizes = sizes_text(baseline.sizes)
    if baseline.fits:
        of = f" of {format_bytes(report.total_bytes)}" if report.total_bytes else ""
        yield Text.assemble(
            ("✓ fits ", "bold green"),
            (report.device, "bold"),
            f" at {sizes}: peak reserved {format_bytes(baseline.peak_reserved)}{of}",
        )
        return
    word = "does not fit" if baseline.outcome is RoundOutcome.OUT_OF_MEMORY else "fails on"
    yield Text.assemble((f"✗ {word} ", "bold red"), (report.device, "bold"), f" at {sizes}")
    yield Text(f"  {_reason(baseline)}")


def _reason(one: Round) -> str:
    """Why a round failed, in a line; of an out-of-memory without the hints that torch puts behind the figures."""
    told = " ".join(one.message.split())
    return told.partition(_HINTS)[0] if one.outcome is RoundOutcome.OUT_OF_MEMORY else told


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes in words: ``batch_size 8, sequence_length 512``."""
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items())


def _table(report: StressReport, width: int) -> Iterator[Text]:
    heads = ("size", "usual", "largest that fits", "fails at", "allocated", "reserved")
    rows = []
    for limit in report.limits:
        best = next(
            (one for one in limit.rounds if one.fits and one.sizes[limit.name] == limit.largest), None
        )
        rows.append(
            [
                Text(limit.name),
                Text(f"{limit.usual:,}"),
                Text(f"{limit.largest:,}" if limit.largest else "none", style="bold"),
                Text("" if limit.failing is None else f"{limit.failing:,}"),
                Text("" if best is None else format_bytes(best.peak_allocated)),
                Text("" if best is None else format_bytes(best.peak_reserved)),
            ]
        )
    notes = [Text(_why(limit), style="dim") for limit in report.limits]
    return table(heads, rows, width, notes=notes)


def _why(limit: Limit) -> str:
    if limit.reason is LimitReason.NOT_REACHED:
        return "the end of its range"
    if limit.reason is LimitReason.REFUSED:
        failed = next((one for one in limit.rounds if one.sizes[limit.name] == limit.failing), None)
        return f"the workload refuses more: {failed.message}" if failed is not None else "refused"
    return ""


def _rounds(report: StressReport, width: int) -> Iterator[Text]:
    """One line a round: what is allocated at its peak, and what is reserved beyond; as a bar where there is room."""
    varied = [limit.name for limit in report.limits]
    top = max((one.peak_reserved for one in report.rounds), default=0) or 1
    first = max(0, len(report.rounds) - _SHOWN)
    names = [_unusual(one.sizes, varied, report.sizes) for one in report.rounds]
    widest = max(len(name) for name in names)
    figures = [_figures(one) for one in report.rounds]
    room = width - (6 + widest + 2) - max(text.cell_len for text in figures[first:])
    longest = min(_BAR, room) if room >= _LEAST_BAR else 0
    legend = "█ allocated at the peak, ░ reserved beyond" if longest else "allocated at the peak / reserved"
    yield Text(f"Rounds, the cache never emptied  ({legend})", style="bold")
    if first:
        yield Text(f"  {first} earlier rounds are left out; --json has them", style="dim")
    for number, one in enumerate(report.rounds[first:], start=first):
        allocated = round(longest * one.peak_allocated / top)
        reserved = round(longest * one.peak_reserved / top)
        line = Text(f"{number + 1:>4}  {names[number]:<{widest}}  ")
        line.append("█" * allocated, style="green")
        line.append("░" * max(0, reserved - allocated), style="yellow")
        line.append(" " * (longest - max(allocated, reserved)))
        yield line + figures[number]


def _figures(one: Round) -> Text:
    """A round's peaks, and how it failed if it did."""
    figures = Text(f"  {format_bytes(one.peak_allocated):>10} / {format_bytes(one.peak_reserved)}")
    return figures if one.fits else figures.append(f"  ✗ {one.outcome.value}", style="bold red")


def _unusual(sizes: Mapping[str, int], varied: Sequence[str], usual: Mapping[str, int]) -> str:
    """The varied sizes that are not as usual; with one varied size, that one."""
    if len(varied) == 1:
        return sizes_text({varied[0]: sizes[varied[0]]})
    changed = {name: sizes[name] for name in varied if sizes[name] != usual[name]}
    return sizes_text(changed) if changed else "as usual"


def _verdict(report: StressReport) -> Iterator[Text]:
    found = report.stability
    if found is None:
        return
    share = f"{100 * found.overhead:.0f} % more reserved than allocated at the most"
    grown = format_bytes(found.growth_per_cycle)
    over = f"over {found.cycles} cycles of {len(report.cycle)} sizes"
    ran_out = f"{found.ooms} of {len(report.rounds)} rounds ran out of memory"
    if found.trend is Trend.RUNS_OUT:
        fit = f", {found.ooms_by_history} of them at sizes that fit by themselves"
        yield Text.assemble(("! runs out ", "bold yellow"), f"by fragmentation: {ran_out}{fit}; {share}")
        yield Text(f"  {_SETTINGS}")
        return
    if found.trend is Trend.STEADY:
        yield Text.assemble(("✓ steady ", "bold green"), f"{over}: {share}")
    elif found.trend is Trend.UNKNOWN:
        yield Text(f"{found.cycles} cycles of {len(report.cycle)} sizes are too few to tell a trend: {share}")
    elif found.trend is Trend.RESERVED_GROWS:
        yield Text.assemble(
            ("! reserved memory grows ", "bold yellow"),
            f"by {grown} a cycle for the same sizes: fragmentation; {share}",
        )
        yield Text(f"  {_SETTINGS}")
    else:
        yield Text.assemble(
            ("! allocated memory grows ", "bold yellow"), f"by {grown} a cycle: the workload keeps tensors"
        )
    if found.ooms:
        yield Text(f"  {ran_out}.")


def _warnings(report: StressReport) -> Iterator[Text]:
    for warning in report.warnings[:_WARNINGS]:
        where = f" ({warning.location})" if warning.location else ""
        times = f" ×{warning.count}" if warning.count > 1 else ""
        yield Text.assemble(("! ", "yellow"), f"{warning.message}{where}{times}")
    more = len(report.warnings) - _WARNINGS
    if more > 0:
        yield Text(f"  {more} more; --json has them")


def _footer(report: StressReport) -> str:
    on = {"virtual": "on a virtual GPU", "card": "on the card", "cpu": "on metered CPU"}[report.source]
    steps = sum(len(limit.rounds) for limit in report.limits) + len(report.rounds) + 1
    return f"{counted(steps, 'step')} {on}, torch {report.torch_version}, in {seconds(report.seconds)}"


@json_values.register(StressReport)
def _json_values(report: StressReport) -> dict[str, Any]:
    """The whole report; sizes are in bytes."""
    found = report.stability
    return {
        "schema": STRESS_SCHEMA,
        "target": report.target,
        "device": report.device,
        "source": report.source,
        "total_bytes": report.total_bytes or None,
        "alloc_conf": report.alloc_conf,
        "torch": report.torch_version,
        "sizes": dict(report.sizes),
        "fits": report.fits,
        "baseline": _round(report.baseline),
        "limits": [
            {
                "name": limit.name,
                "usual": limit.usual,
                "largest": limit.largest,
                "failing": limit.failing,
                "reason": limit.reason.name.lower(),
                "steps": [_round(one) for one in limit.rounds],
            }
            for limit in report.limits
        ],
        "cycle": [dict(sizes) for sizes in report.cycle],
        "rounds": [_round(one) for one in report.rounds],
        "stability": None
        if found is None
        else {
            "trend": found.trend.name.lower(),
            "cycles": found.cycles,
            "reserved_bytes": list(found.reserved),
            "allocated_bytes": list(found.allocated),
            "growth_bytes_per_cycle": found.growth_per_cycle,
            "overhead": round(found.overhead, 6),
            "ooms": found.ooms,
            "ooms_by_history": found.ooms_by_history,
        },
        "warnings": to_plain(report.warnings),
        "seconds": round(report.seconds, 3),
    }


def _round(one: Round) -> dict[str, Any]:
    return {
        "sizes": dict(one.sizes),
        "outcome": one.outcome.name.lower(),
        "message": one.message or None,
        "peak_allocated_bytes": one.peak_allocated,
        "peak_reserved_bytes": one.peak_reserved,
        "allocated_bytes": one.allocated,
        "reserved_bytes": one.reserved,
    }


# The picture

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 46, 50
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px }
.grid { stroke: #ddd } .card { stroke: #888; stroke-dasharray: 6 4 }
.reserved { fill: #f2c879; } .allocated { fill: #4c9a6a } .failed { fill: #c0392b; font-weight: 700 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } .back { fill: #1b1b1b } }
"""


def render_stress_svg(report: StressReport) -> str:
    """The rounds as a picture: for each the peak of allocated bytes in front of the peak of reserved bytes."""
    rounds = report.rounds or (report.baseline,)
    highest = max(
        [one.peak_reserved for one in rounds] + ([report.total_bytes] if _near(report, rounds) else [])
    )
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    scale = (_HEIGHT - _TOP - _BOTTOM) / max(1, highest)
    step = (_WIDTH - _LEFT - _RIGHT) / len(rounds)

    def y(size: int) -> float:
        return _HEIGHT - _BOTTOM - size * scale

    title = f"{report.target} on {report.device}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(_description(report))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for part in range(5):
        size = highest * part // 4
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{size / unit:.1f}</text>'
        )
    for number, one in enumerate(rounds):
        x, wide = _LEFT + number * step, max(1.0, step * 0.8)
        tip = escape(
            f"round {number + 1}: {sizes_text(one.sizes)}, {one.outcome.value}, allocated "
            f"{format_bytes(one.peak_allocated)}, reserved {format_bytes(one.peak_reserved)}"
        )
        parts.append(f"<g><title>{tip}</title>")
        for kind, size in (("reserved", one.peak_reserved), ("allocated", one.peak_allocated)):
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y(size):.1f}" width="{wide:.1f}" '
                f'height="{size * scale:.1f}"/>'
            )
        if not one.fits:
            top = y(one.peak_reserved) - 4
            parts.append(
                f'<text class="failed" x="{x + wide / 2:.1f}" y="{top:.1f}" text-anchor="middle">✗</text>'
            )
        parts.append("</g>")
    if _near(report, rounds):
        line = y(report.total_bytes)
        parts.append(
            f'<line class="card" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>'
        )
    below = _HEIGHT - 18
    parts.append(
        f'<text x="{_LEFT}" y="{below}">round 1 to {len(rounds)}, in {name}: '
        "green allocated at the peak, yellow reserved beyond, dashed the memory there is</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _near(report: StressReport, rounds: tuple[Round, ...]) -> bool:
    """Whether the line of the card belongs into the picture."""
    return 0 < report.total_bytes <= 4 * max(one.peak_reserved for one in rounds)


def _description(report: StressReport) -> str:
    limits = "; ".join(f"{limit.name} fits up to {limit.largest:,}" for limit in report.limits)
    verdict = (
        ""
        if report.stability is None
        else f"; over {counted(len(report.rounds), 'round')} {report.stability.trend.value}"
    )
    return f"{limits}{verdict}"
