from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from vramfit.techniques import AttachedProgram, Choice
from vramfit.techniques.lean_optimizer import LeanOptimizer, LeanOptimizerSetting
from vramfit.techniques.low_precision_training import LowPrecisionTraining, LowPrecisionTrainingSetting


def started() -> tuple[AttachedProgram, Any]:
    """A program whose optimizer is exchanged after its schedule was made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    live = AttachedProgram(model, optimizer)
    live.attach([Choice(technique=LeanOptimizer(), setting=LeanOptimizerSetting(lr=0.5))])
    return live, schedule


def train(live: AttachedProgram, schedule: Any, steps: int) -> list[float]:
    """Train; the learning rate of each step."""
    rates = []
    for _ in range(steps):
        live.backward(live.model(torch.ones(2, 4)).square().sum())
        live.step()
        assert live.optimizer is not None
        rates.append(float(live.optimizer.param_groups[0]["lr"]))
        schedule.step()
    return rates


def test_a_schedule_goes_on_from_what_is_loaded_into_an_exchanged_optimizer() -> None:
    live, schedule = started()
    assert train(live, schedule, 4) == [0.5, 0.5, 0.25, 0.25]
    assert live.optimizer is not None
    saved = copy.deepcopy(
        {
            "model": live.model.state_dict(),
            "optimizer": live.optimizer.state_dict(),
            "at": schedule.state_dict(),
        }
    )
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.125  # that of the step to come
    other, its_schedule = started()
    assert other.optimizer is not None
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    its_schedule.load_state_dict(saved["at"])
    assert train(other, its_schedule, 3) == train(live, schedule, 3) == [0.125, 0.125, 0.0625]
    for found, expected in zip(other.model.parameters(), live.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_loading_states_of_a_plain_optimizer_keeps_the_float32_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    plain = torch.optim.AdamW(model.parameters(), lr=0.0)
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    live = AttachedProgram(model, optimizer)
    live.attach([Choice(technique=LowPrecisionTraining(), setting=LowPrecisionTrainingSetting())])
    optimizer.load_state_dict(saved)
    live.undo()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
