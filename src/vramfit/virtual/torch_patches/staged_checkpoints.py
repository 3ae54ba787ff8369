"""``torch.distributed.checkpoint.async_save``: what it copies to the host before it writes is copied tensor by tensor.

torch copies storages there (torch/distributed/checkpoint/_state_dict_stager.py: ``_offload_tensor``), with everything
else that a tensor's object holds. A virtual tensor's storage has no bytes, and its object holds the virtual GPU.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.names import change_after_import
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let virtual tensors be copied to the host whole, page-locked where the program asks for that."""
    del mode

    def change(module: ModuleType, patches: PatchStack) -> None:
        del module
        original = distributed.staged_offload.get()

        def offload(self: Any, x: Any, memo: dict[int, Any], *args: Any, **kwargs: Any) -> Any:
            if type(x) is not FakeTensor:
                return original(self, x, memo, *args, **kwargs)
            with torch.no_grad():
                out = x.detach().to("cpu", copy=True)
            if self.pin_memory and out.nbytes >= getattr(self, "pin_memory_min_bytes", 0):
                out = out.pin_memory()
            memo[id(x)] = out
            return out

        distributed.staged_offload.replace(patches, offload)

    change_after_import(distributed.CHECKPOINTS, {distributed.STAGER: change}, patches)
