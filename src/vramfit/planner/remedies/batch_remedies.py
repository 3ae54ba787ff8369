"""Remedies that take smaller batches, with their gradients added up where the framework does that."""

from __future__ import annotations

from vramfit.planner.remedies.alteration import Alteration
from vramfit.planner.remedies.batch_change import (
    TRAINER_BATCH,
    BatchChange,
    batch_alteration,
    batch_size,
    trainer_arguments,
)
from vramfit.planner.remedies.framework_remedies import lightning_change
from vramfit.planner.remedies.program_remedy import ProgramRemedy, TrainedProgram
from vramfit.trace.observed_program import Framework


def with_batch(subject: TrainedProgram, size: int) -> ProgramRemedy | None:
    """Smaller batches; None where nothing says where their size is set, or a step cannot be made of them."""
    seen, own = subject.seen, batch_size(subject.seen)
    if own is None or not 0 < size < own:
        return None
    whole = own % size == 0
    if seen.framework is Framework.TRAINER and whole:
        accumulated = int(seen.settings.get("gradient_accumulation_steps") or 1) * (own // size)
        values = {TRAINER_BATCH: size, "gradient_accumulation_steps": accumulated}
        return _remedy(f"batch {size}, {accumulated} a step", trainer_arguments(seen, values), "")
    found = batch_alteration(seen, size)
    if found is None:
        return None
    if seen.framework is Framework.LIGHTNING and whole:
        times = own // size * max(1, int(seen.settings.get("accumulate_grad_batches") or 1))
        added = Alteration(keywords=lightning_change({"accumulate_grad_batches": times}))
        how = (*found.how, f"Trainer(accumulate_grad_batches={times})")
        both = BatchChange(alteration=found.alteration + added, how=how)
        return _remedy(f"batch {size}, {times} a step", both, "")
    changes = "" if seen.infers else f"a step is of {size} examples, not {own}"
    return _remedy(f"batch {size}", found, changes)


def _remedy(name: str, change: BatchChange, changes: str) -> ProgramRemedy:
    return ProgramRemedy(name=name, alteration=change.alteration, how=change.how, changes=changes, weight=5)
