"""Tries remedies on a program that ran out, in a process of their own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.launch.job import Failure
from vramfit.options.run_options import RunOptions
from vramfit.planner.asking import job_of, run_job
from vramfit.planner.planner_job import MemoryBudget
from vramfit.planner.remedies.remedies_question import RemediesQuestion
from vramfit.trace.tried_remedies import TriedRemedies

LEAST_SECONDS = 60.0
"""Seconds that remedies may take at least."""

_OVERHEAD = 5.0
"""Beyond them, after which the process is interrupted in the middle of a try: what it has tried until then counts."""


def tried_remedies(
    command: Sequence[str],
    options: RunOptions,
    seconds: float,
    progress: Callable[[str], object] | None = None,
) -> TriedRemedies:
    """What was tried on a program, and what came of it; why nothing was, where the program does not allow it.

    Args:
        command: what python is given.
        options: how it was run, on a virtual card.
        seconds: that may be spent.
        progress: called with each row as it is known.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    question = RemediesQuestion(seconds=seconds, root=str(Path.cwd()))
    memory = MemoryBudget(gpu=options.card, margin=0, alloc_conf=options.alloc_conf).settled()
    plain = replace(options, gpu=None, steps=None, time=None, environ=None, cwd=None, host_memory=False)
    job = job_of(question, "", memory, program=command, run=plain)
    try:
        answer = run_job(job, question.result_type(), progress, seconds + _OVERHEAD)
    except VramfitError as error:
        return TriedRemedies(why_not=error.message)
    if isinstance(answer, Failure):
        return TriedRemedies(why_not=answer.message)
    return answer.found
