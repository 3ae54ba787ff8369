"""Sums gradients in place on the CPU as torch's engine does, though not under a dispatch mode.

NOTE [Gradients summed in place]: the engine adds a gradient to ``grad`` in place (torch/csrc/autograd/functions/
accumulate_grad.h), and sums those of a tensor that is used twice in place where it alone holds the first one
(torch/csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``). Under a dispatch mode, and for tensor subclasses,
it does neither, so that a watcher would see one tensor too many: as large as the embedding, where that is tied to the
head. An out-of-place ``aten.add`` arrives in the mode instead. The planner's modes make an ``add_`` of it here; the
virtual GPU lets the first gradient stand for the sum (`OpRunner`). That only the engine holds a tensor is known from
the use counts of the tensor and its storage (and from Python's, which say whether a backward pass written in Python
holds it). How high they are then depends on how torch calls modes, so each measures them once, by a tiny backward pass:
`measure_counts` here, and `exclusive_counts` of vramfit/virtual/mode.py.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from vramfit.torch_internals.autograd_engine import (
    current_autograd_node,
    current_graph_task_id,
    storage_use_count,
)
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.fake_tensors import FakeTensor, is_non_overlapping_and_dense

_ADD = torch.ops.aten.add.Tensor
_ACCUMULATES = "torch::autograd::AccumulateGrad"

_exclusive: list[tuple[int, int, int]] = []


def summed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first of two gradients, with the other added to it; None if the engine would not sum them in place."""
    if func is not _ADD or kwargs or not _gradients(args):
        return None
    node: Any = current_autograd_node()
    if node is not None and node.name() == _ACCUMULATES:
        return args[0].add_(args[1])  # type: ignore[no-any-return]
    if not _exclusive or any(one > most for one, most in zip(_counts(args[0]), _exclusive[0], strict=True)):
        return None
    return args[0].add_(args[1])  # type: ignore[no-any-return]


def measure_counts() -> None:
    """Measure, once, the use counts of a tensor that only the engine holds, by a tiny backward pass."""
    if not _exclusive:
        leaf = torch.ones(4, 4, requires_grad=True)
        with _Looking() as looking:
            product = leaf * 2.0
            (product.sin() + product.cos()).sum().backward()
        _exclusive.extend(looking.seen[-1:])


class _Looking(TorchDispatchMode):
    """Notes the use counts of gradients that are summed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ADD and _gradients(args):
            self.seen.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))


def _gradients(args: tuple[Any, ...]) -> bool:
    """Whether these are two CPU tensors of one shape and dtype, in a backward pass that builds no graph."""
    if current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if not all(isinstance(given, torch.Tensor) for given in args):
        return False
    one, other = args
    return (
        one.device.type == other.device.type == "cpu"
        and not isinstance(one, FakeTensor)
        and (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, torch.strided)
        and is_non_overlapping_and_dense(one)
    )


def _counts(tensor: Any) -> tuple[int, int, int]:
    storage = storage_use_count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage, sys.getrefcount(tensor)
