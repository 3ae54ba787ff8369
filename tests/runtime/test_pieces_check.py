"""Pieces of a batch are taken only where the loop's own loss has the same gradients in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vramfit
from vramfit.runtime.survival.ladder import Rung

pytestmark = pytest.mark.filterwarnings("ignore:std")

Loss = Callable[[nn.Module, Any], torch.Tensor]


def _info_nce(model: nn.Module, x: Any) -> torch.Tensor:
    first, second = F.normalize(model(x[0]), dim=1), F.normalize(model(x[1]), dim=1)
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def _advantages(model: nn.Module, x: Any) -> torch.Tensor:
    advantage = x[0][:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -(advantage * F.log_softmax(model(x[0]), 1)[:, 0]).mean()


def _dice(model: nn.Module, x: Any) -> torch.Tensor:
    p, t = torch.sigmoid(model(x[0]))[:, 0], (x[1][:, 0] > 0).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def _weighted(model: nn.Module, x: Any) -> torch.Tensor:
    return F.cross_entropy(model(x[0]), x[2], weight=torch.tensor([1.0, 50.0, 1.0, 1.0]))


def _masked(model: nn.Module, x: Any) -> torch.Tensor:
    return (model(x[0]).square().mean(1, keepdim=True) * x[3]).sum() / x[3].sum()


def _worst(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x[0]).square().mean(1).topk(min(3, len(x[0]))).values.mean()


def _variance_of_many(model: nn.Module, x: Any) -> torch.Tensor:
    out = model(x[0])
    return out.square().mean() + (out.var(0).mean() if len(out) >= 6 else 0)


def _sum(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x[0]).square().sum()


def _mean(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x[0]).square().mean()


def _batch(count: int = 8) -> tuple[torch.Tensor, ...]:
    draws = torch.Generator().manual_seed(1)
    a = torch.randn(count, 6, generator=draws)
    labels = (torch.arange(count) == count - 1).long()
    lengths = torch.where(torch.arange(count) < count // 2, 6, 1)
    return a, a + 0.1, labels, (torch.arange(6)[None] < lengths[:, None]).float()


def _trained(loss: Loss, room: list[int], numerics: str, steps: int = 4) -> tuple[torch.Tensor, Any]:
    """Parameters after steps of which each has room for so many examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def short(net: nn.Module, x: Any) -> torch.Tensor:
        if len(x[0]) > room[min(survivor.steps, len(room) - 1)]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. ")
        return loss(net, x)

    survivor = vramfit.survive(model, optimizer, loss=short, numerics=numerics)
    for _ in range(steps):
        survivor.step(_batch())
    return torch.cat([one.detach().flatten() for one in model.parameters()]), survivor


@pytest.mark.parametrize(
    "loss",
    [_info_nce, _advantages, _dice, _weighted, _masked, _worst, _variance_of_many, _sum],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("room", [[8, 8, 2], [2]], ids=["after two whole steps", "from the first step on"])
def test_a_loss_that_compares_examples_is_never_cut(loss: Loss, room: list[int]) -> None:
    try:
        found, _ = _trained(loss, room, "rounding")
    except torch.OutOfMemoryError as error:
        assert any(
            words in str(error) for words in ("do not give its gradients", "ends in", "done as a whole")
        )
        return
    plain, _ = _trained(loss, [8], "rounding")  # a form that the check can weigh is done right
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_a_mean_is_cut_and_stays_within_rounding() -> None:
    found, survivor = _trained(_mean, [8, 8, 2], "rounding")
    plain, _ = _trained(_mean, [8], "bitwise")
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert "up" in [event.kind for event in survivor.events]


def test_what_was_never_run_as_a_whole_is_cut_only_where_that_is_allowed() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r'done as a whole.*numerics="approximate" compares as many as fit'
    ):
        _trained(_mean, [4], "rounding")
    found, survivor = _trained(_mean, [4], "approximate")
    plain, _ = _trained(_mean, [8], "bitwise")
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    (event,) = [one for one in survivor.events if one.kind == "compared"]
    assert event.evidence == "pieces of 4 examples give their gradients"


def test_a_larger_batch_than_those_compared_is_not_cut() -> None:
    _, survivor = _trained(_mean, [8, 8, 2], "rounding")
    assert survivor._climber.rung is Rung.MICRO_BATCHES
    with pytest.raises(torch.OutOfMemoryError, match="no batch of as many examples was done as a whole"):
        survivor.step(_batch(16))


def test_by_default_no_piece_is_taken() -> None:
    with pytest.raises(torch.OutOfMemoryError, match='numerics="rounding" allows pieces of the batch'):
        _trained(_mean, [4], "bitwise")
