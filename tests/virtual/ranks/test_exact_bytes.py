"""Memory of one rank by arithmetic on torch's sources: on the first rank, one in the middle and the last."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vramfit.torch_internals.releases import at_least
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
WORLD = 64
RANKS = (0, 37, 63)

pytestmark = [
    pytest.mark.usefixtures("kept_workspaces"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
]


@pytest.fixture(scope="module", params=RANKS)
def rank(request: pytest.FixtureRequest) -> Iterator[VirtualGPU]:
    """One rank of 64 on eight nodes, with its groups made."""
    with VirtualGPU("H100", rank=request.param, world_size=WORLD, alloc_conf="") as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(request.param % 8)
        yield gpu


@pytest.fixture(autouse=True)
def afresh(rank: VirtualGPU) -> None:
    """Begin with an empty cache: a block that fits roughly would be handed out whole, and count as a whole."""
    for _ in range(300):  # autograd's threads let go of a graph a little after the backward pass
        gc.collect()
        if not held():
            break
        time.sleep(0.01)
    torch.cuda.empty_cache()


def held(since: int = 0) -> int:
    """Bytes of tensors over what was held before, without cuBLAS's workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated() - since


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


@pytest.mark.parametrize("view", [False, True], ids=["beside", "views"])
def test_ddp_holds_parameters_gradients_and_buckets(rank: VirtualGPU, view: bool) -> None:
    before = held()
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(12)]).cuda()
    size = 12 * MIB
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=4)
    given = torch.zeros(8, 512, device="cuda")
    assert held(before) == 2 * size + given.nbytes  # parameters, and buckets of as much
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(given).sum().backward()
    assert held(before) == (2 if view else 3) * size + given.nbytes
    with wrapped.no_sync():
        wrapped(given).sum().backward()
    assert held(before) == (2 if view else 3) * size + given.nbytes


def test_zero_keeps_the_states_of_its_own_parameters(rank: VirtualGPU) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(WORLD)]).cuda()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW)
    before = held()
    wrapped(torch.zeros(2, 256, device="cuda")).sum().backward()
    gradients = held()
    optimizer.step()
    # Two moments of one of the 64 layers, which zero_redundancy_optimizer.py shares out by size.
    assert held(gradients) == 2 * 256 * 256 * 4
    assert gradients == before


def test_fsdp2_keeps_the_previous_gather_buffer_through_the_copy_out(rank: VirtualGPU) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before = held()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    shard = 8 * 4096 * 4096 * 4 // WORLD
    assert held(before) == shard
    given = torch.ones(64, 4096, device="cuda", dtype=torch.bfloat16)
    base = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(given)
    base = torch.cuda.memory_allocated()  # with a workspace of cuBLAS
    torch.cuda.reset_peak_memory_stats()
    out = model(given)
    # A layer's parameters in bfloat16 and two gather buffers of as much, 32 MiB each: that of the layer itself stays
    # until it is copied out (_fsdp_param_group.py, _fsdp_collectives.py), that of the next comes meanwhile. Outputs of
    # seven layers are kept. Since 2.15 the buffer before goes once a layer is gathered
    # (``release_all_gather_state_for_comm_reuse``): the most are those two, and the part that this rank gathers from.
    most = 2 * 32 * MIB + 32 * MIB // WORLD if at_least(2, 15) else 3 * 32 * MIB
    # The copy-out puts a table of 1,064 bytes on the card (aten/src/ATen/native/cuda/TensorShape.cu).
    assert torch.cuda.max_memory_allocated() - base == most + 7 * given.nbytes + 1536
    torch.cuda.reset_peak_memory_stats()
    out.float().sum().backward()
    del out
    assert held(before) == 2 * shard + given.nbytes  # shards and their gradients in float32


def test_tensor_parallel_shards_are_parts_of_the_weights(rank: VirtualGPU) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
    before = held()
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 1024, bias=False))
    parallelize_module(model.cuda(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    gc.collect()
    assert held(before) == 2 * 1024 * 4096 * 4 // 8
    given = torch.zeros(16, 1024, device="cuda")
    out = model(given)
    # Saved: the input, what the ReLU gives in 512 columns of the rank; and the reduced output.
    assert held(before) == 2 * 1024 * 4096 * 4 // 8 + given.nbytes + 16 * 512 * 4 + out.nbytes


@pytest.mark.parametrize("place", ["replicas", "host"])
def test_fsdp2_in_a_hybrid_mesh_and_on_the_host(rank: VirtualGPU, place: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    before = held()
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    options = {
        "replicas": {"mesh": init_device_mesh("cuda", (16, 4), mesh_dim_names=("replicate", "shard"))},
        "host": {"offload_policy": CPUOffloadPolicy()},
    }[place]
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    shard = 4 * MIB // 4 if place == "replicas" else 0
    assert held(before) == shard
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(4, 512, device="cuda")).sum().backward()
        optimizer.step()
    assert held(before) == 3 * shard  # with gradients and momenta, of which the host has its own


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_fsdp1_pads_flat_parameters(rank: VirtualGPU, strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = {"device_mesh": init_device_mesh("cuda", (8, 8))} if strategy == "HYBRID_SHARD" else {}
    before = held()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(300, 504), nn.Linear(504, 300)) for _ in range(3)])
    elements = sum(parameter.numel() for parameter in model[0].parameters())
    ranks = {"NO_SHARD": 1, "HYBRID_SHARD": 8}.get(strategy, WORLD)
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
        **mesh,
    )
    # _flat_param.py: _get_shard divides a flat parameter into chunks of one size, the last padded.
    chunk = -(-elements // ranks)
    assert held(before) == 3 * rounded(4 * chunk)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(2):
        wrapped(torch.zeros(4, 300, device="cuda")).sum().backward()
        optimizer.step()
    number = dist.get_rank() % ranks
    filled = max(0, min(chunk, elements - number * chunk))
    assert sum(state["exp_avg"].nbytes for state in optimizer.state.values() if state) == 3 * 4 * filled
