"""What a training step changes before its optimizer steps, noted so that a failed attempt leaves none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.runtime.survival.step_watch import StepWatch
from vramfit.training_state.state_notes import Unrestored

_SCALE = ("_scale", "_growth_tracker")


class StepState:
    """A step's beginning: what its function reaches, gradients that are there already, and a scaler's bookkeeping.

    Gradients that were accumulated before are set aside, so that the step's own are a set by themselves.

    Args:
        watch: notes what the step moves.
        model: whose gradients they are.
        scaler: of mixed precision, or None.
        optimizer: may have parameters that the model has not.
        adds: whether gradients that are there are part of the step; if not they are let go of, as by ``zero_grad``.
        discard: takes back what an attempt has left with a trainer.

    Attributes:
        noted: by the watch.
    """

    def __init__(
        self,
        watch: StepWatch,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None,
        optimizer: torch.optim.Optimizer,
        *,
        adds: bool,
        discard: Callable[[], None] | None = None,
    ) -> None:
        self._discard = discard
        self.noted = watch.note()
        self._records = torch.is_grad_enabled()
        self._scaler, self._adds = scaler, adds
        self._unscaled = {} if scaler is None else dict(_per_optimizer(scaler))
        # They come with the scaler's first use, one after the other; with one of them alone it cannot be used.
        self._scale = {} if scaler is None else {name: getattr(scaler, name) for name in _SCALE}
        groups = (one for group in optimizer.param_groups for one in group["params"])
        self._parameters = list(dict.fromkeys([*model.parameters(), *groups]))
        self._trained = [(p, p.requires_grad) for p in self._parameters]
        self._before = [(p, p.grad) for p in self._parameters if adds and p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> list[Unrestored]:
        """As at the beginning, but that earlier gradients stay aside; what nobody can put back is returned."""
        torch.set_grad_enabled(self._records)
        left = self.noted.restore()
        if self._discard is not None:
            self._discard()
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:  # frozen for a while
                parameter.requires_grad_(trained)
            parameter.grad = None
        if self._scaler is not None:
            states = _per_optimizer(self._scaler)
            states.clear()
            states.update(self._unscaled)
            for name, tensor in self._scale.items():
                setattr(self._scaler, name, tensor)
        return left

    def join_gradients(self) -> None:
        """Add the gradients that were there before to those of the step; in place, so that nothing is allocated."""
        if not self._adds:
            return
        with torch.no_grad():
            for parameter, before in self._before:
                assert before is not None
                if parameter.grad is None:
                    parameter.grad = before.clone()
                else:
                    parameter.grad.add_(before)

    def give_back(self) -> list[Unrestored]:
        """As before the step, with the gradients that were there: for a step that is given up."""
        left = self.restore()
        for parameter, before in self._before:
            parameter.grad = before
        self._before.clear()
        return left


def _per_optimizer(scaler: torch.amp.GradScaler) -> dict[int, Any]:
    """What a scaler knows of each optimizer's gradients since its last update (torch/amp/grad_scaler.py)."""
    found: dict[int, Any] = scaler._per_optimizer_states
    return found
