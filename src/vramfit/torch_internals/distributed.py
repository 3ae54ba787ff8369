"""``torch.distributed`` below its public functions: groups, stores, backends, objects, DDP, FSDP and DTensor."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from vramfit.torch_internals.names import Feature
from vramfit.torch_internals.releases import at_least

GROUPS = Feature("process groups")
OBJECTS = Feature("Python objects that ranks exchange")
DDP = Feature("DistributedDataParallel's buckets")
FSDP = Feature("FSDP's gather buffers and unsharded parameters")
DTENSOR = Feature("DTensor, on which FSDP2 and tensor parallelism stand")
PIPELINES = Feature("stages of a pipeline")
CHECKPOINTS = Feature("distributed checkpoints")

# -- groups (torch/csrc/distributed/c10d/init.cpp, torch/distributed/distributed_c10d.py) ---------------------

c10d: Any = GROUPS.find("torch._C._distributed_c10d")
"""The module of C++ classes and functions."""

Store: Any = GROUPS.find("torch._C._distributed_c10d.Store")
FakeProcessGroup: Any = GROUPS.find("torch._C._distributed_c10d.FakeProcessGroup")
HashStore: Any = GROUPS.find("torch._C._distributed_c10d.HashStore")
Logger: Any = GROUPS.find("torch._C._distributed_c10d.Logger")
SymmetricMemory: Any = GROUPS.find("torch._C._distributed_c10d._SymmetricMemory")
Reducer: Any = GROUPS.find("torch._C._distributed_c10d.Reducer")
AsyncCollectiveTensor: Any = GROUPS.find("torch.distributed._functional_collectives.AsyncCollectiveTensor")

resolve_process_group: Any = GROUPS.find("torch._C._distributed_c10d._resolve_process_group")
work_from_future: Any = GROUPS.find("torch._C._distributed_c10d._create_work_from_future")
new_group_helper = GROUPS.place("torch.distributed.distributed_c10d._new_process_group_helper")
group_wrapper = GROUPS.place("torch.distributed.distributed_c10d._create_process_group_wrapper")
store_barrier = GROUPS.place("torch.distributed.distributed_c10d._store_based_barrier")
nccl_available = GROUPS.place("torch.distributed.distributed_c10d._NCCL_AVAILABLE")
store_at_address = GROUPS.place("torch.distributed.rendezvous._create_c10d_store")
"""Makes the store of ``env://`` and ``tcp://``."""


LAZY_NCCL = "ProcessGroupNCCLLazy"
"""Of "nccl-lazy": two ranks that send one another something have a communicator of their own, for batches too."""
LATER_NCCL = ("ProcessGroupNCCL2", LAZY_NCCL) if at_least(2, 14) else ()
"""Two more kinds of NCCL's groups, which ``init_process_group`` takes by name or by TORCH_DIST_USE_NCCL2; since 2.15
"nccl" is the first (torch/distributed/distributed_c10d.py, ``_register_builtin_nccl_backend``). CPU builds have none.
"""


def make_fake_group(rank: int, size: int) -> Any:
    """A backend in C++ that does nothing; its plain constructor warns."""
    return FakeProcessGroup._create_internal(rank, size)


def default_group() -> Any:
    """The group of the whole world.

    Raises:
        ValueError: there is none yet.
    """
    return distributed_c10d._get_default_group()


def group_or_default(group: Any) -> Any:
    """The group that a call means."""
    return distributed_c10d._group_or_default_group(group)


def is_outside(group: Any) -> bool:
    """Whether this rank is no member of a group."""
    return bool(distributed_c10d._rank_not_in_group(group))


def group_ranks() -> dict[Any, dict[int, int]]:
    """For each group, the number in it of each rank of the world that it has."""
    ranks: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    return ranks


def backend_of(group: Any, device: Any) -> Any:
    """The backend of a group for a device."""
    return group._get_backend(device)


# -- objects -----------------------------------------------------------------------------------------------------

object_to_tensor = OBJECTS.place("torch.distributed.distributed_c10d._object_to_tensor")


def object_device(group: Any) -> Any:
    """The device over which a group sends objects."""
    return distributed_c10d._get_object_coll_device(group)


