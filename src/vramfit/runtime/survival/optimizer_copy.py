"""A copy of all that an optimizer of others moves in a step, on the host, to take a failed step back."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import time
from typing import Any

import torch

from vramfit.runtime.oom_forms import MemoryShortage, recognised
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.training_state.reach import reached_from
from vramfit.training_state.state_notes import GradientsNote, StateNote
from vramfit.training_state.tensor_values import on_the_host


class OptimizerCopies:
    """Copies all that an optimizer holds before each step: states, groups, lists and attributes.

    Gradients are copied only where the first step was seen to change them: some optimizers clip them in place.

    Args:
        optimizer: any.
        device: whose generator its step may draw from.

    Attributes:
        nbytes: of the last copy.
        copying_seconds, stepping_seconds: that copies and steps took so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._gradients_too = True
        self._first = True
        self._catches = _catches_errors(type(optimizer))
        self.nbytes = 0
        self.copying_seconds = self.stepping_seconds = 0.0

    def take(self) -> OptimizerCopy:
        """What is there now.

        Raises:
            BaseException: the host has no room.
        """
        began = time.perf_counter()
        gradients = [
            one.grad
            for group in self._optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        ]
        reached = reached_from([self._optimizer], without=() if self._gradients_too else gradients)
        values = [one for one in reached.tensors if not one.is_inference()]
        note = StateNote(reached, values, (), self._device, arrays=reached.arrays, copying=on_the_host)
        self.nbytes = note.tensors.nbytes
        self.copying_seconds += time.perf_counter() - began
        return OptimizerCopy(note, GradientsNote(reached.tensors), gradients)

    def stepping(self) -> contextlib.AbstractContextManager[SwallowedShortages | None]:
        """Around a step: notes shortages that it catches itself, where its code catches anything."""
        return SwallowedShortages() if self._catches else contextlib.nullcontext()

    def after_step(self, copy: OptimizerCopy, seconds: float) -> None:
        """Learn from a step that went well."""
        self.stepping_seconds += seconds
        if self._first:
            self._first = False
            self._gradients_too = copy.gradients_changed()

    @property
    def ratio(self) -> float:
        """How many times as long steps with their copies took as without; 1 before the first."""
        if not self.stepping_seconds:
            return 1.0
        return 1 + self.copying_seconds / self.stepping_seconds


class SwallowedShortages(TorchDispatchMode):
    """Notes shortages that come up in ops, those that a program catches itself included.

    Some optimizers try a decomposition of a matrix again with other numbers where it fails, for whatever reason.

    Attributes:
        last: the latest shortage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: MemoryShortage | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            self.last = recognised(error) or self.last
            raise


def _catches_errors(kind: type) -> bool:
    """Whether the modules of an optimizer's classes catch errors anywhere, as far as their source is there."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        module = sys.modules.get(one.__module__)
        try:
            source = "" if module is None else inspect.getsource(module)
        except (OSError, TypeError):
            return False
        if re.search(r"^\s*except\b", source, re.MULTILINE):
            return True
    return False


class OptimizerCopy:
    """One copy."""

    def __init__(
        self,
        note: StateNote,
        gradients: GradientsNote,
        values: list[torch.Tensor],
    ) -> None:
        self._note, self._gradients, self._values = note, gradients, values

    def restore(self) -> None:
        """As it was; states that the failed step made are gone."""
        self._note.restore()
        self._gradients.restore()

    def gradients_changed(self) -> bool:
        """Whether the step wrote the gradients it was given."""
        copies = map(self._note.tensors.copy_of, self._values)
        return any(copy is not None and copy.differs() for copy in copies)
