"""Confirms a plan by a run of the program with it in a process of its own, as ``vramfit run --plan`` makes it."""

from __future__ import annotations

from dataclasses import replace

from vramfit.errors import VramfitError
from vramfit.launch.offline import OFFLINE
from vramfit.options.run_options import RunOptions
from vramfit.planner.planned_program import PlannedProgram
from vramfit.planner.planner_job import DeviceMemory
from vramfit.planner.plans import Plan
from vramfit.trace import Run
from vramfit.virtual.virtual_run import VirtualSettings, run_in_child

_STEPS = 3
"""Steps of the run: one more than the search looks at."""


def confirmed(plan: Plan, memory: DeviceMemory) -> tuple[Plan, int]:
    """A plan with the figures of such a run, and the bytes that were missing where the program ran out.

    Raises:
        VramfitError: the program fails with the plan.
    """
    planned = PlannedProgram(plan=plan, file="the plan")
    run = _run(planned, memory)
    if run.ran_out:
        oom = run.oom
        assert oom is not None
        return plan, max(oom.requested_bytes - oom.free_bytes, 1 << 20)
    if run.exit_code and not run.progress.is_cut:
        raise VramfitError(
            f"the program fails with its plan: {run.error or f'exit code {run.exit_code}'}",
            "Forbid a technique: vramfit plan --forbid NAME",
        )
    outcome = run.devices[0]
    total = outcome.peak_reserved_bytes + outcome.context_bytes
    same = (outcome.peak_allocated_bytes, total) == (plan.after.peak_allocated_bytes, plan.after.total_bytes)
    note = f"confirmed by {run.progress.steps} steps of the program itself in a process of its own"
    if not same:
        note += ", whose figures these are"
    after = replace(
        plan.after,
        peak_allocated_bytes=outcome.peak_allocated_bytes,
        peak_reserved_bytes=outcome.peak_reserved_bytes,
        total_bytes=total,
    )
    return replace(plan, after=after, notes=(*plan.notes, f"{note}.")), 0


def _run(planned: PlannedProgram, memory: DeviceMemory) -> Run:
    spec = memory.gpu
    assert spec is not None
    card = replace(spec, total_bytes=memory.limit, context_bytes=spec.typical_context_bytes)
    options = RunOptions(gpu=card, alloc_conf=memory.alloc_conf, steps=_STEPS, environ=OFFLINE)
    return run_in_child(
        planned.plan.aim.program,
        planned.options(options),
        VirtualSettings(hooks=(planned.hook,), aside=True),
    )
