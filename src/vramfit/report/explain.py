"""A trace explained, in the terminal and as JSON: where the bytes are, when they stood high, what would lower them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from vramfit.analysis import (
    NAMES,
    LeakReport,
    LocalPeak,
    Outcome,
    PoolUse,
    Removal,
    TensorGroup,
    Verdict,
    given_back_by_empty_cache,
    held,
)
from vramfit.report.folding import NARROW, folded
from vramfit.report.fragmentation import pool_to_json
from vramfit.report.growth_words import growth_words
from vramfit.report.held_words import held_lines
from vramfit.report.json_report import group_to_json, moment_to_json
from vramfit.report.leaks import LeakLines
from vramfit.report.rendering import json_values, printed_as_page, to_json
from vramfit.report.sections import SIZE, Sections
from vramfit.report.text import each, elide_left, percent, short_op
from vramfit.trace import Run
from vramfit.trace.without_history import RECORD_HISTORY, STATE
from vramfit.units import counted, format_bytes

EXPLAIN_SCHEMA = "vramfit.explain/1"
"""Name and version: the number grows when a key changes its meaning or goes away, not for new keys."""

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What `vramfit explain` shows of one device.

    Attributes:
        verdict: its verdict; the deciding card is the device explained.
        leaks: what grows from step to step; None where that was not searched for.
        pools: of a snapshot without history, how its pools are used; else empty.
    """

    run: Run
    verdict: Verdict
    peaks: Sequence[LocalPeak]
    leaks: LeakReport | None = None
    pools: Sequence[PoolUse] = ()

    @property
    def is_state(self) -> bool:
        """Whether all that is known of the device is what it held when its snapshot was dumped."""
        return self.run.trace.is_state(self.verdict.device.index)


