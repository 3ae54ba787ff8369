"""What a training step changes before its optimizer steps, noted so that a failed attempt leaves none of it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.runtime.oom_forms import recognised

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class GeneratorStates:
    """States of the generators that a step draws from: torch's, Python's and NumPy's."""

    cpu: torch.Tensor
    device: tuple[torch.device, torch.Tensor] | None
    python: Any
    numpy: Any

    @classmethod
    def of(cls, device: torch.device) -> GeneratorStates:
        """The states now."""
        numpy = sys.modules.get("numpy")
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(
            cpu=torch.get_rng_state(),
            device=None if module is None else (device, module.get_rng_state(device)),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Set them again."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            device, state = self.device
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclass(frozen=True, kw_only=True)
class ModuleState:
    """A module's mode and which tensors are its buffers: a forward pass may write others in their place."""

    module: nn.Module
    training: bool
    buffers: dict[str, torch.Tensor | None]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """The state now."""
        return cls(module=module, training=module.training, buffers=dict(module._buffers))

    def restore(self) -> None:
        """The mode and the tensors again; not their values."""
        self.module.training = self.training
        now = self.module._buffers
        if list(now) != list(self.buffers) or any(now[name] is not one for name, one in self.buffers.items()):
            now.clear()
            now.update(self.buffers)


_SCALE = ("_scale", "_growth_tracker")


class StepState:
    """A step's beginning: random states, buffers, gradients that are there already, and a scaler's bookkeeping.

    Gradients that were accumulated before are set aside, so that the step's own are a set by themselves.

    Args:
        model: its buffers are copied, on their device where there is room.
        scaler: of mixed precision, or None.
        device: where the model computes.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self._random = GeneratorStates.of(device)
        self._modules = [ModuleState.of(module) for module in model.modules()]
        self._buffers = [(buffer, copied(buffer)) for buffer in model.buffers()]
        self._scaler = scaler
        self._unscaled = {} if scaler is None else dict(_per_optimizer(scaler))
        # They come with the scaler's first use, one after the other; with one of them alone it cannot be used.
        self._scale = {} if scaler is None else {name: getattr(scaler, name) for name in _SCALE}
        self._before = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self._parameters = list(model.parameters())
        for parameter, _ in self._before:
            parameter.grad = None

    def restore(self) -> None:
        """As at the beginning, but that earlier gradients stay aside: nothing of an attempt is left."""
        for parameter in self._parameters:
            parameter.grad = None
        for module in self._modules:
            module.restore()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if self._scaler is not None:
            states = _per_optimizer(self._scaler)
            states.clear()
            states.update(self._unscaled)
            for name, tensor in self._scale.items():
                setattr(self._scaler, name, tensor)
        self._random.restore()

    def join_gradients(self) -> None:
        """Add the gradients that were there before to those of the step; in place, so that nothing is allocated."""
        with torch.no_grad():
            for parameter, before in self._before:
                assert before is not None
                if parameter.grad is None:
                    parameter.grad = before.clone()
                else:
                    parameter.grad.add_(before)

    def give_back(self) -> None:
        """As before the step, with the gradients that were there: for a step that is given up."""
        self.restore()
        for parameter, before in self._before:
            parameter.grad = before
        self._before.clear()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the tensor's device, or on the host where there is no room.

    Raises:
        BaseException: the host has none either, or it is no shortage.
    """
    with torch.no_grad():
        try:
            return tensor.detach().clone()
        except BaseException as error:
            if tensor.device.type == "cpu" or recognised(error) is None:
                raise
        return tensor.detach().cpu()


def _per_optimizer(scaler: torch.amp.GradScaler) -> dict[int, Any]:
    """What a scaler knows of each optimizer's gradients since its last update (torch/amp/grad_scaler.py)."""
    found: dict[int, Any] = scaler._per_optimizer_states
    return found
