"""What techniques do with tensors that autograd saves: hooks that stack, and storages that are found again.

NOTE [Stacked hooks]: of nested ``torch.autograd.graph.saved_tensors_hooks`` torch calls the innermost pair alone. So
the hooks made here hand what they do not take to the pair that was active outside of them. A checkpoint outside sees
all tensors but those taken; when it recomputes, the same ones are taken again, so that its count agrees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vramfit.torch_internals.autograd_engine import (
    CachedTorchDispatchMode,
    CachingTorchDispatchMode,
    current_graph_task_id,
    leave_checkpoints_alone,
    top_saved_tensors_hooks,
)
from vramfit.torch_internals.dispatch import (
    current_dispatch_modes,
    is_traceable_wrapper_subclass,
    pop_mode,
    push_mode,
)
from vramfit.torch_internals.pytree import tree_leaves

# The modes of torch.utils.checkpoint.create_selective_checkpoint_contexts, by themselves or inside one of ours.
_COUNTING = (CachingTorchDispatchMode, CachedTorchDispatchMode)


class Packed(Protocol):
    """What the graph holds in place of a tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor, as it was saved."""
        ...


class Kept:
    """A saved tensor itself. With hooks torch leaves out its check for writes in place, so it is made here."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an output would hold its own graph
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        if self._tensor._version != self._version:
            raise written_in_place(self._tensor, self._version)
        return self._tensor


class _Outside:
    """What the hooks outside made of a tensor."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


def packing(take: Callable[[torch.Tensor], Packed | None]) -> saved_tensors_hooks:
    """Hooks under which `take` is offered each saved tensor; what it answers None to goes outwards.

    See NOTE [Stacked hooks].
    """
    outside = hooks_outside()

    def pack(tensor: torch.Tensor) -> Packed:
        with unseen():
            taken = take(tensor)
        if taken is not None:
            return taken
        return Kept(tensor) if outside is None else _Outside(outside[1], outside[0](tensor))

    def unpack(packed: Packed) -> torch.Tensor:
        return packed.unpack()

    leave_checkpoints_alone(pack, outside)
    return saved_tensors_hooks(pack, unpack)


def hooks_outside() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The pair of hooks that is active; None without."""
    found: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = (
        top_saved_tensors_hooks(True)
    )
    return found


@contextmanager
def unseen() -> Iterator[None]:
    """Hide a technique's own operations from selective checkpointing, which counts those of a block.

    A block's second run has to show the operations of its first; what is copied or packed on the way differs.
    """
    modes = current_dispatch_modes()
    lowest = next((index for index, mode in enumerate(modes) if _counts(mode)), len(modes))
    taken = [pop_mode() for _ in modes[lowest:]]
    try:
        yield
    finally:
        for mode in reversed(taken):
            push_mode(mode)


def _counts(mode: Any) -> bool:
    return isinstance(mode, _COUNTING) or isinstance(getattr(mode, "_mode", None), _COUNTING)


def written_in_place(tensor: torch.Tensor, version: int) -> RuntimeError:
    """The error for a saved tensor that was written to, in torch's words (torch/csrc/autograd/saved_variable.cpp)."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead."
    )


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread: a forward pass is then a recomputation."""
    return bool(current_graph_task_id() != -1)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a view of a strided storage that is not empty."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_traceable_wrapper_subclass(tensor)
    )


def is_leaf_of_training(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or views, one that gradients are collected for: its owner keeps it in any case."""
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.is_leaf and base.requires_grad


def held_storages(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Keys of storages that live on without the graph: a module's own, and what it is given that nothing computed."""
    given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.grad_fn is None)
    tensors: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers(), *given)
    return frozenset(storage_key(tensor) for tensor in tensors if is_plain(tensor))


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors with the same storage have in common, for as long as it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


class StorageSpan:
    """The elements of a storage that stand for a tensor: all of them, or those from its first to its last.

    Views of one storage are mostly saved together (the parts of a product for queries, keys and values), so the whole
    storage is worth one copy; unless the tensor spans less than half of it, or is no view (`tells_of_all`).

    Attributes:
        flat: one-dimensional and contiguous, without a graph.
        start: index of the first element in the storage.
        stop: index after the last one.
    """

    __slots__ = ("flat", "start", "stop")

    def __init__(self, tensor: torch.Tensor) -> None:
        start, stop = span(tensor)
        whole = _elements(tensor)
        if 2 * (stop - start) >= whole and tells_of_all(tensor):
            start, stop = 0, whole
        self.start, self.stop = start, stop
        self.flat = tensor.detach().as_strided((stop - start,), (1,), start)


def tells_of_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor's version tells of writes to any part of its storage.

    Not so for parts of a storage that are no views: ``unsafe_chunk`` gives each a version of its own, and recurrent
    cells write into one after another (aten/src/ATen/native/RNN.cpp, GRUCell).
    """
    if tensor._is_view():
        return True
    start, stop = span(tensor)
    return stop - start == _elements(tensor)


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Index in its storage of a tensor's first element, and the index after its last."""
    first = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + reach + 1


class StoragePlace:
    """Shape, strides and place of a tensor in its storage."""

    __slots__ = ("offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = int(tensor.storage_offset())

    def of(self, flat: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor in a stretch that begins at `start`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset - start)


T = TypeVar("T")


class Found(Generic[T]):
    """What was made of storages, found again for as long as the storage and that both live."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[weakref.ref[torch.UntypedStorage], list[weakref.ref[Any]]]] = {}

    def of(self, tensor: torch.Tensor, fits: Callable[[T], bool]) -> T | None:
        """What was made of the tensor's storage with the values that it has now; None if nothing fits."""
        known = self._known.get(self._key(tensor))
        if known is None or known[0]() is None:
            return None
        return next((made for ref in known[1] if (made := ref()) is not None and fits(made)), None)

    def add(self, tensor: torch.Tensor, made: T) -> None:
        """Note what was made of the tensor's storage."""
        key, storage = self._key(tensor), tensor.untyped_storage()
        known = self._known.get(key)
        if known is None or known[0]() is None:
            # A new storage may have the key of a dead one; its entry is then this one, and stays.
            known = (weakref.ref(storage), [])
            self._known[key] = known
        known[1][:] = [ref for ref in known[1] if ref() is not None]
        known[1].append(weakref.ref(made))

    def tidy(self) -> None:
        """Forget storages that are gone."""
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}

    @staticmethod
    def _key(tensor: torch.Tensor) -> object:
        part = None if tells_of_all(tensor) else span(tensor)
        return storage_key(tensor), tensor._version, tensor.dtype, part
