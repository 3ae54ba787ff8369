"""What a trace means: pure functions from a MemoryTrace or a run to a value. No torch, no printing."""

from vramfit.analysis._causes import (
    CauseKind,
    FragmentationCause,
    FragmentationCauses,
    LargestRequest,
    causes,
)
from vramfit.analysis._curves import Curves, Measure, curves
from vramfit.analysis._diff import Change, HoldingChange, Pair, TraceDiff, diff, diff_states
from vramfit.analysis._fragmentation import Fragmentation, fragmentation
from vramfit.analysis._leaks import leaks
from vramfit.analysis._lifetimes import Lifetimes, lifetimes
from vramfit.analysis._module_tree import ModuleNode, fold_layers, fold_path, module_tree
from vramfit.analysis._peaks import LocalPeak, Removal, peaks
from vramfit.analysis._phases import Growth, Phase, PhaseSummary, growth, phases, summarise
from vramfit.analysis._reconcile import check_device, reconcile
from vramfit.analysis._segment_spans import SegmentSpans, segment_spans
from vramfit.analysis._stability import (
    Limit,
    LimitReason,
    Round,
    RoundOutcome,
    Stability,
    StressReport,
    Trend,
    stability,
)
from vramfit.analysis._states import Holding, PeakState, no_card, state_from_trace, states, states_from_report
from vramfit.analysis._steps import LEAST_STEPS, Steps, StepSource, steps
from vramfit.analysis._verdict import NO_CARD, VARIES, DeviceVerdict, Outcome, Verdict, verdict
from vramfit.analysis.alignment import Alignment, Ends, align
from vramfit.analysis.allocator_tuning import DeviceRecording, Trap, TrapKind, Trial, Tuning, tune
from vramfit.analysis.breakdown import Breakdown, Moment, at, oom_row, peak
from vramfit.analysis.device_timeline import DeviceTimeline, Timeline, timeline
from vramfit.analysis.gates import Bound, Gate, baseline_gates, budget_gates, card_gates, used_gates
from vramfit.analysis.groups import TensorGroup
from vramfit.analysis.leak_report import (
    GrowingStack,
    LeakPlace,
    LeakReport,
    LeakVerdict,
    Release,
    Sawtooth,
    SettledStack,
)
from vramfit.analysis.oom_alternatives import Fit, OomExplanation, OomVerdict, WhatIf, WhatIfAnswer
from vramfit.analysis.pinning import Holder, PinGroup, PinnedSegment
from vramfit.analysis.reconciliation import (
    DEFAULT_TOLERANCE,
    Cause,
    Comparison,
    Counterfactual,
    DeviceReconciliation,
    Difference,
    Part,
    PartDifference,
    Quantity,
    Reconciliation,
    StreamComparison,
    StreamDifference,
    Tolerance,
    When,
)
from vramfit.analysis.recorded_run import run_from_trace
from vramfit.analysis.remedies import Remedy, RemedyKind
from vramfit.analysis.requests import RequestLabel
from vramfit.analysis.shortage import NAMES
from vramfit.trace.frames import Origin, origin, short_location, user_frame

__all__ = [
    "DEFAULT_TOLERANCE",
    "LEAST_STEPS",
    "NAMES",
    "NO_CARD",
    "VARIES",
    "Alignment",
    "Bound",
    "Breakdown",
    "Cause",
    "CauseKind",
    "Change",
    "Comparison",
    "Counterfactual",
    "Curves",
    "DeviceReconciliation",
    "DeviceRecording",
    "DeviceTimeline",
    "DeviceVerdict",
    "Difference",
    "Ends",
    "Fit",
    "Fragmentation",
    "FragmentationCause",
    "FragmentationCauses",
    "Gate",
    "GrowingStack",
    "Growth",
    "Holder",
    "Holding",
    "HoldingChange",
    "LargestRequest",
    "LeakPlace",
    "LeakReport",
    "LeakVerdict",
    "Lifetimes",
    "Limit",
    "LimitReason",
    "LocalPeak",
    "Measure",
    "ModuleNode",
    "Moment",
    "OomExplanation",
    "OomVerdict",
    "Origin",
    "Outcome",
    "Pair",
    "Part",
    "PartDifference",
    "PeakState",
    "Phase",
    "PhaseSummary",
    "PinGroup",
    "PinnedSegment",
    "Quantity",
    "Reconciliation",
    "Release",
    "Remedy",
    "RemedyKind",
    "Removal",
    "RequestLabel",
    "Round",
    "RoundOutcome",
    "Sawtooth",
    "SegmentSpans",
    "SettledStack",
    "Stability",
    "StepSource",
    "Steps",
    "StreamComparison",
    "StreamDifference",
    "StressReport",
    "TensorGroup",
    "Timeline",
    "Tolerance",
    "TraceDiff",
    "Trap",
    "TrapKind",
    "Trend",
    "Trial",
    "Tuning",
    "Verdict",
    "WhatIf",
    "WhatIfAnswer",
    "When",
    "align",
    "at",
    "baseline_gates",
    "budget_gates",
    "card_gates",
    "causes",
    "check_device",
    "curves",
    "diff",
    "diff_states",
    "fold_layers",
    "fold_path",
    "fragmentation",
    "growth",
    "leaks",
    "lifetimes",
    "module_tree",
    "no_card",
    "oom_row",
    "origin",
    "peak",
    "peaks",
    "phases",
    "reconcile",
    "run_from_trace",
    "segment_spans",
    "short_location",
    "stability",
    "state_from_trace",
    "states",
    "states_from_report",
    "steps",
    "summarise",
    "timeline",
    "tune",
    "used_gates",
    "user_frame",
    "verdict",
]
