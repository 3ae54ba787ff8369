"""The comparison of two runs as text for the terminal, and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from vramfit.analysis import NAMES, Change, HoldingChange, Pair, PeakState, TraceDiff, short_location
from vramfit.report.folding import NARROW, broken
from vramfit.report.json_report import frame_to_json
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.text import elide_left, relative, short_op, signed
from vramfit.trace import Category, Frame
from vramfit.units import format_bytes

DIFF_SCHEMA = "vramfit.diff/1"
"""Name and version: the number grows when a key changes its meaning or goes away, not for new keys."""

_NAME, _FIGURE, _SHARE = 24, 13, 11
_ROW = _NAME + 3 * _FIGURE + _SHARE
_MOST_CHANGES, _MOST_MODULES = 12, 6
_LEAST_SHAPE, _LEAST_OP = 12, 6
_JSON_CHANGES = 200
_SIGNED = 12
_SIGNS = {
    Change.NEW: ("new", "red"),
    Change.GREW: ("more", "red"),
    Change.SHRANK: ("less", "green"),
    Change.GONE: ("gone", "green"),
    Change.SAME: ("same", ""),
}


@printed_as_page(Sequence, widest=120)
class DiffLines:
    """The lines of a comparison for one width."""

    def __init__(self, width: int, root: Path | None) -> None:
        self.width = width
        self.root = root

    def lines(self, found: Sequence[TraceDiff]) -> Iterator[Text]:
        """All devices, one after the other."""
        for position, one in enumerate(found):
            if position:
                yield Text()
            device = f" (GPU {one.after.device})" if len(found) > 1 or one.after.device else ""
            yield Text.assemble(
                (one.after.name or "after", "bold"), f" compared with {one.before.name or 'before'}{device}"
            )
            yield from self.states(one)
            unused = [state for state in (one.before, one.after) if not state.is_used]
            if one.same:
                yield Text(f"  no difference{': neither used the card' if len(unused) > 1 else ''}")
                continue
            for state in unused:
                yield Text(f"  {state.name or 'one of them'} never used the card", style="yellow")
            yield from self.figures(one)
            yield from self.details(one)

    def states(self, one: TraceDiff) -> Iterator[Text]:
        """That what is compared is no peak, where a snapshot without history is among it."""
        states = dict.fromkeys(state.name or "one" for state in (one.before, one.after) if state.is_state)
        if states:
            which = " and ".join(states)
            has = "are the states" if len(states) > 1 else "is the state"
            text = f"  {which} {has} when dumped, without history, and no peak: compare like moments."
            yield from broken(Text(text, style="yellow"), self.width, indent=2)

    def figures(self, one: TraceDiff) -> Iterator[Text]:
        """The peaks and the categories."""
        heads = ("before", "after", "difference")
        both = one.before.is_state and one.after.is_state
        if self.width >= _ROW:
            yield Text(
                f"{'':{_NAME}}" + "".join(f"{head:>{_FIGURE}}" for head in heads), style="bright_black"
            )
        for name, pair in (
            ("allocated" if both else "peak allocated", one.allocated),
            ("reserved" if both else "peak reserved", one.reserved),
            ("outside PyTorch", one.outside),
        ):
            if pair is not None and (pair.before or pair.after):
                yield from self.row(name, pair, bold=True)
        for kind, pair in one.categories.items():
            if pair.difference:
                yield from self.row(f"  {NAMES[kind]}", pair)
        for state, when in ((one.before, "before"), (one.after, "after")):
            if state.ran_out:
                yield Text(f"  The run {when} ended by running out of memory.", style="yellow")

    def row(self, name: str, pair: Pair, *, bold: bool = False) -> Iterator[Text]:
        """A figure before and after; in words where columns have no room."""
        share = "" if pair.share is None or not pair.difference else relative(pair.share)
        style = "" if not pair.difference else ("red" if pair.difference > 0 else "green")
        label = Text(name, style="bold" if bold else "")
        before, after, difference = (
            format_bytes(pair.before),
            format_bytes(pair.after),
            signed(pair.difference),
        )
        if self.width < _ROW:
            change = f"{difference}, {share}" if share else difference
            told = Text.assemble(label, f": {before} before, {after} after, ", (change, style))
            yield from broken(told, self.width, indent=4)
            return
        label.truncate(_NAME, overflow="ellipsis", pad=True)
        yield Text.assemble(
            label,
            f"{before:>{_FIGURE}}{after:>{_FIGURE}}",
            (f"{difference:>{_FIGURE}}{share:>{_SHARE}}", style),
        )

    def details(self, one: TraceDiff) -> Iterator[Text]:
        """What changed, by line and by module, and the phases."""
        if not one.detailed:
            bare = [state.name for state in (one.before, one.after) if not state.detailed]
            yield Text(f"  {' and '.join(bare)}: figures alone, so nothing tells what changed.")
            return
        alike = _joined(one.changes)
        if alike:
            yield Text()
            yield Text("What changed", style="bold")
            yield from self.changes(alike[:_MOST_CHANGES])
        if rest := alike[_MOST_CHANGES:]:
            left = signed(sum(change.size.difference for change in rest))
            yield Text(f"  {left:>{_SIGNED}}  in {len(rest)} smaller changes", style="bright_black")
        if one.omitted.before or one.omitted.after:
            text = f"  {signed(one.omitted.difference):>{_SIGNED}}  in what the reports do not list"
            yield Text(text, style="bright_black")
        yield from self.table("Modules", one.modules, _MOST_MODULES)
        yield from self.table("Phases, highest allocated", one.phases, _MOST_MODULES)

    def table(self, title: str, pairs: Mapping[str, Pair], most: int) -> Iterator[Text]:
        """Named figures that differ."""
        if not pairs or (len(pairs) == 1 and not next(iter(pairs))):
            return
        yield Text()
        yield Text(title, style="bold")
        for name, pair in list(pairs.items())[:most]:
            label = name or "outside any module"
            yield from self.row(f"  {elide_left(label, _NAME - 2) if self.width >= _ROW else label}", pair)
        if (rest := len(pairs) - most) > 0:
            yield Text(f"  and {rest} more: --json lists them all", style="bright_black")

    def changes(self, changes: Sequence[HoldingChange]) -> Iterator[Text]:
        """One line of the program each: how much, what, by which operator, where."""
        cells = [(_several(one), _tensors(one), short_op(one.op), self.place(one)) for one in changes]
        several, *widths, place = self.widths(cells)
        told = self.width < NARROW or widths[0] < min(_LEAST_SHAPE, max(len(cell[1]) for cell in cells))
        for change, (count, shape, op, where) in zip(changes, cells, strict=True):
            word, style = _SIGNS[change.change]
            if told:
                size = (f"  {signed(change.size.difference)}", style)
                facts = ", ".join(filter(None, (count, shape, op, where)))
                yield from broken(Text.assemble(size, f" {word} {facts}"), self.width, indent=4)
                continue
            line = Text.assemble((f"  {signed(change.size.difference):>{_SIGNED}}", style), f"  {word:<5}")
            line.append(f"{count:<{several}}  " if several else "")
            for text, width in zip((Text(shape), Text(op)), widths, strict=True):
                if width:
                    text.truncate(width, overflow="ellipsis", pad=True)
                    line.append_text(text).append("  ")
            line.append(elide_left(where, place))
            line.rstrip()
            yield line

    def widths(self, cells: Sequence[tuple[str, str, str, str]]) -> tuple[int, int, int, int]:
        """Columns for number and size, shape, operator and line; the operator goes where it would be cut to nothing."""
        several, shape, operation, place = (
            max(map(len, column), default=0) for column in zip(*cells, strict=True)
        )
        room = self.width - (2 + _SIGNED + 2 + 5) - (several + 2 if several else 0)
        if shape + operation + place + 4 > room:
            place = min(place, room * 2 // 5)
            operation = min(operation, room - place - shape - 4)
            if operation < _LEAST_OP:
                return several, room - place - 2, 0, place
        return several, room - place - operation - 4, operation, place

    def place(self, change: HoldingChange) -> str:
        """The line, and the one it had before where it moved."""
        after, before = self.location(change.line_after), self.location(change.line_before)
        if not after:
            return before or change.module
        moved = before and change.line_before is not None and change.line_after is not None
        if moved and change.line_before.line != change.line_after.line:  # type: ignore[union-attr]
            return f"{after} (was {change.line_before.line})"  # type: ignore[union-attr]
        return after

    def location(self, frame: Frame | None) -> str:
        """A source line, relative to the user's folder."""
        return short_location(frame, root=self.root)


