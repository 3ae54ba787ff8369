"""Processes that a program starts: one runs here, more are refused by name."""

from __future__ import annotations

import multiprocessing
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vramfit.errors import UsageError
from vramfit.virtual.gpu import VirtualGPU

SEEN: list[tuple[int, int, str]] = []


def train(rank: int, world_size: int, port: str) -> None:
    """As PyTorch's DDP tutorial has it."""
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[rank])
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    SEEN.append((rank, dist.get_world_size(), str(next(model.parameters()).device)))


def leave(rank: int, code: int) -> None:
    sys.exit(code)


def fail(rank: int) -> None:
    raise ValueError("the program's own")


def test_the_one_process_of_a_spawn_runs_on_the_card(gpu: VirtualGPU) -> None:
    SEEN.clear()
    for _ in range(2):  # its group ends with it, so that the next one can make its own
        assert mp.spawn(train, args=(1, "29517"), nprocs=torch.cuda.device_count(), join=True) is None
    context = mp.start_processes(train, (1, "29517"), 1, False, start_method="spawn")
    assert context is not None and context.join() is True and context.pids() == []
    assert SEEN == [(0, 1, "cuda:0")] * 3 and not dist.is_initialized()
    assert torch.cuda.max_memory_allocated() > 64 * 64 * 4


def test_how_it_ends_is_how_a_process_ends(gpu: VirtualGPU) -> None:
    mp.spawn(leave, args=(0,))
    with pytest.raises(SystemExit):
        mp.spawn(leave, args=(3,))
    with pytest.raises(ValueError, match="the program's own"):
        mp.spawn(fail)


def test_more_processes_are_refused_in_plain_words(gpu: VirtualGPU) -> None:
    with pytest.raises(UsageError, match="start 2 processes, and a virtual run is one process"):
        mp.spawn(train, args=(2, "29517"), nprocs=2)
    model = nn.Linear(2, 2)
    for given in ((0, model), (0, {"model": [model.cuda()]}), (torch.zeros(2, device="cuda"),)):
        process = multiprocessing.get_context("spawn").Process(target=fail, args=given)
        with pytest.raises(UsageError, match="hands a model or tensors of the virtual GPU to a process"):
            process.start()


def test_a_spawn_of_all_ranks_runs_this_one() -> None:
    SEEN.clear()
    with VirtualGPU("RTX 4090", alloc_conf="", rank=2, world_size=3):
        mp.spawn(train, args=(3, "29517"), nprocs=torch.cuda.device_count())
        with pytest.raises(UsageError, match="start 4 processes, and the virtual run is rank 2 of 3"):
            mp.spawn(train, args=(4, "29517"), nprocs=4)
    assert SEEN == [(2, 3, "cuda:2")]


def test_spawning_is_torch_s_own_afterwards() -> None:
    before = mp.spawn, mp.start_processes, multiprocessing.process.BaseProcess.start
    with VirtualGPU("RTX 4090"):
        assert mp.spawn is not before[0]
    assert (mp.spawn, mp.start_processes, multiprocessing.process.BaseProcess.start) == before
