"""Runs a calibration: workers, the order of cases, limits of time and memory, and what is kept. No torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vramfit.calibrate.calibration_result import Calibration
from vramfit.calibrate.measurement_journal import About, CalibrationJournal, CaseFailure
from vramfit.calibrate.records import CaseRecord, record_from_plain
from vramfit.calibrate.worker import Child, CommandFailed, Role, WorkerConfig
from vramfit.errors import UnknownGpuError, VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.gpus.measured_profile import NO_PROFILE, Rates, rates_from_plain
from vramfit.launch.starting import answer

CASE_SECONDS = 60.0
"""A case that takes longer is ended."""

_STEP_SECONDS = 120.0
_SHARE_OF_FREE = 0.5


class CalibrationObserver(Protocol):
    """Is informed of the progress of a calibration."""

    def about(self, about: About, journal: CalibrationJournal) -> None:
        """The card is known; ``journal`` holds what was measured before."""

    def doing(self, what: str) -> None:
        """A step outside the cases begins: ``what`` names it."""

    def case(self, number: int, of: int, name: str, note: str) -> None:
        """A case is done: measured, known already (an empty note), or failed with a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to measure, and within which limits.

    Attributes:
        cases: names of the cases in the order of measurement.
        journal: file of the measurements, or a function that chooses it by `About`.
        device: index of the card.
        gpu: the virtual GPU that takes the card's place, None for the card.
        acting: the profile by which that virtual GPU behaves, ``none`` for the rules alone.
        minutes: for how long cases are begun.
        memory_bytes: most that a case may allocate, None for half of what is free.
        fresh: measure again what was measured before.
        surroundings: whether the context, libraries and speeds are measured too.
    """

    cases: Sequence[str]
    journal: Path | Callable[[About], Path]
    device: int = 0
    gpu: GpuSpec | None = None
    acting: str = NO_PROFILE
    minutes: float = 10.0
    memory_bytes: int | None = None
    fresh: bool = False
    surroundings: bool = True


@dataclass(slots=True)
class _MeasuredCase:
    predicted: dict[str, CaseRecord] = field(default_factory=dict)
    unpredicted: dict[str, str] = field(default_factory=dict)
    expected_growths: tuple[dict[str, Any], ...] = ()
    left: int = 0


def calibrate(options: Options, observer: CalibrationObserver) -> Calibration:
    """Measure, predict, and compare.

    Raises:
        UsageError: there is no card, or torch cannot work here.
        WriteError: the journal cannot be written.
    """
    deadline = time.monotonic() + 60 * options.minutes
    with Child(_card_config(options)) as card:
        card.start()
        about = _about(card, options)
        path = options.journal if isinstance(options.journal, Path) else options.journal(about)
        journal = CalibrationJournal(path, about, fresh=options.fresh)
        observer.about(about, journal)
        limit = _limit(card, options)
        found = _MeasuredCase()
        with Child(_predictor_config(about, options.gpu)) as predictor:
            if options.surroundings:
                _surroundings(options, journal, card, observer)
                found.expected_growths = _first_uses(predictor, None)
            _cases(options, journal, card, predictor, found, observer, deadline=deadline, limit=limit)
    return _outcome(journal, found)


def compare_again(
    journal: CalibrationJournal, cases: Sequence[str], observer: CalibrationObserver
) -> Calibration:
    """Compare what was measured earlier, perhaps elsewhere, with what the virtual GPU says now."""
    found = _MeasuredCase()
    names = [name for name in cases if name in journal.records]
    with Child(_predictor_config(journal.about, None)) as predictor:
        if "growths" in journal.facts:
            found.expected_growths = _first_uses(predictor, None)
        for number, name in enumerate(names, 1):
            predictor.send("case", name=name)
            _receive_prediction(predictor, name, found)
            observer.case(number, len(names), name, found.unpredicted.get(name, ""))
    return _outcome(journal, found)


def _outcome(journal: CalibrationJournal, found: _MeasuredCase) -> Calibration:
    rates: Rates | None = None
    if "rates" in journal.facts:
        rates = rates_from_plain(journal.facts["rates"])
    return Calibration(
        about=journal.about,
        measured=journal.records,
        predicted=found.predicted,
        failures=journal.failures,
        unpredicted=found.unpredicted,
        growths=tuple(journal.facts.get("growths", ())),
        expected_growths=found.expected_growths,
        rates=rates,
        left=found.left,
        journal=journal.path,
    )


# -- workers -------------------------------------------------------------------------------------------------


def _card_config(options: Options) -> WorkerConfig:
    if options.gpu is None:
        return WorkerConfig(role=Role.CARD, device=options.device)
    return WorkerConfig(role=Role.VIRTUAL_CARD, gpu=options.gpu, profile=options.acting)


def _predictor_config(about: About, gpu: GpuSpec | None) -> WorkerConfig:
    return WorkerConfig(role=Role.PREDICTOR, gpu=gpu or spec_of(about))


def spec_of(about: About) -> GpuSpec:
    """The catalogue's card of that name, else one of its size, with the figures that the card itself reports."""
    try:
        spec = find_gpu(about.name)
    except UnknownGpuError:
        spec = find_gpu(f"{about.total_bytes}B")
    return replace(
        spec,
        vendor_name=about.name,
        total_bytes=about.total_bytes,
        compute_capability=about.capability,
        sm_count=about.sm_count,
        l2_bytes=about.l2_bytes,
    )


