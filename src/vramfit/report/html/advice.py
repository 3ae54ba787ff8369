"""What the page says about waste: causes of fragmentation with remedies, settings that a replay tried, and leaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vramfit.analysis import (
    NAMES,
    FragmentationCause,
    FragmentationCauses,
    LeakReport,
    LeakVerdict,
    Remedy,
    Tuning,
    causes,
    leaks,
    short_location,
    tune,
)
from vramfit.errors import TraceFormatError
from vramfit.report.fragmentation import answer_text, remedy_text, tested_remedies, verdict_text
from vramfit.report.html.columns import DeviceView
from vramfit.report.html.markup import Html, details, join, table, tag
from vramfit.report.text import each, short_op
from vramfit.trace import MemoryTrace
from vramfit.units import format_bytes

PROVE_EVENTS = 200_000
"""Traces of more events are not replayed to prove a remedy: the page of a million events shall take seconds."""
TUNE_EVENTS = 40_000
"""Traces of more events are left to ``vramfit tune``."""

_NOTABLE = 0.02
"""Share of the peak of reserved bytes from which settings are searched: so much they could win at most."""
_CAUSES, _PINS, _TRIALS, _STACKS = 8, 10, 8, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What was found out about a device; None for what was not analysed.

    Attributes:
        causes: why it reserves more than was asked for.
        tuning: what allocator settings would change.
        leaks: whether it grows from step to step.
        why_not: why no settings were searched, in words; empty if they were.
        contradiction: why the recording could not be analysed further.
    """

    causes: FragmentationCauses | None
    tuning: Tuning | None
    leaks: LeakReport | None
    why_not: str = ""
    contradiction: str = ""


def find_advice(trace: MemoryTrace, view: DeviceView) -> Advice:
    """Ask the analyses about a device, as far as the page's few seconds allow."""
    device = view.device.index
    try:
        found = causes(trace, device, proven=len(trace) <= PROVE_EVENTS)
        why_not = _no_search(trace, view, found)
        return Advice(
            causes=found,
            tuning=None if why_not else tune(trace, device=device),
            leaks=leaks(trace, device),
            why_not=why_not,
        )
    except TraceFormatError as error:
        return Advice(causes=None, tuning=None, leaks=None, contradiction=str(error))


def _no_search(trace: MemoryTrace, view: DeviceView, found: FragmentationCauses) -> str:
    """Why allocator settings are not searched; empty where they are."""
    if not (view.lives.born >= 0).any():
        return "No request of this device is in the recording."
    reserved = int(view.bytes_over.reserved.max())
    spare = reserved - int(view.bytes_over.allocated.max())
    if spare < reserved * _NOTABLE and found.oom is None:
        return (
            f"At their peaks {format_bytes(max(0, spare))} more are reserved than allocated: "
            "there is nothing for allocator settings to win."
        )
    if len(trace) > TUNE_EVENTS:
        return "The recording is long; vramfit tune FILE searches the allocator settings for it."
    return ""


def fragmentation_advice(found: Advice, *, root: Path | None) -> Html:
    """Causes, remedies and settings for a device."""
    if found.contradiction:
        return tag("p", f"Causes are not told: {found.contradiction}.", class_="note")
    parts: list[Html] = [] if found.causes is None else list(_causes(found.causes, root))
    return join([*parts, *_tuning(found)])


def leaks_html(found: Advice, *, root: Path | None) -> Html:
    """What grows from step to step on a device."""
    if found.leaks is None:
        return tag("p", f"Leaks are not told: {found.contradiction}.", class_="note")
    return join(_leaks(found.leaks, root))


def leaks_section(content: Html) -> Html:
    """The section about leaks, wherever on the page it stands."""
    return tag(
        "section",
        tag("h2", "Leaks", id="h-leaks"),
        content,
        id="s-leaks",
        aria_labelledby="h-leaks",
    )


def grow_html(advice: Mapping[int, Advice], root: Path | None) -> Html:
    """What grows from step to step on any device, whichever is chosen; empty where nothing does."""
    leaking = {index: found.leaks for index, found in advice.items() if found.leaks and found.leaks.leaks}
    return join(
        join([tag("h3", f"GPU {index}") if len(advice) > 1 else None, *_leaks(report, root)])
        for index, report in leaking.items()
    )


def _causes(found: FragmentationCauses, root: Path | None) -> Iterator[Html]:
    yield tag("h3", "Why more is reserved than was asked for")
    spare = max(0, found.fragmentation.reserved - found.requested)
    when = f"event {found.moment.row:,}" if found.moment.row >= 0 else "the beginning"
    when = f"At {when}, where the reserved memory reached its peak or a request failed"
    when = "When the snapshot was dumped" if found.is_state else when
    reserved = format_bytes(found.fragmentation.reserved)
    yield tag("p", f"{when}, {format_bytes(spare)} of {reserved} reserved bytes were asked for by nobody.")
    if found.causes:
        rows = (
            (
                format_bytes(cause.bytes),
                tag("span", cause.kind.value, class_="strong"),
                cause.evidence,
                _remedies(cause, of_dump=found.is_state),
            )
            for cause in found.causes[:_CAUSES]
        )
        yield table(("bytes", "cause", "evidence", "remedies"), rows, numbers=(0,), prose=(1, 2, 3))
    if found.oom is not None:
        yield from _out_of_memory(found)
    if found.pins:
        yield details("The live blocks that lie beside free memory", _pins(found, root))


