"""The process as a search for owners needs it: tensors, storages, the graph, gradients, variables of functions.

Graph nodes live in C++: the garbage collector sees neither what they saved nor who needs them. Their Python wrappers
show both: ``next_functions``, ``_raw_saved_*``, ``variable``. Saved tensors are looked at without unpacking them, so
that no hook of the program runs (torch/csrc/autograd/python_saved_variable_hooks.cpp).
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import sys
import time
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch

from vramfit.holders.naming import is_a, local_names, location
from vramfit.torch_internals.autograd_engine import FunctionBase, SavedTensor, TensorBase
from vramfit.torch_internals.dispatch import DisableTorchFunction

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where vramfit lies: its own frames and objects do not count."""

STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_IS_LEAF: Any = TensorBase.is_leaf
_GRAD: Any = TensorBase.grad
_identity = object.__hash__


class Heap:
    """What a search needs to know about the process as it is now; several searches can share it.

    Attributes:
        deadline: when to stop searching, on the clock of `time.thread_time`: a search only computes, and a busy machine
            does not cut it short.
        gradients: id of a gradient -> the parameters that have it, out of the collector's sight.
        variables: id of a value -> the variables of running functions that have it.
        contexts: id of a value -> the context variables that have it.
        modules: id of the dictionary of a module -> the module's name.
        running: ids of the frames of running functions.
    """

    def __init__(self, seconds: float) -> None:
        self.deadline = time.thread_time() + seconds
        self.variables = _running_locals()
        self.contexts = _context_variables()
        self.modules = _module_dicts()
        self.running = {id(frame) for frame in _running_frames()}
        self.tensors, self.storages, nodes = _torch_objects()
        self.gradients = _gradients(self.tensors)
        self.graph = Graph(self.tensors, nodes, self.deadline)
        nodes.clear()
        self._stored: dict[int, list[int]] | None = None
        self.own = {
            id(own)
            for own in (
                self.__dict__,
                self.tensors,
                self.storages,
                self.graph.__dict__,
                self.graph.nodes,
                self.graph.results,
                *self.graph.results.values(),
                self.gradients,
                *self.gradients.values(),
            )
        }

    @staticmethod
    @contextlib.contextmanager
    def now(seconds: float = 5.0) -> Iterator[Heap]:
        """The process as it is, until the block is left.

        The collector is held off: a search makes enough objects to start it, and it would free what is searched for.
        """
        enabled = gc.isenabled()
        gc.disable()
        heap = None
        try:
            heap = Heap(seconds)
            yield heap
        finally:
            if heap is not None:
                heap.forget()
            if enabled:
                gc.enable()

    def forget(self) -> None:
        """Let go of every object."""
        for held in (self.tensors, self.storages, self.graph.nodes, self.graph.results, self.gradients):
            held.clear()

    def stored_by(self, node: int) -> list[int]:
        """The storages that a node of the graph saved, by the id of its wrapper."""
        if self._stored is None:
            self._stored = {}
            for storage, savers in self.graph.saved.items():
                for saver, _ in savers:
                    self._stored.setdefault(saver, []).append(storage)
        return self._stored.get(node, [])

    def storages_at(self) -> dict[int, int]:
        """Address of the memory -> the storage that has it, for all tensors, and those saved in the graph."""
        found: dict[int, int] = {}
        with DisableTorchFunction():
            for tensor in (*self.tensors, *self.graph.saved_tensors()):
                try:
                    storage = TensorBase.untyped_storage(tensor)
                    found[storage.data_ptr()] = storage._cdata
                except Exception:
                    continue
        return found


def _gradients(tensors: list[Any]) -> dict[int, list[Any]]:
    """Id of each gradient -> the tensors that have it; gradients that had no Python object join the tensors."""
    known = set(map(id, tensors))
    found: dict[int, list[Any]] = {}
    with DisableTorchFunction():
        for tensor in list(tensors):
            try:
                gradient = _GRAD.__get__(tensor) if _IS_LEAF.__get__(tensor) else None
            except Exception:
                continue
            if gradient is not None:
                found.setdefault(id(gradient), []).append(tensor)
                if id(gradient) not in known:
                    known.add(id(gradient))
                    tensors.append(gradient)
    return found


