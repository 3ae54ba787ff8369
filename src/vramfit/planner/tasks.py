"""The tasks of the planner's child."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.cheapest_card import cheapest_plan
from vramfit.planner.devices.card_backend import CardBackend
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.largest_size import CardCheck, LargestSize, SizeSearch
from vramfit.planner.memory_budget import PRICE
from vramfit.planner.plan_file import plan_to_toml
from vramfit.planner.planner_job import (
    ConfirmJob,
    FitJob,
    MeasureJob,
    PlanJob,
    VerifyMemoryJob,
    VerifyValuesJob,
)
from vramfit.planner.plans import Plan
from vramfit.planner.request import NothingFits, PlanRequest
from vramfit.planner.search import PlanFound
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import SearchClock, interruptible
from vramfit.planner.search_evidence import SEARCH_FILE, Evidence
from vramfit.planner.verification import (
    CardRuns,
    Simulated,
    ValuesCheck,
    compare,
    run_on,
    simulate,
    smaller_sizes,
    too_large,
)
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
    workload: Workload,
    device: DeviceBackend,
    job: PlanJob,
    progress: Progress,
    evidence: Evidence | None = None,
) -> PlanFound:
    """The best plan for a budget, and the frontier if it was asked for.

    Args:
        workload: the program.
        device: where its steps are run.
        job: what is asked.
        progress: called with what is being done.
        evidence: by which earlier searches are trusted; None leaves them aside, as devices that measure do.
    """
    request = plan_request(workload, job)
    check_workload(workload, request.sizes, progress)
    clock = SearchClock(limit=request.search_seconds)
    cache = None if evidence is None else SearchCache(evidence.beside / SEARCH_FILE, evidence)
    try:
        with interruptible(clock):
            if request.objective == PRICE:
                search, found = cheapest_plan(_card_maker(job), request, progress, clock)
            else:
                search, found = promised_plan(device, request, progress, clock, cache)
    except NothingFits as error:
        raise PlanFailed(error) from None
    frontier = tuple(search.frontier()) if job.options.frontier else ()
    return PlanFound(plan=plan_to_toml(found), frontier=frontier)


def _card_maker(job: PlanJob) -> Callable[[GpuSpec], DeviceBackend]:
    def make(card: GpuSpec) -> DeviceBackend:
        return VirtualBackend(card, alloc_conf=job.memory.alloc_conf, host_bytes=job.memory.host_bytes)

    return make


def plan_request(workload: Workload, job: PlanJob) -> PlanRequest:
    """The request for a plan that a job holds.

    Raises:
        UsageError: there is no such size, technique or level of numerics.
    """
    options, memory = job.options, job.memory
    return PlanRequest(
        workload=workload,
        sizes=sizes_of(workload, options.sizes),
        budget_bytes=memory.budget,
        margin_bytes=memory.margin,
        host_bytes=memory.host_bytes,
        numerics=Numerics.parse(options.numerics),
        objective=options.objective,
        allowed=None if options.allow is None else frozenset(options.allow),
        forbidden=frozenset(options.forbid),
        target=job.target,
        time_limit=options.time_limit,
        search_seconds=options.search_seconds,
    )


def fit(workload: Workload, device: DeviceBackend, job: FitJob, progress: Progress) -> LargestSize:
    """The largest value of a size that fits."""
    sizes = sizes_of(workload, job.sizes)
    name = job.size or next(iter(workload.sizes))
    if name not in sizes:
        raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(sizes)}")
    check_workload(workload, sizes, progress)
    host_limit = None
    if job.plan is not None:
        plan = Plan.load(job.plan)
        workload = with_choices(workload, plan.choices)
        host_limit = job.memory.host_budget or plan.aim.host_budget_bytes or None
    return SizeSearch(device, workload, sizes, name, job.memory.limit, progress, host_limit).largest()


def confirm(workload: Workload, device: DeviceBackend, job: ConfirmJob, progress: Progress) -> CardCheck:
    """The largest value that fits this card, of those up to the one that was predicted."""
    card = card_of(device)
    if why := another_card(card, job):
        return CardCheck(card=card.name, skipped=why)
    sizes = {**sizes_of(workload, job.sizes), job.size: job.value}
    if job.plan is not None:
        workload = with_choices(workload, Plan.load(job.plan).choices)
    search = SizeSearch(card, workload, sizes, job.size, job.memory.limit, progress)
    value, failing, tries = search.largest_up_to()
    return CardCheck(card=card.name, value=value, failing=failing, tries=tries, left_bytes=card.left_bytes)


def measure(workload: Workload, device: DeviceBackend, job: MeasureJob, progress: Progress) -> CardRuns:
    """What a workload takes on this card, plain or with plans: a run for each that was asked for."""
    card = card_of(device)
    if why := another_card(card, job):
        return CardRuns(card=card.name, skipped=why)
    runs = []
    for asked in job.runs:
        progress(f"{asked.name}, on {card.name}")
        program = workload if asked.plan is None else Plan.load(asked.plan).apply(workload)
        runs.append(run_on(card, program, sizes_of(workload, asked.sizes), asked.limit))
    return CardRuns(card=card.name, runs=tuple(runs), left_bytes=card.left_bytes)


def card_of(device: DeviceBackend) -> CardBackend:
    """The card, which these tasks are for."""
    if not isinstance(device, CardBackend):
        raise TypeError(f"{device.name} is not a card")
    return device


def another_card(card: CardBackend, job: ConfirmJob | MeasureJob) -> str:
    """Why this machine's card says nothing of the one that is asked about; empty where it does."""
    if job.any_card or job.memory.gpu is None:
        return ""
    wanted = job.memory.gpu.name
    try:
        here = find_gpu(card.name).name
    except UnknownGpuError:
        here = card.name
    return "" if here == wanted else f"this machine's card is a {card.name}, not a {wanted}"


