"""Process groups: where processes meet, the handles in the place of NCCL and gloo, and what torch asks of them.

A handle is torch's own ``FakeProcessGroup``, a backend in C++ that does nothing. It never gets a collective to do:
rules answer those (collectives.py), and a CPU tensor finds no backend in a group of NCCL alone, as on a card. In a
world of one rank gloo is torch's own; in a larger one a handle stands for it too, for its peers are not there.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed as internals
from vramfit.torch_internals.distributed import FakeProcessGroup, HashStore, Logger, Reducer, make_fake_group
from vramfit.torch_internals.names import in_signature_of
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.communicators import Communicators
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.ranks.rank_roles import RankRoles
from vramfit.virtual.ranks.rank_store import RankStore
from vramfit.virtual.torch_cuda.memory import NativeAllocator
from vramfit.virtual.torch_cuda.refused import refuse_symmetric_memory

# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp: kProcessGroupNCCLDefaultTimeout
_TIMEOUT = timedelta(minutes=10)
_UNSET = -(2**31)  # nccl.h: NCCL_CONFIG_UNDEF_INT


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


class Handles:
    """Which handle stands for which backend, for ``isinstance(backend, ProcessGroupNCCL)``; keeps them alive."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[Any, type]] = {}

    def make(self, kind: type, rank: int, size: int) -> Any:
        """A handle that torch registers as a group's backend of that kind."""
        handle = make_fake_group(rank, size)
        self._kinds[id(handle)] = handle, kind
        return handle

    def kind_of(self, backend: object) -> type | None:
        """The kind of backend that a handle stands for; None for what is no handle."""
        known = self._kinds.get(id(backend))
        return None if known is None else known[1]

    def is_of(self, backend: object, kind: type) -> bool:
        """Whether a backend is a handle of that kind."""
        return self.kind_of(backend) is kind


class _HandleClass(type):
    """Calling the class gives a handle, and handles are its instances."""

    handles: Handles

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.handles.is_of(instance, cls)


class ProcessGroupNCCL(metaclass=_HandleClass):
    """Stands for ``torch.distributed.ProcessGroupNCCL``."""

    Options = NcclOptions
    NCCLConfig = NcclConfig
    NCCL_CTA_POLICY_DEFAULT = 0  # nccl.h
    NCCL_CTA_POLICY_EFFICIENCY = 1
    NCCL_CTA_POLICY_ZERO = 2


class ProcessGroupGloo(metaclass=_HandleClass):
    """Stands for ``torch.distributed.ProcessGroupGloo`` where other ranks are not there."""


def install(
    mode: OpRunner, place: RankPlace, communicators: Communicators, roles: RankRoles, patches: PatchStack
) -> None:
    """Let the program make process groups, and DDP, FSDP and DTensor work in them."""
    _patch_stores(mode, place, patches)
    _patch_backends(mode, place, communicators, patches)
    _patch_splitting(roles, patches)
    _note_batches(communicators, patches)
    _leave_untimed(patches)
    refuse_symmetric_memory(internals.SymmetricMemory, patches)
    _destroy_afterwards(communicators, patches)


def check_world(world_size: int, rank: int, place: RankPlace) -> None:
    """Make sure that a program means the rank that runs here.

    Raises:
        UsageError: it is another rank, or of another world.
    """
    if (world_size, rank) == (place.world_size, place.rank):
        return
    if place.world_size == 1:
        raise UsageError(
            f"this process is rank {rank} of {world_size}, and the virtual run is one process: the other ranks are "
            "not there",
            f"Run it as that rank, vramfit run --ranks {world_size} --rank {rank} or VirtualGPU(..., rank={rank}, "
            f"world_size={world_size}), or alone, with RANK=0 LOCAL_RANK=0 WORLD_SIZE=1",
        )
    raise UsageError(
        f"the program joins as rank {rank} of {world_size}, and the virtual run is rank {place.rank} of "
        f"{place.world_size}",
        "Let it read RANK and WORLD_SIZE from its environment, as torchrun sets them, or give both the same",
    )


def _leave_untimed(patches: PatchStack) -> None:
    """Let DDP take no times: its timer records CUDA events in C++, which reach the runtime, and they say nothing here.

    ``Reducer::prepare_for_forward`` (torch/csrc/distributed/c10d/reducer.cpp) counts iterations, which decide when
    times are taken and nothing else, and takes the first; a reducer that has counted none takes no others. All else of
    it is C++ that runs as it is: its buckets and ``c10d::allreduce_`` come through the dispatcher.
    """
    patches.set(Logger, "set_runtime_stats_and_log", lambda self: None)
    patches.set(Reducer, "prepare_for_forward", lambda self: None)