def _torch_objects() -> tuple[list[Any], list[Any], list[Any]]:
    """All tensors, storages and nodes of the graph that the collector knows."""
    objects = gc.get_objects()
    # Half a million objects: all that is done for each of them is done in C. Classes are told by their identity, since
    # the hash of a class may be its metaclass's own, and `id` is slow where Python announces it to an audit hook.
    kinds = list(map(_identity, map(type, objects)))
    tensors: list[Any] = []
    storages: list[Any] = []
    nodes: list[Any] = []
    into: dict[int, list[Any]] = {}
    for number, example in dict(zip(kinds, objects, strict=True)).items():
        kind = type(example)
        if issubclass(kind, torch.Tensor):
            into[number] = tensors
        elif issubclass(kind, STORAGES):
            into[number] = storages
        elif is_node(example):
            into[number] = nodes
    example = None
    wanted = map(into.__contains__, kinds)
    for number, value in compress(zip(kinds, objects, strict=True), wanted):
        into[number].append(value)
    objects.clear()
    return tensors, storages, nodes


def storage_of(value: Any) -> int:
    """The address of a storage's C++ object; 0 if it has none."""
    try:
        return int(value._cdata) if is_a(value, torch.UntypedStorage) else int(value._untyped_storage._cdata)
    except Exception:
        return 0


def _running_frames() -> list[types.FrameType]:
    """The frames of all threads that do not belong to vramfit.

    This function's own frame is among those that it walks: a variable that still had it at the end would be a circle,
    which keeps the arguments of everything that is running alive until garbage is collected.
    """
    frames = []
    waiting = list(sys._current_frames().values())
    while waiting:
        frame: types.FrameType | None = waiting.pop()
        while frame is not None:
            if not frame.f_code.co_filename.startswith(HERE):
                frames.append(frame)
            frame = frame.f_back
    return frames


def _running_locals() -> dict[int, list[str]]:
    """Id of each value that a variable of a running function has, and that variable as text."""
    found: dict[int, list[str]] = {}
    handled = sys.exc_info()[1]
    if handled is not None:
        found[id(handled)] = ["the exception being handled,"]
    for frame in _running_frames():
        if frame.f_code.co_name != "<module>":
            where = location(frame.f_code, frame.f_lineno)
            for name, number in local_names(frame).items():
                found.setdefault(number, []).append(f"{where} local {name}")
    return found


def _context_variables() -> dict[int, list[str]]:
    """Id of the value of every context variable of this thread, and the variable as text."""
    found: dict[int, list[str]] = {}
    for variable, value in contextvars.copy_context().items():
        found.setdefault(id(value), []).append(f"context variable {variable.name}")
    return found


