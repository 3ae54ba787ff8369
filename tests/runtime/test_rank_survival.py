"""Ranks that run out of memory at different moments: none hangs, and all end with the same parameters."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.runtime.rank_programs import ran_on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule

import vramfit
from vramfit.errors import UsageError, VramfitError


def test_two_ranks_agree_before_each_collective() -> None:
    words, shortages, _ = ran_on_ranks(2, "tests.runtime.rank_inside", 25).split()
    assert words == "equal"
    assert int(shortages) >= 20


class Branches(nn.Module):
    """Of three layers one is used on each of two ranks, and one on neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers[number](x)  # type: ignore[no-any-return]


def one_of_two_branches(rank: int, folder: str) -> None:
    """Train as one of two ranks with survive and with the wrapper alone, and write down the parameters."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    x = torch.full((4, 3), rank + 1.0)
    values = []
    for survives in (True, False):
        model = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        survivor = vramfit.survive(
            model, optimizer, loss=lambda whole, batch: whole(batch, rank).square().mean()
        )
        for _ in range(2):
            if survives:
                survivor.step(x)
            else:
                model(x, rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        values.append([one.tolist() for one in model.parameters()])
        values.append(len(optimizer.state))
    Path(folder, f"{rank}.json").write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


def test_a_layer_that_one_rank_alone_uses_steps_on_all(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_of_two_branches, args=(str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    mine, states, theirs, states_of_theirs = first
    assert mine == theirs
    assert states == states_of_theirs == 4


def one_batch_less(rank: int, folder: str) -> None:
    """Train as one of two ranks, of which the second has a batch less, and write down how it ends."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    said = []

    def gathers(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        torch.distributed.all_reduce(loss.detach())
        return loss  # type: ignore[no-any-return]

    for loss in (gathers, lambda net, x: net(x).square().mean()):
        try:
            with vramfit.survive(model, torch.optim.SGD(model.parameters()), loss=loss) as survivor:
                for _ in range(3 - rank):
                    survivor.step(torch.ones(4, 3))
        except VramfitError as error:
            said.append(error.message)
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


def test_a_collective_in_the_loss_and_a_rank_with_a_batch_less_are_one_line(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_batch_less, args=(str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0].startswith("the step calls all_reduce itself") and second == first[:1]
    assert first[1].startswith("another rank has left the training before this step: it had fewer batches")


class Sharded(nn.Linear, FSDPModule):
    """What FSDP2 makes of a layer: its class, and one more."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)


def test_a_sharded_model_is_refused_before_the_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].__class__ = Sharded
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="Sharded is sharded"):
        vramfit.survive(model, optimizer)