@printed_as_page(Explanation)
class _ExplainReport(Sections):
    """The parts of an explanation."""

    def lines(self, found: Explanation) -> Iterator[Text]:
        """The headline, then where the bytes are, then the peaks."""
        yield from self.headline(found)
        device = found.verdict.device
        if not device.peak_allocated:
            yield Text("Nothing was allocated on this device.")
            return
        yield Text()
        ended = found.verdict.outcome is Outcome.DOES_NOT_FIT
        when = "When it ran out" if ended else "At the peak"
        yield from self.categories(device.breakdown, "When dumped" if found.is_state else when)
        yield from self.modules(device.breakdown)
        yield from self.tensors(device.breakdown)
        yield from held_lines(self, held(found.run.trace, device.index))
        yield from self.phases(found.run.trace, device.index)
        yield from self.peaks(found.peaks)
        if found.leaks is not None:
            yield Text()
            yield self.heading("Growth")
            for sentence in growth_words(found.verdict, found.run.progress, self.location):
                yield from self.wrapped(Text(f"  {sentence}", style="yellow"))
            yield from LeakLines(self.width, self.root).lines(found.leaks)

    def headline(self, found: Explanation) -> Iterator[Text]:
        """What was recorded, and its peaks."""
        run, device = found.run, found.verdict.device
        name = " ".join(run.program) or "the trace"
        where = f" (GPU {device.index})" if len(run.devices) > 1 or device.index > 0 else ""
        card = f" on {device.gpu}" if device.gpu and device.total else ""
        what = STATE if found.is_state else counted(len(run.trace), "event")
        yield from self.wrapped(Text.assemble((name, "bold"), f"{card}{where}: {what}"))
        if found.is_state:
            yield from self.state(found)
            return
        total = f" of {format_bytes(device.total)}" if device.total else ""
        context = f", {format_bytes(device.context)} outside PyTorch" if device.context else ""
        yield from self.wrapped(
            Text(
                f"  peak allocated {format_bytes(device.peak_allocated)}, reserved "
                f"{format_bytes(device.peak_reserved)}{total}{context}"
            )
        )
        oom = run.oom
        if oom is not None and oom.device == device.index:
            caught = " (caught)" if oom.handled else ""
            yield from self.wrapped(
                Text(
                    f"  ran out of memory{self.at_line(oom.user_line)}{caught}: asked for "
                    f"{format_bytes(oom.requested_bytes)} with {format_bytes(oom.free_bytes)} free on the card",
                    style="bold red" if not oom.handled else "yellow",
                )
            )
        for position, reason in enumerate(found.verdict.why):
            label = "  why  " if position == 0 else "       "
            yield from self.wrapped(Text.assemble((label, "bold"), reason), indent=7)

    def state(self, found: Explanation) -> Iterator[Text]:
        """The figures of a snapshot without history, what is free of them, and what would tell more."""
        device = found.verdict.device
        blocks = sum(pool.blocks for pool in found.pools)
        segments = sum(pool.segments for pool in found.pools)
        inside = f" in {counted(blocks, 'block')}" if found.pools else ""
        if waiting := device.breakdown.active - device.breakdown.allocated:
            inside = f" (and {format_bytes(waiting)} that wait for a stream)"
        held = f" in {counted(segments, 'segment')}" if found.pools else ""
        yield from self.wrapped(
            Text(
                f"  allocated {format_bytes(device.peak_allocated)}{inside}, "
                f"reserved {format_bytes(device.peak_reserved)}{held}"
            )
        )
        given_back = given_back_by_empty_cache(found.pools)
        private = sum(pool.releasable for pool in found.pools if pool.is_private)
        beside = sum(pool.inactive_split for pool in found.pools)
        free = [
            *([f"{format_bytes(given_back)} that empty_cache would give back"] if given_back else []),
            *([f"{format_bytes(private)} in free segments of private pools"] if private else []),
            *([f"{format_bytes(beside)} beside live blocks"] if beside else []),
        ]
        if free:
            yield from self.wrapped(Text(f"  free in it: {', '.join(free)} (see --fragmentation)"))
        missing = "Its peak, the requests, and what settings would change are not in it"
        yield from self.wrapped(Text(f"  {missing}. {RECORD_HISTORY}.", style="yellow"))

    def peaks(self, found: Sequence[LocalPeak]) -> Iterator[Text]:
        """When memory stood high, and what would have to go."""
        if not found:
            return
        yield Text()
        yield self.heading("Local peaks")
        for peak in found:
            times = f" ×{peak.count}" if peak.count > 1 else ""
            then = self.describe(peak.breakdown.moment).removeprefix(", ")
            line = Text.assemble(
                (f"  {format_bytes(peak.allocated):>{SIZE}}", "bold"), f"{times:<6} {then or 'event'}"
            )
            if not then:
                line.append(f" {peak.row:,}")
            yield line
            kinds = sorted(
                ((amount, NAMES[kind]) for kind, amount in peak.breakdown.categories.items() if amount),
                reverse=True,
            )
            held = ", ".join(f"{name} {percent(amount, peak.allocated)}" for amount, name in kinds[:4])
            yield from self.wrapped(Text(f"{'':{SIZE + 4}}{held}", style="bright_black"), indent=SIZE + 4)
            yield from self.removal(peak, peak.removal)

    def removal(self, peak: LocalPeak, removal: Removal) -> Iterator[Text]:
        """What would have to go to lower it."""
        indent = " " * (SIZE + 4)
        share = percent(round(removal.share * 1000), 1000)
        yield Text(f"{indent}to lower it by {share} ({format_bytes(removal.wanted)}), without:")
        for group in removal.groups[:_SHOWN]:
            yield from self.group(group, indent)
        if rest := removal.groups[_SHOWN:]:
            left = format_bytes(sum(group.total_bytes for group in rest))
            yield Text(f"{indent}  {left:>{SIZE}} in {len(rest)} more groups", style="bright_black")
        lowered = peak.allocated - removal.freed
        if removal.run_peak > lowered:
            yield Text(
                f"{indent}the run would then peak at {format_bytes(removal.run_peak)}, at another moment",
                style="yellow",
            )

    def group(self, group: TensorGroup, indent: str) -> Iterator[Text]:
        """One group of tensors, in a line where there is room."""
        found = each(group.count, group.block_bytes)
        what = " ".join(filter(None, (found, group.tensor.replace(", ", ",") or NAMES[group.category])))
        place = self.location(group.line or group.library_line) or group.module
        head = f"{indent}  {format_bytes(group.total_bytes):>{SIZE}} {what}"
        line = Text("  ".join(filter(None, (head, short_op(group.op)))))
        if self.width >= NARROW and len(line) + 2 + len(place) > self.width:
            line = Text(head)  # the line tells more than the operator
        if place and self.width < NARROW:
            line.append(f"  {place}")
        elif place:
            line.append("  ").append(elide_left(place, max(10, self.width - len(line) - 2)))
        yield from folded(line, self.width)


@json_values.register(Explanation)
def _json_values(found: Explanation) -> dict[str, Any]:
    """The explanation as values that `json` can write; docs/json.md describes them. Sizes are bytes."""
    return {
        "schema": EXPLAIN_SCHEMA,
        "run": to_json(found.run, found.verdict),
        "peaks": [_peak(peak) for peak in found.peaks],
        "leaks": None if found.leaks is None else to_json(found.leaks),
        "is_state": found.is_state,
        "pools": [pool_to_json(pool) for pool in found.pools],
    }


def _peak(peak: LocalPeak) -> dict[str, Any]:
    removal = peak.removal
    return {
        "allocated_bytes": peak.allocated,
        "prominence_bytes": peak.prominence,
        "count": peak.count,
        "moment": moment_to_json(peak.breakdown.moment),
        "categories": {
            kind.name.lower(): amount for kind, amount in peak.breakdown.categories.items() if amount
        },
        "modules": {
            child.path: child.total_bytes for child in peak.breakdown.modules.children if child.total_bytes
        },
        "tensors": [group_to_json(group) for group in peak.breakdown.tensors],
        "removal": {
            "share": removal.share,
            "wanted_bytes": removal.wanted,
            "freed_bytes": removal.freed,
            "run_peak_bytes": removal.run_peak,
            "run_peak_event": removal.run_row,
            "groups": [group_to_json(group) for group in removal.groups],
        },
    }
