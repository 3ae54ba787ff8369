"""What a rank holds for communication, has gathered and has gathered ahead, byte for byte at the fullest moment."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vramfit.analysis import timeline
from vramfit.torch_internals.releases import at_least
from vramfit.trace import PIPELINE_STAGES, Category
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
RANK, WORLD, CARD = 5, 8, 5
BUFFERS, UNSHARDED, PREFETCH = (
    Category.COMMUNICATION_BUFFERS,
    Category.UNSHARDED_PARAMETERS,
    Category.PREFETCH,
)
SHARED_OUT = (BUFFERS, UNSHARDED, PREFETCH)
GRADIENTS, PARAMETERS = Category.GRADIENTS, Category.PARAMETERS

pytestmark = [
    pytest.mark.usefixtures("kept_workspaces"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
]


@pytest.fixture(scope="module")
def gpu() -> Iterator[VirtualGPU]:
    """A rank of eight."""
    with VirtualGPU("H100", rank=RANK, world_size=WORLD, alloc_conf="") as gpu:
        dist.init_process_group("nccl")
        torch.cuda.set_device(CARD)
        yield gpu


@pytest.fixture(autouse=True)
def afresh(gpu: VirtualGPU) -> None:
    """Begin with an empty cache."""
    for _ in range(300):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        if not torch.cuda.memory_allocated():
            break
        time.sleep(0.01)
    torch.cuda.empty_cache()


def held(gpu: VirtualGPU) -> dict[Category, int]:
    """Bytes by category now, without those of none."""
    return fullest(gpu, lambda: None)


def fullest(gpu: VirtualGPU, run: Callable[[], object]) -> dict[Category, int]:
    """Bytes by category at the fullest moment while something runs; they are all that is allocated then."""
    gpu.mark("from here")
    start = len(gpu.trace) - 1
    kept = run()
    over = timeline(gpu.trace, CARD)
    at = start + int(over.allocated[start:].argmax())
    found = {kind: int(over.categories[kind][at]) for kind in Category if over.categories[kind][at]}
    assert sum(found.values()) == over.allocated[at]
    del kept
    return found


def layers(count: int, width: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False, **options) for _ in range(count)])


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


# -- DDP and ZeRO ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True], ids=["beside", "views"])
def test_the_buckets_of_ddp_are_those_that_torch_assigns(gpu: VirtualGPU, view: bool) -> None:
    model = layers(6, 301).cuda()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=1)
    given = torch.zeros(4, 301, device="cuda")
    size = 6 * rounded(301 * 301 * 4)
    # One bucket for the first backward pass, then buckets in the order in which gradients came (reducer.cpp).
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, MIB]
    later, _ = dist._compute_bucket_assignment_by_size([*model.parameters()][::-1], limits)
    assert [len(bucket) for bucket in later] == [3, 3]
    for buckets in ([6], [3, 3]):
        wrapped.zero_grad()
        wrapped(given).sum().backward()
        found = held(gpu)
        in_buckets = sum(rounded(count * 301 * 301 * 4) for count in buckets)
        if view:
            assert (found.get(BUFFERS, 0), found[GRADIENTS]) == (0, in_buckets)
        else:
            assert (found[BUFFERS], found[GRADIENTS]) == (in_buckets, size)
        assert found[PARAMETERS] == size
        assert UNSHARDED not in found


def test_what_a_hook_of_ddp_makes_of_buckets_is_for_communication(gpu: VirtualGPU) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(layers(1, 512).cuda())
    wrapped.register_comm_hook(None, fp16_compress_hook)
    given = torch.zeros(4, 512, device="cuda")
    found = fullest(gpu, lambda: wrapped(given).sum().backward())
    assert found[BUFFERS] == 512 * 512 * (4 + 2)  # the bucket, and its copy of half the size


def test_zero_1_communicates_in_place(gpu: VirtualGPU) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = layers(WORLD, 256).cuda()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True
    )
    wrapped(torch.zeros(2, 256, device="cuda")).sum().backward()
    one = 256 * 256 * 4
    found = fullest(gpu, optimizer.step)
    assert found[BUFFERS] == WORLD * one  # of DDP; what ranks send one another are the parameters themselves
    assert (found[PARAMETERS], found[GRADIENTS]) == (WORLD * one, WORLD * one)
    assert held(gpu)[Category.OPTIMIZER_STATE] == 2 * one


def test_a_gathered_list_is_laid_into_one_buffer(gpu: VirtualGPU) -> None:
    parts = [torch.empty(1024, device="cuda") for _ in range(WORLD)]
    mine = torch.ones(1024, device="cuda")
    work = dist.all_gather(parts, mine, async_op=True)
    assert shared_out(held(gpu)) == (WORLD * 4096, 0, 0)
    work.wait()
    assert shared_out(held(gpu)) == (0, 0, 0)


def test_what_stages_of_a_pipeline_receive_into(gpu: VirtualGPU) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    card, batch = torch.device("cuda", CARD), (4, 300)
    example = torch.empty(batch, device="meta", requires_grad=True)
    stage = PipelineStage(layers(2, 300).to(card), RANK, WORLD, card, input_args=example, output_args=example)
    found = fullest(gpu, ScheduleGPipe(stage, WORLD, loss_fn=nn.functional.mse_loss).step)
    # Activations of eight micro-batches (2.10 wants one for each stage) from the stage before, and their gradients from
    # the one behind; since 2.15 each is received into when it comes and gone with who computed with it.
    one = rounded(4 * 300 * 4)
    assert shared_out(held(gpu)) == ((0, 0, 0) if at_least(2, 15) else (2 * WORLD * one, 0, 0))
    if at_least(2, 15):
        assert found[BUFFERS] == WORLD * one
    assert gpu.trace.meta[PIPELINE_STAGES] == f"{RANK}/{WORLD}"


def test_gradients_of_tensor_parallel_shards_have_their_name_at_the_step(gpu: VirtualGPU) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = layers(1, 512).cuda()
    parallelize_module(model, init_device_mesh("cuda", (WORLD,)), {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    found = held(gpu)
    assert (found[PARAMETERS], found[GRADIENTS]) == (512 * 512 * 4 // WORLD, 512 * 512 * 4 // WORLD)


# -- FSDP2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("ahead", [False, True], ids=["implicit", "prefetch"])
def test_what_fsdp2_gathers(gpu: VirtualGPU, reshard: bool, ahead: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = layers(8, 4096, device="meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    for layer, following in pairwise(model) if ahead else ():
        layer.set_modules_to_forward_prefetch([following])
    given = torch.ones(64, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(given)  # torch makes its streams and hooks
    whole, shard = 32 * MIB, 8 * 4096 * 4096 * 4 // WORLD
    assert held(gpu)[PARAMETERS] == shard

    found = fullest(gpu, lambda: model(given))
    assert found[PARAMETERS] == shard
    if not reshard:
        assert shared_out(found) == (0, 8 * whole, 0)
    elif not ahead:
        # 96 MiB: the layer's parameters, the buffer that they came in, and that of the layer before, which goes before
        # the parameters are copied out since 2.15.
        latest = (2 * whole + whole // WORLD, 0, 0)
        assert shared_out(found) == (latest if at_least(2, 15) else (2 * whole, whole, 0))
    else:
        # The buffer of the layer that computes, what goes into that of the next, and the next's, gathered ahead.
        assert shared_out(found) == (whole + whole // WORLD, whole, whole)

    out = [model(given)]
    found = fullest(gpu, lambda: out.pop().float().sum().backward())
    reduced = 2 * whole  # a float32 copy of the gradients of one layer
    if at_least(2, 12) and not at_least(2, 13):
        # A loop's variable in torch's own `post_backward` keeps that of the layer before, until 2.13 deletes it.
        assert shared_out(found) == (2 * reduced, 0 if reshard else 6 * whole, whole if reshard else 0)
    elif reshard:
        assert shared_out(found) == (reduced, whole, whole)
    else:
        assert shared_out(found) == (reduced, 7 * whole, 0)
    assert held(gpu)[GRADIENTS] == shard
    assert not set(held(gpu)) & set(SHARED_OUT)


def shared_out(found: dict[Category, int]) -> tuple[int, ...]:
    return tuple(found.get(kind, 0) for kind in SHARED_OUT)


def test_a_group_that_a_program_gathers_ahead_is_prefetch_until_it_runs(gpu: VirtualGPU) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers(2, 512).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    given = torch.zeros(1, 512, device="cuda")
    with torch.no_grad():
        model(given)
        model[0].unshard(async_op=True)
        assert shared_out(held(gpu)) == (0, 0, MIB)
        model[0](given)
        assert PREFETCH not in held(gpu)


# -- FSDP1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "prefetch"])
def test_what_fsdp1_gathers(gpu: VirtualGPU, ahead: bool) -> None:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = nn.Sequential(*[nn.Sequential(nn.Linear(1016, 1008)), nn.Sequential(nn.Linear(1008, 1016))])
    elements = [sum(p.numel() for p in part.parameters()) for part in model]
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=CARD,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        forward_prefetch=ahead,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if ahead else None,
    )
    given = torch.zeros(4, 1016, device="cuda")
    wrapped(given).sum().backward()  # the order of modules is known from here on
    # _flat_param.py: each rank has a chunk of one size, and what is gathered is all of them.
    first, second = (-(-count // WORLD) * WORLD * 2 for count in elements)
    shards = sum(rounded(4 * -(-count // WORLD)) for count in elements)
    found = held(gpu)
    assert (found[PARAMETERS], found[GRADIENTS]) == (shards, shards)
    assert not set(found) & set(SHARED_OUT)

    out: list[torch.Tensor] = []
    found = fullest(gpu, lambda: out.append(wrapped(given)))
    low = rounded(second // WORLD)  # the shard in bfloat16, while it is gathered
    if ahead:
        assert shared_out(found) == (low, rounded(first), rounded(second))
    else:
        assert shared_out(found) == (low, rounded(second), 0)
    # The gradients of a module in float32, to be reduced, and this rank's part of the sum.
    found = fullest(gpu, lambda: out.pop().sum().backward())
    padded = max(-(-count // WORLD) for count in elements)
    assert found[BUFFERS] == rounded(4 * WORLD * padded) + rounded(4 * padded)
    assert not set(held(gpu)) & set(SHARED_OUT)
