"""What a search tried: each candidate once, in order, with its answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

C = TypeVar("C", bound=Hashable)
A = TypeVar("A")


def ignored(*_given: Any) -> None:
    """Reports to nobody."""


@dataclass(slots=True)
class Tries(Generic[C, A]):
    """Asks about candidates and remembers the answers, so that each candidate is run once.

    Args:
        run: gives the answer for a candidate.
        progress: called with a candidate before it is run.
        check: called before that; raises where no further run may begin. What was run before stays in `answers`.
        failed: the answer that an error of a run stands for, e.g. that a size beyond what a model takes does not fit;
            None where it is an error. Without this function every error is.

    Attributes:
        answers: by candidate, in the order of their runs.
    """

    run: Callable[[C], A]
    progress: Callable[[C], object] = ignored
    check: Callable[[], object] = ignored
    failed: Callable[[C, Exception], A | None] | None = None
    answers: dict[C, A] = field(default_factory=dict)

    def __call__(self, candidate: C) -> A:
        """The answer for a candidate."""
        if candidate not in self.answers:
            self.check()
            self.progress(candidate)
            self.answers[candidate] = self._run(candidate)
        return self.answers[candidate]

    def __len__(self) -> int:
        return len(self.answers)

    def _run(self, candidate: C) -> A:
        try:
            return self.run(candidate)
        except Exception as error:  # whatever a workload raises: which of it is an answer, the caller says
            answer = None if self.failed is None else self.failed(candidate, error)
            if answer is None:
                raise
            return answer
