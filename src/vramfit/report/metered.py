"""Why a gate failed, in words for the output of a test runner: what passed the limit, and what was alive then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.text import Text

from vramfit.analysis import Breakdown, DeviceTimeline, Measure, peak
from vramfit.analysis.breakdown import moment
from vramfit.report.folding import folded
from vramfit.report.sections import Sections
from vramfit.trace import EventKind, MemoryTrace, Run
from vramfit.units import format_bytes

_WIDTH = 100


def render_over_limit(
    run: Run, *, device: int, measure: Measure, limit: int, root: Path | None = None
) -> str:
    """A peak that passed its limit: by how much, at which line first, and what was alive where most was allocated.

    Args:
        limit: in bytes.
        root: file names below this folder are shown relative to it.
    """
    found = peak_bytes(run, device, measure)
    page = Sections(_WIDTH, root)
    gpu = next(outcome.gpu for outcome in run.devices if outcome.index == device)
    head = (
        f"peak {measure.value} memory {format_bytes(found)} is over the limit of {format_bytes(limit)} "
        f"by {format_bytes(found - limit)}"
    )
    lines = [Text(head), Text(f"  on {gpu}, device {device}")]
    passed = _first_above(run.trace, device, measure, limit)
    if passed is not None and (where := page.describe(moment(run.trace, passed))):
        lines.append(Text(f"  first passed at {where.removeprefix(', ')}"))
    breakdown = peak(run.trace, device)
    if measure is Measure.RESERVED:
        free = breakdown.fragmentation
        lines.append(
            Text(
                f"  where most was allocated, {format_bytes(breakdown.reserved)} were reserved: "
                f"{format_bytes(free.occupied)} in use, {format_bytes(free.inactive_split)} in gaps between blocks, "
                f"{format_bytes(free.releasable)} in empty segments"
            )
        )
    return _plain([*lines, Text(), *_tables(page, breakdown)])


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
    return _plain([head, Text(), *_tables(page, breakdown)])


def _tables(page: Sections, breakdown: Breakdown) -> Iterator[Text]:
    yield from page.categories(breakdown, "At the peak")
    yield from page.modules(breakdown)
    yield from page.tensors(breakdown)


def _first_above(trace: MemoryTrace, device: int, measure: Measure, limit: int) -> int | None:
    """The allocation with which a figure first passed its limit."""
    above = np.flatnonzero(DeviceTimeline.of(trace, device).curves.of(measure) > limit)
    if not len(above):
        return None
    # The segment comes first, then the block that asked for it: only the latter knows its line.
    blocks = np.flatnonzero((trace.kind == EventKind.ALLOC) & (trace.device == device))
    later = blocks[np.searchsorted(blocks, above[0]) :]
    return int(later[0]) if len(later) else int(above[0])


def peak_bytes(run: Run, device: int, measure: Measure) -> int:
    """The highest figure of a device over the run."""
    outcome = next(outcome for outcome in run.devices if outcome.index == device)
    return outcome.peak_reserved_bytes if measure is Measure.RESERVED else outcome.peak_allocated_bytes


def _plain(lines: list[Text]) -> str:
    return "\n".join(part.plain.rstrip() for line in lines for part in folded(line, _WIDTH))
