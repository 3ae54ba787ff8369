"""A copy of some parameters and their states, to take a step of them back that ran out of memory.

NOTE [Below the peak]: between the passes much of a card is free, which the next pass takes again. Copies stay on the
card as far as they fit below the largest that it has held so far, and go to the host beyond: so the peak stays where it
is without them. Of a parameter with a sparse gradient, rows that the step does not write are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.runtime.state.state_notes import copied, on_the_host
from vramfit.techniques.core.random_generators import GeneratorStates


@dataclass(frozen=True, slots=True)
class _Values:
    """Of a tensor, or of some of its rows."""

    tensor: torch.Tensor
    rows: torch.Tensor | None
    values: torch.Tensor

    def restore(self) -> None:
        if self.rows is None:
            self.tensor.copy_(self.values)
        else:
            self.tensor.index_copy_(0, self.rows, self.values.to(self.tensor.device))


class SliceCopy:
    """Parameters and their states before a slice steps. See NOTE [Below the peak].

    Args:
        optimizer: one of torch's.
        parameters: that step.
        device: whose generator the step may draw from.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._room = room_below_peak(device)
        self._values: list[_Values] = []
        self._states: list[tuple[nn.Parameter, dict[str, Any] | None]] = []
        for parameter in parameters:
            rows = _rows_of(parameter)
            self._values.append(self._copy(parameter, rows))
            known = optimizer.state.get(parameter)
            self._states.append((parameter, None if known is None else dict(known)))
            tensors = [value for value in (known or {}).values() if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                self._values.append(self._copy(tensor, rows if tensor.shape == parameter.shape else None))
        self._random = GeneratorStates.of(device)

    @torch.no_grad()
    def _copy(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> _Values:
        if rows is not None:
            return _Values(tensor, rows, tensor.detach().index_select(0, rows))
        on_device = tensor.nbytes <= self._room
        self._room -= tensor.nbytes if on_device else 0
        return _Values(tensor, None, copied(tensor) if on_device else on_the_host(tensor))

    @torch.no_grad()
    def restore(self) -> None:
        """As they were; states that the failed step made are gone."""
        for one in self._values:
            one.restore()
        for parameter, states in self._states:
            if states is None:
                self._optimizer.state.pop(parameter, None)
            else:
                known = self._optimizer.state[parameter]
                known.clear()
                known.update(states)
        self._random.restore()


def room_below_peak(device: torch.device) -> int:
    """Bytes that a card may hold beside what is alive without more than it has held; without end on the host."""
    if device.type != "cuda":
        return 1 << 62
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _rows_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Rows that a sparse gradient has values for; None where it is dense."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        return None
    rows: torch.Tensor = gradient._indices()[0].unique()
    return rows
