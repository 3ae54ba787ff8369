"""Attaches techniques at the first training pass of a program that nothing else of vramfit watches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from vramfit.attaching.attached_script import AttachedScript
from vramfit.capture.observing.training_finder import TrainingFinder, following_optimizers
from vramfit.errors import VramfitError
from vramfit.patching import PatchStack

Refuse = Callable[[VramfitError], NoReturn]


class FirstTraining:
    """Waits for the model, attaches, and is gone then: a step costs what it costs without it.

    Attributes:
        script: what is attached.
    """

    def __init__(self, make_script: Callable[[TrainingFinder], AttachedScript], refuse: Refuse) -> None:
        self._finder = TrainingFinder()
        self.script = make_script(self._finder)
        self._refuse = refuse
        self._patches = PatchStack()
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside = threading.local()
        """Where this is set, a model that trains is being called: modules inside of it are no models of their own."""

    def wait(self) -> None:
        """Wait for the first training pass."""
        patches = self._patches
        patches.set(torch.optim.Optimizer, "__init__", following_optimizers(self._finder.meet))
        patches.set(nn.Module, "__call__", self._watching_calls())
        self.script.watch_loading(patches)
        self.script.watch_steps(self._refuse, patches)

    def close(self) -> None:
        """Wait no longer."""
        self._patches.undo()

    def _watching_calls(self) -> Callable[..., Any]:
        original = nn.Module.__call__
        is_compiling = torch.compiler.is_compiling

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or vars(self._inside) or not self._finder.trains(module):
                return original(module, *args, **kwargs)
            if module not in self._met:
                self._met.add(module)
                self._meet(module)
            self._inside.model = True
            try:
                return original(module, *args, **kwargs)
            finally:
                vars(self._inside).clear()

        return call

    def _meet(self, module: nn.Module) -> None:
        try:
            if self.script.meet(module):
                self.close()
        except VramfitError as error:
            self._refuse(error)


def attach_at_first_training(
    make_script: Callable[[TrainingFinder], AttachedScript], refuse: Refuse
) -> FirstTraining:
    """Attach what `make_script` makes when the program of this process first trains the model that it is for.

    Args:
        refuse: ends the program with an error.
    """
    watch = FirstTraining(make_script, refuse)
    watch.wait()
    return watch
