"""Says which memory is for communication: DDP's buckets, what is broadcast together, what pipelines receive into.

torch makes these tensors as any other, so the places in it that make them are what tells. What a program itself hands
to a collective stays what it is: a gathered activation is an activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vramfit.capture.storages import StorageMeter
from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import
from vramfit.trace import Category

Within = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(meter: StorageMeter[Any], patches: PatchStack) -> None:
    """Let what torch allocates for communication count as that, until the patches are undone."""
    communicating = allocating(meter, Category.COMMUNICATION_BUFFERS)

    def data_parallel(module: ModuleType, patches: PatchStack) -> None:
        """The reducer makes its buckets in C++ when it is made, and again in the order in which gradients came."""
        ddp = module.DistributedDataParallel
        distributed.ddp_init.replace(patches, communicating(distributed.ddp_init.get()))
        original = ddp.register_comm_hook

        @functools.wraps(original)
        def register(self: Any, state: object, hook: Callable[..., Any]) -> Any:
            # It makes compressed copies of buckets, and keeps errors.
            return original(self, state, communicating(hook))

        patches.set(ddp, "register_comm_hook", register)

    def reducer(_: ModuleType, patches: PatchStack) -> None:
        for place in (distributed.rebuilt_buckets, distributed.broadcast_coalesced):
            place.replace(patches, communicating(place.get()))

    def pipeline(_: ModuleType, patches: PatchStack) -> None:
        """What a stage receives from its neighbours lies where it was received until its backward pass is done."""
        for place in distributed.received_tensors:
            place.replace(patches, communicating(place.get()))

    changes = {"torch.distributed": reducer, "torch.nn.parallel.distributed": data_parallel}
    change_after_import(distributed.DDP, changes, patches)
    change_after_import(distributed.PIPELINES, {distributed.STAGES: pipeline}, patches)


def allocating(meter: StorageMeter[Any], category: Category) -> Within:
    """What makes a function allocate for something, where its ops do not say what for."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with meter.allocating(category):
                return function(*args, **kwargs)

        return inside

    return within
