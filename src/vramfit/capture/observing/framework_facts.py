"""Whose loop a program runs, and the arguments with which it was set up, read from the objects on the stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

from vramfit.capture.observing.program_frames import frames_here
from vramfit.holders.naming import local_values
from vramfit.trace.frames import Origin, origin
from vramfit.trace.observed_program import Framework

Settings = dict[str, int | str]

_TRAINER = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_checkpointing",
    "bf16",
    "fp16",
    "optim",
    "max_grad_norm",
)
"""Arguments of `transformers.TrainingArguments` that decide about memory."""

_TRAINER_CLASSES = (("transformers.", "Trainer"),)
_LIGHTNING_CLASSES = (("lightning.", "Trainer"), ("pytorch_lightning.", "Trainer"))
_ACCELERATE_CLASSES = (("accelerate.", "Accelerator"),)


def framework_here() -> tuple[Framework, Settings]:
    """The framework that runs the loop of this thread's stack, and its settings."""
    accelerator: Any = None
    for frame in frames_here():
        owner = local_values(frame).get("self")
        if owner is not None and _is_of(owner, _TRAINER_CLASSES):
            return Framework.TRAINER, _trainer(owner)
        if (trainer := _lightning(owner)) is not None:
            return Framework.LIGHTNING, _lightning_settings(trainer)
        if accelerator is None and origin(frame.f_code.co_filename) is Origin.USER:
            accelerator = next((one for one in _objects(frame) if _is_of(one, _ACCELERATE_CLASSES)), None)
    if accelerator is not None:
        return Framework.ACCELERATE, _accelerate(accelerator)
    return Framework.NONE, {}


def _is_of(value: Any, kinds: Iterable[tuple[str, str]]) -> bool:
    """Whether a value is of one of some classes, by their package and name, or of one that derives from it."""
    mro = getattr(type(value), "__mro__", ())
    return any(
        base.__name__ == name and base.__module__.startswith(package)
        for base in mro
        for package, name in kinds
    )


def _lightning(owner: Any) -> Any:
    """Lightning's trainer, where an object of the stack is one or has one."""
    if owner is None:
        return None
    if _is_of(owner, _LIGHTNING_CLASSES):
        return owner
    if not type(owner).__module__.startswith(("lightning.", "pytorch_lightning.")):
        return None
    trainer = getattr(owner, "trainer", None)
    return trainer if trainer is not None and _is_of(trainer, _LIGHTNING_CLASSES) else None


def _objects(frame: FrameType) -> Iterator[Any]:
    """What a frame's scope has, and what the attributes of ``self`` are."""
    own = local_values(frame)
    yield from own.values()
    yield from list(frame.f_globals.values())
    yield from list(getattr(own.get("self"), "__dict__", {}).values())


def _trainer(trainer: Any) -> Settings:
    return dict(_plain(_TRAINER, trainer.args))


def _lightning_settings(trainer: Any) -> Settings:
    found: Settings = {"accumulate_grad_batches": int(getattr(trainer, "accumulate_grad_batches", 1) or 1)}
    found["precision"] = str(getattr(trainer, "precision", ""))
    found["gradient_clip_val"] = str(getattr(trainer, "gradient_clip_val", None) or "")
    return found


def _accelerate(accelerator: Any) -> Settings:
    return {
        "gradient_accumulation_steps": int(getattr(accelerator, "gradient_accumulation_steps", 1)),
        "mixed_precision": str(getattr(accelerator, "mixed_precision", "no")),
    }


def _plain(names: Iterable[str], owner: Any) -> Iterator[tuple[str, int | str]]:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, bool | int):
            yield name, int(value)
        elif isinstance(value, str | float):
            yield name, str(value)
