"""All that whole training steps change, noted on the host so that any number of them can be taken back.

NOTE [Not a byte behind]: what is noted waits on the host, since on the device it would take the room that is measured.
Values go back into the tensors that were there; states, gradients and buffers that a step made are dropped. Gradients
that are there stay with their parameters alone, so that a step lets go of them as it would in the training; where it
did, others with the same values take their place.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.runtime.survival.step_state import GeneratorStates, ModuleState
from vramfit.torch_internals.pytree import tree_flatten, tree_unflatten

Optimizer = torch.optim.Optimizer

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, kw_only=True)
class _Noted:
    """A tensor that stays, and its values."""

    tensor: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Noted:
        return cls(tensor=tensor, values=_on_host(tensor))

    def restore(self) -> None:
        self.tensor.copy_(self.values)


@dataclass(frozen=True, kw_only=True)
class _Gradient:
    """A gradient, which only its parameter holds."""

    parameter: nn.Parameter
    gradient: weakref.ref[torch.Tensor]
    values: torch.Tensor

    def restore(self) -> None:
        there = self.gradient()
        if there is None:
            there = self.parameter.grad
            if there is None or there.shape != self.values.shape or there.dtype != self.values.dtype:
                self.parameter.grad = None
                there = torch.empty_like(self.values, device=self.parameter.device)
        there.copy_(self.values)
        self.parameter.grad = there


class _OptimizerState:
    """An optimizer: states with their tensors, settings of its groups, and counters that others keep in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = [(key, dict(value)) for key, value in optimizer.state.items()]
        leaves, self._structure = tree_flatten([state for _, state in self._states])
        self._leaves = [
            _Noted.of(leaf) if isinstance(leaf, torch.Tensor) else _copied(leaf) for leaf in leaves
        ]
        self._groups = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._counters = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}

    def restore(self) -> None:
        optimizer = self._optimizer
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Noted):
                leaf.restore()
                leaves.append(leaf.tensor)
            else:
                leaves.append(_copied(leaf))
        optimizer.state.clear()
        for (key, _), state in zip(self._states, tree_unflatten(leaves, self._structure), strict=True):
            optimizer.state[key] = state
        for group, before in zip(optimizer.param_groups, self._groups, strict=False):
            for name in [name for name in group if name != "params" and name not in before]:
                del group[name]
            for name, value in before.items():
                there = group[name]
                if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
                    there.copy_(value)
                else:
                    group[name] = _copied(value)
        for name in [name for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)]:
            if name not in self._counters:
                delattr(optimizer, name)
        vars(optimizer).update(self._counters)


class _ScalerState:
    """A scaler of mixed precision, whose tensors come with its first use (torch/amp/grad_scaler.py)."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._attributes = dict(vars(scaler))
        self._tensors = [_Noted.of(v) for v in self._attributes.values() if isinstance(v, torch.Tensor)]
        self._per_optimizer = {key: dict(value) for key, value in scaler._per_optimizer_states.items()}

    def restore(self) -> None:
        vars(self._scaler).clear()
        vars(self._scaler).update(self._attributes)
        for one in self._tensors:
            one.restore()
        states = self._scaler._per_optimizer_states
        states.clear()
        states.update({key: dict(value) for key, value in self._per_optimizer.items()})


class TrainingState:
    """The state of a training between two steps. See NOTE [Not a byte behind].

    Args:
        models: their parameters, gradients, buffers and modes.
        optimizers: as the steps use them.
        others: what else steps change: scalers, and whatever has ``state_dict`` and ``load_state_dict``, such as
            schedules, averaged weights, samplers and loaders that can be resumed.
        device: whose generator steps draw from.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        others: Iterable[Any],
        device: torch.device,
    ) -> None:
        self._random = GeneratorStates.of(device)
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._parameters = list(
            dict.fromkeys(
                [p for model in models for p in model.parameters()]
                + [p for one in optimizers for group in one.param_groups for p in group["params"]]
            )
        )
        buffers = dict.fromkeys(
            one for module in modules for one in module._buffers.values() if one is not None
        )
        self._modules = [ModuleState.of(module) for module in modules]
        self._values = [_Noted.of(one) for one in (*self._parameters, *buffers)]
        self._gradients = [
            _Gradient(parameter=one, gradient=weakref.ref(one.grad), values=_on_host(one.grad))
            for one in self._parameters
            if one.grad is not None
        ]
        self._optimizers = [_OptimizerState(one) for one in optimizers]
        others = list(others)
        self._scalers = [_ScalerState(one) for one in others if isinstance(one, torch.amp.GradScaler)]
        self._others = [
            (one, copy.deepcopy(one.state_dict()))
            for one in others
            if not isinstance(one, torch.amp.GradScaler)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """As it was. It can be done again where the device had no room for a gradient that a step dropped.

        Raises:
            torch.OutOfMemoryError: the device has no room for a gradient that a step dropped.
        """
        kept = {id(one.parameter) for one in self._gradients}
        for parameter in self._parameters:
            if id(parameter) not in kept:
                parameter.grad = None
        for module in self._modules:
            module.restore()
        for value in self._values:
            value.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        for scaler in self._scalers:
            scaler.restore()
        for one, state in self._others:
            one.load_state_dict(copy.deepcopy(state))
        for gradient in self._gradients:
            gradient.restore()
        self._random.restore()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values on the host."""
    return tensor.detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:
    """A setting that cannot be changed from elsewhere; tensors in it stay on the host."""
    if isinstance(value, torch.Tensor):
        return _on_host(value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)
