"""An optimizer of an unmodified program whose step does what the techniques at it want.

NOTE [The program's own optimizer]: schedules, scalers, wrappers and the loop itself hold the optimizer that the program
made, so it stays in place. Its ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are put onto the object
itself and go to the optimizer that took its place, which follows the hyperparameters that the program sets on its own
(techniques/support/optimizer_exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

from vramfit.techniques import AttachedProgram
from vramfit.torch_internals.optimizers import note_step

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
    plain_step = original.step

    @wraps(plain_step)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for action in (*live.gathering, *live.before_step):
            action()
        found = plain_step(*args, **kwargs) if taken is original else taken.step(*args, **kwargs)
        note_step(original)
        for action in live.after_step:
            action()
        return found

    # A method, as it was: schedules that are made later take it apart (torch/optim/lr_scheduler.py, __init__).
    _put(live, original, "step", MethodType(step, original))
    if taken is not original:
        _put(live, original, "zero_grad", _both(original.zero_grad, taken.zero_grad))
        _put(live, original, "state_dict", taken.state_dict)
        _put(live, original, "load_state_dict", taken.load_state_dict)


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    @wraps(first)
    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


def _put(live: AttachedProgram, owner: Any, name: str, value: Any) -> None:
    """Put an attribute onto an object itself until the undo."""
    before = vars(owner).get(name)

    def back() -> None:
        if before is None:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before

    vars(owner)[name] = value
    live.on_undo(back)
