"""Parts that the reports in the terminal share: categories, modules, largest tensors and phases, for one width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.text import Text

from vramfit.analysis import (
    NAMES,
    Breakdown,
    Moment,
    PhaseSummary,
    TensorGroup,
    fold_layers,
    phases,
    short_location,
    summarise,
)
from vramfit.report.folding import NARROW, broken
from vramfit.report.telling_lines import with_telling_places
from vramfit.report.text import bar, each_of_sizes, elide_left, percent, short_op, tree_lines
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.units import format_bytes

STYLES = {
    Category.PARAMETERS: "blue",
    Category.GRADIENTS: "cyan",
    Category.OPTIMIZER_STATE: "magenta",
    Category.ACTIVATIONS: "green",
    Category.INPUTS: "yellow",
    Category.TEMPORARIES: "red",
    Category.WORKSPACES: "bright_blue",
    Category.COMMUNICATION_BUFFERS: "bright_yellow",
    Category.UNSHARDED_PARAMETERS: "bright_cyan",
    Category.PREFETCH: "bright_green",
    Category.OTHER: "bright_black",
}
_WIDEST = 140
_NAME = 18
"""Characters of a category's name; longer ones are those of programs on several cards."""
_MODULES, _TENSORS, _PHASES = 12, 8, 6
_PHASE = 18
_PHASE_FIGURE = 12
_SLACK, _SLACK_SHARE = 1 << 20, 0.01
"""Bytes of slack, and their part of a category, from which they are told: arithmetic adds up without less."""
SIZE = 10
"""Characters that a number of bytes takes."""
_EACH = 16
"""Columns of the number of blocks and the size of one."""
_LEAST_PLACE = 16
"""Columns of a module or a library's line that are kept, beside an operator."""
_LEAST_OP = 6
"""Columns below which an operator's name is unreadable."""


