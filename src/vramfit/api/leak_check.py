"""``vramfit.check_leaks``: call a function again and again, see what grows, and find who holds it."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vramfit.analysis import GrowingStack, LeakReport, Release, leaks
from vramfit.analysis._growth import ALPHA
from vramfit.arguments import number_argument
from vramfit.errors import UsageError, VramfitError
from vramfit.report import render
from vramfit.trace import MemoryTrace
from vramfit.trace.device_events import marks

if TYPE_CHECKING:
    from vramfit.capture.storages import StorageMeter
    from vramfit.holders.heap import Heap

LEAST_ROUNDS = 5
"""Fewest rounds after the warm-up that distinguish growth from chance: six levels, of which 1/6! is below 0.5 %."""

_TAG = "vramfit leak check: round"
_ASKED = 5  # growing stacks whose owners are looked for, the fastest first
_SAMPLES = 64  # blocks of a stack that are watched while the garbage is collected


class LeakFoundError(VramfitError):
    """A function leaves memory behind each time it is called; `assert_no_leaks` raises it.

    >>> kept = []
    >>> try:
    ...     vramfit.assert_no_leaks(lambda: kept.append(torch.ones(1024, 1024)), device="cpu")
    ... except vramfit.LeakFoundError as error:
    ...     print(str(error).splitlines()[0])
    ! memory grows by 4.00 MiB per round

    Attributes:
        report: what grows, and who holds it.
    """

    exit_code = 3

    def __init__(self, report: LeakReport) -> None:
        super().__init__(render(report, width=110).rstrip())
        self.report = report


def check_leaks(
    function: Callable[[], object],
    rounds: int = 5,
    *,
    warmup: int = 2,
    device: str | None = None,
    owners: int = 3,
    seconds: float = 20.0,
    alpha: float = ALPHA,
) -> LeakReport:
    """Call a function ``warmup + rounds`` times and report what memory grows with every call, and who holds it.

    >>> history = []
    >>> report = vramfit.check_leaks(lambda: history.append(torch.ones(1024, 1024)), device="cpu")
    >>> report.verdict.name, report.bytes_per_step
    ('GROWING', 4194304.0)

    Inside ``vramfit.VirtualGPU`` it is the virtual card's memory, inside ``vramfit.track`` what that records, else the
    memory of a real card where there is one, else that of the CPU tensors. What the function returns is dropped before
    the next call. Its own garbage is left to Python's collector; after the last round the garbage is collected, to tell
    dead reference cycles from the rest.

    Args:
        function: what to call, without arguments.
        rounds: calls that count; fewer than `LEAST_ROUNDS` can prove nothing, and the report says so.
        warmup: calls before them, for what is made once: optimizer state, workspaces, caches.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None or ``"auto"`` as said above.
        owners: owner chains to look for, for each of the stacks that grow fastest; 0 looks for none.
        seconds: time to look for owners at most.
        alpha: chance of calling growth where there is none.

    Returns:
        The report of `vramfit.analysis.leaks` over the rounds, with `GrowingStack.owners` filled in.

    Raises:
        UsageError: an argument cannot be used.
        Exception: whatever the function raises.
    """
    for name, value, least in (("rounds", rounds, 1), ("warmup", warmup, 0), ("owners", owners, 0)):
        if type(value) is not int or value < least:
            raise UsageError(f"{name}={value!r} is no whole number from {least} on")
    if not callable(function):
        raise UsageError(
            f"a {type(function).__name__} cannot be called",
            "Give a function without arguments: lambda: step(batch)",
        )
    number_argument("seconds", seconds, least=0, most=math.inf)
    number_argument("alpha", alpha, least=0, most=1, inside=True)
    with _metered(None if device == "auto" else device) as meter:
        meter.mark(f"{_TAG} 0")
        for number in range(1, warmup + rounds + 1):
            function()
            meter.mark(f"{_TAG} {number}")
        trace = meter.trace()
        found = _report(trace, meter.device, warmup, alpha)
        return _with_owners(found, trace, meter, owners, seconds) if found.growing else found


def assert_no_leaks(function: Callable[[], object], rounds: int = 5, **options: Any) -> LeakReport:
    """Like `check_leaks`, for tests: a leak is an error.

    >>> vramfit.assert_no_leaks(lambda: torch.ones(1024, 1024), device="cpu").verdict.name
    'STEADY'

    Raises:
        LeakFoundError: memory grows; the message is the report.
    """
    found = check_leaks(function, rounds, **options)
    if found.leaks:
        raise LeakFoundError(found)
    return found


def _report(trace: MemoryTrace, device: int, warmup: int, alpha: float) -> LeakReport:
    """The analysis over the rounds just run."""
    row_of = {mark.tag: mark.row for mark in marks(trace) if mark.tag.startswith(_TAG)}
    # An earlier check may have left its marks in the same recording.
    rows = sorted(row for row in row_of.values() if row >= row_of[f"{_TAG} 0"])
    # Given twice, the last boundary makes a level of its own: what is left after the last round.
    return leaks(trace, device, alpha=alpha, boundaries=np.array([*rows, rows[-1]]), warmup=warmup)


# -- what meters -----------------------------------------------------------------------------------------------------


class _Metering:
    """What a check needs of whatever meters the memory.

    Attributes:
        knows_storages: whether it follows storages itself; a card's recording knows addresses only.
    """

    def __init__(self, source: Any, storages: StorageMeter[Any] | None, device: int) -> None:
        self._source, self._storages, self.device = source, storages, device
        self.knows_storages = storages is not None

    def mark(self, tag: str) -> None:
        self._source.mark(tag)

    def trace(self) -> MemoryTrace:
        trace: MemoryTrace = self._source.trace
        return trace

    def storages(self, trace: MemoryTrace, rows: Sequence[int], heap: Heap | None = None) -> list[int]:
        """The storages, by address of their C++ objects, that were allocated at ``rows`` and are still alive."""
        if self._storages is not None:
            self._storages.collect()
            alive = {record.row: key for key, record in list(self._storages._records.items())}
            return [alive[row] for row in rows if row in alive]
        addresses = [int(trace.address[row]) for row in rows]
        where = heap.storages_at() if heap is not None else {}
        return [where[address] for address in addresses if address in where]


@contextmanager
def _metered(device: str | None) -> Iterator[_Metering]:
    """Meter the device until the block is left."""
    gpu_module = sys.modules.get("vramfit.virtual.gpu")
    active = None if gpu_module is None else gpu_module._active
    if active is not None and device != "cpu":
        yield _Metering(active, active.meter, _index(device))
        return
    from vramfit.api.tracking import running_track, track

    outer = running_track() if device is None else None
    with nullcontext(outer) if outer is not None else track(device=device) as tracked:
        # Metered CPU has a meter, the recorder of a card has not.
        meter = getattr(tracked._recorder, "meter", None)
        yield _Metering(tracked, meter, _index(device) if meter is None else 0)


def _index(device: str | None) -> int:
    """The index of the card that is meant."""
    import torch

    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


# -- who holds it ----------------------------------------------------------------------------------------------------


def _with_owners(
    found: LeakReport, trace: MemoryTrace, meter: _Metering, limit: int, seconds: float
) -> LeakReport:
    """Ask the process who holds samples of what grows, then collect the garbage and see what goes."""
    from vramfit.holders.heap import Heap
    from vramfit.holders.owners import owners_in

    asked: list[GrowingStack] = []
    with Heap.now(seconds) as heap:
        for stack in found.growing:
            samples = meter.storages(trace, stack.rows[:_SAMPLES], heap)
            if samples and limit and len(asked) < _ASKED:
                # The oldest: the newest may still be in a variable that the next call overwrites.
                stack = replace(stack, owners=owners_in(heap, samples[0], limit=limit))
            asked.append(stack)
    gc.collect()
    with nullcontext() if meter.knows_storages else Heap.now(seconds) as after:
        left = [
            stack
            if not stack.rows or meter.storages(trace, stack.rows[:_SAMPLES], after)
            else replace(stack, release=Release.COLLECTOR)
            for stack in asked
        ]
    return replace(found, growing=tuple(left))
