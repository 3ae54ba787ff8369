"""Ranks side by side: how many at once, who is started for whom, and programs whose ranks differ."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.synthetic import oom_run, quick_run
from vramfit.errors import UsageError
from vramfit.files import Backend, Writes
from vramfit.gpus import find_gpu
from vramfit.launch import nursery as nursery_module
from vramfit.options.run_options import RunOptions
from vramfit.trace import PROCESS_GROUPS, Run
from vramfit.virtual.ranks.made_groups import MadeGroups
from vramfit.virtual.virtual_run import VirtualSettings
from vramfit.virtual.worlds import world_run
from vramfit.virtual.worlds.rank_choice import rank_choice, standings
from vramfit.virtual.worlds.world_run import World, WorldRun, kinds_of, places_of, run_world

H100 = RunOptions(gpu=find_gpu("H100"), alloc_conf="")
QUICK = quick_run()


def run(script: Path, size: int, ranks: str = "auto") -> WorldRun:
    return run_world(lambda _: [str(script)], H100, World(size=size), rank_choice(ranks, size))


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


class Pretender:
    """Takes the place of the child interpreters: ranks last a moment, and take what `sized` says."""

    def __init__(self, sized: Callable[[int], Run]) -> None:
        self.order: list[int] = []
        self.most = 0
        self._now = 0
        self._sized = sized
        self._lock = threading.Lock()

    def __call__(self, command: list[str], options: RunOptions, settings: VirtualSettings) -> Run:
        place = settings.place
        assert place is not None
        with self._lock:
            self.order.append(place.rank)
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.02)
        with self._lock:
            self._now -= 1
        return self._sized(place.rank)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Run]], Pretender]:
    def made(sized: Callable[[int], Run]) -> Pretender:
        found = Pretender(sized)
        monkeypatch.setattr(world_run, "run_in_child", found)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
        return found

    return made


def test_as_many_at_once_as_there_are_cores(pretend: Callable[..., Pretender]) -> None:
    made = pretend(lambda _: QUICK)
    found = run_world(lambda _: ["t.py"], H100, World(size=16), rank_choice("all", 16))
    assert sorted(made.order) == sorted(found.runs) == list(range(16))
    assert made.most == 3


def test_auto_looks_for_the_rank_where_kinds_change_and_ends(pretend: Callable[..., Pretender]) -> None:
    pretend(lambda rank: replace(QUICK, host_pinned_peak_bytes=int(rank < 3)))
    found = run_world(lambda _: ["t.py"], H100, World(size=8))
    assert {2, 3} <= set(found.runs) and len(found.runs) == 5
    pretend(lambda rank: replace(QUICK, host_pinned_peak_bytes=rank))
    assert len(run_world(lambda _: ["t.py"], H100, World(size=8)).runs) == 8
    found = run_world(lambda _: ["t.py"], H100, World(size=1024))
    assert len(found.runs) == 9  # 1016 too: the card of its node is that of rank 0
    assert not any(one.alike for one in standings(kinds_of(found.runs, found.world), int, range(1024)))


def mesh(*sizes: int) -> list[tuple[int, ...]]:
    """The groups of a mesh of ranks: those of each dimension."""
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    rows = [np.moveaxis(ranks, dim, -1).reshape(-1, size) for dim, size in enumerate(sizes)]
    return [tuple(group) for groups in rows for group in groups.tolist()]


def of_chunks(rows: int, size: int) -> Callable[[int], int]:
    """The rows of each rank, as `torch.chunk` cuts them."""
    whole = -(-rows // size)
    return lambda rank: max(0, min(whole, rows - rank * whole))


@pytest.mark.parametrize(
    ("size", "groups", "kind", "ran"),
    [
        # HYBRID_SHARD: each of a node's eight holds other slices, and the nodes are alike.
        pytest.param(16, mesh(2, 8), lambda rank: rank % 8, 10, id="hybrid shard"),
        pytest.param(1024, mesh(128, 8), lambda rank: rank % 8, 10, id="hybrid shard of many nodes"),
        pytest.param(1024, mesh(128, 8), lambda rank: of_chunks(29, 8)(rank % 8), 7, id="uneven hybrid"),
        pytest.param(16, mesh(2, 4, 2), lambda rank: rank // 2 % 4, 8, id="hybrid shard and tensor parallel"),
        pytest.param(512, mesh(64, 8), lambda rank: of_chunks(128, 64)(rank // 8), 2, id="even shards"),
        pytest.param(512, mesh(64, 8), lambda rank: of_chunks(127, 64)(rank // 8), 10, id="uneven shards"),
        pytest.param(64, mesh(8, 8), lambda rank: of_chunks(31, 8)(rank % 8), 7, id="uneven tensor parallel"),
        pytest.param(64, mesh(4, 8, 2), lambda rank: rank // 16, 7, id="stages"),
        pytest.param(
            64,
            mesh(4, 8, 2),
            lambda rank: (rank // 16, rank % 2),
            11,
            id="stages of uneven tensor parallelism",
        ),
        pytest.param(16, mesh(4, 4), lambda rank: rank % 4 == 0, 5, id="experts"),
        pytest.param(32, [], lambda rank: rank % 8 == 0, 6, id="one that works for its node"),
        pytest.param(1024, [], of_chunks(11008, 1024), 9, id="uneven shards of the world"),
        pytest.param(16, [], lambda rank: rank == 0, 6, id="one that works for all"),
    ],
)
def test_no_rank_is_told_of_as_another_kind(
    pretend: Callable[..., Pretender],
    size: int,
    groups: list[tuple[int, ...]],
    kind: Callable[[int], object],
    ran: int,
) -> None:
    made, numbers = MadeGroups(), list(dict.fromkeys(map(kind, range(size))))
    for group in groups:
        made.add(group)
    trace = replace(QUICK.trace, meta={**QUICK.trace.meta, PROCESS_GROUPS: made.text})
    pretend(lambda rank: replace(QUICK, trace=trace, host_pinned_peak_bytes=numbers.index(kind(rank))))
    found = run_world(lambda _: ["t.py"], H100, World(size=size))
    kinds = kinds_of(found.runs, found.world)
    told = standings(kinds, int, places_of(found.runs, found.world).order(kinds))
    assert sum(one.last - one.first + 1 for one in told) + len(kinds) == size
    for one in told:
        if one.alike:
            assert {kind(rank) for rank in range(one.first, one.last + 1)} == {kind(one.rank)}
    assert len(found.runs) == ran


def test_no_rank_is_started_after_one_that_failed(pretend: Callable[..., Pretender]) -> None:
    made = pretend(lambda rank: replace(QUICK, exit_code=int(rank == 1)))
    found = run_world(lambda _: ["t.py"], H100, World(size=64), rank_choice("all", 64))
    assert found.runs[1].exit_code == 1
    assert len(made.order) < 8
    ran_out = pretend(lambda _: oom_run())
    run_world(lambda _: ["t.py"], H100, World(size=8), rank_choice("all", 8))
    assert len(ran_out.order) == 8  # who runs out on one rank may want to know of all


def test_what_a_rank_raises_is_raised(pretend: Callable[..., Pretender]) -> None:
    def refused(rank: int) -> Run:
        raise UsageError(f"not rank {rank}", "")

    pretend(refused)
    with pytest.raises(UsageError, match="not rank"):
        run_world(lambda _: ["t.py"], H100, World(size=2))


def test_worlds_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="12 ranks cannot be divided among nodes of 8"):
        World(size=12)
    with pytest.raises(UsageError, match="9 ranks on a node are more than the 8 cards"):
        World(size=18, per_node=9)
    assert World(size=12, per_node=4).nodes == 3
    assert World(size=3).nodes == 1


STAGES = """
import os, torch, torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
rows = [2 << 20]
if rank:
    dist.recv_object_list(rows, src=rank - 1)
