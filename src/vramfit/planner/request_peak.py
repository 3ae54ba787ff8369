"""What one request of a live model takes on a card beyond its weights: asked here, found on the virtual GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.inference.input_chunks import moved
from vramfit.inference.residency.hosted_model import HostedModel
from vramfit.planner.asking import ask
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPeak:
    """What a request takes.

    Attributes:
        bytes: reserved at the peak beyond the model's weights, which lie in one block as those of a `ModelPool`.
    """

    bytes: int


@dataclass(frozen=True, kw_only=True)
class RequestQuestion(PlannerQuestion[RequestPeak]):
    """A call of a model; goes to another process.

    Attributes:
        arguments, keywords: what the model is called with.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def answer(self, asked: QuestionContext) -> RequestPeak:
        """See `PlannerQuestion.answer`."""
        return measured_request(asked.device, asked.workload.model, self)


def request_peak(
    model: nn.Module,
    *arguments: Any,
    gpu: str | os.PathLike[str] | GpuSpec,
    progress: Progress | None = None,
    **keywords: Any,
) -> RequestPeak:
    """What a call of a model without gradients takes on a card.

    >>> from vramfit.planner.request_peak import request_peak
    >>> model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    >>> request_peak(model, torch.ones(512, 1024), gpu="RTX 4090").bytes
    44040192

    Args:
        model: its values stay here, its structure goes to another process, which needs nothing but that.
        arguments, keywords: of the call; of large tensors only the shapes count.
        gpu: the card, as `vramfit.run` takes it.

    Raises:
        UnknownGpuError: no such card.
        UsageError: the model or the call cannot go to another process.
        VramfitError: the model fails.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "a request is looked at for a module, whose structure can be sent", "Wrap the function in one"
        )
    question = RequestQuestion(arguments=arguments, keywords=keywords)
    live = LiveModel(model=model, device=torch.device("cpu"), gpu=gpu)
    return ask(question, live, progress=progress)


def measured_request(
    device: DeviceBackend, make_model: Callable[[], nn.Module], question: RequestQuestion
) -> RequestPeak:
    """Run a call on a virtual card without a limit, some times; the most counts."""
    most = 0

    def step(state: Any, _batch: Any) -> None:
        nonlocal most
        hosted = HostedModel("the model", state.model.to("cpu"), state.device, pinned=False)
        hosted.take_over()
        torch.cuda.empty_cache()
        hosted.load()
        torch.cuda.reset_peak_memory_stats(state.device)
        arguments, keywords = moved((question.arguments, question.keywords), state.device)
        with torch.no_grad():
            state.model(*arguments, **keywords)
        most = max(most, torch.cuda.max_memory_reserved(state.device) - hosted.device_bytes)

    own_step_cost(device, make_model, step)
    return RequestPeak(bytes=most)
