"""What was observed of ops and cases: blocks taken and given back, in order, and seconds. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from vramfit.gpus.measured_profile import MeasuredOp

_ROUNDING = 512  # the caching allocator's blocks are multiples of this (kMinBlockSize)


class BlockKind(Enum):
    """What a block is for; the value is its letter in a record."""

    RESULT = "o"
    TEMPORARY = "t"
    KEPT = "k"
    """Stays after the op though no result lies in it: a library's workspace."""


@dataclass(frozen=True, slots=True)
class Take:
    """A block is taken.

    Attributes:
        kind: what it is for.
        nbytes: its size as it was asked for.
        result: position of the result that lies in it, -1 for none.
    """

    kind: BlockKind
    nbytes: int
    result: int = -1


@dataclass(frozen=True, slots=True)
class Give:
    """A block is given back: the ``number``-th taken by this op, from 1."""

    number: int


Step = Take | Give
_WORD = re.compile(r"([otk])(\d+)(?:@(\d+))?|-(\d+)")


def to_text(steps: Iterable[Step]) -> str:
    """Steps as words: ``t512 o1024@0 -1``."""
    return " ".join(_word(step) for step in steps)


def _word(step: Step) -> str:
    if isinstance(step, Give):
        return f"-{step.number}"
    place = f"@{step.result}" if step.result >= 0 else ""
    return f"{step.kind.value}{step.nbytes}{place}"


def from_text(text: str) -> tuple[Step, ...]:
    """What `to_text` wrote.

    Raises:
        ValueError: the text holds something other than steps.
    """
    steps: list[Step] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not a step")
        letter, size, place, number = match.groups()
        if number:
            steps.append(Give(int(number)))
        else:
            steps.append(Take(BlockKind(letter), int(size), int(place) if place else -1))
    return tuple(steps)


