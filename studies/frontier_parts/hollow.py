"""Leaves out what products compute: their results are zeros of the same shape, so a step holds the same bytes, sooner.

Only the planner's own runs are done that way. Its seconds come from formulas, and what is measured for the table runs
in full.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.capture.gradient_sums import summed

aten = torch.ops.aten

_FACTORS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Where the first of two factors stands among the arguments."""

_INTO = frozenset({aten.mm.out, aten.bmm.out, aten.addmm.out, aten.baddbmm.out})

_IN_PLACE = frozenset({aten.addmm_.default, aten.baddbmm_.default})


class Hollow(TorchDispatchMode):
    """Gives zeros in place of products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, unless it is a product."""
        kwargs = kwargs or {}
        if func in _FACTORS:
            one, other = args[_FACTORS[func] : _FACTORS[func] + 2]
            return one.new_zeros((*one.shape[:-1], other.shape[-1]))
        if func in _INTO:
            return kwargs["out"]
        if func in _IN_PLACE:
            return args[0]
        total = summed(func, args, kwargs)
        return func(*args, **kwargs) if total is None else total
