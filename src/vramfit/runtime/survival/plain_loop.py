"""Steps as a plain loop does them: what a survivor does that is switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.runtime.survival.step_call import detached, loss_in
from vramfit.techniques import AttachedProgram


class PlainLoop:
    """A loop without recovery.

    Args:
        live: the model with its optimizer and scaler; it goes backward.
        optimizer: that steps.
        scheduler: steps after it, or None.
        clip_norm: the norm that all gradients together are cut to; None does not cut.
    """

    def __init__(
        self,
        live: AttachedProgram,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        clip_norm: float | None,
    ) -> None:
        self._live, self._optimizer = live, optimizer
        self._scheduler, self._clip_norm = scheduler, clip_norm
        self._accumulates = False

    def gradients(self, forward: Callable[[], Any]) -> Any:
        """Forward and backward; the first of an update clears what others have left.

        Returns:
            what the forward pass gave, without its graph.
        """
        if not self._accumulates:
            self._optimizer.zero_grad(set_to_none=True)
        self._accumulates = True
        result = forward()
        self._live.backward(loss_in(result))
        return detached(result)

    def step(self, forward: Callable[[], Any]) -> Any:
        """A whole step; it gives what the forward pass gave."""
        result = self.gradients(forward)
        self._accumulates = False
        scaler = self._live.scaler
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._live.model.parameters(), self._clip_norm)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        return result
