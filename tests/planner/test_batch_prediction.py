"""The largest batch of a step, predicted on a virtual card, beside a plain loop there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import vramfit
from vramfit.gpus import find_gpu
from vramfit.planner.batch_prediction import BatchQuestion, largest_on
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.units import MIB

WIDTH = 4096
LIMIT = 512 * MIB
CARD = replace(find_gpu("RTX 4090"), total_bytes=LIMIT + find_gpu("RTX 4090").typical_context_bytes)


class Training:
    """weights of 64 MiB, whose optimizer's states of 128 MiB the first step makes when the activations are gone."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.done = 0

    def step(self, batch: torch.Tensor) -> None:
        self.done += 1
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def inputs(size: int) -> torch.Tensor:
    return torch.empty(size, WIDTH)


def plainly_fits(size: int, steps: int) -> bool:
    """Whether a plain loop of steps fits on the card."""
    with vramfit.VirtualGPU(CARD, alloc_conf="", profile="none"):
        try:
            there = Training()
            there.model.cuda()
            for _ in range(steps):
                there.step(inputs(size).to("cuda"))
        except torch.OutOfMemoryError:
            return False
    return True


def questions(steps: int, near: int, made: list[Training]) -> Callable[[], BatchQuestion]:
    def fresh() -> BatchQuestion:
        there = Training()
        made.append(there)
        return BatchQuestion(
            step=there.step,
            make_batch=(inputs,),
            models=(there.model,),
            optimizers=(there.optimizer,),
            start=near,
            most=near + 200,
            steps=steps,
        )

    return fresh


@pytest.mark.parametrize(("steps", "near"), [(1, 4400), (3, 2600)])
def test_as_many_steps_are_run_as_a_trial_takes(steps: int, near: int) -> None:
    made: list[Training] = []
    found = largest_on(VirtualBackend(CARD), questions(steps, near, made), LIMIT)
    assert plainly_fits(found.size, steps) and not plainly_fits(found.size + 1, steps)
    assert max(one.done for one in made) == steps
