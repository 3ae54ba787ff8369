"""Python objects that travel through collectives on a card: their pickled bytes keep their values, of any size.

``all_gather_object`` and its kin pickle an object into a tensor of bytes, move that to the card, and unpickle what
comes back. The virtual card follows values of small tensors only; a configuration or a vocabulary is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Follow the bytes of every object that torch pickles for a collective."""
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]] = distributed_c10d._object_to_tensor

    def object_to_tensor(obj: Any, device: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pickled, size = original(obj, torch.device("cpu"), *rest)
        moved, moved_size = pickled.to(device), size.to(device)
        if type(moved) is FakeTensor and mode.shadows.find(moved) is None:
            mode.shadows.set(moved, pickled)
        return moved, moved_size

    patches.set(distributed_c10d, "_object_to_tensor", object_to_tensor)
