"""What the planner's child can be asked for; each gives plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.cheapest_card import cheapest_plan
from vramfit.planner.devices.card_backend import CardBackend
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.largest_size import CardCheck, SizeSearch
from vramfit.planner.memory_budget import PRICE
from vramfit.planner.plan_file import plan_to_toml
from vramfit.planner.plans import Plan
from vramfit.planner.request import NothingFits, PlanRequest
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import SearchClock, interruptible
from vramfit.planner.search_evidence import SEARCH_FILE
from vramfit.planner.verification import compare, run_on, simulate, smaller_sizes, too_large
from vramfit.planner.workload_check import check_workload
from vramfit.techniques import Numerics, with_choices
from vramfit.workload import Workload

Progress = Callable[[str], None]


class PlanFailed(UsageError):
    """No plan fits: an error with the closest plan beside it.

    Attributes:
        found: the plan as a text, for the parent.
    """

    exit_code = 3

    def __init__(self, error: NothingFits) -> None:
        super().__init__(error.message, error.hint)
        self.found = {"plan": plan_to_toml(error.plan)}


def plan(
    workload: Workload, device: DeviceBackend, job: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """The best plan for a budget, and the frontier if it was asked for."""
    request = plan_request(workload, job)
    check_workload(workload, request.sizes, progress)
    clock = SearchClock(limit=request.search_seconds)
    try:
        with interruptible(clock):
            if request.objective == PRICE:
                search, found = cheapest_plan(_card_maker(job), request, progress, clock)
            else:
                search, found = promised_plan(device, request, progress, clock, _search_cache(job))
    except NothingFits as error:
        raise PlanFailed(error) from None
    return {
        "plan": plan_to_toml(found),
        "frontier": [asdict(point) for point in search.frontier()] if job["frontier"] else [],
    }


def _card_maker(job: dict[str, Any]) -> Callable[[GpuSpec], DeviceBackend]:
    def make(card: GpuSpec) -> DeviceBackend:
        return VirtualBackend(card, alloc_conf=job["alloc_conf"], host_bytes=job["host_bytes"])

    return make


def _search_cache(job: dict[str, Any]) -> SearchCache | None:
    """Of earlier searches on a virtual card. Other devices measure, and nothing is twice the same there."""
    evidence = job.get("evidence")
    return None if evidence is None else SearchCache(evidence.beside / SEARCH_FILE, evidence)


def plan_request(workload: Workload, job: dict[str, Any]) -> PlanRequest:
    """The request for a plan that a job holds.

    Raises:
        UsageError: there is no such size, technique or level of numerics.
    """
    return PlanRequest(
        workload=workload,
        sizes=sizes_of(workload, job["sizes"] or {}),
        budget_bytes=job["budget"],
        margin_bytes=job["margin"],
        host_bytes=job["host_bytes"],
        numerics=Numerics.parse(job["numerics"]),
        objective=job["objective"],
        allowed=None if job["allow"] is None else frozenset(job["allow"]),
        forbidden=frozenset(job["forbid"]),
        target=job.get("target", ""),
        time_limit=job["time_limit"],
        search_seconds=job.get("search_seconds"),
    )


def fit(workload: Workload, device: DeviceBackend, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The largest value of a size that fits."""
    sizes = sizes_of(workload, job["sizes"])
    name = job["size"] or next(iter(workload.sizes))
    if name not in sizes:
        raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(sizes)}")
    check_workload(workload, sizes, progress)
    host_limit = None
    if job["plan"] is not None:
        plan = Plan.load(job["plan"])
        workload = with_choices(workload, plan.choices)
        host_limit = job["host_budget"] or plan.aim.host_budget_bytes or None
    limit = job["budget"] - job["margin"]
    return asdict(SizeSearch(device, workload, sizes, name, limit, progress, host_limit).largest())


