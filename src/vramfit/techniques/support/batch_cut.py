"""How a batch is cut into pieces of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vramfit.workload import Batch
from vramfit.workload.containers import mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a batch is cut.

    Attributes:
        size: its examples.
        examples: whether lists inside it hold one entry for each example, as in object detection.
        uncut: names of what goes to every piece as it is.
    """

    size: int
    examples: bool = False
    uncut: tuple[str, ...] = ()

    def piece(self, batch: Batch, start: int, stop: int) -> Batch:
        """The examples from `start` to before `stop`: views of the tensors, in the containers of the batch."""
        if isinstance(batch, torch.Tensor):
            return batch[start:stop] if batch.dim() and batch.shape[0] == self.size else batch
        if isinstance(batch, list | tuple) and len(batch) == self.size and self._one_of_each(batch):
            return batch[start:stop]

        def part(name: str, value: Any) -> Any:
            return value if name in self.uncut else self.piece(value, start, stop)

        return mapped(batch, part)

    def _one_of_each(self, batch: list[Any] | tuple[Any, ...]) -> bool:
        return (self.examples and type(batch) is list) or all(is_plain(item) for item in batch)


def is_plain(value: Any) -> bool:
    """Whether a value is no tensor and no container, but a text or a number."""
    return isinstance(value, str | bytes | int | float)
