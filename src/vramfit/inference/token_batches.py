"""Batches by tokens: items of similar length together, as many as their predicted peak allows, longest first.

NOTE [Length buckets]: items are sorted by length, and a bucket of neighbours is padded to its longest, rounded up to a
multiple. It ends where one more item would make more than the allowed part of it padding. All batches of a bucket have
nearly the same size, so that there are few shapes: an allocator's cached blocks serve the next batch, and each shape
can be measured before (`TokenBatches.confirm`). Where rounding up alone would exceed the allowed part, a bucket keeps
its longest item's own length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from vramfit.arguments import number_argument, shown, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.peak_bound import PeakBound
from vramfit.searching.allowed import Multiples
from vramfit.searching.largest import Strategy, largest_where

T = TypeVar("T")

_BACK_OFF = 1.05
"""How far beyond the budget a batch is taken to have been that ran out of memory: by how much is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatchSettings:
    """What a batch may be.

    Attributes:
        budget: bytes that a batch may take, the model's own included as far as the peak counts it.
        multiple: lengths are rounded up to it.
        max_padding: part of a bucket's tokens that may be padding, from 0 to 1.
        most_items: of a batch.
        window: items of a stream that are looked at together; None takes all items at once.

    Raises:
        UsageError: a number is out of bounds.
    """

    budget: int
    multiple: int = 8
    max_padding: float = 0.03
    most_items: int = 4096
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("budget", "multiple", "most_items"):
            whole_argument(name, getattr(self, name), least=1)
        number_argument("max_padding", self.max_padding, least=0.0, most=1.0)
        if self.window is not None:
            whole_argument("window", self.window, least=1)


class TokenBatch(list[int]):
    """Numbers of the items of a batch, with the length that they are padded to.

    A loader takes it as what it is, a list of numbers.

    Attributes:
        length: tokens of each item, padding included.
        tokens: of the items themselves, without padding.
        items: the items, where they came as a stream; else empty.
    """

    def __init__(self, numbers: Iterable[int] = (), *, length: int = 0, tokens: int = 0) -> None:
        super().__init__(numbers)
        self.length, self.tokens = length, tokens
        self.items: list[Any] = []

    def __reduce__(self) -> Any:
        return (_rebuilt, (list(self), self.length, self.tokens, self.items))

    def __repr__(self) -> str:
        return f"<TokenBatch of {len(self)} x {self.length}>"

    @property
    def padding(self) -> float:
        """Part of its tokens that is padding."""
        return 1 - self.tokens / max(1, len(self) * self.length)


