"""A run in the terminal: verdict first, then where the bytes are, in at most about sixty lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from vramfit.analysis import (
    NO_CARD,
    VARIES,
    DeviceVerdict,
    Outcome,
    Verdict,
    held,
    hints,
)
from vramfit.report.growth_words import growth_words
from vramfit.report.held_words import held_lines
from vramfit.report.need_words import bar_words, need_words
from vramfit.report.program_words import plan_words, program_words
from vramfit.report.rendering import printed_as_page
from vramfit.report.sections import SIZE, Sections
from vramfit.report.text import (
    elide_middle,
    ending_words,
    exit_words,
    files_lines,
    fits_words,
    percent,
    seconds,
    short_op,
    split_width,
    steady_words,
    unseen_words,
    unused_words,
)
from vramfit.trace import Run, Source
from vramfit.units import counted, format_bytes

_WARNINGS = 5
_SITES = 5
_UNBROKEN = 10_000
_ERROR = 300
"""Characters of an error that are shown: the program has printed it whole."""


def headline(run: Run, verdict: Verdict, *, root: Path | None = None) -> list[str]:
    """The first lines of the report, which answer whether it fits and why not, each whole and without style."""
    page = _RunReport(_UNBROKEN, root)
    page.width = _UNBROKEN
    if _never_used_a_card(verdict):
        return [line.plain.strip() for line in page.unused_headline(run, verdict)]
    return [line.plain.strip() for line in (*page.headline(run, verdict), *page.hints(run, verdict))]


@printed_as_page(Run)
class _RunReport(Sections):
    """The parts of the report of a run."""

    def lines(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """All lines of the report."""
        if _never_used_a_card(verdict):
            yield from self.unused(run, verdict)
            return
        yield from self.headline(run, verdict)
        yield from self.program(run, verdict)
        yield from self.hints(run, verdict)
        if verdict.device.index != NO_CARD:
            yield from self.card(run, verdict)
        yield from self.host(run)
        yield from self.warnings(run)
        yield from self.files(run)
        yield Text()
        yield self.footer(run)

    def program(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """What the program trains, what cannot be told of it, and the plan that it was run with."""
        if run.observed is not None:
            if words := program_words(run.observed):
                yield from self.wrapped(Text(f"  It {words}."))
            for unclear in run.observed.unclear:
                yield from self.wrapped(Text(f"  {unclear[0].upper()}{unclear[1:]}.", style="yellow"))
        if run.plan is not None:
            yield from self.wrapped(Text(f"  {plan_words(run.plan, verdict)}"))

    def hints(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """What is worth a line of its own."""
        for hint in hints(run, verdict):
            place = f" [{self.relative(hint.location)}]" if hint.location else ""
            yield from self.wrapped(Text(f"  {hint.message}{place}.", style="yellow"))

    def unused(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """The report of a program that never used a card: there are no bytes to show."""
        yield from self.unused_headline(run, verdict)
        yield from self.warnings(run)
        yield from self.files(run)
        if verdict.outcome is not Outcome.FAILED:
            yield Text()
            yield self.footer(run)

    def unused_headline(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """That a program never used a card, and why that may be."""
        if verdict.outcome is Outcome.FAILED:
            reason = f": {elide_middle(run.error, _ERROR)}" if run.error else ""
            failed = f" ({exit_words(run.exit_code)}) before it used a card{reason}"
            yield from self.wrapped(Text.assemble(("! the program failed", "bold red"), failed))
            return
        said, why = unused_words(run, verdict)
        yield from self.wrapped(Text(f"! {said}", style="bold yellow"))
        yield from self.wrapped(Text(f"  {why}"))

    def card(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """All about the card that decides."""
        yield Text()
        yield from self.cards(run, verdict)
        device = verdict.device
        yield Text()
        if device.peak_allocated:
            when = "When it ran out" if verdict.outcome is Outcome.DOES_NOT_FIT else "At the peak"
            yield from self.categories(device.breakdown, when)
            yield from self.modules(device.breakdown)
            yield from self.tensors(device.breakdown)
            yield from held_lines(self, held(run.trace, device.index))
            yield from self.phases(run.trace, device.index)
        else:
            yield Text("The program allocated nothing on the card.")

    # The verdict

    def headline(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """A line or two that answer the question, and why not if so."""
        device = verdict.device
        where = device.gpu if len(verdict.devices) == 1 else f"{device.gpu} (GPU {device.index})"
        if verdict.outcome in (Outcome.FITS, Outcome.FITS_SO_FAR):
            yield from self.fits(run, verdict, where)
        elif verdict.outcome is Outcome.DOES_NOT_FIT:
            yield from self.does_not_fit(run, verdict, where)
        else:
            reason = f": {elide_middle(run.error, _ERROR)}" if run.error else ""
            failed = (f" ({exit_words(run.exit_code)}){reason}", "")
            yield from self.wrapped(Text.assemble(("! the program failed", "bold red"), failed))
            used = f"{format_bytes(device.used)} of {format_bytes(device.total)}"
            until_then = f"Until then it used {used} on {where}."
            if device.index == NO_CARD:
                until_then = "It saw no card: CUDA_VISIBLE_DEVICES hides them all."
            yield from self.wrapped(Text(f"  {until_then}"))

    def fits(self, run: Run, verdict: Verdict, where: str) -> Iterator[Text]:
        """With how much to spare, and which smaller card would do."""
        device, card, oom = verdict.device, verdict.smallest_gpu, verdict.oom
        used = f"{format_bytes(device.used)} of {format_bytes(device.total)} used at the peak"
        ending = ending_words(run.progress)
        figures = f"{steady_words(run.progress)}: {used}, {format_bytes(device.headroom)} free{ending}"
        said = (fits_words(run.progress), "bold green" if verdict.fits else "bold yellow")
        yield from self.wrapped(Text.assemble(said, (where, "bold"), figures))
        if run.progress.is_cut:
            yield from self.wrapped(Text(f"  {unseen_words(run.progress)}"))
        yield from self.error_bar(verdict)
        yield from self.growth(run, verdict)
        if oom is not None:
            request = format_bytes(oom.requested_bytes)
            place = self.at_line(oom.user_line)
            text = f"  The program ran out{place} (asked for {request}), caught it and went on."
            yield from self.wrapped(Text(text, style="yellow"))
        if card is not None and card.total_bytes < device.total and run.source is not Source.CPU:
            size = format_bytes(card.total_bytes)
            yield from self.wrapped(
                Text(f"  The smallest card with as much is {card.name} ({size}).", style="bright_black")
            )

    def growth(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """What grows, and when memory runs out by it."""
        for sentence in growth_words(verdict, run.progress, self.location):
            yield from self.wrapped(Text(f"  {sentence}", style="yellow"))

    def error_bar(self, verdict: Verdict) -> Iterator[Text]:
        """How far estimated sizes let the peak be off, whether that could change the answer, and how close it is."""
        yield from self.estimated(verdict)
        if verdict.close:
            text = f"This is close: a card's memory differs by up to {format_bytes(VARIES)} from driver to driver."
            yield from self.wrapped(Text(f"  {text}", style="yellow"))

    def estimated(self, verdict: Verdict) -> Iterator[Text]:
        """How far estimated sizes let the peak be off, and whether that could change the answer."""
        if text := bar_words(verdict):
            yield from self.wrapped(Text(f"  {text}", style="" if verdict.certain else "yellow"))
        if not verdict.bounded:
            text = "  This is not certain: not all of the program was followed (see the warnings)."
            yield from self.wrapped(Text(text, style="yellow"))

    def does_not_fit(self, run: Run, verdict: Verdict, where: str) -> Iterator[Text]:
        """Where it ran out, by how much, why, what was tried and helps, and what the program needs."""
        if run.ran_out:
            yield from self.ran_out(verdict, where)
        else:
            failed = (("✗ does not fit ", "bold red"), (where, "bold"))
            yield from self.wrapped(Text.assemble(*failed, ": there is no room for the CUDA context"))
        yield from self.error_bar(verdict)
        yield from self.growth(run, verdict)
        for label, texts in (("why", verdict.why), ("try", verdict.advice)):
            for position, text in enumerate(texts):
                yield from self.wrapped(
                    Text.assemble((f"  {label if position == 0 else '   '}  ", "bold"), text), indent=7
                )
        yield from self.wrapped(Text(f"  {need_words(run, verdict)}"))

    def ran_out(self, verdict: Verdict, where: str) -> Iterator[Text]:
        """The request that failed, and by how much."""
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

    # The card

    def cards(self, run: Run, verdict: Verdict) -> Iterator[Text]:
        """A bar of each card's memory, and in figures what it shows."""
        if len(verdict.devices) > 1:
            for device in verdict.devices:
                label = Text(f"GPU {device.index} ", style="bold" if device is verdict.device else "")
                figures = f" {format_bytes(device.used):>{SIZE}} of {format_bytes(device.total)}"
                room = max(0, self.width - len(label) - len(figures))
                yield label + self.card_bar(device, room) + Text(figures)
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
            calls = counted(note.used, "call")
            told = f"by a profile of {note.date} ({note.gpu}, torch {note.torch}): {calls} as measured"
            yield from self.wrapped(Text(told))
        if (asked := run.cudnn) is not None:
            told = f"cuDNN {asked.version}"
            if asked.convolutions or asked.attentions:
                told += f" asked for {asked.card}, without a card"
                if asked.version != asked.torch_version:
                    told += f"; this torch has {asked.torch_version}, which may choose otherwise"
            if asked.attention_by_rules:
                told += f"; attention by rules: {asked.attention_by_rules}"
            yield from self.wrapped(Text(told))

    def host(self, run: Run) -> Iterator[Text]:
        """The host's memory, where it was asked for."""
        host = run.host
        if host is None:
            return
        yield Text()
        yield self.heading("Host memory (what Python allocates)")
        if not host.steps:
            yield from self.wrapped(
                Text("  no step was seen: an optimizer's, or a call of the largest module")
            )
            return
        grows, pinned = host.grows_by, host.pinned_grows_by
        text = f"  {format_bytes(host.bytes[-1])} after step {host.steps[-1]}"
        text += f", {format_bytes(grows)} more each step, probably a leak" if grows else ", no steady growth"
        yield from self.wrapped(Text(text, style="yellow" if grows else ""))
        for site in host.growing[:_SITES]:
            place = self.relative(f"{site.file}:{site.line}")
            yield from self.wrapped(
                Text(f"  {format_bytes(host.per_step(site.bytes)):>{SIZE}} each step  {place}"), indent=4
            )
        if pinned:
            text = f"  page-locked memory grows by {format_bytes(pinned)} each step, probably a leak"
            yield from self.wrapped(Text(text, style="yellow"))

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
        bare = self.wrapped(Text(f"  {message}", style="yellow"), indent=4)
        room = max(2, len(bare) + 1)
        for shown in range(len(places), 0, -1):
            left = f" and {len(places) - shown} more" if shown < len(places) else ""
            text = Text(f"  {message} [{', '.join(places[:shown])}{left}]", style="yellow")
            lines = self.wrapped(text, indent=4)
            if len(lines) <= room or shown == 1:
                return lines
        return bare

    def files(self, run: Run) -> Iterator[Text]:
        """What it would have done to files."""
        title, *lines = files_lines(run.files, self.relative) or [""]
        if title:
            yield Text()
            yield self.heading(title)
            for line in lines:
                yield from self.wrapped(Text(f"  {line}"), indent=4)

    def footer(self, run: Run) -> Text:
        """What was run, and for how long."""
        parts = [
            *([counted(run.ops, "op")] if run.source is not Source.CARD else []),  # nobody counts a card's
            *([f"{seconds(run.seconds_simulated)} simulated"] if run.source is Source.VIRTUAL else []),
            f"{seconds(run.seconds_wall)} here",
            f"torch {run.torch_version}",
        ]
        return Text(" · ".join(parts), style="bright_black")


def _never_used_a_card(verdict: Verdict) -> bool:
    """Whether no card has as much as a CUDA context."""
    failed = verdict.outcome is Outcome.FAILED and verdict.device.index != NO_CARD and verdict.oom is None
    unused = failed and not any(device.is_used for device in verdict.devices)
    return unused or verdict.outcome is Outcome.UNUSED
