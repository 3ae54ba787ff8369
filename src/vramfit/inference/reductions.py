"""What is kept of a model's result, computed before it leaves the device or the window: labels in place of classes.

Each is a function of a complete block ``[B, C, *spatial]``, and treats every place by itself, so that a block may be
given in pieces. By name: ``"argmax"``, ``"threshold"`` or ``"threshold=0.3"``, ``"top-k=5"``, ``"uint8"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vramfit.arguments import shown
from vramfit.errors import UsageError

OnTheFly: TypeAlias = Callable[[torch.Tensor], Any]
"""Gives a tensor ``[B, *, *spatial]`` for a block, or a tuple or dict of them."""

_PIECE_BYTES = 32 << 20
"""A block is reduced in pieces of about this size: what a reduction holds beside its result is no more than a few."""


@dataclass(frozen=True, slots=True)
class ArgMax:
    """The number of the largest channel, as the smallest integer type that holds it: ``[B, 1, *spatial]``."""

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        """The labels of a block."""
        return block.argmax(dim=1, keepdim=True).to(label_dtype(block.shape[1]))


@dataclass(frozen=True, slots=True)
class Threshold:
    """One where a value is larger than `at`, else zero, as uint8."""

    at: float = 0.5

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        """The mask of a block."""
        return (block > self.at).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class TopK:
    """The `count` largest channels: a dict of ``values`` and, as labels, ``indices``, each ``[B, count, *spatial]``."""

    count: int = 5

    def __call__(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest channels of a block, the largest first."""
        values, indices = block.topk(min(self.count, block.shape[1]), dim=1)
        return {"values": values, "indices": indices.to(label_dtype(block.shape[1]))}


@dataclass(frozen=True, slots=True)
class EightBits:
    """Values of 0 to 1 as 0 to 255, rounded, as pictures are stored: ``uint8``."""

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        """The block in eight bits."""
        return block.clamp(0, 1).mul_(255).round_().to(torch.uint8)


_NAMED: Mapping[str, tuple[type[Any], type | None]] = {
    "argmax": (ArgMax, None),
    "threshold": (Threshold, float),
    "top-k": (TopK, int),
    "uint8": (EightBits, None),
}


def label_dtype(classes: int) -> torch.dtype:
    """The smallest integer type for the numbers of `classes` channels."""
    if classes <= 1 << 8:
        return torch.uint8
    return torch.int16 if classes <= 1 << 15 else torch.int32


def as_reduction(given: Any) -> OnTheFly | None:
    """A reduction by its name, or a function as it is.

    Raises:
        UsageError: there is none of that name.
    """
    if given is None or callable(given):
        found: OnTheFly | None = given
        return found
    name, _, value = str(given).partition("=")
    kind, takes = _NAMED.get(name.strip(), (None, None))
    if kind is None or (value and takes is None) or not isinstance(given, str):
        raise UsageError(
            f"reduce={shown(given)} is no reduction", f"Give a function, or one of {', '.join(_NAMED)}"
        )
    if not value or takes is None:
        made: OnTheFly = kind()
        return made
    try:
        number = takes(value)
    except ValueError:
        number = None
    if number is None or (kind is TopK and number < 1) or number != number:
        raise UsageError(f"reduce={shown(given)}: {value!r} is no number for it", "Give another") from None
    with_number: OnTheFly = kind(number)
    return with_number


def reduced(block: torch.Tensor, reduction: OnTheFly | None, axes: int) -> Any:
    """A block after its reduction, computed in pieces along its first spatial axis.

    Args:
        block: complete results ``[B, *, *spatial]``.
        reduction: None leaves the block as it is.
        axes: spatial axes.

    Returns:
        what the reduction gives; without one the block itself.
    """
    if reduction is None:
        return block
    along = block.dim() - axes
    rows = block.shape[along]
    step = max(1, rows * _PIECE_BYTES // max(block.nbytes, 1))
    if step >= rows:
        return reduction(block)
    whole: list[torch.Tensor] = []
    pack: Callable[[list[torch.Tensor]], Any] = _only
    for start in range(0, rows, step):
        given = block.narrow(along, start, min(step, rows - start))
        parts, pack = flattened(reduction(given))
        if not whole:
            whole = [
                part.new_empty((*part.shape[:-axes], rows, *part.shape[part.dim() - axes + 1 :]))
                for part in parts
            ]
        for place, part in zip(whole, parts, strict=True):
            place.narrow(place.dim() - axes, start, given.shape[along]).copy_(part)
    return pack(whole)


def flattened(result: Any) -> tuple[list[torch.Tensor], Callable[[list[Any]], Any]]:
    """The tensors of a result, and what packs as many values in the same way.

    Raises:
        UsageError: there is something else than tensors.
    """
    pack: Callable[[list[Any]], Any]
    if isinstance(result, torch.Tensor):
        return [result], _only
    if isinstance(result, Mapping) and result:
        keys, values = list(result), list(result.values())
        pack = lambda found: dict(zip(keys, found, strict=True))  # noqa: E731  # the shortest form
    elif isinstance(result, tuple | list) and result:
        values, pack = list(result), tuple
    else:
        values, pack = [result], _only
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the model's result has a {type(value).__name__} where a tensor is wanted",
                "Give a function that calls the model and returns a tensor, or a tuple or dict of tensors",
            )
    return values, pack


def _only(found: list[Any]) -> Any:
    return found[0]
