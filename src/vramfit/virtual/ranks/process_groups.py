"""Process groups of one rank: where its processes meet, the handle in NCCL's place, and what DDP and DTensor ask.

The handle is torch's own ``FakeProcessGroup``, a backend in C++ that does nothing. It never gets a collective to do:
rules answer those on a virtual card, and a CPU tensor finds no backend in a group of NCCL alone, as on a card.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, Logger
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import UsageError
from vramfit.patching import PatchStack, after_import
from vramfit.virtual.describe import VirtualFakeMode
from vramfit.virtual.op_runner import OpRunner

# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp: kProcessGroupNCCLDefaultTimeout
_TIMEOUT = timedelta(minutes=10)
_UNSET = -(2**31)  # nccl.h: NCCL_CONFIG_UNDEF_INT

UNCOUNTED = (
    "what NCCL itself takes on the card is not counted: a group of one rank connects to nobody, and no figure for one "
    "is known (groups of two and more took 0.5 to 1.6 GB on cards of others)"
)


class NcclConfig:
    """Stands for ``ProcessGroupNCCL.NCCLConfig``: settings that NCCL gets and torch does not look at."""

    def __init__(self) -> None:
        self.blocking = _UNSET
        self.cga_cluster_size = _UNSET
        self.min_ctas = _UNSET
        self.max_ctas = _UNSET
        self.split_share = _UNSET
        self.cta_policy = _UNSET
        self.net_name: str | None = None


class NcclOptions:
    """Stands for ``ProcessGroupNCCL.Options``."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NcclConfig()
        self._timeout = _TIMEOUT
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class _HandleClass(type):
    """Calling the class gives a handle, and handles are its instances: ``isinstance(backend, ProcessGroupNCCL)``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeProcessGroup)


class ProcessGroupNCCL(metaclass=_HandleClass):
    """Stands for ``torch.distributed.ProcessGroupNCCL``."""

    Options = NcclOptions
    NCCLConfig = NcclConfig
    NCCL_CTA_POLICY_DEFAULT = 0  # nccl.h
    NCCL_CTA_POLICY_EFFICIENCY = 1
    NCCL_CTA_POLICY_ZERO = 2

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        """A handle that torch registers as the group's backend."""
        return FakeProcessGroup._create_internal(rank, size)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let the program make process groups, and DDP, FSDP and DTensor work in them."""
    _patch_stores(patches)
    _patch_nccl(mode, patches)
    _patch_splitting(patches)
    # DDP's own timings come from CUDA events in C++, which a CPU build lacks; they say nothing here. All else of its
    # reducer is C++ that runs as it is: its buckets and ``c10d::allreduce_`` come through the dispatcher.
    patches.set(Logger, "set_runtime_stats_and_log", lambda self: None)
    _patch_meshes(patches)


def refuse_more(world_size: int, rank: int) -> None:
    """A virtual run is one process, which others could not reach.

    Raises:
        UsageError: the group has more ranks than one.
    """
    if world_size > 1:
        raise UsageError(
            f"this process is rank {rank} of {world_size}, and a virtual run is one process: the other ranks are "
            "not there",
            "Run it with RANK=0 LOCAL_RANK=0 WORLD_SIZE=1: DDP's buckets and collectives are then those of one rank "
            "(parameters and states that FSDP or ZeRO divide among ranks stay whole)",
        )


def _patch_stores(patches: PatchStack) -> None:
    """Give ``env://``, ``tcp://`` and ``file://`` a store of this process alone, after torch has read the address.

    torch's TCPStore would open a port and its FileStore would leave a file; with one rank nobody else reads either.
    """

    def tcp_store(
        hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> HashStore:
        if not 0 <= port < 2**16:  # as torch.distributed.rendezvous: _create_c10d_store
            raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
        refuse_more(world_size, rank)
        return HashStore()

    def file_store(path: str, world_size: int = -1) -> HashStore:
        refuse_more(world_size, 0)
        return HashStore()

    # By its full name: the attribute `rendezvous` of torch.distributed is the function of that name.
    meeting = importlib.import_module("torch.distributed.rendezvous")
    patches.set(meeting, "_create_c10d_store", tcp_store)
    patches.set(meeting, "FileStore", file_store)
    original = distributed_c10d._new_process_group_helper

    def new_group(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        refuse_more(group_size, group_rank)  # also where the program brings a store of its own
        return original(group_size, group_rank, *args, **kwargs)

    patches.set(distributed_c10d, "_new_process_group_helper", new_group)


def _patch_nccl(mode: OpRunner, patches: PatchStack) -> None:
    """Let ``init_process_group("nccl")`` find a backend; a CUDA build's own is out of the way meanwhile."""

    class Counted(ProcessGroupNCCL):
        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
            torch.cuda._lazy_init()
            mode.machine.warn("nccl-uncounted", UNCOUNTED)
            return super().__new__(cls, store, rank, size, options)

    Counted.__name__ = Counted.__qualname__ = "ProcessGroupNCCL"
    for module in (_distributed_c10d, distributed_c10d, distributed):
        patches.set(module, "ProcessGroupNCCL", Counted)
    patches.set(distributed_c10d, "_NCCL_AVAILABLE", True)
    patches.set(distributed_c10d, "default_pg_nccl_timeout", _TIMEOUT)
    # What torch asks of NCCL's backend and the handle lacks; each is a setting or a count that one rank never needs.
    answers = {
        "_set_sequence_number_for_group": lambda self: None,
        "_get_sequence_number_for_group": lambda self: 0,
        "eager_connect_single_device": lambda self, device: None,
        "abort": lambda self: None,
        "_set_default_timeout": lambda self, timeout: None,
        "_add_ephemeral_timeout": lambda self, timeout: None,
        "comm_split_count": lambda self: 0,
        "perform_nocolor_split": lambda self, device: None,
        "register_mem_pool": lambda self, pool: None,
        "deregister_mem_pool": lambda self, pool: None,
    }
    for name, answer in answers.items():
        patches.set(FakeProcessGroup, name, answer)


