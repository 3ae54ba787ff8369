"""Compares what forward passes write beside gradients, with a plan and without: buffers, attributes, generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.planner.seeding import generators_kept, seed_all
from vramfit.techniques import Numerics
from vramfit.techniques.support.promised_errors import allowed_error
from vramfit.training_state.container_kinds import MISSING
from vramfit.training_state.forward_state import (
    ForwardState,
    Written,
    attribute_of,
    only_written,
    same_values,
)
from vramfit.workload import Workload, to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDifference:
    """A value that the plan's step wrote otherwise than the plain one.

    Attributes:
        name: of a buffer or an attribute of the model, or of what the loss reaches.
        error: the difference as a part of the value's norm; infinite where the two cannot be subtracted.
    """

    name: str
    error: float


def differing_states(
    plain: Mapping[str, Written], planned: Mapping[str, Written], numerics: Numerics
) -> list[StateDifference]:
    """The values that a step writes and that differ beyond a promise, the worst first.

    Args:
        plain: what the plain program's step wrote.
        planned: what the plan's step wrote: something of its own does not count.
    """
    found = []
    for name, expected in plain.items():
        other = planned.get(name)
        error = _error(expected.after, expected.before if other is None else other.after)
        if error > _allowed(expected.after, numerics):
            found.append(StateDifference(name=name, error=error))
    for name, other in planned.items():
        if name not in plain and other.before is not MISSING:
            error = _error(other.before, other.after)
            if error > _allowed(other.before, numerics):
                found.append(StateDifference(name=name, error=error))
    return sorted(found, key=lambda one: -one.error)


def settled(
    workload: Workload, sizes: Mapping[str, int], found: Sequence[StateDifference]
) -> list[StateDifference]:
    """Differences without those in attributes that nothing reads: the last attention map, the last loss.

    Buffers go to checkpoints, and are read by others: none of them is left out.

    Args:
        workload: the plain one.
    """
    if not found or workload.loss is None or workload.step is not None:
        return list(found)
    loss = workload.loss
    with generators_kept():
        seed_all(0)
        state = workload.start("cpu")
        batch = to_device(workload.batch(**sizes), state.device)
        start = ForwardState(state.model, loss)

        def passed(left: frozenset[str]) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Written]]:
            seed_all(0)
            state.model.zero_grad(set_to_none=True)
            try:
                loss(state.model, batch).backward()
                grads = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
                return grads, start.written()
            finally:
                start.restore(left)

        buffers = {name for name, _ in state.model.named_buffers()}
        names = frozenset(attribute_of(one.name) for one in found) - buffers
        if names and only_written(passed, names):
            return [one for one in found if attribute_of(one.name) in buffers]
    return list(found)


def _allowed(value: Any, numerics: Numerics) -> float:
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
    real = value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
    if not real and numerics <= Numerics.PRECISION:
        return 0.0  # a counter is exact
    allowed = allowed_error(numerics, dtype)
    return float("inf") if allowed is None else allowed


def _error(expected: Any, other: Any) -> float:
    if same_values(expected, other):
        return 0.0
    if isinstance(expected, torch.Tensor) and isinstance(other, torch.Tensor):
        if expected.shape != other.shape or expected.dtype == torch.bool or other.dtype == torch.bool:
            return float("inf")
        one, two = expected.detach().double(), other.detach().double()
        return _part(float((one - two).norm()), float(one.norm()))
    numbers = (int, float)
    if type(expected) in numbers and type(other) in numbers:
        return _part(abs(float(expected) - float(other)), abs(float(expected)))
    return float("inf")


def _part(difference: float, norm: float) -> float:
    if difference == 0:
        return 0.0
    found = difference / norm if norm else float("inf")
    return found if found == found else float("inf")
