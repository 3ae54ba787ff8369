"""What a program's passes write beside gradients is compared, too, and what no two runs have alike is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramfit.attaching.attached_script import TrainedTarget
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.plans import plan_of
from vramfit.planner.scripts.script_comparison import compare_program, train_here, values_of_program
from vramfit.planner.scripts.script_workload import ScriptWorkload, script_workload
from vramfit.planner.search_clock import SearchClock
from vramfit.techniques import AttachedProgram, AttachStage, Choice, Numerics, Setting, Technique
from vramfit.trace.observed_program import ObservedProgram

PARAMETERS = 3 * (2 * 16 + 16 * 16 + 16)
WRITTEN = {"running_mean", "running_var", "num_batches_tracked", "batches", "calls", "at"}


class Nothing(Technique[Setting]):
    """Changes nothing."""

    name, summary = "nothing", "changes nothing"
    numerics, phase, setting_type = Numerics.BITWISE, AttachStage.FORWARD, Setting

    def options(self, profile: Any) -> list[Setting]:
        del profile
        return []

    def attach(self, live: AttachedProgram, setting: Setting) -> None:
        """Do so."""


class CountsTwice(Nothing):
    """Lets a block's buffer count on: nothing of the gradients shows it."""

    name, summary = "counts-twice", "breaks a buffer"

    def attach(self, live: AttachedProgram, setting: Setting) -> None:
        del setting
        block: Any = live.model.get_submodule("1")

        def count_on(*_: Any) -> None:
            block.batches += 1

        handle = block.register_forward_hook(count_on)
        live.on_undo(handle.remove)


def counting(written: Callable[[str], str]) -> ScriptWorkload:
    target = TrainedTarget(kind="Sequential", parameters=PARAMETERS, trained=PARAMETERS)
    return script_workload((written("COUNTING"),), target, ObservedProgram(), compare_program)


def planned(*choices: Choice) -> Any:
    figures = PlanFigures(peak_allocated_bytes=1, peak_reserved_bytes=1, total_bytes=1)
    return plan_of(choices, PlanTarget(device="RTX 3090", budget_bytes=8 << 30), figures, figures)


def test_what_the_first_step_writes_is_noted_by_its_name(written: Callable[[str], str]) -> None:
    found = train_here(counting(written), ())
    assert {name.rpartition(".")[2] for name in found.written} == WRITTEN
    assert len(found.written) == 3 * len(WRITTEN)
    assert found.written["0.calls"].after == 1


def test_what_no_two_runs_have_alike_is_left_out_and_the_rest_compared(written: Callable[[str], str]) -> None:
    choice = Choice(technique=Nothing(), setting=Setting())
    found = compare_program(counting(written), planned(choice), SearchClock())
    assert found.fault is None
    assert "and 18 values that a step writes beside them are those of the plain program" in found.note
    checked = values_of_program(counting(written), planned(choice), steps=3, seconds=60)
    assert checked.gradients is not None and checked.gradients.passes and checked.gradients.states == 18


def test_a_technique_that_writes_otherwise_is_at_fault(written: Callable[[str], str]) -> None:
    breaking = Choice(technique=CountsTwice(), setting=Setting())
    plan = planned(Choice(technique=Nothing(), setting=Setting()), breaking)
    found = compare_program(counting(written), plan, SearchClock())
    assert found.fault is breaking
    assert "1.batches, which a step writes, differs by 1 of its norm" in found.note
