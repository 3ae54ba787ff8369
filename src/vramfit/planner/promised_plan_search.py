"""The best plan whose comparison with the plain program agrees, as far as this machine can compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import check_promises
from vramfit.planner.largest_size import search_for
from vramfit.planner.plans import Plan
from vramfit.planner.request import NothingFits, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_cache.cache import SearchCache
from vramfit.planner.search_cache.runs import Runs
from vramfit.planner.search_clock import SearchClock
from vramfit.techniques import find_technique

_OFFLOADS = ("activation-offload", "optimizer-offload", "parameter-offload")
"""Techniques that move tensors to the memory of the host."""


def promised_plan(
    device: DeviceBackend,
    request: PlanRequest,
    progress: Callable[[str], None],
    clock: SearchClock | None = None,
    cache: SearchCache | None = None,
) -> tuple[PlanSearch, Plan]:
    """The best plan for a request, with the search that found it; its notes say what was compared.

    A technique whose gradients are not what it promises is left out, and the search made again without it: what was run
    before is not run again.

    Raises:
        NothingFits: none stays within the budget; its plan's notes say what was left out.
        UsageError: the workload cannot be run, or the objective is none.
    """
    clock = clock or SearchClock(limit=request.search_seconds)
    notes: tuple[str, ...] = ()
    kept = Runs()
    if isinstance(device, VirtualBackend) and device.spec.integrated:
        offloads = {technique.name for technique in map(find_technique, _OFFLOADS) if request.may(technique)}
        request = replace(request, forbidden=request.forbidden | offloads)
        if offloads:
            notes = (
                f"{device.name} shares its memory with the host: nothing is offloaded, for it would free none.",
            )
    while True:
        try:
            search, found = search_for(device, request, progress, clock, cache, kept)
        except NothingFits as error:
            plan = replace(error.plan, notes=(*error.plan.notes, *notes))
            raise NothingFits(error.message, error.hint, plan) from None
        progress("the plan's gradients beside the plain program's")
        compared = check_promises(request.workload, found)
        if compared.note:
            notes = (*notes, compared.note)
        if compared.fault is None:
            return search, replace(found, notes=(*found.notes, *notes))
        request = replace(request, forbidden=request.forbidden | {compared.fault.name})
