"""What a rank broadcasts to ranks that run beside it: objects and few whole numbers reach them; and where none runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vramfit.virtual.gpu import VirtualGPU

WORLD = 4


def program(rank: int) -> list[object]:
    """What scripts do in which the first rank decides; every rank gives what it knows afterwards."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    name: list[object] = ["run-5", 7] if rank == 0 else [None, None]
    dist.broadcast_object_list(name, src=0)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"part {one}" for one in range(WORLD)] if rank == 0 else None, src=0)
    size = torch.tensor([512, 3]) if rank == 0 else torch.zeros(2, dtype=torch.int64)
    size = size.cuda()
    dist.broadcast(size, 0)
    last = torch.tensor([rank], device="cuda")
    dist.broadcast(last, WORLD - 1)
    return [*name, *mine, *size.tolist(), last.item()]


def test_ranks_that_run_beside_the_root_know_what_it_tells(tmp_path: Path) -> None:
    found = {}
    for rank in (0, 3, 2):
        with VirtualGPU("H100", rank=rank, world_size=WORLD, mailbox=tmp_path, alloc_conf="") as gpu:
            found[rank] = program(rank)
        told = {warning.code for warning in gpu.run.warnings if "nccl" not in warning.code}
        # The last rank's number, for which the first does not wait: it is said that it is taken to equal this rank's.
        assert told == (set() if rank == 3 else {"sizes-of-other-ranks"})
    assert found == {rank: ["run-5", 7, f"part {rank}", 512, 3, rank] for rank in (0, 2, 3)}


def test_a_rank_alone_keeps_its_own_and_says_so() -> None:
    with VirtualGPU("H100", rank=3, world_size=WORLD, alloc_conf="") as gpu:
        assert program(3) == [None, None, None, 0, 0, 3]
    codes = [warning.code for warning in gpu.run.warnings]
    assert codes.count("object-from-other-rank") == 2 and codes.count("sizes-of-other-ranks") == 1


def test_a_rank_that_is_not_in_the_group_is_told_by_torch() -> None:
    with VirtualGPU("H100", rank=3, world_size=WORLD, alloc_conf=""):
        dist.init_process_group("nccl")
        kept: list[object] = [None]
        with pytest.warns(UserWarning, match="does not belong to"):
            dist.broadcast_object_list(kept, src=0, group=dist.new_group([0, 1]))
        assert kept == [None]
