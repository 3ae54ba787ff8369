"""Checkpoints of several ranks: each writes and reads its own part, at once or beside the program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vramfit.virtual.gpu import VirtualGPU

WORLD, WIDTH = 4, 256
PART = WIDTH * WIDTH * 4 // WORLD

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def written(folder: Path) -> int:
    """Bytes of a checkpoint's data: each tensor and each number in a file of torch.save's within it."""
    return sum(file.stat().st_size for file in folder.glob("*.distcp"))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_saves_and_loads_its_part(tmp_path: Path, rank: int) -> None:
    with VirtualGPU("H100", rank=rank, world_size=WORLD, alloc_conf=""):
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(rank)
        model, optimizer = trained()
        before = torch.cuda.memory_allocated()
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save({**states, "step": 3}, checkpoint_id=tmp_path / "now")
        found = {**states, "step": 0}
        dcp.load(found, checkpoint_id=tmp_path / "now")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        later = dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "beside")
        later.result()
        assert found["step"] == 3
        del states, found
        assert torch.cuda.memory_allocated() == before
        # Parameters and momenta of this rank alone, and numbers of a few bytes; the parameters again.
        assert 2 * PART <= written(tmp_path / "now") < 3 * PART
        assert PART <= written(tmp_path / "beside") < 2 * PART
        assert (tmp_path / "now" / ".metadata").is_file()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_states_of_all_ranks_are_gathered_on_one() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with VirtualGPU("H100", rank=0, world_size=WORLD, alloc_conf=""):
        dist.init_process_group("nccl")
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(WORLD)]).cuda()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        before = torch.cuda.memory_allocated()
        optimizer.consolidate_state_dict(to=0)
        states = optimizer.state_dict()["state"]
        assert [state["momentum_buffer"].shape for state in states.values()] == [(WIDTH, WIDTH)] * WORLD
        assert torch.cuda.memory_allocated() == before


def no_room(*_: object) -> None:
    raise OSError("no room")


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("world", [1, 4])
def test_a_real_checkpoint_of_the_name_stays_where_files_are_written_for_real(
    tmp_path: Path, world: int
) -> None:
    dcp.save({"model": {"weight": torch.arange(8.0)}}, checkpoint_id=tmp_path, no_dist=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with VirtualGPU("H100", rank=world - 1, world_size=world, alloc_conf="", writes="real") as gpu:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        model = {"weight": torch.ones(16, device="cuda")}
        dcp.save({"model": model}, checkpoint_id=tmp_path)
        found = {"model": {"weight": torch.zeros(16, device="cuda")}}
        dcp.load(found, checkpoint_id=tmp_path)
        dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "host", no_dist=True)
        writer = dcp.FileSystemWriter(tmp_path)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(dcp.CheckpointException) as failing:
            patch.setattr(writer.fs, "create_stream", no_room)
            dcp.save({"model": model}, storage_writer=writer, no_dist=True)
        dist.destroy_process_group()
    assert {warning.code for warning in gpu.run.warnings} >= {"save-skipped"}
    assert (writer.path, failing.value.failures[0][0].args) == (tmp_path, ("no room",))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    real = {"model": {"weight": torch.zeros(8)}}
    dcp.load(real, checkpoint_id=tmp_path, no_dist=True)
    assert real["model"]["weight"].tolist() == list(range(8))
    host = {"model": {"weight": torch.zeros(2)}}
    dcp.load(host, checkpoint_id=tmp_path / "host", no_dist=True)
    assert host["model"]["weight"].tolist() == [1.0, 1.0]
