"""The outcome of a calibration: measurements beside predictions, and the profile that comes of them. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as days
from difflib import SequenceMatcher
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from vramfit.calibrate.measurement_journal import About, CaseFailure
from vramfit.calibrate.records import BlockKind, CaseRecord, OpRecord, Step, Take, as_measured, peak_bytes
from vramfit.gpus.measured_profile import MeasuredCall, MeasuredProfile, Rates

_ALWAYS = ("kernels",)  # first uses that every program makes: they belong to the context
_KEPT = ("cublas", "cublaslt", "cudnn_dropout")


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
        measured: what the card did; None if it did not run the op.
        predicted: what the virtual GPU says; None if it does not run the op.
    """

    case: str
    verdict: OpVerdict
    measured: OpRecord | None
    predicted: OpRecord | None

    @property
    def op(self) -> str:
        """Full name of the op."""
        return self._either.op

    @property
    def signature(self) -> str:
        """What the op was called with, as text."""
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


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The outcome of a calibration. Sizes are bytes.

    Attributes:
        measured, predicted: records of the cases, by name.
        failures: cases without a measurement, by name.
        unpredicted: cases that the virtual GPU could not run, with the reason.
        growths: first uses as measured: ``name``, ``outside``, ``kept``.
        expected_growths: as the virtual GPU has them.
        rates: speeds as measured, None if they were not.
        left: cases that the time did not suffice for.
        journal: the file of the measurements.
    """

    about: About
    measured: Mapping[str, CaseRecord]
    predicted: Mapping[str, CaseRecord]
    failures: Mapping[str, CaseFailure] = field(default_factory=dict)
    unpredicted: Mapping[str, str] = field(default_factory=dict)
    growths: tuple[Mapping[str, Any], ...] = ()
    expected_growths: tuple[Mapping[str, Any], ...] = ()
    rates: Rates | None = None
    left: int = 0
    journal: Path | None = None

    @cached_property
    def comparisons(self) -> tuple[OpComparison, ...]:
        """Every op of every case that was measured and predicted."""
        return tuple(
            comparison
            for name, record in self.measured.items()
            if name in self.predicted
            for comparison in compare_case(record, self.predicted[name])
        )

    @cached_property
    def total(self) -> Tally:
        """All families together."""
        return self._tally("all", None)

    @cached_property
    def families(self) -> tuple[Tally, ...]:
        """Each family that has a case."""
        names = dict.fromkeys(name.partition("/")[0] for name in (*self.measured, *self.failures))
        return tuple(self._tally(name, name) for name in names)

    @cached_property
    def disagreements(self) -> list[OpComparison]:
        """What is not exact in bytes, the worst first."""
        return disagreements(self.comparisons)

    def _tally(self, name: str, family: str | None) -> Tally:
        def ours(case: str) -> bool:
            return family is None or case.partition("/")[0] == family

        both = [case for case in self.measured if ours(case) and case in self.predicted]
        ratios = []
        for case in both:
            found, told = self.measured[case].seconds, self.predicted[case].seconds
            if found and told:
                ratios.append(found / told)
        return tally(
            name,
            [comparison for comparison in self.comparisons if ours(comparison.case)],
            cases=len(both),
            failed=sum(ours(case) for case in (*self.failures, *self.unpredicted)),
            ratios=ratios,
        )

    def profile(self, date: str | None = None) -> MeasuredProfile:
        """What the virtual GPU prefers to its rules from now on.

        The profile holds the calls whose rules are not exact or have an error bar; the others need none.

        Args:
            date: the day, ISO form; None for today.
        """
        growths = {growth["name"]: growth for growth in self.growths}
        context = growths.get("context")
        return MeasuredProfile(
            gpu_name=self.about.name,
            total_bytes=self.about.total_bytes,
            torch_version=self.about.torch,
            cuda_version=self.about.cuda,
            cudnn_version=self.about.cudnn,
            driver=self.about.driver,
            date=date or days.today().isoformat(),
            source=self.about.source,
            context_bytes=None
            if context is None
            else int(context["outside"])
            + sum(int(growths[name]["outside"]) for name in _ALWAYS if name in growths),
            library_bytes={
                name: int(growth["outside"])
                for name, growth in growths.items()
                if name not in ("context", *_ALWAYS) and growth["outside"]
            },
            workspace_bytes={
                name: int(growths[name]["kept"])
                for name in _KEPT
                if name in growths and growths[name]["kept"] > 0
            },
            rates=self.rates or Rates(),
            ops=self._calls(),
        )

    def _calls(self) -> dict[str, dict[str, MeasuredCall]]:
        found: dict[str, dict[str, MeasuredCall]] = {}
        for comparison in self.comparisons:
            record, told = comparison.measured, comparison.predicted
            if record is None or told is None:
                continue
            if comparison.verdict is not OpVerdict.EXACT or told.above or told.below:
                found.setdefault(record.op, {})[record.signature] = _call(record)
        return found


def _call(record: OpRecord) -> MeasuredCall:
    first = record.first
    return MeasuredCall(
        usual=record.measured,
        first=None if first is None else as_measured(first, record.results, reserve_at=record.reserve_at),
    )
