"""Plans whose aim is the largest size: the batch, the sequence, or whatever the workload calls its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vramfit.errors import UsageError
from vramfit.planner.bracketing import bracket
from vramfit.planner.failures import brief
from vramfit.planner.frames import ACTIVATIONS
from vramfit.planner.plan import Plan
from vramfit.planner.price import Device
from vramfit.planner.reducing import Cutting
from vramfit.planner.request import MEMORY, PRICE, THROUGHPUT, NothingFits, Request
from vramfit.planner.search import Search
from vramfit.techniques import with_choices
from vramfit.techniques.micro_batching import batch_size_name

Progress = Callable[[str], None]

_ALIASES = ("batch", "sequence")

_CLOSE = 64
"""The largest size is looked for up to this part of it."""


_GROWTHS = 4
"""Times that a plan for the largest size is tried at larger ones."""


def search_for(device: Device, request: Request, progress: Progress) -> tuple[Search, Plan]:
    """The best plan for a request, with the search that found it.

    Where the objective is a size, the plan of the lowest peak at the workload's own size is looked for first; with that
    the size is doubled and bisected, a run each, and the quickest plan at the largest is taken. Micro-batching has no
    part in it for the size of the batch: with it there is no largest.

    Raises:
        NothingFits: none stays within the budget.
        UsageError: the workload cannot be run, or the objective is none.
    """
    if request.objective in (THROUGHPUT, MEMORY):
        search = Search(device=device, request=request, progress=progress)
        return search, search.plan()
    name = grown_size(request)
    forbidden = request.forbidden
    if name == batch_size_name(request.sizes):
        forbidden |= {"micro-batching"}
    request = replace(request, objective=name, forbidden=forbidden)
    first = Search(
        device=device, request=replace(request, objective=MEMORY, entries=False), progress=progress
    )
    try:
        lean = first.plan()
    except NothingFits as error:
        lean = error.plan
    failures: dict[int, str] = {}
    value = max(1, _largest(device, request, name, request.sizes[name], lean, failures, progress))
    step = 1
    known = first.known_cutting
    while isinstance(found := _planned(device, request, name, value, lean, progress, known), NothingFits):
        if value <= 1:
            raise found
        value = max(1, min(value - 1, value - value * step // _CLOSE))
        step *= 2
    for _ in range(_GROWTHS):
        # The lowest peak may be more fragmented than a higher one: each plan has a largest size of its own.
        larger = _largest(device, request, name, value, found[1], failures, progress)
        if larger <= value:
            break
        better = _planned(device, request, name, larger, found[1], progress, known)
        if isinstance(better, NothingFits):
            break
        value, found = larger, better
    search, plan = found
    if failures:
        least = min(failures)
        note = f"{name} {least:,} is too large for the workload itself ({failures[least]})."
        plan = replace(plan, notes=(*plan.notes, note))
    return search, plan


def _largest(
    device: Device,
    request: Request,
    name: str,
    start: int,
    plan: Plan,
    failures: dict[int, str],
    progress: Progress,
) -> int:
    """The largest size at which a plan fits; 0 without one.

    What goes wrong above the workload's own size is noted in `failures`: models end somewhere.
    """
    planned = with_choices(request.workload, plan.choices)

    def fits(value: int) -> bool:
        progress(f"{name} {value:,}")
        try:
            price = device.price(planned, {**request.sizes, name: value}, request.limit)
        except Exception as error:
            if value <= request.sizes[name]:
                raise
            failures[value] = brief(error)
            return False
        return price.fits and (not plan.entries or price.host_bytes <= request.host_bytes)

    return bracket(fits, start, closer=max(1, start // _CLOSE))[0]


def _planned(
    device: Device,
    request: Request,
    name: str,
    value: int,
    like: Plan,
    progress: Progress,
    cutting: Cutting | None,
) -> tuple[Search, Plan] | NothingFits:
    """The best plan at a size, with another one's to begin with; or that there is none."""
    asked = replace(request, sizes={**request.sizes, name: max(1, value)})
    around = tuple(choice for choice in like.choices if choice.name not in ACTIVATIONS)
    search = Search(device=device, request=asked, progress=progress, start=around, cutting=cutting)
    try:
        return search, search.plan()
    except NothingFits as error:
        return error


def grown_size(request: Request) -> str:
    """The size that an objective names: by its own name, or ``batch`` or ``sequence`` for the one that it must be.

    Raises:
        UsageError: it names none.
    """
    objective, sizes = request.objective, request.sizes
    if objective in sizes:
        return objective
    if objective == "batch":
        return batch_size_name(sizes)
    if objective == "sequence":
        found = [name for name in sizes if "seq" in name or "length" in name]
        if len(found) == 1:
            return found[0]
    known = ", ".join((THROUGHPUT, MEMORY, PRICE, *_ALIASES, *sizes))
    raise UsageError(f"{objective!r} is no objective of this workload", f"Give one of {known}")
