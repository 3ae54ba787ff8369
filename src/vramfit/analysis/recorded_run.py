"""Makes a run from a trace alone, as it is read from the file of a program that ran elsewhere or earlier."""

from __future__ import annotations

from vramfit.analysis._lifetimes import Curves, Measure, trace_device
from vramfit.analysis.breakdown import last_oom_row, oom_row
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import entry, stack_frames
from vramfit.trace import DeviceOutcome, MemoryTrace, OomReport, Run, RunWarning
from vramfit.trace.frames import user_frame
from vramfit.trace.partial import run_of_trace
from vramfit.trace.without_history import NO_HISTORY, RECORD_HISTORY, STATE
from vramfit.units import format_bytes


def run_from_trace(trace: MemoryTrace, *, name: str = "") -> Run:
    """The run that a trace describes.

    Its devices are those of `MemoryTrace.known_devices`. Where the size of a card is not known, it counts as 0, or,
    where the card ran out of memory, as what it had at that moment for this program.

    Args:
        name: what to call the program where the trace does not say, such as the name of the file.
    """
    curves_of = {index: DeviceTimeline.of(trace, index).curves for index in trace.known_devices}
    oom = _last_oom(trace, curves_of)
    ended = oom is not None and not oom.handled
    program = str(trace.meta.get("program", "")) or name
    return run_of_trace(
        trace,
        devices=tuple(_outcome(trace, index, found, oom) for index, found in curves_of.items()),
        oom=oom,
        exit_code=1 if ended else 0,
        error=oom.message if ended and oom is not None else None,
        program=(program,) if program else (),
        warnings=_without_history(trace),
    )


def _without_history(trace: MemoryTrace) -> tuple[RunWarning, ...]:
    """A warning where nothing was recorded of a device but what it held when its snapshot was dumped."""
    states = [index for index in trace.known_devices if trace.is_state(index)]
    if not states:
        return ()
    which = "" if len(states) == len(trace.known_devices) else f" of GPU {', '.join(map(str, states))}"
    message = f"the snapshot{which} is {STATE}, so its figures are no peaks. {RECORD_HISTORY}"
    return (RunWarning(code=NO_HISTORY, message=message, location=None, count=1),)


def _outcome(trace: MemoryTrace, index: int, found: Curves, oom: OomReport | None) -> DeviceOutcome:
    described = trace_device(trace, index)
    total = described.total_bytes if described is not None else 0
    if not total and oom is not None and oom.device == index:
        total = oom.total_bytes
    return DeviceOutcome(
        index=index,
        gpu=(described.name if described is not None else "") or "unknown card",
        total_bytes=total,
        context_bytes=described.context_bytes if described is not None else 0,
        stats={},
        peak_allocated_bytes=found.peak(Measure.ALLOCATED),
        peak_reserved_bytes=found.peak(Measure.RESERVED),
        peak_active_bytes=found.peak(Measure.ACTIVE),
    )


def _last_oom(trace: MemoryTrace, curves_of: dict[int, Curves]) -> OomReport | None:
    """The last request of any device that failed; one that ended the trace before others."""
    rows = [(oom_row(trace, index), index) for index in curves_of]
    failed = [(last_oom_row(trace, index) is not None, row, index) for row, index in rows if row is not None]
    if not failed:
        return None
    ended, row, device = max(failed)
    described = trace_device(trace, device)
    reserved = int(curves_of[device].reserved[row])
    # What the event of a failed request holds in place of an address (see EventKind.OOM).
    free = int(trace.address[row])
    requested = int(trace.size[row])
    stack = stack_frames(trace, int(trace.stack[row]))
    return OomReport(
        device=device,
        requested_bytes=requested,
        stack=stack,
        user_line=user_frame(stack),
        op=entry(trace.ops, int(trace.op[row])),
        message=f"out of memory: tried to allocate {format_bytes(requested)} with {format_bytes(free)} free",
        allocated_bytes=int(curves_of[device].allocated[row]),
        reserved_bytes=reserved,
        free_bytes=free,
        total_bytes=(described.total_bytes if described is not None else 0) or reserved + free,
        handled=not ended,
    )
