"""How many elements of a mask hold that nobody computed, and which: the same for the card and the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from vramfit.virtual.data_dependent.assume import Assume
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
            "bitwise_and",
            "bitwise_or",
            "bitwise_not",
        ),
        *(
            "bitwise_xor",
            "any",
            "all",
            "isclose",
            "isnan",
            "isinf",
            "isposinf",
            "isneginf",
            "isin",
            "signbit",
        ),
    )
}
_COUNTS = (torch.int64, torch.int32, torch.int16)
_TO_COPY = _aten._to_copy.default
_ANY = {_aten.any.default, _aten.any.dim, _aten.any.dims}
_ALL = {_aten.all.default, _aten.all.dim, _aten.all.dims}
_PUTS = {_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_COUNTED = {
    *(_ANY | _ALL),
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList),
    *(_aten.cumsum.default, _aten._to_copy.default),
}


def is_counting(func: torch._ops.OpOverload) -> bool:
    """Whether an op counts how many elements of a mask hold."""
    return func in _COUNTED


class Masks:
    """What is assumed of masks. See NOTE [Masks agree] in fake_impls/shapes.py."""

    def __init__(
        self,
        assume: Assume,
        shadows: ShadowStore,
        expected: Callable[[torch.Tensor], Expectation],
        ends: Callable[[], bool | None],
    ) -> None:
        """Takes what is assumed, all shadows, what is expected, and which answer ends the loop whose test is asked."""
        self._ends = ends
        self._assume = assume
        self._shadows = shadows
        self._expected = expected
        self._held: Noted[int] = Noted()  # counts of whole masks that were settled otherwise
        self._used: Noted[set[tuple[object, ...]]] = Noted()  # views of storages whose counts were told

    def holding(self, mask: torch.Tensor) -> tuple[int, bool]:
        """How many elements of a fake mask hold, and whether that is sure; its values are not known."""
        assumed, exact = self.assumed(mask)
        if mask.dtype is torch.bool and (count := self._shadows.count(mask, guessed=True)) is not None:
            return count, exact and count == assumed
        return assumed, exact

    def assumed(self, mask: torch.Tensor) -> tuple[int, bool]:
        """The same, whatever its shadow says."""
        elements, expected = mask.numel(), self._expected(mask)
        if expected.exact:
            return expected.count(elements), True
        if (held := self._held.find(mask)) is not None and is_whole(mask):
            return held, False
        most = self.most(mask)
        if (
            self._assume is Assume.UPPER and expected.share != 0
        ):  # a fraction equals no given number, says its rule
            return most, False
        return min(most, expected.count(elements)), False

    def most(self, mask: torch.Tensor) -> int:
        """How many elements of a fake mask can hold."""
        bound = self._expected(mask).at_most
        return mask.numel() if bound is None else min(bound, mask.numel())

    def hold(self, mask: torch.Tensor, count: int) -> None:
        """Say that so many elements of a mask hold, since a loop waits for fewer."""
        shadow, view = self._shadows.find(mask), self._shadows.view(mask)
        if shadow is not None and view is not None:
            if shadow.guessed and mask.dtype is torch.bool and 0 not in mask.stride():
                view.copy_(pattern(mask.shape, count))
        elif is_whole(mask):
            self._held.set(mask, count)

    def settle(self, mask: torch.Tensor) -> bool:
        """Say that a mask's count is used, so that it stays; whether it was used before."""
        view = (mask.storage_offset(), tuple(mask.shape), mask.stride())
        used = self._used.find(mask)
        if used is None:
            self._used.set(mask, {view})
            return False
        known = view in used
        used.add(view)
        return known

    def follow(self, call: OpCall) -> None:
        """Let a mask keep its count that an op counts."""
        if is_counting(call.func):
            mask = call.args[0]
            if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
                self.settle(mask)

    def forget(self, mask: torch.Tensor) -> None:
        """The mask was overwritten."""
        self._held.forget(mask)
        self._used.forget(mask)

    def values(self, mask: torch.Tensor) -> torch.Tensor:
        """Values of a mask on the host that nobody computed: as many hold as the card selects with it."""
        return pattern(mask.shape, self.assumed(mask)[0])

    def revised(
        self, func: torch._ops.OpOverload, out: torch.Tensor, value: torch.Tensor, source: object
    ) -> torch.Tensor:
        """The values of a small mask that came out of guessed ones, or others of which as many hold as are assumed.

        Args:
            func: the op that made it.
            out: the fake mask.
            value: what it would be.
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
            return value  # counts agree with what they count, so what they are compared with is told
        count = self.assumed(out)[0]
        return value if int(value.count_nonzero()) == count else pattern(out.shape, count)

    def rewrite(self, func: torch._ops.OpOverload, mask: torch.Tensor) -> None:
        """Let as many elements of a small mask hold as are assumed after guessed positions were written."""
        if func not in _PUTS or mask.dtype is not torch.bool or not is_whole(mask):
            return
        count = self.assumed(mask)[0]
        if self._expected(mask).most is not None and self._shadows.count(mask, guessed=True) != count:
            self.hold(mask, count)

    def answer(self, func: torch._ops.OpOverload, source: torch.Tensor) -> bool | None:
        """Whether any or all elements of a mask hold, as whoever selects with it finds; None for other questions.

        The test of a ``while`` gets the answer that ends it, so that none of its rounds is made up.
        """
        if source.dtype is not torch.bool or func not in _ANY | _ALL:
            return None
        if (ends := self._ends()) is not None:
            return ends
        count = self.holding(source)[0]
        return count > 0 if func in _ANY else count == source.numel()


def pattern(shape: Sequence[int], count: int) -> torch.Tensor:
    """A mask of which so many elements hold, evenly spread."""
    elements = prod(shape)
    if count >= elements:
        return torch.ones(tuple(shape), dtype=torch.bool, device="cpu")
    mask = torch.zeros(elements, dtype=torch.bool, device="cpu")
    if count > 0:
        mask[torch.arange(count, device="cpu") * elements // count] = True
    return mask.reshape(tuple(shape))