def _joined(changes: Sequence[HoldingChange]) -> list[HoldingChange]:
    """Join the changes that differ only in what a line does not show: the module, the callers."""
    alike: dict[tuple[object, ...], HoldingChange] = {}
    for one in changes:
        places = (one.line_before, one.line_after) if one.line_before or one.line_after else one.module
        key = (one.change, one.op, one.category, one.tensor_before, one.tensor_after, places)
        known = alike.get(key)
        alike[key] = one if known is None else _sum(known, one)
    return sorted(alike.values(), key=lambda one: -abs(one.size.difference))


def _sum(one: HoldingChange, two: HoldingChange) -> HoldingChange:
    size = Pair(before=one.size.before + two.size.before, after=one.size.after + two.size.after)
    return replace(
        one,
        each_before=one.each_before if one.each_before == two.each_before else None,
        each_after=one.each_after if one.each_after == two.each_after else None,
        count_before=one.count_before + two.count_before,
        count_after=one.count_after + two.count_after,
        size=size,
    )


def _several(change: HoldingChange) -> str:
    """How many and what one takes, before and after where they differ: ``12→16 × 3.00→6.00 MiB``, ``12 × 3.00 MiB``.

    Empty for a single one; where what one takes is not the same for all, the number alone: ``×12``.
    """
    sides = ((change.count_before, change.each_before), (change.count_after, change.each_after))
    known = [(count, size) for count, size in sides if count]
    if max(count for count, _ in known) < 2:
        return ""
    numbers = "→".join(dict.fromkeys(f"{count:,}" for count, _ in known))
    sizes = [size for _, size in known if size is not None]
    return f"{numbers} × {_size_words(*sizes)}" if len(sizes) == len(known) else f"×{numbers}"


