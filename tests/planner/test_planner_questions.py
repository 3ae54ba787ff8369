"""Questions of the planner: all are listed, none else is imported for a job, and each comes out as it went in."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.launch.job import job_file
from vramfit.launch.tasks import Ending, Task, TaskPlace, run_all
from vramfit.planner.asking import ask, job_of
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.plan_question import PlanQuestion
from vramfit.planner.planner_job import DeviceMemory, PlannerJob, PlanOptions
from vramfit.planner.planner_questions import (
    QUESTIONS,
    PlannerQuestion,
    QuestionContext,
    name_of,
    question_of,
    question_type,
)
from vramfit.planner.request_peak import RequestPeak, RequestQuestion
from vramfit.planner.size_questions import SizeQuestion
from vramfit.planner.verify_questions import AskedRun, CardRunsQuestion
from vramfit.workload import Workload, load_workload

SOURCE = Path(vramfit.__file__).parent
MEMORY = DeviceMemory(device="cuda", gpu=find_gpu("RTX 4090"), budget=1 << 33)


@dataclass(frozen=True, kw_only=True)
class Unlisted(PlannerQuestion[int]):
    """A question that nobody entered."""

    def answer(self, asked: QuestionContext) -> int:
        return asked.memory.budget


def asked(workload: Workload) -> QuestionContext:
    return QuestionContext(workload=workload, device=CpuBackend(), memory=MEMORY)


def empty() -> Workload:
    return Workload(
        model=lambda: nn.Linear(1, 1), batch=lambda batch_size: torch.ones(1), sizes={"batch_size": 1}
    )


def test_every_question_is_listed() -> None:
    found = set()
    for file in SOURCE.rglob("*.py"):
        module = ".".join(("vramfit", *file.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            bases = node.bases if isinstance(node, ast.ClassDef) else ()
            if any(ast.unparse(base).startswith("PlannerQuestion[") for base in bases):
                found.add(f"{module}:{node.name}")  # type: ignore[attr-defined]
    assert found == QUESTIONS


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_each_question_and_its_answer_are_plain_dataclasses(name: str) -> None:
    kind = question_type(name)
    assert f"{kind.__module__}:{kind.__qualname__}" == name
    assert issubclass(kind, PlannerQuestion)
    assert is_dataclass(kind)
    assert is_dataclass(kind.result_type())


def test_a_question_that_is_not_listed_is_not_asked() -> None:
    with pytest.raises(TypeError, match="Unlisted is not among the questions"):
        name_of(Unlisted())


@pytest.mark.parametrize(
    "name",
    [
        f"{__name__}:Unlisted",
        "subprocess:run",
        "vramfit.planner.tile_trial:TileTrial",
        "vramfit.planner.tile_trial",
        "vramfit.planner.tile_trial:TileQuestion.answer",
        "tabnanny:check",
        "",
    ],
)
def test_a_job_names_nothing_but_questions(name: str) -> None:
    sys.modules.pop("tabnanny", None)
    job = PlannerJob(question=name, values={}, memory=MEMORY)
    with pytest.raises(VramfitError, match="is no question of the planner"):
        question_of(job, asked(empty()))
    assert "tabnanny" not in sys.modules


@pytest.mark.parametrize(
    "question",
    [
        PlanQuestion(options=PlanOptions(sizes={"batch_size": 3}, allow=("tf32",), frontier=True)),
        SizeQuestion(size="batch_size", plan="plan.toml"),
        CardRunsQuestion(runs=(AskedRun(name="plain"), AskedRun(name="planned", limit=7)), any_card=True),
    ],
)
def test_a_question_of_plain_values_comes_out_as_it_went_in(
    question: PlannerQuestion[object], tmp_path: Path
) -> None:
    replace(job_of(question, "work.py:training", MEMORY), folder=str(tmp_path)).write()
    job = PlannerJob.read(job_file(tmp_path))
    assert (job.target, job.memory) == ("work.py:training", MEMORY)
    again = question_of(job, asked(empty()))
    assert job_of(again, "", MEMORY).values == job.values
    assert type(again) is type(question)


def test_a_question_that_is_packed_with_its_model_comes_out_of_there(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    live = LiveModel(model=model, device=torch.device("cpu"), gpu="RTX 4090")
    question = RequestQuestion(arguments=(torch.ones(2, 3),), keywords={})
    packed = live.packed(question, tmp_path)
    there = asked(load_workload(packed.target))
    job = PlannerJob(question=name_of(question), target=packed.target, memory=MEMORY)
    again = question_of(job, there)
    assert isinstance(again, RequestQuestion)
    assert again.arguments[0].tolist() == [[1.0] * 3] * 2
    assert there.packed() is not there.packed()
    assert again.result_type() is RequestPeak
    other = replace(job, question="vramfit.planner.tile_trial:TileQuestion")
    with pytest.raises(VramfitError, match="RequestQuestion is packed with the model"):
        question_of(other, there)


WORKLOADS = """
import torch
from torch import nn
from vramfit import Workload

def made(width):
    return Workload(
        model=lambda: nn.Linear(width, width),
        batch=lambda batch_size: torch.ones(batch_size, width),
        sizes={"batch_size": 4},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )

narrow, wide = made(256), made(512)
"""


def test_questions_run_side_by_side(tmp_path: Path) -> None:
    """Each in its process, by the pool that runs ranks and studies; the largest batches are those of one at a time."""
    file = tmp_path / "workloads.py"
    file.write_text(WORKLOADS, encoding="utf-8")
    memory = replace(MEMORY, gpu=find_gpu("2GiB"), budget=1 << 29)
    tasks = [
        Task(
            key=name,
            function=ask,
            arguments=(SizeQuestion(), f"{file}:{name}", memory),
            place=TaskPlace.EXECUTOR,
        )
        for name in ("narrow", "wide", "missing")
    ]
    results = {result.key: result for result in run_all(tasks, at_once=3)}
    assert results["missing"].ending is Ending.FAILED and "missing" in results["missing"].failure
    narrow, wide = (results[name].value for name in ("narrow", "wide"))
    assert narrow.value > wide.value > 4
    assert ask(SizeQuestion(), f"{file}:wide", memory) == wide
