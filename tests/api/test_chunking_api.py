"""``vramfit.chunked`` from Python: what it takes, and what it refuses. Batches are in test_token_batches.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError


def test_it_equals_the_whole() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(9, 4)
    torch.testing.assert_close(vramfit.chunked(model, x, size=2), model(x).detach())
    found = vramfit.chunked(model, named={"input": x}, size=4, device="cpu", output_device="cpu")
    torch.testing.assert_close(found, model(x).detach())
    sequence = torch.randn(2, 9, 4)
    torch.testing.assert_close(vramfit.chunked(model, sequence, size=4, dim=1), model(sequence).detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing says how large"),
        ({"size": 2, "budget": "1GiB"}, "size and budget are both given"),
        ({"size": 0}, "size=0"),
        ({"size": 2, "dim": "x"}, "dim='x'"),
        ({"size": 2, "named": [1]}, "names no arguments"),
        ({"size": 2, "whole": "0"}, "whole='0'"),
        ({"size": 2, "whole": ["mask"]}, "whole names 'mask', which is no argument"),
        ({"size": 2, "device": "gpu"}, "device='gpu' is no device"),
        ({"size": 2, "output_device": 3}, "output_device=3"),
        ({"size": 2, "check": 1}, "check=1"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        vramfit.chunked(nn.Linear(4, 2), torch.ones(3, 4), **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="model=5 cannot be called"):
        vramfit.chunked(5, torch.ones(3, 4), size=1)  # type: ignore[arg-type]
