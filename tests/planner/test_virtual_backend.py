"""What a step costs on a virtual card: its arithmetic, and caches that are emptied in every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.planner.test_search import CONTEXT, MIB, _device, adamw, workload
from torch import nn

from vramfit.planner.activation_ilp.decisions import places
from vramfit.planner.devices.cost import step_cost_with
from vramfit.planner.devices.retry_cost import CALL_SECONDS
from vramfit.techniques import Choice, find_technique, setting_from_plain
from vramfit.workload import State, Workload


def _choice(name: str, **setting: object) -> Choice:
    technique = find_technique(name)
    return Choice(technique=technique, setting=setting_from_plain(technique, setting))


class Attending(nn.Module):
    """A convolution and attention, of which a card has kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x).flatten(2).transpose(1, 2)
        return rows + self.attention(rows, rows, rows, need_weights=False)[0]


def attending() -> Workload:
    return Workload(
        model=Attending,
        batch=lambda batch_size: torch.ones(batch_size, 3, 16, 16),
        sizes={"batch_size": 8},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adamw,
    )


@pytest.mark.parametrize("made", [lambda: workload(256, 512), attending])
def test_the_flops_of_a_step_are_those_of_its_profile(made: Callable[[], Workload]) -> None:
    asked = made()
    device, sizes = _device(), dict(asked.sizes)
    profile, _ = device.profile_step(asked, sizes, places)
    assert device.step_cost(asked, sizes).step_flops == profile.step_flops > 0


def test_what_is_computed_again_counts() -> None:
    asked = workload(256, 512)
    product = 2 * 512 * 256 * 256
    # 8 products forward and 16 backward; the first layer's input needs no gradient.
    plain = step_cost_with(_device(), asked, (), asked.sizes, None)
    assert plain.step_flops == 23 * product
    # Each block's second product is the last thing that it computes: nothing of its backward pass reads it.
    again = step_cost_with(
        _device(), asked, (_choice("activation-checkpointing", mode="whole"),), asked.sizes, None
    )
    assert again.step_flops == 27 * product
    pieces = step_cost_with(_device(), asked, (_choice("micro-batching", count=16),), asked.sizes, None)
    assert pieces.step_flops == plain.step_flops


def two_streams() -> Workload:
    """Steps that need 400 MiB on one stream, then on another: what is cached for one serves no other."""

    def step(state: State, _batch: object) -> None:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                torch.empty(100 * MIB, device="cuda").fill_(1.0)
            torch.cuda.synchronize()
        state.model(torch.ones(1, 1, device="cuda")).sum().backward()

    return Workload(
        model=lambda: nn.Linear(1, 1),
        batch=lambda batch_size: torch.ones(batch_size),
        sizes={"batch_size": 1},
        step=step,
        optimizer=adamw,
    )


def test_a_cache_that_is_emptied_in_every_step_is_priced() -> None:
    asked, device = two_streams(), _device()
    endless = device.step_cost(asked, dict(asked.sizes))
    assert (endless.retries, endless.retry_seconds) == (0, 0.0)
    short = device.step_cost(asked, dict(asked.sizes), CONTEXT + 600 * MIB)
    assert short.fits
    assert short.retries == 2
    # Each time 400 MiB are given back and taken anew.
    assert short.retry_seconds == pytest.approx(4 * CALL_SECONDS)
    assert short.step_seconds == pytest.approx(endless.step_seconds + short.retry_seconds)
    assert (short.figures.retries, short.figures.retry_seconds) == (2, short.retry_seconds)
