"""How many elements of a mask hold, and which, where nobody computed it: the same answer for the card and the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from vramfit.options.assume_choice import Assume
from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.data_dependent.expectations import Expectation, is_whole
from vramfit.virtual.data_dependent.shadow import ShadowStore
from vramfit.virtual.noted import Noted
from vramfit.virtual.op_call import OpCall

_aten = torch.ops.aten
_LOGIC = {
    getattr(_aten, name)
    for name in (
        *("lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal"),
        *(
            "logical_and",
            "logical_or",
            "logical_not",
            "logical_xor",
            "any",
            "all",
            "isclose",
            "isin",
            "signbit",
        ),
        *(
            "bitwise_and",
            "bitwise_or",
            "bitwise_not",
            "bitwise_xor",
            "isnan",
            "isinf",
            "isposinf",
            "isneginf",
        ),
    )
}
_COUNTS = (torch.int64, torch.int32, torch.int16)
_TO_COPY = _aten._to_copy.default
_ANY = {_aten.any.default, _aten.any.dim, _aten.any.dims}
_ALL = {_aten.all.default, _aten.all.dim, _aten.all.dims}
_PUTS = {
    *(_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor),
    *(_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor),
}
_COUNTED = {
    *(_ANY | _ALL),
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList),
    *(_aten.cumsum.default, _aten._to_copy.default),
}


def is_counting(func: OpOverload) -> bool:
    """Whether an op counts how many elements of a mask hold."""
    return func in _COUNTED


class Masks:
    """What is assumed about masks. See NOTE [Masks agree] in fake_impls/shapes.py.

    Args:
        assume: which sizes are taken where data decides them.
        expected: gives what is expected of a tensor's values.
        ends: gives the answer that ends the loop whose test is being evaluated; None outside such a test.
    """

    def __init__(
        self,
        assume: Assume,
        shadows: ShadowStore,
        expected: Callable[[torch.Tensor], Expectation],
        ends: Callable[[], bool | None],
    ) -> None:
        self._ends = ends
        self._assume = assume
        self._shadows = shadows
        self._expected = expected
        self._held: Noted[int] = Noted()  # counts of whole masks that were settled otherwise
        self._used: Noted[set[tuple[object, ...]]] = Noted()  # views of storages whose counts were used

    def holding(self, mask: torch.Tensor) -> tuple[int, bool]:
        """How many elements of a fake mask with unknown values hold, and whether that is certain."""
        assumed, exact = self.assumed(mask)
        if mask.dtype is torch.bool and (count := self._shadows.count(mask, guessed=True)) is not None:
            return count, exact and count == assumed
        return assumed, exact

    def assumed(self, mask: torch.Tensor) -> tuple[int, bool]:
        """As `holding`, whatever the mask's shadow says."""
        elements, expected = mask.numel(), self._expected(mask)
        if expected.exact:
            return expected.count(elements), True
        if (held := self._held.find(mask)) is not None and is_whole(mask):
            return held, False
        most = self.most(mask)
        # A share of 0 is that of a fraction, which equals no given number.
        if self._assume is Assume.UPPER and expected.share != 0:
            return most, False
        return min(most, expected.count(elements)), False

    def most(self, mask: torch.Tensor) -> int:
        """The most elements of a fake mask that can hold."""
        bound = self._expected(mask).at_most
        return mask.numel() if bound is None else min(bound, mask.numel())

    def hold(self, mask: torch.Tensor, count: int) -> None:
        """Assume that this many elements of a mask hold, since a loop waits for fewer."""
        shadow, view = self._shadows.find(mask), self._shadows.view(mask)
        if shadow is not None and view is not None:
            if shadow.guessed and mask.dtype is torch.bool and 0 not in mask.stride():
                view.copy_(pattern(mask.shape, count))
        elif is_whole(mask):
            self._held.set(mask, count)

    def settle(self, mask: torch.Tensor) -> bool:
        """Note that a mask's count is used, so that it stays; returns whether it was used before."""
        view = (mask.storage_offset(), tuple(mask.shape), mask.stride())
        used = self._used.find(mask)
        if used is None:
            self._used.set(mask, {view})
            return False
        known = view in used
        used.add(view)
        return known

    def follow(self, call: OpCall) -> None:
        """Settle the mask whose elements an op counts."""
        if is_counting(call.func):
            mask = call.args[0]
            if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
                self.settle(mask)

    def forget(self, mask: torch.Tensor) -> None:
        """Drop what is assumed about a mask that was overwritten."""
        self._held.forget(mask)
        self._used.forget(mask)

    def values(self, mask: torch.Tensor) -> torch.Tensor:
        """Values of an uncomputed mask on the host: as many hold as the card selects with it."""
        return pattern(mask.shape, self.assumed(mask)[0])

    def revised(
        self, func: OpOverload, out: torch.Tensor, value: torch.Tensor, source: object
    ) -> torch.Tensor:
        """The values of a small mask computed from guessed ones, or others of which as many hold as are assumed.

        Args:
            source: the first argument of the op.
        """
        if out.dtype is not torch.bool or out.numel() < 2:
            return value
        made = func is _TO_COPY and isinstance(source, torch.Tensor) and source.dtype is not torch.bool
        if not made and func._overloadpacket not in _LOGIC:
            return value
        if (
            isinstance(source, torch.Tensor)
            and source.dtype in _COUNTS
            and self._expected(source).values is None
        ):
            return value  # counts agree with what they count, so their comparisons hold as they are
        count = self.assumed(out)[0]
        return value if int(value.count_nonzero()) == count else pattern(out.shape, count)

    def rewrite(self, func: OpOverload, mask: torch.Tensor) -> None:
        """After guessed positions were written, let as many elements of a small mask hold as are assumed."""
        if func not in _PUTS or mask.dtype is not torch.bool or not is_whole(mask):
            return
        count = self.assumed(mask)[0]
        if self._expected(mask).most is not None and self._shadows.count(mask, guessed=True) != count:
            self.hold(mask, count)

    def answer(self, func: OpOverload, source: torch.Tensor) -> bool | None:
        """Whether any or all elements of a mask hold, consistent with what selecting finds; None for other questions.

        The test of a ``while`` gets the answer that ends it, so that no round of the loop is made up.
        """
        if source.dtype is not torch.bool or func not in _ANY | _ALL:
            return None
        if (ends := self._ends()) is not None:
            return ends
        count = self.holding(source)[0]
        return count > 0 if func in _ANY else count == source.numel()


def pattern(shape: Sequence[int], count: int) -> torch.Tensor:
    """A mask in which this many elements hold, evenly spread."""
    elements = prod(shape)
    if count >= elements:
        return torch.ones(tuple(shape), dtype=torch.bool, device="cpu")
    mask = torch.zeros(elements, dtype=torch.bool, device="cpu")
    if count > 0:
        mask[torch.arange(count, device="cpu") * elements // count] = True
    return mask.reshape(tuple(shape))
