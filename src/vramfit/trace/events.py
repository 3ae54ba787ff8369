"""The words of a trace: kinds of events, categories of memory, stack frames and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

Segment: TypeAlias = Mapping[str, Any]
"""One segment as ``torch.cuda.memory._snapshot()["segments"]`` holds it."""


class EventKind(IntEnum):
    """What an event of a trace says; the numbers are those of the file format and never change.

    All but MARKER are actions of torch traces (c10/cuda/CUDACachingAllocator.h, ``TraceEntry::Action``).
    """

    ALLOC = 0
    """A block was handed out: ``size`` is what was asked for, ``block`` what it takes."""
    FREE_REQUESTED = 1
    """The program gave a block back; it no longer counts as allocated."""
    FREE_COMPLETED = 2
    """The block can be reused: every stream that used it has got past it."""
    SEGMENT_ALLOC = 3
    """cudaMalloc."""
    SEGMENT_FREE = 4
    """cudaFree."""
    SEGMENT_MAP = 5
    """Pages of an expandable segment were mapped."""
    SEGMENT_UNMAP = 6
    """Pages of an expandable segment were unmapped."""
    SNAPSHOT = 7
    """torch took a snapshot here; ``size`` is the active bytes at that moment."""
    OOM = 8
    """A request of ``size`` bytes failed; the address column holds the free bytes of the device."""
    MARKER = 9
    """Nothing happened to memory: a point in time, such as the beginning of a phase."""


class Category(IntEnum):
    """What a block is for; the numbers are those of the file format and never change."""

    OTHER = 0
    PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATE = 3
    ACTIVATIONS = 4
    INPUTS = 5
    TEMPORARIES = 6
    WORKSPACES = 7


class Frame(NamedTuple):
    """One frame of a Python stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDevice:
    """A device of a trace, and what its allocator held when the trace ended.

    Attributes:
        index: device index as the events name it.
        name: name of the card, empty if the source does not say.
        total_bytes: memory of the card as CUDA reports it, 0 if unknown.
        context_bytes: memory taken outside the allocator by the CUDA context, 0 if unknown.
        segments: the segments at the end of the trace, as torch's snapshots hold them.
    """

    index: int
    name: str = ""
    total_bytes: int = 0
    context_bytes: int = 0
    segments: Sequence[Segment] = ()
