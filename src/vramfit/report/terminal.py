"""A run in the terminal: verdict first, then where the bytes are, in at most about sixty lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vramfit.analysis import (
    NAMES,
    NO_CARD,
    Breakdown,
    DeviceVerdict,
    Moment,
    Outcome,
    PhaseSummary,
    TensorGroup,
    Verdict,
    fold_layers,
    growth,
    phases,
    short_location,
    summarise,
)
from vramfit.report.text import (
    bar,
    elide_left,
    percent,
    print_lines,
    seconds,
    short_op,
    split_width,
    tree_lines,
)
from vramfit.trace import Category, Frame, Run
from vramfit.units import MIB, format_bytes

_STYLES = {
    Category.PARAMETERS: "blue",
    Category.GRADIENTS: "cyan",
    Category.OPTIMIZER_STATE: "magenta",
    Category.ACTIVATIONS: "green",
    Category.INPUTS: "yellow",
    Category.TEMPORARIES: "red",
    Category.WORKSPACES: "bright_blue",
    Category.OTHER: "bright_black",
}
_WIDEST = 140
_MODULES, _TENSORS, _PHASES, _WARNINGS = 12, 8, 6, 5
_SIZE = 10


def print_terminal(run: Run, verdict: Verdict, console: Console, *, root: Path | None = None) -> None:
    """Print a run.

    Args:
        run: what happened on the virtual cards.
        verdict: what `vramfit.analysis.verdict` says about it.
        console: where to; its width, colour and encoding are respected.
        root: the user's folder; file names below it are shown relative to it.
    """
    page = _Page(console.width, root)
    print_lines(console, page.lines(run, verdict), page.width)


def render_terminal(run: Run, verdict: Verdict, *, width: int = 80, root: Path | None = None) -> str:
    """The same as plain text of ``width`` columns, without colour."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False)
    print_terminal(run, verdict, console, root=root)
    return stream.getvalue()


