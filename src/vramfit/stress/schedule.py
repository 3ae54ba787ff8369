"""A stress test: what is asked of it, which sizes it varies in what order, and what it gives. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vramfit.analysis._stability import Limit, Round
from vramfit.errors import UsageError
from vramfit.launch.job import Job

CYCLES = 4
"""How often the sizes come round, unless a number of rounds is given: enough to tell a trend."""
CEILING = 1 << 20
"""A ramp without an upper end stops here."""

_SHARES = (2, 9, 4, 11, 1, 14, 7, 16)
"""Sizes of a cycle, in sixteenths of the largest: small and large alternate, and the large ones ramp up."""
_FEWER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Vary:
    """One size to vary.

    Attributes:
        name: of the size.
        low, high: the range, both included; None leaves an end open.
        values: these values only, ascending; empty for all between the ends.
    """

    name: str
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Vary:
        """Read ``batch_size``, ``batch_size=1..64``, ``batch_size=..64`` or ``batch_size=1,2,4``.

        Raises:
            UsageError: the text has none of these forms.
        """
        name, separator, rest = text.partition("=")
        if not name.isidentifier():
            raise _unreadable(text)
        if not separator:
            return cls(name=name)
        if match := re.fullmatch(r"(\d*)\.\.(\d*)", rest.strip()):
            low, high = (int(part) if part else None for part in match.groups())
            if low == 0 or high == 0 or (low is not None and high is not None and low > high):
                raise UsageError(f"{text!r} is an empty range", "Write it as batch_size=1..64")
            return cls(name=name, low=low, high=high)
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", rest.strip()):
            values = tuple(sorted({int(part) for part in rest.split(",")}))
            if values[0] < 1:
                raise UsageError(f"{text!r} has a size of 0", "Sizes are whole numbers of at least 1")
            return cls(name=name, low=values[0], high=values[-1], values=values)
        raise _unreadable(text)

    def nearest(self, value: int) -> int:
        """The largest value of the range that is not above ``value``; the lowest if none is."""
        if self.values:
            return max((one for one in self.values if one <= value), default=self.values[0])
        return max(self.low or 1, min(value, self.high or value))


@dataclass(frozen=True, kw_only=True, slots=True)
class StressJob(Job):
    """A stress test.

    Attributes:
        target: the workload, as ``FILE.py:NAME``.
        device: ``cuda`` or ``cpu``.
        budget: bytes that metered CPU may take.
        rounds: rounds of changing sizes after the limits are known; None makes `CYCLES` cycles.
        vary: the sizes to vary; without any the first of the workload.
        alloc_conf: allocator settings; None leaves them to the environment.
    """

    target: str
    device: str = "cuda"
    budget: int | None = None
    rounds: int | None = None
    vary: tuple[Vary, ...] = ()
    alloc_conf: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StressResult:
    """What a stress test found.

    Attributes:
        sizes: the usual sizes.
        baseline: the last step at these.
        limits: how far each varied size can go.
        cycle: the sizes that the rounds went through.
        rounds: the rounds, in order.
        device: its name.
        total_bytes: of the device; 0 for a CPU.
        torch_version: version of torch.
    """

    sizes: Mapping[str, int]
    baseline: Round
    limits: tuple[Limit, ...]
    cycle: tuple[Mapping[str, int], ...]
    rounds: tuple[Round, ...]
    device: str = "cpu"
    total_bytes: int = 0
    torch_version: str = ""


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"--vary {text!r} cannot be read",
        "Write it as batch_size, batch_size=1..64 or batch_size=1,2,4,8",
    )


def chosen(sizes: Mapping[str, int], varied: Sequence[Vary]) -> tuple[Vary, ...]:
    """The sizes to vary; without any the first one of the workload.

    Raises:
        UsageError: the workload has no size of that name, or a size is named twice.
    """
    if not varied:
        return (Vary(name=next(iter(sizes))),)
    names = [one.name for one in varied]
    for name in names:
        if name not in sizes:
            raise UsageError(f"the workload has no size {name}", f"It has {', '.join(sizes)}")
        if names.count(name) > 1:
            raise UsageError(f"--vary names {name} twice", "Give each size once")
    return tuple(varied)


def cycle_of(
    sizes: Mapping[str, int], varied: Sequence[Vary], largest: Mapping[str, int]
) -> tuple[dict[str, int], ...]:
    """The sizes that the rounds go through: each varied one alone at several shares of its largest value.

    Args:
        sizes: the usual sizes.
        varied: those to vary.
        largest: the largest value of each that fits.
    """
    found: list[dict[str, int]] = []
    # Several sizes share a cycle, so that it does not get longer than it has to.
    for share in _SHARES if len(varied) == 1 else _SHARES[-_FEWER:]:
        for one in varied:
            top = largest.get(one.name, 0)
            if top < 1:
                continue
            values = one.values and tuple(value for value in one.values if value <= top)
            if values:
                value = values[min(len(values) - 1, share * len(values) // 16)]
            else:
                value = one.nearest(max(1, top * share // 16))
            step = {**sizes, one.name: value}
            if not found or found[-1] != step:
                found.append(step)
    return tuple(found)
