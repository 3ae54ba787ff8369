"""A step's arguments as one batch, and what its function gives: the loss alone, or with metrics beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.torch_internals.pytree import tree_map_only


@dataclass(frozen=True, slots=True)
class LossCall:
    """How the function that computes the loss is called.

    Attributes:
        function: as it was given.
        model: that the loop trains.
        takes_model: whether it takes the model first; None where the number of arguments says so.
    """

    function: Callable[..., Any]
    model: nn.Module
    takes_model: bool | None

    def __call__(self, batch: Any, *, several: bool) -> Any:
        """What the function gives for a batch.

        Args:
            several: whether the batch is a step's arguments, positional ones and named ones.
        """
        args, named = (tuple(batch[0]), dict(batch[1])) if several else ((batch,), {})
        if self._wants_model(len(args) + len(named)):
            args = (self.model, *args)
        return self.function(*args, **named)

    def _wants_model(self, given: int) -> bool:
        if self.takes_model is not None:
            return self.takes_model
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some built-in functions have none
            return False
        wanted = [one for one in parameters if one.kind in _NAMED_OR_PLACED and one.default is one.empty]
        return len(wanted) == given + 1


_NAMED_OR_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_batch(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, bool]:
    """A step's arguments as one batch, and whether they are several.

    Raises:
        UsageError: the step was called without arguments.
    """
    if not args and not named:
        raise UsageError("step has no batch", "Pass what the function that computes the loss takes")
    if len(args) == 1 and not named:
        return args[0], False
    return (args, named), True


def loss_in(result: Any) -> torch.Tensor:
    """The loss in what a function gave: itself, the first of several, or what is called ``loss``.

    Raises:
        UsageError: the result holds no scalar loss.
    """
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif isinstance(result, tuple | list) and result:
        found = result[0]
    elif not isinstance(result, torch.Tensor):
        found = getattr(result, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            f"the function that computes the loss gave {type(result).__name__}, in which there is no loss",
            "Return the loss, (loss, metrics...), or a mapping with the entry loss",
        )
    return found


def detached(result: Any) -> Any:
    """The same without graphs."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