def verify_memory(
    workload: Workload, device: DeviceBackend, job: VerifyMemoryJob, progress: Progress
) -> Simulated:
    """Whether a plan's memory is what it says."""
    found = Plan.load(job.plan)
    check_workload(workload, sizes_of(workload, dict(found.aim.sizes)), progress)
    progress("the program before and after, on the device")
    return simulate(device, workload, found)


def verify_values(
    workload: Workload,
    device: DeviceBackend,  # noqa: ARG001  # the CPU that this process is on
    job: VerifyValuesJob,
    progress: Progress,
) -> ValuesCheck:
    """Whether gradients and losses are what a plan promises."""
    found = Plan.load(job.plan)
    if why := too_large(workload, job.memory.host_bytes):
        return ValuesCheck(skipped=why, sizes=dict(found.aim.sizes))
    sizes = sizes_of(workload, job.sizes)
    check_workload(workload, sizes, progress)
    if not job.sizes:
        sizes = smaller_sizes(workload, found, job.step_seconds, job.seconds, job.steps)
    gradients, losses, notes = compare(
        workload, found, sizes, steps=job.steps, seconds=job.seconds, progress=progress
    )
    if losses.plain and not math.isfinite(losses.plain[0]):
        raise UsageError(
            f"the plain program's loss is {losses.plain[0]}: nothing can be compared with it",
            "Let batch make values that the model can train on",
        )
    if not gradients.parameters:
        notes = (*notes, "no gradients were compared: no parameter had one")
    if not losses.plain:
        notes = (*notes, "no losses were compared: the workload's steps give none")
    return ValuesCheck(
        sizes=sizes,
        gradients=gradients if gradients.parameters else None,
        losses=losses if losses.plain else None,
        notes=tuple(notes),
    )


def sizes_of(workload: Workload, given: Mapping[str, int]) -> dict[str, int]:
    """The workload's sizes, with those that were given in place of its own.

    Raises:
        UsageError: it has no such size.
    """
    for name in given:
        if name not in workload.sizes:
            raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(workload.sizes)}")
    return {**workload.sizes, **given}
