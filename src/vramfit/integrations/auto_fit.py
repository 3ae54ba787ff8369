"""Plans for the program that is running, and attaches the plan to it: what the callbacks `AutoFit` share.

The program is run again on a virtual card, in processes of its own, where the callback does nothing; the plan that is
found there is attached to the training here. So the program has to be a script or a module: a notebook has no command
line that could be run again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from vramfit.attaching.attached_script import AttachedScript
from vramfit.attaching.first_training import FirstTraining, attach_at_first_training
from vramfit.capture.observing.program_observer import is_observed
from vramfit.capture.observing.training_finder import TrainingFinder
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.planned_program import PlannedProgram
from vramfit.planner.planner_job import MemoryBudget, PlanOptions
from vramfit.planner.planner_run import plan_program
from vramfit.planner.scripts.script_place import PLANNING

_HERE = "the plan that was found for this program"


class AutoPlan:
    """A plan that is found when a training starts, and undone when it ends.

    Args:
        gpu: the card to plan for; None for the one at hand.
        numerics: how far results may differ.
        seconds: for the search.
    """

    def __init__(self, gpu: str | GpuSpec | None, numerics: str, seconds: float) -> None:
        self._gpu, self._numerics, self._seconds = gpu, numerics, seconds
        self._watch: FirstTraining | None = None

    def start(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Find a plan and attach it to the first training pass that comes.

        Args:
            optimizers: those that the training has already.

        Raises:
            UsageError: there is no card, or no command line that could be run again.
            VramfitError: the program fails on the virtual card, or nothing fits.
        """
        if os.environ.get(PLANNING) or is_observed():
            return
        card = _card(self._gpu)
        options = PlanOptions(numerics=self._numerics, search_seconds=self._seconds)
        found = plan_program(program_of_this_process(), MemoryBudget(gpu=card), options)
        if found.failure is not None:
            raise found.failure
        planned = PlannedProgram(plan=found.plan, file=_HERE)
        print(f"vramfit: {found.plan!r}", file=sys.stderr, flush=True)
        made = tuple(optimizers)

        def make(finder: TrainingFinder) -> AttachedScript:
            for optimizer in made:
                finder.meet(optimizer)
            return AttachedScript(planned.plan.choices, planned.target, finder)

        def refuse(error: Exception) -> NoReturn:
            raise error

        self._watch = attach_at_first_training(make, refuse)

    def end(self) -> None:
        """Leave the model and its optimizer as they were, with their values as they are now."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.close()
        if watch.script.live is not None:
            watch.script.live.undo()


def program_of_this_process() -> Sequence[str]:
    """What python was given for this process.

    Raises:
        UsageError: it is no script and no module, such as a notebook.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return ("-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UsageError(
            "AutoFit plans for a script, and this process runs none",
            "Put the training into a script, or plan for a workload: vramfit plan FILE.py:WORKLOAD",
        )
    return (os.path.abspath(file), *sys.argv[1:])


def _card(gpu: str | GpuSpec | None) -> GpuSpec:
    if gpu is not None:
        return find_gpu(gpu)
    if not torch.cuda.is_available():
        raise UsageError("there is no card here to plan for", 'Name one: AutoFit(gpu="RTX 4090")')
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    with suppress(UsageError):
        return replace(find_gpu(torch.cuda.get_device_name()), total_bytes=total)
    return find_gpu(f"{total}B")
