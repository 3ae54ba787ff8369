"""Ranks of one group that run out of memory again and again: whether they hang, and whether they stay equal.

    python benchmarks/survive/rank_incidents.py [--incidents 1000] [--ranks 2 4] [--seed 0]

A small network with dropout, buffers, and layers of which each rank uses another one in each step, in
DistributedDataParallel on gloo, trained by ``vramfit.survive``. In a third of the steps none of a rank's allocations
fails, in the others one or two do: in the copies of the beginning, the forward or backward pass, right before the
reduction (gradients for layers that others use), right after it (the norm of the gradients), or in the optimizer's
step. One process group and one group of votes serve all incidents. Every 50 steps parameters, buffers and states of the
optimizer are compared over the ranks, bit for bit. A rank that waits for 60 s in vain ends with an error, and the
benchmark with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runtime.faults import Faults
from tests.runtime.rank_inside import Counted
from torch import nn

import vramfit

PLACES = ("copies", "forward", "backward", "before the reduction", "after it", "optimizer's step")
_BETWEEN = 50
"""Steps between two comparisons."""
_WAIT = 60
"""Seconds that a rank waits for the others."""


class PlacedFaults(Faults):
    """Faults that note where they were.

    Args:
        places: counts them.
        at: numbers of the allocations that fail.
    """

    def __init__(self, places: Counter[str], *at: int) -> None:
        super().__init__(*at)
        self._places = places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.raised
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            if self.raised > before:
                self._places[_place()] += 1


def _place() -> str:
    """By the frames that lead here; the backward pass has none of its own beside the one that started it."""
    frames = traceback.extract_stack()
    files, names = {Path(one.filename).name for one in frames}, {one.name for one in frames}
    if "guarded_step.py" in files:
        return "optimizer's step"
    if "_finished_gradients" in names:
        return "after it"
    if "rank_votes.py" in files:
        return "before the reduction"
    if "backward" in names:
        return "backward"
    if "_own_gradients" in names:
        return "forward"
    return "copies"


class Branches(nn.Module):
    """Of four layers one is used, another one in each call; which one first depends on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.turn = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of the layers."""
        found: torch.Tensor = self.layers[self.turn % 4](x)
        return found


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(incidents: int, seed: int) -> None:
    """One rank; the first prints what happened as JSON."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_WAIT))
    rank = dist.get_rank()
    torch.manual_seed(seed)
    branches = Branches(rank)
    inner = nn.Sequential(Counted(), nn.Linear(6, 10), branches, nn.Dropout(0.1), nn.Tanh(), nn.Linear(10, 3))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chance = random.Random(1000 * seed + rank)
    draws = torch.Generator().manual_seed(1000 * seed + rank)
    options: dict[str, Any] = {"clip_norm": 1.0, "patience": 3, "vote_seconds": _WAIT}
    places: Counter[str] = Counter()
    steps, total, equal, seen, began = 0, 0, True, 100, time.perf_counter()
    gc.freeze()
    with vramfit.survive(model, optimizer, loss=_loss, **options) as survivor:
        while total < incidents:
            for _ in range(_BETWEEN):
                batch = (torch.randn(4, 6, generator=draws), torch.randn(4, 3, generator=draws))
                branches.turn += 1
                at = (chance.randrange(seen) for _ in range(chance.choice((0, 1, 2))))
                with (faults := PlacedFaults(places, *at)):
                    survivor.step(batch)
                if not faults.raised:
                    seen = faults.seen  # of a step as it is now, in micro-batches perhaps
            steps += _BETWEEN
            counts = torch.tensor([places[one] for one in PLACES])
            dist.all_reduce(counts)
            total = int(counts.sum())
            equal &= _equal(inner, optimizer) and survivor.steps == steps
    if rank == 0:
        told = dict(zip(PLACES, counts.tolist(), strict=True))
        seconds = time.perf_counter() - began
        kinds = Counter(f"{event.kind} {event.rung.value}" for event in survivor.events)
        print(
            json.dumps(
                {"steps": steps, "places": told, "equal": equal, "seconds": seconds, "events": dict(kinds)}
            )
        )
    dist.destroy_process_group()


def _equal(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all ranks have the same, bit for bit; on all of them."""
    states = [value for known in optimizer.state.values() for value in known.values()]
    tensors = [one for one in (*model.state_dict().values(), *states) if isinstance(one, torch.Tensor)]
    mine = torch.cat([one.detach().flatten().double() for one in tensors])
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return bool(torch.equal(lowest, highest))


def group(ranks: int, incidents: int, seed: int) -> dict[str, Any]:
    """Run a group to its end: what the first rank told.

    Raises:
        RuntimeError: a rank has ended with an error.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--incidents", str(incidents), "--seed", str(seed), "--inside"]
    started = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(err for _, err in ends))
    found: dict[str, Any] = json.loads(ends[0][0].splitlines()[-1])
    return found


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--incidents", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help="a rank of a group (the benchmark's own)")
    given = parser.parse_args()
    if given.inside:
        train(given.incidents, given.seed)
        return
    print("| ranks | steps | incidents | " + " | ".join(PLACES) + " | ranks equal | seconds |")
    print("|---:" * (len(PLACES) + 5) + "|")
    for ranks in given.ranks:
        found = group(ranks, given.incidents, given.seed)
        places = " | ".join(str(found["places"][one]) for one in PLACES)
        total = sum(found["places"].values())
        equal = "yes" if found["equal"] else "NO"
        print(
            f"| {ranks} | {found['steps']} | {total} | {places} | {equal} | {found['seconds']:.0f} |",
            flush=True,
        )
        print("events of the first rank:", json.dumps(found["events"]), file=sys.stderr)


if __name__ == "__main__":
    main()
