"""The autograd graph as an owner: which nodes keep which storages, and which tensors keep the nodes.

Graph nodes live in C++: the garbage collector sees neither what they saved nor who needs them. Their Python wrappers
tell both: ``next_functions``, ``_raw_saved_*``, ``variable``. Saved tensors are looked at without unpacking them, so
that no hook of the program runs (torch/csrc/autograd/python_saved_variable_hooks.cpp).
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_MOST_NODES = 200_000
_RAW = "_raw_saved_"
_GRAD_FN: Any = torch._C.TensorBase.grad_fn
_HOOKS: Any = torch._C.TensorBase._backward_hooks
_SAVED: Any = torch._C._autograd.SavedTensor


def storage_key(tensor: Any) -> int:
    """What two tensors have in common that share a storage; 0 where there is none (sparse, nested, wrappers)."""
    try:
        with torch._C.DisableTorchFunction():
            return int(torch._C.TensorBase.untyped_storage(tensor)._cdata)
    except Exception:
        return 0


def is_node(value: object) -> bool:
    """Whether an object is a node of the autograd graph (its Python wrapper, or a custom Function's context)."""
    kind = type(value)
    return issubclass(kind, torch._C._FunctionBase) or (
        "next_functions" in kind.__dict__ and "_register_hook_dict" in kind.__dict__
    )


class Graph:
    """All nodes that live tensors and wrappers of nodes reach.

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
        with torch._C.DisableTorchFunction():
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
            if len(self.nodes) > _MOST_NODES or time.monotonic() > self._deadline:
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
        """Note what a node saved."""
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
