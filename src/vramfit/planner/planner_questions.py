"""What can be asked of a process of the planner: what a question is, what answers it, and the list of them all.

A question is a dataclass with the method that answers it, in one module with its result. The parent sends it with `ask`
of asking.py; the child, planner_child.py, makes it anew, and has no branch for any. A new question is such a class,
its line in `QUESTIONS`, and the function that asks it. Imports no torch.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from vramfit.errors import VramfitError
from vramfit.plain import from_plain
from vramfit.planner.planner_job import DeviceMemory, PlannerJob

if TYPE_CHECKING:
    from vramfit.planner.devices.cost import DeviceBackend
    from vramfit.planner.search_evidence import Evidence
    from vramfit.workload import Workload

Result = TypeVar("Result")
Progress = Callable[[str], None]

QUESTIONS = frozenset(
    {
        "vramfit.planner.batch_prediction:BatchQuestion",
        "vramfit.planner.batch_shapes:ShapesQuestion",
        "vramfit.planner.chunk_choice:ChunkQuestion",
        "vramfit.planner.placement_trial:PlacementQuestion",
        "vramfit.planner.plan_question:PlanQuestion",
        "vramfit.planner.quantization.format_trial:FormatChoicesQuestion",
        "vramfit.planner.quantization.format_trial:FormatTableQuestion",
        "vramfit.planner.remedies.remedies_question:RemediesQuestion",
        "vramfit.planner.request_peak:RequestQuestion",
        "vramfit.planner.size_questions:SizeOnCardQuestion",
        "vramfit.planner.size_questions:SizeQuestion",
        "vramfit.planner.tile_trial:TileQuestion",
        "vramfit.planner.verify_questions:CardRunsQuestion",
        "vramfit.planner.verify_questions:PlanMemoryQuestion",
        "vramfit.planner.verify_questions:PlanValuesQuestion",
        "vramfit.planner.verify_questions:ProgramValuesQuestion",
    }
)
"""All questions, as ``MODULE:CLASS``: the only names that a job's file can have imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionContext:
    """What a question is answered with, in the child.

    Attributes:
        workload: what it is about: that of a file, or a packed model.
        device: where steps are run.
        memory: which device that is, and what may be taken there.
        progress: called with what is being done.
        target: the workload, as ``FILE.py:NAME``.
        evidence: by which runs of earlier searches are trusted; None leaves them aside, as devices that measure do.
        asked_at: seconds of the system's clock when it was asked; 0 where that does not matter.
    """

    workload: Workload
    device: DeviceBackend
    memory: DeviceMemory
    progress: Progress = lambda _text: None
    target: str = ""
    evidence: Evidence | None = None
    asked_at: float = 0.0

    def packed(self) -> Any:
        """What was packed with a model, made anew at each call: the question, or how the model is used."""
        return self.workload.batch(batch_size=1)


class PlannerQuestion(ABC, Generic[Result]):
    """A question; a dataclass is made of each, ``class TileQuestion(PlannerQuestion[ChosenTile])``.

    About a workload's file it travels as plain values, which `vramfit.plain` knows; about a model of this process it is
    packed together with the model, and may hold whatever can be pickled.
    """

    __slots__ = ()

    keeps_searches: ClassVar[bool] = False
    """Whether what its runs saw on a virtual card is kept for the next time; see search_evidence.py."""

    needs_training: ClassVar[bool] = True
    """Whether a program that it is about has to train a model."""

    @abstractmethod
    def answer(self, asked: QuestionContext) -> Result:
        """Find the answer, in the child.

        Raises:
            UsageError: nothing fits, or what is asked for is not there.
            VramfitError: the workload fails.
        """

    @classmethod
    def result_type(cls) -> type[Result]:
        """The type of its answers."""
        [base] = cls.__orig_bases__  # type: ignore[attr-defined]
        [found] = get_args(base)
        return found  # type: ignore[no-any-return]


def name_of(question: PlannerQuestion[Any]) -> str:
    """The name by which the child finds a question's type.

    Raises:
        TypeError: it is not in `QUESTIONS`.
    """
    kind = type(question)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if name not in QUESTIONS:
        raise TypeError(f"{name} is not among the questions of vramfit.planner.planner_questions")
    return name


def question_type(name: str) -> type[PlannerQuestion[Any]]:
    """The type that `name_of` named.

    Raises:
        VramfitError: there is no such question.
    """
    if name not in QUESTIONS:
        raise VramfitError(
            f"{name!r} is no question of the planner", "Ask again, with one release of vramfit"
        )
    module, _, kind = name.partition(":")
    found: type[PlannerQuestion[Any]] = getattr(importlib.import_module(module), kind)
    return found


def question_of(job: PlannerJob, asked: QuestionContext) -> PlannerQuestion[Any]:
    """The question that a job asks.

    Raises:
        VramfitError: there is no such question, or another one is packed with the model.
    """
    kind = question_type(job.question)
    if job.values is not None:
        return from_plain(job.values, kind)
    packed = asked.packed()
    if not isinstance(packed, kind):
        raise VramfitError(
            f"{job.question} was asked, and {type(packed).__name__} is packed with the model",
            "Ask again, with one release of vramfit",
        )
    return packed
