"""The autograd engine: see the backward phase begin, and name the gradients that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.capture.attribution import ProgramPhase
from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Wrap the one function through which ``backward`` and ``grad`` enter the engine."""
    graph = torch.autograd.graph
    original = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # reentrant, as in checkpointing
            return original(*args, **kwargs)
        mode.meter.remember_backward()
        mode.meter.phases.begin(ProgramPhase.BACKWARD)
        mode.guesses.new_phase()
        try:
            return original(*args, **kwargs)
        finally:
            tag_gradients(mode)
            mode.meter.phases.end_backward()

    patches.set(graph, "_engine_run_backward", run_backward)
    patches.set(torch.autograd, "_engine_run_backward", run_backward)


def tag_gradients(mode: OpRunner, parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Name the gradients of parameters, of all that are alive if none are given."""
    meter = mode.meter
    for parameter in meter.parameters() if parameters is None else parameters:
        gradient = parameter.grad
        if gradient is not None and type(gradient) is FakeTensor:
            record = meter.record_of(parameter)
            meter.tag(gradient, Category.GRADIENTS, None if record is None else record.module)
