"""What the planner's child can be asked for; each gives plain values for JSON."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vramfit.errors import UsageError
from vramfit.planner.checking import check_workload
from vramfit.planner.document import plan_to_toml
from vramfit.planner.fitting import largest
from vramfit.planner.plan import Plan
from vramfit.planner.price import Device
from vramfit.planner.request import NothingFits, Request
from vramfit.planner.search import Search
from vramfit.planner.verifying import compare, simulate, smaller_sizes, too_large
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


def plan(workload: Workload, device: Device, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The best plan for a budget, and the frontier if it was asked for."""
    request = _request(workload, job)
    check_workload(workload, request.sizes, progress)
    search = Search(device=device, request=request, progress=progress)
    try:
        found = search.plan()
    except NothingFits as error:
        raise PlanFailed(error) from None
    return {
        "plan": plan_to_toml(found),
        "frontier": [asdict(point) for point in search.frontier()] if job["frontier"] else [],
    }


def _request(workload: Workload, job: dict[str, Any]) -> Request:
    return Request(
        workload=workload,
        sizes=sizes_of(workload, job["sizes"]),
        budget_bytes=job["budget"],
        margin_bytes=job["margin"],
        host_bytes=job["host_bytes"],
        numerics=Numerics(job["numerics"]),
        objective=job["objective"],
        allowed=None if job["allow"] is None else frozenset(job["allow"]),
        forbidden=frozenset(job["forbid"]),
        target=job["target"],
        time_limit=job["time_limit"],
    )


def fit(workload: Workload, device: Device, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The largest value of a size that fits."""
    sizes = sizes_of(workload, job["sizes"])
    name = job["size"] or next(iter(workload.sizes))
    if name not in sizes:
        raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(sizes)}")
    check_workload(workload, sizes, progress)
    if job["plan"] is not None:
        workload = with_choices(workload, Plan.load(job["plan"]).choices)
    return asdict(largest(device, workload, sizes, name, job["budget"] - job["margin"], progress))


def verify_memory(
    workload: Workload, device: Device, job: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Whether a plan's memory is what it says."""
    found = Plan.load(job["plan"])
    progress("the program before and after, on the device")
    return asdict(simulate(device, workload, found))


def verify_values(
    workload: Workload,
    device: Device,  # noqa: ARG001  # the CPU that this process is on
    job: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Whether gradients and losses are what a plan promises."""
    found = Plan.load(job["plan"])
    if why := too_large(workload, job["host_bytes"]):
        return {"skipped": why, "sizes": dict(found.aim.sizes)}
    sizes = sizes_of(workload, job["sizes"])
    if not job["sizes"]:
        sizes = smaller_sizes(workload, found, job["step_seconds"], job["seconds"], job["steps"])
    gradients, losses, notes = compare(
        workload, found, sizes, steps=job["steps"], seconds=job["seconds"], progress=progress
    )
    return {
        "skipped": "",
        "sizes": sizes,
        "gradients": asdict(gradients),
        "losses": asdict(losses),
        "notes": list(notes),
    }


def sizes_of(workload: Workload, given: dict[str, int]) -> dict[str, int]:
    """The workload's sizes, with those that were given in place of its own.

    Raises:
        UsageError: it has no such size.
    """
    for name in given:
        if name not in workload.sizes:
            raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(workload.sizes)}")
    return {**workload.sizes, **given}


def own_failure(error: Exception, target: str) -> dict[str, Any]:
    """What the workload's own code raised, with the line of the user's file that did."""
    file = target.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.endswith(file)]
    where = f"{file}:{lines[-1]}: " if lines else ""
    text = (str(error).splitlines() or [""])[0]
    return {
        "message": f"{where}{type(error).__name__}: {text}",
        "hint": "The workload itself fails: run one step of it on its own to see more",
        "code": 1,
    }
