"""One model that lives on the host and visits the device: all of its tensors in one block on either side.

NOTE [One block]: weights and buffers lie one after the other in one stretch of pinned host memory, and on the device in
one block of the allocator. So a visit is one copy and one request, which gets a segment of its own and gives all of it
back; tensors of their own would leave parts of segments behind that no other model's fit. Each tensor begins at a
multiple of 512 bytes, as it does in a block of its own (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize): kernels ask
for alignment.

A tensor moves by its ``data``, as in ``Module.to``: parameters stay the objects that they are, tied ones stay tied, and
views of one memory stay views of it. Nothing is copied back when a model leaves, but for tensors that were written to
meanwhile. Their version counter tells that; a batch norm that trains writes to its buffers past that counter
(aten/src/ATen/native/Normalization.cpp), so buffers of modules in training mode are copied back in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.residency.placement import weight_segment

_ALIGNMENT = 512


@dataclass(slots=True)
class _Place:
    """A tensor of the model, and where it lies in the block.

    Attributes:
        shape, stride, dtype: as the tensor was found.
        offset: elements from the block's start to the tensor's first.
        owner: the module that has it as a buffer; None for a parameter.
        version: its version counter when it came to the device.
    """

    tensor: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    owner: nn.Module | None
    version: int = 0

    def was_written(self, block: torch.Tensor) -> bool:
        """Whether it may have changed since it came to the device, into this block."""
        return (
            self.tensor._version != self.version
            or self.tensor.untyped_storage()._cdata != block.untyped_storage()._cdata  # given other data
            or (self.owner is not None and self.owner.training)
        )

    def inside(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor's values within a block, as a view of it."""
        return block.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class HostedModel:
    """A model whose tensors are on the host, or on the device while it visits. `take_over` comes first.

    Args:
        name: for messages.
        model: on the CPU, with plain tensors.
        device: where it visits.
        pinned: whether the block is page-locked, so that a copy runs at the speed of the link.

    Attributes:
        nbytes: of the block.

    Raises:
        UsageError: the model is not on the CPU, or holds a tensor that cannot lie in a block.
    """

    def __init__(self, name: str, model: nn.Module, device: torch.device, *, pinned: bool) -> None:
        self.name, self.model, self.device = name, model, device
        tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for path, tensor in tensors.items():
            _check_tensor(name, path, tensor)
        self._places, self.nbytes = _laid_out(model, tensors)
        self._pinned = pinned
        self._host: torch.Tensor | None = None
        self._block: torch.Tensor | None = None
        self._known = {id(place.tensor) for place in self._places}

    def take_over(self) -> None:
        """Move the tensors into the block on the host; the values stay."""
        host = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        with torch.inference_mode(False), torch.no_grad():
            views = [place.inside(host) for place in self._places]
            for place, view in zip(self._places, views, strict=True):
                view.copy_(place.tensor)
            for place, view in zip(self._places, views, strict=True):
                place.tensor.data = view
        self._host = host

    @property
    def device_bytes(self) -> int:
        """What torch reserves on the device for it."""
        return weight_segment(self.nbytes)

    @property
    def is_visiting(self) -> bool:
        """Whether it is on the device."""
        return self._block is not None

    def load(self) -> None:
        """Bring the model to the device; the copy is queued on the current stream.

        Raises:
            torch.OutOfMemoryError: there is no room. The model is on the host as before.
        """
        if self._block is not None:
            return
        assert self._host is not None
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            block.copy_(self._host, non_blocking=True)
            loose = self._loose_buffers()
            moved = [tensor.to(self.device) for _, _, tensor in loose]
            views = [place.inside(block) for place in self._places]
            # From here on nothing fails.
            for (owner, key, _), tensor in zip(loose, moved, strict=True):
                owner._buffers[key] = tensor
            for place, view in zip(self._places, views, strict=True):
                place.tensor.data = view
                place.version = place.tensor._version
        self._block = block

    def unload(self) -> int:
        """Drop the model from the device; gives the bytes that were copied back because they had changed.

        The caller sees to it that nothing of the device still reads it.
        """
        if self._block is None or self._host is None:
            return 0
        host, written = self._host, 0
        with torch.inference_mode(False), torch.no_grad():
            loose = self._loose_buffers()
            moved = [tensor.to("cpu") for _, _, tensor in loose]
            views = [place.inside(host) for place in self._places]
            for place, view in zip(self._places, views, strict=True):
                if place.was_written(self._block):
                    view.copy_(place.tensor)
                    written += place.tensor.nbytes
            for (owner, key, _), tensor in zip(loose, moved, strict=True):
                owner._buffers[key] = tensor
            for place, view in zip(self._places, views, strict=True):
                place.tensor.data = view
        self._block = None
        return written

    def _loose_buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Buffers that are other tensors than at first, as a cache that grows; they move by themselves."""
        return [
            (module, key, buffer)
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in self._known
        ]


def _check_tensor(name: str, path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot lie in a block.

    Raises:
        UsageError: it is not on the CPU, or no plain dense tensor.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            f"the model {name} is not on the CPU: {path} is on {tensor.device}",
            'Give it as it was built, or after model.to("cpu")',
        )
    if tensor.layout is not torch.strided or _is_wrapper(tensor):
        raise UsageError(
            f"the model {name} holds a tensor of its own kind: {path} is a {type(tensor).__name__}",
            "Give a model of plain tensors",
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    from vramfit.torch_internals.dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def _laid_out(model: nn.Module, tensors: dict[str, torch.Tensor]) -> tuple[list[_Place], int]:
    """A place for each tensor, those that share memory in the same; and the bytes of all."""
    buffers = dict(model.named_buffers())
    starts: dict[Any, int] = {}
    places, end = [], 0
    for path, tensor in tensors.items():
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in starts:
            starts[key] = end
            end += -(-memory.nbytes() // _ALIGNMENT) * _ALIGNMENT
        places.append(
            _Place(
                tensor=tensor,
                shape=tensor.shape,
                stride=tensor.stride(),
                dtype=tensor.dtype,
                offset=starts[key] // tensor.dtype.itemsize + int(tensor.storage_offset()),
                owner=model.get_submodule(path.rpartition(".")[0]) if path in buffers else None,
            )
        )
    return places, end
