"""Counting a step of the CPU leaves its peak as it is: gradients are summed in place, as without a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from vramfit.capture.gradient_sums import measure_counts
from vramfit.planner.devices.cpu_backend import FlopMode

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("fit_interpreter")]

ROWS, WIDTH = 5000, 32
WEIGHT_BYTES = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def counts(fit_interpreter: None) -> None:
    measure_counts()


def peak(step: Callable[[], object]) -> int:
    """The most bytes that a step holds beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def counted(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with FlopMode():
            step()

    return run


def test_a_tied_weight_with_a_gradient_takes_no_more_under_the_mode() -> None:
    weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    ids = torch.arange(16)

    def step() -> None:
        hidden = F.embedding(ids, weight).sin()
        (hidden @ weight[:64].T).sum().backward()

    step()
    plain = peak(step)
    assert peak(counted(step)) == plain
    assert plain < 2.2 * WEIGHT_BYTES  # the two gradients of the weight, and not their sum beside them
    before = weight.grad.clone() if weight.grad is not None else None
    assert before is not None and weight.grad is not None
    counted(step)()
    under = weight.grad - before
    before = weight.grad.clone()
    step()
    torch.testing.assert_close(under, weight.grad - before, rtol=1e-4, atol=1e-4)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        once = gradient * 1
        twice = once + gradient * 1
        return twice + once + (gradient * 2 + gradient * 3)


def test_a_sum_of_a_backward_pass_in_python_changes_nothing_that_it_holds() -> None:
    leaf = torch.ones(7, requires_grad=True)
    with FlopMode():
        Doubled.apply(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [8.0] * 7


def test_a_gradient_that_somebody_holds_is_not_written_to() -> None:
    leaf = torch.ones(7, requires_grad=True)
    held: list[torch.Tensor] = []
    with FlopMode():
        doubled = leaf * 2
        doubled.register_hook(held.append)
        one, other = doubled * 3, doubled * 4
        one.register_hook(held.append)
        (one.sum() + other.sum()).backward()
    assert [gradient.tolist() for gradient in held] == [[1.0] * 7, [7.0] * 7]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [14.0] * 7
