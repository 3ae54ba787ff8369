"""A store of tiers under trouble: threads, late and lost copies, and processes that are killed.

    python benchmarks/survive/tiers.py [--operations 10000] [--seeds 10] [--kills 100] [--folder /dev/shm]

Each seed is 10,000 random operations (put, get, write, read, delete, prefetch, hints, evictions) of four threads on 24
tensors, whose memory is twice the device's budget, beside a dictionary; copies come up to half a millisecond late and
2 % of them fail. Budgets are checked after each operation, by the books and by what is alive. For a kill a process and
its child work on stores in one folder until both get SIGKILL; the next store must find the folder clean, work, and
leave it empty.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.tiers.trouble import kill_both, random_work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    kill(given.folder, given.kills)
    if given.seeds:
        print(
            f"{'tier':<10}{'seed':>5}{'done':>8}{'lost':>6}{'full':>6}{'woken':>7}{'ahead':>7}{'down':>7}{'spared':>7}{'s':>7}"
        )
    for allocation in ("separate", "pool"):
        for seed in range(given.seeds):
            work_at(given.folder, seed, given.operations, allocation)


def kill(folder: Path, count: int) -> None:
    """So many kills, each followed by a start; forks before there are threads."""
    if not count:
        return
    chance, began = random.Random(0), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        left = [kill_both(Path(own), chance) for _ in range(count)]
    seconds = time.perf_counter() - began
    print(f"{count} kills: each left {min(left)} to {max(left)} files, the next start none ({seconds:.0f} s)")


def work_at(folder: Path, seed: int, operations: int, allocation: str) -> None:
    """One seed's line."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        work = random_work(Path(own), seed, operations, pool=allocation == "pool")
    traffic, seconds = work.store.traffic, time.perf_counter() - began
    print(
        f"{allocation:<10}{seed:>5}{work.done:>8}{work.lost:>6}{work.full:>6}{traffic.woken:>7}{traffic.awaited:>7}"
        f"{traffic.sent_down:>7}{traffic.spared:>7}{seconds:>7.1f}"
    )


if __name__ == "__main__":
    main()
