"""``torch.optim``: the card's code paths, the optimizer phase, and the names of its states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import (
    _foreach_supported_types,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils

from vramfit.capture.attribution import ProgramPhase
from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches.autograd import tag_gradients


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let torch.optim choose foreach and fused as on a card, and follow its steps."""
    # torch.optim takes the foreach path by the tensors' exact type: fake ones would take the slow loop.
    # There are two lists: one for gradient clipping and the like, one for the optimizers' own default.
    supported: tuple[list[Any], ...] = (_foreach_utils._foreach_supported_types, _foreach_supported_types)
    for types in supported:
        types.append(FakeTensor)
        patches.call(partial(types.remove, FakeTensor))

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _in_backward():
            tag_gradients(mode, (p for group in optimizer.param_groups for p in group["params"]))
        else:
            tag_gradients(mode)
        mode.meter.phases.begin(ProgramPhase.OPTIMIZER)
        mode.guesses.new_phase()

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tag_states(mode, optimizer)
        if _in_backward():
            mode.meter.phases.resume(ProgramPhase.BACKWARD)

    patches.call(register_optimizer_step_pre_hook(before_step).remove)
    patches.call(register_optimizer_step_post_hook(after_step).remove)


def _in_backward() -> bool:
    """Whether autograd is at work: optimizers can step in its hooks, one for each parameter."""
    return bool(torch._C._current_graph_task_id() != -1)


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
