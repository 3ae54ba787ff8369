"""Ranks that look for the largest batch together: all get the same, whichever of them runs out."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import vramfit

MOST = (13, 9)
"""Entries that fit, by rank."""


def one_rank(rank: int, folder: str) -> None:
    """Look for the largest batch as one of two ranks, train a step, and write down what came out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=len(MOST),
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(size: int) -> None:
        if size > MOST[rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        model(torch.full((size, 3), rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = [one.detach().clone() for one in model.parameters()]
    # Ranks that predict otherwise begin at the least.
    found = vramfit.largest_batch(
        step, model=model, optimizer=optimizer, predicted=10 + rank, vote_seconds=100
    )
    kept = all(map(torch.equal, before, model.parameters())) and not optimizer.state
    step(found.size)  # the reduction works as before
    values = [one.tolist() for one in model.parameters()]
    told = {"size": found.size, "trials": [one.size for one in found.trials], "kept": kept, "values": values}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


def test_two_ranks_find_the_same(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_rank, args=(str(tmp_path),), nprocs=len(MOST))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(MOST)))
    assert first == second
    assert (first["size"], first["trials"], first["kept"]) == (9, [10, 9], True)
