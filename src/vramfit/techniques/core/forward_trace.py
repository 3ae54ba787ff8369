"""Watches one forward pass: which module ran when, what it computed by itself, and who read which memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.pytree import tree_leaves

NO_CALL = -1
"""The number of the call that an operation outside of all modules belongs to."""


@dataclass(kw_only=True, slots=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: the module's first name in the model.
        parent: number of the call that it was made in; `NO_CALL` for the model's own.
        inputs: the tensors that it was given, by shape and memory.
        outputs: the memory of the tensors that it returned.
        began, ended: numbers of the operations before and after its own.
    """

    path: str
    parent: int
    began: int
    ended: int = -1
    inputs: tuple[SeenTensor, ...] = ()
    outputs: tuple[StorageWeakRef, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A tensor as a call got it.

    Attributes:
        storage: its memory. A weak reference keeps the identity: no later storage takes the same one.
        dense: whether each element has a place of its own, so that it can be written to.
    """

    storage: StorageWeakRef
    shape: tuple[int, ...]
    dtype: torch.dtype
    dense: bool


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """An operation that read some memory.

    Attributes:
        number: of the operation, from 0 on.
        call: number of the innermost module call that it ran in, or `NO_CALL`.
    """

    number: int
    call: int


@dataclass(kw_only=True, slots=True)
class ForwardTrace:
    """What one forward pass did.

    Attributes:
        calls: of modules, in the order in which they began.
        reads: of each memory, in order.
        made: the number of the operation that made each memory; inputs and parameters are not there.
        computing: paths of the modules that ran operations of their own, views aside.
        given: the memory of the model's inputs.
        outlived: memory that somebody still held after the pass: it was returned, or kept somewhere.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    reads: dict[StorageWeakRef, list[MemoryRead]] = field(default_factory=dict)
    made: dict[StorageWeakRef, int] = field(default_factory=dict)
    computing: set[str] = field(default_factory=set)
    given: frozenset[StorageWeakRef] = frozenset()
    outlived: frozenset[StorageWeakRef] = frozenset()

    def calls_of(self, path: str) -> list[int]:
        """Numbers of a module's calls."""
        return [number for number, call in enumerate(self.calls) if call.path == path]

    def read_later(self, storage: StorageWeakRef, after: int) -> list[MemoryRead]:
        """Who reads a memory from an operation on."""
        return [read for read in self.reads.get(storage, ()) if read.number >= after]

    def inside(self, read: MemoryRead, call: int) -> bool:
        """Whether a read happened in a module's call, or in one that it made."""
        return self.calls[call].began <= read.number < self.calls[call].ended


def trace_forward(model: nn.Module, run: Callable[[], Any], given: Any = ()) -> ForwardTrace:
    """Watch one forward pass, without gradients.

    Tensors may hold no values, as on the meta device or on a virtual GPU. Nothing of the model changes that the pass
    itself does not change.

    Args:
        run: calls the model.
        given: the tensors that it is called with, in whatever containers.
    """
    watch = _Watch(model)
    trace = watch.trace
    trace.given = frozenset(StorageWeakRef(one.untyped_storage()) for one in tensors_in(given))
    with torch.no_grad(), watch:
        result = run()
    returned = {StorageWeakRef(one.untyped_storage()) for one in tensors_in(result)}
    del result
    held = {storage for storage in trace.made if not storage.expired()}
    trace.outlived = frozenset(returned | held)
    return trace


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in tuples, lists, dicts and whatever else torch knows as a container."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.trace = ForwardTrace()
        self._model = model
        self._stack: list[int] = []
        self._ops = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for path, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = tuple(_seen(one) for one in tensors_in((args, kwargs)))
            parent = self._stack[-1] if self._stack else NO_CALL
            self._stack.append(len(self.trace.calls))
            self.trace.calls.append(ModuleCall(path=path, parent=parent, began=self._ops, inputs=inputs))

        return enter

    def _leave(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        call = self.trace.calls[self._stack.pop()]
        call.ended = self._ops
        call.outputs = tuple(StorageWeakRef(one.untyped_storage()) for one in tensors_in(output))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        number, call = self._ops, self._stack[-1] if self._stack else NO_CALL
        self._ops += 1
        read = [StorageWeakRef(one.untyped_storage()) for one in tensors_in((args, kwargs or {}))]
        for storage in read:
            self.trace.reads.setdefault(storage, []).append(MemoryRead(number, call))
        result = func(*args, **(kwargs or {}))
        for one in tensors_in(result):
            storage = StorageWeakRef(one.untyped_storage())
            if storage not in self.trace.reads and storage not in self.trace.given:
                self.trace.made.setdefault(storage, number)
        if call != NO_CALL and not func.is_view:
            self.trace.computing.add(self.trace.calls[call].path)
        return result


def _seen(tensor: torch.Tensor) -> SeenTensor:
    spread = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return SeenTensor(
        StorageWeakRef(tensor.untyped_storage()),
        tuple(tensor.shape),
        tensor.dtype,
        dense=not spread and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes(),
    )
