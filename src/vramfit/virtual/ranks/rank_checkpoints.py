"""Checkpoints of several ranks (``torch.distributed.checkpoint``): each rank plans and writes its own part.

One rank gathers what all want to write or read, checks that it is whole, and gives each its plan
(torch/distributed/checkpoint/utils.py: ``_DistWrapper``). The other ranks' parts are not there, and this rank's part
over and over is no whole checkpoint. So each rank coordinates for itself alone, with what it holds. What is gathered
still passes the card, as it does where a group has NCCL alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack, after_import
from vramfit.virtual.ranks.rank_place import RankPlace


def install(place: RankPlace, patches: PatchStack) -> None:
    """Let each rank of several coordinate its own part of a checkpoint."""
    if place.world_size > 1:
        after_import(
            {"torch.distributed.checkpoint.utils": lambda module: _coordinate(module, patches)}, patches
        )


def _coordinate(module: ModuleType, patches: PatchStack) -> None:
    wrapper: Any = module._DistWrapper
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
