"""A plan that a program was run with: what it promised, and whether it reached the program. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedPlan:
    """A plan that a program was run with.

    Attributes:
        file: of the plan.
        techniques: their names.
        numerics: how far results may differ.
        attached: whether the techniques reached the program's model.
        device: that the plan is for, by name.
        promised_bytes: of the device in all, the CUDA context included.
        plain_bytes: the same of the program without the plan; 0 where unknown.
        made_for: the command line that the plan was made for, where the program ran with another; else empty.
    """

    file: str
    techniques: tuple[str, ...]
    numerics: str
    attached: bool
    device: str
    promised_bytes: int
    plain_bytes: int = 0
    made_for: str = ""
