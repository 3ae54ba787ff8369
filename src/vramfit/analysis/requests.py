"""The requests of a trace in their order, who made each, and which of them two traces have in common."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple
from zlib import crc32

import numpy as np

from vramfit.analysis._lifetimes import Curves, Flags, Ints, Lifetimes, Measure, lifetimes
from vramfit.analysis.alignment import Alignment, Ends, align
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import entry, stack_frames
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.trace.frames import user_frame

ALIKE = 0.5
"""Share of recorded requests below which two sequences are said not to resemble each other."""

_TELLING = 0.5
"""Share of requests that must have the same line in both traces for lines to say which are the same."""


class RequestLabel(NamedTuple):
    """Who asked for a block, as far as a trace says.

    Attributes:
        op: the operator; empty if unknown.
        line: the user's line.
        tensor: dtype and shape; empty if it is none or unknown.
    """

    op: str = ""
    line: Frame | None = None
    tensor: str = ""
    category: Category = Category.OTHER


class Requests:
    """The requests and returns that a program made to one device's allocator.

    Attributes:
        rows: rows of the trace at which a block was asked for or given back, ascending.
        takes: which of them ask for a block.
        block: for each, the block, as index into ``lives``.
        places: for each, a number that stands for the line that asked for its block; 0 if unknown. Folders are left
            out of it: the program may lie elsewhere on another machine.
    """

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        self.trace = trace
        self.device = device
        self.lives: Lifetimes = lifetimes(trace, device, (EventKind.ALLOC,))
        born, freed = self.lives.born, self.lives.freed
        took = np.flatnonzero(born >= 0)
        gave = np.flatnonzero((freed >= 0) & (freed < self.lives.rows))
        rows, block = np.concatenate([born[took], freed[gave]]), np.concatenate([took, gave])
        takes = np.zeros(len(rows), dtype=bool)
        takes[: len(took)] = True
        order = np.argsort(rows, kind="stable")
        self.rows: Ints = rows[order]
        self.block: Ints = block[order]
        self.takes: Flags = takes[order]
        self.places: Ints = self._places(self.block)

    def __len__(self) -> int:
        """Number of requests and returns."""
        return len(self.rows)

    @property
    def curves(self) -> Curves:
        """Bytes over the events of the trace."""
        return DeviceTimeline.of(self.trace, self.device).curves

    @property
    def tokens(self) -> Ints:
        """A number for each request or return, equal where the same number of bytes is requested or returned."""
        tokens: Ints = self.lives.size[self.block] * 2 + self.takes
        return tokens

    @cached_property
    def _lines(self) -> list[Frame | None]:
        return [user_frame(stack_frames(self.trace, stack)) for stack in range(len(self.trace.stacks))]

    def _places(self, blocks: Ints) -> Ints:
        of_stack = [0 if line is None else crc32(_place(line).encode()) + 1 for line in self._lines]
        return np.array([*of_stack, 0], dtype=np.int64)[self.lives.stack[blocks]]

    def settled(self, row: int) -> int:
        """The event itself; where it asks for a block's return that takes effect at once, the one that says so."""
        trace = self.trace
        if 0 <= row < len(trace) - 1 and trace.kind[row] == EventKind.FREE_REQUESTED:
            completes = trace.kind[row + 1] == EventKind.FREE_COMPLETED
            return row + int(completes and trace.address[row + 1] == trace.address[row])
        return row

    def label(self, block: int) -> RequestLabel:
        """Who asked for a block."""
        row = int(self.lives.born[block])
        return RequestLabel() if row < 0 else self.label_of_row(row)

    def label_of_row(self, row: int) -> RequestLabel:
        """Who asked, at an event of the trace."""
        trace = self.trace
        stack = int(trace.stack[row])
        return RequestLabel(
            op=entry(trace.ops, int(trace.op[row])),
            line=self._lines[stack] if stack >= 0 else None,
            tensor=entry(trace.tensors, int(trace.tensor[row])),
            category=Category(int(trace.category[row])),
        )

    def functions(self, block: int) -> tuple[str, ...]:
        """Names of all functions on the stack that asked for a block; torch can record those in C++ too."""
        row = int(self.lives.born[block])
        stack = int(self.trace.stack[row]) if row >= 0 else -1
        return tuple(frame.name for frame in stack_frames(self.trace, stack))

    def is_from_the_beginning(self) -> bool:
        """Whether the device was empty before the first event."""
        return not any(self.curves.start.values())