def world_rank(group: Any, rank: int | None, number: int | None) -> int:
    """The rank of the world that is meant by its number there or in the group."""
    return int(distributed_c10d._canonicalize_group_rank(group, rank, number, return_global=True))


# -- in modules that torch imports when a program needs them --------------------------------------------------------

ddp_init = DDP.place("torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper")
rebuilt_buckets = DDP.place("torch.distributed.Reducer._rebuild_buckets")
broadcast_coalesced = DDP.place("torch.distributed._broadcast_coalesced")
"""In DDP's module it keeps the name by which torch.distributed imported it."""

PROPAGATION = "torch.distributed.tensor._sharding_prop"
propagated_meta = DTENSOR.place(f"{PROPAGATION}.ShardingPropagator._propagate_tensor_meta_non_cached")
strided_flag = DTENSOR.place(f"{PROPAGATION}._propagate_use_strided_shard_flag")
strided_shard = DTENSOR.place(f"{PROPAGATION}._StridedShard")
expanded_strategy = DTENSOR.place(f"{PROPAGATION}._expand_single_dim_strategy_to_mesh")
MESH_THREAD = "_thread_id"
"""Part of what makes meshes equal (torch/distributed/device_mesh.py), and of no other use."""

STREAM_RECORDERS = tuple(
    f"torch.distributed.fsdp._{name}" for name in ("common_utils", "flat_param", "runtime_utils")
)
RECORD_STREAM = "_no_dispatch_record_stream"
"""How FSDP1 names a stream, in each of these modules."""

FSDP2_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP2_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"
FSDP1_HANDLES = "torch.distributed.fsdp._flat_param"
FSDP1_RUNTIME = "torch.distributed.fsdp._runtime_utils"
FLAT_GATHER = "_alloc_padded_unsharded_flat_param"
FLAT_LOWER = "_use_low_precision_shard"
FLAT_PARAMETERS = ("_full_param_padded", "_full_prec_full_param_padded")
"""What FSDP1 gathers into, in the precision of computation and in full."""
FLAT_PREFETCH = "_prefetch_handle"
FLAT_REDUCE = "_post_backward_hook"
FLAT_ACCUMULATE = "_accumulate_sharded_grad"

STAGES = "torch.distributed.pipelining.stage"
PIPE = "torch.distributed.pipelining._IR"
RECEIVING = (
    STAGES,
    # Since 2.15 a buffer is made when it is received into, and goes to who computes with it (``_RecvInfo``).
    *(("torch.distributed.pipelining._recv_buffers",) if at_least(2, 15) else ()),
)
received_tensors = tuple(PIPELINES.place(f"{module}._make_tensor_from_meta") for module in RECEIVING)
"""What stages receive into, in each module that makes it."""
stage_base = PIPELINES.place(f"{STAGES}._PipelineStageBase")
stage_move = PIPELINES.place(f"{STAGES}._PipelineStage._move_submod_to_device")
stage_forward_vote = PIPELINES.place(f"{STAGES}.PipelineStage._warmup_forward_vote")
stage_backward_result = PIPELINES.place(f"{STAGES}.PipelineStage._warmup_backward_result")

STAGER = "torch.distributed.checkpoint._state_dict_stager"
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
staged_offload = CHECKPOINTS.place(f"{STAGER}.StateDictStager._offload_tensor")
checkpoint_wrapper = CHECKPOINTS.place("torch.distributed.checkpoint.utils._DistWrapper")
checkpoint_writer = CHECKPOINTS.place("torch.distributed.checkpoint.filesystem._FileSystemWriter")
zero_broadcast = CHECKPOINTS.place(f"{_ZERO}._broadcast_object")


def copied_to_device(states: Any, device: Any) -> Any:
    """Nested states of ZeRO-1 on a device."""
    return CHECKPOINTS.find(f"{_ZERO}._recursive_copy_to_device")(states, non_blocking=True, device=device)


def gather_result(group: Any) -> Any:
    """What FSDP2 has gathered for a group of parameters and not copied out yet; None without."""
    return group._all_gather_result


def unsharded_parameter(parameter: Any) -> Any:
    """What FSDP2's modules compute with; None while it is sharded."""
    return getattr(parameter, "_unsharded_param", None)