def _patch_splitting(patches: PatchStack) -> None:
    """``split_group``: a subgroup of this rank. NCCL would split its communicator; the handle has none."""

    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> Any:
        rank = distributed.get_rank()
        mine = None
        for ranks in split_ranks or []:
            if rank in ranks:
                mine = distributed.new_group(ranks, timeout=timeout, group_desc=group_desc)
        return mine

    patches.rebind([(distributed_c10d.split_group, split_group)])


def _patch_meshes(patches: PatchStack) -> None:
    """Keep from the mode how DTensor works out shapes, and show it which streams FSDP names."""

    def propagate_apart(module: ModuleType) -> None:
        """DTensor runs each op once on fake tensors of its own to learn the global shape: no work of the program."""
        quiet = VirtualFakeMode()
        patches.set(module, "FakeTensorMode", lambda: quiet)
        if hasattr(module, "detect_fake_mode"):
            patches.set(module, "detect_fake_mode", lambda *args, **kwargs: None)
        inner = module.ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(self: Any, schema: Any) -> Any:
            with _disable_current_modes():
                return inner(self, schema)

        patches.set(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)

    def seen_stream(module: ModuleType) -> None:
        """FSDP1 names a stream below the dispatcher, where a CPU build has no kernel for it."""
        if "_no_dispatch_record_stream" in vars(module):
            patches.set(
                module, "_no_dispatch_record_stream", lambda tensor, stream: tensor.record_stream(stream)
            )

    after_import(
        {
            "torch.distributed.tensor._sharding_prop": propagate_apart,
            "torch.distributed.fsdp._common_utils": seen_stream,
            "torch.distributed.fsdp._flat_param": seen_stream,
            "torch.distributed.fsdp._runtime_utils": seen_stream,
        },
        patches,
    )
