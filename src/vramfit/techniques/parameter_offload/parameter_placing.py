"""Puts parameters and the optimizer's state where they live, and takes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.parameter_offload.depot import Depot
from vramfit.techniques.support.optimizer_exchange import state_tensors


def place(live: AttachedProgram, away: dict[int, nn.Parameter]) -> None:
    """Put the chosen parameters onto the host, and all else onto the device."""
    if live.placed:
        _move(live.model, torch.device("cpu"), lambda p: id(p) in away)
    else:
        _move(live.model, live.device, lambda p: id(p) not in away)
        live.set(live, "placed", True)
    if live.device.type == "cuda":
        for parameter in away.values():
            parameter.data = parameter.data.pin_memory()
    live.on_undo(lambda: _move(live.model, live.device, lambda p: id(p) in away))


def _move(model: nn.Module, device: torch.device, goes: Callable[[torch.Tensor], bool]) -> None:
    """Move those tensors of a model that go, the parameters staying the objects that they are."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and not goes(tensor):
                    hidden.append((held, name, tensor))
    try:
        for held, name, _ in hidden:
            held[name] = None
        model.to(device)
    finally:
        for held, name, tensor in hidden:
            held[name] = tensor


def settle_optimizer(live: AttachedProgram, away: dict[int, nn.Parameter], keeping: Depot | None) -> None:
    """Let the optimizer's state be where the parameters are, and gradients come before it steps."""
    optimizer = live.optimizer
    if optimizer is not None:
        _move_state(optimizer, away, torch.device("cpu"))
        live.on_undo(lambda: _move_state(optimizer, away, live.device))
        live.keep_pageable(lambda: [one for p in away.values() for one in state_tensors(optimizer, p)])
    if keeping is None:
        return
    live.gathering.append(keeping.gradients.gather)
    live.on_undo(lambda: live.gathering.remove(keeping.gradients.gather))
    if optimizer is not None:
        live.on_undo(optimizer.register_step_pre_hook(_Gathered(keeping)).remove)


def _move_state(
    optimizer: torch.optim.Optimizer, away: dict[int, nn.Parameter], device: torch.device
) -> None:
    for group in optimizer.param_groups:
        # torch/optim/optimizer.py, _process_value_according_to_param_policy: counters of steps are on the card then.
        counters = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if id(parameter) not in away:
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and (value.dim() or counters or device.type == "cpu"):
                    state[name] = value.to(device)


class _Gathered:
    """Refuses a step that would miss gradients."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot

    def __call__(self, *_: Any) -> None:
        if self._depot.gradients.pending:
            raise UsageError(
                "gradients are still on the card",
                "Step with plan.step(), or let parameter-offload send them to the host",
            )
