"""What the planner is asked for, in this process: workloads and names that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.planner.test_plan_objects import _plan as _plan_file
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.planner_job import DeviceMemory
from vramfit.planner.planner_questions import QuestionContext
from vramfit.planner.plans import NothingFits, PlanRequest, sizes_of
from vramfit.planner.search import PlanSearch
from vramfit.planner.size_questions import SizeQuestion
from vramfit.planner.verify_questions import PlanValuesQuestion
from vramfit.planner.workload_check import check_workload
from vramfit.workload import Workload

MIB = 1 << 20
_MEMORY = DeviceMemory(device="cpu", gpu=None, budget=1 << 33, host_bytes=1 << 33)


def _device() -> VirtualBackend:
    return VirtualBackend(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 34)


def _asked(workload: Workload) -> QuestionContext:
    return QuestionContext(workload=workload, device=_device(), memory=_MEMORY)


def _plan(workload: Workload, budget: int, *allowed: str) -> None:
    request = PlanRequest(
        workload=workload, sizes=workload.sizes, budget_bytes=budget, allowed=frozenset(allowed)
    )
    PlanSearch(Candidates(device=_device(), request=request)).plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch": lambda batch_size: torch.ones(4, 16)},
            r"batch ignores its size batch_size: 4 and 5 give the same shapes \[4, 16\]",
        ),
        ({"sizes": {"batch": 8}}, r"batch\(batch=8\) fails"),
        ({"batch": lambda batch_size: [3] * batch_size}, "gives no tensor but list"),
    ],
)
def test_batches_are_looked_at_first(change: dict[str, object], message: str) -> None:
    workload = replace(all_toys()["mlp"], **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        check_workload(workload, workload.sizes)


def test_a_model_or_a_batch_on_the_card_is_refused() -> None:
    toy = all_toys()["mlp"]
    with pytest.raises(UsageError, match=r"model makes 0\.weight on cuda:0"):
        _plan(replace(toy, model=lambda: nn.Sequential(nn.Linear(16, 3)).cuda()), 1 << 33)


def test_sizes_that_are_not_there_are_refused() -> None:
    toy = all_toys()["mlp"]
    with pytest.raises(UsageError, match=r"no size 'images'\. It has batch_size"):
        sizes_of(toy, {"images": 3})
    with pytest.raises(UsageError, match="no size 'images'"):
        SizeQuestion(size="images").answer(_asked(toy))


def test_a_technique_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no technique 'checkpointing'"):
        _plan(all_toys()["mlp"], 1 << 33, "checkpointing")


def test_a_budget_below_the_parameters_says_so() -> None:
    context = find_gpu("RTX 4090").typical_context_bytes
    model = Workload(
        model=lambda: nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)),
        batch=lambda batch_size: torch.ones(batch_size, 2048),
        sizes={"batch_size": 2},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(NothingFits, match=r"the parameters alone take 32\.02 MiB") as raised:
        _plan(model, context + 20 * MIB, "activation-checkpointing")
    assert raised.value.exit_code == 3
    assert raised.value.plan.after.total_bytes > context + 32 * MIB


def test_of_inference_outputs_are_compared_and_of_frozen_models_nothing(tmp_path: Path) -> None:
    toy = replace(
        all_toys()["mlp"], batch=lambda batch_size: torch.ones(batch_size, 16), loss=None, optimizer=None
    )
    plan = _plan_file(channels_last={})
    file = tmp_path / "plan.toml"
    replace(plan, entries=(), aim=replace(plan.aim, sizes=dict(toy.sizes))).save(file)
    question = PlanValuesQuestion(plan=str(file), steps=2, seconds=5.0, step_seconds=1e-3)
    found = question.answer(_asked(toy))
    assert (found.gradients, found.losses) == (None, None)
    assert found.outputs is not None
    assert (found.outputs.outputs, found.outputs.equal, found.outputs.passes) == (1, 1, True)
    own = replace(toy, step=lambda state, batch: state.model(batch).detach())
    found = question.answer(_asked(own))
    assert (found.gradients, found.losses, found.outputs) == (None, None, None)
    assert list(found.notes) == [
        "no gradients were compared: no parameter had one",
        "no losses were compared: the workload's steps give none",
    ]


def test_a_plain_program_whose_loss_is_no_number_is_told(tmp_path: Path) -> None:
    toy = all_toys()["mlp"]
    assert toy.loss is not None
    plain = toy.loss
    _plan_file(tf32={}).save(tmp_path / "plan.toml")
    question = PlanValuesQuestion(
        plan=str(tmp_path / "plan.toml"),
        sizes={"batch_size": 4},
        steps=2,
        seconds=10.0,
        step_seconds=1e-3,
    )
    with pytest.raises(UsageError, match="the plain program's loss is nan: nothing can be compared with it"):
        question.answer(_asked(replace(toy, loss=lambda model, batch: plain(model, batch) * float("nan"))))