kept = torch.empty(rows[0], dtype=torch.uint8, device="cuda")
if rank < size - 1:
    dist.send_object_list([2 * rows[0]], dst=rank + 1)
"""


def test_stages_that_wait_for_one_another_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)  # those that wait are no load
    found = run(written(tmp_path, STAGES), 3, "2")
    assert [(rank, one.exit_code) for rank, one in found.runs.items()] == [(0, 0), (1, 0), (2, 0)]
    assert found.waited_for == (0, 1)
    used = [[d.index for d in one.devices if d.context_bytes] for one in found.runs.values()]
    assert used == [[0], [1], [2]]
    assert [one.devices[rank].peak_allocated_bytes >> 20 for rank, one in found.runs.items()] == [2, 4, 8]


SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size, mebibytes):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    kept = torch.empty((mebibytes + 2 * rank) << 20, dtype=torch.uint8, device="cuda")
    dist.all_reduce(kept)

if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(), 20), nprocs=torch.cuda.device_count())
"""


def test_the_worker_of_a_spawn_is_that_of_the_rank(tmp_path: Path) -> None:
    found = run(written(tmp_path, SPAWN), 4, "3")
    peaks = {rank: one.devices[rank].peak_allocated_bytes >> 20 for rank, one in found.runs.items()}
    assert peaks == {3: 26}


