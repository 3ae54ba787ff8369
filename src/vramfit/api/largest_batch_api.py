"""The largest batch on the live process, from Python."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.arguments import call_argument, number_argument, shown, size_argument, whole_argument
from vramfit.errors import UsageError, VramfitError
from vramfit.planner.batch_prediction import BatchQuestion, predict_batch
from vramfit.planner.planner_job import MARGIN
from vramfit.runtime.largest_batch import LargestBatch, SearchSettings, TrialSubject, find_largest_batch
from vramfit.runtime.survival.leftovers import memory_now

_log = logging.getLogger("vramfit.largest_batch")


def largest_batch(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any] | Sequence[Callable[[int], Any]] | None = None,
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    others: Sequence[Any] = (),
    predicted: int | None = None,
    predict: str = "auto",
    start: int = 1,
    most: int = 1 << 20,
    steps: int = 3,
    margin: float | str | None = None,
    budget: int | str | None = None,
    gpu: Any = None,
    vote_seconds: float = 300.0,
) -> LargestBatch:
    """The largest batch that whole steps of this process fit with; everything is left as it was found.

    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> def step(batch):
    ...     if len(batch) > 37:
    ...         raise torch.OutOfMemoryError("CUDA out of memory. (an example)")
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> found = vramfit.largest_batch(
    ...     step, lambda size: torch.rand(size, 8), model=model, optimizer=optimizer, predicted=37
    ... )
    >>> found.size, [trial.size for trial in found.trials], len(optimizer.state)
    (37, [37, 38], 0)

    It begins at the predicted size and confirms upward and downward. A size is returned only if several whole steps
    were run with it, with the margin left free, and the next size was seen to fail (or is above `most`). Parameters,
    the optimizer's states, gradients, buffers, modes and random states are noted on the host before and put back after
    each trial, so it may be asked before a training or in the middle of one. Ranks of a DistributedDataParallel model
    all ask; they vote after each trial, and all get the same.

    Args:
        step: one whole step on a batch: forward, backward, the optimizer's step.
        make_batch: makes the largest batch that may come for a number of entries, such as all of the longest inputs;
            several of them where it is not clear which is the largest. None gives `step` the number itself.
        model: that the step uses, or several.
        optimizer: that it steps, or several.
        others: what else it changes: a `torch.amp.GradScaler`, and whatever has ``state_dict`` and
            ``load_state_dict``, such as schedules, averaged weights and loaders that can be resumed.
        predicted: the size to begin with, where it is known.
        predict: ``"auto"`` asks the virtual GPU, in another process, where there is a card or a `budget`; ``"never"``
            does not; ``"always"`` raises where it cannot be asked.
        start: the size to begin with where nothing is predicted.
        most: the largest size that is of use.
        steps: of a trial, for each kind of batch; at least two, as the first makes the optimizer's states.
        margin: left free during the trials: a part of the device's memory, or ``"512MiB"``. None is 2 % of a card, and
            nothing on the CPU.
        budget: what the prediction may reserve, the model included; None is what is free on the card.
        gpu: the card of the prediction; None is the one that is there.
        vote_seconds: that a rank waits for the others.

    Returns:
        what was found; it stands for its size as a number.

    Raises:
        OutOfMemory: not even a batch of one fits.
        UsageError: arguments are no such, or the model is sharded.
        BaseException: what a step raises beside running out of memory; everything is as before then, too.
    """
    subject = _subject(step, make_batch, model, optimizer, others)
    if predict not in ("auto", "never", "always"):
        raise UsageError(f"predict={shown(predict)} is no choice", 'Give "auto", "never" or "always"')
    settings = SearchSettings(
        start=whole_argument("start", start, least=1),
        most=whole_argument("most", most, least=1),
        steps=whole_argument("steps", steps, least=2),
        margin_bytes=_margin(margin, subject.device),
        vote_seconds=number_argument("vote_seconds", vote_seconds, least=0.1, most=1e6),
    )
    if predicted is not None:
        known = whole_argument("predicted", predicted, least=1)
    else:
        limit = None if budget is None else size_argument("budget", budget)
        known = _predicted(subject, settings, predict, limit, gpu)
    return find_largest_batch(subject, settings, known)


def _subject(step: Any, make_batch: Any, model: Any, optimizer: Any, others: Sequence[Any]) -> TrialSubject:
    """What is tried, of arguments that are checked."""
    call_argument("step", step)
    models = _several("model", model, nn.Module)
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer)
    if not models:
        raise UsageError("model names none", "Give the model that the step uses")
    for other in others:
        if not isinstance(other, torch.amp.GradScaler) and not hasattr(other, "load_state_dict"):
            raise UsageError(
                f"others has {shown(other)}, whose state cannot be put back", "Give what has load_state_dict"
            )
    return TrialSubject(
        step=step,
        make_batch=_makers(make_batch),
        models=models,
        optimizers=optimizers,
        others=tuple(others),
        device=next((one.device for one in models[0].parameters()), torch.device("cpu")),
    )


def _predicted(
    subject: TrialSubject, settings: SearchSettings, predict: str, budget: int | None, gpu: Any
) -> int:
    """What the virtual GPU says; 0 where it was not asked or could not be."""
    limit = _room(subject, settings) if budget is None else budget - settings.margin_bytes
    if predict == "never" or (predict == "auto" and limit is None):
        return 0
    question = BatchQuestion(
        step=subject.step,
        make_batch=subject.make_batch,
        models=subject.models,
        optimizers=subject.optimizers,
        start=settings.start,
        most=settings.most,
        steps=settings.steps,
    )
    try:
        return predict_batch(question, subject.device, budget=limit, gpu=gpu).size
    except VramfitError as error:
        if predict == "always":
            raise
        _log.info("nothing is predicted: %s", error)
        return 0


def _room(subject: TrialSubject, settings: SearchSettings) -> int | None:
    """Bytes that torch may reserve for a training that begins anew; None where nobody knows.

    What torch has allocated and no tensor holds is counted as room: cuBLAS' workspaces, which the other process makes
    for itself.
    """
    now = memory_now(subject.device)
    if now is None:
        return None
    own = _held(_tensors(subject), subject.device)
    alive = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    unowned = now.allocated - sum(_held(alive, subject.device).values())
    return max(1, now.within_reach + sum(own.values()) + max(0, unowned) - settings.margin_bytes)


def _held(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Bytes of a device's blocks (of 512, c10/cuda/CUDACachingAllocator.h: kMinBlockSize), by storage."""
    found = {}
    for one in tensors:
        if one.device == device and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage._cdata] = -(-storage.nbytes() // 512) * 512
    return found


def _tensors(subject: TrialSubject) -> list[torch.Tensor]:
    """Tensors that a training that begins anew makes itself."""
    found: list[torch.Tensor] = []
    for model in subject.models:
        found += [*model.parameters(), *model.buffers()]
        found += [one.grad for one in model.parameters() if one.grad is not None]
    for optimizer in subject.optimizers:
        for state in optimizer.state.values():
            found += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return found


def _makers(given: Any) -> tuple[Callable[[int], Any], ...]:
    if given is None:
        return (_number,)
    if isinstance(given, list | tuple):
        if not given:
            raise UsageError("make_batch names none", "Give what makes a batch of a size")
        return tuple(call_argument("make_batch", one) for one in given)
    return (call_argument("make_batch", given),)


def _number(size: int) -> int:
    return size


def _margin(given: float | str | None, device: torch.device) -> int:
    """Bytes that are left free."""
    if given is None:
        given = MARGIN if device.type == "cuda" else 0
    if isinstance(given, str):
        return size_argument("margin", given, least=0)
    part = number_argument("margin", given, least=0, most=0.9)
    if not part:
        return 0
    if device.type != "cuda":
        raise UsageError("the CPU has no memory of its own to leave a part of", 'Give bytes: margin="512MiB"')
    return round(part * torch.cuda.mem_get_info(device)[1])


def _several(name: str, given: Any, kind: type[Any]) -> tuple[Any, ...]:
    found = (
        (given,) if isinstance(given, kind) else tuple(given) if isinstance(given, list | tuple) else (None,)
    )
    if not all(isinstance(one, kind) for one in found):
        raise UsageError(f"{name}={shown(given)} is none", f"Give a {kind.__name__}, or a list of them")
    return found
