"""What a tier of memory is: four methods and a capacity, so that another kind of memory is one small class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vramfit.errors import UsageError

Copy: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""Begins to fill its second argument with its first. Both must live until the store has waited for the end."""


class NoRoom(Exception):
    """A tier has no place for a tensor although its budget would allow it; the store sends others down first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the values of a dense tensor lie in memory.

    Attributes:
        shape: its lengths.
        stride: elements between neighbours along each axis.
        dtype: of its values.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a dense tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout over the first bytes of a flat one of ``uint8``."""
        return flat[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, copied where its values do not fill its memory without holes.

    Raises:
        UsageError: it is sparse, quantized, or of a class that keeps its values elsewhere.
    """
    given: object = tensor
    if not isinstance(given, torch.Tensor):
        raise UsageError(f"a {type(given).__name__} is no tensor", "A store keeps tensors of torch")
    # torchao's and DTensor's classes hold other tensors, and have no storage of their own.
    wraps = hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ != "FakeTensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or wraps:
        raise UsageError(
            f"a {type(tensor).__name__} of layout {tensor.layout} has no one piece of memory",
            "Put the dense tensors that it is made of into the store",
        )
    if tensor.device.type == "meta":
        raise UsageError("a tensor on the meta device has no values", "Give it a device first")
    found = tensor.detach()
    if found.is_conj() or found.is_neg():
        found = found.resolve_conj().resolve_neg()
    in_order = sorted(
        (stride, length) for stride, length in zip(found.stride(), found.shape, strict=True) if length != 1
    )
    expected = 1
    for stride, length in in_order:
        if stride != expected:
            return found.contiguous()
        expected *= length
    return found if found.numel() else found.contiguous()


class Tier(ABC):
    """A kind of memory with a capacity. The store calls it with its lock held: no method is called twice at once.

    Args:
        name: what it is called in budgets and reports.
        capacity: most bytes that it may hold, as `price` counts them.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.movable: Callable[[], set[int]] = set
        """Of the handles that it gave, the ``id`` of those whose values nobody uses now; the store sets it."""

    def price(self, nbytes: int) -> int:
        """Bytes of the capacity that a tensor of `nbytes` takes."""
        return nbytes

    @abstractmethod
    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """Find a place for a dense tensor and begin to fill it with ``copy(source, target)``.

        Returns:
            whatever finds the values again: a handle.

        Raises:
            NoRoom: it has no place at the moment.
            Exception: it failed; nothing is kept then.
        """

    @abstractmethod
    def get(self, handle: Any) -> torch.Tensor:
        """The values, of the same layout: the memory itself where a copy can read it, else a new tensor."""

    @abstractmethod
    def drop(self, handle: Any) -> None:
        """Let the values go. All copies from and to it are over."""

    def adopt(self, tensor: torch.Tensor) -> Any | None:
        """A handle for a tensor that lies in this memory already and is alone in its piece of it, or None."""
        del tensor
        return None

    def held(self, handle: Any) -> bool:
        """Whether somebody outside of the store still holds the memory that `get` gave."""
        del handle
        return False

    def version(self, handle: Any) -> int:
        """A number that grows when the values are written to, as far as torch counts that."""
        return self.get(handle)._version

    def close(self) -> None:
        """Give back what the tier itself holds; nothing, where it holds none."""
        return
