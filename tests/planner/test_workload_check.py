"""Workloads that cannot be planned for, fitted or verified: one clear line each, whichever is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planner.test_plan_objects import _plan
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.launch.job import Failure
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.plan_question import PlanQuestion
from vramfit.planner.planner_job import DeviceMemory, PlanOptions
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.size_questions import SizeQuestion
from vramfit.planner.verify_questions import PlanMemoryQuestion, PlanValuesQuestion
from vramfit.planner.workload_check import failure_of_task, workload_failure
from vramfit.workload import Workload

CARD = find_gpu("RTX 4090")
MLP = all_toys()["mlp"]


class Table(nn.Module):
    """A model with a tensor that does not move with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(16, 3), torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table


BAD: dict[str, tuple[Workload, str, str]] = {
    "vector-loss": (
        replace(MLP, loss=lambda model, batch: model(batch[0])),
        "the loss is no scalar but [4, 3]",
        "Take its mean or its sum before the backward pass",
    ),
    "size-ignored": (
        replace(MLP, batch=lambda batch_size: torch.ones(4, 16)),
        "batch ignores its size batch_size: 4 and 5 give the same shapes [4, 16]",
        "Use batch_size in batch, or take it out of sizes",
    ),
    "batch-on-card": (
        replace(MLP, batch=lambda batch_size: torch.ones(batch_size, 16, device="cuda")),
        "a tensor is made on a card, outside of the run on one",
        "Make model and batches on the CPU: they are moved to the device",
    ),
    "no-tensor": (
        replace(MLP, batch=lambda batch_size: [3] * batch_size),
        "batch(batch_size=4) gives no tensor but list",
        "Let it return a tensor, or a tuple or dict",
    ),
    "wrong-names": (
        replace(MLP, sizes={"batch": 8}),
        "batch(batch=8) fails",
        "Let its arguments be the names in sizes",
    ),
}


MEMORY = DeviceMemory(device="cuda", gpu=CARD, budget=1 << 33, host_bytes=1 << 33)


def _plan_file(tmp_path: Path, sizes: dict[str, int]) -> str:
    plan = _plan(tf32={})
    plan = replace(plan, aim=replace(plan.aim, device=CARD.name, budget_bytes=1 << 33, sizes=sizes))
    plan.save(tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def _verbs(plan: str, *, applied: bool = False) -> dict[type[PlannerQuestion[Any]], PlannerQuestion[Any]]:
    """What each verb asks, of a plan where it takes one; ``fit`` takes one where it is to be applied."""
    asked: list[PlannerQuestion[Any]] = [
        PlanQuestion(options=PlanOptions(allow=["tf32"], time_limit=5.0)),
        SizeQuestion(plan=plan if applied else None),
        PlanMemoryQuestion(plan=plan),
        PlanValuesQuestion(plan=plan, steps=2, seconds=5.0, step_seconds=1e-3),
    ]
    return {type(question): question for question in asked}


def _asked(question: PlannerQuestion[Any], workload: Workload) -> Failure:
    target, device = "work.py:training", VirtualBackend(CARD, alloc_conf="", host_bytes=1 << 33)
    try:
        question.answer(QuestionContext(workload=workload, device=device, memory=MEMORY, target=target))
    except Exception as error:
        return failure_of_task(error, target)
    raise AssertionError("nothing was wrong")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a batch on a card is made on the real one")
@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("fit_interpreter")
def test_each_verb_says_the_same_line(name: str, tmp_path: Path) -> None:
    workload, message, hint = BAD[name]
    for kind, question in _verbs(_plan_file(tmp_path, dict(workload.sizes))).items():
        found = _asked(question, workload)
        assert message in found.message, kind.__name__
        assert "\n" not in found.message
        assert found.hint == hint
        assert found.code == 2


@pytest.mark.usefixtures("fit_interpreter")
def test_a_model_on_the_wrong_device_is_told_by_each_verb(tmp_path: Path) -> None:
    workload = replace(MLP, model=lambda: nn.Sequential(nn.Linear(16, 3)).cuda())
    asked = _verbs(_plan_file(tmp_path, dict(workload.sizes)))
    for kind in (PlanQuestion, SizeQuestion, PlanMemoryQuestion):
        found = _asked(asked[kind], workload)
        assert found.message == "model makes 0.weight on cuda:0", kind.__name__
        assert found.hint == "Make the model on the CPU: it is moved to the device"


@pytest.mark.usefixtures("fit_interpreter")
def test_a_tensor_that_stays_behind_is_told_with_what_to_do() -> None:
    workload = replace(MLP, model=Table, batch=lambda batch_size: torch.ones(batch_size, 16), loss=_sum)
    found = _asked(SizeQuestion(), workload)
    assert found.message.startswith(
        "tensors on different devices meet (Expected all tensors to be on the same"
    )
    assert "as buffers" in found.hint
    assert found.code == 2


def _sum(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


@pytest.mark.usefixtures("fit_interpreter")
def test_a_plan_with_an_unknown_technique_or_size_is_told(tmp_path: Path) -> None:
    plan = Path(_plan_file(tmp_path, {"batch_size": 4}))
    asked = _verbs(str(plan), applied=True)
    text = plan.read_text()
    plan.write_text(text.replace('"tf32"', '"tensor-float"'))
    for kind in (SizeQuestion, PlanMemoryQuestion, PlanValuesQuestion):
        found = _asked(asked[kind], MLP)
        assert "no technique 'tensor-float'" in found.message, kind.__name__
        assert found.hint
        assert found.code == 2
    plan.write_text(text.replace("batch_size", "images"))
    found = _asked(asked[PlanMemoryQuestion], MLP)
    assert found.message == "the workload has no size 'images'"
    assert found.hint == "It has batch_size"


def test_what_no_batch_fits_says_what_one_takes() -> None:
    device = VirtualBackend(CARD, alloc_conf="", host_bytes=0)
    memory = replace(MEMORY, budget=CARD.typical_context_bytes + 1)
    found = SizeQuestion().answer(QuestionContext(workload=MLP, device=device, memory=memory))
    assert found.value == 0
    assert found.least_bytes > CARD.typical_context_bytes


def test_a_long_message_is_cut_and_the_line_is_the_users() -> None:
    def fail() -> None:
        raise RuntimeError("x" * 5000 + "\nmore")

    try:
        fail()
    except RuntimeError as error:
        found = workload_failure(error, f"{__file__}:workload")
    assert found.message.startswith(f"{__file__}:{fail.__code__.co_firstlineno + 1}: RuntimeError: xxx")
    assert found.message.endswith("x…")
    assert len(found.message) < len(__file__) + 250
    assert found.code == 1


def test_a_gradient_by_torch_func_is_one_line() -> None:
    def through_hooks() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
            torch.func.grad(lambda x: x.sin().sum())(torch.ones(2))

    with pytest.raises(RuntimeError) as caught:
        through_hooks()
    failure = workload_failure(caught.value, f"{__file__}:training")
    assert "a gradient by torch.func inside the step" in failure.message
    assert failure.hint == "Use torch.autograd.grad(..., create_graph=True) there, which can"
    assert failure.code == 2
