"""What is counted of operations, beside torch's own counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vramfit.planner.devices.cpu_backend import FlopMode

_A, _B, _C = torch.ones(3, 5), torch.ones(5, 7), torch.zeros(3, 7)


@pytest.mark.parametrize(
    "work",
    [
        lambda: _A @ _B,
        lambda: _C.addmm(_A, _B),
        lambda: _C.clone().addmm_(_A, _B),
        lambda: torch.mm(_A, _B, out=torch.empty(3, 7)),
        lambda: torch.addmm(_C, _A, _B, out=torch.empty(3, 7)),
    ],
)
def test_every_form_of_a_product_counts_alike(work: Callable[[], torch.Tensor]) -> None:
    with FlopMode() as mode:
        work()
    assert mode.total == 2 * 3 * 5 * 7


def test_a_step_counts_what_torch_counts() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    with FlopCounterMode(display=False) as known:
        model(torch.ones(2, 2, 8, 8)).sum().backward()
    with FlopMode() as mode:
        model(torch.ones(2, 2, 8, 8)).sum().backward()
    assert mode.total == known.get_total_flops() > 0
