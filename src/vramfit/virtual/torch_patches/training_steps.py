"""Backward passes and optimizer steps: their phases begin, and the gradients and states that they leave get names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vramfit.capture.attribution import ProgramPhase
from vramfit.patching import PatchStack
from vramfit.torch_internals.autograd_engine import current_graph_task_id, engine_runs
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.optimizers import foreach_types, foreach_utility_types
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.tensor_subclasses import is_wrapper


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Follow the autograd engine and ``torch.optim``."""
    _patch_engine(mode, patches)
    _patch_optimizers(mode, patches)


def _patch_engine(mode: OpRunner, patches: PatchStack) -> None:
    """Wrap the one function through which ``backward`` and ``grad`` enter the engine, and see the backward phase."""
    original = engine_runs[0].get()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if current_graph_task_id() != -1:  # reentrant, as in checkpointing
            return original(*args, **kwargs)
        mode.meter.remember_backward()
        mode.meter.phases.begin(ProgramPhase.BACKWARD)
        mode.guesses.new_phase()
        try:
            return original(*args, **kwargs)
        finally:
            tag_gradients(mode)
            mode.meter.phases.end_backward()

    for place in engine_runs:
        place.replace(patches, run_backward)


def tag_gradients(mode: OpRunner, parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Name the gradients of parameters, of all that are alive if none are given."""
    meter = mode.meter
    for parameter in meter.parameters() if parameters is None else parameters:
        gradient = parameter.grad
        if gradient is not None and (type(gradient) is FakeTensor or is_wrapper(gradient)):
            record = meter.record_of(parameter)
            meter.tag(gradient, Category.GRADIENTS, None if record is None else record.module)


def _patch_optimizers(mode: OpRunner, patches: PatchStack) -> None:
    """Let torch.optim choose foreach and fused as on a card, and follow its steps."""
    # torch.optim takes the foreach path by the tensors' exact type: fake ones would take the slow loop.
    # There are two lists: one for gradient clipping and the like, one for the optimizers' own default.
    supported: tuple[list[Any], ...] = (foreach_utility_types, foreach_types)
    for types in supported:
        types.append(FakeTensor)
        patches.call(partial(types.remove, FakeTensor))

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if _in_backward():
            tag_gradients(mode, own)
        else:
            tag_gradients(mode, [*mode.meter.parameters(), *filter(is_wrapper, own)])
        mode.meter.phases.begin(ProgramPhase.OPTIMIZER)
        mode.guesses.new_phase()

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tag_states(mode, optimizer)
        if _in_backward():
            mode.meter.phases.resume(ProgramPhase.BACKWARD)

    patches.call(register_optimizer_step_pre_hook(before_step).remove)
    patches.call(register_optimizer_step_post_hook(after_step).remove)
    mode.meter.phases.rounds.follow(patches)  # hears of a step when its states have their names


def _in_backward() -> bool:
    """Whether autograd is at work: optimizers can step in its hooks, one for each parameter."""
    return bool(current_graph_task_id() != -1)


def tag_states(mode: OpRunner, optimizer: torch.optim.Optimizer) -> None:
    """Name the tensors that an optimizer keeps, with the module of the parameter that they belong to."""
    meter = mode.meter
    for parameter, state in optimizer.state.items():
        module = None
        if type(parameter) is FakeTensor and (record := meter.record_of(parameter)) is not None:
            module = record.module
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                meter.tag(value, Category.OPTIMIZER_STATE, module)
