"""Losses that couple examples, told by the shapes of two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.planner.test_micro_batch_trial import _profile, contrastive
from tests.planner.test_whole_and_pieces import CoupledInTraining, Mixture, squares, two_layers, workload
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner import micro_batch_trial
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.micro_batch_trial import coupling_by_shapes
from vramfit.planner.plans import PlanRequest


def _device() -> VirtualBackend:
    return VirtualBackend(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 30)


def balanced(model: Any, batch: Any) -> torch.Tensor:
    return squares(model, batch) + 0.01 * model.balance


def varied(model: nn.Module, batch: Any) -> torch.Tensor:
    """A hinge on the deviation of each feature, as in VICReg."""
    return squares(model, batch) + F.relu(1 - model(batch[0]).flatten(1).std(0)).mean()


def decorrelated(model: nn.Module, batch: Any) -> torch.Tensor:
    """The correlation of features over the batch, as in Barlow Twins."""
    one, other = model(batch[0]).flatten(1), model(batch[1]).flatten(1)
    return (one.T @ other / len(one)).square().sum()


@pytest.mark.parametrize(
    ("loss", "model", "why"),
    [
        (contrastive, two_layers, "a tensor of 5 x 5 at 5 examples, with two dimensions of the batch"),
        (balanced, Mixture, "is given a sum over the batch, and is not linear in it"),
        (varied, two_layers, "is a statistic of the batch"),
        (decorrelated, two_layers, "is given a sum over the batch, and is not linear in it"),
        (squares, CoupledInTraining, "is given a sum over the batch, and is not linear in it"),
    ],
    ids=["contrastive", "balanced", "variance", "correlation", "in training"],
)
def test_what_couples_examples_is_seen(
    loss: Callable[..., torch.Tensor], model: Callable[[], nn.Module], why: str
) -> None:
    asked = workload(loss, model)
    assert why in coupling_by_shapes(_device(), asked, asked.sizes)


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over what a mask leaves, beside a number that is only watched."""
    off = (model(batch[0]) - batch[1]).square().mean(-1)
    mask = (batch[1][..., 0] > 0).float()
    model.accuracy = (off.detach() < 1).float().mean().sqrt()  # type: ignore[assignment]
    return (off * mask).sum() / mask.sum().clamp(min=1) + 0.1 * off.sum() / len(off)


@pytest.mark.parametrize("loss", [squares, masked])
def test_nothing_is_said_against_losses_that_are_sums_over_examples(loss: Any) -> None:
    asked = workload(loss)
    assert coupling_by_shapes(_device(), asked, asked.sizes) == ""


@pytest.mark.parametrize("coupled", [True, False])
def test_what_cannot_be_tried_is_probed(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_trial, "_MOST", 0)
    asked = workload(contrastive if coupled else squares)
    named = PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=1 << 33,
        host_bytes=1 << 30,
        allowed=frozenset({"micro-batching"}),
    )
    found = Candidates(device=_device(), request=named).micro_batching
    if coupled:  # also where it is allowed by its name
        assert found.setting is None
        assert "with two dimensions of the batch. By shapes alone, since the model is too large" in found.note
    else:
        assert (found.setting is not None, found.known) == (True, False)
        assert "it is used under --numerics approximate alone" in found.note
    unnamed = micro_batch_trial.try_micro_batching(asked, _profile(asked))
    assert (unnamed.setting, unnamed.known) == (None, False)
