"""The question for remedies: what makes a program fit, each remedy run with the program."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vramfit.errors import UsageError
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.trace.tried_remedies import TriedRemedies, TriedRemedy
from vramfit.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RemediesQuestion(PlannerQuestion[TriedRemedies]):
    """Which remedies make a program fit.

    Attributes:
        seconds: that may be spent.
        root: the folder that places are told from.
    """

    needs_training: ClassVar[bool] = False

    seconds: float
    root: str

    def answer(self, asked: QuestionContext) -> TriedRemedies:
        """See `PlannerQuestion.answer`."""
        # The process that asks imports this module too, and has no use for what runs the tries.
        from vramfit.planner.remedies.program_remedy import TrainedProgram
        from vramfit.planner.remedies.remedy_runs import RemedyRuns
        from vramfit.planner.scripts.script_backend import ScriptBackend
        from vramfit.planner.scripts.script_workload import ScriptWorkload

        device, script = asked.device, asked.workload
        if not isinstance(device, ScriptBackend) or not isinstance(script, ScriptWorkload):
            raise UsageError("remedies are tried on a program", "Give a script")
        first = device.seen
        assert first is not None
        subject = TrainedProgram(
            command=script.command, seen=script.seen, trained_model=first.model, root=Path(self.root)
        )
        runs = RemedyRuns(
            device=device,
            subject=subject,
            limit=asked.memory.limit,
            seconds=self.seconds,
            spent=max(0.0, time.time() - asked.asked_at) if asked.asked_at else 0.0,
            told=lambda row: asked.progress(row_words(row)),
        )
        return runs.run()


def row_words(row: TriedRemedy) -> str:
    """A row in a few words, for who waits."""
    return f"{row.name}: {format_bytes(row.total_bytes)}, {'fits' if row.fits else 'does not fit'}"
