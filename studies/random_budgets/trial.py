"""The two halves of a trial, each for a process of its own: planning, and measuring what the plan comes to.

NOTE [What is measured]: torch's profiler is on from before the model is made. On the CPU it notes with every
allocation and every free the bytes that are then allocated in all (c10/core/CPUAllocator.cpp,
`ProfiledCPUMemoryReporter`). The highest of these is the measured peak: of the making of the model, of the batches, and
of every step. None of it is the planner's own code, which runs fewer steps from another seed.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import vramfit
from random_budgets.pairs import Pair
from vramfit.errors import UsageError
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.plan_file import plan_to_toml
from vramfit.planner.plans import NothingFits, Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.workload_check import check_workload
from vramfit.techniques import Choice, Numerics, find_technique, with_choices
from vramfit.techniques.activation_checkpointing import Checkpointing
from vramfit.techniques.micro_batching import MicroBatchingSetting

STEPS = 4
"""Steps that are measured."""

_METERED_STEPS = 2
"""Steps that vramfit's own meter follows: the second has the optimizer's state."""

_STEP = "budgets: step"
"""What the measured steps are called in the profiler's events."""

_OTHER_SEED = 1 << 20
"""Weights and batches that are measured are others than those that the plan was made with."""


def plan(pair: Pair) -> dict[str, Any]:
    """Make the plan of a pair: what it says, and how it was found.

    The budget lies between the plain peak and a low one, that of `_recipe_peak`: since the planner could choose that
    recipe itself, there always is a plan to be found.
    """
    _settle(pair.seed + pair.number)
    workload, sizes, device = pair.workload, dict(pair.sizes), CpuBackend()
    check_workload(workload, sizes)
    plain = device.step_cost(workload, sizes).peak_allocated_bytes
    low = min(plain, _recipe_peak(pair))
    budget = pair.budget(low, plain)
    request = PlanRequest(
        workload=workload,
        sizes=sizes,
        budget_bytes=budget,
        numerics=Numerics(pair.numerics),
        entries=False,
    )
    began = time.perf_counter()
    try:
        found, fits = PlanSearch(Candidates(device=device, request=request)).plan(), True
    except NothingFits as error:
        found, fits = error.plan, False
    return {
        "plain_bytes": plain,
        "low_bytes": low,
        "budget_bytes": budget,
        "fits": fits,
        "planned_bytes": found.after.total_bytes,
        "techniques": [choice.words for choice in found.choices],
        "extra_flops": found.after.step_flops / max(1, found.before.step_flops) - 1,
        "runs": found.solved.runs,
        "plan_seconds": time.perf_counter() - began,
        "plan": plan_to_toml(found),
    }


def _recipe_peak(pair: Pair) -> int:
    """The peak of what people would try first: all blocks recomputed and, where it applies, single examples."""
    checkpointing = Choice(technique=find_technique("activation-checkpointing"), setting=Checkpointing())
    pieces = Choice(
        technique=find_technique("micro-batching"),
        setting=MicroBatchingSetting(count=pair.sizes["batch_size"]),
    )
    if pair.numerics != Numerics.BITWISE.value and pair.workload.step is None:
        with contextlib.suppress(UsageError):  # batch norm sees another batch
            # Kernels may take more for themselves for a single example than for several.
            return min(_peak(pair, checkpointing), _peak(pair, checkpointing, pieces))
    return _peak(pair, checkpointing)


def _peak(pair: Pair, *choices: Choice) -> int:
    workload = with_choices(pair.workload, choices)
    return CpuBackend().step_cost(workload, dict(pair.sizes)).peak_allocated_bytes


def measure(pair: Pair, plan_file: Path | None) -> dict[str, Any]:
    """Run a pair's workload, with a plan that was saved or plain; see NOTE [What is measured].

    Returns:
        ``measured_bytes``, the highest of all; ``start_bytes``, before the first step; ``step_bytes`` of each step; and
        ``metered_bytes``, what vramfit's own meter of the CPU says of two.
    """
    _settle(pair.seed + pair.number + _OTHER_SEED)
    workload, sizes = pair.workload, dict(pair.sizes)
    if plan_file is not None:
        workload = Plan.load(plan_file).apply(workload)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = workload.start("cpu")
        for _ in range(STEPS):
            with record_function(_STEP):
                workload.run_step(state, sizes)
    found = _peaks(profiler.profiler.kineto_results.experimental_event_tree())
    del state, profiler
    gc.collect()
    state = workload.start("cpu")
    with vramfit.track(state.model, state.optimizer, device="cpu") as track:
        for _ in range(_METERED_STEPS):
            workload.run_step(state, sizes)
    return {**found, "metered_bytes": track.peak_allocated_bytes}


def _settle(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def _peaks(tree: list[Any]) -> dict[str, Any]:
    """The highest bytes of all, before the first step, and of each step."""
    events = list(_events(tree))
    begins = sorted(event.start_time_ns for event in events if event.name == _STEP)
    peaks = [0] * (len(begins) + 1)
    last = 0
    allocations = [event for event in events if event.tag == _EventType.Allocation]
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        step = sum(begin <= event.start_time_ns for begin in begins)
        total = event.extra_fields.total_allocated
        peaks[step] = max(peaks[step], total, last)
        last = total
    if len(peaks) < 2 or not all(peaks[1:]):
        raise AssertionError("the profiler noted no allocation in a step")
    return {"measured_bytes": max(peaks), "start_bytes": peaks[0], "step_bytes": peaks[1:]}


def _events(tree: list[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)
