"""What the rules for results of assumed sizes share: how much is assumed, that it is told, and that it agrees.

NOTE [Masks agree]
How many elements of a mask hold is assumed once. A small mask that nobody computed has a guessed shadow with that many
(shading.py); a large one is given that many when it is copied to the host. Whoever selects with it, on the card or on
the host, and whoever counts it, gets that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.data_dependent.assume import Assume, Extent
from vramfit.virtual.data_dependent.expectations import Expectation
from vramfit.virtual.data_dependent.shadow import may_carry
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner


def finish(mode: OpRunner, call: OpCall, out: Any, extent: Extent | None = None) -> Any:
    """Place a result, which may rest on an assumed size."""
    mode.settle(call, out, extents=() if extent is None else (extent,))
    return out


def true_result(mode: OpRunner, call: OpCall) -> Any:
    """What the op gives on shadows, None without them."""
    found = mode.shading.arguments(call.args, call.kwargs)
    if found is None or found[2]:
        return None
    return call.func(*found[0], **found[1])


def selected(mode: OpRunner, name: str, mask: torch.Tensor, elements: int) -> Extent:
    """How many elements a mask selects: all or the share that is expected, with a warning unless that is exact.

    Args:
        mode: the virtual GPU.
        name: of what selects, for the warning.
        mask: which elements are selected.
        elements: how many there are, where the mask is broadcast.
    """
    if not mask.numel():
        return Extent(0, 0, 0)
    times = elements // mask.numel()
    if (known := mode.shadows.count(mask)) is not None:
        return Extent(known * times, known * times, known * times)
    held, exact = mode.shading.masks.holding(mask)
    count = held * times
    if exact:
        return Extent(count, count, count)
    settled = mode.shading.masks.settle(mask)
    fewer = mode.guesses.fewer(count, settled=settled) // max(1, times) * times
    if fewer < count:
        mode.shading.masks.hold(mask, fewer // max(1, times))
    tell(mode, name, f"{fewer:,} of {elements:,} elements")
    return assumed(mode, fewer, 0, mode.shading.masks.most(mask) * times)


def assumed(mode: OpRunner, shown: int, low: int, high: int) -> Extent:
    """An assumed size, remembered as one that the program can read."""
    extent = Extent(shown, min(low, shown), max(high, shown))
    mode.meter.assuming = True
    mode.meter.numbers.assume(extent)
    mode.meter.assumed_sizes.add(shown)
    mode.guesses.rows.assume(shown, mode.guesses.location())
    return extent


def tell(mode: OpRunner, name: str, what: str) -> None:
    """Warn that a size is assumed.

    Args:
        mode: the virtual GPU.
        name: of what has that size.
        what: is assumed.
    """
    kind = "an upper bound" if mode.machine.assume is Assume.UPPER else "what is to be expected"
    mode.machine.warn(
        "shape-from-data",
        f"the result of {name} has a shape that depends on data: {what} are assumed ({kind})",
        location=mode.guesses.location(),
    )


def like(mode: OpRunner, result: Any, device: torch.device) -> Any:
    """Fake tensors with the values of real ones."""
    if isinstance(result, torch.Tensor):
        return mode.wrap(result, device)
    return tuple(like(mode, r, device) for r in result)


def device_of(args: tuple[Any, ...]) -> torch.device:
    """The device of the first fake tensor."""
    for value in args:
        if type(value) is FakeTensor:
            return value.fake_device
    return torch.device("cpu")


def guess_positions(mode: OpRunner, mask: torch.Tensor, out: torch.Tensor) -> None:
    """Give small positions of what holds in a mask values, so that a loop over them visits different ones."""
    if not may_carry(out) or out.numel() == 0:
        return
    found = mode.shading.arguments((mask,), {})
    values = None if found is None else found[0][0].nonzero()
    if values is None or values.shape != out.shape:
        values = _spread_over(mask.shape, out)
    mode.shadows.set(out, values, guessed=True)


def number_rows(mode: OpRunner, rows: int, out: torch.Tensor) -> None:
    """Make a result the numbers of different rows, in their order, where it is small enough to have values."""
    mode.meter.expect(out, Expectation(values=max(1, rows)))
    if may_carry(out):
        mode.shadows.set(out, _spread_over((rows,), out), guessed=True)


def _spread_over(shape: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """As many coordinates as there are rows in ``out``, evenly spread over a shape."""
    flat = torch.linspace(0, max(0, prod(shape) - 1), out.shape[0], dtype=torch.float64).long()
    if not shape:
        return flat.reshape(out.shape)
    return torch.stack(torch.unravel_index(flat, tuple(shape)), -1).reshape(out.shape)
