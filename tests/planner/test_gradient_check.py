"""Plans held against the plain program before they are written."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.planner.test_micro_batch_trial import _tall
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner import candidates, gradient_check, trial_attempts
from vramfit.planner.candidates import key_of
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import check_promises, promised_plan
from vramfit.planner.micro_batch_trial import MicroBatchVerdict
from vramfit.planner.plan_file import PlanFigures, PlanTarget, plan_from_toml, plan_to_toml
from vramfit.planner.plans import MEMORY, Plan, PlanRequest, plan_of
from vramfit.planner.search_clock import SearchClock, TimeOver
from vramfit.report.rendering import render
from vramfit.techniques import Choice, Numerics, find_technique, setting_from_plain
from vramfit.techniques.micro_batching import MicroBatchingSetting, Reduction
from vramfit.workload import Workload


def _plan(workload: Workload, flops: int = 0, **settings: dict[str, object]) -> Plan:
    choices = []
    for name, plain in settings.items():
        technique = find_technique(name.replace("_", "-"))
        choices.append(Choice(technique=technique, setting=setting_from_plain(technique, plain)))
    figures = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0, step_flops=flops)
    return plan_of(choices, PlanTarget(device="CPU", budget_bytes=1, sizes=workload.sizes), figures, figures)


class Layer(nn.Module):
    """Keeps four times what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


LAYERS: dict[str, object] = {"modules": ["layers.0", "layers.1"]}


def test_a_plan_that_keeps_its_word_says_what_was_compared() -> None:
    workload = all_toys()["language-tied"]
    equal = check_promises(workload, _plan(workload, activation_checkpointing=LAYERS))
    count, examples = len(list(workload.model().parameters())), workload.sizes["batch_size"]
    assert equal.fault is None
    assert equal.note == (
        f"compared with the model itself and {examples} examples: the gradients of all {count} parameters are those "
        "of the plain program, bit for bit."
    )
    compiled = check_promises(workload, _plan(workload, activation_checkpointing=LAYERS, compile={}))
    not_compared = "compile was not compared: it compiles for the CPU; vramfit verify compares it."
    assert compiled.note == f"{equal.note} {not_compared}"
    assert check_promises(workload, _plan(workload, compile={})).note == not_compared
    rounded = check_promises(workload, _plan(workload, activation_checkpointing=LAYERS, chunked_loss={}))
    assert rounded.fault is None
    assert "of their norm, 0.0001 promised." in rounded.note


@pytest.mark.parametrize("beside", [{}, {"activation_checkpointing": LAYERS}], ids=["alone", "beside"])
def test_what_does_not_keep_its_word_is_found(beside: dict[str, dict[str, object]]) -> None:
    workload = all_toys()["language-tied"]
    wrong = {"count": 2, "reduction": "sum"}  # of a mean: gradients are twice as large
    found = check_promises(workload, _plan(workload, **beside, micro_batching=wrong))
    assert found.fault is not None
    assert found.fault.name == "micro-batching"
    examples = workload.sizes["batch_size"]
    assert f"compared with the model itself and {examples} examples, the gradient of " in found.note
    assert found.note.startswith("micro-batching is left out: ")
    assert found.note.endswith("and rounding was promised.")


def test_each_technique_is_held_to_its_own_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside lower precision a bitwise technique that rounds would go unseen.
    technique = find_technique("chunked-loss")
    bitwise = find_technique("activation-checkpointing").promise(
        setting_from_plain(find_technique("activation-checkpointing"), {})
    )
    assert bitwise.numerics is Numerics.BITWISE
    monkeypatch.setattr(type(technique), "promise", lambda _self, _setting: bitwise)
    workload = all_toys()["language-tied"]
    found = check_promises(workload, _plan(workload, chunked_loss={}, mixed_precision={"dtype": "bfloat16"}))
    assert found.fault is not None
    assert found.fault.name == "chunked-loss"