def _size_words(first: int, last: int | None = None) -> str:
    """One size, or two, with the unit once where it is the same."""
    before, after = format_bytes(first), format_bytes(first if last is None else last)
    if before == after:
        return after
    number, unit = before.split()
    return f"{number if after.endswith(unit) else before}→{after}"


def _tensors(change: HoldingChange) -> str:
    """Shape, before and after where they differ; the category where no shape is known."""
    return _shapes(change.tensor_before, change.tensor_after) or f"({NAMES[change.category]})"


def _shapes(before: str, after: str) -> str:
    """Two shapes in one where dtype and rank are the same, else one after the other."""
    before, after = before.replace(", ", ","), after.replace(", ", ",")
    if not before or not after or before == after:
        return after or before
    kinds, sizes = zip(*(text.removesuffix("]").partition("[")[::2] for text in (before, after)), strict=True)
    ours, theirs = (text.split(",") for text in sizes)
    if kinds[0] != kinds[1] or len(ours) != len(theirs):
        return f"{before}→{after}"
    joined = (one if one == two else f"{one}→{two}" for one, two in zip(ours, theirs, strict=True))
    return f"{kinds[0]}[{','.join(joined)}]"


@json_values.register(Sequence)
def _json_values(found: Sequence[TraceDiff]) -> dict[str, Any]:
    """The comparison as values that `json` can write; docs/json.md describes them. Sizes are bytes."""
    return {"schema": DIFF_SCHEMA, "devices": [_device(one) for one in found]}


def _device(one: TraceDiff) -> dict[str, Any]:
    changes = one.changes[:_JSON_CHANGES]
    return {
        "before": _state(one.before),
        "after": _state(one.after),
        "same": one.same,
        "peak": {"allocated": _pair(one.allocated), "reserved": _pair(one.reserved)},
        "outside_pytorch": _pair(one.outside),
        "categories": {kind.name.lower(): _pair(pair) for kind, pair in one.categories.items()},
        "modules": {name: _pair(pair) for name, pair in one.modules.items()},
        "phases": {name: _pair(pair) for name, pair in one.phases.items()},
        "changes": [_change(change) for change in changes],
        "changes_omitted": {
            "changes": len(one.changes) - len(changes),
            "difference_bytes": sum(change.size.difference for change in one.changes[_JSON_CHANGES:]),
        },
        "not_listed": _pair(one.omitted),
    }


def _state(state: PeakState) -> dict[str, Any]:
    return {
        "name": state.name,
        "device": state.device,
        "gpu": state.gpu or None,
        "ran_out": state.ran_out,
        "phase": state.phase or None,
        "detailed": state.detailed,
        "is_state": state.is_state,
    }


def _pair(pair: Pair | None) -> dict[str, int] | None:
    if pair is None:
        return None
    return {
        "before_bytes": pair.before,
        "after_bytes": pair.after,
        "difference_bytes": pair.difference,
    }


def _change(change: HoldingChange) -> dict[str, Any]:
    return {
        "change": change.change.value,
        "category": Category(change.category).name.lower(),
        "op": change.op or None,
        "module": change.module or None,
        "tensor_before": change.tensor_before or None,
        "tensor_after": change.tensor_after or None,
        "line_before": frame_to_json(change.line_before),
        "line_after": frame_to_json(change.line_after),
        "count_before": change.count_before,
        "count_after": change.count_after,
        "block_bytes_before": change.each_before,
        "block_bytes_after": change.each_after,
        **(_pair(change.size) or {}),
    }
