"""What a step writes without anybody counting it, or among very many things, is put back, or the step is refused."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.faults import Faults
from torch import nn

import vramfit
from vramfit.training_state import reach
from vramfit.training_state.check_sums import check_sum

STEPS, FAILING = 6, 3


def _large_array() -> Callable[[int], float]:
    values = np.zeros(400_000)

    def write(_step: int) -> float:
        values[0] += 1
        return float(values[0])

    return write


def _structured_array() -> Callable[[int], float]:
    values = np.zeros(400_000, dtype=[("a", "f4")])

    def write(_step: int) -> float:
        values["a"][0] += 1
        return float(values["a"][0])

    return write


def _late_array() -> Callable[[int], float]:
    values = np.zeros(400_000)

    def write(step: int) -> float:
        values[0] += step >= FAILING
        return 1 + float(values[0])

    return write


def _late_data() -> Callable[[int], float]:
    values = torch.zeros(5000)

    def write(step: int) -> float:
        values.data[0] += step >= FAILING
        return 1 + float(values[0])

    return write


def _array_of_python() -> Callable[[int], float]:
    values = array.array("d", [0.0] * 10)

    def write(_step: int) -> float:
        values[0] += 1
        return values[0]

    return write


def _view_of_memory() -> Callable[[int], float]:
    values = memoryview(bytearray(8))

    def write(_step: int) -> float:
        values[0] += 1
        return float(values[0])

    return write


def _long_list() -> Callable[[int], float]:
    values = [torch.zeros(2) for _ in range(100)]

    def write(_step: int) -> float:
        values[60].add_(1)
        return float(values[60][0])

    return write


def _long_mapping() -> Callable[[int], float]:
    values = {number: torch.zeros(2) for number in range(100)}

    def write(_step: int) -> float:
        values[60].add_(1)
        return float(values[60][0])

    return write


def _another_entry() -> Callable[[int], float]:
    values = [torch.zeros(2) for _ in range(100)]

    def write(step: int) -> float:
        values[60 + step].add_(1)
        return float(values[60 + step][0])

    return write


class Counting(nn.Module):
    """Counts its calls in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("ran", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.ran += 1
        return x + 1e-3 * self.weight * self.calls * self.ran


def _steps(write: Callable[[int], float], model: nn.Module, *at: int, marks: list[int]) -> None:
    """Some steps, of which one runs out of memory at some of its allocations.

    Args:
        marks: without such, is given how many allocations that step has made at the end of its forward pass.
    """
    step, faults = 0, Faults(*at)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        factor = write(step)
        return model(batch).square().mean() * factor

    def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = loss(model, batch)
        if step == FAILING:
            marks.append(faults.seen)
        return value

    # What a step reaches is put back: it must not reach what counts its allocations.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    survivor = vramfit.survive(model, optimizer, loss=loss if at else counted)
    for step in range(STEPS):
        with faults if step == FAILING else nullcontext():
            survivor.step(torch.ones(2, 4))
    assert faults.raised == len(at)


def _trained(
    kind: Callable[[], Callable[[int], float]], make: Callable[[], nn.Module], *, fails: bool
) -> list[torch.Tensor]:
    """What training leaves; with a shortage in the forward pass of a step, after the write."""
    marks: list[int] = []
    model = make()
    _steps(kind(), model, marks=marks)
    if fails:
        model = make()
        _steps(kind(), model, marks[0] - 1, marks=marks)
    return [*model.parameters(), *model.buffers()]


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "kind",
    [_large_array, _structured_array, _array_of_python, _view_of_memory, _long_list, _long_mapping],
)
def test_what_is_written_is_put_back(
    kind: Callable[[], Callable[[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "STEP", dataclasses.replace(reach.STEP, near=50))
    plain = _trained(kind, _linear, fails=False)
    assert all(map(torch.equal, _trained(kind, _linear, fails=True), plain))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_late_array, r"an array of 3\.05 MiB"),
        (_late_data, r"a tensor of shape \(5000,\)"),
        (_another_entry, "something in a very long container"),
    ],
)
def test_what_is_first_written_where_memory_runs_out_is_refused(
    kind: Callable[[], Callable[[int], float]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "STEP", dataclasses.replace(reach.STEP, near=50))
    with pytest.raises(torch.OutOfMemoryError, match=f"cannot be called again: it moves {words}"):
        _trained(kind, _linear, fails=True)


def _nothing() -> Callable[[int], float]:
    return lambda _step: 1.0


def test_many_modules_count_once() -> None:
    def made() -> nn.Module:
        models.append(nn.Sequential(*(Counting() for _ in range(600))))
        return models[-1]

    models: list[nn.Module] = []
    plain = _trained(_nothing, made, fails=False)
    assert all(map(torch.equal, _trained(_nothing, made, fails=True), plain))
    assert {module.calls for model in models for module in model.children()} == {STEPS}


def test_what_is_too_much_to_look_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "STEP", dataclasses.replace(reach.STEP, most=100))
    with pytest.raises(
        torch.OutOfMemoryError, match="cannot be called again: it moves perhaps one of the objects"
    ):
        _trained(_long_list, _linear, fails=True)


def test_an_iterator_that_stands_still_is_no_reason() -> None:
    kept: Any = iter(range(10))

    def kind() -> Callable[[int], float]:
        return lambda _step: 1.0 if kept is not None else 0.0

    plain = _trained(kind, _linear, fails=False)
    assert all(map(torch.equal, _trained(kind, _linear, fails=True), plain))


def test_a_check_sum_sees_each_bit() -> None:
    values = torch.zeros(7, dtype=torch.bfloat16)
    before = check_sum(values)
    values.data[3] = 1
    assert check_sum(values) != before
    assert check_sum(torch.zeros(3, 3).t()[::2]) == 0  # not in one piece
    assert check_sum(np.zeros(2)) != check_sum(np.ones(2))
