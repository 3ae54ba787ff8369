"""Samples of a model for the options of techniques, without a planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.techniques import Profile
from vramfit.techniques.core.forward_trace import trace_forward
from vramfit.techniques.core.samples import Found, SmallSample, TracedModel
from vramfit.workload import Batch, Workload, call_model


class OwnSamples:
    """A model and a batch as they are."""

    def __init__(self, model: nn.Module, batch: Batch, *, seconds: float = 60.0) -> None:
        self.model, self.batch, self.seconds = model, batch, seconds
        self.asked: list[str] = []

    def traced(self) -> TracedModel:
        run = lambda: call_model(self.model, self.batch)  # noqa: E731
        return TracedModel(model=self.model, trace=trace_forward(self.model, run, self.batch))

    def valued(self) -> nn.Module:
        return self.model

    def small(self) -> SmallSample:
        return SmallSample(model=self.model, batch=self.batch, words="its own sizes", seconds=self.seconds)

    def once(self, key: str, find: Callable[[], Found]) -> Found:
        self.asked.append(key)
        return find()


def profile_with(model: nn.Module, batch: Batch, *, trains: bool = False, **figures: Any) -> Profile:
    """A profile for inference, with samples."""
    known: dict[str, Any] = {"host_bytes": 1 << 40, "samples": OwnSamples(model, batch), **figures}
    return Profile(model=model, optimizer=None, sizes={"batch_size": 1}, trains=trains, **known)


def inference(model: Callable[[], nn.Module], batch: Callable[[int], Batch], batch_size: int = 4) -> Workload:
    """A workload that runs a model in evaluation mode."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return model().eval()

    return Workload(model=made, batch=lambda batch_size: batch(batch_size), sizes={"batch_size": batch_size})


def output_of(workload: Workload) -> Any:
    """What a workload's model returns on the CPU in its step, in float32 wherever it floats."""
    state = workload.start("cpu")
    found: list[Any] = []
    state.model.register_forward_hook(lambda _module, _args, output: found.append(output))
    workload.run_step(state, workload.sizes)
    return found[0]
