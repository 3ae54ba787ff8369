"""One rank of a training whose ranks run out of memory at random: ``python -m tests.runtime.rank_inside STEPS``.

Prints ``equal``, the number of shortages and the last loss if all ranks have the same parameters at the end.
"""

from __future__ import annotations

import gc
import logging
import random
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runtime.faults import Faults
from torch import nn

import vramfit


class Kept:
    """Numbers that are not put back after a shortage: objects of a library's own are left alone."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


Kept.__module__ = "vramfit.kept"
TO_FAIL = Kept()


class Counted(nn.Module):
    """Counts its calls in a buffer, turns another one's sign, and runs out in its first call on one rank.

    That is where the wrapper itself would synchronise buffers: once on the others, and again on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.odd.logical_not_()
        if TO_FAIL.numbers:
            TO_FAIL.numbers.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        return x


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), int(sys.argv[1])
    TO_FAIL.numbers = [1] if rank == dist.get_world_size() - 1 else []
    torch.manual_seed(0)
    inner = nn.Sequential(Counted(), nn.Linear(6, 10), nn.Dropout(0.1), nn.Tanh(), nn.Linear(10, 3))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chance, draws = random.Random(rank), torch.Generator().manual_seed(rank)
    survivor = vramfit.survive(
        model,
        optimizer,
        loss=lambda whole, batch: F.mse_loss(whole(batch[0]), batch[1]),
        clip_norm=1.0,
        patience=3,
        vote_seconds=60,
    )
    raised = 0
    gc.freeze()
    for _ in range(steps):
        batch = (torch.randn(4, 6, generator=draws), torch.randn(4, 3, generator=draws))
        # Before the vote, in the reduction's buffer, beside the second vote, in the optimizer's step: all are reached.
        faults = Faults(*(chance.randrange(90) for _ in range(chance.choice((0, 0, 1, 1, 2)))))
        with faults:
            loss = survivor.step(batch)
        raised += faults.raised
    mine = torch.cat([value.detach().flatten().double() for value in inner.state_dict().values()])
    lowest, highest, count = mine.clone(), mine.clone(), torch.tensor(raised)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(count)
    if rank == 0:
        same = bool(torch.equal(lowest, highest)) and survivor.steps == steps
        print("equal" if same else "different", int(count), f"{float(loss):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
