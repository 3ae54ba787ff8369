"""A search that is limited or interrupted: the best plan so far, and said to be that."""

from __future__ import annotations

import functools
import os
import sys
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.planner.test_search import CONTEXT, GPU, MIB, workload

from vramfit.errors import UsageError
from vramfit.planner import gradient_check
from vramfit.planner.api import plan as plan_for
from vramfit.planner.candidates import Candidates
from vramfit.planner.comparing import Compared
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.largest_size import search_for
from vramfit.planner.plan_file import plan_from_toml, plan_to_toml
from vramfit.planner.plan_question import PlanQuestion
from vramfit.planner.planner_job import MemoryBudget, PlanOptions
from vramfit.planner.planner_questions import QuestionContext
from vramfit.planner.plans import NothingFits, Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_clock import INTERRUPTED, TIME_OVER, SearchClock, SearchStopped
from vramfit.workload import Workload

ALLOWED = frozenset({"activation-checkpointing", "chunked-loss", "optimizer-kernel", "step-in-backward"})


@dataclass
class Second:
    """A clock on which each run takes a second."""

    time: float = 0.0

    def __call__(self) -> float:
        return self.time


class Timed(VirtualBackend):
    """A card that takes a second for each run, and may be interrupted at one of them."""

    def __init__(self, second: Second, interrupt_at: int = 0) -> None:
        super().__init__(GPU, alloc_conf="", host_bytes=1 << 34)
        self.second = second
        self.interrupt_at = interrupt_at
        self.runs = 0

    def _begin(self) -> None:
        self.runs += 1
        self.second.time += 1
        if self.runs == self.interrupt_at:
            raise KeyboardInterrupt

    def profile_step(self, *given: Any) -> Any:
        self._begin()
        return super().profile_step(*given)

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        self._begin()
        return super().step_cost(workload, sizes, budget)


def request(**other: Any) -> PlanRequest:
    asked = workload(256, 1 << 16)
    given: dict[str, Any] = {"budget_bytes": CONTEXT + 800 * MIB, "host_bytes": 1 << 34, "allowed": ALLOWED}
    return PlanRequest(workload=asked, sizes=asked.sizes, **(given | other))


def searched(limit: float | None, interrupt_at: int = 0, **other: Any) -> tuple[PlanSearch, Timed]:
    second = Second()
    device = Timed(second, interrupt_at)
    return PlanSearch(
        Candidates(device=device, request=request(**other), clock=SearchClock(limit=limit, now=second))
    ), device


@functools.cache
def whole_search() -> tuple[Plan, int]:
    """The plan of a search that nothing ends, and the runs that it made."""
    search, device = searched(1000.0)
    return search.plan(), device.runs


@pytest.mark.parametrize("limit", [4.5, 5.5, 6.5])
def test_a_limited_search_ends_in_time_with_the_best_so_far(limit: float) -> None:
    search, device = searched(limit)
    plan = search.plan()
    assert device.second.time <= limit
    assert plan.fits
    assert plan.solved.stopped == TIME_OVER
    assert plan.solved.first_plan_seconds is not None
    assert plan.solved.first_plan_seconds <= 5
    assert plan.notes[0].startswith("The best so far: the search had no more time after ")
    assert plan_from_toml(plan_to_toml(plan), Plan).solved == plan.solved
    assert VirtualBackend.step_cost(
        device, plan.apply(workload(256, 1 << 16)), dict(plan.aim.sizes), 1 << 40
    ).fits


def test_a_search_with_time_enough_says_nothing_of_it() -> None:
    plan, _ = whole_search()
    assert plan.solved.stopped is None
    assert not any("best so far" in note for note in plan.notes)


def test_a_search_without_time_for_any_plan_does_not_say_that_nothing_fits() -> None:
    with pytest.raises(
        NothingFits, match=r"no plan for .* yet: the search had no more time after 1 runs"
    ) as error:
        searched(1.5)[0].plan()
    assert "--search-seconds" in error.value.hint


@pytest.mark.parametrize("late", [0, 1])
def test_an_interrupted_search_has_the_best_so_far(late: int) -> None:
    last = whole_search()[1] if late else 6
    plan = searched(None, last)[0].plan()
    assert plan.fits
    assert plan.solved.stopped == INTERRUPTED
    assert "was interrupted" in plan.notes[0]


def test_an_interrupt_before_any_plan_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        searched(None, 2)[0].plan()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_size_that_grows_is_the_largest_so_far(interrupted: bool) -> None:
    asked = replace(
        request(objective="batch", allowed=frozenset({"activation-checkpointing"}), entries=False),
        search_seconds=None if interrupted else 1e-3,
    )
    device = Timed(Second(), 8 if interrupted else 0)
    if not interrupted:
        with pytest.raises(NothingFits, match="no plan for"):
            search_for(device, asked, lambda _: None)
        return
    _, plan = search_for(device, asked, lambda _: None)
    assert plan.fits
    assert plan.aim.objective == "batch_size"
    assert plan.solved.stopped == INTERRUPTED
    assert plan.notes[0].startswith("The search was stopped: a larger batch_size than ")


