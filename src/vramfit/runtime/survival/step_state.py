"""What a training step changes before its optimizer steps, noted so that a failed attempt leaves none of it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
        self._buffers = [(buffer, copied(buffer)) for buffer in model.buffers()]
        self._scaler = scaler
        self._unscaled = {} if scaler is None else dict(_per_optimizer(scaler))
        self._before = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self._parameters = list(model.parameters())
        for parameter, _ in self._before:
            parameter.grad = None

    def restore(self) -> None:
        """As at the beginning, but that earlier gradients stay aside: nothing of an attempt is left."""
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if self._scaler is not None:
            states = _per_optimizer(self._scaler)
            states.clear()
            states.update(self._unscaled)
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
        RuntimeError, MemoryError: the host has none either.
    """
    with torch.no_grad():
        try:
            return tensor.detach().clone()
        except (RuntimeError, MemoryError):
            if tensor.device.type == "cpu":
                raise
        return tensor.detach().cpu()


def _per_optimizer(scaler: torch.amp.GradScaler) -> dict[int, Any]:
    """What a scaler knows of each optimizer's gradients since its last update (torch/amp/grad_scaler.py)."""
    found: dict[int, Any] = scaler._per_optimizer_states
    return found
