"""The largest size of a workload that fits a device: by bracketing and bisection, a run for each try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vramfit.planner.price import Device, Price
from vramfit.workload import Workload

CEILING = 1 << 24
"""No size is tried beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """One run.

    Attributes:
        value: of the size.
        fits: whether it did.
        total_bytes: of the device, as far as it came.
        step_seconds: estimated; 0 where it did not fit.
    """

    value: int
    fits: bool
    total_bytes: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest value of a size that fits.

    Attributes:
        size: its name.
        usual: the workload's own value.
        value: the largest that fits; 0 if not even 1 does.
        failing: the smallest that was seen not to fit; 0 if all tried did.
        total_bytes: that `value` takes of the device.
        limit_bytes: that it may take.
        step_seconds: of a step at `value`, estimated.
        tries: all runs, in order.
    """

    size: str
    usual: int
    value: int
    failing: int
    total_bytes: int
    limit_bytes: int
    step_seconds: float
    tries: tuple[Try, ...]


def largest(
    device: Device,
    workload: Workload,
    sizes: Mapping[str, int],
    name: str,
    limit: int,
    progress: Callable[[str], None] = lambda _text: None,
) -> Largest:
    """The largest value of a size with which a step stays within a limit of bytes.

    The value is doubled, or halved, until one fits and the next does not; then the interval is halved down to
    neighbours. Every try is a run with a fresh model, so that nothing is left of those that failed.

    Args:
        device: where to run.
        workload: with its techniques.
        sizes: of the batch; that of `name` is where the search begins.
        name: of the size.
        limit: bytes of the device.
        progress: told what is tried.
    """
    tried: dict[int, Price] = {}

    def fits(value: int) -> bool:
        if value not in tried:
            progress(f"{name} {value:,}")
            tried[value] = device.price(workload, {**sizes, name: value}, limit)
        return tried[value].fits

    low, high = 0, sizes[name]
    while fits(high):
        low = high
        if high >= CEILING:
            break
        high = min(2 * high, CEILING)
    if low == 0:
        while high > 1 and not fits(high // 2):
            high //= 2
        low = high // 2
    if low < CEILING:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    best = tried.get(low)
    return Largest(
        size=name,
        usual=sizes[name],
        value=low,
        failing=0 if low >= CEILING else high,
        total_bytes=0 if best is None else best.total_bytes,
        limit_bytes=limit,
        step_seconds=0.0 if best is None else best.step_seconds,
        tries=tuple(
            Try(value=value, fits=price.fits, total_bytes=price.total_bytes, step_seconds=price.step_seconds)
            for value, price in tried.items()
        ),
    )
