"""What one op takes on a card: temporaries, results and workspaces, in the order in which its kernel asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.trace import Category
from vramfit.virtual import kernels
from vramfit.virtual.assume import Extent, merged, resting_on
from vramfit.virtual.kernels import Extras, KernelContext
from vramfit.virtual.ops import OpInfo, tensors_in

if TYPE_CHECKING:
    from vramfit.virtual.meter import Meter
    from vramfit.virtual.workspaces import Workspaces

_NOTHING = Extras()


class Placing:
    """Places what ops make and need while they run."""

    def __init__(self, meter: Meter, workspaces: Workspaces) -> None:
        self._meter = meter
        self._workspaces = workspaces

    def place(
        self,
        func: torch._ops.OpOverload,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        *,
        device: int,
        context: KernelContext,
        category: Category | None,
        extents: tuple[Extent, ...],
    ) -> None:
        """Place an op's results; its temporaries are gone afterwards.

        Args:
            func: the op.
            info: what its schema says.
            args, kwargs: its arguments (fake tensors).
            out: its results, not placed yet.
            device: index of the card.
            context: what decides how its kernel behaves.
            category: what the results are for; None tells it from the moment.
            extents: assumed sizes of the results, beside those on which the arguments rest.

        Raises:
            torch.OutOfMemoryError: the card is full.
        """
        meter, name = self._meter, info.name
        extras = kernels.extras(func, args, kwargs, out, context) or _NOTHING
        if meter.assuming:
            given = (*tensors_in(args), *tensors_in(tuple(kwargs.values())))
            extents = merged(extents, meter.extents_of(given))
        below, above = extras.error_below_bytes, extras.error_bytes
        if below or above:
            meter.widen(device, below, above, name)
        held: list[int] = []
        try:
            if extras.before:
                held += meter.temporary(extras.before, device, name)
            if extras.between:
                self._adopt_in_turn(out, name, category, extents, extras.between, device)
            elif info.fresh or info.mutated:
                self._adopt(out[::-1] if info.last_first else out, name, category, extents)
            if extras.after:
                held += meter.temporary(extras.after, device, name)
            for blas in kernels.blas_libraries(func, args, kwargs, context):
                held += self._workspaces.use(blas, device, context)
            if below or above:
                meter.note_doubt(device)
        finally:
            for address in reversed(held):
                meter.free(address, device)
            if below or above:
                meter.narrow(device, below, above)

    def _adopt(self, out: Any, op: str, category: Category | None, extents: tuple[Extent, ...]) -> None:
        for tensor in tensors_in(out):
            if type(tensor) is FakeTensor and tensor.fake_device.type == "cuda":
                for part in strided_parts(tensor):
                    found = resting_on(part.shape, extents) if extents else ()
                    self._meter.adopt(part, op, category, found)

    def _adopt_in_turn(
        self,
        out: tuple[Any, ...],
        op: str,
        category: Category | None,
        extents: tuple[Extent, ...],
        between: tuple[tuple[int, ...], ...],
        device: int,
    ) -> None:
        """Place results one after the other, each with the temporaries of its own computation."""
        for result, sizes in zip(out, between, strict=True):
            if result is not None:
                self._adopt(result, op, category, extents)
            held = self._meter.temporary(sizes, device, op)
            self._meter.note_doubt(device)
            for address in reversed(held):
                self._meter.free(address, device)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's storage: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
