"""Python objects that ranks hand one another: known bytes, and a mailbox for ranks that run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.rank_place import RankPlace


def install(mode: OpRunner, place: RankPlace, patches: PatchStack) -> None:
    """Follow the bytes of objects that torch pickles for a collective."""
    _follow_bytes(mode, patches)


def _follow_bytes(mode: OpRunner, patches: PatchStack) -> None:
    """Follow the bytes of every Python object that torch pickles for a collective, however large it is.

    ``all_gather_object`` and the like pickle an object into a tensor of bytes, move that to the card, and unpickle
    what comes back. The virtual card follows values of small tensors only, and a vocabulary is larger.
    """
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]] = distributed_c10d._object_to_tensor

    def object_to_tensor(obj: Any, device: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pickled, size = original(obj, torch.device("cpu"), *rest)
        moved, moved_size = pickled.to(device), size.to(device)
        if type(moved) is FakeTensor and mode.shadows.find(moved) is None:
            mode.shadows.set(moved, pickled)
        return moved, moved_size

    patches.set(distributed_c10d, "_object_to_tensor", object_to_tensor)
