"""What a run shows that is worth a line of its own: attention that fell back, and a cache that fits no request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vramfit.analysis._verdict import NO_CARD, DeviceVerdict, Verdict
from vramfit.analysis.breakdown import Breakdown
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.occupancy import fragmentation
from vramfit.trace import EventKind, MemoryTrace, Run, Source
from vramfit.trace.outcome import AttentionFallback
from vramfit.units import MIB, format_bytes

ATTENTION_MATH = "attention-math"
TRY_TUNE = "try-tune"

_SCORES_SHARE = 0.1
"""Share of the peak from which scores are worth a line."""
_CACHED_SHARE = 0.5
"""Share of the reserved bytes that were cached when they grew to their peak, from which settings are worth a trial."""
_LEAST_CACHED = 256 * MIB
_TENSOR = re.compile(r"(?P<dtype>float16|bfloat16|float32|float64)\[(?P<sizes>[\d, ]+)\]")
_ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_BLOCK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """One line for the reader of a run.

    Attributes:
        code: short name of the kind of hint; docs/json.md lists them.
        message: for people, without the place.
        location: ``file:line`` of the program, None if it has none.
        bytes: the bytes that it is about.
    """

    code: str
    message: str
    location: str | None
    bytes: int


def hints(run: Run, verdict: Verdict) -> tuple[Hint, ...]:
    """The hints for the card that decides; none for a run without one."""
    device = verdict.device
    if device.index == NO_CARD or not device.peak_reserved or run.trace.is_state(device.index):
        return ()
    return (*_attention(run, device), *_cache(run, device))


# -- Attention that fell back to the math kernel ---------------------------------------------------------------


def _attention(run: Run, device: DeviceVerdict) -> Iterator[Hint]:
    """Calls of attention whose scores are a notable share of the peak, those of like shape together."""
    oom = run.oom if run.ran_out and run.oom is not None and run.oom.device == device.index else None
    wanted = 0 if oom is None else oom.requested_bytes
    whole = device.breakdown.allocated + wanted
    told: set[tuple[int, ...]] = set()
    for fallback in run.attention_fallbacks:
        key = (math.prod(fallback.scores), *fallback.scores[-2:])
        if key in told:
            continue
        told.add(key)
        held = _scores_bytes(device.breakdown, key)
        one = math.prod(fallback.scores) * _ELEMENT.get(fallback.scores_dtype, 4)
        failed = wanted if -(-one // _BLOCK) * _BLOCK == -(-wanted // _BLOCK) * _BLOCK else 0
        if whole and held + failed >= _SCORES_SHARE * whole:
            message = _attention_words(fallback, held, failed)
            yield Hint(code=ATTENTION_MATH, message=message, location=fallback.location, bytes=held + failed)


def _scores_bytes(breakdown: Breakdown, key: tuple[int, ...]) -> int:
    """Bytes at the peak of tensors with the elements and the last two sizes of some scores."""
    total = 0
    for group in breakdown.tensors:
        found = _TENSOR.fullmatch(group.tensor)
        if found is None:
            continue
        sizes = [int(size) for size in found["sizes"].split(",")]
        if (math.prod(sizes), *sizes[-2:]) == key:
            total += group.total_bytes
    return total


def _attention_words(fallback: AttentionFallback, held: int, failed: int) -> str:
    why = "; ".join(f"{refusal.kernel} {refusal.why}" for refusal in fallback.refused)
    amount = format_bytes(held + failed)
    asked = f", of which {format_bytes(failed)} could not be had" if failed and held else ""
    return (
        f"scaled_dot_product_attention ran the math kernel for {fallback.dtype} ({why}): its scores of "
        f"{fallback.scores_dtype}{list(fallback.scores)} take {amount}{asked}"
    )


# -- Cached blocks that no request fitted ------------------------------------------------------------------------


def cached_at_growth(trace: MemoryTrace, device: int) -> tuple[int, int]:
    """Reserved bytes at their peak, and how many of them were free and did not fit the request that took the last ones.

    Free memory that is larger than that request, of another stream or pool, does not count: it is not the sizes that
    keep it from being used.
    """
    found = DeviceTimeline.of(trace, device)
    reserved = found.curves.reserved
    if not len(reserved) or int(reserved.max()) <= 0:
        return 0, 0
    row = int(np.argmax(reserved))
    served = np.flatnonzero((trace.device[row:] == device) & (trace.kind[row:] == EventKind.ALLOC))
    grows = trace.kind[row] in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP)
    if not grows or not len(served):
        return int(reserved[row]), 0
    request = row + int(served[0])
    free = fragmentation(trace, found.lives, row - 1).largest_free
    cached = int(reserved[row] - found.curves.active[request])
    return int(reserved[row]), cached if free < int(trace.size[request]) else 0


def _cache(run: Run, device: DeviceVerdict) -> Iterator[Hint]:
    """That settings of the allocator are worth a trial."""
    if run.source is Source.CPU:
        return
    reserved, cached = cached_at_growth(run.trace, device.index)
    if cached < max(_LEAST_CACHED, _CACHED_SHARE * reserved):
        return
    message = (
        f"{format_bytes(cached)} of the {format_bytes(reserved)} reserved were cached blocks that fitted no request; "
        "other allocator settings may need less: add --trace run.vft to this command, then vramfit tune run.vft"
    )
    yield Hint(code=TRY_TUNE, message=message, location=None, bytes=cached)
