"""Why reserved memory is not used: causes, what pins it, and what would have served a request; terminal and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from vramfit.analysis import (
    NAMES,
    Fit,
    FragmentationCause,
    FragmentationCauses,
    Holder,
    OomExplanation,
    OomVerdict,
    PinGroup,
    PinnedSegment,
    PoolUse,
    Remedy,
    WhatIfAnswer,
    given_back_by_empty_cache,
)
from vramfit.report.json_report import frame_to_json, group_to_json, moment_to_json
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.sections import SIZE, Sections
from vramfit.report.text import each, seconds, short_op
from vramfit.trace import CapacitySource
from vramfit.units import counted, format_bytes

_CAUSES, _PINS, _SEGMENTS, _POOLS, _HOLDERS = 8, 6, 3, 8, 2
_NOTABLE = 0.001
"""Share of the reserved bytes from which a cause is shown in the terminal."""


@printed_as_page(FragmentationCauses)
class _FragmentationReport(Sections):
    """The parts, for one width."""

    def lines(self, found: FragmentationCauses) -> Iterator[Text]:
        """The sum, the causes, what pins them, and what could be served."""
        yield from self.sum(found)
        least = found.fragmentation.reserved * _NOTABLE
        shown = [cause for cause in found.causes[:_CAUSES] if cause.bytes >= least or cause is found.main]
        told: set[Remedy] = set()
        for cause in shown:
            yield from self.cause(cause, told)
        rest = [cause for cause in found.causes if cause not in shown]
        if rest:
            amount = format_bytes(sum(cause.bytes for cause in rest))
            yield Text(f"  {amount:>{SIZE}}  for {counted(len(rest), 'other cause')}", style="bright_black")
        if found.is_state:
            yield from self.state(found)
        if found.oom is not None:
            yield Text()
            yield from self.oom(found.oom)
        if found.pins:
            yield Text()
            yield self.heading("Live blocks beside free memory")
            for pin in found.pins[:_PINS]:
                yield from self.pin(pin)
        if found.segments and found.is_state:
            yield Text()
            yield self.heading("Segments with the most free memory beside live blocks")
            yield from self.segments_of_a_state(found.segments)
        elif found.segments:
            yield Text()
            yield self.heading("How the worst segments came to be")
            for segment in found.segments[:_SEGMENTS]:
                yield from self.segment(segment)
        yield Text()
        yield from self.largest(found)

    def sum(self, found: FragmentationCauses) -> Iterator[Text]:
        """How many reserved bytes no request asked for."""
        reserved = found.fragmentation.reserved
        spare = max(0, reserved - found.requested)
        share = f" ({100 * spare / reserved:.1f} %)" if reserved else ""
        when = self.describe(found.moment).removeprefix(", ") or f"event {found.moment.row:,}"
        when = f"at {when}" if not found.is_state else "when the snapshot was dumped"
        request = found.request
        why = ""
        if request is not None:
            what = "failed" if request.failed else "needed new memory"
            why = f", where a request of {format_bytes(request.size)} {what}"
        yield from self.wrapped(
            Text.assemble(
                ("Reserved but not asked for: ", "bold"),
                f"{format_bytes(spare)} of {format_bytes(reserved)}{share} {when}{why}",
            )
        )

    def cause(self, cause: FragmentationCause, told: set[Remedy]) -> Iterator[Text]:
        """One cause with its evidence and tested remedies; those ``told`` before appear by name only."""
        indent = SIZE + 4
        head = Text.assemble((f"  {format_bytes(cause.bytes):>{SIZE}}  ", "bold"), cause.kind.value)
        yield from self.wrapped(head, indent=indent)
        yield from self.wrapped(Text(f"{'':{indent}}{cause.evidence}", style="bright_black"), indent=indent)
        for remedy in tested_remedies(cause)[:2]:
            text = (
                f"as above: {remedy.alloc_conf or remedy.kind.value}"
                if remedy in told
                else remedy_text(remedy)
            )
            told.add(remedy)
            yield from self.wrapped(Text.assemble((f"{'':{indent}}→ ", "green"), text), indent=indent + 2)

    def state(self, found: FragmentationCauses) -> Iterator[Text]:
        """What a snapshot without history tells of the pools, and what it cannot tell."""
        missing = "Which settings or which order of requests would help, only a recorded history can tell"
        yield from self.wrapped(Text(f"  {missing}.", style="yellow"))
        yield Text()
        yield self.heading("Pools")
        for pool in found.pools[:_POOLS]:
            yield from self.wrapped(
                Text.assemble((f"  {format_bytes(pool.reserved):>{SIZE}}  ", "bold"), pool_text(pool)),
                indent=SIZE + 4,
            )
        if rest := found.pools[_POOLS:]:
            left = format_bytes(sum(pool.reserved for pool in rest))
            yield Text(f"  {left:>{SIZE}}  in {counted(len(rest), 'other pool')}", style="bright_black")

    def segments_of_a_state(self, found: Sequence[PinnedSegment]) -> Iterator[Text]:
        """The worst segments of a snapshot without history, one of each kind."""
        texts = []
        for pinned in found:
            kind = "expandable " if pinned.segment.expandable else ""
            held = [self.holder(pin) for pin in pinned.pins[:_HOLDERS]]
            more = len(pinned.pins) + pinned.pins_omitted - len(held)
            held += [f"{counted(more, 'other block')}"] if more else []
            text = (
                f"{kind}segment of {format_bytes(pinned.segment.size)} with {format_bytes(pinned.free)} free, at most "
                f"{format_bytes(pinned.largest_gap)} at once, held by {', '.join(held)}"
            )
            texts.append(text)
        for text in list(dict.fromkeys(texts))[:_SEGMENTS]:
            yield from self.wrapped(Text(f"  {text}"), indent=4)

    def oom(self, oom: OomExplanation) -> Iterator[Text]:
        """What would have served the request."""
        yield self.heading(f"Would the request of {format_bytes(oom.requested)} have fitted?")
        for answer in oom.answers:
            yield Text(f"  {answer.what.value:<26}{answer_text(answer)}")
        yield from self.wrapped(Text.assemble(("  → ", "green"), verdict_text(oom)), indent=4)
        if not oom.reproduced:
            yield from self.wrapped(
                Text("  Replayed as recorded, the request is served, so these answers prove nothing.")
            )

    def pin(self, pin: PinGroup) -> Iterator[Text]:
        """One kind of pinning blocks."""
        group = pin.group
        several = each(group.count, group.block_bytes)
        size = "" if several else format_bytes(group.block_bytes)
        what = group.tensor or short_op(group.op) or size
        where = self.location(group.line or group.library_line) or group.module
        facts = [" ".join(filter(None, (several, what))), NAMES[group.category]]
        facts += [where] if where else []
        facts += [f"made in {pin.phase}"] if pin.phase else []
        facts += [f"{pin.in_holes:,} in holes of earlier blocks"] if pin.in_holes else []
        if pin.freeing_releases:
            facts.append(f"without them {format_bytes(pin.freeing_releases)} could be given back")
        yield from self.wrapped(
            Text.assemble((f"  {format_bytes(pin.pinned):>{SIZE}}  ", "bold"), ", ".join(facts)),
            indent=SIZE + 4,
        )

    def segment(self, pinned: PinnedSegment) -> Iterator[Text]:
        """The history of one segment."""
        segment = pinned.segment
        kind = "expandable " if segment.expandable else ""
        size, free = format_bytes(segment.size), format_bytes(pinned.free)
        story = [f"{kind}segment of {size} with {free} free"]
        if pinned.taken_for is not None:
            story.append(f"taken for {self.holder(pinned.taken_for)}")
        elif segment.born < 0:
            story.append("there before the trace began")
        if pinned.gone:
            when = f" in {pinned.last_freed_phase}" if pinned.last_freed_phase else ""
            story.append(
                f"{counted(pinned.gone, 'block')} of {format_bytes(pinned.gone_bytes)} came and went, the last{when} "
                f"at event {pinned.last_freed:,}"
            )
        if pinned.pins:
            late = max(pinned.pins, key=lambda pin: pin.born)
            lasts = "to the end" if late.freed is None else f"until event {late.freed:,}"
            alone = pinned.taken_for is not None and late.born == pinned.taken_for.born
            place = (
                ", put in a hole that another left"
                if late.in_hole
                else ""
                if alone
                else ", put beside what was there"
            )
            more = len(pinned.pins) + pinned.pins_omitted - 1
            others = f", with {counted(more, 'other')}" if more else ""
            age = f", {seconds(late.age_us / 1e6)} old" if late.age_us else ""
            who = "that block itself" if alone else self.holder(late)
            story.append(f"held by {who}{place}{age}, which stays {lasts}{others}")
        yield from self.wrapped(Text(f"  {'; '.join(story)}"), indent=4)

    def holder(self, holder: Holder) -> str:
        """A block in words."""
        what = holder.tensor or short_op(holder.op) or format_bytes(holder.block)
        phase = f" of {holder.phase}" if holder.phase else ""
        line = f" ({self.location(holder.line)})" if holder.line else ""
        return f"{what}{phase}{line}"

    def largest(self, found: FragmentationCauses) -> Iterator[Text]:
        """What could still be served."""
        cache = format_bytes(found.largest.from_cache)
        after = found.largest.after_release
        if after is None:
            card = "what the card could still give is unknown, since the trace does not name its memory"
        else:
            card = f"{format_bytes(after)} once the cache is given back"
            if found.capacity.source is CapacitySource.RETRIES:
                card += " (at least)"
        yield from self.wrapped(
            Text(f"Largest request that could be served: {cache} from the cache, {card}.")
        )


def pool_text(pool: PoolUse) -> str:
    """A pool in words: what it is, and how its bytes are used."""
    size = "small" if pool.small else "large"
    name = (
        f"private pool {pool.pool_id[0]}.{pool.pool_id[1]}, {size} blocks"
        if pool.is_private
        else f"{size} pool"
    )
    stream = f" of stream {pool.stream}" if pool.stream else ""
    pages = " of pages" if pool.expandable else ""
    parts = [f"{format_bytes(pool.occupied)} in {counted(pool.blocks, 'block')}"]
    if pool.free_segments or pool.releasable:
        where = "free pages" if pool.expandable else counted(pool.free_segments, "free segment")
        parts.append(f"{format_bytes(pool.releasable)} in {where}")
    if pool.inactive_split:
        parts.append(f"{format_bytes(pool.inactive_split)} in gaps")
    return f"{name}{stream}, {counted(pool.segments, 'segment')}{pages}: {', '.join(parts)}"


def pool_to_json(pool: PoolUse) -> dict[str, Any]:
    """A pool as ``pools[]`` of docs/json.md."""
    return {
        "stream": pool.stream,
        "pool": "small" if pool.small else "large",
        "private_pool_id": list(pool.pool_id) if pool.is_private else None,
        "expandable": pool.expandable,
        "segments": pool.segments,
        "blocks": pool.blocks,
        "reserved_bytes": pool.reserved,
        "occupied_bytes": pool.occupied,
        "free_segments": pool.free_segments,
        "releasable_bytes": pool.releasable,
        "inactive_split_bytes": pool.inactive_split,
    }


def tested_remedies(cause: FragmentationCause) -> list[Remedy]:
    """The remedies that a report prints: those whose effect is known. `to_json` has the others too."""
    return [remedy for remedy in cause.remedies if remedy.tested]


def remedy_text(remedy: Remedy) -> str:
    """A remedy with its settings and what a replay says."""
    conf = f"{remedy.alloc_conf}: " if remedy.alloc_conf else ""
    if remedy.alloc_conf == "":
        conf = "the default settings: "
    text = f"{conf}{remedy.text}"
    if remedy.peak_reserved is None or remedy.baseline is None:
        return text
    peak, baseline = format_bytes(remedy.peak_reserved), format_bytes(remedy.baseline)
    lower = f" instead of {baseline}" if remedy.peak_reserved < remedy.baseline else ""
    helps = "" if remedy.helps else "no help, "
    return f"{text} (replayed: {helps}peak reserved {peak}{lower}{_failures(remedy)})"


def _failures(remedy: Remedy) -> str:
    """How many requests fail under the settings of a remedy, if any does there or as recorded."""
    before, after = remedy.baseline_ooms, remedy.ooms
    if not after:
        served = "the request that failed is" if before == 1 else f"the {before:,} requests that failed are"
        return f", and {served} served" if before else ""
    fail = "1 request fails" if after == 1 else f"{after:,} requests fail"
    return f", and {fail}" if after == before else f", and {fail} instead of {before:,}"


def answer_text(answer: WhatIfAnswer) -> str:
    """Whether it fits, and by how much not."""
    if answer.fit is Fit.FITS:
        return f"fits, {format_bytes(answer.margin)} to spare"
    if answer.fit is Fit.MISSES:
        return f"misses by {format_bytes(-answer.margin)}"
    return "another request fails before it"


def verdict_text(oom: OomExplanation) -> str:
    """What would have served the request, in a sentence."""
    largest = f"; at most {format_bytes(oom.largest_request)} at once would have been served"
    largest = largest if oom.largest_request else ""
    if oom.verdict is OomVerdict.NOT_AT_ALL:
        return f"Not at all: what is alive and the request are more than there is{largest}."
    if oom.verdict is OomVerdict.DEFRAGMENTED:
        return f"Only if the free memory lay together, which no setting tried brings about{largest}."
    answer = next(answer for answer in oom.answers if answer.what.value == oom.verdict.value)
    conf = f" ({answer.alloc_conf or 'none'})" if answer.alloc_conf is not None else ""
    return f"Yes, {oom.verdict.value}{conf}."


@json_values.register(FragmentationCauses)
def _json_values(found: FragmentationCauses) -> dict[str, Any]:
    """The causes as values; sizes are in bytes."""
    request, oom = found.request, found.oom
    return {
        "device": found.device,
        "moment": moment_to_json(found.moment),
        "reserved_bytes": found.fragmentation.reserved,
        "requested_bytes": found.requested,
        "request": None
        if request is None
        else {
            "event": request.row,
            "bytes": request.size,
            "stream": request.stream,
            "pool": "small" if request.small else "large",
            "failed": request.failed,
        },
        "causes": [_cause(cause) for cause in found.causes],
        "pins": [_pin(pin) for pin in found.pins],
        "segments": [_segment(segment) for segment in found.segments],
        "largest_request": {
            "from_cache_bytes": found.largest.from_cache,
            "after_release_bytes": found.largest.after_release,
        },
        "is_state": found.is_state,
        "pools": [pool_to_json(pool) for pool in found.pools],
        "empty_cache_releases_bytes": given_back_by_empty_cache(found.pools),
        "capacity_bytes": found.capacity.known,
        "capacity_source": found.capacity.source.name.lower(),
        "oom": None
        if oom is None
        else {
            "event": oom.row,
            "request_bytes": oom.requested,
            "verdict": oom.verdict.name.lower(),
            "reproduced": oom.reproduced,
            "largest_request_bytes": oom.largest_request,
            "answers": [
                {
                    "what": answer.what.name.lower(),
                    "fit": answer.fit.name.lower(),
                    "margin_bytes": answer.margin,
                    "alloc_conf": answer.alloc_conf,
                }
                for answer in oom.answers
            ],
        },
    }


def _cause(cause: FragmentationCause) -> dict[str, Any]:
    return {
        "kind": cause.kind.name.lower(),
        "bytes": cause.bytes,
        "count": cause.count,
        "evidence": cause.evidence,
        "remedies": [
            {
                "kind": remedy.kind.name.lower(),
                "text": remedy.text,
                "alloc_conf": remedy.alloc_conf,
                "peak_reserved_bytes": remedy.peak_reserved,
                "baseline_peak_reserved_bytes": remedy.baseline,
                "ooms": remedy.ooms,
                "baseline_ooms": remedy.baseline_ooms,
                "helps": remedy.helps,
            }
            for remedy in cause.remedies
        ],
    }


def _pin(pin: PinGroup) -> dict[str, Any]:
    return {
        **group_to_json(pin.group),
        "phase": pin.phase or None,
        "born_event": pin.born,
        "in_holes": pin.in_holes,
        "pinned_bytes": pin.pinned,
        "segments": pin.segments,
        "freeing_releases_bytes": pin.freeing_releases,
    }


def _segment(pinned: PinnedSegment) -> dict[str, Any]:
    segment = pinned.segment
    return {
        "address": segment.address,
        "bytes": segment.size,
        "stream": segment.stream,
        "pool": "small" if segment.small else "large",
        "expandable": segment.expandable,
        "born_event": segment.born,
        "free_bytes": pinned.free,
        "largest_gap_bytes": pinned.largest_gap,
        "taken_for": None if pinned.taken_for is None else _holder(pinned.taken_for),
        "held_by": [_holder(pin) for pin in pinned.pins],
        "held_by_omitted": pinned.pins_omitted,
        "gone": pinned.gone,
        "gone_bytes": pinned.gone_bytes,
        "last_freed_event": pinned.last_freed,
        "last_freed_phase": pinned.last_freed_phase or None,
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "address": holder.address,
        "bytes": holder.size,
        "block_bytes": holder.block,
        "tensor": holder.tensor or None,
        "op": holder.op or None,
        "module": holder.module or None,
        "phase": holder.phase or None,
        "category": holder.category.name.lower(),
        "line": frame_to_json(holder.line),
        "born_event": holder.born,
        "freed_event": holder.freed,
        "age_us": holder.age_us,
        "in_hole": holder.in_hole,
    }
