"""Who keeps a tensor alive: chains from globals, closures, caches, tracebacks and graphs down to the tensor.

NOTE [How owners are found]
The search goes backwards, breadth first: from all tensors that share the storage, over `gc.get_referrers`, to something
that needs no owner: a module's variables, a class, a function that is running. What the collector cannot see is added
to its edges: the autograd graph (`vramfit.holders.heap`), ``.grad``, and the variables of running functions. The first
way to each owner is the shortest. Frames, containers and objects of vramfit itself do not count.
Where the search ends without an owner, everything that leads to the tensor is known. If it contains a circle and every
reference to its first members comes from within, it is dead: that is the collector's own reasoning
(Python/gc.c, subtract_refs). If the circle leads through the autograd graph, the collector will never see it.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections import Counter
from pathlib import Path as FilePath
from typing import Any

import torch

from vramfit.holders.chains import OwnerChain, Root, Through
from vramfit.holders.heap import HERE, STORAGES, Heap, storage_key, storage_of
from vramfit.holders.naming import Path, is_a, type_name
from vramfit.torch_internals.autograd_engine import FunctionBase, TensorBase
from vramfit.torch_internals.dispatch import DisableTorchFunction

_BATCH = 16  # objects for one pass over the heap, which compares every reference there is with each of them
_MOST_OBJECTS = 4_000
_WIDEST = 160  # objects of one level that are followed
_USE_COUNT: Any = TensorBase._use_count


def owner_chains(
    tensor: torch.Tensor | torch.UntypedStorage, *, limit: int = 5, seconds: float = 5.0
) -> tuple[OwnerChain, ...]:
    """Find what keeps a tensor alive, in this process.

    Nothing is kept alive, collected or changed, and no code of the program runs: neither ``__eq__`` nor ``__repr__``
    nor hooks of saved tensors. The variable that the caller has the tensor in is an owner like any other.

    Args:
        tensor: a tensor, or a storage: every tensor and view of it counts.
        limit: chains to give at most.
        seconds: time to search at most.

    Returns:
        The chains, shortest first, each from another owner. One chain with `Root.HIDDEN` where nothing that Python
        sees holds the tensor, or with a cycle where only a circle of references does.
    """
    _check(limit)
    with Heap.now(seconds) as heap:
        search = OwnerSearch(heap, limit)
        if is_a(tensor, STORAGES):
            search.add_storage(storage_of(tensor))
        else:
            search.add_tensor(tensor)
        del tensor
        return search.run()


def owners_in(heap: Heap, storage: int, *, limit: int = 5) -> tuple[OwnerChain, ...]:
    """Find what keeps a storage alive, in a heap that several searches share.

    Args:
        heap: the process as it is.
        storage: its address (``UntypedStorage._cdata``), so that the caller holds nothing.
        limit: chains to give at most.
    """
    _check(limit)
    search = OwnerSearch(heap, limit)
    search.add_storage(storage)
    return search.run()


def _check(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"limit {limit} is not positive")


class OwnerSearch:
    """One search for the owners of one storage."""

    def __init__(self, heap: Heap, limit: int) -> None:
        self.heap, self.graph, self.limit = heap, heap.graph, limit
        self.objects: dict[int, Any] = {}
        # Each object leads to the one that it holds, and to how it does where only the search knows.
        self.toward: dict[int, tuple[int, str | None]] = {}
        self.edges: list[tuple[int, int, bool]] = []  # every reference found: holder, held, through the graph
        self.level: list[int] = []
        self.next: list[int] = []
        self.ends: set[int] = set()
        self.chains: list[OwnerChain] = []
        self.complete = True
        self._looked_for_arrays = False
        self.followed = 0
        self._found: list[Any] = []
        self._batch: list[Any] = []
        self._mark = object()  # the last argument of every question
        self._ignored = heap.own | {
            id(own) for own in (self.__dict__, self.objects, self._found, self._batch)
        }

    # -- where it begins -----------------------------------------------------------------------------------------

    def add_tensor(self, tensor: Any) -> None:
        """Search for the owners of a tensor and of all that shares its storage."""
        self._source(tensor)
        if key := storage_key(tensor):
            self.add_storage(key)

    def add_storage(self, key: int) -> None:
        """Search for the owners of a storage, given the address of its C++ object."""
        for tensor in self.heap.tensors:
            if storage_key(tensor) == key:
                self._source(tensor)
        for storage in self.heap.storages:
            if storage_of(storage) == key:
                self._source(storage)
        storage = None
        for node, label in self.graph.saved.get(key, ()):
            self._visit(self.graph.nodes[node], 0, f" {label}", graph=True)

    def _source(self, value: Any) -> None:
        if id(value) not in self.objects:
            self._visit(value, 0, "")

    # -- the search ----------------------------------------------------------------------------------------------

    def run(self) -> tuple[OwnerChain, ...]:
        """Search level by level until there are enough chains."""
        while self.next and len(self.chains) < self.limit:
            self.level, self.next = self.next, []
            self.followed += len(self.level)
            if self.followed > _MOST_OBJECTS or time.thread_time() > self.heap.deadline:
                self.complete = False
                break
            self._expand()
            if not self.next and not self.chains:
                self._look_for_arrays()
        if not self.chains:
            self.chains.append(self._without_owner())
        chains = tuple(self.chains[: self.limit])
        self.objects.clear()
        return chains

    def _expand(self) -> None:
        """Visit whatever holds an object of this level."""
        for number in self.level:
            self._by_graph(number)
        asked = self._worth_asking()
        for start in range(0, len(asked), _BATCH):
            if len(self.chains) >= self.limit:
                return
            if time.thread_time() > self.heap.deadline:
                self.complete = False
                return
            wanted = asked[start : start + _BATCH]
            self._batch.extend(self.objects[number] for number in wanted)
            self._batch.append(self._mark)
            self._found.extend(gc.get_referrers(*self._batch))
            self._batch.clear()
            targets = set(wanted)
            while self._found:
                holder = self._found.pop()
                if not self._is_ours(holder):
                    for held in targets.intersection(map(id, gc.get_referents(holder))):
                        self._visit(holder, held)
            holder = None

    def _look_for_arrays(self) -> None:
        """Visit the numpy arrays that share a tensor's memory, which the collector does not track."""
        numpy = sys.modules.get("numpy")
        if numpy is None or self._looked_for_arrays:
            return
        self._looked_for_arrays = True
        for holder in gc.get_objects():
            if time.thread_time() > self.heap.deadline:
                self.complete = False
                break
            for held in gc.get_referents(holder):
                if issubclass(type(held), numpy.ndarray) and not self._is_ours(holder):
                    base = _array_base(held, numpy.ndarray)
                    if base in self.objects:
                        self._visit(held, base, " -> numpy array")

    def _worth_asking(self) -> list[int]:
        """The objects of this level that something in Python may hold: a graph leads to many that only C++ holds."""
        asked: list[int] = []
        rest: list[int] = []
        for number in self.level:
            (asked if self._is_held_by_python(number) else rest).append(number)
        if len(asked) > _WIDEST:
            self.complete = False
        return asked[:_WIDEST] + rest[:_BATCH]  # a few of the rest, should another torch count otherwise

    def _is_held_by_python(self, number: int) -> bool:
        """Whether an object has more references than this search and C++ have to it."""
        nodes = self.graph.nodes
        if number in nodes:  # this, `Graph.nodes` and `OwnerSearch.objects`, beyond what every node has
            return bool(sys.getrefcount(nodes[number]) - 1 > self.graph.least_references)
        value = self.objects[number]
        if not issubclass(type(value), torch.Tensor):
            return True
        try:
            with DisableTorchFunction():
                shared = _USE_COUNT(value) > 1  # C++ has a reference for all of its own
        except Exception:
            return True
        # Ours are: `value`, the argument, `OwnerSearch.objects`, `Heap.tensors`, and the graph's list of results.
        return bool(sys.getrefcount(value) - shared > 5)

    def _by_graph(self, number: int) -> None:
        """Visit what holds a node of the graph, or an object that a hook gave the graph instead of a tensor."""
        graph = self.graph
        for tensor in self.heap.gradients.get(number, ()):
            self._visit(tensor, number, ".grad", graph=True)
        for node, label in graph.packed.get(number, ()):
            self._visit(graph.nodes[node], number, f" {label}", graph=True)
        if number not in graph.nodes:
            return
        # All nodes downstream at once: each level of the search costs a pass over the heap, a node costs nothing.
        waiting = [number]
        for node in waiting:
            for tensor in graph.results.get(node, ()):
                self._visit(tensor, node, f" -> grad_fn {type(graph.nodes[node]).__name__}", graph=True)
            for consumer in graph.consumers.get(node, ()):
                fresh = consumer not in self.objects
                self._visit(
                    graph.nodes[consumer], node, f" -> {type(graph.nodes[node]).__name__}", graph=True
                )
                if fresh:
                    waiting.append(consumer)

    def _visit(self, holder: Any, held: int, told: str | None = None, *, graph: bool = False) -> None:
        """Note that ``holder`` holds ``held``; a new holder is followed further unless a chain ends with it."""
        number = id(holder)
        if held:
            self.edges.append((number, held, graph))
        if number in self.toward and number not in self.ends:
            return
        self.toward[number] = (held, told)
        self.objects[number] = holder
        for variable in self.heap.variables.get(number, ()):
            self._chain(Root.LOCAL, number, variable)
        for variable in self.heap.contexts.get(number, ()):
            self._chain(Root.CONTEXT, number, variable)
        if self._is_owner(holder, number):
            self.ends.add(number)  # nothing leads further; another variable of it makes another chain
        else:
            self.next.append(number)

    def _is_owner(self, holder: Any, number: int) -> bool:
        """Write a chain where the holder needs no owner itself."""
        kind = type(holder)
        if issubclass(kind, type):
            self._chain(Root.CLASS, number, _class_name(holder))
            return True
        if kind is dict:
            name = self.heap.modules.get(number)
            if name is None and "__builtins__" in holder and type(holder.get("__name__")) is str:
                name = holder["__name__"]  # globals of code that was run without a module
            if name is not None:
                self._chain(Root.GLOBAL, number, _program_name(name))
                return True
        # A running function's variables are known from the start; a module is known by its dictionary.
        return issubclass(kind, types.ModuleType) or number in self.heap.running

    def _chain(self, root: Root, number: int, start: str) -> None:
        """Write the chain from an owner down to the tensor."""
        if len(self.chains) < self.limit:
            path = self._path(number, start, attributes=root is Root.GLOBAL)
            self.chains.append(
                OwnerChain(
                    root=root, text=path.finish(), links=tuple(path.links), through=frozenset(path.through)
                )
            )

    def _path(self, number: int, start: str, *, attributes: bool = False) -> Path:
        """The way from an object down to the tensor, long stretches of graph in short."""
        steps: list[tuple[int, int, str | None]] = []
        while number:
            held, told = self.toward[number]
            if held or told:
                steps.append((number, held, told))
            number = held
        path = Path(start, attributes=attributes)
        nodes = self.graph.nodes
        for place, (holder, held, told) in enumerate(steps):
            inside = holder in nodes and held in nodes
            if inside and any(a not in nodes or b not in nodes for a, b, _ in steps[place : place + 2]):
                pass  # the last node of a stretch is named
            elif inside and place and steps[place - 1][0] in nodes:
                told = "" if path.text.endswith("…") else " -> …"
            if told and (holder in nodes or held in nodes):
                path.through.add(Through.AUTOGRAD)
            if told == ".grad":
                path.through.add(Through.GRADIENT)
            path.step(self.objects[holder], self.objects.get(held), told)
        return path

    # -- nothing owns it -----------------------------------------------------------------------------------------

    def _without_owner(self) -> OwnerChain:
        """The chain to report where no owner was found."""
        if not self.complete or not self.graph.complete:
            return OwnerChain(
                root=Root.UNFINISHED, text="the search ended at its bounds before an owner", links=()
            )
        circle, hidden = self._circle()
        if not circle or not (hidden or self._is_closed(circle)):
            return self._hidden()
        kinds = tuple(dict.fromkeys(type_name(self.objects[number]) for number in circle))
        root = Root.GRAPH_CYCLE if hidden else Root.DEAD_CYCLE
        plain = [one for one in circle if self._is_telling(one)]
        first = plain[-1] if plain else circle[-1]
        path = self._path(first, type_name(self.objects[first]))
        return OwnerChain(
            root=root,
            text=f"{root.value} of {', '.join(kinds)}: {path.finish()}",
            links=tuple(path.links),
            through=frozenset(path.through),
            cycle=kinds,
        )

    def _is_telling(self, number: int) -> bool:
        """Whether an object says more to people than a container or a tensor."""
        kinds = (dict, list, tuple, types.CellType, torch.Tensor)
        return number not in self.graph.nodes and not is_a(self.objects[number], kinds)

    def _hidden(self) -> OwnerChain:
        """The chain of a tensor that something invisible holds, or holds the first known link to."""
        entered = {held for _, held, _ in self.edges}
        first = next((one for one in self.toward if one not in entered and self.toward[one][0]), 0)
        path = self._path(first, type_name(self.objects[first]) if first else "")
        text = "held by C++ or a torch object that the garbage collector cannot see"
        return OwnerChain(
            root=Root.HIDDEN,
            text=f"{text} -> {path.finish()}" if first else text,
            links=tuple(path.links),
            through=frozenset(path.through),
        )

    def _circle(self) -> tuple[list[int], bool]:
        """A circle of references that nothing outside leads to, and whether the collector cannot see all of it."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        numbers = list(self.toward)
        place = {number: index for index, number in enumerate(numbers)}
        if not self.edges:
            return [], False
        ends = [(place[holder], place[held]) for holder, held, _ in self.edges]
        rows, columns = zip(*ends, strict=True)
        matrix = coo_array(([1] * len(ends), (rows, columns)), shape=(len(numbers), len(numbers)))
        _, part = connected_components(matrix, directed=True, connection="strong")
        entered = {int(part[held]) for holder, held in ends if part[holder] != part[held]}
        sizes = Counter(part.tolist())
        own = {int(part[holder]) for holder, held in ends if holder == held}
        for candidate, size in sizes.items():
            if candidate in entered or not (size > 1 or candidate in own):
                continue
            members = [number for index, number in enumerate(numbers) if part[index] == candidate]
            inside = set(members)
            hidden = any(
                graph and holder in inside and held in inside and not self._is_traversed(holder, held)
                for holder, held, graph in self.edges
            )
            return members, hidden
        return [], False

    def _is_traversed(self, holder: int, held: int) -> bool:
        """Whether the collector follows an edge of the graph: from a tensor to the custom Function that made it.

        (torch/csrc/autograd/python_variable.cpp, THPVariable_subclass_traverse.)
        """
        return holder not in self.graph.nodes and issubclass(type(self.objects[held]), FunctionBase)

    def _is_closed(self, circle: list[int]) -> bool:
        """Whether all references to the objects of a circle come from within it."""
        inner: Counter[int] = Counter()
        known = {end for holder, held, graph in self.edges if graph for end in (holder, held)}
        for number in circle:
            inner.update(map(id, gc.get_referents(self.objects[number])))
        self.objects[0] = object()
        ours = sys.getrefcount(self.objects[0])
        del self.objects[0]
        # C++ has references of its own to what the graph leads through; the graph was followed anyway.
        return all(
            number in known or sys.getrefcount(self.objects[number]) - ours <= inner[number]
            for number in circle
        )

    def _is_ours(self, holder: Any) -> bool:
        """Whether an object is part of vramfit, or of this search."""
        if id(holder) in self._ignored:
            return True
        kind = type(holder)
        if kind is tuple and holder and holder[-1] is self._mark:
            return True  # the arguments of a question: since Python 3.13 they are among its answers
        if kind is types.FrameType:
            return str(holder.f_code.co_filename).startswith(HERE)
        if kind is types.GeneratorType:
            return str(holder.gi_code.co_filename).startswith(HERE)
        module = type.__dict__["__module__"].__get__(kind)
        return isinstance(module, str) and module.startswith("vramfit.")


def _array_base(value: Any, array: type) -> int:
    """Id of the object that owns the memory of a numpy array, past arrays that are views; 0 if the array does."""
    base = array.__dict__["base"].__get__(value)
    while base is not None and issubclass(type(base), array):
        base = array.__dict__["base"].__get__(base)
    return 0 if base is None else id(base)


def _class_name(kind: type) -> str:
    module = type.__dict__["__module__"].__get__(kind)
    name = type.__dict__["__qualname__"].__get__(kind)
    return f"{_program_name(module)}.{name}" if isinstance(module, str) else str(name)


def _program_name(module: str) -> str:
    """A module's name; the program's own module goes by the name of its file."""
    if module != "__main__":
        return module
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return FilePath(file).stem if isinstance(file, str) else module
