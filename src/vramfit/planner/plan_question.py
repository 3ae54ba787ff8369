"""The question for a plan: the best one within a budget, and the frontier of memory and time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from vramfit.planner.plan_file import plan_to_toml
from vramfit.planner.planner_job import PRICE, PlanOptions
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.plans import NothingFits, plan_request
from vramfit.planner.search import PlanFound
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import SearchClock, interruptible
from vramfit.planner.search_evidence import SEARCH_FILE
from vramfit.planner.workload_check import check_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion(PlannerQuestion[PlanFound]):
    """The best plan for a budget, and the frontier if it is asked for.

    Attributes:
        options: what is asked of the plan and of the search.
    """

    keeps_searches: ClassVar[bool] = True

    options: PlanOptions = field(default_factory=PlanOptions)

    def answer(self, asked: QuestionContext) -> PlanFound:
        """See `PlannerQuestion.answer`."""
        # The process that asks imports this module too, and has no use for what runs the search.
        from vramfit.planner.cheapest_card import cheapest_plan
        from vramfit.planner.devices.device_opening import virtual_card
        from vramfit.planner.gradient_check import promised_plan
        from vramfit.planner.scripts.script_workload import ScriptWorkload, aim_of

        request = plan_request(asked.workload, self.options, asked.memory, asked.target)
        if not isinstance(asked.workload, ScriptWorkload):
            check_workload(asked.workload, request.sizes, asked.progress)
        spent = max(0.0, time.time() - asked.asked_at) if asked.asked_at else 0.0
        clock = SearchClock(limit=request.search_seconds, spent=spent)
        kept = asked.evidence
        cache = None if kept is None else SearchCache(kept.beside / SEARCH_FILE, kept)
        with interruptible(clock):
            if request.objective == PRICE:
                device_of = partial(virtual_card, asked.memory)
                search, found = cheapest_plan(device_of, request, asked.progress, clock)
            else:
                try:
                    search, found = promised_plan(asked.device, request, asked.progress, clock, cache)
                except NothingFits as error:
                    if not isinstance(asked.workload, ScriptWorkload):
                        raise
                    closest = replace(error.plan, aim=aim_of(asked.workload, error.plan.aim))
                    raise NothingFits(error.message, error.hint, closest) from None
        frontier = tuple(search.frontier()) if self.options.frontier else ()
        if isinstance(asked.workload, ScriptWorkload):
            found = replace(found, aim=aim_of(asked.workload, found.aim))
        return PlanFound(plan=plan_to_toml(found), frontier=frontier)
