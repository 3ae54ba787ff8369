"""Half precision on the CPU, added up as on a card."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vramfit.planner.verification import CardSums

ROWS, WIDTH = 16384, 32


def gradients(dtype: torch.dtype, dtype_of_weights: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH) + 0.05
    x = x.to(dtype).requires_grad_()
    weight = torch.ones(WIDTH, dtype=dtype_of_weights, requires_grad=True)
    bias = torch.zeros(WIDTH, dtype=dtype_of_weights, requires_grad=True)
    F.layer_norm(x, (WIDTH,), weight, bias).backward(gradient.to(dtype))
    found = [x.grad, weight.grad, bias.grad]
    assert [one.dtype for one in found] == [dtype, dtype_of_weights, dtype_of_weights]
    return [one.double() for one in found]


def furthest(found: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_rows_are_added_in_float32(weights: torch.dtype) -> None:
    plain = gradients(torch.float32, torch.float32)
    assert furthest(gradients(torch.bfloat16, weights), plain) > 0.1  # what the CPU does
    with CardSums():
        found = gradients(torch.bfloat16, weights)
    assert furthest(found, plain) < 2**-8


def test_float32_stays_as_it_is() -> None:
    plain = gradients(torch.float32, torch.float32)
    with CardSums():
        found = gradients(torch.float32, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_parameters_that_are_not_asked_for_have_none() -> None:
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with CardSums():
        F.layer_norm(x, (WIDTH,)).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16
