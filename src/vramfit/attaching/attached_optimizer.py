"""An optimizer of an unmodified program whose step does what the techniques at it want.

NOTE [The program's own optimizer]: schedules, scalers, wrappers and the loop itself hold the optimizer that the program
made, so it stays in place. Its ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are put onto the object
itself and go to the optimizer that took its place, which follows the hyperparameters that the program sets on its own
(techniques/support/optimizer_exchange.py). A schedule that is made later wraps the ``step`` that it finds, so that is a
method like any other, and goes to the program's own again after the undo, whoever still holds it. Whoever kept the
method from before would step past the replacement: such a step is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram
from vramfit.torch_internals.optimizers import SCALES_ITSELF, OwnStepHooks, note_step

Optimizer = torch.optim.Optimizer


def attach_to_optimizer(original: Optimizer, live: AttachedProgram) -> None:
    """Let the program's optimizer step as its techniques want, until they are undone.

    Args:
        original: the optimizer that the program holds.
        live: the program with its techniques attached.
    """
    taken = live.optimizer
    assert taken is not None
    watched = (live.gathering, live.before_step, live.after_step)
    if taken is original and not any(watched):
        return
    undone = False
    plain_step = original.step
    own_hooks = OwnStepHooks(original)

    @wraps(plain_step)
    def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if undone:
            return plain_step(*args, **kwargs)
        for action in (*live.gathering, *live.before_step):
            action()
        if taken is original:
            result = plain_step(*args, **kwargs)
        else:
            result = own_hooks.around(taken.step, *args, **kwargs)
        note_step(original)
        for action in live.after_step:
            action()
        return result

    def leave() -> None:
        nonlocal undone
        undone = True

    live.on_undo(leave)
    _put(live, original, "step", MethodType(step, original))
    if taken is not original:
        _put(live, original, "zero_grad", _both(original.zero_grad, taken.zero_grad))
        _put(live, original, "state_dict", taken.state_dict)
        _put(live, original, "load_state_dict", taken.load_state_dict)
        # A scaler does not divide gradients itself where the optimizer's kernel does, as a fused one's.
        _put(live, original, SCALES_ITSELF, False)
        _refuse_past(live, original, own_hooks)


def _refuse_past(live: AttachedProgram, original: Optimizer, own_hooks: OwnStepHooks) -> None:
    """Refuse steps of an optimizer itself whose place another has taken."""

    def refuse(*_: Any) -> None:
        if own_hooks.called:
            return
        raise UsageError(
            f"{type(original).__name__} is stepped by a method that was kept from before the plan was attached, past "
            "the optimizer that took its place (as accelerate does where it scales losses)",
            "Train in bfloat16, or forbid the techniques of the optimizer: vramfit plan --forbid NAME",
        )

    live.on_undo(original.register_step_pre_hook(refuse).remove)


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    @wraps(first)
    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


def _put(live: AttachedProgram, owner: Any, name: str, value: Any) -> None:
    """Put an attribute onto an object itself until the undo; what somebody put over it stays."""
    was_own, before = name in vars(owner), vars(owner).get(name)

    def back() -> None:
        if vars(owner).get(name) is not value:
            return
        if was_own:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]

    vars(owner)[name] = value
    live.on_undo(back)
