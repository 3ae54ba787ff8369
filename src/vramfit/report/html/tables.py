"""The bars, words and tables of a page: the facts of its pictures, for readers who do not see or run them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vramfit.analysis import (
    NAMES,
    Breakdown,
    DeviceVerdict,
    Measure,
    ModuleNode,
    fold_layers,
    phases,
    short_location,
    summarise,
    timeline,
    user_frame,
)
from vramfit.analysis.groups import entry, stack_frames
from vramfit.report.html.columns import DeviceView
from vramfit.report.html.markup import Html, details, figures, join, table, tag
from vramfit.report.text import each, percent, short_op, tree_lines
from vramfit.trace import Category, MemoryTrace
from vramfit.units import counted, format_bytes

_OPEN = 1.5
"""A bar of a card of unknown size goes on for half as much again, so that it does not look full."""


def bars_scale(devices: Sequence[DeviceVerdict]) -> float:
    """Bytes that the width of the bars stands for: the same for all cards, so that they can be compared."""
    return max(
        (device.total if _known(device) else _OPEN * _held(device) for device in devices),
        default=1,
    )


def device_figures(device: DeviceVerdict, *, several: bool, scale: float, is_state: bool) -> Html:
    """The bar, its legend and the figures of a card.

    Args:
        is_state: the recording is a snapshot without history, which has no peaks.
        several: whether there are others, so that it needs its number.
        scale: bytes of the whole width, of `bars_scale`.
    """
    if device.index < 0:
        return Html()
    pairs = [
        ("card", f"{device.gpu}" if not several else f"GPU {device.index} {device.gpu}"),
        ("allocated" if is_state else "peak allocated", format_bytes(device.peak_allocated)),
        ("reserved" if is_state else "peak reserved", format_bytes(device.peak_reserved)),
    ]
    if device.total:
        pairs.append(("memory of the card", format_bytes(device.total)))
        pairs.append(("CUDA context", format_bytes(device.context)))
        pairs.append(("free at the peak", format_bytes(max(0, device.headroom))))
    if device.above or device.below:
        pairs.append(
            ("error bar of the peak", f"+{format_bytes(device.above)} −{format_bytes(device.below)}")
        )
    return join([_bar(device, scale), figures(pairs)])


def _parts(device: DeviceVerdict) -> list[tuple[str, int]]:
    cached = max(0, device.peak_reserved - device.peak_allocated)
    return [("allocated", device.peak_allocated), ("cached", cached), ("context", device.context)]


def _held(device: DeviceVerdict) -> int:
    return sum(amount for _, amount in _parts(device))


def _known(device: DeviceVerdict) -> bool:
    return device.total >= max(1, _held(device))


def _bar(device: DeviceVerdict, scale: float) -> Html:
    """What the program held, and what of the card was left; hatched where nobody knows how much that is."""
    parts, scale = _parts(device), max(1.0, scale, device.total, _held(device))
    at, rects = 0.0, []
    for name, amount in parts:
        width = 1000 * amount / scale
        title = tag("title", f"{name} {format_bytes(amount)}")
        rects.append(
            tag("rect", title, x=f"{at:.2f}", y=0, width=f"{width:.2f}", height=10, class_=f"of-{name}")
        )
        at += width
    whole = 1000 * device.total / scale if device.total else 1000.0
    entries = [(name, f"{name} {format_bytes(amount)}") for name, amount in parts if amount]
    if device.total:
        rects.append(
            tag("rect", x=f"{at:.2f}", y=0, width=f"{max(0.0, whole - at):.2f}", height=10, class_="of-free")
        )
        entries.append(("free", f"free {format_bytes(max(0, device.headroom))}"))
    else:
        entries.append(("unknown", "the rest of the card, of unknown size"))
    words = ", ".join(text for _, text in entries)
    label = f"{words}, of {format_bytes(device.total)}" if device.total else words
    picture = tag(
        "svg", *rects, viewBox="0 0 1000 10", preserveAspectRatio="none", role="img", aria_label=label
    )
    legend = tag(
        "ul",
        *(tag("li", tag("span", "", class_=f"swatch of-{kind}"), text) for kind, text in entries),
        tag("li", f"of {format_bytes(device.total)}", class_="quiet") if device.total else None,
        class_="legend",
    )
    kind = "bar-card" if device.total else "bar-card of-unknown"
    return join([tag("div", picture, class_=kind), legend])


_MOMENTS = 24
_BLOCKS = 40
_TENSORS = 60
_MODULES = 60
_LINES = 30


def timeline_text(trace: MemoryTrace, view: DeviceView) -> Html:
    """The timeline as sentences and a table of its fullest moments; of a snapshot without history, why none."""
    if trace.is_state(view.device.index):
        text = "The snapshot has no history: it shows one moment, and no timeline can be drawn from it."
        return tag("p", text, class_="note")
    over = timeline(trace, view.device.index, points=_MOMENTS)
    kinds = [kind for kind in NAMES if over.categories[kind].any()]
    heads = ("event", "phase", "allocated", "reserved", *(NAMES[kind] for kind in kinds))
    rows = (
        (
            f"{row:,}",
            entry(trace.phases, int(trace.phase[row])),
            format_bytes(int(over.allocated[at])),
            format_bytes(int(over.reserved[at])),
            *(format_bytes(int(over.categories[kind, at])) for kind in kinds),
        )
        for at, row in enumerate(over.rows.tolist())
    )
    peaks = {measure: view.bytes_over.peak(measure) for measure in Measure}
    sentence = (
        f"Over {counted(len(trace), 'event')} allocated memory reached {format_bytes(peaks[Measure.ALLOCATED])}, "
        f"reserved memory {format_bytes(peaks[Measure.RESERVED])}."
    )
    return details(
        "The timeline as a table",
        tag("p", sentence),
        table(heads, rows, numbers=range(2, len(heads))),
        _phases(trace, view),
    )


def _phases(trace: MemoryTrace, view: DeviceView) -> Html | None:
    found = summarise(phases(trace, view.device.index))
    if not found:
        return None
    heads = ("phase", "times", "worst", "start", "peak", "end")
    rows = (
        (
            one.part,
            f"{one.count:,}",
            one.worst.name,
            format_bytes(one.worst.start_allocated),
            format_bytes(one.worst.peak_allocated),
            format_bytes(one.worst.end_allocated),
        )
        for one in found[:_LINES]
    )
    return join([tag("h3", "Phases"), table(heads, rows, numbers=(1, 3, 4, 5))])


def blocks_text(trace: MemoryTrace, view: DeviceView, *, root: Path | None) -> Html:
    """The largest blocks of the whole recording with their lives."""
    lives = view.lives
    order = np.lexsort((lives.born - lives.freed, -lives.block))[:_BLOCKS]
    rows = (_block_row(trace, view, block, root) for block in order.tolist())
    heads = ("bytes", "category", "tensor", "operator", "module", "line", "from event", "to event")
    left = len(lives.born) - len(order)
    return details(
        "The largest blocks as a table",
        table(heads, rows, numbers=(0, 6, 7)),
        tag("p", f"{left:,} smaller or shorter-lived blocks are not listed.", class_="quiet")
        if left
        else None,
    )


def _block_row(trace: MemoryTrace, view: DeviceView, block: int, root: Path | None) -> tuple[str, ...]:
    lives = view.lives
    born, freed = int(lives.born[block]), int(lives.freed[block])
    until = f"{freed:,}" if freed < lives.rows else "still held"
    amount = format_bytes(int(lives.block[block]))
    kind = NAMES[Category(int(lives.category[block]))]
    frame = user_frame(stack_frames(trace, int(lives.stack[block])))
    if born < 0:
        return (amount, kind, "", "", "", short_location(frame, root=root), "before", until)
    return (
        amount,
        kind,
        entry(trace.tensors, int(trace.tensor[born])),
        short_op(entry(trace.ops, int(trace.op[born]))),
        entry(trace.modules, int(trace.module[born])),
        short_location(frame, root=root),
        f"{born:,}",
        until,
    )


def device_tables(found: Breakdown, *, is_state: bool, root: Path | None) -> Html:
    """Categories, modules, tensors and lines at the moment that the page is about.

    Args:
        found: the memory at that moment.
        is_state: the recording is a snapshot without history: the moment is that of the dump.
        root: paths are given from here.
    """
    when = f"event {found.moment.row:,}" if found.moment.row >= 0 else "before the first event"
    if found.moment.phase:
        when += f", {found.moment.phase}"
    when = "When the snapshot was dumped" if is_state else f"At the fullest moment ({when})"
    return join(
        [
            tag("p", f"{when}, {format_bytes(found.allocated)} allocated.", class_="help"),
            _tensors(found, root),
            details("By category", _categories(found)),
            details("By module", _modules(found)),
            details("By line", _by_line(found, root)),
        ]
    )


def _tensors(found: Breakdown, root: Path | None) -> Html:
    rows = [
        (
            format_bytes(group.total_bytes),
            each(group.count, group.block_bytes),
            NAMES[group.category],
            group.tensor,
            short_op(group.op),
            group.module,
            short_location(group.line or group.library_line, root=root),
        )
        for group in found.tensors[:_TENSORS]
    ]
    heads = ("bytes", "of them", "category", "tensor", "operator", "module", "line")
    count, amount = found.tensors_omitted
    rest = found.tensors[_TENSORS:]
    count, amount = count + len(rest), amount + sum(group.total_bytes for group in rest)
    more = f"{count:,} smaller groups with {format_bytes(amount)} are not listed." if count else None
    if not rows:
        return tag("p", "Nothing is allocated then.")
    return join([table(heads, rows, numbers=(0, 1)), tag("p", more, class_="quiet") if more else None])


def _categories(found: Breakdown) -> Html:
    rows = (
        (
            name,
            format_bytes(found.categories[kind]),
            percent(found.categories[kind], found.allocated),
            format_bytes(found.slack_of(kind)),
        )
        for kind, name in NAMES.items()
    )
    return table(("category", "bytes", "share", "of which slack"), rows, numbers=(1, 2, 3))


def _modules(found: Breakdown) -> Html:
    lines = tree_lines(fold_layers(found.modules), limit=_MODULES, least_share=0.002)
    kinds = [kind for kind in NAMES if found.modules.categories.get(kind)]
    rows = []
    for line in lines:
        node = line.node
        name = tag("span", line.label or "no module", class_=f"indent-{min(line.depth, 7)}")
        rows.append((name, format_bytes(line.total_bytes), *_amounts(node, kinds)))
    heads = ("module", "bytes", *(NAMES[kind] for kind in kinds))
    return table(heads, rows, numbers=range(1, len(heads)))


def _amounts(node: ModuleNode | None, kinds: Iterable[Category]) -> Iterator[str]:
    for kind in kinds:
        amount = node.categories.get(kind, 0) if node is not None else 0
        yield format_bytes(amount) if amount else ""


def _by_line(found: Breakdown, root: Path | None) -> Html:
    sums: dict[str, list[int]] = {}
    known_lines = any(group.line or group.library_line for group in found.tensors)
    for group in found.tensors:
        place = short_location(group.line or group.library_line, root=root)
        if not place:
            place = "no line is known" if known_lines else f"no line, {format_bytes(group.block_bytes)} each"
        known = sums.setdefault(place, [0, 0])
        known[0] += group.total_bytes
        known[1] += group.count
    ordered = sorted(sums.items(), key=lambda entry: -entry[1][0])[:_LINES]
    rows = ((place, format_bytes(amount), f"{count:,}") for place, (amount, count) in ordered)
    return table(("line", "bytes", "blocks"), rows, numbers=(1, 2))


def fragmentation_text(found: Breakdown) -> Html:
    """How the reserved memory is used at that moment."""
    use = found.fragmentation
    pairs = [
        ("reserved", format_bytes(use.reserved)),
        ("occupied", format_bytes(use.occupied)),
        (
            "inactive split",
            f"{format_bytes(use.inactive_split)} ({percent(use.inactive_split, use.reserved)})",
        ),
        ("releasable", format_bytes(use.releasable)),
        ("largest free", format_bytes(use.largest_free)),
        ("slack", format_bytes(use.slack)),
        ("segments", f"{use.segments:,}"),
    ]
    words = (
        f"Of {format_bytes(use.reserved)} reserved, {format_bytes(use.occupied)} are in use; "
        f"{format_bytes(use.inactive_split)} are free but lie in segments that also hold live blocks; "
        f"{format_bytes(use.releasable)} could be given back to the driver. The largest request that could be "
        f"served without asking the driver is {format_bytes(use.largest_free)}."
    )
    return join([tag("p", words), figures(pairs)])