class _Page:
    """The parts of the report for one width."""

    def __init__(self, width: int, root: Path | None) -> None:
        self.width = min(width, _WIDEST)
        self.root = root

    def lines(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """All lines of the report."""
        if _never_used_a_card(verdict):
            yield from self.unused(run, verdict)
            return
        yield from self.headline(run, verdict)
        if verdict.device.index != NO_CARD:
            yield from self.card(run, verdict)
        yield from self.warnings(run)
        yield Text()
        yield self.footer(run)

    def unused(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """The report of a program that never came to use a card: there are no bytes to show."""
        if verdict.outcome is Outcome.FAILED:
            reason = f": {run.error}" if run.error else ""
            failed = f" (exit code {run.exit_code}) before it used a card{reason}"
            yield from self.wrapped(Text.assemble(("! the program failed", "bold red"), failed))
            yield from self.warnings(run)
            return
        gpu = (verdict.device.gpu, "bold")
        yield from self.wrapped(
            Text.assemble(("✓ fits ", "bold green"), gpu, ": the program did not use the card")
        )
        yield from self.warnings(run)
        yield Text()
        yield self.footer(run)

    def card(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """All about the card that decides."""
        yield Text()
        yield from self.cards(run, verdict)
        device = verdict.device
        yield Text()
        if device.peak_allocated:
            yield from self.categories(device.breakdown, verdict)
            yield from self.modules(device.breakdown)
            yield from self.tensors(device.breakdown)
            yield from self.phases(run, device.index)
        else:
            yield Text("The program allocated nothing on the card.")

    # The verdict

    def headline(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """A line or two that answer the question, and why not if so."""
        device = verdict.device
        where = device.gpu if len(verdict.devices) == 1 else f"{device.gpu} (GPU {device.index})"
        if verdict.outcome is Outcome.FITS:
            yield from self.fits(verdict, where)
        elif verdict.outcome is Outcome.DOES_NOT_FIT:
            yield from self.does_not_fit(verdict, where)
        else:
            reason = f": {run.error}" if run.error else ""
            failed = (f" (exit code {run.exit_code}){reason}", "")
            yield from self.wrapped(Text.assemble(("! the program failed", "bold red"), failed))
            used = f"{format_bytes(device.used)} of {format_bytes(device.total)}"
            until_then = f"Until then it used {used} on {where}."
            if device.index == NO_CARD:
                until_then = "It saw no card: CUDA_VISIBLE_DEVICES hides them all."
            yield from self.wrapped(Text(f"  {until_then}"))

    def fits(self, verdict: Verdict, where: str) -> Iterator[Text]:
        """With how much to spare, and which smaller card would do."""
        device, card, oom = verdict.device, verdict.smallest_gpu, verdict.oom
        if device.index == NO_CARD:
            hidden = ": the program saw no card, CUDA_VISIBLE_DEVICES hides them all"
            yield from self.wrapped(Text.assemble(("✓ fits", "bold green"), hidden))
            return
        used = f"{format_bytes(device.used)} of {format_bytes(device.total)} used at the peak"
        figures = f": {used}, {format_bytes(device.headroom)} free"
        yield from self.wrapped(Text.assemble(("✓ fits ", "bold green"), (where, "bold"), figures))
        yield from self.error_bar(verdict)
        if oom is not None:
            request = format_bytes(oom.requested_bytes)
            place = self.at_line(oom.user_line)
            text = f"  The program ran out{place} (asked for {request}), caught it and went on."
            yield from self.wrapped(Text(text, style="yellow"))
        if card is not None and card.total_bytes < device.total:
            size = format_bytes(card.total_bytes)
            yield from self.wrapped(
                Text(f"  The smallest card with as much is {card.name} ({size}).", style="bright_black")
            )

    def error_bar(self, verdict: Verdict) -> Iterator[Text]:
        """How far estimated sizes let the peak be off, and whether that could change the answer."""
        device = verdict.device
        if not (device.error_above or device.error_below):
            return
        sides = ((device.error_above, "higher"), (device.error_below, "lower"))
        off = " or ".join(f"{format_bytes(amount)} {side}" for amount, side in sides if amount)
        text = f"  Some sizes are estimated: the peak may be up to {off}."
        if not verdict.certain:
            still = "then it does not fit" if verdict.outcome is Outcome.FITS else "then it fits this far"
            text = f"{text[:-1]}; {still}."
        yield from self.wrapped(Text(text, style="" if verdict.certain else "yellow"))

    def does_not_fit(self, verdict: Verdict, where: str) -> Iterator[Text]:
        """Where it ran out, by how much, why, and what to try."""
        oom = verdict.oom
        assert oom is not None
        during = f" in {verdict.moment.phase}" if verdict.moment and verdict.moment.phase else ""
        operation = f" ({short_op(oom.op)})" if oom.op else ""
        line = Text.assemble(
            ("✗ does not fit ", "bold red"),
            (where, "bold"),
            ": ran out of memory",
            (self.at_line(verdict.line), "bold"),
            f"{during}{operation}",
        )
        yield from self.wrapped(line)
        short = f": {format_bytes(verdict.short_by)} short" if verdict.short_by else ""
        yield from self.wrapped(
            Text(
                f"  It asked for {format_bytes(oom.requested_bytes)} with {format_bytes(oom.free_bytes)} free"
                f" of {format_bytes(oom.total_bytes)}{short}."
            )
        )
        yield from self.error_bar(verdict)
        for label, texts in (("why", verdict.why), ("try", verdict.advice)):
            for position, text in enumerate(texts):
                yield from self.wrapped(
                    Text.assemble((f"  {label if position == 0 else '   '}  ", "bold"), text), indent=7
                )
        card, need = verdict.smallest_gpu, format_bytes(verdict.needed)
        if card is None:
            text = f"  It needs at least {need}, and no card of the catalogue has that."
        else:
            size = format_bytes(card.total_bytes)
            text = f"  It needs at least {need}: the smallest card with that is {card.name} ({size})."
        yield from self.wrapped(Text(f"{text} Run it with --gpu 1TiB to see how much in all."))

    # The card

    def cards(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """A bar of each card's memory, and in figures what it shows."""
        if len(verdict.devices) > 1:
            for device in verdict.devices:
                label = Text(f"GPU {device.index} ", style="bold" if device is verdict.device else "")
                figures = f" {format_bytes(device.used):>{_SIZE}} of {format_bytes(device.total)}"
                yield label + self.card_bar(device, self.width - len(label) - len(figures)) + Text(figures)
        else:
            yield self.card_bar(verdict.device, self.width)
        yield from self.card_figures(run, verdict)

    def card_amounts(self, device: DeviceVerdict) -> list[tuple[str, int, str, str]]:
        """What the bar shows: name, bytes, character, style."""
        cached = max(0, device.peak_reserved - device.peak_allocated)
        free = max(0, device.total - device.used)
        return [
            ("allocated", device.peak_allocated, "█", "green"),
            ("cached", cached, "▓", "yellow"),
            ("context", device.context, "▒", "magenta"),
            ("free", free, "░", "bright_black"),
        ]

    def card_bar(self, device: DeviceVerdict, width: int) -> Text:
        """The card's memory as one bar of ``width`` characters."""
        amounts = self.card_amounts(device)
        cells = split_width([amount for _, amount, _, _ in amounts], width)
        return Text.assemble(
            *((glyph * count, style) for (_, _, glyph, style), count in zip(amounts, cells, strict=True))
        )

    def card_figures(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """The legend of the deciding card's bar, and slack and fragmentation."""
        device = verdict.device
        legend = Text(f"GPU {device.index} " if len(verdict.devices) > 1 else "")
        for name, amount, glyph, style in self.card_amounts(device):
            legend.append(f"{glyph} ", style=style)
            legend.append(f"{name} {format_bytes(amount)} ")
        yield from self.wrapped(legend)
        fragments = device.breakdown.fragmentation
        split = fragments.inactive_split
        parts = (
            f"{format_bytes(split)} fragmented ({percent(split, fragments.reserved)})",
            f"{format_bytes(fragments.releasable)} idle",
            f"slack {format_bytes(fragments.slack)}",
        )
        yield from self.wrapped(Text(f"reserved {format_bytes(device.peak_reserved)}: {', '.join(parts)}"))
        if pinned := run.host_pinned_peak_bytes:
            yield Text(f"pinned host memory {format_bytes(pinned)}, apart from the card")
        if (note := run.profile) is not None:
            calls = "1 call" if note.used == 1 else f"{note.used:,} calls"
            told = f"by a profile of {note.date} ({note.gpu}, torch {note.torch}): {calls} as measured"
            yield from self.wrapped(Text(told))

    # Where the bytes are

    def categories(self, breakdown: Breakdown, verdict: Verdict) -> Iterator[Text]:
        """The table of categories with bars."""
        when = "When it ran out" if verdict.outcome is Outcome.DOES_NOT_FIT else "At the peak"
        allocated = format_bytes(breakdown.allocated)
        yield self.heading(when, f"{allocated} allocated{self.describe(breakdown.moment)}")
        largest = max(breakdown.categories.values(), default=0)
        for kind, name in NAMES.items():
            amount = breakdown.categories[kind]
            if amount:
                drawn = bar(amount / largest, min(40, self.width - 42))
                yield Text.assemble(
                    f"  {name:<18}{format_bytes(amount):>{_SIZE}}{percent(amount, breakdown.allocated):>7}  ",
                    (drawn, _STYLES[kind]),
                )

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
        name_width = max(30, min(self.width - 52, 60))
        lines = tree_lines(tree, limit=_MODULES - (1 if tree.own_bytes else 0))
        for line in lines:
            label = elide_left("  " * line.depth + line.label, name_width)
            style = "" if line.node is not None else "bright_black"
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
        return Text.assemble("  ", (f"{label:<{width}}", style), f"{format_bytes(amount):>{_SIZE}}{share:>7}")

    def mostly(self, categories: object, total: int) -> Text:
        """What a module's bytes mostly are."""
        if not isinstance(categories, dict) or not categories:
            return Text()
        kind = max(categories, key=lambda one: categories[one])
        style = _STYLES[kind]
        prefix = "" if categories[kind] == total else "mostly "
        return Text.assemble("  ", (f"{prefix}{NAMES[kind]}", style))

    def tensors(self, breakdown: Breakdown) -> Iterator[Text]:
        """The largest groups of tensors with op and line."""
        wide = self.width >= 110
        alike = _joined(breakdown.tensors, by_library=wide)
        groups = alike[:_TENSORS]
        if not groups:
            return
        yield Text()
        yield self.heading("Largest tensors")
        fixed = 2 + _SIZE + 6 + (18 if wide else 0)
        flexible = self.width - fixed - 6
        tensor, operation = (flexible // 3, flexible // 7) if wide else (flexible * 2 // 5, flexible // 5)
        widths = (tensor, operation, flexible - tensor - operation)
        for group in groups:
            yield self.tensor_line(group, widths, wide=wide)
        if rest := len(alike) - len(groups) + breakdown.tensors_omitted[0]:
            left = sum(group.total_bytes for group in alike[_TENSORS:]) + breakdown.tensors_omitted[1]
            groups_left = "1 smaller group" if rest == 1 else f"{rest} smaller groups"
            yield Text(f"  {format_bytes(left):>{_SIZE}}  in {groups_left}", style="bright_black")

    def tensor_line(self, group: TensorGroup, widths: tuple[int, int, int], *, wide: bool) -> Text:
        """One group of tensors."""
        count = f"×{group.count}" if group.count > 1 else ""
        tensor = Text(
            group.tensor.replace(", ", ",") or f"({NAMES[group.category]})", style=_STYLES[group.category]
        )
        operation = Text(short_op(group.op))
        for text, width in ((tensor, widths[0]), (operation, widths[1])):
            text.truncate(width, overflow="ellipsis", pad=True)
        location = self.tensor_location(group, widths[2], wide=wide)
        line = Text.assemble(
            f"  {format_bytes(group.total_bytes):>{_SIZE}} {count:<5} ", tensor, "  ", operation, "  "
        )
        if wide:
            line.append(f"{NAMES[group.category]:<16}  ")
        line.append(location)
        line.rstrip()
        return line

    def tensor_location(self, group: TensorGroup, width: int, *, wide: bool) -> str:
        """The user's line; where there is room, also that of the library between it and torch."""
        line, library = self.location(group.line), self.location(group.library_line)
        left = width - len(line) - len(" via ")
        if wide and line and library and left >= 12:
            return f"{line} via {elide_left(library, left)}"
        return elide_left(line or library or group.module, width)

    # Over time

    def phases(self, run: Run, device: int) -> Iterator[Text]:
        """Forward, backward and step: start, peak and end of the worst iteration."""
        found = phases(run.trace, device)
        summaries = sorted(summarise(found), key=lambda one: one.first.first_row)
        if not summaries:
            return
        shown = sorted(summaries, key=lambda one: -one.worst.peak_allocated)[:_PHASES]
        yield Text()
        yield self.heading("Phases", f"{'start':>24}{'peak':>12}{'end':>12}")
        for summary in summaries:
            if summary in shown:
                yield self.phase_line(summary)
        grown = growth(found)
        if grown.per_iteration is not None and grown.per_iteration >= MIB:
            more = format_bytes(grown.per_iteration)
            text = f"  Each iteration leaves {more} more allocated than the last: probably a leak."
            yield from self.wrapped(Text(text, style="yellow"))

    def phase_line(self, summary: PhaseSummary) -> Text:
        """One part of the iterations."""
        worst = summary.worst
        note = ""
        if summary.count > 1:
            same = summary.first.peak_allocated == worst.peak_allocated == summary.last.peak_allocated
            which = worst.name.removesuffix(f"/{worst.part}")
            note = f"  same in all {summary.count}" if same else f"  worst of {summary.count}: {which}"
        figures = "".join(
            f"{format_bytes(amount):>12}"
            for amount in (worst.start_allocated, worst.peak_allocated, worst.end_allocated)
        )
        part = Text(summary.part)
        part.truncate(18, overflow="ellipsis", pad=True)
        return Text.assemble("  ", part, figures, (note, "bright_black"))

    def warnings(self, run: Run) -> Iterator[Text]:
        """What limits the exactness of this run, or is noteworthy."""
        if not run.warnings:
            return
        yield Text()
        yield self.heading("Warnings")
        groups: dict[str, list[str]] = {}
        for warning in run.warnings:
            places = groups.setdefault(warning.message, [])
            if warning.location:
                times = f" ×{warning.count}" if warning.count > 1 else ""
                places.append(f"{self.relative(warning.location)}{times}")
        for message, places in list(groups.items())[:_WARNINGS]:
            yield from self.warning(message, places)
        if (more := len(groups) - _WARNINGS) > 0:
            yield Text(f"  and {more} more: --json lists them all", style="bright_black")

    def warning(self, message: str, places: list[str]) -> list[Text]:
        """One warning whole, and as many of its places as two lines, or one more than it takes itself, hold."""
        bare = self.broken(Text(f"  {message}", style="yellow"), indent=4)
        room = max(2, len(bare) + 1)
        for shown in range(len(places), 0, -1):
            left = f" and {len(places) - shown} more" if shown < len(places) else ""
            text = Text(f"  {message} [{', '.join(places[:shown])}{left}]", style="yellow")
            lines = self.broken(text, indent=4)
            if len(lines) <= room or shown == 1:
                return lines
        return bare

    def footer(self, run: Run) -> Text:
        """What was run, and for how long."""
        parts = [
            f"{run.ops:,} ops",
            f"{seconds(run.seconds_simulated)} simulated",
            f"{seconds(run.seconds_wall)} here",
            f"torch {run.torch_version}",
        ]
        return Text(" · ".join(parts), style="bright_black")

    # Pieces

    def heading(self, title: str, rest: str = "") -> Text:
        """A bold title, with figures after it, cut to the width."""
        line = Text.assemble((title, "bold"), "  " if rest else "", rest)
        line.truncate(self.width, overflow="ellipsis")
        return line

    def wrapped(self, text: Text, *, indent: int = 2, most: int = 3) -> Iterator[Text]:
        """Break a sentence into lines of the page's width, at most ``most`` of them."""
        yield from self.broken(text, indent=indent)[:most]

    def broken(self, text: Text, *, indent: int) -> list[Text]:
        """Break a sentence into lines of the page's width, all but the first indented."""
        console = Console(width=self.width)
        first, *more = text.wrap(console, self.width) or [Text()]
        first.rstrip()
        if not more:
            return [first]
        rest = text[len(first) :]
        rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
        lines = rest.wrap(console, self.width - indent)
        for line in lines:
            line.rstrip()
        return [first, *(Text(" " * indent) + line for line in lines)]

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


def _never_used_a_card(verdict: Verdict) -> bool:
    """Whether there were cards, and none has as much as a CUDA context."""
    return (
        verdict.device.index != NO_CARD
        and verdict.oom is None
        and not any(
            device.context or device.peak_reserved or device.peak_allocated for device in verdict.devices
        )
    )


def _joined(groups: tuple[TensorGroup, ...], *, by_library: bool) -> list[TensorGroup]:
    """Join the groups that differ only in what the table does not show: the module, the library's line."""
    alike: dict[tuple[object, ...], TensorGroup] = {}
    for group in groups:
        place = group.line or group.library_line or group.module
        key = (group.tensor, group.op, group.category, place, group.library_line if by_library else None)
        known = alike.get(key)
        alike[key] = (
            group
            if known is None
            else replace(
                known, count=known.count + group.count, total_bytes=known.total_bytes + group.total_bytes
            )
        )
    return sorted(alike.values(), key=lambda group: -group.total_bytes)
