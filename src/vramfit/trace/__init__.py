"""The record that everything else reads: MemoryTrace, its files, torch snapshots, and replay."""

from vramfit.trace.builder import TraceBuilder
from vramfit.trace.events import Category, EventKind, Frame, Segment, TraceDevice
from vramfit.trace.model import MemoryTrace
from vramfit.trace.outcome import DeviceOutcome, OomReport, RunWarning, VirtualRun

__all__ = [
    "Category",
    "DeviceOutcome",
    "EventKind",
    "Frame",
    "MemoryTrace",
    "OomReport",
    "RunWarning",
    "Segment",
    "TraceBuilder",
    "TraceDevice",
    "VirtualRun",
]
