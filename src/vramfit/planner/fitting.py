"""The largest size of a workload that fits a device: by bracketing and bisection, a run for each try.

It is looked for on the virtual GPU, where a try takes a second, and confirmed on the card where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vramfit.planner.bracketing import CEILING, bisected, bracket
from vramfit.planner.failures import brief
from vramfit.planner.price import Device, Price
from vramfit.units import format_bytes
from vramfit.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """One run.

    Attributes:
        value: of the size.
        fits: whether it did.
        total_bytes: of the device, as far as it came.
        step_seconds: estimated, on a card measured; 0 where it did not fit.
    """

    value: int
    fits: bool
    total_bytes: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CardCheck:
    """What a card said of the largest value that was found on the virtual GPU.

    Attributes:
        card: its name, as torch tells it.
        value: the largest that fits there, of those up to the one that was found; 0 if none does.
        failing: the smallest that did not fit there; 0 if the one that was found fits.
        tries: all runs on it, in order.
        left_bytes: of tensors that outlived their run; more than 0 is the workload's own doing.
        skipped: why nothing was run on it; empty where something was.
    """

    card: str
    value: int = 0
    failing: int = 0
    tries: tuple[Try, ...] = ()
    left_bytes: int = 0
    skipped: str = ""


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
        tries: all runs, in order; none of those on a card.
        least_bytes: what 1 would take of a device without end, where not even that fits; else 0.
        predicted: what the virtual GPU says is the largest; another value than `value` if a card disagreed.
        failure: what went wrong at the smallest value above the usual one at which the workload itself failed; empty
            if it never did. Such a value does not fit.
        card: what the card said; None where it was not asked. `value`, `total_bytes` and `step_seconds` are its own
            then.
    """

    size: str
    usual: int
    value: int
    failing: int
    total_bytes: int
    limit_bytes: int
    step_seconds: float
    tries: tuple[Try, ...]
    least_bytes: int = 0
    predicted: int = 0
    card: CardCheck | None = None
    failure: str = ""

    def __repr__(self) -> str:
        room = f"{format_bytes(self.total_bytes)} of {format_bytes(self.limit_bytes)}"
        return f"<Largest {self.size}: {self.value:,} (usually {self.usual:,}), {room}>"


def largest(
    device: Device,
    workload: Workload,
    sizes: Mapping[str, int],
    name: str,
    limit: int,
    progress: Callable[[str], None] = lambda _text: None,
    *,
    host_limit: int | None = None,
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
        host_limit: bytes that techniques may take of the host; None for any.
    """
    tries = _Tries(device, workload, sizes, name, limit, progress, host_limit)
    low, high = bracket(tries.fits, sizes[name])
    best = tries.prices.get(low)
    return Largest(
        size=name,
        usual=sizes[name],
        value=low,
        failing=0 if low >= CEILING else high,
        total_bytes=0 if best is None else best.total_bytes,
        limit_bytes=limit,
        step_seconds=0.0 if best is None else best.step_seconds,
        tries=tries.told,
        least_bytes=0 if low else device.price(workload, {**sizes, name: 1}, None).total_bytes,
        predicted=low,
        failure=tries.failure,
    )


def largest_up_to(
    device: Device,
    workload: Workload,
    sizes: Mapping[str, int],
    name: str,
    limit: int,
    progress: Callable[[str], None] = lambda _text: None,
) -> tuple[int, int, tuple[Try, ...]]:
    """The largest value that fits of those up to the one in `sizes`, the smallest that did not (0: none), and the runs.

    That one is tried first. Where it does not fit, steps down double until one does: predictions are near, and runs on
    a card are dear.

    Args:
        device: where to run.
        workload: with its techniques.
        sizes: of the batch; that of `name` is the largest that is tried.
        name: of the size.
        limit: bytes of the device.
        progress: told what is tried.
    """
    tries = _Tries(device, workload, sizes, name, limit, progress)
    low, high, step = sizes[name], 0, 1
    while low and not tries.fits(low):
        low, high, step = max(0, low - step), low, 2 * step
    if high:
        low, high = bisected(tries.fits, low, high)
    return low, high, tries.told


def with_card(found: Largest, check: CardCheck) -> Largest:
    """What was found on the virtual GPU, with what the card said in its place."""
    if check.skipped:
        return replace(found, card=check)
    best = next((one for one in check.tries if one.value == check.value), None)
    return replace(
        found,
        value=check.value,
        failing=check.failing or found.failing,
        total_bytes=0 if best is None else best.total_bytes,
        step_seconds=0.0 if best is None else best.step_seconds,
        card=check,
    )


class _Tries:
    """Runs of a workload at values of one size, each value once."""

    def __init__(
        self,
        device: Device,
        workload: Workload,
        sizes: Mapping[str, int],
        name: str,
        limit: int,
        progress: Callable[[str], None],
        host_limit: int | None = None,
    ) -> None:
        self.prices: dict[int, Price] = {}
        self.failure = ""
        self._failing = 0
        self._device, self._workload, self._sizes = device, workload, sizes
        self._name, self._limit, self._progress = name, limit, progress
        self._host_limit = host_limit

    def fits(self, value: int) -> bool:
        """Whether a step at this value stays within the limit."""
        if value not in self.prices:
            self._progress(f"{self._name} {value:,}")
            sizes = {**self._sizes, self._name: value}
            try:
                self.prices[value] = self._device.price(self._workload, sizes, self._limit)
            except Exception as error:  # a table of positions that ends, a check of the model's own
                if value <= self._sizes[self._name]:
                    raise
                if not self._failing or value < self._failing:
                    self._failing, self.failure = value, f"{self._name} {value:,} fails: {brief(error)}"
                self.prices[value] = Price(fits=False, peak_allocated_bytes=0, peak_reserved_bytes=0)
        price = self.prices[value]
        return price.fits and (self._host_limit is None or price.host_bytes <= self._host_limit)

    @property
    def told(self) -> tuple[Try, ...]:
        """All of them, in order."""
        return tuple(
            Try(
                value=value,
                fits=self.fits(value),
                total_bytes=price.total_bytes,
                step_seconds=price.step_seconds,
            )
            for value, price in self.prices.items()
        )
