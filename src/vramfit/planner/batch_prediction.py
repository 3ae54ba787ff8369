"""Predicts the largest batch for a live model's own step: asked here, run on the virtual GPU in another process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.gpus import GpuSpec
from vramfit.planner.asking import ask
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.runtime.batch_search import BatchTrial, batch_search
from vramfit.workload import to_device

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedBatch:
    """What the virtual GPU says.

    Attributes:
        size: the largest that fits; 0 where none does.
        runs: sizes that were run to find it.
    """

    size: int
    runs: int


@dataclass(frozen=True, kw_only=True)
class BatchQuestion(PlannerQuestion[PredictedBatch]):
    """A step and what it uses; goes to another process as one, so that the step finds its model and optimizer there.

    Attributes:
        step: one whole step on a batch.
        make_batch: makes the largest batches of a size.
        models: the first is the one that the live model is.
        optimizers: that the step steps; without their states, which the step makes.
        start: the size to begin with.
        most: the largest size that is of use.
        steps: of a trial, for each kind of batch: the first makes the optimizer's states.
    """

    step: Callable[[Any], Any]
    make_batch: Sequence[Callable[[int], Any]]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    start: int
    most: int
    steps: int

    def answer(self, asked: QuestionContext) -> PredictedBatch:
        """See `PlannerQuestion.answer`."""
        return largest_on(asked.device, asked.packed, asked.memory.budget, asked.progress)


def predict_batch(
    question: BatchQuestion,
    device: torch.device,
    *,
    budget: int | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    progress: Progress | None = None,
) -> PredictedBatch:
    """The largest batch for a step, run on the virtual GPU in a process of its own.

    Args:
        device: where the models are.
        budget: bytes that torch may reserve there, the models included.
        gpu: the card that is asked about; None for the device's own.

    Raises:
        UsageError: the step or what it uses cannot go to another process, or there is no budget.
        VramfitError: the step fails there.
    """
    live = LiveModel(model=question.models[0], device=device, budget=budget, gpu=gpu)
    return ask(question, live, progress=progress)


def largest_on(
    device: DeviceBackend,
    fresh: Callable[[], BatchQuestion],
    limit: int,
    progress: Progress = lambda _text: None,
) -> PredictedBatch:
    """The largest batch with which the steps of a question stay within a limit.

    Args:
        fresh: the question with models and optimizers of its own, on the CPU, at each call.
        limit: bytes that torch may reserve on the device, the models included.

    Raises:
        VramfitError: the step fails for another reason than memory.
    """
    first = fresh()
    outside: list[int] = []  # of the device, beside what torch reserves: known from the first run

    def run(size: int) -> BatchTrial:
        progress(f"a batch of {size:,}")
        question: list[BatchQuestion] = []

        def model() -> nn.Module:
            question[:] = [fresh()]
            for one in question[0].optimizers:
                one.state.clear()
            return question[0].models[0]

        def step(state: Any, _batch: Any) -> None:
            if not question:  # devices run a step again; all of a trial is in the first
                return
            asked = question.pop()
            for other in asked.models[1:]:
                other.to(state.device)
            for make in asked.make_batch:
                for _ in range(asked.steps):
                    asked.step(to_device(make(size), state.device))

        # Within the limit, since an allocator that is short gives cached segments back before it gives up.
        cost = own_step_cost(device, model, step, limit + outside[0] if outside else None)
        if not outside:
            outside[:] = [cost.outside_bytes]
            if cost.peak_reserved_bytes > limit:
                cost = own_step_cost(device, model, step, limit + outside[0])
        fits = cost.fits and cost.peak_reserved_bytes <= limit
        return BatchTrial(size=size, fits=fits, peak_bytes=cost.peak_reserved_bytes if fits else 0)

    search = batch_search(run, start=first.start, most=first.most, predicted=False, limit_bytes=limit)
    largest = search.run()
    return PredictedBatch(size=largest.value, runs=len(largest.tries))
