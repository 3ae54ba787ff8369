"""Rounds of a training: one ends when each optimizer of the program has stepped.

NOTE [What a step is]
With optimizers, a step is a round: it ends when each of them has stepped. The two of a GAN make one step together, as
do five steps of a critic and one of its generator; batches whose gradients are accumulated belong to the round that
steps. A step that a GradScaler skips does not count: `Optimizer.step` was not called. Whatever counts steps counts
these, from 1: the phases of a trace, the limit that ends a program, annotations.

An optimizer that is left behind is not waited for until it steps again: one that never stepped after `_PATIENCE` steps
of another, one that did after a little more than twice the steps that a round took so far. Of optimizers that were made
before the recording began nothing is known until they step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vramfit.patching import PatchStack

_PATIENCE = 10
"""Steps of one optimizer for which another is waited for: critics step five times for each step of a generator."""


class OptimizerRounds:
    """Follows the optimizers of a program, and knows when each of them has stepped.

    Attributes:
        on_step: called after each step of an optimizer with whether that ends a round.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[bool], object] = lambda _: None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._taken_part: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._round: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._longest = 1

    def __bool__(self) -> bool:
        """Whether the program has any optimizer."""
        return len(self._optimizers) > 0

    def follow(self, patches: PatchStack) -> None:
        """Meet the optimizers that are made, and hear their steps, until `patches` are undone."""
        original = torch.optim.Optimizer.__init__

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.meet(optimizer)

        patches.set(torch.optim.Optimizer, "__init__", init)
        patches.call(register_optimizer_step_post_hook(self._stepped).remove)

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for an optimizer from now on."""
        self._optimizers.add(optimizer)

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait no more for an optimizer, in whose place another steps."""
        self._optimizers.discard(optimizer)
        self._round.pop(optimizer, None)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.on_step(self._ends_round(optimizer))

    def _ends_round(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step; whether it is the last of a round."""
        self._optimizers.add(optimizer)
        self._given_up.discard(optimizer)
        self._round[optimizer] = self._round.get(optimizer, 0) + 1
        steps = max(self._round.values())
        missing = [other for other in self._optimizers if self._is_awaited(other, steps)]
        if missing:
            return False
        absent = [other for other in self._optimizers if other not in self._round]
        self._given_up.update(absent)
        if not absent:
            self._longest = min(max(self._longest, steps), _PATIENCE)
        self._taken_part.update(self._round)
        self._round.clear()
        return True

    def _is_awaited(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        """Whether a round of so many steps goes on until an optimizer has stepped."""
        if optimizer in self._round or optimizer in self._given_up:
            return False
        patience = 2 * self._longest + 1 if optimizer in self._taken_part else _PATIENCE
        return steps < min(patience, _PATIENCE)
