"""A run or a recording as a small static summary for notebooks: sentences, figures and the timeline. No scripts."""

from __future__ import annotations

from vramfit.analysis import Outcome, Verdict
from vramfit.analysis import verdict as judge
from vramfit.analysis.recorded_run import run_from_trace
from vramfit.report.drawing import to_svg
from vramfit.report.html.markup import Html, join, tag
from vramfit.report.terminal import headline
from vramfit.report.timeline_picture import draw_timeline
from vramfit.trace import MemoryTrace, Run
from vramfit.units import counted, format_bytes

_WIDTH, _HEIGHT = 760, 320


def summary_lines(run: Run, verdict: Verdict) -> list[str]:
    """Whether it fits, in a line or a few; of a recording of which that cannot be said, what was recorded."""
    if verdict.outcome is Outcome.UNKNOWN or not run.devices:
        return [" ".join(run.program) or "recording"]
    return headline(run, verdict)


def run_summary(run: Run, verdict: Verdict) -> str:
    """What ``_repr_html_`` of a run gives."""
    first, *more = summary_lines(run, verdict)
    pictures = [
        Html(to_svg(draw_timeline(run.trace, device.index, width=_WIDTH, height=_HEIGHT)))
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
    )


def trace_summary(trace: MemoryTrace) -> str:
    """The same for a recording alone."""
    run = run_from_trace(trace)
    return run_summary(run, judge(run))
