"""Measures on the virtual GPU what batches of items of one length take, for batches by tokens of a live model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramfit.gpus import GpuSpec
from vramfit.inference.peak_bound import PeakBound, fitted_bound
from vramfit.inference.token_batches import TokenBatches, TokenBatchSettings
from vramfit.planner.asking import ask
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.workload import call_model, to_device

Progress = Callable[[str], None]
MakeBatch = Callable[[int, int], Any]
"""A batch on the CPU of so many items of a length: a tensor, a tuple of arguments or a dict of them by name."""

_MOST_LENGTHS = 10
"""Lengths at which a bound is fitted; between them the largest shape of each bucket is measured itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapePeak:
    """What torch reserves at the highest for a batch, the model included, in bytes."""

    items: int
    length: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredShapes:
    """What was run.

    Attributes:
        limit: bytes that torch may reserve.
        fitted: shapes over all lengths, by which a bound is made.
        confirmed: the largest shapes of the buckets, by which it is raised, in their order.
    """

    limit: int
    fitted: tuple[ShapePeak, ...]
    confirmed: tuple[ShapePeak, ...]

    def bound(self) -> PeakBound:
        """The bound through all of them."""
        bound = fitted_bound({(one.items, one.length): one.reserved_bytes for one in self.fitted})
        for one in self.confirmed:
            bound.learn(one.items, one.length, one.reserved_bytes)
        return bound


@dataclass(frozen=True, kw_only=True)
class ShapesQuestion(PlannerQuestion[MeasuredShapes]):
    """Items that are to be put into batches; goes to another process.

    Attributes:
        lengths: of the items.
        settings: of the batches; their budget is replaced by what torch may reserve.
    """

    make_batch: MakeBatch
    lengths: tuple[int, ...]
    settings: TokenBatchSettings

    def answer(self, asked: QuestionContext) -> MeasuredShapes:
        """See `PlannerQuestion.answer`."""
        return shapes_on(asked.device, asked.workload.model, self, asked.memory.budget, asked.progress)


def token_ids(items: int, length: int) -> dict[str, torch.Tensor]:
    """The arguments that a language model of transformers takes, with nothing masked."""
    shape = (items, length)
    return {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.ones(shape, dtype=torch.long),
    }


def measure_shapes(
    model: nn.Module,
    question: ShapesQuestion,
    device: torch.device,
    *,
    budget: str | float | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    progress: Progress | None = None,
) -> MeasuredShapes:
    """Run shapes of batches of a live model on the virtual GPU, in a process of its own.

    Args:
        model: its values stay here, its structure goes to another process.
        device: where it computes.
        budget: bytes that torch may reserve there, the model included; None for what is free there, less 2 %.
        gpu: the card that is asked about; None for the device's own.

    Raises:
        UsageError: the model cannot go to another process, there is no budget, or the longest item does not fit alone.
        VramfitError: the model fails.
    """
    live = LiveModel(model=model, device=device, budget=budget, gpu=gpu)
    return ask(question, live, progress=progress)


def shapes_on(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: ShapesQuestion,
    limit: int,
    progress: Progress = lambda _text: None,
) -> MeasuredShapes:
    """Run shapes until a bound is made, and then the largest ones that it would let into a batch.

    Raises:
        UsageError: the longest item does not fit alone.
        VramfitError: the model fails.
    """
    seen: dict[tuple[int, int], int] = {}

    def measure(items: int, length: int) -> int:
        if (items, length) not in seen:
            progress(f"a batch of {items:,} x {length:,}, the {len(seen) + 1}. shape")
            seen[items, length] = _reserved(device, make_model, question.make_batch, items, length)
        return seen[items, length]

    for length in _fitted_lengths(question.lengths, question.settings.multiple):
        for items in _fitted_items(question.settings.most_items):
            if measure(items, length) > limit and items > 1:
                break
    while len(seen) < 5:  # as many as a bound has coefficients; all in one batch at a time
        measure(1 + max(items for items, _ in seen), max(length for _, length in seen))
    fitted = dict(seen)
    confirmed: dict[tuple[int, int], int] = {}

    def confirm(items: int, length: int) -> int:
        return confirmed.setdefault((items, length), measure(items, length))

    TokenBatches(question.lengths, fitted_bound(fitted), replace(question.settings, budget=limit)).confirm(
        confirm
    )
    return MeasuredShapes(limit=limit, fitted=_peaks(fitted), confirmed=_peaks(confirmed))


def _reserved(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    items: int,
    length: int,
) -> int:
    """What torch reserves at the highest, for the model and one batch on a fresh device."""

    def step(state: Any, _batch: Any) -> None:
        batch = to_device(make_batch(items, length), state.device)
        with torch.no_grad():
            call_model(state.model, batch)

    return own_step_cost(device, make_model, step).peak_reserved_bytes


def _fitted_lengths(lengths: Sequence[int], multiple: int) -> list[int]:
    """The longest, and shorter ones by powers of two or more down to the shortest."""
    most, least = (-(-one // multiple) * multiple for one in (max(lengths), min(lengths)))
    steps = max(1, min(_MOST_LENGTHS - 1, (most // least).bit_length() - 1))
    found = {round(most * (least / most) ** (step / steps)) for step in range(steps + 1)}
    rounded = {max(1, -(-one // multiple) * multiple) for one in found}
    return sorted(rounded | {max(lengths)}, reverse=True)


def _fitted_items(most: int) -> list[int]:
    """One, two, and four times as many each time."""
    return [1, 2, *(4**power for power in range(1, 12) if 4**power <= most)]


def _peaks(measured: dict[tuple[int, int], int]) -> tuple[ShapePeak, ...]:
    return tuple(
        ShapePeak(items=items, length=length, reserved_bytes=reserved)
        for (items, length), reserved in measured.items()
    )
