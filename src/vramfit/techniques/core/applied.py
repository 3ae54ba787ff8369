"""A workload with techniques applied: the same model and batches, another start and another step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.techniques.core.live import AttachedProgram
from vramfit.techniques.core.technique import Choice
from vramfit.workload import State, Workload, call_model, to_device

_LIVE = "vramfit"


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedWorkload(Workload):
    """A workload with techniques.

    Attributes:
        base: the plain workload.
        choices: the techniques and their settings.
    """

    base: Workload
    choices: tuple[Choice, ...]

    def start(self, device: torch.device | str) -> State:
        """A fresh model and optimizer on a device, with the techniques attached."""
        model = self.make_model()
        live = AttachedProgram(model, lambda _parameters: self.make_optimizer(model), torch.device(device))
        live.attach(self.choices)
        return State(
            model=live.model, optimizer=live.optimizer, device=torch.device(device), extra={_LIVE: live}
        )

    def run_step(self, state: State, sizes: Mapping[str, int]) -> Any:
        """One step at these sizes, as the techniques want it."""
        if self.step is not None:
            return Workload.run_step(self, state, sizes)
        live: AttachedProgram = state.extra[_LIVE]
        if self.loss is None:
            batch = to_device(self.batch(**sizes), state.device)
            with torch.no_grad():
                live.surrounded(lambda: call_model(state.model, batch))
            return None
        return live.train_step(self.loss, self.batch(**sizes), lambda batch: to_device(batch, state.device))


def live_of(state: State) -> AttachedProgram | None:
    """The techniques' side of a state; None for a plain workload's."""
    found: AttachedProgram | None = state.extra.get(_LIVE)
    return found


def with_choice(workload: Workload, choice: Choice) -> AppliedWorkload:
    """A workload with one technique more.

    Raises:
        UsageError: it is there already, or two exclude each other.
    """
    choices = workload.choices if isinstance(workload, AppliedWorkload) else ()
    base = workload.base if isinstance(workload, AppliedWorkload) else workload
    check_together((*choices, choice))
    parts = {field.name: getattr(base, field.name) for field in fields(Workload)}
    return AppliedWorkload(base=base, choices=(*choices, choice), **parts)


def with_choices(workload: Workload, choices: tuple[Choice, ...]) -> Workload:
    """A workload with several techniques.

    Raises:
        UsageError: two exclude each other.
    """
    for choice in choices:
        workload = with_choice(workload, choice)
    return workload


def check_together(choices: tuple[Choice, ...]) -> None:
    """Make sure that techniques can be combined.

    Raises:
        UsageError: one is there twice, or two exclude each other.
    """
    names = [choice.name for choice in choices]
    for index, choice in enumerate(choices):
        if choice.name in names[:index]:
            raise UsageError(f"{choice.name} is there twice", "Leave one out")
        for other in choices:
            if other is not choice and (why := choice.technique.excludes.get(other.name)):
                raise UsageError(f"{choice.name} cannot go with {other.name}: {why}", "Leave one out")
