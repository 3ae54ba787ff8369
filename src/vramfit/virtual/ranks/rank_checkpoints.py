"""Checkpoints of several ranks (``torch.distributed.checkpoint``): each rank plans and writes its own part.

One rank gathers what all want to write or read, checks that it is whole, and gives each its plan
(torch/distributed/checkpoint/utils.py: ``_DistWrapper``). The other ranks' parts are not there, and this rank's part
over and over is no whole checkpoint. So each rank coordinates for itself alone, with what it holds. What is gathered
still passes the card, as it does where a group has NCCL alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.distributed import get_rank

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import
from vramfit.virtual.ranks.rank_place import RankPlace


def install(place: RankPlace, patches: PatchStack) -> None:
    """Let each rank of several coordinate its own part of a checkpoint."""
    if place.world_size > 1:
        changes = {
            "torch.distributed.checkpoint.utils": _coordinate,
            "torch.distributed.optim.zero_redundancy_optimizer": _consolidate,
        }
        change_after_import(distributed.CHECKPOINTS, changes, patches)


def _coordinate(module: ModuleType, patches: PatchStack) -> None:
    wrapper: Any = distributed.checkpoint_wrapper.get()
    init, gather = wrapper.__init__, wrapper.gather_object

    def coordinating(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.is_coordinator = True

    def gather_object(self: Any, value: Any) -> list[Any]:
        if self.use_dist:
            self.is_coordinator = self.rank == self.coordinator_rank
            try:
                gather(self, value)
            finally:
                self.is_coordinator = True
        return [value]

    patches.set(wrapper, "__init__", coordinating)
    patches.set(wrapper, "gather_object", gather_object)
    patches.set(wrapper, "scatter_object", lambda self, values: values[0])
    patches.set(wrapper, "broadcast_object", lambda self, value: value)


def _consolidate(module: ModuleType, patches: PatchStack) -> None:
    """States that other ranks broadcast to be gathered in one place are taken to be this rank's (ZeRO-1)."""
    zero: Any = module.ZeroRedundancyOptimizer
    consolidate, broadcast = zero.consolidate_state_dict, distributed.zero_broadcast.get()
    own: list[Any] = []

    def consolidating(self: Any, *args: Any, **named: Any) -> None:
        own.append(self.optim)
        try:
            consolidate(self, *args, **named)
        finally:
            own.pop()

    def broadcasting(value: Any, src_rank: int, group: Any, device: Any) -> Any:
        mine = get_rank()
        if not own or src_rank == mine:
            return broadcast(value, src_rank, group, device)
        states = own[-1].state_dict()
        broadcast(states, mine, group, device)  # as many bytes pass this card
        return distributed.copied_to_device(states, device)

    patches.set(zero, "consolidate_state_dict", consolidating)
    distributed.zero_broadcast.replace(patches, broadcasting)
