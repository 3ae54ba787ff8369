"""Why a gate failed, in words for the output of a test runner: what passed the limit, and what was alive then."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from vramfit.analysis import Measure, peak
from vramfit.report.sections import Sections
from vramfit.trace import Run
from vramfit.units import format_bytes

_WIDTH = 100


def render_over_limit(
    run: Run, *, device: int, measure: Measure, limit: int, root: Path | None = None
) -> str:
    """A peak that passed its limit: by how much, at which line, and what was alive there.

    Args:
        run: what happened.
        device: index of the device.
        measure: which peak is limited.
        limit: in bytes.
        root: file names below this folder are shown relative to it.
    """
    breakdown = peak(run.trace, device, by=measure)
    found = peak_bytes(run, device, measure)
    page = Sections(_WIDTH, root)
    gpu = next(outcome.gpu for outcome in run.devices if outcome.index == device)
    lines = [
        Text(
            f"peak {measure.value} memory {format_bytes(found)} is over the limit of {format_bytes(limit)} "
            f"by {format_bytes(found - limit)}"
        ),
        Text(f"  on {gpu}, device {device}"),
        Text(),
        *page.categories(breakdown, "At the peak"),
        *page.modules(breakdown),
        *page.tensors(breakdown),
    ]
    return _plain(lines)


def render_out_of_memory(run: Run, *, root: Path | None = None) -> str:
    """What was alive when a request could not be served; empty if all were."""
    if run.oom is None:
        return ""
    breakdown = peak(run.trace, run.oom.device)
    page = Sections(_WIDTH, root)
    where = page.at_line(run.oom.user_line)
    head = Text(
        f"{format_bytes(run.oom.requested_bytes)} asked for{where} did not fit: "
        f"{format_bytes(run.oom.allocated_bytes)} allocated, {format_bytes(run.oom.reserved_bytes)} reserved, "
        f"{format_bytes(run.oom.free_bytes)} free of {format_bytes(run.oom.total_bytes)}"
    )
    return _plain(
        [
            head,
            Text(),
            *page.categories(breakdown, "At the peak"),
            *page.modules(breakdown),
            *page.tensors(breakdown),
        ]
    )


def peak_bytes(run: Run, device: int, measure: Measure) -> int:
    """The highest figure of a device over the run."""
    outcome = next(outcome for outcome in run.devices if outcome.index == device)
    return outcome.peak_reserved_bytes if measure is Measure.RESERVED else outcome.peak_allocated_bytes


def _plain(lines: list[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)
