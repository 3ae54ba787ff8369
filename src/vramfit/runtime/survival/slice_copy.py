"""A copy of some parameters and their states, to take a step of them back that ran out of memory.

NOTE [Below the peak]: between the passes much of a card is free, which the next pass takes again. Copies stay on the
card as far as they fit below the largest that it has held so far, and go to the host beyond: so the peak stays where it
is without them. Of a parameter with a sparse gradient, rows that the step does not write are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vramfit.runtime.survival.copy_places import copied
from vramfit.training_state.container_kinds import ENTRIES, MAPPING, Names
from vramfit.training_state.random_generators import GeneratorStates
from vramfit.training_state.reach import Reached
from vramfit.training_state.state_notes import ContainersNote, TensorCopy
from vramfit.training_state.tensor_values import on_the_host


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
        self._room = room_below_peak(device)
        self._values: list[TensorCopy] = []
        states = Reached()
        states.hold(ENTRIES, Names(optimizer.state, dict.fromkeys(parameters)))
        for parameter in parameters:
            rows = _rows_of(parameter)
            self._values.append(self._copy(parameter, rows))
            known = optimizer.state.get(parameter)
            if known is not None:
                states.hold(MAPPING, known)
            tensors = [value for value in (known or {}).values() if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                self._values.append(self._copy(tensor, rows if tensor.shape == parameter.shape else None))
        self._states = ContainersNote(states)
        self._random = GeneratorStates.of(device)

    @torch.no_grad()
    def _copy(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> TensorCopy:
        if rows is not None:
            return TensorCopy.of_rows(tensor, rows)
        on_device = tensor.nbytes <= self._room
        self._room -= tensor.nbytes if on_device else 0
        return TensorCopy.of(tensor, copied if on_device else on_the_host)

    @torch.no_grad()
    def restore(self) -> None:
        """As they were; states that the failed step made are gone."""
        for one in self._values:
            one.restore(compare=False)
        self._states.restore()
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
