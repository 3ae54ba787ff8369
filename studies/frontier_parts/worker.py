"""Works out a row, in a process of its own."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict
from typing import Any

import torch

from frontier_parts import measuring
from frontier_parts.rows import Row
from frontier_parts.subjects import Subject, subjects
from vramfit.workload import Workload


def work_out(subject: Subject, row: Row) -> dict[str, Any]:
    """Everything about a row that the table wants."""
    if row.peer is not None:
        return _measured(row.peer.applied(subject), compiled=row.peer.ratio is not None)
    if row.solver:
        from frontier_parts import auto_sac

        try:
            assert row.budget is not None
            solved = auto_sac.solve(subject.workload, row.budget)
        except auto_sac.Infeasible as error:
            return {"failed": str(error)}
        found = {
            "solve_seconds": solved.solve_seconds,
            "search_seconds": solved.estimate_seconds + solved.solve_seconds,
            "predicted_bytes": solved.predicted_bytes,
            "words": [f"{len(solved.policies)} modules"],
        }
        return found | _measured(solved.applied(subject.workload))
    from frontier_parts import plans

    answer = plans.plan_for(subject, row.budget, cut=row.cut, say=_say)
    plan = answer.plan
    found = {
        "fits": answer.fits,
        "planned_bytes": plan.after.peak_allocated_bytes - plans.fixed_bytes(subject),
        "solve_seconds": plan.solved.seconds,
        "search_seconds": plan.solved.search_seconds,
        "runs": answer.runs,
        "words": [choice.words for choice in plan.choices],
        "choices": [[choice.name, repr(choice.setting)] for choice in plan.choices],
    }
    return found | _measured(plan.apply(subject.workload))


def _measured(workload: Workload, *, compiled: bool = False) -> dict[str, Any]:
    began = time.perf_counter()
    found = measuring.measure(workload, compiled=compiled)
    return {
        "peak_bytes": found.peak_bytes,
        **asdict(found.arithmetic),
        "measure_seconds": time.perf_counter() - began,
    }


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def answer(name: str, key: str) -> dict[str, Any]:
    """What is found of a row of a subject, in this process alone; what goes wrong is found, too."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # what convolutions take for themselves grows with the threads
    subject = subjects()[name]
    subject.workload.model()  # what it is copied from is there before anything is counted
    try:
        return work_out(subject, Row.of(key))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {lines[0][:200]}"}
