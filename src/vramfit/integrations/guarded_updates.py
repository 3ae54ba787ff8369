"""What trainers share whose steps outlive running out of memory: their options, and the optimizer's step by slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.api.survival_api import survive
from vramfit.arguments import size_argument
from vramfit.errors import UsageError
from vramfit.integrations.plan_callbacks import put
from vramfit.runtime.survival.survivor import Survivor

_OPTIONS = (
    "numerics",
    "reduction",
    "labels",
    "patience",
    "vote_seconds",
    "host_margin",
    "reserve",
    "state",
    "enabled",
    "on_event",
)


class GuardedUpdate:
    """Stands for an optimizer's ``step`` in a training that outlives running out of memory.

    Args:
        survivor: of the training.
        plain: the optimizer's step as it was, which the slices take.
    """

    def __init__(self, survivor: Survivor, plain: Callable[..., Any]) -> None:
        self._survivor, self._plain = survivor, plain

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step; it ends, unless the host has no room either.

        Args:
            closure: goes forward and backward first, as torch's optimizers call it.

        Returns:
            what the closure gave.
        """
        result = None if closure is None else closure()
        back = put(self._survivor.optimizer, "step", self._plain)
        try:
            self._survivor.update()
        finally:
            back()
        return result


def insisted(
    survivor: Survivor, action: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """What a trainer's own function gives, called again where it ran out of memory.

    Iterators among its arguments become lists: the second call would find them empty, and e.g. clip nothing.
    """
    given = [list(one) if hasattr(one, "__next__") else one for one in args]
    words = {name: list(one) if hasattr(one, "__next__") else one for name, one in named.items()}
    return survivor.insist(lambda: action(*given, **words))


def trainer_survivor(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Survivor:
    """A survivor of a training whose loop is a trainer's.

    Args:
        options: as `vramfit.survive` takes them.

    Raises:
        UsageError: an option is none, or has no such value.
    """
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise UsageError(
            f"{sorted(unknown)[0]} is no option of surviving in a trainer",
            f"Give {', '.join(_OPTIONS[:-1])} or {_OPTIONS[-1]}; the rest is the trainer's",
        )
    return survive(model, optimizer, **options)


def check_options(options: dict[str, Any]) -> None:
    """Say at once what is wrong with options.

    Raises:
        UsageError: as `trainer_survivor` raises it.
    """
    if "reserve" in options:  # there is no card yet
        size_argument("reserve", options["reserve"], least=0)
        options = {name: given for name, given in options.items() if name != "reserve"}
    nothing = nn.ParameterList([nn.Parameter(torch.zeros(1))])  # drawn numbers would change the training's
    trainer_survivor(nothing, torch.optim.SGD(nothing.parameters()), options)
