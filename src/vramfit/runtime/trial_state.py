"""All that whole training steps change, noted on the host so that any number of them can be taken back.

NOTE [Not a byte behind]: what is noted waits on the host, since on the device it would take the room that is measured.
Values go back into the tensors that were there; states, gradients and buffers that a step made are dropped. Gradients
that are there stay with their parameters alone, so that a step lets go of them as it would in the training; where it
did, others with the same values take their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.training_state.array_values import bytes_of_array
from vramfit.training_state.check_sums import CheckSums
from vramfit.training_state.declared import DeclaredState
from vramfit.training_state.reach import reached_from
from vramfit.training_state.state_notes import StateNote
from vramfit.training_state.tensor_values import on_the_host

Optimizer = torch.optim.Optimizer

_UNNAMED = 1 << 20
"""Bytes of a tensor that is copied though nobody named what holds it: a larger one is only watched."""


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


class TrialState:
    """The state of a training between two steps. See NOTE [Not a byte behind].

    Args:
        models: their parameters, gradients, buffers, attributes and modes.
        optimizers: as the steps use them.
        others: what else steps change: scalers, schedules, averaged weights, and whatever has ``state_dict`` and
            ``load_state_dict``, such as samplers and loaders that can be resumed.
        device: whose generator steps draw from.
        roots: functions that make a step: what they reach is put back too, though nobody named it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        others: Iterable[Any],
        device: torch.device,
        roots: Sequence[Any] = (),
    ) -> None:
        self._parameters = list(
            dict.fromkeys(
                [p for model in models for p in model.parameters()]
                + [p for one in optimizers for group in one.param_groups for p in group["params"]]
            )
        )
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        self._declared = DeclaredState(list(others))
        named = [*models, *optimizers, *self._declared.walked]
        kept_out = [*gradients, *self._declared.apart]
        reached = reached_from([*named, *roots], without=kept_out)
        by_name = set(map(id, reached_from(named, without=kept_out).tensors)) if roots else None
        tensors = [one for one in reached.tensors if one.layout is torch.strided]
        values = [one for one in tensors if by_name is None or id(one) in by_name or one.nbytes <= _UNNAMED]
        copied = set(map(id, values))
        watched = [one for one in tensors if id(one) not in copied]
        arrays = [one for one in reached.arrays if bytes_of_array(one) <= _UNNAMED]
        noted = set(map(id, arrays))
        self._silent = CheckSums((*watched, *(one for one in reached.arrays if id(one) not in noted)))
        self._note = StateNote(reached, values, watched, device, arrays=arrays, copying=on_the_host)
        self._states = self._declared.noted()
        self._gradients = [
            _Gradient(parameter=one, gradient=weakref.ref(one.grad), values=on_the_host(one.grad))
            for one in self._parameters
            if one.grad is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """As it was. It can be done again where the device had no room for a gradient that a step dropped.

        Raises:
            torch.OutOfMemoryError: the device has no room for a gradient that a step dropped.
            UsageError: steps write a large tensor of something that was not named.
        """
        kept = {id(one.parameter) for one in self._gradients}
        for parameter in self._parameters:
            if id(parameter) not in kept:
                parameter.grad = None
        left = [one.what for one in self._note.restore() if one.what.startswith("a tensor")]
        left += [
            "a large array" if not isinstance(one, torch.Tensor) else "a large tensor"
            for one in self._silent.written()
        ]
        self._declared.restore(self._states)
        for gradient in self._gradients:
            gradient.restore()
        if left:
            raise UsageError(
                f"steps write {left[0]} of something that was not named, so that it cannot be put back",
                "Name what holds it: in model, optimizer or others",
            )
