"""The marks that a program set in its trace: `vramfit.snapshot` with a tag.

A mark is a MARKER event whose ``op`` names the tag; a MARKER without one begins a phase.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramfit.trace.events import EventKind
from vramfit.trace.model import MemoryTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A named point in time.

    Attributes:
        tag: the name.
        row: the event that holds it.
        device: index of the device on which it was set.
        time_us: when, on the clock of the trace.
    """

    tag: str
    row: int
    device: int
    time_us: int


def marks(trace: MemoryTrace) -> tuple[Mark, ...]:
    """The marks of a trace, in order."""
    rows = np.flatnonzero((trace.kind == EventKind.MARKER) & (trace.op >= 0))
    return tuple(
        Mark(
            tag=trace.ops[int(trace.op[row])],
            row=int(row),
            device=int(trace.device[row]),
            time_us=int(trace.time_us[row]),
        )
        for row in rows
    )