class Sections:
    """The parts of a report for one width.

    Args:
        width: width of the terminal in characters; more than 140 are not used.
        root: the user's folder; file names below it are shown relative to it.
    """

    def __init__(self, width: int, root: Path | None) -> None:
        self.width = min(width, _WIDEST)
        self.root = root

    # Where the bytes are

    def categories(self, breakdown: Breakdown, when: str) -> Iterator[Text]:
        """The table of categories with bars."""
        allocated = format_bytes(breakdown.allocated)
        yield self.heading(when, f"{allocated} allocated{self.describe(breakdown.moment)}")
        largest = max(breakdown.categories.values(), default=0)
        shown = [(kind, name) for kind, name in NAMES.items() if breakdown.categories[kind]]
        column = max([_NAME, *(1 + len(name) for _, name in shown)])
        for kind, name in shown:
            amount = breakdown.categories[kind]
            drawn = bar(amount / largest, max(0, min(40, self.width - 24 - column)))
            yield Text.assemble(
                f"  {name:<{column}}{format_bytes(amount):>{SIZE}}{percent(amount, breakdown.allocated):>7}  ",
                (drawn, STYLES[kind]),
            )
        slack = [
            f"{name} {format_bytes(breakdown.slack_of(kind))}"
            for kind, name in shown
            if breakdown.slack_of(kind) >= max(_SLACK, breakdown.categories[kind] * _SLACK_SHARE)
        ]
        if slack:
            yield from self.wrapped(Text(f"  of which slack: {', '.join(slack)}"), indent=4)

    def describe(self, moment: Moment) -> str:
        """A moment in words, beginning with a comma."""
        parts = [moment.phase, short_op(moment.op), self.location(moment.line)]
        return "".join(f", {part}" for part in parts if part)

    def modules(self, breakdown: Breakdown) -> Iterator[Text]:
        """The levels of the module tree that matter."""
        tree = fold_layers(breakdown.modules)
        if not tree.children:
            return
        yield Text()
        yield self.heading("Modules")
        narrow = self.width < NARROW
        name_width = max(0, self.width - SIZE - 9) if narrow else max(30, min(self.width - 52, 60))
        lines = tree_lines(tree, limit=_MODULES - (1 if tree.own_bytes else 0))
        for line in lines:
            label = "  " * line.depth + line.label
            style = "" if line.node is not None else "bright_black"
            if narrow:
                yield self.module_line(label, line.total_bytes, breakdown, name_width, style)
                continue
            label = elide_left(label, name_width)
            yield self.module_line(label, line.total_bytes, breakdown, name_width, style).append_text(
                self.mostly(line.node.categories if line.node else {}, line.total_bytes)
            )
        if tree.own_bytes:
            yield self.module_line(
                "outside any module", tree.own_bytes, breakdown, name_width, "bright_black"
            )

    def module_line(self, label: str, amount: int, breakdown: Breakdown, width: int, style: str) -> Text:
        """A module with its bytes and its share."""
        share = percent(amount, breakdown.allocated)
        figure = f"{format_bytes(amount):>{SIZE}}" if len(label) < width else f"  {format_bytes(amount)}"
        return Text.assemble("  ", (f"{label:<{width}}", style), f"{figure}{share:>7}")

    def mostly(self, categories: object, total: int) -> Text:
        """What a module's bytes mostly are."""
        if not isinstance(categories, dict) or not categories:
            return Text()
        kind = max(categories, key=lambda one: categories[one])
        style = STYLES[kind]
        prefix = "" if categories[kind] == total else "mostly "
        return Text.assemble("  ", (f"{prefix}{NAMES[kind]}", style))

    def tensors(self, breakdown: Breakdown) -> Iterator[Text]:
        """The largest groups of tensors with op and line."""
        wide = self.width >= 110
        alike = _joined(with_telling_places(breakdown.tensors), by_library=wide)
        groups = alike[:_TENSORS]
        if not groups:
            return
        yield Text()
        yield self.heading("Largest tensors")
        several = max([_EACH, *(len(_several(group)) for group in groups)])
        fixed = 2 + SIZE + several + 2 + (18 if wide else 0)
        widths = (several, *self.tensor_widths(groups, self.width - fixed - 6, wide=wide))
        for group in groups:
            if self.width < NARROW:
                yield from self.tensor_told(group)
            else:
                yield self.tensor_line(group, widths, wide=wide)
        if rest := len(alike) - len(groups) + breakdown.tensors_omitted[0]:
            left = sum(group.total_bytes for group in alike[_TENSORS:]) + breakdown.tensors_omitted[1]
            groups_left = "1 smaller group" if rest == 1 else f"{rest} smaller groups"
            yield Text(f"  {format_bytes(left):>{SIZE}}  in {groups_left}", style="bright_black")

    def tensor_widths(self, groups: Sequence[TensorGroup], room: int, *, wide: bool) -> tuple[int, int, int]:
        """Columns for tensor, operator and line: where not all have room, folders go first, then the operator."""
        tensor = max(len(_tensor(group)) for group in groups)
        operation = max(len(short_op(group.op)) for group in groups)
        lines = [self.tensor_location(group, room, wide=wide) for group in groups]
        tensor = min(tensor, room // 2)
        if tensor + operation + max(map(len, lines)) > room:
            # An elided line of the user's keeps the file's name behind the sign of what is missing; the end of a
            # module's path, or of a library's line, tells less than the operator.
            least = (
                _least_width(line) if group.line else _LEAST_PLACE
                for line, group in zip(lines, groups, strict=True)
                if line
            )
            longest, operation = operation, min(operation, room - tensor - max(least, default=0))
            if operation < min(_LEAST_OP, longest):
                return tensor, 0, room - tensor
        return tensor, operation, room - tensor - operation

    def tensor_line(self, group: _TensorRow, widths: tuple[int, int, int, int], *, wide: bool) -> Text:
        """One group of tensors."""
        several, *widths_after, place = widths
        tensor = Text(_tensor(group), style=STYLES[group.category])
        operation = Text(short_op(group.op))
        for text, width in zip((tensor, operation), widths_after, strict=True):
            text.truncate(width, overflow="ellipsis", pad=True)
        location = self.tensor_location(group, place, wide=wide)
        line = Text.assemble(
            f"  {format_bytes(group.total_bytes):>{SIZE}} {_several(group):<{several}} ", tensor, "  "
        )
        if widths_after[1]:
            line.append(operation).append("  ")
        if wide:
            line.append(f"{NAMES[group.category]:<16}  ")
        line.append(location)
        line.rstrip()
        return line

    def tensor_told(self, group: _TensorRow) -> Iterator[Text]:
        """One group of tensors, whole, where columns have no room."""
        count = f" = {found}" if (found := _several(group)) else ""
        place = self.location(group.line or group.library_line) or group.module
        facts = ", ".join(filter(None, (_tensor(group), short_op(group.op), place)))
        yield from self.wrapped(Text(f"  {format_bytes(group.total_bytes)}{count} {facts}"), indent=4)

    def tensor_location(self, group: TensorGroup, width: int, *, wide: bool) -> str:
        """The user's line; where there is room, also that of the library between it and torch."""
        line, library = self.location(group.line), self.location(group.library_line)
        left = width - len(line) - len(" via ")
        if wide and line and library and left >= 12:
            return f"{line} via {elide_left(library, left)}"
        return elide_left(line or library or group.module, width)

    # Over time

    def phases(self, trace: MemoryTrace, device: int) -> Iterator[Text]:
        """Forward, backward and step: start, peak and end of the worst iteration."""
        found = phases(trace, device)
        summaries = sorted(summarise(found), key=lambda one: one.first.first_row)
        if not summaries:
            return
        shown = sorted(summaries, key=lambda one: -one.worst.peak_allocated)[:_PHASES]
        yield Text()
        lined_up = self.width >= 2 + _PHASE + 3 * _PHASE_FIGURE
        heads = "".join(f"{head:>{_PHASE_FIGURE}}" for head in ("start", "peak", "end"))
        yield self.heading("Phases", f"{'':{_PHASE - 6}}{heads}" if lined_up else "")
        for summary in summaries:
            if summary in shown:
                yield from [self.phase_line(summary)] if lined_up else self.phase_told(summary)

    def phase_line(self, summary: PhaseSummary) -> Text:
        """One part of the iterations."""
        worst = summary.worst
        figures = "".join(
            f"{format_bytes(amount):>{_PHASE_FIGURE}}"
            for amount in (worst.start_allocated, worst.peak_allocated, worst.end_allocated)
        )
        part = Text(summary.part)
        part.truncate(_PHASE, overflow="ellipsis", pad=True)
        note = _which(summary)
        return Text.assemble("  ", part, figures, (f"  {note}" if note else "", "bright_black"))

    def phase_told(self, summary: PhaseSummary) -> list[Text]:
        """The same where columns have no room."""
        worst, note = summary.worst, _which(summary)
        figures = (
            f"start {format_bytes(worst.start_allocated)}, peak {format_bytes(worst.peak_allocated)}, "
            f"end {format_bytes(worst.end_allocated)}"
        )
        return self.wrapped(Text(f"  {summary.part}: {figures}{f'; {note}' if note else ''}"), indent=4)

    # Pieces

    def heading(self, title: str, rest: str = "") -> Text:
        """A bold title, with figures after it."""
        return Text.assemble((title, "bold"), "  " if rest else "", rest)

    def wrapped(self, text: Text, *, indent: int = 2) -> list[Text]:
        """Break a sentence into lines of the page's width, all but the first indented; it is never cut."""
        return broken(text, self.width, indent=indent)

    def location(self, frame: Frame | None) -> str:
        """A source line, relative to the user's folder."""
        return short_location(frame, root=self.root)

    def relative(self, location: str) -> str:
        """A location that is text already, relative to the user's folder."""
        return (
            location if self.root is None else location.removeprefix(f"{self.root.as_posix().rstrip('/')}/")
        )

    def at_line(self, frame: Frame | None) -> str:
        """The same with a preposition; empty where the line is unknown."""
        return f" at {self.location(frame)}" if frame else ""


def _least_width(line: str) -> int:
    """Characters that a line needs behind the sign of what is missing: the file's name."""
    return 1 + len(Path(line).name)


def _tensor(group: TensorGroup) -> str:
    return group.tensor.replace(", ", ",") or f"({NAMES[group.category]})"


def _which(summary: PhaseSummary) -> str:
    """Which of the iterations a line shows."""
    if summary.count == 1:
        return ""
    worst = summary.worst
    if summary.first.peak_allocated == worst.peak_allocated == summary.last.peak_allocated:
        return f"same in all {summary.count}"
    return f"worst of {summary.count}: {worst.name.removesuffix(f'/{worst.part}')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorRow(TensorGroup):
    """A row of the table: groups that differ only in what it does not show.

    Attributes:
        largest_bytes: of the largest block; ``block_bytes`` are those of the smallest.
    """

    largest_bytes: int


def _joined(groups: tuple[TensorGroup, ...], *, by_library: bool) -> list[_TensorRow]:
    """Join the groups that differ only in what the table does not show: the module, the library's line, the size.

    Where nothing but the size is known, each size has a row.
    """
    alike: dict[tuple[object, ...], _TensorRow] = {}
    for group in groups:
        place = group.line or group.library_line or group.module
        size = None if group.tensor or group.op or place else group.block_bytes
        key = (
            group.tensor,
            group.op,
            group.category,
            place,
            group.library_line if by_library else None,
            size,
        )
        row = alike.get(key)
        if row is None:
            facts = {field.name: getattr(group, field.name) for field in fields(TensorGroup)}
            alike[key] = _TensorRow(**facts, largest_bytes=group.block_bytes)
            continue
        alike[key] = replace(
            row,
            count=row.count + group.count,
            total_bytes=row.total_bytes + group.total_bytes,
            block_bytes=min(row.block_bytes, group.block_bytes),
            largest_bytes=max(row.largest_bytes, group.block_bytes),
        )
    return sorted(alike.values(), key=lambda row: (-row.total_bytes, -row.largest_bytes))


def _several(row: _TensorRow) -> str:
    """How many blocks there are, and of which sizes."""
    return each_of_sizes(row.count, row.block_bytes, row.largest_bytes)
