"""The hook by which a child puts a plan's techniques onto the program that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vramfit.attaching.attached_script import AttachedScript, TrainedTarget
from vramfit.attaching.choice_values import choices_from_plain, choices_to_plain
from vramfit.errors import VramfitError
from vramfit.launch.child_hooks import ChildHook, HookedProgram, Leave
from vramfit.plain import from_plain, to_plain
from vramfit.techniques import Choice

NAME = "vramfit.attaching.plan_hook:attach_plan"


def plan_hook(choices: Sequence[Choice], target: TrainedTarget | None) -> ChildHook:
    """The hook for some techniques.

    Args:
        target: the model that they are for; None for the first that is trained.
    """
    plain_target = None if target is None else to_plain(target)
    return ChildHook(name=NAME, values={"choices": choices_to_plain(choices), "target": plain_target})


def attach_plan(child: HookedProgram, values: dict[str, Any]) -> Leave:
    """Attach the techniques when the model is first trained; leaves whether that was done."""
    target = None if values["target"] is None else from_plain(values["target"], TrainedTarget)
    script = AttachedScript(choices_from_plain(values["choices"]), target, child.observer.finder)
    script.exchanged = child.observer.replaced
    before = child.observer.on_training

    def met(root: Any) -> None:
        before(root)
        try:
            script.meet(root)
        except VramfitError as error:
            child.refuse(error)

    child.observer.on_training = met
    script.watch_loading(child.patches)
    script.watch_steps(child.refuse, child.patches)
    return lambda: {"attached": script.live is not None, "seen": [target.words for target in script.seen]}
