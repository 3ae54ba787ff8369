"""What a step waits for the link: predicted as runs have it, and less where offloaded blocks lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from tests.planner.made import MIB, block, op, step_profile
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner.activation_ilp.decisions import (
    OVERHEAD_SECONDS,
    Decision,
    DecisionKind,
    IlpOptions,
    activation_choices,
    places,
    window_bytes,
)
from vramfit.planner.activation_ilp.transfers import spread, waiting_seconds
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import with_choices
from vramfit.workload import Workload

AWAY = Decision(DecisionKind.OFFLOAD)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        return x + self.down(hidden * torch.sigmoid(hidden))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(1024, 1024)
        self.layers = nn.ModuleList(_Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return x


_WORKLOAD = Workload(
    model=_Layers,
    batch=lambda batch_size: torch.zeros(batch_size, 1024),
    sizes={"batch_size": 4096},
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)


@pytest.fixture(scope="module")
def seen() -> tuple[VirtualBackend, StepProfile, IlpOptions]:
    device = VirtualBackend(find_gpu("RTX 4090"), host_bytes=1 << 40)
    profile, observed = device.profile_step(_WORKLOAD, dict(_WORKLOAD.sizes), places)
    options = IlpOptions(
        offload=True,
        host_bytes=1 << 40,
        link_bytes_per_second=profile.link_bytes_per_second,
        window=window_bytes(observed),
    )
    return device, observed, options


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, 4, 5), (0, 1, 2), (0, 2, 4)])
def test_a_run_waits_as_long_as_predicted(
    chosen: tuple[int, ...], seen: tuple[VirtualBackend, StepProfile, IlpOptions]
) -> None:
    device, observed, options = seen
    decisions = {observed.blocks[index].path: AWAY for index in chosen}
    predicted = waiting_seconds(observed, decisions, options) - OVERHEAD_SECONDS * len(chosen)
    choices = activation_choices(observed, decisions)
    price = device.step_cost(with_choices(_WORKLOAD, choices), dict(_WORKLOAD.sizes))
    waited = price.step_seconds - observed.seconds
    assert waited > 2e-3
    assert predicted == pytest.approx(waited, rel=0.02)


def _row() -> tuple[StepProfile, IlpOptions]:
    """Blocks that take 2 ms forward and 4 back, and 5 ms to cross; the window holds 2 ms."""
    observed = step_profile([block(index, [op(10, 1.0), op(10, 1.0)]) for index in range(6)])
    return observed, IlpOptions(
        offload=True, host_bytes=1 << 40, link_bytes_per_second=4 * 1024 * MIB, window=8 * MIB
    )


def _first(count: int) -> Mapping[str, Decision]:
    return {f"layers.{index}": AWAY for index in range(count)}


def test_a_window_is_not_there_for_each_of_several_blocks_in_a_row() -> None:
    observed, options = _row()
    one, two, three = (waiting_seconds(observed, _first(count), options) for count in (1, 2, 3))
    assert two > 2 * one
    assert three - two > two - one - 1e-9


def test_blocks_that_go_to_the_host_are_taken_apart_from_one_another() -> None:
    observed, options = _row()
    same = step_profile([replace(one, like=0) for one in observed.blocks])
    found = spread(same, _first(3), options, lambda _: True)
    assert len(found) == 3
    assert waiting_seconds(same, found, options) < waiting_seconds(same, _first(3), options)
    kept = [
        spread(same, _first(3), options, lambda _: False),
        spread(observed, _first(3), options, lambda _: True),
    ]
    assert kept == [_first(3), _first(3)]  # the budget forbids it; no two blocks are equal