def test_a_model_that_is_too_large_is_compared_by_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(
        _tall(), sizes={"batch_size": 16, "length": 16}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    large = sum(parameter.numel() * 4 for parameter in workload.model().parameters())
    monkeypatch.setattr(gradient_check, "_MOST", large // 2)
    monkeypatch.setattr(trial_attempts, "_LARGE", 500)
    seen: list[list[str]] = []
    attach = type(find_technique("activation-checkpointing")).attach

    def watched(self: object, live: object, setting: object) -> None:
        seen.append(list(setting.modules))  # type: ignore[attr-defined]
        attach(self, live, setting)  # type: ignore[arg-type]

    monkeypatch.setattr(type(find_technique("activation-checkpointing")), "attach", watched)
    found = check_promises(
        workload, _plan(workload, activation_checkpointing={"modules": ["layers.7", "layers.10"]})
    )
    assert (
        "with a stand-in of the same code with 2 of 12 layers and 5 examples: the gradients of all"
        in found.note
    )
    assert seen == [["layers.1", "layers.0"]]
    monkeypatch.setattr(gradient_check, "_MOST", 0)
    found = check_promises(workload, _plan(workload, activation_checkpointing={"modules": ["layers.7"]}))
    assert found.fault is None
    assert (
        "were not compared with the plain program's, since the model is too large for it here" in found.note
    )


def test_a_plain_program_that_is_no_measure_says_nothing_of_a_plan() -> None:
    toy = all_toys()["language-tied"]
    assert toy.loss is not None
    plain = toy.loss
    nan = replace(toy, loss=lambda model, batch: plain(model, batch) * float("nan"))
    found = check_promises(nan, _plan(nan, chunked_loss={}))
    assert (found.fault, "since the plain program's loss is nan" in found.note) == (None, True)

    def noisy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return plain(model, batch) * (1 + 0.1 * torch.rand(batch.shape[0], 1).mean())

    drawn = replace(toy, loss=noisy)
    found = check_promises(drawn, _plan(drawn, micro_batching={"count": 2, "reduction": "next-tokens"}))
    # Random numbers excuse nothing: what cannot be held to its promise has none.
    assert found.fault is not None
    assert found.note.startswith("micro-batching is left out: compared with the model itself")


class Counting(VirtualBackend):
    """A card that counts its runs."""

    runs = 0

    def profile_step(self, *given: Any) -> Any:
        self.runs += 1
        return super().profile_step(*given)

    def step_cost(self, *given: Any) -> StepCost:
        self.runs += 1
        return super().step_cost(*given)


def _runs_noted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What tells runs from each other, of all that follow."""
    ran: list[object] = []
    profiled, costed = candidates.Candidates._profile_now, candidates.step_cost_with

    def watch(own: candidates.Candidates, choices: tuple[Choice, ...], fine: bool) -> Any:
        ran.append(key_of(choices, fine))
        return profiled(own, choices, fine)

    def step_cost(*given: Any, **other: Any) -> StepCost:
        ran.append((key_of(given[2]), given[4]))
        return costed(*given, **other)

    monkeypatch.setattr(candidates.Candidates, "_profile_now", watch)
    monkeypatch.setattr(candidates, "step_cost_with", step_cost)
    return ran


def test_a_technique_that_does_not_keep_its_word_is_no_part_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(
        model=lambda: nn.Sequential(Layer(), Layer()),
        # The host keeps one row of it: filling a batch takes longer than all else.
        batch=lambda batch_size: torch.ones(1, 256).expand(batch_size, 256),
        sizes={"batch_size": 1 << 16},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    monkeypatch.setattr(
        candidates,
        "try_micro_batching",
        lambda *_args, **_kwargs: MicroBatchVerdict(MicroBatchingSetting(reduction=Reduction.SUM), "tried."),
    )
    device = Counting(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 30)
    plain = device.step_cost(workload, dict(workload.sizes))
    request = PlanRequest(
        workload=workload,
        sizes=workload.sizes,
        budget_bytes=plain.total_bytes - plain.peak_allocated_bytes // 3,
        allowed=frozenset({"micro-batching", "activation-checkpointing"}),
        entries=False,
    )
    told: list[str] = []
    device.runs = 0
    ran = _runs_noted(monkeypatch)
    monkeypatch.setattr(gradient_check, "_SECONDS", 1.0)  # no time for more than a few of the 65,536 examples
    _, plan = promised_plan(device, request, told.append)
    # Two searches, of which each begins with the plain program: a run is not made again.
    assert len(ran) == len(set(ran)) == device.runs == plan.solved.runs
    assert [choice.name for choice in plan.choices] == ["activation-checkpointing"]
    left_out, kept = plan.notes[-2:]
    expected = "compared with the model itself and 128 examples, the gradient of"
    assert left_out.startswith(f"micro-batching is left out: {expected}")
    assert "and 128 examples: the gradients of all" in kept
    assert kept.endswith("bit for bit.")
    assert "the plan's gradients beside the plain program's" in told


def test_what_was_not_compared_is_written_as_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = all_toys()["language-tied"]
    device = VirtualBackend(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 30)
    plain = device.step_cost(workload, dict(workload.sizes))
    request = PlanRequest(
        workload=workload,
        sizes=workload.sizes,
        budget_bytes=plain.total_bytes,
        objective=MEMORY,
        allowed=frozenset({"activation-checkpointing"}),
        entries=False,
    )
    _, compared = promised_plan(device, request, lambda _text: None)
    assert compared.compared == f"the model itself and {workload.sizes['batch_size']} examples"
    assert 'promise = "bitwise"' in plan_to_toml(compared)
    monkeypatch.setattr(gradient_check, "_SECONDS", 0.0)
    monkeypatch.setattr(gradient_check, "ways_to_try", lambda *_args, **_kwargs: iter(()))
    _, plan = promised_plan(device, request, lambda _text: None)
    assert plan.compared == ""
    text = plan_to_toml(plan)
    assert "promise" not in text.split("[[technique]]")[1]
    assert "bitwise by construction, not compared: see vramfit verify" in text
    assert plan_from_toml(text, Plan).compared == ""
    assert "results: bitwise by construction, not compared" in render(plan, width=200)


def test_a_fault_that_there_is_no_time_to_find_is_that_of_the_loosest_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(*_: object) -> Any:
        raise TimeOver

    monkeypatch.setattr(gradient_check._Comparison, "blamed", slow)
    workload = all_toys()["language-tied"]
    plan = _plan(
        workload,
        micro_batching={"count": 2, "reduction": "sum"},
        activation_checkpointing=LAYERS,
    )
    compared = check_promises(workload, plan, SearchClock(limit=60.0))
    assert compared.fault is not None
    assert compared.fault.name == "micro-batching"
    assert compared.note.startswith("micro-batching is left out: compared with ")
    assert compared.note.endswith("rounding was promised; there was no time to find out whose fault it is.")


def test_a_comparison_ends_with_the_search_that_it_belongs_to() -> None:
    workload = all_toys()["language-tied"]
    clock = SearchClock(limit=1e-3)
    compared = check_promises(workload, _plan(workload, activation_checkpointing=LAYERS), clock)
    assert compared.fault is None
    assert "were not compared with the plain program's, since the time was over" in compared.note


@pytest.mark.parametrize("again", ["the model itself", ""])
def test_a_compared_plan_stays_before_one_that_was_not(monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    workload = all_toys()["language-tied"]
    first, other = _plan(workload, activation_checkpointing=LAYERS), _plan(workload)
    first = dataclasses.replace(
        first, solved=dataclasses.replace(first.solved, stopped=gradient_check.TIME_OVER)
    )

    class Search:
        def plan(self) -> Plan:
            return other

    monkeypatch.setattr(gradient_check, "_compared_in_time", lambda *_: gradient_check.Compared(by=again))
    best = (first, gradient_check.Compared(by="the model itself"))
    clock = SearchClock(limit=60.0)
    found, compared = gradient_check._with_time_left(Search(), None, best, lambda _: None, clock)  # type: ignore[arg-type]
    assert found is (other if again else first)
    assert compared.by == "the model itself"
