"""What a trace means: pure functions from a MemoryTrace or a run to a value. No torch, no printing."""

from vramfit.analysis.breakdown import Breakdown, Moment, TensorGroup, at, oom_row, peak
from vramfit.analysis.curves import Curves, Measure, Timeline, curves, timeline
from vramfit.analysis.fragmentation import Fragmentation, fragmentation
from vramfit.analysis.lifetimes import Lifetimes, lifetimes
from vramfit.analysis.modules import ModuleNode, fold_layers, fold_path, module_tree
from vramfit.analysis.phases import Growth, Phase, PhaseSummary, growth, phases, summarise
from vramfit.analysis.verdict import NAMES, NO_CARD, DeviceVerdict, Outcome, Verdict, verdict
from vramfit.trace.frames import Origin, origin, short_location, user_frame

__all__ = [
    "NAMES",
    "NO_CARD",
    "Breakdown",
    "Curves",
    "DeviceVerdict",
    "Fragmentation",
    "Growth",
    "Lifetimes",
    "Measure",
    "ModuleNode",
    "Moment",
    "Origin",
    "Outcome",
    "Phase",
    "PhaseSummary",
    "TensorGroup",
    "Timeline",
    "Verdict",
    "at",
    "curves",
    "fold_layers",
    "fold_path",
    "fragmentation",
    "growth",
    "lifetimes",
    "module_tree",
    "oom_row",
    "origin",
    "peak",
    "phases",
    "short_location",
    "summarise",
    "timeline",
    "user_frame",
    "verdict",
]