def _about(card: Child, options: Options) -> About:
    try:
        told = card.ask("about", _STEP_SECONDS)
    except CommandFailed as error:
        raise _fatal(error, "asking the card for its properties") from None
    return About(
        **told | {"capability": tuple(told["capability"])},
        source="card" if options.gpu is None else "virtual",
        driver=_driver_version(options.device) if options.gpu is None else "",
    )


def _fatal(error: CommandFailed, doing: str) -> VramfitError:
    """What the user reads of a failure after which nothing else makes sense."""
    return VramfitError(f"{doing} failed: {error}", "Run the command again; what was measured is kept")


def _driver_version(device: int) -> str:
    """Version of the driver, empty where nvidia-smi does not tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, f"--id={device}", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = answer(query, timeout=60)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def _limit(card: Child, options: Options) -> int:
    """Most bytes that a case may allocate; the worker is limited to them."""
    try:
        limit = options.memory_bytes
        if limit is None:
            limit = int(card.ask("memory", _STEP_SECONDS)["free"] * _SHARE_OF_FREE)
        card.limit(limit, _STEP_SECONDS)
        return limit
    except CommandFailed as error:
        raise _fatal(error, "asking the card for its free memory") from None


# -- surroundings --------------------------------------------------------------------------------------------


def _surroundings(
    options: Options, journal: CalibrationJournal, card: Child, observer: CalibrationObserver
) -> None:
    if "growths" not in journal.facts:
        observer.doing("context and libraries")
        witness = card if options.gpu is None else None
        with Child(_card_config(options)) as fresh:
            growths = _first_uses(fresh, witness)
        if growths:
            journal.note("growths", growths)
    if "rates" not in journal.facts:
        observer.doing("speeds")
        try:
            journal.note("rates", card.ask("rates", _STEP_SECONDS))
        except CommandFailed as error:
            journal.fail(CaseFailure(case="speeds", kind=error.kind, text=str(error)))


def _first_uses(fresh: Child, witness: Child | None) -> tuple[dict[str, Any], ...]:
    """First uses in a process that has not used the card yet.

    A process cannot see the card before it has a context; another one that has its own can. So a witness reports how
    much is free before and after. Without one the process's own figure must do, which counts all that is taken.
    """
    try:
        fresh.start()
        before = None if witness is None else witness.ask("memory", _STEP_SECONDS)["free"]
        context = fresh.ask("context", _STEP_SECONDS)
        if witness is not None and before is not None:
            after = witness.ask("memory", _STEP_SECONDS)["free"]
            context["outside"] = max(0, before - after - context["kept"])
        return ({**context, "kept": 0}, *fresh.ask("first_uses", _STEP_SECONDS))
    except CommandFailed:
        return ()


# -- cases ---------------------------------------------------------------------------------------------------


def _cases(
    options: Options,
    journal: CalibrationJournal,
    card: Child,
    predictor: Child,
    found: _MeasuredCase,
    observer: CalibrationObserver,
    *,
    deadline: float,
    limit: int,
) -> None:
    """Each case in turn; while the card measures one, the predictor works on the next."""
    names = list(options.cases)
    for number, name in enumerate(names):
        if number == 0:
            predictor.send("case", name=name)
        _receive_prediction(predictor, name, found)
        if number + 1 < len(names):
            predictor.send("case", name=names[number + 1])
        note = ""
        if not journal.has(name):
            if time.monotonic() >= deadline:
                found.left += 1
                found.predicted.pop(name, None)
                continue
            note = _measure(card, journal, name, found, limit)
        elif name in journal.failures:
            note = journal.failures[name].text
        observer.case(number + 1, len(names), name, note)


def _receive_prediction(predictor: Child, name: str, found: _MeasuredCase) -> None:
    try:
        found.predicted[name] = record_from_plain(name, predictor.receive(CASE_SECONDS))
    except CommandFailed as error:
        found.unpredicted[name] = str(error)


def _measure(card: Child, journal: CalibrationJournal, name: str, found: _MeasuredCase, limit: int) -> str:
    """Measure a case; gives a note where that was not possible."""
    predicted = found.predicted.get(name)
    if predicted is not None and predicted.peak_bytes > limit:
        text = f"needs about {predicted.peak_bytes:,} bytes of {limit:,}"
        journal.fail(CaseFailure(case=name, kind="skipped", text=text))
        return text
    try:
        journal.add(record_from_plain(name, card.ask("case", CASE_SECONDS, name=name)))
    except CommandFailed as error:
        journal.fail(CaseFailure(case=name, kind=error.kind, text=str(error)))
        return str(error)
    return ""