class TokenBatches(Generic[T]):
    """Batches of items, the longest first, made one by one as they are asked for.

    Iterate over it, run each batch, and tell it what the batch took (`observe`): where the bound was too low, it is
    raised for all batches to come. A `torch.utils.data.DataLoader` takes it as its ``batch_sampler``.

    Args:
        lengths: tokens of each item; None for a stream.
        peak: bytes that a batch of so many items of one length takes at its highest: a bound from above that does not
            fall as either grows.
        stream: items with the length of each, where the settings have a window.

    Attributes:
        bound: what `peak` says, corrected by what was observed.

    Raises:
        UsageError: the longest item does not fit alone.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None,
        peak: Callable[[int, int], float],
        settings: TokenBatchSettings,
        *,
        stream: Iterable[tuple[int, T]] = (),
    ) -> None:
        self.settings = settings
        self.bound = peak if isinstance(peak, PeakBound) else PeakBound.of(peak)
        self._lengths, self._stream = lengths, stream
        self._plan: list[TokenBatch] | None = None
        self._last: TokenBatch | None = None
        self._again: list[TokenBatch] = []
        self._largest: dict[int, tuple[float, int]] = {}
        if (lengths is None) != (settings.window is not None):
            raise UsageError(
                "a stream has a window, and items that are all there have none", "Give one of them"
            )
        if lengths:
            if min(lengths) < 1:
                raise UsageError("an item has no tokens", "Leave empty items out")
            self._check_alone(max(lengths))

    def __len__(self) -> int:
        """Batches, as far as the bound says now.

        Raises:
            TypeError: items come as a stream.
        """
        if self._lengths is None:
            raise TypeError("batches of a stream have no length")
        if self._plan is None:
            self._plan = list(self._batches_of(range(len(self._lengths)), self._lengths))
        return len(self._plan)

    def __iter__(self) -> Iterator[TokenBatch]:
        """The batches, those that were given back (`split`) before all others."""
        lengths = self._lengths
        source = self._of_stream() if lengths is None else self._batches_of(range(len(lengths)), lengths)
        for batch in source:
            yield from self._given_out(batch)
        while self._again:
            yield from self._given_out(self._again.pop())

    def _given_out(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        waiting = [batch]
        while waiting:
            waiting.extend(reversed(self._again))
            self._again.clear()
            self._last = waiting.pop()
            yield self._last

    def observe(self, peak_bytes: int, batch: TokenBatch | None = None) -> None:
        """Tell what a batch took, the latest by default: a bound that was too low is raised.

        Args:
            peak_bytes: such as ``torch.cuda.max_memory_allocated()`` since the batch before.
        """
        seen = self._last if batch is None else batch
        if seen is None:
            raise UsageError("no batch was given out yet", "Call observe after a batch has run")
        self.bound.observe(len(seen), seen.length, peak_bytes)

    def confirm(self, measure: Callable[[int, int], float | None]) -> int:
        """Have the largest shape of each bucket measured before it runs, and make batches smaller until all fit.

        What an allocator reserves is no smooth function of the shape: gaps between blocks come and go with sizes. The
        bound says what to measure, and is raised for a length where it was too low.

        Args:
            measure: bytes that a batch of so many items of a length takes; None where it does not fit.

        Returns:
            how many shapes were measured.

        Raises:
            UsageError: items come as a stream, or one does not fit alone.
        """
        if self._lengths is None:
            raise UsageError("shapes of a stream are not known before", "Confirm those of a list of lengths")
        known: dict[tuple[int, int], float] = {}
        largest: dict[int, int] = {}
        for batch in self._batches_of(range(len(self._lengths)), self._lengths):
            largest[batch.length] = max(largest.get(batch.length, 0), len(batch))
        for length, planned in largest.items():
            items = planned
            while (items, length) not in known:
                took = measure(items, length)
                known[items, length] = self.settings.budget * _BACK_OFF if took is None else took
                self.bound.learn(items, length, known[items, length])
                if known[items, length] <= self.settings.budget:
                    break
                if items == 1:
                    self._check_alone(length)
                items = max(1, min(items - 1, self.largest(length)))
        self._plan = None
        return len(known)

    def split(self, batch: TokenBatch | None = None) -> None:
        """Give a batch back that ran out of memory: it comes again in halves, and the bound is raised above it.

        Raises:
            UsageError: it is a single item, which nothing makes smaller.
        """
        failed = self._last if batch is None else batch
        if failed is None or len(failed) < 2:
            raise UsageError(
                f"an item of {failed.length if failed else 0} tokens does not fit alone",
                "Give a larger budget, shorten the item, or run it in windows",
            )
        self.observe(round(_BACK_OFF * self.settings.budget), failed)
        half = (len(failed) + 1) // 2
        for part in (slice(0, half), slice(half, None)):
            # Lengths of the parts are those of the whole: how long each item is, is not known to a stream any more.
            made = TokenBatch(
                failed[part], length=failed.length, tokens=failed.tokens * len(failed[part]) // len(failed)
            )
            made.items = failed.items[part]
            self._again.append(made)

    def run(self, function: Callable[[TokenBatch], Any], device: torch.device | None = None) -> list[Any]:
        """Run all batches and give the results in the order of the items.

        On a card the allocator's cache is emptied where the shape changes, since blocks that were cached for one shape
        seldom serve another, and what each batch reserved is observed. A batch that runs out of memory comes again in
        halves.

        Args:
            function: gives one result for each item of a batch; results that stay on the card take from the budget.
            device: the card; None is the present one, if there is a card.

        Raises:
            UsageError: an item does not fit alone, or results do not match their batch.
        """
        card = device if device is not None else _present_card()
        results, shape = self.ordered(), (0, 0)
        for batch in self:
            if card is not None and shape != (len(batch), batch.length):
                torch.cuda.empty_cache()
            shape = (len(batch), batch.length)
            if card is not None:
                torch.cuda.reset_peak_memory_stats(card)
            found, fits = None, True
            try:
                found = function(batch)
            except torch.OutOfMemoryError:
                fits = False
            if not fits:
                # Outside of the handler, which holds the frames that hold the batch's tensors.
                self.split(batch)
                shape = (0, 0)
                continue
            if card is not None:
                self.observe(torch.cuda.max_memory_reserved(card), batch)
            results.add(batch, found)
        return results.all()

    def ordered(self) -> OrderedResults:
        """A place for the results, which gives them in the order of the items."""
        return OrderedResults()

    # -- making batches --------------------------------------------------------------------------------------------

    def _of_stream(self) -> Iterator[TokenBatch]:
        """Windows of a stream, each sorted for itself: an item waits for no more than a window of others."""
        stream = enumerate(self._stream)
        while some := list(itertools.islice(stream, self.settings.window)):
            lengths = [length for _, (length, _) in some]
            items = {number: item for number, (_, item) in some}
            if min(lengths) < 1:
                raise UsageError("an item has no tokens", "Leave empty items out")
            self._check_alone(max(lengths))
            for batch in self._batches_of(list(items), lengths):
                batch.items = [items[number] for number in batch]
                yield batch

    def _batches_of(self, numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[TokenBatch]:
        """The batches of each bucket, as few as the bound allows and of nearly the same size."""
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        start = 0
        while start < len(order):
            padded, end = self._bucket(lengths, order, start)
            while start < end:
                count = -(-(end - start) // self.largest(padded))
                stop = start + -(-(end - start) // count)
                tokens = sum(lengths[place] for place in order[start:stop])
                yield TokenBatch(
                    (numbers[place] for place in order[start:stop]), length=padded, tokens=tokens
                )
                start = stop

    def _bucket(self, lengths: Sequence[int], order: list[int], start: int) -> tuple[int, int]:
        """The padded length and the end of the bucket that begins at `start`. See NOTE [Length buckets]."""
        longest = lengths[order[start]]
        padded = -(-longest // self.settings.multiple) * self.settings.multiple
        allowed = 1 - self.settings.max_padding
        if longest < allowed * padded or self.bound(1, padded) > self.settings.budget:
            padded = longest
        tokens, end = longest, start + 1
        while end < len(order):
            more = tokens + lengths[order[end]]
            if more < allowed * padded * (end + 1 - start):
                break
            tokens, end = more, end + 1
        return padded, end

    def largest(self, length: int) -> int:
        """Items of a length that the bound lets into a batch, at least one.

        The search doubles and then halves, since the bound does not fall as the batch grows.
        """
        scale = self.bound.scale(length)
        known = self._largest.get(length)
        if known is not None and known[0] == scale:
            return known[1]
        budget, most = self.settings.budget, self.settings.most_items
        found = largest_where(
            lambda items: self.bound(items, length) <= budget, Strategy(allowed=Multiples(most=most))
        )
        items = max(1, found.value)
        self._largest[length] = (scale, items)
        return items

    def _check_alone(self, longest: int) -> None:
        needed = self.bound(1, longest)
        if needed > self.settings.budget:
            raise UsageError(
                f"an item of {longest} tokens takes {needed:,.0f} bytes alone, and the budget is "
                f"{self.settings.budget:,}",
                "Give a larger budget, shorten the item, or run it in windows",
            )


class OrderedResults:
    """Results of batches, given back in the order of the items.

    >>> results = OrderedResults()
    >>> results.add([2, 0], ["c", "a"])
    >>> list(results.ready())
    ['a']
    >>> results.add([1], ["b"])
    >>> list(results.ready()), len(results)
    (['b', 'c'], 3)
    """

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        self._given = 0

    def __len__(self) -> int:
        """Results that came so far."""
        return self._given + len(self._results)

    def add(self, batch: Sequence[int], results: Any) -> None:
        """Take the results of a batch: a tensor, an array or a list, one entry for each of its items.

        Raises:
            UsageError: there are more or fewer of them, or an item has one already.
        """
        if not hasattr(results, "__len__"):
            raise UsageError(
                f"{shown(results)} came for a batch of {len(batch)}",
                "Give a list or tensor with one for each item",
            )
        if len(results) != len(batch):
            raise UsageError(
                f"{len(results)} results came for a batch of {len(batch)}", "Give one for each item"
            )
        for number, result in zip(batch, results, strict=True):
            if number in self._results or number < self._given:
                raise UsageError(f"item {number} has a result already", "Add each batch once")
            self._results[number] = result

    def ready(self) -> Iterator[Any]:
        """The results that are next in order, as far as they came; each is given once."""
        while self._given in self._results:
            found = self._results.pop(self._given)
            self._given += 1
            yield found

    def all(self) -> list[Any]:
        """The results that were not given yet, in order.

        Raises:
            UsageError: one in between is missing.
        """
        expected = range(self._given, self._given + len(self._results))
        missing = next((number for number in expected if number not in self._results), None)
        if missing is not None:
            raise UsageError(f"item {missing} has no result yet", "Add the results of every batch first")
        return list(self.ready())


def _present_card() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _rebuilt(numbers: list[int], length: int, tokens: int, items: list[Any]) -> TokenBatch:
    made = TokenBatch(numbers, length=length, tokens=tokens)
    made.items = items
    return made
