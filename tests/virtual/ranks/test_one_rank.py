"""One process of a distributed program: groups of one rank on a virtual card."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vramfit.errors import UsageError
from vramfit.torch_internals import build_shim
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29511",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch.distributed.optim uses it
    pytest.mark.filterwarnings("ignore:barrier\\(\\). using the device:UserWarning"),
]


@pytest.fixture(scope="module")
def card() -> Iterator[VirtualGPU]:
    """One virtual card for all tests here: most of them look at values."""
    build_shim.install()
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=256 << 20) as active:
        yield active


@pytest.fixture
def alone(card: VirtualGPU, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGPU]:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    yield card
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl", None])
def test_every_collective_of_one_rank_copies_what_goes_in(alone: VirtualGPU, backend: str | None) -> None:
    dist.init_process_group(backend)
    given = torch.arange(4.0, device="cuda")

    def into(collect: Callable[[torch.Tensor], object]) -> list[float]:
        out = torch.empty(4, device="cuda")
        collect(out)
        return out.tolist()

    dist.all_reduce(given)
    work = dist.all_reduce(given, async_op=True)
    work.wait()
    dist.broadcast(given, 0)
    dist.reduce(given, 0)
    dist.barrier()
    expected = [0.0, 1.0, 2.0, 3.0]
    assert given.tolist() == expected
    assert into(lambda out: dist.all_gather([out], given)) == expected
    assert into(lambda out: dist.all_gather_into_tensor(out, given)) == expected
    assert into(lambda out: dist.reduce_scatter(out, [given])) == expected
    assert into(lambda out: dist.reduce_scatter_tensor(out, given)) == expected
    assert into(lambda out: dist.all_to_all_single(out, given)) == expected
    assert into(lambda out: dist.all_to_all([out], [given])) == expected
    assert into(lambda out: dist.gather(given, [out], 0)) == expected
    assert into(lambda out: dist.scatter(out, [given], 0)) == expected
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_objects_come_back_whatever_their_size(alone: VirtualGPU) -> None:
    dist.init_process_group("nccl")
    large = {"vocabulary": [f"token {number}" for number in range(100_000)]}
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, large)
    collected: list[object] = [None]
    dist.gather_object(large, collected)
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [large], 0)
    kept = [large, 5]
    dist.broadcast_object_list(kept, 0)
    assert gathered == collected == scattered == [large]
    assert kept == [large, 5]


def test_gloo_reduces_tensors_of_the_host_for_real_and_nccl_refuses_them(alone: VirtualGPU) -> None:
    dist.init_process_group("nccl")
    host = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(host)
    group = dist.new_group([0], backend="gloo")
    dist.all_reduce(host, group=group)
    dist.monitored_barrier(group)
    assert host.tolist() == [2.0] * 3


def test_nothing_can_be_sent_to_another_rank(alone: VirtualGPU) -> None:
    dist.init_process_group("nccl")
    tensor = torch.ones(2, device="cuda")
    with pytest.raises(ValueError, match="rank"):
        dist.send(tensor, 1)
    with pytest.raises(ValueError, match="rank"):
        dist.recv(tensor)


def test_a_gathered_list_is_laid_into_one_block_first(alone: VirtualGPU) -> None:
    # ProcessGroupNCCL.cpp: allgather gathers into newLikeFlat(outputs), reduce_scatter from newLikeFlat(inputs).
    dist.init_process_group("nccl")
    given, out = (torch.zeros(MIB, device="cuda") for _ in range(2))

    def extra(collective: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        collective()
        assert torch.cuda.memory_allocated() == before
        return torch.cuda.max_memory_allocated() - before

    assert extra(lambda: dist.all_gather([out], given)) == given.nbytes
    assert extra(lambda: dist.reduce_scatter(out, [given])) == given.nbytes
    assert extra(lambda: dist.all_gather_into_tensor(out, given)) == 0
    assert extra(lambda: dist.reduce_scatter_tensor(out, given)) == 0
    assert extra(lambda: dist.all_reduce(given)) == 0


@pytest.mark.parametrize("view", [False, True])
def test_ddp_holds_its_buckets_beside_the_gradients_or_in_their_place(alone: VirtualGPU, view: bool) -> None:
    dist.init_process_group("nccl")
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)]).cuda()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    before = torch.cuda.memory_allocated()
    wrapped = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=view)
    assert torch.cuda.memory_allocated() - before == nbytes  # torch starts with all gradients in one bucket

    buckets: dict[int, int] = {}

    def watch(state, bucket):  # torch compares annotations with its classes
        buckets[bucket.index()] = bucket.buffer().nbytes
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, watch)
    given = torch.zeros(8, 1024, device="cuda")
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(given).sum().backward()
    assert (
        len(buckets) > 1
    )  # the first backward pass told in which order gradients come: 1 MiB, then 25 MiB each
    assert sum(buckets.values()) == nbytes
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(storages) == (len(buckets) if view else 12)
    wrapped.zero_grad(set_to_none=False)
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated() - before - given.nbytes
    assert held == (nbytes if view else 2 * nbytes)


def test_zero_fsdp2_and_synchronised_batch_norm_train(alone: VirtualGPU) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(plain))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(2):
        model(torch.zeros(2, 3, 8, 8, device="cuda")).sum().backward()
        optimizer.step()
    optimizer.consolidate_state_dict()
    assert len(optimizer.state_dict()["state"]) == 4

    layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)])
    mesh = init_device_mesh("cuda", (1,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    layers(torch.zeros(2, 1024, device="cuda")).sum().backward()
    norm = nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    assert norm.shape == ()
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize("address", ["env://", "tcp://localhost:29512", "file://{folder}/store"])
def test_no_port_is_opened_and_no_file_made(alone: VirtualGPU, tmp_path: Path, address: str) -> None:
    ranks = {} if address == "env://" else {"rank": 0, "world_size": 1}
    dist.init_process_group("nccl", init_method=address.format(folder=tmp_path), **ranks)
    assert not list(tmp_path.iterdir())
    for port in (29511, 29512):
        with socket.socket() as probe:
            assert probe.connect_ex(("localhost", port)) != 0


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_more_ranks_are_refused_with_what_is_possible(
    alone: VirtualGPU, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UsageError, match=r"rank 3 of 8.*WORLD_SIZE=1"):
        dist.init_process_group(backend)
    with pytest.raises(UsageError, match="rank 0 of 2"):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is :FutureWarning")  # since 2.14, and on Python 3.14
def test_scripted_functions_know_the_replaced_tensor_constructor(card: VirtualGPU) -> None:
    def constant(scale: float) -> torch.Tensor:
        return torch.tensor(scale)

    # torch.distributed.optim scripts such functions when it is imported.
    assert torch.jit.script(constant)(3.0).item() == 3.0


@pytest.mark.parametrize("sharded", ["fully_shard", "FSDP"])
@pytest.mark.usefixtures("no_garbage")
def test_a_model_that_is_still_on_the_host_is_sharded_onto_the_card(alone: VirtualGPU, sharded: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    before = torch.cuda.memory_allocated()
    if sharded == "FSDP":
        with pytest.warns(UserWarning, match="NO_SHARD"):
            model = FullyShardedDataParallel(model, device_id=0)
    else:
        fully_shard(model)
    # FullyShardedDataParallel lays all parameters into one tensor, fully_shard lets each be: no copy stays behind
    held = torch.cuda.memory_allocated() - before
    assert nbytes <= held <= nbytes + 4 * 512
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert sum(parameter.grad.nbytes for parameter in model.parameters()) == nbytes
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(t.nbytes for t in moments) == 2 * nbytes


def test_torchrun_with_one_process_runs_its_script_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.virtual.ranks.one_process import alone

    monkeypatch.setattr(os, "environ", dict(os.environ))
    arguments = ["--nproc-per-node", "gpu", "--master-port", "29600", "train.py", "--lr", "1"]
    assert alone(["-m", "torch.distributed.run", *arguments], 1) == ["train.py", "--lr", "1"]
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_PORT": "29600",
    }
    assert alone(["/usr/bin/torchrun", "-m", "package.train", "x"], 1) == ["-m", "package.train", "x"]
    assert alone(["train.py", "torchrun"], 1) == ["train.py", "torchrun"]
    for more in (["--nproc-per-node", "2"], ["--nnodes", "1:4"], ["--nproc-per-node", "auto"]):
        with pytest.raises(UsageError, match="one process"):
            alone(["-m", "torch.distributed.run", *more, "train.py"], 2)


def test_variables_that_the_user_sets_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.virtual.ranks.one_process import alone

    for given, found in (
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29700"}, ("1", "0", "29700", "127.0.0.1")),
        ({}, (None, None, None, None)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (None, None, None, None)),
    ):
        monkeypatch.setattr(os, "environ", dict(given))
        assert alone(["train.py"], 1) == ["train.py"]
        names = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
        assert tuple(os.environ.get(name) for name in names) == found
