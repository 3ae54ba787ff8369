"""State that a forward pass writes, kept as the whole batch would have written it where the batch runs in pieces.

NOTE [Once a step]: each piece begins with the state that the step began with, so that its loss is that of its part of
the batch. What the pieces wrote is then put together: what all write alike (a counter, a schedule, a teacher) stays as
the last one left it, a mean over the batch (a centre, a running mean) becomes the mean of theirs, a sum over it (the
number of examples seen) the sum. Anything else, e.g. a queue of the examples themselves, has no pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.torch_internals.layers import BatchNorm
from vramfit.training_state.forward_state import ForwardState
from vramfit.training_state.tensor_values import buffer_writes

_LOOKS = 2
"""Batches in which a write that nobody named is looked for."""


class PieceState:
    """The state that the pieces of batches write. See NOTE [Once a step].

    Args:
        model: whose state it is.
        once: names of what all pieces write alike: buffers, frozen parameters or attributes, ``block.steps``.
        averaged: of means over the batch.
        summed: of sums over the batch.

    Raises:
        UsageError: a name belongs to no module of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        once: Sequence[str] = (),
        averaged: Sequence[str] = (),
        summed: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._shares = {**dict.fromkeys(averaged, True), **dict.fromkeys(summed, False)}
        self._names = frozenset((*once, *averaged, *summed))
        self._owners = {name: _owner(model, name) for name in self._names}
        self._counts = [module.num_batches_tracked for module in _norms(model)]
        self._looks = _LOOKS
        self._start: ForwardState | None = None
        self._totals: dict[str, Any] = {}
        self._extra: list[int] = []
        self._before: dict[str, tuple[int, int]] = {}

    def begin(self, *, first: bool) -> None:
        """A piece begins; the first one notes the state, the others find it again."""
        if first:
            self._totals, self._extra = {}, [0] * len(self._counts)
            self._start = ForwardState(self._model, only=self._names) if self._names else None
            self._before = buffer_writes(self._model, BatchNorm) if self._looks else {}
        elif self._start is not None:
            self._start.restore()
        self._versions = [count._version for count in self._counts]

    def end(self, share: float, *, first: bool, last: bool) -> None:
        """A piece has gone forward and backward.

        Args:
            share: of the batch's examples that it holds.

        Raises:
            UsageError: it wrote to a buffer that nobody named.
        """
        if first and self._looks:
            self._looks -= 1
            self._check()
        if not last:
            for place, (count, before) in enumerate(zip(self._counts, self._versions, strict=True)):
                self._extra[place] += count._version - before
        with torch.no_grad():
            for name, averages in self._shares.items():
                value = self._value(name)
                assert self._start is not None
                part = value * share if averages else value - self._start.value(name)
                self._totals[name] = part if name not in self._totals else self._totals[name] + part

    def finish(self) -> None:
        """All pieces are over: put together what they wrote."""
        with torch.no_grad():
            for name, total in self._totals.items():
                assert self._start is not None
                value = total if self._shares[name] else self._start.value(name) + total
                current = self._value(name)
                if isinstance(current, torch.Tensor):
                    current.detach().copy_(value)
                else:
                    module, attribute = self._owners[name]
                    setattr(module, attribute, type(current)(value))
            for count, extra in zip(self._counts, self._extra, strict=True):
                if extra:
                    count.sub_(extra)
        self._start, self._totals = None, {}

    def _value(self, name: str) -> Any:
        module, attribute = self._owners[name]
        return getattr(module, attribute)

    def _check(self) -> None:
        for name, now in buffer_writes(self._model, BatchNorm).items():
            if name not in self._names and self._before.get(name, now) != now:
                raise UsageError(
                    f"the forward pass writes to {name}, and each piece of a batch would write to it again",
                    "Name it in once, averaged or summed of micro-batching, or plan with vramfit plan, which finds out",
                )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    try:
        return model.get_submodule(path), attribute
    except AttributeError:
        raise UsageError(
            f"micro-batching names {name!r}, and the model has no module {path!r}",
            "Plan again for this model",
        ) from None


def _norms(model: nn.Module) -> list[Any]:
    """Batch norms that only count their batches: without a momentum the count is a part of the statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, BatchNorm)
        and isinstance(module.num_batches_tracked, torch.Tensor)
        and module.momentum is not None
    ]