def align_requests(recorded: Requests, predicted: Requests) -> Alignment:
    """Which requests of a recording are which of a prediction.

    A recording that begins on an empty device begins where the program does. Any other may begin anywhere; between
    equally good places the one decides where as much is allocated as the recording says. Both may end before the
    prediction does. Where hardly anything is alike, the recording stands beside the whole prediction.
    """
    first, second = recorded.tokens, predicted.tokens
    if recorded.is_from_the_beginning():
        free, cost = Ends.TAIL, None
    else:
        free = Ends.BOTH
        cost = np.abs(_allocated_before(predicted) - recorded.curves.start[Measure.ALLOCATED])
    if _lines_tell(recorded, predicted):
        one, two = _with_places(recorded), _with_places(predicted)
        found = _fill(align(one, two, free=free, cost_of_start=cost), first, second)
    else:
        found = align(first, second, free=free, cost_of_start=cost)
    if len(found.first) < ALIKE * len(first):
        return replace(found, start=0, stop=len(second))
    return found


def _place(line: Frame) -> str:
    return f"{PurePosixPath(line.filename.replace(chr(92), '/')).name}:{line.line}"


def _allocated_before(requests: Requests) -> Ints:
    """Bytes allocated before each request."""
    allocated = requests.curves.allocated[requests.rows]
    return np.concatenate([[requests.curves.start[Measure.ALLOCATED]], allocated])[: len(requests)]


def _lines_tell(recorded: Requests, predicted: Requests) -> bool:
    """Whether the two name the same lines; not so if one names none, or was run from another version of the source."""
    if not recorded.places.any() or not predicted.places.any():
        return False
    alike = _common(_with_places(recorded), _with_places(predicted))
    return alike >= _TELLING * _common(recorded.tokens, predicted.tokens)


def _with_places(requests: Requests) -> Ints:
    """Tokens that also differ where the source lines differ."""
    factors = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    mixed: Ints = (
        requests.tokens.astype(np.uint64) * factors[0] + requests.places.astype(np.uint64) * factors[1]
    ).view(np.int64)
    return mixed


def _common(first: Ints, second: Ints) -> int:
    """How many elements two sequences have in common, whatever their order."""
    one, ones = np.unique(first, return_counts=True)
    two, twos = np.unique(second, return_counts=True)
    _, at_one, at_two = np.intersect1d(one, two, assume_unique=True, return_indices=True)
    return int(np.minimum(ones[at_one], twos[at_two]).sum())


def _fill(found: Alignment, first: Ints, second: Ints) -> Alignment:
    """Align by size alone what lies between requests that are aligned by their lines too."""
    left = np.concatenate([[-1], found.first, [len(first)]])
    right = np.concatenate([[found.start - 1], found.second, [max(found.stop, found.start)]])
    gaps = np.flatnonzero((np.diff(left) > 1) & (np.diff(right) > 1))
    lefts, rights = [found.first], [found.second]
    for gap in gaps.tolist():
        i, j = int(left[gap]) + 1, int(right[gap]) + 1
        between = align(first[i : int(left[gap + 1])], second[j : int(right[gap + 1])])
        lefts.append(between.first + i)
        rights.append(between.second + j)
    one, two = np.concatenate(lefts), np.concatenate(rights)
    order = np.argsort(one, kind="stable")
    return Alignment(first=one[order], second=two[order], start=found.start, stop=found.stop)