def _remedies(cause: FragmentationCause, *, of_dump: bool) -> Html | str:
    """What was tried against a cause; without a cure to look for, or one that could be tried, that is said."""
    if not cause.remedies and not of_dump:
        return "nothing needs to be done"
    return join(_remedy(remedy) for remedy in tested_remedies(cause)[:3]) or "none was tried"


def _remedy(remedy: Remedy) -> Html:
    """A remedy in the terminal's words; paler where a replay says that it does not help."""
    return tag("div", remedy_text(remedy), class_="quiet" if remedy.helps is False else None)


def _out_of_memory(found: FragmentationCauses) -> Iterator[Html]:
    oom = found.oom
    assert oom is not None
    yield tag("h3", "What would have served the request that failed")
    rows = ((answer.what.value, answer_text(answer), answer.alloc_conf or "") for answer in oom.answers)
    yield table(("what if", "result", "settings"), rows)
    request = format_bytes(oom.requested)
    yield tag("p", f"Would the request of {request} have fitted? {verdict_text(oom)}")
    if not oom.reproduced:
        yield tag(
            "p", "The same settings replayed do serve it, so these answers prove nothing.", class_="note"
        )


def _pins(found: FragmentationCauses, root: Path | None) -> Html:
    rows = (
        (
            format_bytes(pin.pinned),
            each(pin.group.count, pin.group.block_bytes) or format_bytes(pin.group.block_bytes),
            NAMES[pin.group.category],
            pin.group.tensor,
            short_op(pin.group.op),
            short_location(pin.group.line or pin.group.library_line, root=root) or pin.group.module,
            f"{pin.segments:,}",
        )
        for pin in found.pins[:_PINS]
    )
    heads = ("free beside them", "blocks", "category", "tensor", "operator", "where", "segments")
    return table(heads, rows, numbers=(0, 6))


def _tuning(found: Advice) -> Iterator[Html]:
    yield tag("h3", "Allocator settings")
    tuning = found.tuning
    if tuning is None:
        yield tag("p", found.why_not)
        return
    best, baseline = tuning.best, tuning.baseline
    if tuning.keep:
        yield tag(
            "p",
            f"Keep {tuning.recorded_alloc_conf or 'the defaults'}: nothing tried lowers the peak of "
            f"{format_bytes(baseline.peak_reserved)} by more than {format_bytes(tuning.tolerance)}.",
        )
    else:
        yield tag(
            "p",
            f"Best of {len(tuning.trials)} settings tried: peak reserved {format_bytes(best.peak_reserved)} instead "
            f"of {format_bytes(baseline.peak_reserved)}, failed requests {best.ooms} instead of {baseline.ooms}.",
        )
        yield tag("pre", tuning.export_line)
    rows = (
        (
            trial.alloc_conf or "the defaults",
            format_bytes(trial.peak_reserved) + ("" if trial.complete else " or more"),
            f"{trial.device_allocs:,}",
            f"{trial.retries:,}",
            f"{trial.ooms:,}",
        )
        for trial in tuning.trials[:_TRIALS]
    )
    heads = ("settings", "peak reserved", "driver calls", "retries", "failed requests")
    yield table(heads, rows, numbers=(1, 2, 3, 4))
    for trap in tuning.traps:
        yield tag("p", f"{trap.alloc_conf or 'the defaults'}: {trap.text}", class_="note")


_LEAKS = {
    LeakVerdict.GROWING: "Memory grows from step to step, beyond chance",
    LeakVerdict.SUSPECTED: "Memory grows, but the steps of the program had to be guessed",
    LeakVerdict.NO_STEPS: "Nothing in this trace repeats: a leak cannot be told from a program that builds something",
    LeakVerdict.STEADY: "No memory grows from step to step beyond chance",
    LeakVerdict.TOO_FEW_STEPS: "There are too few steps to tell growth from chance",
}


def _leaks(report: LeakReport, root: Path | None) -> Iterator[Html]:
    count, unit = max(0, len(report.steps) - 1), report.steps.unit
    text = f"{_LEAKS[report.verdict]}: {count:,} of them seen"
    if report.verdict is LeakVerdict.TOO_FEW_STEPS:
        text = f"{_LEAKS[report.verdict]}: {count:,} seen, {report.least_steps} needed"
    elif report.verdict is LeakVerdict.NO_STEPS:
        text = _LEAKS[report.verdict]
    elif report.levels:
        text += (
            f", the first {report.warmup} left out as warm-up; {format_bytes(report.bytes_per_step)} per {unit}, "
            f"p = {report.p_value:.2g}"
        )
    yield tag("p", f"{text}.", class_="note" if report.leaks else None)
    if report.growing:
        rows = (
            (
                format_bytes(stack.bytes_per_step),
                format_bytes(stack.grown_bytes),
                f"{stack.blocks:,}",
                NAMES[stack.place.category],
                stack.place.tensor,
                short_op(stack.place.op),
                stack.place.module,
                short_location(stack.place.line or stack.place.library_line, root=root),
                f"{stack.p_value:.2g}",
            )
            for stack in report.growing[:_STACKS]
        )
        heads = (f"per {unit}", "in all", "blocks", "category", "tensor", "operator", "module", "line", "p")
        yield table(heads, rows, numbers=(0, 1, 2))
    if report.settled:
        grown = "; ".join(
            f"{format_bytes(one.grown_bytes)} {short_location(one.place.line, root=root) or one.place.op}"
            for one in report.settled[:3]
        )
        yield tag("p", f"Grew and stopped, as a cache that fills does: {grown}.", class_="quiet")