def _patch_stores(mode: OpRunner, place: RankPlace, patches: PatchStack) -> None:
    """Give ``env://``, ``tcp://`` and ``file://`` a store of this process alone, after torch has read the address.

    torch's TCPStore would open a port and its FileStore would leave a file; nobody else reads either.
    """

    kept: list[RankStore] = []  # C++ looks a store's methods up by its object, which it does not keep

    def store() -> Any:
        if place.world_size == 1:
            return HashStore()
        kept.append(RankStore(place))
        return kept[-1]

    def tcp_store(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        if not 0 <= port < 2**16:  # as torch.distributed.rendezvous: _create_c10d_store
            raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
        check_world(world_size, rank, place)
        return store()

    def file_store(path: str, world_size: int = -1) -> Any:
        if world_size not in (-1, place.world_size):
            check_world(world_size, place.rank if place.rank < world_size else 0, place)
        return store()

    internals.store_at_address.replace(patches, tcp_store)
    patches.set(internals.store_at_address.holder, "FileStore", file_store)
    original = internals.new_group_helper.get()

    def new_group(group_size: int, group_rank: int, global_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        # The world, also where the program brings a store of its own. MPI comes without numbers, to be refused.
        if not global_ranks and group_size >= 0:
            check_world(group_size, group_rank, place)
            mode.machine.joined_world = True
        return original(group_size, group_rank, global_ranks, *args, **kwargs)

    internals.new_group_helper.replace(patches, new_group)
    if place.world_size > 1:
        # Nobody else arrives (TORCH_DIST_INIT_BARRIER=1).
        internals.store_barrier.replace(patches, lambda *args, **kwargs: None)


def _patch_backends(
    mode: OpRunner, place: RankPlace, communicators: Communicators, patches: PatchStack
) -> None:
    """Let ``init_process_group`` find its backends; a CUDA build's own NCCL is out of the way meanwhile."""
    handles = Handles()

    class Nccl(ProcessGroupNCCL):
        def __new__(
            cls, store: Any, rank: int, size: int, options: Any = None, *later: Any, **named: Any
        ) -> Any:
            # From torch 2.15 on also the device, which the group is bound to.
            # As ProcessGroupNCCL.cpp, which does not initialise CUDA: DeviceMesh looks whether anybody has.
            if not mode.machine.devices:
                raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
            if getattr(options, "is_high_priority_stream", False):
                communicators.urgent.add(options.group_name)
            if _splits(options):
                communicators.split.add(options.group_name)
            if cls is others.get(internals.LAZY_NCCL):
                communicators.lazy.add(options.group_name)
            return handles.make(cls, rank, size)

    class Gloo(ProcessGroupGloo):
        def __new__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            # A timeout; from torch 2.14 on also whether the group may be configured anew.
            return handles.make(cls, rank, size)

    others: dict[str, type] = {name: type(name, (Nccl,), {}) for name in internals.LATER_NCCL}
    Nccl.__name__ = Nccl.__qualname__ = "ProcessGroupNCCL"
    Gloo.__name__ = Gloo.__qualname__ = "ProcessGroupGloo"
    Nccl.handles = Gloo.handles = handles
    for module in (internals.c10d, distributed_c10d, distributed):
        for name, stand_in in {"ProcessGroupNCCL": Nccl, **others}.items():
            patches.supply(module, name, stand_in)
        if place.world_size > 1:
            patches.supply(module, "ProcessGroupGloo", Gloo)
    internals.nccl_available.replace(patches, True)
    patches.set(distributed_c10d, "default_pg_nccl_timeout", _TIMEOUT)
    if place.world_size > 1:
        # TORCH_DISTRIBUTED_DEBUG=DETAIL compares what ranks do, in C++ and through gloo.
        internals.group_wrapper.replace(patches, lambda wrapped_pg, **kwargs: wrapped_pg)

    def split(handle: Any, store: Any, ranks: list[int], options: Any = None) -> Any:
        """A subgroup of a group of NCCL's later kinds, which are asked for it (since 2.14)."""
        kind: Any = handles.kind_of(handle)
        return kind(store, ranks.index(distributed.get_rank()), len(ranks), options)

    patches.supply(FakeProcessGroup, "split", split)
    # What torch asks of a backend and the handle lacks; each is a setting or a count that one rank never needs.
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
        patches.supply(FakeProcessGroup, name, answer)
    # ncclMemAlloc's memory, for torch.cuda.MemPool: on the virtual card memory as any other.
    patches.supply(FakeProcessGroup, "mem_allocator", property(lambda self: NativeAllocator()))


def _splits(options: Any) -> bool:
    """Whether NCCL would split a new group from the world's communicator: it does once that is bound to a card.

    See torch.distributed.distributed_c10d: ``_new_process_group_helper``.
    """
    if not getattr(options, "global_ranks_in_group", None) or not distributed.is_initialized():
        return False
    return internals.default_group().bound_device_id is not None


def _note_batches(communicators: Communicators, patches: PatchStack) -> None:
    """Tell sends and receives of a batch from single ones: NCCL has them on other communicators."""
    original = distributed_c10d.batch_isend_irecv

    @functools.wraps(original)
    def batch(*args: Any, **kwargs: Any) -> Any:
        communicators.batches += 1
        try:
            return original(*args, **kwargs)
        finally:
            communicators.batches -= 1

    patches.rebind([(original, batch)])


def _patch_splitting(roles: RankRoles, patches: PatchStack) -> None:
    """``split_group``: a subgroup of this rank's. NCCL would split its communicator; the handle has none."""

    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        if not split_ranks:  # as torch.distributed.distributed_c10d: split_group, also below
            raise ValueError("split_ranks cannot be None or empty")
        world = internals.default_group()
        if not world.bound_device_id:
            raise RuntimeError(
                "No device associated with the default pg, not safe to split any process groups"
            )
        numbers = internals.group_ranks()[parent_pg or world]
        of_world = {number: rank for rank, number in numbers.items()}
        groups = [[of_world[number] for number in ranks] for ranks in split_ranks]
        roles.groups(groups)
        mine = None
        for members in groups:
            if distributed.get_rank() in members:
                mine = distributed.new_group(
                    members, timeout=timeout, pg_options=pg_options, group_desc=group_desc, backend=backend
                )
        return mine

    original = distributed_c10d.split_group
    patches.rebind([(original, in_signature_of(internals.GROUPS, original, split_group))])


def _destroy_afterwards(communicators: Communicators, patches: PatchStack) -> None:
    """End the groups that a program leaves behind: their handles mean nothing once the patches are gone."""
    patches.keep(sys, "excepthook")  # torch replaces it when a group is made

    def destroy() -> None:
        if not before and distributed.is_initialized():
            distributed.destroy_process_group()
        communicators.forget()

    before = distributed.is_initialized()
    patches.call(destroy)
