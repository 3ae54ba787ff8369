"""What techniques may ask of a workload beside its profile: fresh models, small batches, and a watched pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from vramfit.techniques.core.forward_trace import ForwardTrace
from vramfit.workload import Batch

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModel:
    """A model with what one of its forward passes did; its tensors may hold no values."""

    model: nn.Module
    trace: ForwardTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallSample:
    """A model and a batch, both with values and on the CPU.

    Attributes:
        words: which sizes the batch has, after "at".
        seconds: that may be spent on it.
    """

    model: nn.Module
    batch: Batch
    words: str
    seconds: float


class Samples(Protocol):
    """Gives techniques samples of the plain workload; each call makes a fresh model."""

    def traced(self) -> TracedModel | None:
        """A forward pass at the workload's own sizes, without values where that will do; None where it fails."""
        ...

    def valued(self) -> nn.Module | None:
        """The model with its values, on the CPU; None where it is too large for that."""
        ...

    def small(self) -> SmallSample | None:
        """The model with its values and a batch that it runs in a short time here; None where there is none."""
        ...

    def once(self, key: str, find: Callable[[], Found]) -> Found:
        """What `find` gives, found once for the workload and remembered by the key."""
        ...
