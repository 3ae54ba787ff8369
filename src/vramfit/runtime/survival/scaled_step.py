"""The optimizer's step as a gradient scaler takes it, of which no slice is done twice."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.leftovers import Recovery


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, guard: GuardedStep, recovery: Recovery
) -> None:
    """Step by way of a scaler, which leaves the step out where a gradient is no number.

    What the scaler does before may run out, and is done again; the step itself is not.

    Raises:
        BaseException: what the step raises.
    """
    begun = False
    failure: BaseException | None = None
    own = vars(optimizer).get("step")  # a scheduler's, which counts
    plain = optimizer.step

    def once(*_: Any, **__: Any) -> None:
        nonlocal begun, failure
        if begun:
            return
        begun = True
        optimizer.step = plain  # type: ignore[method-assign]
        try:
            guard.step()
        except BaseException as error:
            failure = error
            raise
        optimizer.step = once  # type: ignore[method-assign,assignment]

    def scaled() -> None:
        if failure is not None:  # some slices may have stepped: not again
            raise failure
        scaler.step(optimizer)

    optimizer.step = once  # type: ignore[method-assign,assignment]
    try:
        recovery.insist(scaled)
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
