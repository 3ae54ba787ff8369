"""Tensors and storages below their public methods: classes put on them, what C++ keeps of them, and their places."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.names import Feature

_FEATURE = Feature("tensors that keep their identity when they move")

storage_device: Any = _FEATURE.find("torch._C.StorageBase.device")
"""The property of a storage in C++, whatever stands in its place in Python."""

subclass_maker = _FEATURE.place("torch.Tensor._make_subclass")
original_make_subclass: Any = _FEATURE.find("torch.Tensor._make_subclass")
"""As torch has it, also while a program's is replaced."""

set_version_counter: Any = _FEATURE.find("torch._C._autograd._unsafe_set_version_counter")
swap_tensor_impl: Any = _FEATURE.find("torch._C._swap_tensor_impl")
make_wrapper_subclass: Any = _FEATURE.find("torch.Tensor._make_wrapper_subclass")


def make_subclass(cls: Any, data: torch.Tensor, requires_grad: bool) -> Any:
    """A tensor of a class over another's data, by what stands there now."""
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage in memory that processes share."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return storage


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place, with all its views. Tensors of inference mode do not count."""
    return tensor._version