WAITS = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank():
    received = [None]
    dist.recv_object_list(received, src=0)
"""


def test_a_rank_that_nobody_answers_says_for_whom_it_waits(tmp_path: Path) -> None:
    found = run(written(tmp_path, WAITS), 2)
    assert found.runs[0].exit_code == 0
    assert (found.runs[1].error or "").startswith(
        "PeerEnded: rank 1 of 2 waits for rank 0, which has ended without sending what it waits for"
    )


NEVER = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
import torch
torch.ones(4, device="cuda")
"""


def test_a_program_that_never_joins_is_told_and_may_hide_other_cards(tmp_path: Path) -> None:
    found = run(written(tmp_path, NEVER), 2, "1")
    assert [one.code for one in found.runs[1].warnings] == ["no-process-group"]
    assert [device.index for device in found.runs[1].devices] == [0]


RANKED = """
import os, random, sys, numpy, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256 * (1 + rank), 512).to(device))
model(torch.ones(8, 256 * (1 + rank), device=device)).sum().backward()
seen = [sorted(os.environ.items()), sys.argv, sys.path, sys.flags, *sorted(sys.modules)]
Path(f"{rank}.txt").write_text("\\n".join(map(str, seen)))
Path(f"{rank}.seed").write_text(str(torch.initial_seed()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all ranks start cold")
def test_ranks_that_are_forks_do_what_those_of_new_interpreters_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same traces to the byte, and the same modules, variables and arguments for the program."""
    script, found, seen, forked = written(tmp_path, RANKED), [], [], []
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    options = replace(H100, writes=Writes.REAL, cwd=str(tmp_path))
    for opened in (world_run._nursery, lambda *_: contextlib.nullcontext()):
        with opened(options, VirtualSettings()) as nursery:
            monkeypatch.setattr(world_run, "_nursery", lambda *_: contextlib.nullcontext())
            monkeypatch.setattr("vramfit.launch.interrupts.start", nursery_module.start)
            ran = run_world(lambda _: [str(script)], options, World(size=2), rank_choice("all", 2))
            forked.append(0 if nursery is None else nursery.forked)
        traces = []
        for rank, one in ran.runs.items():
            one.trace.save(tmp_path / "rank.vft")
            assert one.exit_code == 0
            traces.append(
                (rank, (tmp_path / "rank.vft").read_bytes(), replace(one, trace=QUICK.trace).devices)
            )
        found.append(traces)
        texts = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
        seen.append([text.replace("vramfit.launch.nursery.becoming\n", "") for text in texts])
        seeds = {(tmp_path / f"{rank}.seed").read_text() for rank in range(2)}
        assert len(seeds) == 2  # drawn by each process for itself
    assert forked == [2, 0]
    assert found[0] == found[1]
    for warm, cold in zip(*seen, strict=True):
        assert [line for line in warm.splitlines() if line not in cold.splitlines()] == []


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"host_memory": True}, VirtualSettings()),
        ({}, VirtualSettings(backend=Backend.PATCHES)),
        ({"cudnn": "."}, VirtualSettings()),
    ],
    ids=["its memory is metered", "files are protected by patches", "cuDNN is asked"],
)
def test_ranks_are_no_forks_where_that_would_change_them(
    changes: dict[str, Any], settings: VirtualSettings
) -> None:
    with world_run._nursery(replace(H100, **changes), settings) as nursery:
        assert nursery is None


def test_ranks_may_run_on_an_executor(pretend: Callable[..., Pretender]) -> None:
    made = pretend(lambda _: QUICK)
    with ThreadPoolExecutor(2) as executor:
        found = run_world(lambda _: ["t.py"], H100, World(size=6), rank_choice("all", 6), executor=executor)
    assert list(found.runs) == list(range(6))
    assert made.most == 2
