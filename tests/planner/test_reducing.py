"""Whether batches are cut, by trying the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner import reducing
from vramfit.planner.frames import Frames
from vramfit.planner.reducing import cutting_of
from vramfit.planner.request import Request
from vramfit.planner.virtual_device import VirtualDevice
from vramfit.techniques import Profile
from vramfit.techniques.micro_batching import Reduction
from vramfit.workload import Batch, Workload


def _profile(workload: Workload, *, flops: int = 0) -> Profile:
    return Profile(
        model=workload.model(), optimizer=None, sizes=workload.sizes, trains=True, step_flops=flops
    )


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each example against all others of the batch."""
    found = F.normalize(model(batch[0] if isinstance(batch, tuple) else batch).flatten(1))
    return F.cross_entropy(found @ found.T, torch.arange(len(found), device=found.device))


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0] if isinstance(batch, tuple) else batch).square().sum()


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(None, Reduction.MEAN), (summed, Reduction.SUM), (contrastive, None)],
    ids=["mean", "sum", "contrastive"],
)
def test_a_loss_is_tried(loss: object, reduction: Reduction | None) -> None:
    toy = all_toys()["mlp"]
    workload = toy if loss is None else replace(toy, loss=loss)  # type: ignore[arg-type]
    found = cutting_of(workload, _profile(workload))
    assert found.reduction is reduction
    assert bool(found.note) == (reduction is None)


def test_what_would_take_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(all_toys()["mlp"], loss=contrastive)
    found = cutting_of(workload, _profile(workload, flops=1 << 60))
    assert found.reduction is Reduction.AUTO
    assert "was not tried" in found.note
    monkeypatch.setattr(reducing, "_PART", 1e-12)
    assert cutting_of(workload, _profile(workload)).reduction is Reduction.AUTO


@pytest.mark.parametrize("loss", [None, contrastive])
def test_only_what_can_be_cut_is_offered_in_pieces(loss: object) -> None:
    toy = all_toys()["mlp"]
    workload = replace(
        toy if loss is None else replace(toy, loss=loss),  # type: ignore[arg-type]
        optimizer=lambda parameters: torch.optim.SGD(_list(parameters), lr=0.1),
    )
    request = Request(
        workload=workload, sizes=workload.sizes, budget_bytes=1 << 33, allowed=frozenset({"micro-batching"})
    )
    frames = Frames(device=VirtualDevice(find_gpu("RTX 4090"), alloc_conf=""), request=request)
    offered = list(frames.options(frames.plain.profile))
    assert bool(offered) == (loss is None)
    assert bool(frames.notes(offered)) == (loss is not None)
    assert all(choice.setting.reduction is Reduction.MEAN for choice in offered)  # type: ignore[attr-defined]


def _list(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(parameters)
