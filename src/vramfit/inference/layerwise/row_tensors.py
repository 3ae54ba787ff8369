"""What stands for a tensor while the network is called: its shape, without its values."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from vramfit.errors import UsageError
from vramfit.inference.layerwise.row_nodes import LayerNode, update_front
from vramfit.torch_internals.dispatch import DisableTorchFunctionSubclass
from vramfit.torch_internals.tensor_objects import make_wrapper_subclass


class RowKeeper(Protocol):
    """What row tensors belong to: it knows what calls with them mean."""

    holds: weakref.WeakSet[Hold]

    def whole(self, node: LayerNode) -> torch.Tensor:
        """All of the values of a node."""
        ...

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of a torch function with row tensors."""
        ...

    def dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation from C++ with row tensors."""
        ...


class Hold:
    """A tensor's hold on a node; it ends with the tensor, or when the tensor becomes another's."""

    __slots__ = ("__weakref__", "node")

    def __init__(self, node: LayerNode, session: RowKeeper) -> None:
        self.node = node
        node.holds += 1
        session.holds.add(self)

    def __del__(self) -> None:
        node = getattr(self, "node", None)  # torch.compile makes empty ones to look at them
        if node is None:
            return
        node.holds -= 1
        if not node.holds:
            update_front(node)


class RowTensor(torch.Tensor):
    """A tensor whose rows are computed when they are needed.

    Its shape, type and device are those of the plain program. What asks for its values gets all of them.
    """

    hold: Hold
    session: RowKeeper
    family: weakref.WeakSet[Hold] | None
    """All that are views of one memory in the plain program; None while it has no other."""

    @staticmethod
    def __new__(cls, node: LayerNode, session: RowKeeper) -> RowTensor:
        """A tensor for a node."""
        outline = node.outline
        made: RowTensor = make_wrapper_subclass(
            cls, outline.shape, strides=outline.strides, dtype=outline.dtype, device=outline.device
        )
        made.hold, made.session, made.family = Hold(node, session), session, None
        return made

    def __init__(self, node: LayerNode, session: RowKeeper) -> None: ...

    @property
    def node(self) -> LayerNode:
        """What computes it."""
        return self.hold.node

    def become(self, node: LayerNode, name: str) -> None:
        """Stand for what an operation in place made of it.

        Raises:
            UsageError: other tensors share its memory and would have to change with it.
        """
        if self.family is not None and len(self.family) > 1:
            raise UsageError(
                f"{name} changes in place a tensor that has views",
                "Layer-wise chunks cannot follow this: run the model whole, or by tiles",
            )
        self.hold, self.family = Hold(node, self.session), None

    def share(self, other: RowTensor) -> None:
        """Note that it is a view of another."""
        if other.family is None:
            other.family = weakref.WeakSet((other.hold,))
        self.family = other.family
        self.family.add(self.hold)

    def whole(self) -> torch.Tensor:
        """All of its values."""
        return self.session.whole(self.node)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape; to show values would compute them."""
        del tensor_contents
        with DisableTorchFunctionSubclass():
            return f"RowTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call outside of `run_layerwise`: as inside."""
        del types
        return _session_in((args, kwargs)).call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own default is no method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An operation that was called from C++, past torch's functions: it gets whole tensors.

        Raises:
            UsageError: it works in place.
        """
        del types
        return _session_in((args, kwargs)).dispatched(func, args, kwargs or {})


def _session_in(value: Any) -> RowKeeper:
    found = next(row_tensors_in(value), None)
    if found is None:
        raise AssertionError("called without a row tensor")
    session: RowKeeper = found.session
    return session


def row_tensors_in(value: Any) -> Any:
    """The row tensors in plain containers."""
    if isinstance(value, RowTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from row_tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from row_tensors_in(item)


def replaced(value: Any, tensors: Any) -> Any:
    """Plain containers with another tensor in the place of each row tensor.

    Args:
        tensors: gives the other of each.
    """
    if isinstance(value, RowTensor):
        return tensors(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, tensors) for item in value))
    if type(value) in (list, tuple, torch.Size):
        return type(value)(replaced(item, tensors) for item in value)
    if type(value) is dict:
        return {name: replaced(item, tensors) for name, item in value.items()}
    return value
