"""The forward passes of a program: calls of outermost modules, one after another with nothing else between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramfit.analysis._lifetimes import Ints
from vramfit.analysis._phases import split_name
from vramfit.trace import EventKind, MemoryTrace

_FORWARD, _BACKWARD = "forward", "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStreak:
    """Forward passes in a row: an evaluation, a generation, or the pass of a training step.

    Attributes:
        rows: the event at which each pass of the module begins that is called most often; others are parts of these.
        module: path of that module.
        iteration: the step in which they fall, None where phases have no numbers.
        last_row: the last event before another phase.
        trains: a backward pass follows, so that the last pass is one of training.
    """

    rows: Ints
    module: str
    iteration: int | None
    last_row: int
    trains: bool

    @property
    def outside_training(self) -> Ints:
        """The passes that no backward pass follows."""
        return self.rows[:-1] if self.trains else self.rows


def pass_streaks(trace: MemoryTrace, device: int = 0) -> tuple[PassStreak, ...]:
    """The streaks of a trace in order; none in a trace that does not tell forward passes apart."""
    marks = np.flatnonzero(
        (trace.kind == EventKind.MARKER) & (trace.device == device) & (trace.op < 0) & (trace.module >= 0)
    )
    parts = [split_name(name) for name in trace.phases]
    forward = np.array([part == _FORWARD for _, part in parts], dtype=bool)
    phase = trace.phase[marks]
    marks = marks[(phase >= 0) & forward[phase]] if len(forward) else marks[:0]
    if not len(marks):
        return ()
    begins = np.flatnonzero(np.concatenate([[True], trace.phase[1:] != trace.phase[:-1]]))
    visit = np.searchsorted(begins, marks, side="right") - 1
    found = []
    for mine in np.split(marks, np.flatnonzero(np.diff(visit)) + 1):
        at = int(np.searchsorted(begins, mine[0], side="right"))
        after = int(begins[at]) if at < len(begins) else len(trace)
        modules, first, counts = np.unique(trace.module[mine], return_index=True, return_counts=True)
        most = modules[np.lexsort((first, -counts))[0]]
        follows = int(trace.phase[after]) if after < len(trace) else -1
        found.append(
            PassStreak(
                rows=mine[trace.module[mine] == most].astype(np.int64),
                module=trace.modules[most],
                iteration=parts[int(trace.phase[mine[0]])][0],
                last_row=after - 1,
                trains=follows >= 0 and parts[follows][1] == _BACKWARD,
            )
        )
    return tuple(found)