def canonical(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps without irrelevant differences: the order of blocks given back together, and blocks given back last."""
    ordered: list[Step] = []
    given: list[int] = []
    for step in steps:
        if isinstance(step, Give):
            given.append(step.number)
        else:
            ordered += map(Give, sorted(given))
            given.clear()
            ordered.append(step)
    return tuple(ordered)


def peak_bytes(steps: Iterable[Step]) -> int:
    """Most bytes that the blocks of an op hold at once, each rounded up as by the allocator."""
    sizes: list[int] = []
    held = most = 0
    for step in steps:
        if isinstance(step, Give):
            held -= sizes[step.number - 1]
        else:
            sizes.append(-(-step.nbytes // _ROUNDING) * _ROUNDING)
            held += sizes[-1]
            most = max(most, held)
    return most


def as_measured(steps: Sequence[Step], results: int, *, reserve_at: int | None = None) -> MeasuredOp:
    """Steps of an op in the form that `vramfit.virtual.kernels.Extras` has.

    A block taken between two results and still held when the second one is taken counts as taken before the first.

    Args:
        steps: what the op did, in canonical form.
        results: how many results the op returns, absent ones included.
        reserve_at: position of the result whose size a library decides, None without one.
    """
    takes = [step for step in steps if isinstance(step, Take)]
    places = [index for index, take in enumerate(takes) if take.kind is BlockKind.RESULT]
    reserve = next((t.nbytes for t in takes if t.kind is BlockKind.RESULT and t.result == reserve_at), None)
    bounds = [-1, *places, len(takes)]
    parts = [  # numbers of the temporaries before, between and after the results
        [index + 1 for index in range(low + 1, high) if takes[index].kind is BlockKind.TEMPORARY]
        for low, high in pairwise(bounds)
    ]
    if len(parts) == 1:
        return MeasuredOp(after=_listed(steps, takes, parts[0]), reserve=reserve)
    before, last = parts[0], parts[-1]
    between: list[tuple[int, ...]] = [()] * results
    for place, following, part in zip(places, places[1:], parts[1:-1], strict=False):
        lasting = [number for number in part if _held_at(steps, number, following)]
        before += lasting
        between[takes[place].result] = _listed(steps, takes, [n for n in part if n not in lasting])
    if not any(between):
        return MeasuredOp(
            before=_listed(steps, takes, before), after=_listed(steps, takes, last), reserve=reserve
        )
    between[takes[places[-1]].result] = _listed(steps, takes, last)
    return MeasuredOp(before=_listed(steps, takes, before), between=tuple(between), reserve=reserve)


def _held_at(steps: Sequence[Step], number: int, taken: int) -> bool:
    """Whether a block is still held when the ``taken``-th block (from 0) is taken."""
    count = 0
    for step in steps:
        if isinstance(step, Take):
            if count == taken:
                return True
            count += 1
        elif step.number == number:
            return False
    return True


def _listed(steps: Sequence[Step], takes: Sequence[Take], numbers: Sequence[int]) -> tuple[int, ...]:
    """Some temporaries as a list of `Extras`: sizes, and a negative number for each one given back early."""
    wanted = {number: position + 1 for position, number in enumerate(numbers)}
    entries: list[int] = []
    taken = 0
    for step in steps:
        if isinstance(step, Take):
            taken += 1
            if taken in wanted:
                entries.append(takes[taken - 1].nbytes)
        elif step.number in wanted:
            entries.append(-wanted[step.number])
    while entries and entries[-1] < 0:
        entries.pop()
    return tuple(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One call of an op.

    Attributes:
        op: its full name, ``aten.mm.default``.
        signature: what decides its temporaries, see `vramfit.virtual.kernels.measured.signature`.
        steps: blocks taken and given back, in canonical form.
        results: how many results it returned, None among them counted.
        reserve_at: position of a result of raw bytes, None without one.
        above: bytes by which a prediction may be too low, by its own account.
        below: bytes by which it may be too high.
        first: the steps of the first such call, where a case records them.
    """

    op: str
    signature: str
    steps: tuple[Step, ...]
    results: int = 1
    reserve_at: int | None = None
    above: int = 0
    below: int = 0
    first: tuple[Step, ...] | None = None

    @property
    def measured(self) -> MeasuredOp:
        """Its temporaries in the form that a profile has."""
        return as_measured(self.steps, self.results, reserve_at=self.reserve_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseRecord:
    """One case, as it was measured or predicted.

    Attributes:
        ops: what its ops did, in order; views are left out.
        seconds: time of one run, as measured (median) or estimated; None without one.
        peak_bytes: most bytes allocated at once, with its inputs.
    """

    case: str
    ops: tuple[OpRecord, ...]
    seconds: float | None = None
    peak_bytes: int = 0


def record_to_plain(record: CaseRecord) -> dict[str, Any]:
    """A record as plain values that JSON can hold."""
    return {
        "seconds": record.seconds,
        "peak_bytes": record.peak_bytes,
        "ops": [_op_to_plain(op) for op in record.ops],
    }


def _op_to_plain(op: OpRecord) -> dict[str, Any]:
    plain: dict[str, Any] = {"op": op.op, "of": op.signature, "did": to_text(op.steps)}
    if op.results != 1:
        plain["results"] = op.results
    if op.reserve_at is not None:
        plain["reserve_at"] = op.reserve_at
    if op.above or op.below:
        plain["error"] = [op.below, op.above]
    if op.first is not None:
        plain["first"] = to_text(op.first)
    return plain


def record_from_plain(case: str, plain: dict[str, Any]) -> CaseRecord:
    """What `record_to_plain` wrote."""
    return CaseRecord(
        case=case,
        seconds=plain["seconds"],
        peak_bytes=plain["peak_bytes"],
        ops=tuple(_op_from_plain(op) for op in plain["ops"]),
    )


def _op_from_plain(plain: dict[str, Any]) -> OpRecord:
    below, above = plain.get("error", (0, 0))
    first = plain.get("first")
    return OpRecord(
        op=plain["op"],
        signature=plain["of"],
        steps=from_text(plain["did"]),
        results=plain.get("results", 1),
        reserve_at=plain.get("reserve_at"),
        below=below,
        above=above,
        first=None if first is None else from_text(first),
    )
