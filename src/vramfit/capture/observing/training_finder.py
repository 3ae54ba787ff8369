"""Finds the models that a program trains: outermost modules, called with gradients, that have an optimizer."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

Optimizer = torch.optim.Optimizer


class TrainingFinder:
    """Knows a program's optimizers, and asks of each outermost call whether it trains.

    Attributes:
        optimizers: in the order in which they were made.
    """

    def __init__(self) -> None:
        self._made: list[weakref.ref[Optimizer]] = []
        self._known: weakref.WeakKeyDictionary[nn.Module, tuple[int, bool]] = weakref.WeakKeyDictionary()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that are alive, in the order in which they were made."""
        return tuple(optimizer for ref in self._made if (optimizer := ref()) is not None)

    def meet(self, optimizer: Optimizer) -> None:
        """Note an optimizer that was made, once: a class that derives from another may call its ``__init__`` again."""
        if any(ref() is optimizer for ref in self._made):
            return
        self._made.append(weakref.ref(optimizer))

    def trains(self, module: nn.Module) -> bool:
        """Whether an optimizer has some of a module's parameters, and gradients are enabled now."""
        if not self._made or not torch.is_grad_enabled():
            return False
        made, found = self._known.get(module, (0, False))
        if not found and made != len(self._made):
            found = any(True for _ in self.owners(module))
            self._known[module] = (len(self._made), found)
        return found

    def owners(self, module: nn.Module) -> Iterator[Optimizer]:
        """The optimizers that have some of a module's parameters."""
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in self.optimizers:
            if any(id(parameter) in own for parameter in parameters_of(optimizer)):
                yield optimizer

    def trained(self, module: nn.Module) -> int:
        """Elements of a module's parameters that an optimizer has."""
        owned = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        return sum(elements(parameter) for parameter in module.parameters() if id(parameter) in owned)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def elements(parameter: torch.Tensor) -> int:
    """Elements of a parameter; 0 of one whose shape is not known yet."""
    return 0 if is_lazy(parameter) else parameter.numel()


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step calls a function that runs the model, as that of LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def following_optimizers(meet: Callable[[Optimizer], object]) -> Callable[..., None]:
    """`Optimizer.__init__` that also tells of the optimizer, to be put in its place."""
    original = Optimizer.__init__

    def init(self: Optimizer, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        meet(self)

    return init
