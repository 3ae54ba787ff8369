"""Would a request that ran out of memory have fitted otherwise? Each answer is tried on a replica of the allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.allocator import AllocatorConfig, CachingAllocator, OutOfMemory
from vramfit.allocator.core import MIN_BLOCK
from vramfit.analysis._lifetimes import Lifetimes
from vramfit.trace import Capacity, EventKind, MemoryTrace, Rehearsal
from vramfit.trace.replay.players import OomPlayer

_LARGER_CARD = 16
"""How many times the card's memory and the failed request it is tried with, to see what it lacked."""


class WhatIf(Enum):
    """What could have been otherwise."""

    AS_RECORDED = "as recorded"
    """Nothing: the same settings on a card of its own. It must miss, or the replay is no proof."""
    EMPTY_CACHE = "after empty_cache"
    """The program had called ``torch.cuda.empty_cache()`` right before."""
    EXPANDABLE_SEGMENTS = "with expandable segments"
    """Segments had grown by pages from the start of the trace, without a limit to splitting."""
    DEFAULT_SETTINGS = "with the default settings"
    """No setting had been given."""
    DEFRAGMENTED = "defragmented"
    """All blocks had lain side by side, each only as large as its request rounded to 512 bytes."""


class Fit(Enum):
    """Whether it would have fitted."""

    FITS = "fits"
    MISSES = "misses"
    MISSES_EARLIER = "misses earlier"
    """Another request would have failed before this one was reached."""


