"""Remedies in the words of a program that owns its loop: lines to insert, calls to write otherwise, its own options."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from vramfit.planner.remedies.alteration import Alteration
from vramfit.planner.remedies.program_remedy import (
    AUTOCAST,
    AUTOCAST_CHANGES,
    CHECKPOINTING,
    EIGHT_BITS,
    EIGHT_BITS_CHANGES,
    ProgramRemedy,
    TrainedProgram,
)
from vramfit.planner.remedies.source_edits import inserted_before, with_other_call, wrapped
from vramfit.techniques.support.blocks import find_blocks
from vramfit.trace import Frame
from vramfit.trace.observed_program import Framework, ObservedOptimizer

_OWN_CHECKPOINTING = (
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
)
"""Methods of models of transformers, diffusers and timm that switch checkpointing on."""

_NOT_IN_EIGHT_BITS = frozenset({"fused", "foreach", "capturable", "maximize", "differentiable"})
"""Keywords of torch's Adam that those in 8 bits do not have."""


def loop_remedies(subject: TrainedProgram) -> Iterator[ProgramRemedy]:
    """Autocast around the forward pass, checkpointing of the blocks, and the optimizer in 8 bits."""
    for make in (_autocast, _checkpointing, _eight_bits):
        if (remedy := make(subject)) is not None:
            yield remedy


def _autocast(subject: TrainedProgram) -> ProgramRemedy | None:
    """The statements from the forward pass up to the backward pass, under autocast."""
    seen, backward = subject.seen, subject.seen.backward_at
    if seen.autocast or seen.framework is not Framework.NONE or backward is None:
        return None
    frame = next(
        (
            frame
            for frame in subject.main.called_from
            if (frame.filename, frame.name) == (backward.filename, backward.name)
        ),
        None,
    )
    if frame is None:
        return None
    edit = wrapped(frame, backward, 'with torch.autocast("cuda", dtype=torch.bfloat16):', subject.root)
    if edit is None:
        return None
    return ProgramRemedy(
        name=AUTOCAST,
        alteration=Alteration(edits=(edit,)),
        how=(edit.words,),
        changes=AUTOCAST_CHANGES,
        weight=1,
    )


def _checkpointing(subject: TrainedProgram) -> ProgramRemedy | None:
    """The model's own checkpointing where it has some, else torch's of each of its blocks."""
    place = _before_optimizer(subject)
    if place is None:
        return None
    at, model = place
    own = next((name for name in _OWN_CHECKPOINTING if callable(getattr(subject.model, name, None))), None)
    if getattr(subject.model, "is_gradient_checkpointing", False):
        return None
    lines = (f"{model}.{own}()",) if own is not None else _checkpointed_blocks(subject, model)
    edit = inserted_before(at, lines, subject.root) if lines else None
    if edit is None:
        return None
    return ProgramRemedy(
        name=CHECKPOINTING, alteration=Alteration(edits=(edit,)), how=(edit.words,), weight=2
    )


def _checkpointed_blocks(subject: TrainedProgram, model: str) -> tuple[str, ...]:
    """Lines that checkpoint the blocks of a model."""
    paths = [block.path for block in find_blocks(subject.model) if block.path]
    parents = {path.rpartition(".")[0] for path in paths if path.rpartition(".")[2].isdecimal()}
    if not paths or len(paths) < 2:
        return ()
    if len(parents) == 1 and all(path.rpartition(".")[2].isdecimal() for path in paths):
        [parent] = parents
        blocks = f"{model}.{parent}" if parent else model
    else:
        blocks = f"({', '.join(f'{model}.get_submodule({path!r})' for path in paths)})"
    return (
        "import functools, torch.utils.checkpoint",
        f"for block in {blocks}: block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, "
        "use_reentrant=False)",
    )


def _eight_bits(subject: TrainedProgram) -> ProgramRemedy | None:
    """The optimizer of torchao or bitsandbytes in the place of torch's Adam."""
    optimizer = _optimizer(subject)
    if optimizer is None or optimizer.at is None or optimizer.kind not in ("Adam", "AdamW"):
        return None
    if importlib.util.find_spec("torchao") is not None:
        new = f"torchao.optim.{optimizer.kind}8bit"
    elif importlib.util.find_spec("bitsandbytes") is not None:
        new = f"bitsandbytes.optim.{optimizer.kind}8bit"
    else:
        return None
    edit = with_other_call(optimizer.at, optimizer.kind, new, _NOT_IN_EIGHT_BITS, subject.root)
    if edit is None:
        return None
    return ProgramRemedy(
        name=EIGHT_BITS,
        alteration=Alteration(edits=(edit,)),
        how=(edit.words,),
        changes=EIGHT_BITS_CHANGES,
        weight=3,
    )


def _optimizer(subject: TrainedProgram) -> ObservedOptimizer | None:
    own = [subject.seen.optimizers[number] for number in subject.main.optimizers]
    return max(own, key=lambda one: one.parameters, default=None)


def _before_optimizer(subject: TrainedProgram) -> tuple[Frame, str] | None:
    """The line that makes the optimizer, and what its scope calls the model."""
    optimizer = _optimizer(subject)
    if optimizer is None or optimizer.at is None or not optimizer.model_as:
        return None
    return optimizer.at, optimizer.model_as
