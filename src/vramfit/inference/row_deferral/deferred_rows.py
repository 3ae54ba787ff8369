"""A tensor that knows how its rows come about. See NOTE [Deferred rows] in `vramfit.inference.row_deferral`.

NOTE [Axes of a recipe]: the product that begins a recipe numbers the dimensions that it may be cut along: of scores the
batch, the heads and the queries, of a linear layer all but the last. Each operation keeps track of where they went. One
that mixes entries of an axis (a mean over the heads) loses it: what comes after is cut along the others alone. Where an
axis went is seen from the operation itself, called with nothing along that axis: its result is empty there, and costs
nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vramfit.errors import VramfitError
from vramfit.torch_internals.pytree import tree_flatten, tree_map_only, tree_unflatten
from vramfit.torch_internals.tensor_objects import make_wrapper_subclass

Spans: TypeAlias = Mapping[int, tuple[int, int]]
"""Where a block begins and ends, by axis; an axis that is missing is taken whole."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """A tensor of which an operation takes the same entries as of the deferred one.

    Attributes:
        dims: where its axes are.
    """

    tensor: torch.Tensor
    dims: Mapping[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    def empty(self, axis: int) -> torch.Tensor:
        """The tensor with nothing along an axis."""
        return self.block({axis: (0, 0)})

    def block(self, spans: Spans) -> torch.Tensor:
        """A view of a block."""
        found = self.tensor
        for axis, dim in self.dims.items():
            if axis in spans:
                start, stop = spans[axis]
                found = found.narrow(dim, start, stop - start)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RowView:
    """Another recipe's result, of which an operation takes the same entries, though its axes are numbered otherwise.

    Attributes:
        axes: for axes of the operation, those of the other recipe.
        dims: where the operation's axes are in the result; what is no axis of the other recipe is computed whole, and
            cut.
    """

    node: RowNode
    axes: Mapping[int, int]
    dims: Mapping[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.node.shape

    def empty(self, axis: int) -> torch.Tensor:
        """A result with nothing along an axis; where it has not that axis, one value in the place of all."""
        if axis not in self.dims:
            return self.node.sample.new_empty(()).expand(self.shape)
        sizes = list(self.shape)
        sizes[self.dims[axis]] = 0
        return self.node.sample.new_empty(sizes)

    def block(self, spans: Spans) -> torch.Tensor:
        """A block, computed now."""
        inner = {self.axes[axis]: span for axis, span in spans.items() if axis in self.axes}
        found = RowProgram(self.node).block(inner)
        for axis, dim in self.dims.items():
            if axis in spans and axis not in self.axes:
                start, stop = spans[axis]
                found = found.narrow(dim, start, stop - start)
        return found


@dataclass(slots=True, eq=False)
class RowNode:
    """One operation of a recipe.

    Attributes:
        func: the operation, called with `args` and `kwargs`, in which a `RowNode` stands for its block and a `RowSlice`
            for that of a tensor that exists, a `RowView` for that of another recipe.
        shape: of the result.
        dims: where its axes are. See NOTE [Axes of a recipe].
        samples: for each axis, the result with nothing along it.
        item: which of several results; None for the only one.
        autocast: whether it was on, and its dtype.
        versions: of the tensors that exist, so that a later change is noticed.
        product: whether a product is on the way, which is not computed more often than need be.
        done: whether it was computed once.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dims: Mapping[int, int]
    samples: Mapping[int, torch.Tensor]
    item: int | None = None
    autocast: tuple[bool, torch.dtype] | None = None
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    parents: tuple[RowNode, ...] = ()
    product: bool = False
    done: bool = False

    @property
    def sample(self) -> torch.Tensor:
        """A result with nothing in it, of the right dtype and device."""
        return next(iter(self.samples.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole result."""
        return math.prod(self.shape) * self.sample.element_size()

    def call(self, values: dict[int, Any], spans: Spans) -> Any:
        """The operation for a block, given the blocks of the operations before."""

        def resolved(leaf: Any) -> Any:
            if isinstance(leaf, RowNode):
                return values[id(leaf)]
            return leaf.block(spans) if isinstance(leaf, RowSlice | RowView) else leaf

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
        self._dead: list[list[int]] = [[] for _ in self._order]
        for known, place in last.items():
            self._dead[place].append(known)
        for one in self._order:
            if any(tensor._version != version for tensor, version in one.versions):
                raise VramfitError(
                    "a tensor was written to that attention-chunking still had to read",
                    "Leave the technique out for this model",
                )

    def block(self, spans: Spans) -> torch.Tensor:
        """A block of the result; what the recipe needs no more goes at once."""
        values: dict[int, Any] = {}
        for node, dead in zip(self._order, self._dead, strict=True):
            values[id(node)] = node.call(values, spans)
            for known in dead:
                values.pop(known, None)
        found: torch.Tensor = values[id(self.node)]
        return found

    def finish(self) -> None:
        """Note that everything was computed once."""
        for node in self._order:
            node.done = True

    def results(self) -> Iterator[tuple[int, dict[int, int]]]:
        """Bytes and extents by axis of all results on the way, those of other recipes too."""
        for node in self._order:
            yield node.nbytes, {axis: node.shape[dim] for axis, dim in node.dims.items()}
            for leaf in tree_flatten((node.args, node.kwargs))[0]:
                if isinstance(leaf, RowView):
                    outer = {inner: axis for axis, inner in leaf.axes.items()}
                    for nbytes, extents in RowProgram(leaf.node).results():
                        yield nbytes, {outer[one]: size for one, size in extents.items() if one in outer}

    def blocks(self, slice_bytes: int) -> Iterator[Spans]:
        """Blocks in which no result on the way takes more than some bytes, or one entry of each axis.

        The innermost axes are kept whole as far as possible: a head's scores read its keys once. What has few axes is
        looked at first, since there is less to choose.
        """
        node = self.node
        axes = sorted(node.dims)
        extents = {axis: node.shape[node.dims[axis]] for axis in axes}
        steps = dict(extents)
        on_the_way = [(nbytes, sizes) for nbytes, sizes in self.results() if nbytes > slice_bytes]
        for nbytes, sizes in sorted(on_the_way, key=lambda item: len(item[1])):
            shared = [axis for axis in axes if axis in sizes]
            for axis in shared:
                held = nbytes * math.prod(steps[one] for one in shared)
                held = held // math.prod(extents[one] for one in shared)
                if held <= slice_bytes:
                    break
                steps[axis] = max(1, steps[axis] * slice_bytes // held)

        def nested(rest: list[int], spans: dict[int, tuple[int, int]]) -> Iterator[Spans]:
            if not rest:
                yield spans
                return
            axis, *others = rest
            for start in range(0, extents[axis], steps[axis]):
                stop = min(start + steps[axis], extents[axis])
                yield from nested(others, {**spans, axis: (start, stop)})

        yield from nested(axes, {})


@dataclass(slots=True, eq=False)
class RowsFacts:
    """What a deferred tensor is.

    Attributes:
        node: the last operation of its recipe.
        slice_bytes: of it that exist at once.
        full: the values, once somebody needed them.
        run: runs an operation that has it among its arguments.
        aliased: whether another one is a view of it, or it of another.
    """

    node: RowNode
    slice_bytes: int
    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    full: torch.Tensor | None = None
    aliased: bool = False


class DeferredRows(torch.Tensor):
    """A tensor whose rows are computed when they are needed."""

    facts: RowsFacts

    @staticmethod
    def make(facts: RowsFacts) -> DeferredRows:
        """A tensor that stands for what a recipe gives."""
        node = facts.node
        made: DeferredRows = make_wrapper_subclass(
            DeferredRows, node.shape, dtype=node.sample.dtype, device=node.sample.device
        )
        made.facts = facts
        return made

    def values(self) -> torch.Tensor:
        """All values, kept from now on."""
        if self.facts.full is None:
            program = RowProgram(self.facts.node)
            with torch.no_grad():
                self.facts.full = program.block({})
            program.finish()
        return self.facts.full

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredRows))
        return first.facts.run(func, args, kwargs or {})

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
