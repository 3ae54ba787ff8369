"""`vramfit.plan`, `vramfit.fit` and `vramfit.verify`: the planner from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.arguments import (
    LONGEST,
    call_argument,
    flag_argument,
    names_argument,
    number_argument,
    path_argument,
    size_argument,
    sizes_argument,
    text_argument,
    whole_argument,
)
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.launch.interrupts import signals_kept
from vramfit.planner.planner_job import PRICE, MemoryBudget, PlanOptions, budget_for_any_card
from vramfit.planner.planner_run import (
    VerifyOptions,
    fit_in_child,
    plan_in_child,
    verify_in_child,
)
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.planner.devices.cost import DeviceBackend
    from vramfit.planner.largest_size import LargestSize
    from vramfit.planner.plans import Plan
    from vramfit.planner.verification import Verification

Progress = Callable[[str], None]


def plan(
    workload: str | Workload,
    *,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    budget: str | float | None = None,
    margin: str | float | None = None,
    host_budget: str | float | None = None,
    sizes: Mapping[str, int] | None = None,
    numerics: str = "rounding",
    objective: str = "throughput",
    allow: Sequence[str] | None = None,
    forbid: Sequence[str] = (),
    alloc_conf: str | None = None,
    time_limit: float = 10.0,
    search_seconds: float | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find the cheapest set of techniques with which a workload stays within a budget.

    >>> plan = vramfit.plan("mlp.py:mlp", gpu="RTX 4090", budget="640MiB")
    >>> [choice.name for choice in plan.choices], plan.fits
    (['activation-checkpointing'], True)
    >>> plan.save("plan.toml")

    Args:
        workload: ``FILE.py:NAME``, planned for in a process of its own, or a `Workload`, planned for in this process:
            that needs an interpreter in which no backward pass has run on the CPU yet.
        gpu: the virtual card; None plans for this machine's CPU, which runs each candidate for real.
        budget: what the program may take, the CUDA context included: ``"16GiB"`` or bytes; None for the whole card.
        margin: what is left free of it; None for 2 % of a card, and nothing of a given budget.
        host_budget: memory of the host that may be spent; None for what is free here.
        sizes: of the batch, in place of the workload's own.
        numerics: how far results may differ: ``bitwise``, ``rounding``, ``precision`` or ``approximate``.
        objective: ``throughput``, ``memory`` for the lowest peak, ``price`` for the card of the catalogue on which a
            step costs least (without `gpu` and `budget`), or a size that is made as large as fits: by its name,
            or ``batch`` or ``sequence``.
        allow: names of the techniques to choose from; None for all.
        forbid: names of those to leave out.
        alloc_conf: allocator settings; None reads the environment.
        time_limit: seconds for one solution of the mixed-integer program.
        search_seconds: for the whole search with the comparison of its plan's gradients, which then ends with the best
            plan so far; None for as long as it takes.
            Ctrl-C ends it too. ``plan.solved.stopped`` says so.
        fresh: whether to ignore what earlier searches saw of ``FILE.py:NAME``.
        progress: called with what is being done.

    Raises:
        NothingFits: no plan stays within the budget, or none was found in time; ``error.plan`` came closest.
        KeyboardInterrupt: the search was interrupted before there was a plan.
        UsageError: the workload, a technique or a size is not there, or cannot be planned for.
        EnvironmentUnfitError: this process cannot hold the virtual GPU; give ``FILE.py:NAME``.
        VramfitError: the workload itself fails.
    """
    memory = _memory_budget(gpu, budget, margin, host_budget, alloc_conf)
    _check_seconds(time_limit, search_seconds)
    text_argument("numerics", numerics)
    text_argument("objective", objective)
    flag_argument("fresh", fresh)
    if progress is not None:
        call_argument("progress", progress)
    if objective == PRICE:
        memory = budget_for_any_card(memory)
    options = PlanOptions(
        sizes={} if sizes is None else sizes_argument("sizes", sizes),
        numerics=numerics,
        objective=objective,
        allow=None if allow is None else names_argument("allow", allow),
        forbid=names_argument("forbid", forbid),
        time_limit=time_limit,
        search_seconds=search_seconds,
    )
    if isinstance(workload, Workload):
        return _plan_here(workload, memory, options, progress or _silent)
    with signals_kept():
        target = path_argument("workload", workload)
        found = plan_in_child(target, memory, options, fresh=fresh, progress=progress)
    if found.failure is not None:
        from vramfit.planner.plans import NothingFits

        raise NothingFits(found.failure.message, found.failure.hint, found.plan)
    return found.plan


def _plan_here(workload: Workload, memory: MemoryBudget, options: PlanOptions, progress: Progress) -> Plan:
    """Plan in this process."""
    from vramfit.planner.gradient_check import promised_plan
    from vramfit.planner.plans import plan_request
    from vramfit.planner.workload_check import check_workload

    space = memory.settled()
    request = plan_request(workload, options, space)
    check_workload(workload, request.sizes)
    if request.objective == PRICE:
        from vramfit.planner.cheapest_card import cheapest_plan

        def device_of(card: GpuSpec) -> DeviceBackend:
            return _device(replace(memory, gpu=card), space.host_bytes)

        return cheapest_plan(device_of, request, progress)[1]
    return promised_plan(_device(memory, space.host_bytes), request, progress)[1]