def _module_dicts() -> dict[int, str]:
    """Id of the dictionary of every module, and the module's name."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):
        if is_a(module, types.ModuleType):
            found.setdefault(id(object.__getattribute__(module, "__dict__")), name)
    return found


# -- The autograd graph as an owner: which nodes keep which storages, and which tensors keep the nodes -------


_MOST_NODES = 200_000
_RAW = "_raw_saved_"
_GRAD_FN: Any = TensorBase.grad_fn
_HOOKS: Any = TensorBase._backward_hooks
_SAVED: Any = SavedTensor


def storage_key(tensor: Any) -> int:
    """The key that tensors of one storage share; 0 for tensors without a storage (sparse, nested, wrappers)."""
    try:
        with DisableTorchFunction():
            return int(TensorBase.untyped_storage(tensor)._cdata)
    except Exception:
        return 0


def is_node(value: object) -> bool:
    """Whether an object is a node of the autograd graph (its Python wrapper, or a custom Function's context)."""
    kind = type(value)
    return issubclass(kind, FunctionBase) or (
        "next_functions" in kind.__dict__ and "_register_hook_dict" in kind.__dict__
    )


class Graph:
    """All nodes of the graph that live tensors and wrappers of nodes reach.

    Attributes:
        nodes: wrappers by id; as long as they live the ids stay theirs.
        consumers: node -> nodes that have it as their input.
        results: node -> tensors whose ``grad_fn`` it is.
        saved: storage -> nodes that saved a tensor of it, and under which name.
        packed: id of a saved tensor that has a wrapper, of what a hook put in its place, or of a dictionary of hooks
            -> the same.
        complete: whether every node was reached before the bounds.
        least_references: references that the least referenced of the nodes has, while `nodes` has one of them.
    """

    def __init__(self, tensors: Sequence[Any], nodes: Iterable[Any], deadline: float) -> None:
        self.nodes: dict[int, Any] = {}
        self.consumers: defaultdict[int, list[int]] = defaultdict(list)
        self.results: defaultdict[int, list[Any]] = defaultdict(list)
        self.saved: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        self.packed: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        self.complete = True
        self._deadline = deadline
        self._names: dict[type, tuple[str, ...]] = {}
        self._waiting: deque[Any] = deque()
        self._alive = set(map(id, tensors))
        with DisableTorchFunction():
            for tensor in tensors:
                self._result(tensor)
            for node in nodes:
                self._meet(node)
            self._walk()
        self.least_references = min((sys.getrefcount(self.nodes[number]) for number in self.nodes), default=0)

    def _result(self, tensor: Any) -> None:
        try:
            node = _GRAD_FN.__get__(tensor)
        except Exception:
            return
        if node is not None:
            self._meet(node)
            self.results[id(node)].append(tensor)
            hooks = _HOOKS.__get__(
                tensor
            )  # torch/csrc/autograd/python_variable.cpp: the node has them as well
            if hooks is not None:
                self.packed[id(hooks)].append((id(node), "tensor hooks"))

    def _meet(self, node: Any) -> None:
        if id(node) not in self.nodes:
            self.nodes[id(node)] = node
            self._waiting.append(node)

    def _walk(self) -> None:
        while self._waiting:
            if len(self.nodes) > _MOST_NODES or time.thread_time() > self._deadline:
                self.complete = False
                self._waiting.clear()
                return
            node = self._waiting.popleft()
            try:
                inputs = [entry[0] for entry in node.next_functions if entry[0] is not None]
            except Exception:
                inputs = []
            for one in inputs:
                self._meet(one)
                self.consumers[id(one)].append(id(node))
            self._look_into(node)

    def saved_tensors(self) -> Iterator[Any]:
        """Every saved tensor that is not packed by a hook."""
        for node in list(self.nodes.values()):
            for name in self._saved_names(type(node)):
                try:
                    found = getattr(node, name)
                except Exception:
                    continue
                for one in found if type(found) in (tuple, list) else (found,):
                    data = one.data if type(one) is _SAVED else one
                    if data is not None and issubclass(type(data), torch.Tensor):
                        yield data

    def _look_into(self, node: Any) -> None:
        """Note the tensors that a node saved."""
        for name in self._saved_names(type(node)):
            try:
                found = getattr(node, name)
            except Exception:  # freed by a backward pass
                continue
            shown = "the leaf" if name == "variable" else f"saved {name.removeprefix(_RAW)}"
            for index, one in enumerate(found if type(found) in (tuple, list) else (found,)):
                label = f"{shown}[{index}]" if type(found) in (tuple, list) else shown
                self._note(node, one, label)

    def _note(self, node: Any, found: Any, label: str) -> None:
        try:
            data = found.data if type(found) is _SAVED else found
        except Exception:
            return
        if data is None:
            return
        if issubclass(type(data), torch.Tensor):
            if key := storage_key(data):
                self.saved[key].append((id(node), label))
            if id(data) in self._alive:  # else it is a wrapper made for this question only
                self.packed[id(data)].append((id(node), label))
        else:
            self.packed[id(data)].append((id(node), f"{label} (packed by a hook)"))

    def _saved_names(self, kind: type) -> tuple[str, ...]:
        names = self._names.get(kind)
        if names is None:
            every = dir(kind)
            names = tuple(name for name in every if name.startswith(_RAW))
            if "variable" in every:
                names = (*names, "variable")
            self._names[kind] = names
        return names
