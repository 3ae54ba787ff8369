"""Makes large products give deferred rows, inside a block of code or a module's forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.arguments import whole_argument
from vramfit.inference.row_deferral.attention_rows import bind_attention
from vramfit.inference.row_deferral.deferred_rows import DeferredRows, RowSlice, with_values
from vramfit.inference.row_deferral.row_operations import deferred, mergeable
from vramfit.workload.containers import mapped_leaves

GROWTH = 2
"""How many times larger than its larger factor a product has to be: otherwise nothing is gained."""

MOST_HEADS = 64
"""Of a table of relative biases: a wider one holds embeddings, which are read several times."""

_T: Any = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChunks:
    """What is computed some rows at a time.

    Attributes:
        slice_bytes: of each large result that exists at once; results that are no larger are left alone.
        attention: products of two activations: scores of all pairs.
        feed_forward: linear layers that are much wider than their input, and what follows up to the next one.

    Raises:
        UsageError: the size is none.
    """

    slice_bytes: int = 16 << 20
    attention: bool = True
    feed_forward: bool = True

    def __post_init__(self) -> None:
        """Check the size."""
        whole_argument("slice_bytes", self.slice_bytes, least=1)


class RowDeferring(TorchFunctionMode):
    """Inside of it, large products give deferred rows where no gradients are computed."""

    def __init__(self, chunks: RowChunks) -> None:
        super().__init__()
        self._chunks = chunks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operation, or its rows to be."""
        kwargs = kwargs or {}
        if (func in _PRODUCTS or func in _LOOK_UPS) and not torch.is_grad_enabled():
            defer = self._deferred if func in _PRODUCTS else self._looked_up
            found = defer(func, args, kwargs)
            if found is not NotImplemented:
                return found
        # The virtual GPU replaces it in its module, so that the present one is looked up.
        if self._chunks.attention and func in (_ATTENTION, F.scaled_dot_product_attention):
            attend = None if torch.is_grad_enabled() else bind_attention(*with_values(args), **kwargs)
            if attend is not None:
                with self:
                    return attend()
        return func(*args, **kwargs)

    def _deferred(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = [kwargs[name] for name in ("input", "weight", "mat2", "other", "bias") if name in kwargs]
        if "out" in kwargs or len(args) + len(named) < 2:
            return NotImplemented
        left, right, *rest = (*args, *named)
        if not all(type(one) in (torch.Tensor, nn.Parameter) or _is_fake(one) for one in (left, right)):
            return NotImplemented
        linear = func is F.linear
        if left.dim() < 2 or right.dim() < 2 or left.device != right.device:
            return NotImplemented
        if not (self._chunks.feed_forward if linear else self._chunks.attention):
            return NotImplemented
        columns = right.shape[0] if linear else right.shape[-1]
        size = left.numel() // max(1, left.shape[-1]) * columns
        factor = left.numel() if linear else max(left.numel(), right.numel())
        if size * left.element_size() <= self._chunks.slice_bytes or size < GROWTH * factor:
            return NotImplemented
        if 0 in left.shape or (not linear and left.dim() < right.dim()):
            return NotImplemented
        inner = (
            left.dim() - 1 if linear else left.dim() - 2
        )  # of a product, dimensions before are many products
        dims = {dim: dim for dim in range(left.dim() - 1) if left.shape[dim] > 1}
        if not linear:
            right = _with_axes(mergeable(right), left, {axis for axis in dims if axis < inner})
        return (
            deferred(func, (RowSlice(left, dims), right, *rest), {}, self._chunks.slice_bytes)
            if dims
            else NotImplemented
        )

    def _looked_up(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A bias for each pair and head, looked up in a table by how far the two lie apart."""
        if len(args) < 2 or kwargs.get("max_norm") is not None:  # which changes the table
            return NotImplemented
        index, table = args[:2] if func is F.embedding else (args[1], args[0])
        if not all(type(one) in (torch.Tensor, nn.Parameter) or _is_fake(one) for one in (index, table)):
            return NotImplemented
        pairs = not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
        if not (self._chunks.attention and pairs and table.dim() == 2 and index.dim() >= 2):
            return NotImplemented
        if not GROWTH <= table.shape[1] <= MOST_HEADS:
            return NotImplemented
        if index.numel() * table.shape[1] * table.element_size() <= self._chunks.slice_bytes:
            return NotImplemented
        dims = {dim: dim for dim in range(index.dim()) if index.shape[dim] > 1}
        cut = RowSlice(index, dims)
        given = (cut, table) if func is F.embedding else (table, cut)
        return deferred(func, given, {}, self._chunks.slice_bytes)


def _with_axes(right: torch.Tensor, left: torch.Tensor, leading: set[int]) -> torch.Tensor | RowSlice:
    """The right factor, cut along the leading dimensions that it shares with the left one."""
    before = left.dim() - right.dim()
    dims = {axis: axis - before for axis in leading if axis >= before}
    dims = {axis: dim for axis, dim in dims.items() if right.shape[dim] == left.shape[axis]}
    return RowSlice(right, dims) if dims else right


def _is_fake(tensor: Any) -> bool:
    """Whether it is a tensor of the virtual GPU, which takes part as a plain one would."""
    from vramfit.torch_internals.fake_tensors import FakeTensor

    return isinstance(tensor, FakeTensor)


_LOOK_UPS = frozenset({_T.__getitem__, F.embedding})
_ATTENTION = F.scaled_dot_product_attention
_PRODUCTS = frozenset({torch.matmul, torch.bmm, _T.matmul, _T.bmm, _T.__matmul__, F.linear})


@contextlib.contextmanager
def row_chunks(chunks: RowChunks) -> Iterator[None]:
    """Compute large results some rows at a time inside the block, where no gradients are computed.

    What is still deferred at the end of the block computes itself when it is used.
    """
    with RowDeferring(chunks):
        yield


class InRowChunks:
    """Surrounds a module's forward pass with `row_chunks`; its outputs have their values."""

    def __init__(self, chunks: RowChunks) -> None:
        self.chunks = chunks

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward pass."""
        del module
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with row_chunks(self.chunks):
            found = forward(*args, **kwargs)
        return mapped_leaves(
            found, lambda _path, leaf: with_values(leaf) if isinstance(leaf, DeferredRows) else leaf
        )
