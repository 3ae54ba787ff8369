"""The process as a search for owners needs it: tensors, storages, the graph, gradients, variables of functions."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from vramfit.record.graph import Graph, is_node
from vramfit.record.naming import is_a, local_names, location

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where vramfit lies: its own frames and objects do not count."""

STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_IS_LEAF: Any = torch._C.TensorBase.is_leaf
_GRAD: Any = torch._C.TensorBase.grad


class Heap:
    """What a search has to know of the process as it is now; several searches can share it.

    Attributes:
        deadline: when to stop searching, on the clock of `time.monotonic`.
        tensors: all tensors.
        storages: all Python objects of storages.
        gradients: id of a gradient -> the parameters that have it, out of the collector's sight.
        graph: the autograd graph.
        variables: id of a value -> the variables of running functions that have it.
        contexts: id of a value -> the context variables that have it.
        modules: id of the dictionary of a module -> the module's name.
        running: ids of the frames of running functions.
    """

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.variables = _running_locals()
        self.contexts = _context_variables()
        self.modules = _module_dicts()
        self.running = {id(frame) for frame in _running_frames()}
        self.tensors, self.storages, nodes = _torch_objects()
        self.gradients = _gradients(self.tensors)
        self.graph = Graph(self.tensors, nodes, self.deadline)
        nodes.clear()
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

    def storages_at(self) -> dict[int, int]:
        """Address of the memory -> the storage that has it, for all tensors, and those saved in the graph."""
        found: dict[int, int] = {}
        with torch._C.DisableTorchFunction():
            for tensor in (*self.tensors, *self.graph.saved_tensors()):
                try:
                    storage = torch._C.TensorBase.untyped_storage(tensor)
                    found[storage.data_ptr()] = storage._cdata
                except Exception:
                    continue
        return found

    def references_to(self, value: Any) -> int:
        """How many references to an object this has."""
        lists = [self.tensors, self.storages, *self.graph.results.values(), *self.gradients.values()]
        return sum(one is value for held in lists for one in held)


def _gradients(tensors: list[Any]) -> dict[int, list[Any]]:
    """Id of each gradient -> the tensors that have it; gradients that had no Python object join the tensors."""
    known = set(map(id, tensors))
    found: dict[int, list[Any]] = {}
    with torch._C.DisableTorchFunction():
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
    tensors: list[Any] = []
    storages: list[Any] = []
    nodes: list[Any] = []
    kinds: dict[int, list[Any] | None] = {}  # by id: the hash of a class may be its metaclass's own
    for one in gc.get_objects():
        kind = type(one)
        number = id(kind)
        if number not in kinds:
            kinds[number] = (
                tensors
                if issubclass(kind, torch.Tensor)
                else storages
                if issubclass(kind, STORAGES)
                else nodes
                if is_node(one)
                else None
            )
        if (into := kinds[number]) is not None:
            into.append(one)
    return tensors, storages, nodes


def storage_of(value: Any) -> int:
    """The address of a storage's C++ object; 0 where there is none."""
    try:
        return int(value._cdata) if is_a(value, torch.UntypedStorage) else int(value._untyped_storage._cdata)
    except Exception:
        return 0


def _running_frames() -> list[types.FrameType]:
    """The frames of all threads that do not belong to vramfit."""
    frames = []
    for one in list(sys._current_frames().values()):
        frame: types.FrameType | None = one
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
