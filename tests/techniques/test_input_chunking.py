"""Input chunking: the same outputs, less on the card, and inputs that never are there as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics, Profile
from vramfit.techniques.input_chunking import InputChunking, InputChunkingSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

WIDTH, ROWS = 1 << 16, 8


class Wide(nn.Module):
    """Holds three tensors of its input's size at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> dict[str, torch.Tensor]:
        return {"y": (x.exp() * self.scale + shift).amax(1, keepdim=True), "rows": x[:, :2] * 2}


def attached(model: nn.Module, **setting: Any) -> AttachedProgram:
    live = AttachedProgram(model, None)
    live.attach([Choice(technique=InputChunking(), setting=InputChunkingSetting(**setting))])
    return live


def inference() -> Workload:
    return Workload(
        model=Wide, batch=lambda batch_size: torch.zeros(batch_size, WIDTH), sizes={"batch_size": ROWS}
    )


@pytest.mark.parametrize("size", [1, 3, 8])
def test_outputs_are_the_same_and_it_can_be_undone(size: int) -> None:
    model, x = Wide(), torch.randn(ROWS, WIDTH)
    expected = {name: value.detach() for name, value in model(x, shift=1.0).items()}
    live = attached(model, size=size)
    with torch.no_grad():
        found = model(x, shift=1.0)
        again = copy.deepcopy(model)(x, shift=1.0)
    for outputs in (found, again):
        assert all(torch.equal(outputs[name], value) for name, value in expected.items())
    assert model(x)["y"].requires_grad  # with gradients it is the plain model
    live.undo()
    assert type(model) is Wide


def test_what_couples_examples_is_refused() -> None:
    with pytest.raises(UsageError, match="1 is a BatchNorm1d that normalises"):
        attached(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), size=2)

    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    model = Centred()
    attached(model, size=2)
    with torch.no_grad(), pytest.raises(UsageError, match=r"depend on other entries of the batch"):
        model(torch.randn(6, 3))
    trained = nn.Linear(2, 2)
    live = AttachedProgram(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="for models that do not train"):
        live.attach([Choice(technique=InputChunking(), setting=InputChunkingSetting())])


def test_the_card_holds_what_it_says(gpu: VirtualGPU) -> None:
    row, weights = 4 * WIDTH, 4 * WIDTH
    plain = peak_bytes(inference())
    assert plain >= 3 * ROWS * row  # the input, the exponential and its product
    chunk = InputChunking().apply(inference(), InputChunkingSetting(size=1))
    assert peak_bytes(chunk) - weights - ROWS * row <= 3 * row  # the input as a whole stays
    host = InputChunking().apply(
        inference(), InputChunkingSetting(size=1, host_inputs=True, host_outputs=True)
    )
    assert peak_bytes(host) - weights <= 4 * row
    assert plain > 5 * peak_bytes(host)


def test_options_are_for_inference() -> None:
    def options(
        model: nn.Module, *, trains: bool = False, batch_size: int = 12
    ) -> list[InputChunkingSetting]:
        profile = Profile(
            model=model, optimizer=None, sizes={"batch_size": batch_size, "length": 9}, trains=trains
        )
        return list(InputChunking().options(profile))

    assert [one.size for one in options(Wide())] == [6, 3, 2, 1, 1] and options(Wide())[-1].host_inputs
    assert options(Wide(), trains=True) == []
    assert options(nn.BatchNorm1d(4)) == [] and len(options(nn.BatchNorm1d(4).eval())) == 5
    assert [one.size for one in options(Wide(), batch_size=1)] == [1]
    assert InputChunking().promise(InputChunkingSetting()).numerics is Numerics.ROUNDING
