"""Process groups of the ``nccl`` backend: a handle that torch can register, with the options that programs set.

The handle is torch's own ``FakeProcessGroup``, a backend in C++ that does nothing. It never gets a collective to do:
those on a virtual card are answered by rules, and a CPU tensor finds no backend in a group of NCCL alone, as on a card.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d

from vramfit.patching import PatchStack
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
    _patch_splitting(patches)


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
