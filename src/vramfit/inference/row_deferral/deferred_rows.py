"""A tensor that knows how its rows come about. See NOTE [Deferred rows] in `vramfit.inference.row_deferral`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vramfit.errors import VramfitError


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A tensor of which an operation takes the same rows as of the deferred one."""

    tensor: torch.Tensor
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class RowNode:
    """One operation of a recipe.

    Attributes:
        func: the operation, called with `args` and `kwargs`, in which a `RowNode` stands for its rows and a `RowSlice`
            for those of a tensor that exists.
        rows: how many there are.
        sample: the result for no rows at all, which has the dtype, the device and all other sizes.
        dim: which dimension of the result the rows are.
        item: which of several results; None for the only one.
        autocast: whether it was on, and its dtype.
        versions: of the tensors that exist, so that a later change is noticed.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    sample: torch.Tensor
    dim: int
    item: int | None = None
    autocast: tuple[bool, torch.dtype] | None = None
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    parents: tuple[RowNode, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, all rows included."""
        sizes = list(self.sample.shape)
        sizes[self.dim] = self.rows
        return tuple(sizes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the result."""
        others = (size for dim, size in enumerate(self.sample.shape) if dim != self.dim)
        return math.prod(others) * self.sample.element_size()

    def call(self, values: dict[int, Any], start: int, stop: int) -> Any:
        """The operation for some rows, given those of the operations before."""

        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, RowNode):
                return values[id(leaf)]
            if isinstance(leaf, RowSlice):
                return leaf.tensor.narrow(leaf.dim, start, stop - start)
            return leaf

        leaves, spec = tree_flatten((self.args, self.kwargs))
        args, kwargs = tree_unflatten([resolved(leaf) for leaf in leaves], spec)
        with _autocast(self.autocast, self.sample.device.type):
            found = self.func(*args, **kwargs)
        return found if self.item is None else found[self.item]


class RowProgram:
    """A recipe as a list of operations, in an order in which each finds what it needs, with the end of each value.

    Raises:
        VramfitError: a tensor that it reads was changed since.
    """

    def __init__(self, node: RowNode) -> None:
        self.node = node
        self._order: list[RowNode] = []
        self._dead: list[list[int]] = []
        seen: set[int] = set()
        stack = [(node, False)]
        while stack:
            one, parents_done = stack.pop()
            if parents_done:
                self._order.append(one)
            elif id(one) not in seen:
                seen.add(id(one))
                stack.append((one, True))
                stack.extend((parent, False) for parent in one.parents)
        last = {id(parent): place for place, one in enumerate(self._order) for parent in one.parents}
        self._dead = [[] for _ in self._order]
        for known, place in last.items():
            self._dead[place].append(known)
        for one in self._order:
            if any(tensor._version != version for tensor, version in one.versions):
                raise VramfitError(
                    "a tensor was written to that attention-chunking still had to read",
                    "Leave the technique out for this model",
                )

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Some rows of the result; what the recipe needs no more goes at once."""
        values: dict[int, Any] = {}
        for node, dead in zip(self._order, self._dead, strict=True):
            values[id(node)] = node.call(values, start, stop)
            for known in dead:
                values.pop(known, None)
        found: torch.Tensor = values[id(self.node)]
        return found

    def whole(self) -> torch.Tensor:
        """All rows at once, by the calls that the program made."""
        return self.rows(0, self.node.rows)


@dataclass(slots=True, eq=False)
class RowsFacts:
    """What a deferred tensor is.

    Attributes:
        node: the last operation of its recipe.
        slice_bytes: of rows that exist at once.
        full: the values, once somebody needed them.
        aliased: whether another one is a view of it, or it of another.
    """

    node: RowNode
    slice_bytes: int
    full: torch.Tensor | None = None
    aliased: bool = False


class DeferredRows(torch.Tensor):
    """A tensor whose rows are computed when they are needed."""

    facts: RowsFacts

    @staticmethod
    def make(node: RowNode, slice_bytes: int) -> DeferredRows:
        """A tensor that stands for what a recipe gives."""
        made: DeferredRows = torch.Tensor._make_wrapper_subclass(
            DeferredRows, node.shape, dtype=node.sample.dtype, device=node.sample.device
        )
        made.facts = RowsFacts(node, slice_bytes)
        return made

    def values(self) -> torch.Tensor:
        """All values, kept from now on."""
        if self.facts.full is None:
            with torch.no_grad():
                self.facts.full = RowProgram(self.facts.node).whole()
        return self.facts.full

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from vramfit.inference.row_deferral.row_operations import call_with_rows

        return call_with_rows(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the function
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Torch came past ``__torch_function__``: the values are enough."""
        args, kwargs = with_values((args, kwargs or {}))
        return func(*args, **kwargs)


def with_values(tree: Any) -> Any:
    """Arguments or outputs with the values in place of what is deferred."""
    return tree_map_only(DeferredRows, DeferredRows.values, tree)


def autocast_now(device_type: str) -> tuple[bool, torch.dtype] | None:
    """The state of autocast; None where the device has none."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


@contextlib.contextmanager
def _autocast(state: tuple[bool, torch.dtype] | None, device_type: str) -> Iterator[None]:
    if state is None or state == autocast_now(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=state[1], enabled=state[0]):
        yield

