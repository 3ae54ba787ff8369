"""How a program makes its process groups."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vramfit.trace import PROCESS_GROUPS, Category, EventKind
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.ranks.made_groups import MadeGroups, groups_in


def test_a_mesh_takes_the_card_of_its_rank_and_mpi_is_torchs_error() -> None:
    with VirtualGPU("H100", rank=13, world_size=16, alloc_conf="") as gpu:
        with pytest.raises(RuntimeError, match="doesn't have MPI built in"):
            dist.init_process_group("mpi")
        init_device_mesh("cuda", (16,))  # makes the group too, and nobody has chosen a card
        assert torch.cuda.current_device() == 5
        torch.empty(1 << 20, device="cuda")
    used = [device.index for device in gpu.run.devices if device.peak_allocated_bytes]
    assert used == [5]


def test_a_rank_may_hide_the_other_cards_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with VirtualGPU("H100", rank=3, world_size=4, alloc_conf="") as gpu:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        dist.init_process_group("nccl")
        torch.empty(1 << 20, device="cuda")
        assert torch.cuda.device_count() == 1
    assert gpu.peak_allocated_bytes == 4 << 20


@pytest.mark.parametrize("bound", [False, True], ids=["new groups", "split groups"])
def test_groups_are_noted_with_those_of_other_ranks(bound: bool) -> None:
    with VirtualGPU("H100", rank=5, world_size=16, alloc_conf="") as gpu:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 5) if bound else None)
        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        assert dist.get_process_group_ranks(mesh.get_group("replicate")) == [5, 13]
        dist.new_group([9, 3, 4])
        dist.new_group([7])
        dist.new_group()
    nodes = [tuple(range(8)), tuple(range(8, 16))]
    assert set(groups_in(str(gpu.trace.meta[PROCESS_GROUPS]))) == {
        *((rank, rank + 8) for rank in range(8)),
        *nodes,
        (3, 4, 9),
    }


def test_too_many_groups_are_not_noted() -> None:
    made = MadeGroups()
    for rank in range(2000):
        made.add((rank, rank + 1, rank + 3 + rank % 7))
    assert made.text == ""


def test_hybrid_shard_is_alike_on_ranks_of_the_same_place() -> None:
    """Shards are of equal size; of a node's ranks the first has a slice of one weight, the sixth of both and a bias."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def states(rank: int) -> tuple[list[int], object]:
        with VirtualGPU("H100", rank=rank, world_size=16, alloc_conf="") as gpu:
            dist.init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            model = FullyShardedDataParallel(
                torch.nn.Sequential(torch.nn.Linear(1000, 3000), torch.nn.Linear(3000, 500)),
                auto_wrap_policy=ModuleWrapPolicy([torch.nn.Sequential]),
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                device_id=torch.cuda.current_device(),
                use_orig_params=True,
            )
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.zeros(8, 1000, device="cuda")).sum().backward()
            optimizer.step()
        trace = gpu.trace
        kept = (trace.kind == EventKind.ALLOC) & (trace.category == Category.OPTIMIZER_STATE)
        return trace.size[kept].tolist(), trace.meta[PROCESS_GROUPS]

    found = {rank: states(rank) for rank in (0, 5, 13)}
    assert found[5] == found[13]
    assert (len(found[0][0]), len(found[5][0])) == (2, 6)
    assert found[0][1] == "0,1,8,8,2;0,8,2,1,8"
