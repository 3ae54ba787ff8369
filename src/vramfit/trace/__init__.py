"""The record that everything else reads: MemoryTrace, its files, torch snapshots, and replay."""

from vramfit.trace.actual import Actual, DeviceFigures, read_actual
from vramfit.trace.builder import TraceBuilder
from vramfit.trace.device_events import Mark, marks
from vramfit.trace.estimates import NO_BAR, Estimate, ReservedBar, reserved_bar
from vramfit.trace.model import Category, EventKind, Frame, MemoryTrace, Segment, TraceDevice
from vramfit.trace.outcome import (
    RAN_OUT,
    ChangeKind,
    DeviceOutcome,
    FileChange,
    FileChanges,
    OomReport,
    ProfileNote,
    Run,
    RunWarning,
    Source,
    StillToCome,
)
from vramfit.trace.replay.pressure import Capacity, CapacitySource
from vramfit.trace.replay.replaying import DeviceReplay, Peaks, Played, Rehearsal, ReplayReport, replay
from vramfit.trace.snapshot_reading import load_snapshot, read_any, trace_from_snapshot
from vramfit.trace.snapshot_writing import snapshot_from_trace, write_snapshot

__all__ = [
    "NO_BAR",
    "RAN_OUT",
    "Actual",
    "Capacity",
    "CapacitySource",
    "Category",
    "ChangeKind",
    "DeviceFigures",
    "DeviceOutcome",
    "DeviceReplay",
    "Estimate",
    "EventKind",
    "FileChange",
    "FileChanges",
    "Frame",
    "Mark",
    "MemoryTrace",
    "OomReport",
    "Peaks",
    "Played",
    "ProfileNote",
    "Rehearsal",
    "ReplayReport",
    "ReservedBar",
    "Run",
    "RunWarning",
    "Segment",
    "Source",
    "StillToCome",
    "TraceBuilder",
    "TraceDevice",
    "load_snapshot",
    "marks",
    "read_actual",
    "read_any",
    "replay",
    "reserved_bar",
    "snapshot_from_trace",
    "trace_from_snapshot",
    "write_snapshot",
]
