"""Tries remedies: each is run with the program, alone and then together, until one fits and the time is over.

NOTE [The order of tries]: those that stand alone first, the mildest ahead; then checkpointing with autocast; then one
remedy more each time, those that save most first, until it fits, of which what is not needed is left out again; in the
end the largest batch that fits. Each is run without the card's limit, which shows what it needs; what never comes near
the limit runs in the same way within it. In between, it is run with the limit, which decides.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from vramfit.errors import VramfitError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.remedies.alteration import NOTHING, Alteration
from vramfit.planner.remedies.batch_change import batch_size
from vramfit.planner.remedies.batch_remedies import with_batch
from vramfit.planner.remedies.framework_remedies import framework_remedies
from vramfit.planner.remedies.inference_remedies import inference_remedies
from vramfit.planner.remedies.loop_remedies import loop_remedies
from vramfit.planner.remedies.program_remedy import (
    AUTOCAST,
    CHECKPOINTING,
    CHUNKS,
    EXPANDABLE,
    ROUNDED_LOSS,
    ProgramRemedy,
    TrainedProgram,
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
        spent: of them, already before.
        told: called with each row as it is known.
    """

    device: ScriptBackend
    subject: TrainedProgram
    limit: int
    seconds: float
    spent: float = 0.0
    told: Told = lambda _row: None
    _rows: list[TriedRemedy] = field(default_factory=list)
    _by_row: dict[str, ProgramRemedy] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _plain_seconds: float = 0.0
    _cut: bool = False

    def run(self) -> TriedRemedies:
        """Try what there is time for; interrupted, what was tried so far counts."""
        try:
            self._try_all()
        except KeyboardInterrupt:
            self._cut = True
        return TriedRemedies(
            rows=tuple(self._rows),
            cheapest=self._cheapest(),
            seconds=self._so_far,
            cut=self._cut,
            whole=self.subject.seen.infers,
        )

    def _try_all(self) -> None:
        self._try(ProgramRemedy(name=AS_IT_IS, alteration=NOTHING, how=()))
        self._plain_seconds = self._rows[0].step_seconds
        self._rows[0] = replace(self._rows[0], plain_step_seconds=self._plain_seconds)
        singles = list(self._singles())
        for remedy in singles:
            self._try(remedy)
        self._try_together(singles)
        self._try_batches()

    # -- what is tried -----------------------------------------------------------------------------------------------

    def _singles(self) -> Iterator[ProgramRemedy]:
        found: dict[str, ProgramRemedy] = {}
        infers = self.subject.seen.infers
        makes = (inference_remedies,) if infers else (framework_remedies, loop_remedies)
        for remedy in chain.from_iterable(make(self.subject) for make in makes):
            found.setdefault(remedy.name, remedy)
        yield from sorted(found.values(), key=lambda one: one.weight)
        if (halved := self._halved()) is not None:
            yield halved
        if not infers and find_head(self.subject.model) is not None:
            choice = Choice(technique=find_technique("chunked-loss"), setting=ChunkedLossSetting())
            yield ProgramRemedy(
                name=CHUNKS,
                alteration=Alteration(choices=(choice,)),
                how=(self._with_plan("chunked-loss"),),
                changes=ROUNDED_LOSS,
                weight=2,
            )
        yield ProgramRemedy(
            name=EXPANDABLE,
            alteration=Alteration(alloc_conf=CONF),
            how=(f"export PYTORCH_CUDA_ALLOC_CONF={CONF}",),
        )

    def _halved(self) -> ProgramRemedy | None:
        size = batch_size(self.subject.seen)
        return None if size is None or size < 2 else with_batch(self.subject, size // 2)

    def _with_plan(self, technique: str) -> str:
        command, card = shlex.join(self.subject.command), card_words(self.device.spec)
        return f"vramfit plan --gpu {card} --allow {technique} -o plan.toml {command}"

    def _try_together(self, singles: list[ProgramRemedy]) -> None:
        """Checkpointing with autocast; then one more at a time until it fits, and less of it again while that fits."""
        able = {one.name: one for one in singles if self._row(one.name) is not None}
        autocast, checkpointing = able.get(AUTOCAST), able.get(CHECKPOINTING)
        parts: list[ProgramRemedy] = []
        if autocast is not None and checkpointing is not None:
            parts = [autocast, checkpointing]
            self._try(_together(parts))
        if self._fitting():
            return
        saving = sorted((one for one in able.values() if self._saved(one) > 0), key=self._saved, reverse=True)
        for remedy in saving:
            if remedy in parts or remedy.name.startswith("batch"):
                continue
            parts.append(remedy)
            row = self._try(_together(parts)) if len(parts) > 1 else None
            if row is not None and row.fits:
                self._leave_out(parts)
                return

    def _leave_out(self, parts: list[ProgramRemedy]) -> None:
        """Leave out what is not needed, what slows the step down most first."""
        for remedy in sorted(parts, key=self._slows, reverse=True):
            rest = [part for part in parts if part is not remedy]
            if len(rest) < 2:
                continue
            row = self._row(_together(rest).name) or self._try(_together(rest))
            if row is not None and row.fits:
                parts = rest

    def _saved(self, remedy: ProgramRemedy) -> int:
        row = self._row(remedy.name)
        return 0 if row is None else self._rows[0].total_bytes - row.total_bytes

    def _slows(self, remedy: ProgramRemedy) -> float:
        row = self._row(remedy.name)
        return 0.0 if row is None else row.step_seconds

    def _try_batches(self) -> None:
        """The largest batch that fits with nothing else, or with all that was put together where nothing fits."""
        size = batch_size(self.subject.seen)
        if size is None or size < 2:
            return
        base = None if self._fitting() else self._together()
        fitting, value = 0, size // 2
        while value >= 1 and not fitting and not self._cut:
            fitting = value if self._fits_with(base, value) else 0
            value //= 2
        low, high = fitting, 2 * fitting
        while fitting and high - low > max(1, size // 16) and not self._cut:
            middle = (low + high) // 2
            if self._fits_with(base, middle):
                low = middle
            else:
                high = middle

    def _fits_with(self, base: ProgramRemedy | None, value: int) -> bool:
        """Whether a batch size fits, with what was put together if that is given."""
        remedy = with_batch(self.subject, value)
        if remedy is None:
            return False
        remedy = remedy if base is None else base + remedy
        known = self._row(remedy.name) or self._try(remedy)
        return known is not None and bool(known.fits)

    def _together(self) -> ProgramRemedy | None:
        """Of what was run with the whole batch, what needs least."""
        tried = [
            row
            for row in self._rows
            if row.total_bytes and row.name in self._by_row and "batch" not in row.name
        ]
        best = min(tried, key=lambda row: row.total_bytes, default=None)
        return None if best is None or best.name == AS_IT_IS else self._by_row[best.name]

    # -- runs --------------------------------------------------------------------------------------------------------

    def _try(self, remedy: ProgramRemedy) -> TriedRemedy | None:
        """Run a remedy; None where there is no time for it."""
        if self._rows and self._so_far + self._last > self.seconds:
            self._cut = True
            return None
        began = time.monotonic()
        try:
            row = self._row_of(remedy, self._cost(remedy))
        except VramfitError as error:
            row = TriedRemedy(name=remedy.name, how=remedy.how, failed=brief(error))
        self._last = time.monotonic() - began
        if row.failed and len(self._rows):
            return row  # nothing is advised that does not run
        self._rows.append(row)
        self._by_row[row.name] = remedy
        self.told(row)
        return row

    @property
    def _so_far(self) -> float:
        return self.spent + time.monotonic() - self._began

    def _cost(self, remedy: ProgramRemedy) -> StepCost:
        cost = self.device.altered_cost(remedy.alteration, None)
        if cost.total_bytes <= self.limit:
            return cost
        if cost.peak_allocated_bytes + cost.outside_bytes > self.limit:
            return replace(cost, fits=False)
        within = self.device.altered_cost(remedy.alteration, self.limit)
        return within if within.fits else replace(cost, fits=False)

    def _row_of(self, remedy: ProgramRemedy, cost: StepCost) -> TriedRemedy:
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
        """The row that fits and takes least for each example, whole batches first; of equal ones what changes least."""
        fitting = [number for number, row in enumerate(self._rows) if row.fits and number]

        def cost(number: int) -> tuple[bool, float, bool]:
            row = self._rows[number]
            batch = self._by_row[row.name].alteration.batch
            # One whose time is not known is not the quickest.
            return batch is not None, (row.step_seconds or math.inf) / (batch or 1), bool(row.changes)

        return min(fitting, key=cost, default=None)


def _together(parts: Sequence[ProgramRemedy]) -> ProgramRemedy:
    """Several remedies as one, in the order of their weight."""
    found, *rest = sorted(parts, key=lambda one: (one.weight, one.name))
    for remedy in rest:
        found += remedy
    return found


def card_words(spec: GpuSpec) -> str:
    """A card as it is written on a command line: by its name, or by its size where it has none of the catalogue."""
    if any(known.name == spec.name for known in catalogue()):
        return shlex.quote(spec.name)
    return f"{spec.total_bytes >> 20}MiB"
