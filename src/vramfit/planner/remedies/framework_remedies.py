"""Remedies that are arguments of a framework: of Trainer, of Lightning, of Accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from vramfit.planner.remedies.alteration import Alteration, KeywordChange
from vramfit.planner.remedies.batch_change import trainer_arguments
from vramfit.planner.remedies.program_remedy import (
    AUTOCAST,
    AUTOCAST_CHANGES,
    CHECKPOINTING,
    EIGHT_BITS,
    EIGHT_BITS_CHANGES,
    ProgramRemedy,
    TrainedProgram,
)
from vramfit.trace.observed_program import Framework


def framework_remedies(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    """Those of the framework whose loop the program runs."""
    framework = subject.seen.framework
    if framework is Framework.TRAINER:
        yield from _trainer(subject)
    elif framework is Framework.LIGHTNING:
        yield from _lightning(subject)
    elif framework is Framework.ACCELERATE:
        yield from _accelerate(subject)


# -- Trainer ---------------------------------------------------------------------------------------------------------


def _trainer(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    settings = subject.seen.settings
    if not settings.get("bf16") and not settings.get("fp16"):
        yield _of_trainer(subject, AUTOCAST, {"bf16": True}, AUTOCAST_CHANGES, weight=1)
    if not settings.get("gradient_checkpointing") and not settings.get("activation_checkpointing"):
        yield _of_trainer(subject, CHECKPOINTING, {"gradient_checkpointing": True}, "", weight=2)
    optimizer = _eight_bits(str(settings.get("optim", "")))
    if optimizer is not None:
        yield _of_trainer(subject, EIGHT_BITS, {"optim": optimizer}, EIGHT_BITS_CHANGES, weight=3)


def _of_trainer(
    subject: TrainedProgram, name: str, values: dict[str, Any], changes: str, *, weight: int
) -> ProgramRemedy:
    change = trainer_arguments(subject.seen, values)
    return ProgramRemedy(
        name=name, alteration=change.alteration, how=change.how, changes=changes, weight=weight
    )


def _eight_bits(now: str) -> str | None:
    """The name of the Trainer's AdamW in 8 bits that is installed; None where there is none, or it is one already."""
    if "8bit" in now or "4bit" in now or not now.startswith("adamw"):
        return None
    if importlib.util.find_spec("bitsandbytes") is not None:
        return "adamw_bnb_8bit"
    return "adamw_torch_8bit" if importlib.util.find_spec("torchao") is not None else None


# -- Lightning -------------------------------------------------------------------------------------------------------


def _lightning(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    precision = str(subject.seen.settings.get("precision", ""))
    if precision in ("32-true", "32", ""):
        yield ProgramRemedy(
            name=AUTOCAST,
            alteration=Alteration(keywords=lightning_change({"precision": "bf16-mixed"})),
            how=('Trainer(precision="bf16-mixed")',),
            changes=AUTOCAST_CHANGES,
            weight=1,
        )


def lightning_change(values: dict[str, Any]) -> tuple[KeywordChange, ...]:
    """Arguments of Lightning's Trainer, whichever of its two packages is used."""
    return tuple(
        KeywordChange(module=f"{package}.trainer.trainer", kind="Trainer", values=tuple(values.items()))
        for package in ("lightning.pytorch", "pytorch_lightning")
    )


# -- Accelerate ------------------------------------------------------------------------------------------------------


def _accelerate(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    if subject.seen.settings.get("mixed_precision") in ("no", ""):
        change = KeywordChange(
            module="accelerate.accelerator", kind="Accelerator", values=(("mixed_precision", "bf16"),)
        )
        yield ProgramRemedy(
            name=AUTOCAST,
            alteration=Alteration(keywords=(change,)),
            how=('Accelerator(mixed_precision="bf16")',),
            changes=AUTOCAST_CHANGES,
            weight=1,
        )
