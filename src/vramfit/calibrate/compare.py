"""Measurements beside predictions: which ops take, byte for byte, what the virtual GPU says. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import Enum

from vramfit.calibrate.records import BlockKind, CaseRecord, OpRecord, Step, Take, peak_bytes


class OpVerdict(Enum):
    """How a measured op compares with its prediction, from best to worst."""

    EXACT = "exact"
    """The same blocks in the same order, given back at the same moments."""
    SAME_BYTES = "same bytes"
    """The same blocks and the same peak within the op, in another order."""
    WITHIN_BAR = "within error bar"
    """Other blocks, but the peak lies within the prediction's own error bar."""
    DIFFERENT = "different"
    ONLY_MEASURED = "only on the card"
    """The card ran an op that the virtual GPU does not: it decided otherwise before."""
    ONLY_PREDICTED = "only predicted"


_RANK = {verdict: rank for rank, verdict in enumerate(OpVerdict)}
IN_BYTES = frozenset({OpVerdict.EXACT, OpVerdict.SAME_BYTES})
"""The verdicts that count as exact in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpComparison:
    """One op of one case, measured and predicted.

    Attributes:
        case: name of the case.
        verdict: how they compare.
        measured: what the card did, None if it ran no such op.
        predicted: what the virtual GPU says, None if it says nothing of such an op.
    """

    case: str
    verdict: OpVerdict
    measured: OpRecord | None
    predicted: OpRecord | None

    @property
    def family(self) -> str:
        """Name of the family of the case."""
        return self.case.partition("/")[0]

    @property
    def op(self) -> str:
        """Full name of the op."""
        return self._either.op

    @property
    def signature(self) -> str:
        """What it was called with."""
        return self._either.signature

    @property
    def _either(self) -> OpRecord:
        found = self.measured if self.measured is not None else self.predicted
        assert found is not None
        return found

    @property
    def difference(self) -> int:
        """By how many bytes the peak within the op is higher on the card than predicted."""
        return _peak(self.measured) - _peak(self.predicted)

    @property
    def has_temporaries(self) -> bool:
        """Whether the op takes anything but its results, on the card or as predicted."""
        return any(
            isinstance(step, Take) and step.kind is not BlockKind.RESULT
            for record in (self.measured, self.predicted)
            if record is not None
            for step in record.steps
        )


def _peak(record: OpRecord | None) -> int:
    return 0 if record is None else peak_bytes(record.steps)


def compare_case(measured: CaseRecord, predicted: CaseRecord) -> list[OpComparison]:
    """Pair the ops of a case in their order; an op that only one side has stands alone."""
    here, there = ([(op.op, op.signature) for op in record.ops] for record in (measured, predicted))
    if here == there:
        return [_pair(measured.case, a, b) for a, b in zip(measured.ops, predicted.ops, strict=True)]
    found: list[OpComparison] = []
    for tag, low, high, low2, high2 in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs = zip(measured.ops[low:high], predicted.ops[low2:high2], strict=True)
            found += [_pair(measured.case, a, b) for a, b in pairs]
            continue
        found += [
            OpComparison(case=measured.case, verdict=OpVerdict.ONLY_MEASURED, measured=op, predicted=None)
            for op in measured.ops[low:high]
        ]
        found += [
            OpComparison(case=measured.case, verdict=OpVerdict.ONLY_PREDICTED, measured=None, predicted=op)
            for op in predicted.ops[low2:high2]
        ]
    return found


def _pair(case: str, measured: OpRecord, predicted: OpRecord) -> OpComparison:
    verdict = _verdict(measured.steps, predicted)
    if measured.first is not None or predicted.first is not None:
        first = measured.first or measured.steps
        cold = _verdict(first, predicted, predicted.first or predicted.steps)
        verdict = max(verdict, cold, key=_RANK.__getitem__)
    return OpComparison(case=case, verdict=verdict, measured=measured, predicted=predicted)


def _verdict(
    measured: Sequence[Step], record: OpRecord, predicted: Sequence[Step] | None = None
) -> OpVerdict:
    predicted = record.steps if predicted is None else predicted
    if tuple(measured) == tuple(predicted):
        return OpVerdict.EXACT
    difference = peak_bytes(measured) - peak_bytes(predicted)
    if not difference and _blocks(measured) == _blocks(predicted):
        return OpVerdict.SAME_BYTES
    if (record.below or record.above) and -record.below <= difference <= record.above:
        return OpVerdict.WITHIN_BAR
    return OpVerdict.DIFFERENT


def _blocks(steps: Iterable[Step]) -> list[tuple[str, int]]:
    return sorted((step.kind.value, step.nbytes) for step in steps if isinstance(step, Take))


# -- in all --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """How many different calls of ops got which verdict; a call that occurs more than once counts with its worst.

    Attributes:
        name: of the family, or ``all``.
        cases: cases that were measured and predicted.
        failed: cases that gave no measurement.
        verdicts: calls by verdict.
        with_temporaries: those that take anything but their results.
        temporaries_exact: those of them that are exact in bytes.
        time_ratio: median of measured over estimated seconds, None without any.
    """

    name: str
    cases: int
    failed: int
    verdicts: Mapping[OpVerdict, int]
    with_temporaries: int
    temporaries_exact: int
    time_ratio: float | None

    @property
    def calls(self) -> int:
        """How many different calls."""
        return sum(self.verdicts.values())

    @property
    def exact(self) -> int:
        """How many are exact in bytes."""
        return sum(self.verdicts.get(verdict, 0) for verdict in IN_BYTES)

    @property
    def share(self) -> float | None:
        """The share that is exact in bytes, None without any call."""
        return self.exact / self.calls if self.calls else None


def tally(
    name: str, comparisons: Iterable[OpComparison], *, cases: int, failed: int, ratios: Sequence[float]
) -> Tally:
    """Count different calls by verdict."""
    worst: dict[tuple[str, str], OpComparison] = {}
    for comparison in comparisons:
        key = (comparison.op, comparison.signature)
        known = worst.get(key)
        if known is None or _RANK[comparison.verdict] > _RANK[known.verdict]:
            worst[key] = comparison
    found = list(worst.values())
    taking = [comparison for comparison in found if comparison.has_temporaries]
    return Tally(
        name=name,
        cases=cases,
        failed=failed,
        verdicts={
            verdict: count
            for verdict in OpVerdict
            if (count := sum(comparison.verdict is verdict for comparison in found))
        },
        with_temporaries=len(taking),
        temporaries_exact=sum(comparison.verdict in IN_BYTES for comparison in taking),
        time_ratio=statistics.median(ratios) if ratios else None,
    )


def disagreements(comparisons: Iterable[OpComparison]) -> list[OpComparison]:
    """What is not exact in bytes, each call once, the largest differences first."""
    worst: dict[tuple[str, str], OpComparison] = {}
    for comparison in comparisons:
        if comparison.verdict not in IN_BYTES:
            key = (comparison.op, comparison.signature)
            if key not in worst or abs(comparison.difference) > abs(worst[key].difference):
                worst[key] = comparison
    return sorted(worst.values(), key=lambda found: (-_RANK[found.verdict], -abs(found.difference)))
