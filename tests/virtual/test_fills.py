"""What a program sees of probabilities that nobody computed: a distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional as F

from vramfit.virtual.data_dependent.guesses import PATIENCE
from vramfit.virtual.gpu import VirtualGPU


def unknown(*shape: int) -> torch.Tensor:
    """Fractions without values: too many to follow."""
    return torch.randn(*shape, 5000, device="cuda").amax(-1)


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_softmax_is_a_distribution_wherever_it_is_looked_at(gpu: VirtualGPU, rows: int) -> None:
    probs = unknown(rows, 7).softmax(-1)
    for seen in (
        probs.cpu(),
        probs.half().float().cpu(),
        probs.clone()[:1].cpu(),
        torch.cat([probs, probs]).cpu(),
    ):
        assert torch.allclose(seen.sum(-1), torch.ones(()), atol=1e-3) and bool(
            ((seen > 0) & (seen < 1)).all()
        )
    assert sum(probs[0].tolist()) == pytest.approx(1)
    assert 0 < probs[0, 3].item() < 1 and probs.sum(-1)[0].item() == pytest.approx(1)
    assert np.random.default_rng(0).choice(7, p=probs[0].cpu().numpy()) in range(7)
    assert int(torch.multinomial(probs.cpu(), 1).max()) < 7
    assert int(torch.multinomial(probs[:1], 2).max()) < 7
    made = Categorical(probs.cpu())
    assert made.entropy()[0].item() == pytest.approx(math.log(7))
    assert (-(probs * probs.log()).sum(-1))[0].item() == pytest.approx(math.log(7))
    assert (probs / probs.sum(-1, keepdim=True))[0, 0].item() == pytest.approx(1 / 7)
    assert probs.topk(3)[0].cpu().max().item() == pytest.approx(1 / 7)


def test_other_functions_stay_in_their_range(gpu: VirtualGPU) -> None:
    x = unknown(40, 200)
    assert 0 < x.sigmoid().cpu().min() <= x.sigmoid().cpu().max() < 1
    assert 0 < x.clone().sigmoid_()[0, 0].item() < 1
    assert x.log_softmax(-1).cpu().max() <= 0 and F.logsigmoid(x).cpu().max() <= 0
    assert x.log_softmax(-1).exp()[0, 0].item() > 0 and x.exp().cpu().min() > 0
    unit = F.normalize(x, dim=-1)
    assert torch.allclose(unit.cpu().square().sum(-1), torch.ones(()), atol=1e-4)
    assert abs(unit[0, 0].item()) <= 1


def test_what_overwrites_probabilities_ends_them(gpu: VirtualGPU) -> None:
    probs = unknown(40, 200).softmax(-1)
    probs.copy_(unknown(40, 200))
    assert gpu.mode.shading.fills.find(probs) is None
    other = unknown(40, 200).softmax(-1)
    other.add_(unknown(40, 200))
    assert gpu.mode.shading.fills.find(other) is None


def test_a_loop_that_waits_for_a_probability_sees_none_beyond_one(gpu: VirtualGPU) -> None:
    seen = []
    while True:
        seen.append(unknown(40, 200).softmax(-1).max().item())
        if seen[-1] > 0.9:
            break
    assert PATIENCE - 1 <= len(seen) < PATIENCE + 100 and all(0 <= value <= 1 for value in seen)


def test_no_token_is_drawn_from_made_up_probabilities(gpu: VirtualGPU) -> None:
    probs = unknown(1, 3000).softmax(-1)
    assert probs[0, 7].item() == pytest.approx(1 / 3000)
    assert 2 < int(torch.multinomial(probs, 1)) < 2999 and 2 < int(probs.argmax(-1)) < 2999
