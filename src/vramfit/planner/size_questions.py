"""The questions for the largest size of a workload that fits: on a device, and on this machine's card after that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vramfit.errors import UsageError
from vramfit.planner.devices.card_backend import another_card, card_of
from vramfit.planner.largest_size import CardCheck, LargestSize, SizeSearch
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.plans import Plan, sizes_of
from vramfit.planner.workload_check import check_workload
from vramfit.techniques import with_choices

if TYPE_CHECKING:
    from vramfit.planner.scripts.script_workload import ScriptWorkload


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeQuestion(PlannerQuestion[LargestSize]):
    """The largest value of a size that fits.

    Attributes:
        size: its name; None for the workload's first.
        sizes: where to begin, and the other sizes.
        plan: the file of a plan that is applied first.
    """

    size: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    plan: str | None = None

    def answer(self, asked: QuestionContext) -> LargestSize:
        """See `PlannerQuestion.answer`."""
        from vramfit.planner.scripts.script_workload import ScriptWorkload

        workload, memory = asked.workload, asked.memory
        is_program = isinstance(workload, ScriptWorkload)
        if isinstance(workload, ScriptWorkload) and self.size is not None:
            workload = workload.sized(*option_value(workload, self.size))
        sizes = sizes_of(workload, self.sizes)
        name = next(iter(workload.sizes)) if is_program else self.size or next(iter(workload.sizes))
        if name not in sizes:
            raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(sizes)}")
        if not is_program:
            check_workload(workload, sizes, asked.progress)
        host_limit = None
        if self.plan is not None:
            plan = Plan.load(self.plan)
            workload = with_choices(workload, plan.choices)
            host_limit = memory.host_budget or plan.aim.host_budget_bytes or None
        return SizeSearch(
            asked.device, workload, sizes, name, memory.limit, asked.progress, host_limit
        ).largest()


def option_value(script: ScriptWorkload, name: str) -> tuple[str, int]:
    """An option of a program's command line, as it is written, and its value.

    Raises:
        UsageError: the program has no such option of whole numbers.
    """
    wanted = name.lstrip("-").replace("_", "-")
    for option in script.seen.options:
        if option.flag.lstrip("-").replace("_", "-") == wanted and not option.is_flag:
            return option.flag, max(1, option.value)
    known = ", ".join(option.flag for option in script.seen.options if not option.is_flag)
    raise UsageError(
        f"the program has no option {name!r} with a whole number",
        f"It has {known}" if known else "Leave --largest out to vary its loader's batch size",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeOnCardQuestion(PlannerQuestion[CardCheck]):
    """The largest value that fits this machine's card, of those up to the one that was predicted.

    Attributes:
        size, sizes, plan: as of a `SizeQuestion`.
        value: the one that was predicted.
        any_card: whether a card of another kind will do.
    """

    size: str
    value: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    plan: str | None = None
    any_card: bool = False

    def answer(self, asked: QuestionContext) -> CardCheck:
        """See `PlannerQuestion.answer`."""
        workload, card = asked.workload, card_of(asked.device)
        if why := another_card(card, None if self.any_card else asked.memory.gpu):
            return CardCheck(card=card.name, skipped=why)
        sizes = {**sizes_of(workload, self.sizes), self.size: self.value}
        if self.plan is not None:
            workload = with_choices(workload, Plan.load(self.plan).choices)
        search = SizeSearch(card, workload, sizes, self.size, asked.memory.limit, asked.progress)
        value, failing, tries = search.largest_up_to()
        return CardCheck(
            card=card.name, value=value, failing=failing, tries=tries, left_bytes=card.left_bytes
        )
