"""Attaches techniques to an unmodified program: at the first training pass of the model that they are for.

NOTE [When techniques reach a program]: at the first call, with gradients, of the outermost module whose parameters an
optimizer has. The model then is where the program put it and its optimizer is made; nothing has gone backward, and no
state is there but a checkpoint's. Wrappers (DDP, ``torch.compile``, accelerate) are around it already: what surrounds
forward passes, exchanges the optimizer or sets a flag goes below them; what changes parameters is too late there, and
is refused by its name. Settings of the allocator come before the program: they are given to it when it starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vramfit.attaching.attached_optimizer import SavedStates, attach_to_optimizer
from vramfit.capture.observing.training_finder import TrainingFinder, elements, parameters_of, wants_closure
from vramfit.capture.observing.wrappers import COMPILED, SHARDED, kind_of, peeled
from vramfit.errors import UsageError, VramfitError
from vramfit.patching import PatchStack
from vramfit.techniques import AttachedProgram, AttachStage, Choice

STARTING = "allocator-settings"
"""The technique that a program is started with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTarget:
    """The model that techniques are for, as it is known again in another run of the program.

    Attributes:
        kind: its class, without wrappers.
        parameters: its elements.
        trained: of them, those that an optimizer has.
    """

    kind: str
    parameters: int
    trained: int

    @property
    def words(self) -> str:
        """As an error names it."""
        return f"{self.kind} with {self.parameters:,} parameters, {self.trained:,} of them trained"


def check_attachable(choices: Sequence[Choice]) -> None:
    """Refuse what no unmodified program can be given.

    Raises:
        UsageError: a technique changes the loop.
    """
    for choice in choices:
        change = choice.loop_change
        if change is not None:
            raise UsageError(
                f"{choice.name} changes the training loop, which belongs to the program: it {change.what}",
                f"{change.instead}, or plan for the program itself: vramfit plan --gpu NAME SCRIPT",
            )