def _device(memory: MemoryBudget, host_bytes: int) -> DeviceBackend:
    if memory.gpu is None:
        from vramfit.planner.devices.cpu_backend import CpuBackend

        return CpuBackend()
    from vramfit.planner.devices.virtual_backend import VirtualBackend

    return VirtualBackend(memory.gpu, alloc_conf=memory.alloc_conf, host_bytes=host_bytes)


def _check_seconds(time_limit: float, search_seconds: float | None) -> None:
    number_argument("time_limit", time_limit, least=0, most=LONGEST, inside=True)
    if search_seconds is not None:
        number_argument("search_seconds", search_seconds, least=0, most=LONGEST, inside=True)


def _check_card(card: bool | None, progress: Progress | None) -> None:
    if card is not None:
        flag_argument("card", card)
    if progress is not None:
        call_argument("progress", progress)


def _silent(_text: str) -> None:
    pass


def fit(
    workload: str,
    *,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    size: str | None = None,
    budget: str | float | None = None,
    margin: str | float | None = None,
    sizes: Mapping[str, int] | None = None,
    plan: str | os.PathLike[str] | None = None,
    card: bool | None = None,
    alloc_conf: str | None = None,
    progress: Progress | None = None,
) -> LargestSize:
    """Find the largest batch size, or another size, with which a workload's step fits.

    >>> largest = vramfit.fit("mlp.py:mlp", gpu="RTX 4090", budget="640MiB")
    >>> largest.size, largest.value
    ('batch_size', 3584)

    Args:
        workload: ``FILE.py:NAME``.
        gpu: the virtual card; None for this machine's CPU.
        size: the name of the size; None for the workload's first.
        budget: what the program may take; None for the whole card.
        margin: what is left free of it; None for 2 % of a card, and nothing of a given budget.
        sizes: where to begin, and the other sizes.
        plan: a file with a plan to apply first.
        card: whether what was found is run on this machine's card too; None does so if it is the same card.
        alloc_conf: allocator settings; None reads the environment.
        progress: called with what is being done.

    Raises:
        UsageError: the workload or the size is not there.
        VramfitError: the workload itself fails.
    """
    memory = _memory_budget(gpu, budget, margin, None, alloc_conf)
    file = None if plan is None else Path(path_argument("plan", plan))
    sizes = None if sizes is None else sizes_argument("sizes", sizes)
    if size is not None:
        text_argument("size", size)
    _check_card(card, progress)
    with signals_kept():
        return fit_in_child(workload, memory, size=size, sizes=sizes, plan=file, card=card, progress=progress)


def verify(
    plan: str | os.PathLike[str],
    *,
    workload: str | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    memory: bool = True,
    values: bool = True,
    card: bool | None = None,
    sizes: Mapping[str, int] | None = None,
    steps: int = 50,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Verification:
    """Compare a plan with a run of its memory, and with the plain program's gradients and losses.

    >>> vramfit.verify("plan.toml", sizes={"batch_size": 64}, steps=2)
    <Verification: simulated pass, gradients pass, losses pass>

    Args:
        plan: the plan's file.
        workload: ``FILE.py:NAME``; None for the one that the plan was made for.
        gpu: the card, where the plan's is none that vramfit knows by its name.
        memory: whether memory is looked at.
        values: whether gradients and losses are, on this machine's CPU.
        card: whether memory and time are measured on this machine's card; None does so if it is the plan's card.
        sizes: of the batches for that; None takes the plan's, smaller ones where that would take too long.
        steps: of the loss curve.
        seconds: for the loss curves, about.
        progress: called with what is being done.

    Raises:
        UsageError: there is no such plan or workload.
        VramfitError: the workload itself fails.
    """
    sizes = None if sizes is None else sizes_argument("sizes", sizes)
    for name, flag in (("memory", memory), ("values", values)):
        flag_argument(name, flag)
    whole_argument("steps", steps, least=1)
    number_argument("seconds", seconds, least=0, most=LONGEST)
    if workload is not None:
        text_argument("workload", workload)
    _check_card(card, progress)
    options = VerifyOptions(
        memory=memory, values=values, card=card, sizes=sizes or {}, steps=steps, seconds=seconds
    )
    with signals_kept():
        return verify_in_child(
            Path(path_argument("plan", plan)),
            options,
            target=workload,
            gpu=None if gpu is None else find_gpu(gpu),
            progress=progress,
        )


def _memory_budget(
    gpu: str | os.PathLike[str] | GpuSpec | None,
    budget: str | float | None,
    margin: str | float | None,
    host_budget: str | float | None,
    alloc_conf: str | None,
) -> MemoryBudget:
    return MemoryBudget(
        gpu=None if gpu is None else find_gpu(gpu),
        budget=None if budget is None else size_argument("budget", budget),
        margin=None if margin is None else size_argument("margin", margin, least=0),
        host_bytes=None if host_budget is None else size_argument("host_budget", host_budget, least=0),
        alloc_conf=alloc_conf,
    )
