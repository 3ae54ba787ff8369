"""An optimizer of an unmodified program whose step does what the techniques at it want.

NOTE [The program's own optimizer]: schedules, scalers, wrappers and the loop itself hold the optimizer that the program
made, so it stays in place. Its ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are put onto the object
itself and go to the optimizer that took its place, which follows the hyperparameters that the program sets on its own
(techniques/support/optimizer_exchange.py). A schedule that is made later wraps the ``step`` that it finds, so that is a
method like any other, and goes to the program's own again after the undo, whoever still holds it. Whoever kept the
method from before would step past the replacement: such a step is refused.

NOTE [Resuming with an exchanged optimizer]: a program loads its checkpoint before its first training pass, and so into
its own optimizer, which cannot read the states of another. What was saved of another bears its class under `SAVED_BY`;
while techniques wait for their model, such a ``state_dict`` is kept aside, and loaded into the optimizer that takes the
place. Where none does, or another, the step is refused.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.techniques import AttachedProgram
from vramfit.torch_internals.optimizers import SCALES_ITSELF, OwnStepHooks, note_step

Optimizer = torch.optim.Optimizer


SAVED_BY = "vramfit_saved_by"
"""Key of a ``state_dict`` that says which optimizer it is of, where that is not the program's own."""


class SavedStates:
    """Keeps aside what a program loads into its optimizers and only others can read, until `patches` are undone."""

    def __init__(self, patches: PatchStack) -> None:
        self._kept: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()
        patches.set(Optimizer, "load_state_dict", self._keeping(Optimizer.load_state_dict))

    def take(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """What was loaded into an optimizer and kept aside; None where nothing was."""
        return self._kept.pop(optimizer, None)

    def _keeping(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            saved_by = state_dict.get(SAVED_BY)
            if saved_by in (None, type(optimizer).__name__):
                original(optimizer, state_dict)
            else:
                self._kept[optimizer] = copy.deepcopy(state_dict)

        return load


def attach_to_optimizer(
    original: Optimizer, live: AttachedProgram, saved: dict[str, Any] | None = None
) -> None:
    """Let the program's optimizer step as its techniques want, until they are undone.

    Args:
        original: the optimizer that the program holds.
        live: the program with its techniques attached.
        saved: what the program loaded into it, of another optimizer.

    Raises:
        UsageError: that is of another one than takes its place.
    """
    taken = live.optimizer
    assert taken is not None
    if saved is not None:
        saved_by, here = saved[SAVED_BY], type(taken).__name__
        if taken is original or saved_by != here:
            raise UsageError(
                f"the program loaded states of {saved_by}, which a plan had put in the place of its optimizer, and "
                f"{'nothing' if taken is original else here} takes the place of {type(original).__name__} now",
                "Run it with the plan that it was saved with, or begin without the optimizer's states",
            )
        taken.load_state_dict(saved)
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
        own_states = getattr(taken, "saves_as_the_program", False)
        _put(live, original, "state_dict", taken.state_dict if own_states else _signed(taken))
        _put(live, original, "load_state_dict", taken.load_state_dict)
        _put(live, original, "add_param_group", _refused_group(original, taken))
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


def _refused_group(original: Optimizer, taken: Optimizer) -> Callable[[dict[str, Any]], None]:
    """Refuses groups that come later: the optimizer that took the place would never step them."""

    @wraps(original.add_param_group)
    def add_param_group(_group: dict[str, Any]) -> None:
        raise UsageError(
            f"the program adds parameters to {type(original).__name__} while it trains, and "
            f"{type(taken).__name__}, which the plan put in its place, cannot take them",
            "Forbid the techniques that exchange the optimizer: vramfit plan --forbid NAME",
        )

    return add_param_group


def _signed(taken: Optimizer) -> Callable[[], dict[str, Any]]:
    """`state_dict` that says whose it is."""

    @wraps(taken.state_dict)
    def state_dict() -> dict[str, Any]:
        return {**taken.state_dict(), SAVED_BY: type(taken).__name__}

    return state_dict


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