def test_time_is_left_for_what_comes_behind() -> None:
    second = Second()
    clock = SearchClock(limit=10, now=second)
    with clock.running():
        second.time = 3
    with clock.sparing(1):
        clock.check()
        second.time = 5
        with pytest.raises(SearchStopped):
            clock.check()
    assert not clock.stopped
    clock.check()
    second.time = 8
    with pytest.raises(SearchStopped):
        clock.check()
    assert clock.stopped == TIME_OVER


def test_the_first_run_is_no_measure_of_the_others() -> None:
    second = Second()
    clock = SearchClock(limit=100, now=second)
    for took in (30, 2, 3):
        with clock.running():
            second.time += took
    assert clock.longest == 3


def test_the_start_of_the_planners_process_counts() -> None:
    asked = QuestionContext(
        workload=workload(256, 1 << 16),
        device=VirtualBackend(GPU, alloc_conf="", host_bytes=1 << 34),
        memory=MemoryBudget(gpu=GPU, budget=CONTEXT + 800 * MIB, host_bytes=1 << 34).settled(),
        asked_at=time.time() - 999.99,
    )
    question = PlanQuestion(options=PlanOptions(search_seconds=1000.0, allow=sorted(ALLOWED)))
    with pytest.raises(NothingFits, match=r"no plan for .* yet: the search had no more time after 1 runs"):
        question.answer(asked)


def test_what_was_over_before_counts() -> None:
    second = Second()
    clock = SearchClock(limit=10, spent=8, now=second)
    assert clock.seconds == 8
    assert clock.left == 2


def test_time_for_the_comparison_is_kept_once_there_is_a_plan() -> None:
    second = Second()
    clock = SearchClock(limit=10, now=second)
    clock.kept_back, second.time = 4.0, 7.0
    clock.check()
    clock.found()
    assert clock.left == 0
    with pytest.raises(SearchStopped):
        clock.check()
    clock.go_on()
    clock.kept_back = 2.0
    clock.check()


def test_a_search_is_not_cut_short_by_what_it_can_do_without() -> None:
    second = Second()
    clock = SearchClock(limit=10, now=second)
    second.time = 11
    with clock.aside(), pytest.raises(SearchStopped):
        clock.check()
    assert not clock.stopped


@pytest.mark.parametrize("limit", [7.5, 9.5])
def test_a_limited_search_uses_its_time(limit: float) -> None:
    assert whole_search()[1] > limit
    search, device = searched(limit)
    plan = search.plan()
    assert limit - 3 <= device.second.time <= limit
    assert plan.solved.stopped == TIME_OVER


def test_what_a_comparison_leaves_over_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Second()
    device, limit = Timed(second), 9.5
    asked = replace(request(), search_seconds=limit)

    def quick(_workload: Workload, _plan: Plan, _clock: SearchClock) -> Compared:
        second.time += 0.5
        return Compared(note="compared.")

    monkeypatch.setattr(gradient_check, "check_promises", quick)
    clock = SearchClock(limit=limit, now=second)
    _, plan = promised_plan(device, asked, lambda _: None, clock)
    assert limit - 3 <= second.time <= limit
    assert plan.notes[-1] == "compared."
    assert plan.solved.runs == device.runs


def test_a_technique_at_fault_does_not_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Second()
    device, limit = Timed(second), 14.5
    asked = replace(request(), search_seconds=limit)
    left: list[float] = []

    def finds(_workload: Workload, plan: Plan, clock: SearchClock) -> Compared:
        left.append(clock.left or 0.0)
        second.time += 2
        wrong = [choice for choice in plan.choices if choice.name == "activation-checkpointing"]
        note = "activation-checkpointing is left out." if wrong else "compared."
        return Compared(note=note, fault=wrong[0] if wrong else None)

    monkeypatch.setattr(gradient_check, "check_promises", finds)
    clock = SearchClock(limit=limit, now=second)
    try:
        plan = promised_plan(device, asked, lambda _: None, clock)[1]
    except NothingFits as error:
        plan = error.plan
    assert second.time <= limit
    assert "activation-checkpointing is left out." in plan.notes
    assert "activation-checkpointing" not in {choice.name for choice in plan.choices}
    # The comparison has what was kept for it, whatever else was run.
    assert left[0] >= limit / 4


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="search_seconds=0 is no number between 0"):
        plan_for("work.py:training", gpu="8GiB", search_seconds=0)


WORKLOAD = """
import os, signal
import torch
from torch import nn
from vramfit import Workload

runs = []

def model():
    runs.append(1)
    if len(runs) == 7:
        os.kill(os.getppid(), signal.SIGINT)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4)))

training = Workload(
    model=model,
    batch=lambda batch_size: torch.ones(batch_size, 256),
    sizes={"batch_size": 65536},
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
)
"""


def test_ctrl_c_writes_the_best_plan_so_far(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    plan = tmp_path / "plan.toml"
    command = [
        "plan",
        f"{tmp_path}/work.py:training",
        "--gpu",
        "RTX 4090",
        "--budget",
        "1200MiB",
        "-o",
        str(plan),
    ]
    ran = warm.run(
        [sys.executable, "-m", "vramfit", *command],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert ran.returncode == 130, ran.stderr
    assert "The best so far: the search was interrupted" in ran.stdout
    written = tomllib.loads(plan.read_text())
    assert written["solved"]["stopped"] == "interrupted"
    assert written["after"]["total_bytes"] <= 1200 * MIB
    assert torch.__version__ == written["aim"]["torch"]
