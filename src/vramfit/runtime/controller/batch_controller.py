"""Sizes for the steps of a loop on a device: reads its memory before each step, and learns from its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vramfit.arguments import whole_argument
from vramfit.errors import UsageError
from vramfit.runtime.controller.memory_reading import CardMemory, MemoryReading, MemorySource
from vramfit.runtime.controller.size_policy import (
    PLAIN_MODE,
    PolicySettings,
    SizePolicy,
    StepMode,
    StepSize,
)
from vramfit.runtime.oom_forms import recognised


class BatchController:
    """Says before each step how many items its batch may have, by what is free and by what steps took before.

    >>> from vramfit.runtime.controller.memory_reading import MemoryReading
    >>> class Source:  # a card of 1,000 bytes, on which a token takes one
    ...     taken = 0
    ...     def now(self):
    ...         return MemoryReading(total=1000, free=1000, allocated=0, reserved=0, neighbours=0)
    ...     def begin(self): pass
    ...     def peak(self): return self.taken
    >>> source = Source()
    >>> controller = vramfit.BatchController(source=source, start=4)
    >>> for _ in range(40):
    ...     size = controller.size(length=10)
    ...     with controller.step(size, length=10):
    ...         source.taken = 10 * size.items
    >>> size.items
    97

    Batches of ever new shapes leave gaps between what torch has cached; with ``expandable_segments:True`` in
    ``PYTORCH_ALLOC_CONF`` there are few. What lay in gaps when a step ran out is left out of the room after it.

    A training keeps its global batch by accumulating micro-batches of these sizes, or trains on token budgets. Where
    the steps of a loop are guarded by `vramfit.survive` too, a step that runs out is done again there, and the
    controller has learnt from it.

    Args:
        device: whose memory counts.
        start: items of the first step, such as what `vramfit.largest_batch` found.
        most: items of any.
        modes: ways to run a step, the plain one first; the quickest for what is free is chosen.
        source: what tells the memory, in place of the card.

    Attributes:
        reading: the latest.
        shortages: steps that ran out of memory.

    Raises:
        UsageError: the device is no card and no source is given, or arguments are no such.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        start: int = 1,
        most: int = 1 << 20,
        modes: Sequence[StepMode] = (PLAIN_MODE,),
        source: MemorySource | None = None,
    ) -> None:
        settings = PolicySettings(
            start=whole_argument("start", start, least=1), most=whole_argument("most", most, least=1)
        )
        if not modes or len({mode.name for mode in modes}) < len(modes):
            raise UsageError("modes have to be named, each otherwise", "Give the plain one first")
        self._source = CardMemory(torch.device(device)) if source is None else source
        self._policy = SizePolicy(settings, modes)
        self.reading: MemoryReading | None = None
        self.shortages = 0

    def size(self, length: int = 1) -> StepSize:
        """How the next step is run.

        Args:
            length: tokens of the longest item that may be in its batch; 1 where items are all of one size.
        """
        self.reading = self._source.now()
        return self._policy.decide(self.reading.room, whole_argument("length", length, least=1))

    @contextmanager
    def step(self, size: StepSize, length: int = 1, items: int | None = None) -> Iterator[None]:
        """Around a step: its peak is measured, and a shortage is noted and passed on.

        Args:
            size: that was decided.
            length: tokens of the longest item that is in its batch.
            items: that are in it, where it has fewer than were allowed.
        """
        before = self._source.now()
        self._source.begin()
        try:
            yield
        except BaseException as error:
            if recognised(error) is not None:
                self.shortages += 1
                short = self._source.now()  # frames of the error still hold what the step held
                gaps = short.reserved - short.allocated
                self._policy.ran_out(size, wasted=gaps / max(1, before.room))
            raise
        taken = self._source.peak() - before.allocated
        done = StepSize(
            items=size.items if items is None else items, mode=size.mode, bound_bytes=size.bound_bytes
        )
        self._policy.observe(done, length, taken)
