"""Which name of the program holds a storage, and which other storages hang on the same name.

NOTE [What counts as the name]
A chain of owners leads from a variable down to a tensor, often through much that is a library's: a trainer, its loop, a
module, a list. The name that a person would look for is the innermost one that the program gave: the attribute that
has the list, or the variable. What torch names inside its own objects (``optimizer.state``, ``module._parameters``) is
no such name; there the optimizer or the model counts as a whole. A cached result belongs to its function, the
variables of a caught error's frames belong to the error.
"""

from __future__ import annotations

import gc
import time
import types
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.holders.chains import Link, OwnerChain, Root
from vramfit.holders.heap import Heap, is_node, storage_key, storage_of
from vramfit.holders.naming import LRU, Path, instance_dict, is_a, type_name
from vramfit.holders.owners import OwnerSearch
from vramfit.torch_internals.autograd_engine import TensorBase
from vramfit.torch_internals.dispatch import DisableTorchFunction

_MOST_REACHED = 200_000
_GRAD_FN: Any = TensorBase.grad_fn
_GRAD: Any = TensorBase.grad
_NUMEL: Any = TensorBase.numel
_UNNAMED = (torch.optim.Optimizer, BaseException)
"""Objects that count as a whole: the names inside are not the program's."""

_PARTS = ("_parameters", "_buffers", "_modules")
"""Of a module: what they hold belongs to the model as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NameHold:
    """A name of the program and what hangs on it.

    Attributes:
        chain: the way from the owner down to the storage that was asked about.
        name: what the program calls it: ``checkpoint``, ``schedule.optimizer``, ``M.outputs``.
        where: the function and line of a local variable, ``evaluate() (train.py:17)``, or the module of a global one;
            empty for others.
        kind: type of what has the name: ``list``, ``torch.Tensor``; empty for a cycle.
        elements: number of elements, where it is a tensor; else 0.
        storages: all that the name keeps alive, by the address of the C++ object.
    """

    chain: OwnerChain
    name: str
    where: str
    kind: str
    elements: int
    storages: frozenset[int]


def hold_in(heap: Heap, storage: int, *, seconds: float = 1.0) -> NameHold | None:
    """Find the name that holds a storage, in a heap that several searches share.

    Nothing is kept alive or changed, and no code of the program runs; see `vramfit.holders.owners`.

    Args:
        heap: the process as it is.
        storage: its address (``UntypedStorage._cdata``), so that the caller holds nothing.
        seconds: processor time for the search at most, within that of the heap.

    Returns:
        None where no owner was found before the bounds of the search, or only C++ has the storage.
    """
    deadline = heap.deadline
    heap.deadline = min(deadline, time.thread_time() + seconds)
    try:
        search = HoldSearch(heap)
        search.add_storage(storage)
        search.run()
        return search.hold
    finally:
        heap.deadline = deadline


class HoldSearch(OwnerSearch):
    """A search for one owner, which looks at what its name holds before it lets go of the objects."""

    def __init__(self, heap: Heap) -> None:
        super().__init__(heap, limit=1)
        self.hold: NameHold | None = None

    def _look_for_arrays(self) -> None:
        """Leave numpy arrays aside: they share the memory of no card, and the search takes a second."""

    def _chain(self, root: Root, number: int, start: str) -> None:
        super()._chain(root, number, start)
        if self.hold is None and self.chains:
            self._name(self.chains[0], number, start)

    def _without_owner(self) -> OwnerChain:
        chain = super()._without_owner()
        if chain.cycle:
            # Every link is a part of the circle or leads from it to the storage.
            first = next((one for one in self.toward if type_name(self.objects[one]) in chain.cycle), 0)
            storages = self._reached(first) if first else frozenset()
            kinds = ", ".join(chain.cycle[:3]) + (", …" if len(chain.cycle) > 3 else "")
            self.hold = NameHold(chain=chain, name=kinds, where="", kind="", elements=0, storages=storages)
        return chain

    def _name(self, chain: OwnerChain, number: int, start: str) -> None:
        steps, links = self._steps(number, start, attributes=chain.root is Root.GLOBAL)
        name, anchor = self._innermost(chain, steps, links, start)
        named = _content(self.objects.get(anchor))
        tensor = is_a(named, torch.Tensor)
        self.hold = NameHold(
            chain=chain,
            name=name,
            where=_where(chain, start),
            kind="torch.Tensor" if tensor else type_name(named),
            elements=_elements(named) if tensor else 0,
            storages=self._reached(anchor),
        )
        named = None

    def _steps(
        self, number: int, start: str, *, attributes: bool
    ) -> tuple[list[tuple[int, int]], list[Link]]:
        """Holder and held of each link of the way from an object, and how each holds the next."""
        steps: list[tuple[int, int]] = []
        path = Path(start, attributes=attributes)
        while number:
            held, told = self.toward[number]
            if held or told:
                steps.append((number, held))
                path.step(self.objects[number], self.objects.get(held), told)
            number = held
        return steps, path.links

    def _innermost(
        self, chain: OwnerChain, steps: list[tuple[int, int]], links: list[Link], start: str
    ) -> tuple[str, int]:
        """The innermost name of a chain, and the object that has it. See NOTE [What counts as the name]."""
        for at in range(len(steps) - 1, -1, -1):
            holder, held = steps[at]
            edge = links[at].edge
            if at == 0 and chain.root is Root.GLOBAL:
                break  # the variable of a module: the start of the chain
            if edge.startswith("-> closure"):
                return (
                    f"{edge.removeprefix('-> closure').strip()} in the closure of {self._called(steps, at)}",
                    held,
                )
            if edge.startswith("-> cached"):
                number = self._last(steps, at, lambda value: is_a(value, LRU))
                return _called(self.objects.get(number)), number or holder
            if edge.startswith("-> suspended"):
                code, _, local = edge.removeprefix("-> suspended ").partition(" local ")
                return f"{local or 'a value'} in the suspended {code}", holder
            if is_a(self.objects[holder], BaseException):
                return self._start(chain, links, at, start), holder
            if edge.startswith(".") and edge[1:].isidentifier():
                owner = at
                while owner and is_a(self.objects[steps[owner][0]], dict) and not links[owner - 1].edge:
                    owner -= 1
                if self._is_named(steps[owner][0], holder):
                    return self._attribute(chain, steps, links, owner, start) + edge, held
        if chain.root is Root.GLOBAL and steps:
            return links[0].edge.removeprefix(".") or start, steps[0][1] or steps[0][0]
        number = steps[0][0] if steps else next(iter(self.objects), 0)
        return start.rpartition(" local ")[2] if " local " in start else start, number

    def _is_named(self, owner: int, holder: int) -> bool:
        """Whether an attribute of an object is a name that the program gave.

        Args:
            owner: the object.
            holder: its dictionary that has the attribute, or the object itself.
        """
        value = self.objects[owner]
        if is_a(value, _UNNAMED) or is_a(value, torch.Tensor) or owner in self.graph.nodes:
            return False
        if is_a(value, torch.nn.Module):
            attributes = instance_dict(value) or {}
            return all(attributes.get(name) is not self.objects[holder] for name in _PARTS)
        return not is_a(value, (types.FunctionType, types.MethodType, type))

    def _attribute(
        self, chain: OwnerChain, steps: list[tuple[int, int]], links: list[Link], at: int, start: str
    ) -> str:
        """What has an attribute, in words: the variable if it is the value of one, else its class."""
        if chain.root is Root.GLOBAL and at == 1:
            return links[0].edge.removeprefix(".")
        if chain.root is Root.LOCAL and at == 0 and not start.endswith(" local self"):
            return start.rpartition(" local ")[2]
        return type_name(self.objects[steps[at][0]]).rpartition(".")[2]

    def _start(self, chain: OwnerChain, links: list[Link], at: int, start: str) -> str:
        """The name of what has an error that a chain passes through: the text of the chain up to its place there."""
        begin = "" if chain.root is Root.GLOBAL else start.rpartition(" local ")[2]
        text = f"{begin}{''.join(link.edge for link in links[:at])}".removeprefix(".")
        return text.partition("[")[0] or text

    def _called(self, steps: list[tuple[int, int]], at: int) -> str:
        number = self._last(steps, at, lambda value: is_a(value, types.FunctionType))
        return _called(self.objects.get(number))

    def _last(self, steps: list[tuple[int, int]], at: int, wanted: Any) -> int:
        """The innermost object of the way down to a link that is as wanted; 0 if none is."""
        return next((steps[one][0] for one in range(at, -1, -1) if wanted(self.objects[steps[one][0]])), 0)

    # -- what hangs on it ----------------------------------------------------------------------------------------

    def _reached(self, number: int) -> frozenset[int]:
        """The storages that an object keeps alive, within bounds: through containers, attributes and the graph."""
        found: set[int] = set()
        seen: set[int] = set()
        waiting: list[Any] = [self.objects[number]] if number in self.objects else []
        with DisableTorchFunction():
            while waiting and len(seen) < _MOST_REACHED:
                value = waiting.pop()
                if id(value) in seen or self._is_closed_to_us(value):
                    continue
                seen.add(id(value))
                if is_a(value, torch.Tensor):
                    found.add(storage_key(value))
                    waiting.extend(_beside(value))
                elif is_a(value, (torch.UntypedStorage, torch.TypedStorage)):
                    found.add(storage_of(value))
                elif is_node(value):
                    found.update(self.heap.stored_by(id(value)))
                    waiting.extend(_inputs(value))
                frame = is_a(value, types.FrameType)
                waiting.extend(
                    held for held in gc.get_referents(value) if not (frame and is_a(held, types.FrameType))
                )
                value = None
        waiting.clear()
        found.discard(0)
        return frozenset(found)

    def _is_closed_to_us(self, value: Any) -> bool:
        """Whether a walk does not go on at an object: all of the program hangs on modules and classes."""
        if is_a(value, (types.ModuleType, type, types.CodeType, str, int, float, torch.device, torch.dtype)):
            return True
        if id(value) in self.heap.modules or (type(value) is dict and "__builtins__" in value):
            return True
        return id(value) in self.heap.running or self._is_ours(value)


def _where(chain: OwnerChain, start: str) -> str:
    """The function or module whose variable a chain begins with."""
    if chain.root is Root.LOCAL:
        return start.rpartition(" local ")[0]
    return start if chain.root is Root.GLOBAL else ""


def _content(value: Any) -> Any:
    """What the cell of a closure has; anything else as it is."""
    while is_a(value, types.CellType):
        try:
            value = value.cell_contents
        except ValueError:  # empty
            return None
    return value


def _elements(tensor: Any) -> int:
    with DisableTorchFunction():
        return int(_NUMEL(tensor))


def _called(function: Any) -> str:
    """The name of a function, or of the function that a cache wraps."""
    if is_a(function, types.FunctionType):
        return str(function.__qualname__)
    name = (instance_dict(function) or {}).get("__qualname__")
    return name if type(name) is str else "a function"


def _beside(tensor: Any) -> list[Any]:
    """What a tensor keeps alive that the collector does not see: the graph that made it, its gradient."""
    try:
        parts = [_GRAD_FN.__get__(tensor), _GRAD.__get__(tensor) if tensor.is_leaf else None]
    except Exception:  # a subclass that refuses
        return []
    return [part for part in parts if part is not None]


def _inputs(node: Any) -> list[Any]:
    """The nodes that a node of the graph keeps alive."""
    try:
        return [entry[0] for entry in node.next_functions if entry[0] is not None]
    except Exception:
        return []
