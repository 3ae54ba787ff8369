"""The outcome of a calibration: what was measured, how it compares, and the profile that comes of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date as days
from functools import cached_property
from pathlib import Path
from typing import Any

from vramfit.calibrate.compare import OpComparison, OpVerdict, Tally, compare_case, disagreements, tally
from vramfit.calibrate.measurement_journal import About, CaseFailure
from vramfit.calibrate.records import CaseRecord, OpRecord, as_measured
from vramfit.gpus.measured_profile import MeasuredCall, MeasuredProfile, Rates

_ALWAYS = ("kernels",)  # first uses that every program makes: they belong to the context
_KEPT = ("cublas", "cublaslt", "cudnn_dropout")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What came of a run. Sizes are bytes.

    Attributes:
        about: the card and the software.
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
        """What the virtual GPU shall prefer from now on.

        It holds the calls whose rules are not exact or have an error bar; the others need none.

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
