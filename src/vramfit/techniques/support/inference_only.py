"""Techniques for programs that do not train."""

from __future__ import annotations

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage


def refuse_training(live: AttachedProgram, name: str) -> None:
    """Make sure that a program has no optimizer, now or when it is made.

    Raises:
        UsageError: it has one; what was attached is undone then.
    """

    def check() -> None:
        if live.optimizer is not None:
            raise UsageError(
                f"{name} is for inference, and this program has an optimizer",
                f"Leave {name} out, or the optimizer",
            )

    if live.optimizer is not None:
        check()
    live.after(AttachStage.OPTIMIZER, check)
