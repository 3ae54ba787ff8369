"""Another batch size of a program: by its own option, by an argument of its framework, or where its loader is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vramfit.planner.remedies.alteration import Alteration, KeywordChange
from vramfit.trace.observed_program import Framework, ObservedProgram

TRAINER_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChange:
    """Where a batch size is set.

    Attributes:
        alteration: of the run.
        how: what its user does.
    """

    alteration: Alteration
    how: tuple[str, ...]


def batch_size(seen: ObservedProgram) -> int | None:
    """The examples of a batch that a program was seen to take; None where nothing says how many."""
    settings = seen.settings.get(TRAINER_BATCH)
    if isinstance(settings, int) and settings:
        return settings
    loaded = next((loader.batch_size for loader in seen.loaders if loader.batch_size), None)
    if loaded is not None:
        return loaded
    model = seen.main_model or seen.main_used
    shape = next((shape for shape in model.shapes if shape), None) if model is not None else None
    return shape[0] if shape else None


def batch_alteration(seen: ObservedProgram, size: int) -> BatchChange | None:
    """Batches of another size, one for each step as before; None where nothing says where their size is set."""
    own = batch_size(seen)
    if own is None:
        return None
    if seen.framework is Framework.TRAINER:
        return trainer_arguments(seen, {TRAINER_BATCH: size})
    options = [option for option in seen.options if not option.is_flag and option.value == own]
    named = [option.flag for option in options if _names_batch(option.flag)]
    if len(named) == 1:
        alteration = Alteration(arguments=((named[0], str(size)),), batch=size)
        return BatchChange(alteration=alteration, how=(f"{named[0]} {size}",))
    loader = next((one for one in seen.loaders if one.batch_size == own), None)
    if loader is None or loader.at is None:
        return None
    change = KeywordChange(
        module="torch.utils.data.dataloader",
        kind="DataLoader",
        values=(("batch_size", size),),
        only=(("batch_size", own),),
    )
    place = f"{loader.at.filename.rpartition('/')[2]}:{loader.at.line}"
    return BatchChange(
        alteration=Alteration(keywords=(change,), batch=size),
        how=(f"DataLoader(batch_size={size}) in {place}",),
    )


_BATCH_WORDS = frozenset({"b", "bs", "bsz", "batch", "batchsize"})
_OF_EVALUATION = frozenset({"eval", "evaluation", "test", "val", "valid", "validation"})


def _names_batch(flag: str) -> bool:
    """Whether an option's name says that it is a batch's size: its value alone may be anything."""
    words = re.split(r"[-_.]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", flag.lstrip("-")).lower())
    return not _BATCH_WORDS.isdisjoint(words) and _OF_EVALUATION.isdisjoint(words)


def trainer_arguments(seen: ObservedProgram, values: dict[str, Any]) -> BatchChange:
    """Arguments of TrainingArguments: on the command line where the program reads them there."""
    batch = values.get(TRAINER_BATCH)
    if any(option.flag.lstrip("-").replace("-", "_") == TRAINER_BATCH for option in seen.options):
        arguments = tuple((f"--{key}", str(value)) for key, value in values.items())
        words = " ".join(f"{flag} {value}" for flag, value in arguments)
        return BatchChange(alteration=Alteration(arguments=arguments, batch=batch), how=(words,))
    change = KeywordChange(
        module="transformers.training_args",
        kind="TrainingArguments",
        values=tuple(values.items()),
        is_dataclass=True,
    )
    words = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return BatchChange(
        alteration=Alteration(keywords=(change,), batch=batch), how=(f"TrainingArguments({words})",)
    )