class OomVerdict(Enum):
    """What would have served the request; of several the first in this order."""

    EMPTY_CACHE = "after empty_cache"
    EXPANDABLE_SEGMENTS = "with expandable segments"
    DEFAULT_SETTINGS = "with the default settings"
    DEFRAGMENTED = "only defragmented"
    """No setting tried would, but the bytes would suffice."""
    NOT_AT_ALL = "not at all"
    """What is alive and the request are more than there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfAnswer:
    """One what-if.

    Attributes:
        what: what is otherwise.
        fit: whether the request is served then.
        margin: bytes that would be left on the card when it is served and the cache given back; negative: bytes
            that are missing.
        alloc_conf: the settings it was tried with, None where it was no matter of settings.
    """

    what: WhatIf
    fit: Fit
    margin: int
    alloc_conf: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OomExplanation:
    """A request that failed, and what would have served it.

    Attributes:
        row: the event.
        requested: bytes of the request, rounded.
        stream: its stream.
        capacity: memory for the allocator, and what tells it.
        answers: one for each what-if.
        largest_request: the largest request that could have been served then, on this stream, in bytes.
        reproduced: the same settings on a card of its own miss too; False means that the answers are no proof.
        verdict: what would have served it.
    """

    row: int
    requested: int
    stream: int
    capacity: Capacity
    answers: tuple[WhatIfAnswer, ...]
    largest_request: int
    reproduced: bool
    verdict: OomVerdict

    def answer(self, what: WhatIf) -> WhatIfAnswer | None:
        """The answer to one what-if; None if it was not asked."""
        return next((found for found in self.answers if found.what is what), None)


def explain_oom(trace: MemoryTrace, lives: Lifetimes, row: int) -> OomExplanation:
    """What would have served the request that failed at event ``row`` of ``lives.device``.

    The requests of the whole trace up to there are served again for each what-if, on a card with as much memory as
    there was at that moment.
    """
    device = lives.device
    rehearsal = Rehearsal(trace, device)
    failures = np.flatnonzero((trace.device == device) & (trace.kind == EventKind.OOM))
    which = int(np.searchsorted(failures, row))
    config = rehearsal.config
    player = rehearsal.until_oom(config, which)
    recorded = _try(player, which, WhatIf.AS_RECORDED, None)
    largest = _largest(player) if recorded.fit is Fit.MISSES else 0
    answers = [recorded]
    emptied = rehearsal.until_oom(config, which)
    emptied.allocator.empty_cache()
    answers.append(_try(emptied, which, WhatIf.EMPTY_CACHE, None))
    for what, other in _settings(config):
        tried = rehearsal.until_oom(other, which)
        answers.append(_try(tried, which, what, other.to_string()))
    size = int(trace.size[row])
    packed = _packed(lives, row)
    margin = rehearsal.capacity.bytes - packed - _rounded(size)
    answers.append(
        WhatIfAnswer(
            what=WhatIf.DEFRAGMENTED,
            fit=Fit.FITS if margin >= 0 else Fit.MISSES,
            margin=margin,
        )
    )
    return OomExplanation(
        row=row,
        requested=size,
        stream=int(trace.stream[row]),
        capacity=rehearsal.capacity,
        answers=tuple(answers),
        largest_request=largest,
        reproduced=recorded.fit is Fit.MISSES,
        verdict=_verdict(answers),
    )


def _settings(config: AllocatorConfig) -> list[tuple[WhatIf, AllocatorConfig]]:
    """Other settings worth a try."""
    found = []
    plain = AllocatorConfig()
    if not config.expandable_segments or config.max_split_size is not None:
        pages = replace(config, expandable_segments=True, max_split_size=None)
        found.append((WhatIf.EXPANDABLE_SEGMENTS, pages))
    if config.to_string() and config != plain:
        found.append((WhatIf.DEFAULT_SETTINGS, plain))
    return found


def _packed(lives: Lifetimes, row: int) -> int:
    """Bytes of everything that is in use, each block only as large as it has to be."""
    sizes = lives.size[lives.active(row)]
    return int((-(-sizes // MIN_BLOCK) * MIN_BLOCK).sum())


def _rounded(size: int) -> int:
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _try(player: OomPlayer, before: int, what: WhatIf, alloc_conf: str | None) -> WhatIfAnswer:
    """Serve the request that failed, or find out what it lacks."""
    allocator, driver, failed = player.allocator, player.allocator.driver, player.failed
    assert failed is not None  # the trace has the event
    if player.ooms > before:
        return WhatIfAnswer(what=what, fit=Fit.MISSES_EARLIER, margin=0, alloc_conf=alloc_conf)
    try:
        address = allocator.malloc(failed.size, failed.stream)
    except OutOfMemory:
        card = driver.total_bytes
        # A segment may be larger than the card itself.
        driver.total_bytes = (card + failed.size + allocator.config.large_segment_size) * _LARGER_CARD
        address = allocator.malloc(failed.size, failed.stream)
        margin = card - driver.mapped_bytes
        _undo(allocator, address)
        driver.total_bytes = card
        return WhatIfAnswer(what=what, fit=Fit.MISSES, margin=margin, alloc_conf=alloc_conf)
    allocator.empty_cache()
    return WhatIfAnswer(what=what, fit=Fit.FITS, margin=driver.free_bytes, alloc_conf=alloc_conf)


def _undo(allocator: CachingAllocator, address: int) -> None:
    allocator.free(address)
    allocator.empty_cache()


def _largest(player: OomPlayer) -> int:
    """The largest request that is served, found by asking; one of 512 bytes more fails."""
    assert player.failed is not None
    allocator, stream = player.allocator, player.failed.stream
    low, high = 0, _rounded(player.failed.size) // MIN_BLOCK
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _undo(allocator, allocator.malloc(middle * MIN_BLOCK, stream))
            low = middle
        except OutOfMemory:
            high = middle
    return low * MIN_BLOCK


def _verdict(answers: list[WhatIfAnswer]) -> OomVerdict:
    fits = {answer.what for answer in answers if answer.fit is Fit.FITS}
    for what, verdict in (
        (WhatIf.EMPTY_CACHE, OomVerdict.EMPTY_CACHE),
        (WhatIf.EXPANDABLE_SEGMENTS, OomVerdict.EXPANDABLE_SEGMENTS),
        (WhatIf.DEFAULT_SETTINGS, OomVerdict.DEFAULT_SETTINGS),
        (WhatIf.DEFRAGMENTED, OomVerdict.DEFRAGMENTED),
    ):
        if what in fits:
            return verdict
    return OomVerdict.NOT_AT_ALL