def confirm(
    workload: Workload, device: DeviceBackend, job: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """The largest value that fits this card, of those up to the one that was predicted."""
    card = card_of(device)
    if why := another_card(card, job):
        return asdict(CardCheck(card=card.name, skipped=why))
    sizes = {**sizes_of(workload, job["sizes"]), job["size"]: job["value"]}
    if job["plan"] is not None:
        workload = with_choices(workload, Plan.load(job["plan"]).choices)
    limit = job["budget"] - job["margin"]
    value, failing, tries = SizeSearch(card, workload, sizes, job["size"], limit, progress).largest_up_to()
    return asdict(
        CardCheck(card=card.name, value=value, failing=failing, tries=tries, left_bytes=card.left_bytes)
    )


def measure(
    workload: Workload, device: DeviceBackend, job: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """What a workload takes on this card, plain or with plans: a run for each that was asked for."""
    card = card_of(device)
    if why := another_card(card, job):
        return {"card": card.name, "skipped": why, "runs": [], "left_bytes": 0}
    runs = []
    for asked in job["runs"]:
        progress(f"{asked['name']}, on {card.name}")
        plan = None if asked["plan"] is None else Plan.load(asked["plan"])
        program = workload if plan is None else plan.apply(workload)
        found = run_on(card, program, sizes_of(workload, asked["sizes"]), asked["limit"])
        runs.append(asdict(found))
    return {"card": card.name, "skipped": "", "runs": runs, "left_bytes": card.left_bytes}


def card_of(device: DeviceBackend) -> CardBackend:
    """The card, which these tasks are for."""
    if not isinstance(device, CardBackend):
        raise TypeError(f"{device.name} is no card")
    return device


def another_card(card: CardBackend, job: dict[str, Any]) -> str:
    """Why this machine's card says nothing of the one that is asked about; empty where it does."""
    wanted = job["gpu"]["name"]
    if job["any_card"]:
        return ""
    try:
        here = find_gpu(card.name).name
    except UnknownGpuError:
        here = card.name
    return "" if here == wanted else f"this machine's card is a {card.name}, not a {wanted}"


def verify_memory(
    workload: Workload, device: DeviceBackend, job: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Whether a plan's memory is what it says."""
    found = Plan.load(job["plan"])
    check_workload(workload, sizes_of(workload, dict(found.aim.sizes)), progress)
    progress("the program before and after, on the device")
    return asdict(simulate(device, workload, found))


def verify_values(
    workload: Workload,
    device: DeviceBackend,  # noqa: ARG001  # the CPU that this process is on
    job: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Whether gradients and losses are what a plan promises."""
    found = Plan.load(job["plan"])
    if why := too_large(workload, job["host_bytes"]):
        return {"skipped": why, "sizes": dict(found.aim.sizes)}
    sizes = sizes_of(workload, job["sizes"])
    check_workload(workload, sizes, progress)
    if not job["sizes"]:
        sizes = smaller_sizes(workload, found, job["step_seconds"], job["seconds"], job["steps"])
    gradients, losses, notes = compare(
        workload, found, sizes, steps=job["steps"], seconds=job["seconds"], progress=progress
    )
    if losses.plain and not math.isfinite(losses.plain[0]):
        raise UsageError(
            f"the plain program's loss is {losses.plain[0]}: nothing can be compared with it",
            "Let batch make values that the model can train on",
        )
    compared: dict[str, Any] = {}
    if gradients.parameters:
        compared["gradients"] = asdict(gradients)
    else:
        notes = (*notes, "no gradients were compared: no parameter had one")
    if losses.plain:
        compared["losses"] = asdict(losses)
    else:
        notes = (*notes, "no losses were compared: the workload's steps give none")
    return {"skipped": "", "sizes": sizes, "notes": list(notes), **compared}


def sizes_of(workload: Workload, given: dict[str, int]) -> dict[str, int]:
    """The workload's sizes, with those that were given in place of its own.

    Raises:
        UsageError: it has no such size.
    """
    for name in given:
        if name not in workload.sizes:
            raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(workload.sizes)}")
    return {**workload.sizes, **given}
