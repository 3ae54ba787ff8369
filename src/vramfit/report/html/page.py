"""A run or a recording as HTML: the page with its scripts and data, and the static summary that notebooks show."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from string import Template

import numpy as np
from numpy.typing import NDArray

from vramfit.analysis import Breakdown, DeviceVerdict, Outcome, Verdict, held
from vramfit.analysis import verdict as judge
from vramfit.analysis.rank_memory import WorldMemory
from vramfit.analysis.recorded_run import run_from_trace
from vramfit.report.drawing import to_svg
from vramfit.report.html.advice import (
    find_advice,
    fragmentation_advice,
    grow_html,
    leaks_html,
    leaks_section,
)
from vramfit.report.html.columns import (
    DeviceView,
    device_columns,
    device_view,
    largest,
    origins,
    pack,
    shared_columns,
    to_text,
)
from vramfit.report.html.held_section import held_html
from vramfit.report.html.markup import Html, join, table, tag
from vramfit.report.html.ranks_section import ranks_data, ranks_section, shown_ranks
from vramfit.report.html.remedies_section import remedies_html
from vramfit.report.html.tables import (
    bars_scale,
    blocks_text,
    device_figures,
    device_tables,
    fragmentation_text,
    timeline_text,
)
from vramfit.report.terminal import headline
from vramfit.report.text import files_lines, seconds
from vramfit.report.timeline_picture import draw_timeline
from vramfit.trace import MemoryTrace, Run, Source, TraceDevice
from vramfit.units import counted, format_bytes
from vramfit.writing import StrPath, write_text

DATA_BUDGET = 5_200_000
"""Characters that the data of the pictures may take: the page as a whole stays below 6 MB."""

_SCRIPTS = (
    "vendor/uPlot-1.6.32.iife.min.js",
    "dom.js",
    "decode.js",
    "model.js",
    "tooltip.js",
    "copying.js",
    "view.js",
    "legend.js",
    "labels.js",
    "timeline.js",
    "plot.js",
    "blocks.js",
    "segments.js",
    "flame.js",
    "rows.js",
    "folds.js",
    "place.js",
    "ranks.js",
    "main.js",
)
_STYLES = ("vendor/uPlot-1.6.32.min.css", "page.css")
_SOURCES = {
    Source.VIRTUAL: "on a virtual GPU",
    Source.CARD: "recorded on a card",
    Source.CPU: "metered on the CPU",
}

_PICTURE_WIDTH, _PICTURE_HEIGHT = 760, 320
"""The timeline in a notebook."""
_KINDS = {Outcome.FITS: "fits", Outcome.DOES_NOT_FIT: "fails", Outcome.FAILED: "fails"}
"""How the verdict is coloured; without a word where the question stays open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A device of the page, and what its tables are about."""

    view: DeviceView
    breakdown: Breakdown
    verdict: DeviceVerdict


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """What a page says beside its pictures and tables.

    Attributes:
        summary: the verdict with its figures.
        ranks: the ranks of which the run is one; empty for a program by itself.
        warnings: what was done differently from a card; empty without any.
        footer: the program, its duration and versions.
    """

    title: str
    program: str
    summary: Html
    ranks: Html
    warnings: Html
    footer: str


def render_html(run: Run, verdict: Verdict, *, root: Path | None = None) -> str:
    """A run as one HTML file."""
    return _run_page(run, verdict, root, None)


def render_ranks_html(world: WorldMemory, *, root: Path | None = None) -> str:
    """Ranks of a distributed program as one HTML file: all of them over time, and all of the worst."""
    worst = world.decisive
    return _run_page(worst.run, worst.verdict, root, world)


def _run_page(run: Run, verdict: Verdict, root: Path | None, world: WorldMemory | None) -> str:
    described = {device.index: device for device in run.trace.devices}
    parts = []
    for found in verdict.devices:
        if found.index < 0:
            continue
        device = described.get(found.index, TraceDevice(index=found.index))
        device = replace(device, name=found.gpu, total_bytes=found.total, context_bytes=found.context)
        view = device_view(run.trace, device, found.breakdown.moment.row)
        parts.append(_Part(view=view, breakdown=found.breakdown, verdict=found))
    first = verdict.device.index if verdict.device.index >= 0 else None
    program = " ".join(run.program)
    seen = "" if verdict.outcome is Outcome.UNKNOWN else f": {verdict.outcome.value}"
    ranks, data = Html(), Html()
    if world is not None:
        drawn = shown_ranks(world)
        by_itself = tag("h2", f"Rank {world.decisive.rank} by itself")
        ranks, data = join([ranks_section(world, drawn), by_itself]), ranks_data(drawn)
    words = _Words(
        title=f"{program or 'program'}{seen}",
        program=program,
        summary=join([_run_summary(run, verdict, root), remedies_html(run.remedies)]),
        ranks=ranks,
        warnings=join([_warnings(run, root), _files(run, root)]),
        footer=_footer(run),
    )
    return _page(run.trace, parts, words, first=first, root=root, beside=data)


def render_trace_html(trace: MemoryTrace, *, title: str = "", root: Path | None = None) -> str:
    """A recording as one HTML file.

    Args:
        title: how to call the program where the trace does not say, such as the name of the file.
    """
    run = run_from_trace(trace, name=title)
    return render_html(run, judge(run), root=root)


def write_page(
    path: StrPath,
    source: Run | MemoryTrace | WorldMemory,
    verdict: Verdict | None = None,
    *,
    title: str = "",
    root: StrPath | None = None,
) -> None:
    """Write the page of a run (with its verdict), of a trace or of ranks, whole or not at all.

    Raises:
        WriteError: no space, no permission, no such folder; nothing half-written is left.
        ValueError: a run without its verdict.
    """
    folder = None if root is None else Path(root)
    if isinstance(source, MemoryTrace):
        write_text(path, render_trace_html(source, title=title, root=folder))
    elif isinstance(source, WorldMemory):
        write_text(path, render_ranks_html(source, root=folder))
    elif verdict is None:
        raise ValueError("the page of a run needs its verdict")
    else:
        write_text(path, render_html(source, verdict, root=folder))


def summary_lines(run: Run, verdict: Verdict) -> list[str]:
    """Whether it fits, in a line or a few; of a recording of which that cannot be said, what was recorded."""
    if verdict.outcome is Outcome.UNKNOWN or not run.devices:
        return [" ".join(run.program) or "recording"]
    return headline(run, verdict)


def run_summary(run: Run, verdict: Verdict) -> str:
    """What ``_repr_html_`` of a run gives."""
    first, *more = summary_lines(run, verdict)
    pictures = [
        Html(to_svg(draw_timeline(run.trace, device.index, width=_PICTURE_WIDTH, height=_PICTURE_HEIGHT)))
        for device in verdict.devices
        if device.index >= 0 and device.peak_allocated
    ]
    device = verdict.device
    figures = (
        f"{counted(len(run.trace), 'event')} · peak allocated {format_bytes(device.peak_allocated)} · "
        f"peak reserved {format_bytes(device.peak_reserved)}"
    )
    return tag(
        "div",
        tag("strong", first),
        *(tag("div", line) for line in more),
        tag("div", figures),
        join(tag("div", picture) for picture in pictures),
        remedies_html(run.remedies),
    )


def trace_summary(trace: MemoryTrace) -> str:
    """The same for a recording alone."""
    run = run_from_trace(trace)
    return run_summary(run, judge(run))


def _page(
    trace: MemoryTrace,
    parts: Sequence[_Part],
    words: _Words,
    *,
    first: int | None,
    root: Path | None,
    beside: Html,
) -> str:
    style = "\n".join(_asset(name) for name in _STYLES)
    script = _script()
    advice = [find_advice(trace, part.view) for part in parts]
    growing = grow_html(
        {part.view.device.index: found for part, found in zip(parts, advice, strict=True)}, root
    )
    is_dump = bool(parts) and all(trace.is_state(part.view.device.index) for part in parts)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    values: dict[str, str] = {
        "first_device": "" if first is None else str(first),
        "body_class": "of-dump" if is_dump else "",
        "policy": policy,
        "version": join([metadata.version("vramfit")]),
        "title": join([f"{words.title} · vramfit"]),
        "style": style,
        "program": join([words.program]),
        "device_choice": _device_choice(parts, first),
        "navigation": _navigation(words, grows=bool(growing), is_dump=is_dump),
        "ranks": words.ranks,
        "summary": words.summary,
        "growing": leaks_section(growing) if growing else "",
        "timeline_text": _each(parts, first, [timeline_text(trace, part.view) for part in parts]),
        "blocks_text": _each(parts, first, [blocks_text(trace, part.view, root=root) for part in parts]),
        "tensors": _each(
            parts,
            first,
            [
                join(
                    [
                        held_html(held(trace, part.view.device.index), root=root),
                        device_tables(
                            part.breakdown, is_state=trace.is_state(part.view.device.index), root=root
                        ),
                    ]
                )
                for part in parts
            ],
        ),
        "fragmentation": _each(
            parts,
            first,
            [
                join([fragmentation_text(part.breakdown), fragmentation_advice(found, root=root)])
                for part, found in zip(parts, advice, strict=True)
            ],
        ),
        "leaks": ""
        if growing or is_dump
        else leaks_section(_each(parts, first, [leaks_html(found, root=root) for found in advice])),
        "warnings": words.warnings,
        "footer": join([words.footer]),
        "data": join([_data(trace, parts), beside]),
        "script": script,
    }
    return Template(_asset("page.html")).substitute(values)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _script() -> str:
    """The modules in one function of their own; uPlot before it, since it declares a name."""
    library, *own = (_asset(name) for name in _SCRIPTS)
    body = "\n".join(own)
    return f'{library}\n(() => {{\n"use strict";\n{body}\n}})();\n'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(trace: MemoryTrace, parts: Sequence[_Part]) -> Html:
    """The data of the pictures; where all of it is too much, the smallest blocks are left out."""
    found = origins(trace, [part.view for part in parts])
    shared = to_text(pack(*shared_columns(trace, found)))
    budget = DATA_BUDGET - len(shared)
    share = 1.0
    texts = _device_data(trace, parts, found.of_device, share)
    while sum(map(len, texts)) > budget and share > 1e-4:
        share *= max(0.1, 0.93 * budget / sum(map(len, texts)))
        texts = _device_data(trace, parts, found.of_device, share)
    blocks = {"data-shared": shared}
    for part, text in zip(parts, texts, strict=True):
        blocks[f"data-device-{part.view.device.index}"] = text
    return join(
        tag("script", Html(text), id=name, type="application/octet-stream") for name, text in blocks.items()
    )


def _device_data(
    trace: MemoryTrace, parts: Sequence[_Part], of_device: Sequence[NDArray[np.int64]], share: float
) -> list[str]:
    return [
        to_text(
            pack(
                *device_columns(
                    trace,
                    part.view,
                    origin,
                    largest(part.view.lives, round(len(part.view.lives.born) * share)),
                )
            )
        )
        for part, origin in zip(parts, of_device, strict=True)
    ]


def _each(parts: Sequence[_Part], first: int | None, contents: Sequence[Html]) -> Html:
    """What belongs to each device; only that of the chosen one is seen."""
    return join(
        tag(
            "div",
            content,
            data_device=part.view.device.index,
            hidden=part.view.device.index != first,
        )
        for part, content in zip(parts, contents, strict=True)
    )


def _device_choice(parts: Sequence[_Part], first: int | None) -> Html:
    if len(parts) < 2:
        return Html()
    options = join(
        tag(
            "option",
            f"GPU {part.view.device.index} {part.view.device.name}".strip(),
            value=part.view.device.index,
            selected=part.view.device.index == first,
        )
        for part in parts
    )
    return tag("label", "Device ", tag("select", options, id="device-choice"))


def _navigation(words: _Words, *, grows: bool, is_dump: bool) -> Html:
    links = [
        ("s-timeline", "Over time"),
        ("s-moment", "At one moment"),
        ("s-blocks", "Every allocation"),
        ("s-flames", "Modules and stacks"),
        ("s-tensors", "Tensors"),
        ("s-fragmentation", "Fragmentation"),
    ]
    if is_dump:
        links = [link for link in links if link[0] not in ("s-timeline", "s-blocks")]
    else:
        links.insert(0 if grows else len(links), ("s-leaks", "Leaks"))
    if words.ranks:
        links.insert(0, ("s-ranks", "Ranks"))
    if words.warnings:
        links.append(("s-warnings", "Warnings"))
    return join((tag("a", text, href=f"#{name}") for name, text in links), " ")


def _run_summary(run: Run, verdict: Verdict, root: Path | None) -> Html:
    kind = _KINDS.get(verdict.outcome)
    nothing = not run.devices and not run.seconds_wall  # a recording without events, not a run of a program
    told = (
        _recorded(run, verdict)
        if verdict.outcome is Outcome.UNKNOWN or nothing
        else headline(run, verdict, root=root)
    )
    first, *more = told
    listed = {*verdict.why, *verdict.advice}
    said = [line for line in more if line.removeprefix("why").removeprefix("try").strip() not in listed]
    return tag(
        "section",
        tag("h1", first, class_=None if nothing else kind),
        *(tag("p", line) for line in said),
        *(
            join([tag("h2", title), tag("ul", join(tag("li", text) for text in texts))])
            for title, texts in (("Why", verdict.why), ("Tried, and helps", verdict.advice))
            if texts
        ),
        *(
            device_figures(
                device,
                several=len(verdict.devices) > 1,
                scale=bars_scale(verdict.devices),
                is_state=run.trace.is_state(device.index),
            )
            for device in verdict.devices
        ),
        class_="verdict",
    )


def _recorded(run: Run, verdict: Verdict) -> list[str]:
    """What can be said where nobody knows how large the card was."""
    device = verdict.device
    name = " ".join(run.program) or "recording"
    if device.index < 0:
        return [name, "The recording holds no events on a device."]
    if run.trace.is_state(device.index):
        held = f"{format_bytes(device.peak_allocated)} allocated and {format_bytes(device.peak_reserved)} reserved"
        text = f"When it was dumped, GPU {device.index} had {held}. The snapshot does not say how large the card is."
        return [name, text]
    peak = (
        f"On GPU {device.index} allocated memory reached {format_bytes(device.peak_allocated)}, reserved memory "
        f"{format_bytes(device.peak_reserved)}. The recording does not say how large the card is."
    )
    return [name, peak]


def _footer(run: Run) -> str:
    """What was run, for how long, and with what."""
    facts = [_SOURCES[run.source]]
    facts += [counted(len(run.trace), "event")] if len(run.trace) else []
    if run.ops:
        facts.append(counted(run.ops, "op"))
    if run.seconds_simulated:
        facts.append(f"{seconds(run.seconds_simulated)} simulated")
    if run.seconds_wall:
        facts.append(f"{seconds(run.seconds_wall)} {'here' if run.ops else 'recorded'}")
    facts.append(f"torch {run.torch_version}" if run.torch_version else "")
    facts.append(run.platform)
    conf = str(run.trace.meta.get("alloc_conf", ""))
    facts.append(f"allocator settings {conf}" if conf else "")
    return " · ".join(fact for fact in facts if fact)


def _files(run: Run, root: Path | None) -> Html:
    prefix = "" if root is None else f"{root.as_posix().rstrip('/')}/"
    lines = files_lines(run.files, lambda path: path.removeprefix(prefix))
    if not lines:
        return Html()
    title, *told = lines
    return tag("section", tag("h2", title, id="s-files"), tag("ul", join(tag("li", line) for line in told)))


def _warnings(run: Run, root: Path | None) -> Html:
    if not run.warnings:
        return Html()
    prefix = "" if root is None else f"{root.as_posix().rstrip('/')}/"
    rows = (
        (
            tag("span", warning.message),
            (warning.location or "").removeprefix(prefix),
            f"{warning.count:,}",
        )
        for warning in run.warnings
    )
    return tag(
        "section",
        tag("h2", "Warnings", id="s-warnings"),
        table(("what was done otherwise than on a card", "where", "times"), rows, numbers=(2,)),
    )
