"""Runs many things, n at a time, each in a process of its own: ranks of a world, questions, studies, benchmarks.

- `task`: what is to be done, and what came of it.
- `own_process`: a function called in a process of its own, wherever that is started.
- `task_child`: that process.
- `task_pool`: tasks side by side, on any executor.
- `kept_results`: a file of results, so that a stopped run goes on.
"""

from __future__ import annotations

from vramfit.launch.tasks.kept_results import KeptResults
from vramfit.launch.tasks.task import Ending, Task, TaskPlace, TaskResult
from vramfit.launch.tasks.task_pool import TaskPool, in_order, mapped, run_all

__all__ = [
    "Ending",
    "KeptResults",
    "Task",
    "TaskPlace",
    "TaskPool",
    "TaskResult",
    "in_order",
    "mapped",
    "run_all",
]
