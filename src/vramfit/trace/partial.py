"""A run made from its trace alone: the trace of a file, or of a process that was killed."""

from __future__ import annotations

import numpy as np

from vramfit.trace.model import EventKind, MemoryTrace, TraceDevice
from vramfit.trace.outcome import DeviceOutcome, OomReport, Run, RunWarning, Source

_SOURCES = {source.value: source for source in Source}


def run_of_trace(
    trace: MemoryTrace,
    *,
    devices: tuple[DeviceOutcome, ...],
    oom: OomReport | None,
    exit_code: int,
    error: str | None,
    program: tuple[str, ...],
    warnings: tuple[RunWarning, ...] = (),
    ops: int = 0,
) -> Run:
    """A run with the circumstances that its trace notes: versions, source, and the time from event to event.

    Args:
        oom: the request that failed, or None.
        exit_code: the program's; `subprocess` gives it negative for a signal.
        error: how it failed, in words, or None.
        program: its command line, or its name alone.
        ops: how many operations it ran, 0 where they were not counted.
    """
    times = trace.time_us[trace.time_us > 0]
    seconds = float(times.max() - times.min()) / 1e6 if len(times) else 0.0
    source = _SOURCES.get(str(trace.meta.get("source", "")), Source.CARD)
    return Run(
        trace=trace,
        devices=devices,
        oom=oom,
        warnings=warnings,
        ops=ops,
        seconds_simulated=seconds if source is Source.VIRTUAL else 0.0,
        seconds_wall=0.0 if source is Source.VIRTUAL else seconds,
        exit_code=exit_code,
        error=error,
        program=program,
        torch_version=str(trace.meta.get("torch_version", "")),
        platform=str(trace.meta.get("platform", "")),
        assume=str(trace.meta.get("assume", "upper")),
        source=source,
    )


def partial_run(trace: MemoryTrace, *, exit_code: int, how: str, program: tuple[str, ...]) -> Run:
    """The run of a process that was killed.

    Args:
        trace: what had happened until then.
        exit_code: as `subprocess` gives it, negative for a signal.
        how: how it ended, in words: ``was ended by signal SIGKILL``.
    """
    message = f"the program's process {how}: this is what had happened until then"
    return run_of_trace(
        trace,
        devices=tuple(_outcome(trace, device) for device in trace.devices),
        oom=None,
        exit_code=exit_code,
        error=f"the process {how}",
        program=program,
        warnings=(RunWarning(code="killed", message=message, location=None, count=1),),
        ops=int((trace.kind == EventKind.ALLOC).sum()),
    )


def _outcome(trace: MemoryTrace, device: TraceDevice) -> DeviceOutcome:
    allocated, reserved = peaks_of(trace, device.index)
    return DeviceOutcome(
        index=device.index,
        gpu=device.name,
        total_bytes=device.total_bytes,
        context_bytes=device.context_bytes if reserved else 0,
        stats={},
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_active_bytes=allocated,
    )


def peaks_of(trace: MemoryTrace, device: int) -> tuple[int, int]:
    """The most bytes allocated and reserved on a device, for a trace that begins with nothing allocated."""
    mine = trace.device == device
    sizes = _sizes(trace)
    change = np.where(mine & (trace.kind == EventKind.ALLOC), sizes, 0)
    change -= np.where(mine & (trace.kind == EventKind.FREE_REQUESTED), _freed(trace, sizes), 0)
    taken = mine & np.isin(trace.kind, (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP))
    given = mine & np.isin(trace.kind, (EventKind.SEGMENT_FREE, EventKind.SEGMENT_UNMAP))
    held = np.cumsum(np.where(taken, trace.size, 0) - np.where(given, trace.size, 0))
    return max(0, int(np.cumsum(change).max(initial=0))), max(0, int(held.max(initial=0)))


def _sizes(trace: MemoryTrace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.where(trace.block > 0, trace.block, trace.size)


def _freed(
    trace: MemoryTrace, sizes: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each free the bytes of the block that it gives back: those of the last allocation at its address."""
    order = np.lexsort((np.arange(len(trace)), trace.address, trace.device))
    blocks = order[trace.kind[order] <= EventKind.FREE_REQUESTED]
    found = sizes.copy()
    if len(blocks) > 1:
        before, after = blocks[:-1], blocks[1:]
        same = (trace.address[before] == trace.address[after]) & (trace.device[before] == trace.device[after])
        same &= (trace.kind[after] == EventKind.FREE_REQUESTED) & (trace.kind[before] == EventKind.ALLOC)
        found[after[same]] = sizes[before[same]]
    return found