class AttachedScript:
    """Techniques on their way to a program's model. See NOTE [When techniques reach a program].

    Args:
        choices: the techniques.
        target: the model that they are for; None takes the first that is trained.
        finder: knows the program's optimizers.

    Attributes:
        live: the program with its techniques; None until they are attached.
        attached: called with the program once its techniques are attached, before the pass.
        exchanged: called with the program's optimizer where another takes its place.
        seen: the trained models that passed by.
    """

    def __init__(
        self, choices: Sequence[Choice], target: TrainedTarget | None, finder: TrainingFinder
    ) -> None:
        check_attachable(choices)
        self.live: AttachedProgram | None = None
        self.attached: Callable[[AttachedProgram], object] = lambda _live: None
        self.exchanged: Callable[[torch.optim.Optimizer], object] = lambda _optimizer: None
        self.seen: list[TrainedTarget] = []
        self._choices = tuple(choice for choice in choices if choice.name != STARTING)
        self._target, self._finder = target, finder
        self._saved: SavedStates | None = None
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def meet(self, root: nn.Module) -> bool:
        """Attach to a model that is about to be trained, if it is the right one; whether that was so.

        Raises:
            UsageError: a technique cannot be attached to it any more, or not at all; nothing was changed.
        """
        if self.live is not None:
            return False
        wrappers, model = peeled(root)
        here = TrainedTarget(
            kind=kind_of(model),
            parameters=sum(map(elements, model.parameters())),
            trained=self._finder.trained(root),
        )
        self.seen.append(here)
        if self._target is not None and not _is(
            here, self._target, sharded=bool(SHARDED.intersection(wrappers))
        ):
            return False
        self._check_wrappers(wrappers)
        optimizer = _largest(self._finder, root)
        if self._choices and optimizer is not None and wants_closure(_inner(optimizer)):
            raise UsageError(
                f"{type(_inner(optimizer)).__name__} runs the model several times in a step, so that no technique can "
                "be attached",
                "Take an optimizer whose step needs no closure",
            )
        live = AttachedProgram(model, _inner(optimizer))
        live.own_loop = True
        live.attach(self._choices)
        self.live = live
        if optimizer is not None:
            self._attach_to(_inner(optimizer), live)
            if live.optimizer is not _inner(optimizer):
                self.exchanged(_inner(optimizer))
        self.attached(live)
        return True

    def _attach_to(self, optimizer: torch.optim.Optimizer, live: AttachedProgram) -> None:
        saved = None if self._saved is None else self._saved.take(optimizer)
        try:
            attach_to_optimizer(optimizer, live, saved)
        except BaseException:
            live.undo()
            self.live = None
            raise

    def watch_loading(self, patches: PatchStack) -> None:
        """Keep aside states of other optimizers that the program loads into its own, until `patches` are undone."""
        self._saved = SavedStates(patches)

    def watch_steps(self, refuse: Callable[[VramfitError], object], patches: PatchStack) -> None:
        """Refuse steps of a program to which nothing was attached, until `patches` are undone.

        A step with a closure, as Lightning's, trains the model itself: it is looked at when it is over.

        Args:
            refuse: ends the program with an error.
        """

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not args and kwargs.get("closure") is None:
                look(optimizer)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if args or kwargs.get("closure") is not None:
                look(optimizer)

        def look(optimizer: torch.optim.Optimizer) -> None:
            try:
                self.before_step(optimizer)
            except VramfitError as error:
                refuse(error)

        patches.call(register_optimizer_step_pre_hook(before).remove)
        patches.call(register_optimizer_step_post_hook(after).remove)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step where nothing was attached by then: of several models, one may step before the right one.

        Raises:
            UsageError: the model that the techniques are for was not trained.
        """
        if self.live is not None:
            return
        again = optimizer in self._stepped
        self._stepped.add(optimizer)
        if not again and len(self._stepped) < len(self._finder.optimizers):
            return
        seen = " and ".join(target.words for target in self.seen)
        wanted = "a model" if self._target is None else self._target.words
        raise UsageError(
            f"the plan is for {wanted}, and this program trains {seen or 'none that was seen'}",
            "Plan for this program: vramfit plan --gpu NAME SCRIPT",
        )

    def _check_wrappers(self, wrappers: Sequence[str]) -> None:
        if not wrappers:
            return
        for choice in self._choices:
            if choice.stage in (AttachStage.MODEL, AttachStage.PLACEMENT):
                raise UsageError(
                    f"{choice.name} changes the model's parameters, and {wrappers[0]} is around them already",
                    f"Forbid {choice.name} in the plan: vramfit plan --forbid {choice.name}",
                )
            if COMPILED in wrappers and choice.stage in (AttachStage.FORWARD, AttachStage.LOSS):
                raise UsageError(
                    f"{choice.name} surrounds modules, and {COMPILED} compiles the model with what surrounds them anew "
                    "in each step",
                    f"Leave {COMPILED} out, or forbid {choice.name} in the plan: vramfit plan --forbid {choice.name}",
                )
            if SHARDED.intersection(wrappers) and choice.stage is AttachStage.OPTIMIZER:
                raise UsageError(
                    f"{choice.name} exchanges an optimizer of whole parameters, and {wrappers[0]} has parts of them",
                    f"Forbid {choice.name} in the plan: vramfit plan --forbid {choice.name}",
                )


def _is(here: TrainedTarget, wanted: TrainedTarget, *, sharded: bool) -> bool:
    """Whether a model is the one that is meant; of a sharded one a rank knows the class and its own part alone."""
    return here.kind == wanted.kind if sharded else here == wanted


def _largest(finder: TrainingFinder, root: nn.Module) -> torch.optim.Optimizer | None:
    """Of the optimizers of a model, the one with the most parameters."""
    return max(finder.owners(root), key=lambda one: sum(map(elements, parameters_of(one))), default=None)


def _inner(optimizer: Any) -> Any:
    """The optimizer inside of a wrapper, such as accelerate's, or itself."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer
