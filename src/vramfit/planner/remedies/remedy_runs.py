"""Tries remedies: each is run with the program, alone and then together, until one fits and the time is over.

NOTE [The order of tries]: those that stand alone first, the mildest ahead; then checkpointing with autocast; then, from
what fits or comes closest, one remedy more each time, those that cost least first, until it fits; in the end the
largest batch that fits. Each is run without the card's limit, which shows what it needs; what never comes near the
limit runs in the same way within it. In between, it is run with the limit, which decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from vramfit.errors import VramfitError
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.remedies.alteration import NOTHING, Alteration
from vramfit.planner.remedies.framework_remedies import framework_remedies
from vramfit.planner.remedies.loop_remedies import batch_size, loop_remedies, with_batch
from vramfit.planner.remedies.remedy import (
    AUTOCAST,
    CHECKPOINTING,
    CHUNKS,
    EXPANDABLE,
    ROUNDED_LOSS,
    Remedy,
    Subject,
)
from vramfit.planner.scripts.script_backend import ScriptBackend
from vramfit.planner.workload_check import brief
from vramfit.techniques import Choice, find_technique
from vramfit.techniques.chunked_loss import ChunkedLossSetting, find_head
from vramfit.trace.tried_remedies import TriedRemedies, TriedRemedy

Told = Callable[[TriedRemedy], object]

CONF = "expandable_segments:True"

AS_IT_IS = "the program as it is"


@dataclass(slots=True)
class RemedyRuns:
    """The tries for one program.

    Args:
        device: the card on which it is run.
        subject: the program.
        limit: bytes of the card.
        seconds: that may be spent.
        told: called with each row as it is known.
    """

    device: ScriptBackend
    subject: Subject
    limit: int
    seconds: float
    told: Told = lambda _row: None
    _rows: list[TriedRemedy] = field(default_factory=list)
    _by_row: dict[str, Remedy] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _plain_seconds: float = 0.0
    _cut: bool = False

    def run(self) -> TriedRemedies:
        """Try what there is time for."""
        self._try(Remedy(name=AS_IT_IS, alteration=NOTHING, how=()))
        self._plain_seconds = self._rows[0].step_seconds
        self._rows[0] = replace(self._rows[0], plain_step_seconds=self._plain_seconds)
        singles = list(self._singles())
        for remedy in singles:
            self._try(remedy)
        self._try_together(singles)
        self._try_batches()
        return TriedRemedies(
            rows=tuple(self._rows),
            cheapest=self._cheapest(),
            seconds=time.monotonic() - self._began,
            cut=self._cut,
        )

    # -- what is tried -----------------------------------------------------------------------------------------------

    def _singles(self) -> Iterator[Remedy]:
        found: dict[str, Remedy] = {}
        for remedy in (*framework_remedies(self.subject), *loop_remedies(self.subject)):
            found.setdefault(remedy.name, remedy)
        yield from sorted(found.values(), key=lambda one: one.weight)
        if (halved := self._halved()) is not None:
            yield halved
        if find_head(self.subject.model) is not None:
            choice = Choice(technique=find_technique("chunked-loss"), setting=ChunkedLossSetting())
            yield Remedy(
                name=CHUNKS,
                alteration=Alteration(choices=(choice,)),
                how=(self._with_plan("chunked-loss"),),
                changes=ROUNDED_LOSS,
                weight=2,
            )
        yield Remedy(
            name=EXPANDABLE,
            alteration=Alteration(alloc_conf=CONF),
            how=(f"export PYTORCH_CUDA_ALLOC_CONF={CONF}",),
        )

    def _halved(self) -> Remedy | None:
        size = batch_size(self.subject)
        return None if size is None or size < 2 else with_batch(self.subject, size // 2)

    def _with_plan(self, technique: str) -> str:
        command = " ".join(self.subject.command)
        return f"vramfit plan --gpu NAME --allow {technique} -o plan.toml {command}"

    def _try_together(self, singles: list[Remedy]) -> None:
        """Checkpointing with autocast, and then more and more of what is there until it fits."""
        able = [one for one in singles if self._row(one.name) is not None]
        names = {one.name: one for one in able}
        both = names.get(AUTOCAST), names.get(CHECKPOINTING)
        if both[0] is not None and both[1] is not None:
            self._try(both[0] + both[1])
        if self._fitting():
            return
        together: Remedy | None = None
        for remedy in sorted(able, key=lambda one: one.weight):
            if remedy.name.startswith("batch"):
                continue
            together = remedy if together is None else together + remedy
            if self._row(together.name) is None:
                self._try(together)
            if self._fitting():
                return

    def _try_batches(self) -> None:
        """The largest batch that fits with nothing else, and with all that was put together where none does."""
        size = batch_size(self.subject)
        if size is None or size < 2:
            return
        base = None if self._fitting() or not self._together() else self._together()

        def fits(value: int) -> bool:
            remedy = with_batch(self.subject, value)
            if remedy is None:
                return False
            if base is not None:
                remedy = base + remedy
            known = self._row(remedy.name) or self._try(remedy)
            return known is not None and bool(known.fits)

        value = size // 2
        while value >= 1 and not self._cut:  # halves: what accumulates evenly
            if fits(value):
                return
            value //= 2

    def _together(self) -> Remedy | None:
        """The remedy that was run and needs least."""
        tried = [row for row in self._rows if row.total_bytes and row.name in self._by_row]
        best = min(tried, key=lambda row: row.total_bytes, default=None)
        return None if best is None or best.name == AS_IT_IS else self._by_row[best.name]

    # -- runs --------------------------------------------------------------------------------------------------------

    def _try(self, remedy: Remedy) -> TriedRemedy | None:
        """Run a remedy; None where there is no time for it."""
        spent = time.monotonic() - self._began
        if self._rows and spent + self._longest > self.seconds:
            self._cut = True
            return None
        began = time.monotonic()
        try:
            row = self._row_of(remedy, self._cost(remedy))
        except VramfitError as error:
            row = TriedRemedy(name=remedy.name, how=remedy.how, failed=brief(error))
        self._longest = max(self._longest, time.monotonic() - began)
        if row.failed and len(self._rows):
            return row  # nothing is advised that does not run
        self._rows.append(row)
        self._by_row[row.name] = remedy
        self.told(row)
        return row

    def _cost(self, remedy: Remedy) -> StepCost:
        cost = self.device.altered_cost(remedy.alteration, None)
        if cost.total_bytes <= self.limit:
            return cost
        if cost.peak_allocated_bytes + cost.outside_bytes > self.limit:
            return replace(cost, fits=False)
        within = self.device.altered_cost(remedy.alteration, self.limit)
        return within if within.fits else replace(cost, fits=False)

    def _row_of(self, remedy: Remedy, cost: StepCost) -> TriedRemedy:
        return TriedRemedy(
            name=remedy.name,
            how=remedy.how,
            changes=remedy.changes,
            total_bytes=cost.total_bytes,
            peak_allocated_bytes=cost.peak_allocated_bytes,
            peak_reserved_bytes=cost.peak_reserved_bytes,
            fits=cost.fits,
            step_seconds=cost.step_seconds,
            plain_step_seconds=self._plain_seconds,
        )

    def _row(self, name: str) -> TriedRemedy | None:
        return next((row for row in self._rows if row.name == name), None)

    def _fitting(self) -> list[TriedRemedy]:
        return [row for row in self._rows if row.fits]

    def _cheapest(self) -> int | None:
        """The row that fits and whose step takes least; of equal ones the one that changes least."""
        fitting = [number for number, row in enumerate(self._rows) if row.fits and number]
        return min(
            fitting,
            key=lambda number: (
                self._rows[number].name.startswith("batch"),
                self._rows[number].step_seconds,
                bool(self._rows[number].changes),
            ),
            default=None,
        )
