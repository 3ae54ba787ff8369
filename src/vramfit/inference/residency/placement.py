"""What fits together on one card: weights that stay, requests that come and go, and one CUDA context or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import Rounding
from vramfit.arguments import shown, size_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.units import format_bytes

_EXACT = 16
"""Models of which every set is weighed."""


class Processes(Enum):
    """Where the models live."""

    ONE = "one"
    """In one process: one context, and what a request took is there for the next one of any model."""
    EACH = "each"
    """In a process each: a context for each, and each keeps what its requests took (torch gives no cache back)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedModel:
    """A model as the card sees it. Bytes.

    Attributes:
        name: what it is called.
        weight_bytes: what its weights and buffers take on the card.
        request_bytes: what one request takes beyond them at its peak.
    """

    name: str
    weight_bytes: int
    request_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no size.

        Raises:
            UsageError: a figure is no whole number, or below 0.
        """
        whole_argument(f"weight_bytes of the model {self.name}", self.weight_bytes, least=0)
        whole_argument(f"request_bytes of the model {self.name}", self.request_bytes, least=0)


def weight_segment(nbytes: int) -> int:
    """What torch reserves for weights that lie in one block: a segment (c10/cuda/CUDACachingAllocator.cpp).

    2 MiB for up to 1 MiB, 20 MiB for less than 10 MiB, else rounded up to 2 MiB.
    """
    return Rounding(AllocatorConfig()).segment(nbytes) if nbytes else 0


def taken_bytes(
    models: Sequence[SizedModel],
    *,
    context_bytes: int = 0,
    processes: Processes = Processes.ONE,
    at_once: int = 1,
) -> int:
    """What models on one card take when all are there and the largest requests run.

    Args:
        context_bytes: of one CUDA context.
        at_once: requests that run at the same moment in one process, each of another model; from 1 on.

    Raises:
        UsageError: a figure is none, or there is no such way to share a card.
    """
    whole_argument("context_bytes", context_bytes, least=0)
    whole_argument("at_once", at_once, least=1)
    if not isinstance(processes, Processes):
        raise UsageError(
            f"processes={shown(processes)} is no way to share a card", "Give Processes.ONE or Processes.EACH"
        )
    weights = sum(one.weight_bytes for one in models)
    requests = sorted((one.request_bytes for one in models), reverse=True)
    if processes is Processes.EACH:
        return weights + sum(requests) + context_bytes * len(models)
    return weights + sum(requests[:at_once]) + context_bytes


def fitting_sets(
    models: Sequence[SizedModel],
    room: int | str,
    *,
    context_bytes: int = 0,
    processes: Processes = Processes.ONE,
    at_once: int = 1,
) -> tuple[tuple[SizedModel, ...], ...]:
    """The sets that fit a card and that no further model fits beside, those of the most models first.

    Args:
        room: bytes of the card, or ``"24GiB"``.
        context_bytes, processes, at_once: as of `taken_bytes`.

    Raises:
        UsageError: there are no models, too many to weigh every set, one fits not even alone, or a figure is none.
    """
    there = size_argument("room", room)
    if not models:
        raise UsageError("there are no models", "Give at least one")
    if len(models) > _EXACT:
        raise UsageError(f"{len(models)} models make too many sets", f"Give at most {_EXACT}")

    def taken(chosen: Sequence[SizedModel]) -> int:
        return taken_bytes(chosen, context_bytes=context_bytes, processes=processes, at_once=at_once)

    for one in models:
        if taken([one]) > there:
            raise too_large(one, there, context_bytes)
    found: list[tuple[SizedModel, ...]] = []
    for count in range(len(models), 0, -1):
        for chosen in combinations(models, count):
            if taken(chosen) <= there and not any(set(chosen) < set(more) for more in found):
                found.append(chosen)
    return tuple(sorted(found, key=lambda chosen: (-len(chosen), -taken(chosen))))


def too_large(model: SizedModel, room: int, context_bytes: int = 0) -> UsageError:
    """The error for a model that does not fit by itself."""
    context = f" and {format_bytes(context_bytes)} of context" if context_bytes else ""
    return UsageError(
        f"the model {model.name} fits not even alone: {format_bytes(model.weight_bytes)} of weights, "
        f"{format_bytes(model.request_bytes)} for a request{context}, of {format_bytes(room)}",
        "Give more room, a smaller model or precision, or stream its weights (vramfit plan, weight-streaming)",
    )
