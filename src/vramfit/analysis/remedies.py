"""What helps against each cause of fragmentation, and what a replay says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.core import SMALL_SEGMENT
from vramfit.allocator.versions import TorchVersion, rules_for
from vramfit.trace import Rehearsal
from vramfit.units import MIB, format_bytes


class RemedyKind(Enum):
    """What to do."""

    LARGER_CARD = "a larger card"
    HOLD_LESS = "hold less"
    SPREAD = "spread over the cards"
    SMALLER_REQUEST = "ask for less at once"
    EXPANDABLE_SEGMENTS = "expandable segments"
    ALLOCATE_EARLIER = "allocate what lives long first"
    LARGEST_FIRST = "begin with the largest size"
    FEWER_SIZES = "fewer different sizes"
    ROUND_UP = "round requests up"
    LESS_ROUNDING = "round less"
    ONE_STREAM = "free and allocate on one stream"
    WAIT_EARLIER = "wait for the other stream earlier"
    PACK_SMALL = "pack small tensors"
    SHARE_POOL = "share the private pool"
    NO_MAX_SPLIT = "no max_split_size_mb"
    SMALLER_PAGES = "smaller pages"
    EMPTY_CACHE = "empty the cache between phases"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One thing that helps against a cause.

    Attributes:
        text: the advice in words.
        alloc_conf: the allocator settings to do it with; None where it is no setting.
        peak_reserved: peak of reserved bytes under these settings in a replay; None if it was not tried.
        baseline: that peak under the recorded settings, also in a replay on an empty card.
        ooms: requests that fail under them in the replay.
        baseline_ooms: failing requests under the recorded settings.
        computed: no replay is needed, for the recording itself has the figures of its effect.
    """

    kind: RemedyKind
    text: str
    alloc_conf: str | None = None
    peak_reserved: int | None = None
    baseline: int | None = None
    ooms: int = 0
    baseline_ooms: int = 0
    computed: bool = False

    @property
    def tested(self) -> bool:
        """Whether more than an idea: replayed, or computed from the recording. Reports print no others."""
        return self.computed or self.helps is not None

    @property
    def helps(self) -> bool | None:
        """Whether fewer requests fail in the replay, or as many at a lower peak of reserved bytes; None if untried."""
        if self.peak_reserved is None or self.baseline is None:
            return None
        return (self.ooms, self.peak_reserved) < (self.baseline_ooms, self.baseline)


def remedies_for(
    cause: str,
    config: AllocatorConfig,
    version: TorchVersion,
    *,
    capacity: int = 0,
    largest: int = 0,
    uneven: bool = False,
) -> tuple[Remedy, ...]:
    """What helps against a cause, the most likely first.

    Args:
        cause: name of the `CauseKind`.
        config: the settings of the trace.
        version: of torch, for the settings that it knows.
        capacity: for LIVE_MEMORY, the memory for the allocator.
        largest: for LIVE_MEMORY, the largest request that would have been served.
        uneven: for LIVE_MEMORY, other cards of the program hold far less.
    """
    plain = replace(config, max_split_size=None)
    found = list(_WORDS.get(cause, ()))
    if cause == "LIVE_MEMORY":
        return _live_memory(capacity, largest, uneven)
    if cause in _PAGES_HELP and not config.expandable_segments:
        found.insert(0, _setting(RemedyKind.EXPANDABLE_SEGMENTS, replace(plain, expandable_segments=True)))
    if cause in ("OVERSIZE_CACHED", "MAX_SPLIT_EXPANDABLE"):
        found.insert(0, _setting(RemedyKind.NO_MAX_SPLIT, plain))
        if not config.expandable_segments:
            pages = replace(plain, expandable_segments=True)
            found.insert(1, _setting(RemedyKind.EXPANDABLE_SEGMENTS, pages))
    if cause == "VARYING_SIZES":
        rounded = replace(config, roundup_power2_divisions=(8,) * len(config.roundup_power2_divisions))
        found.insert(1, _setting(RemedyKind.ROUND_UP, rounded))
    if cause == "ROUNDING" and max(config.roundup_power2_divisions) > 1:
        off = replace(config, roundup_power2_divisions=(0,) * len(config.roundup_power2_divisions))
        found.insert(0, _setting(RemedyKind.LESS_ROUNDING, off))
    if cause == "PAGE_EDGES" and rules_for(version).large_segment_size_option:
        least = 12 * MIB
        if config.large_segment_size > least:
            pages = replace(config, large_segment_size=least, max_non_split_rounding=least)
            found.insert(0, _setting(RemedyKind.SMALLER_PAGES, pages))
    return tuple(found)


def of_a_state(cause: str, given_back: int) -> tuple[Remedy, ...]:
    """What a state alone, without the requests that led to it, can tell to do against a cause.

    Args:
        cause: name of the `CauseKind`.
        given_back: bytes that ``empty_cache`` would give back.
    """
    if cause == "CACHED" and given_back:
        text = f"torch.cuda.empty_cache() would give back {format_bytes(given_back)} here"
        return (replace(_words(RemedyKind.EMPTY_CACHE, text), computed=True),)
    return _WORDS[cause] if cause in ("PENDING_FREE", "PRIVATE_POOL", "ROUNDING") else ()


def prove(rehearsal: Rehearsal, remedies: Iterable[Remedy]) -> dict[Remedy, Remedy]:
    """Each remedy with its outcome: allocator settings are tried by serving the trace's requests under them."""
    peaks: dict[str, tuple[int, int]] = {}

    def tried(conf: str) -> tuple[int, int]:
        if conf not in peaks:
            played = rehearsal.play(AllocatorConfig.parse(conf, torch_version=rehearsal.version))
            peaks[conf] = (played.peaks.peak_reserved, played.ooms)
        return peaks[conf]

    found: dict[Remedy, Remedy] = {}
    for remedy in remedies:
        if remedy.alloc_conf is None:
            found[remedy] = remedy
            continue
        baseline, failed = tried(rehearsal.config.to_string())
        peak, ooms = tried(remedy.alloc_conf)
        found[remedy] = replace(
            remedy, peak_reserved=peak, baseline=baseline, ooms=ooms, baseline_ooms=failed
        )
    return found


_PAGES_HELP = frozenset(
    {
        "LONG_LIVED_IN_HOLE",
        "INTERLEAVED",
        "GROWING_SIZES",
        "VARYING_SIZES",
        "SMALLER_SEGMENTS",
        "UNSPLIT_SLACK",
    }
)
_SETTING_TEXTS = {
    RemedyKind.EXPANDABLE_SEGMENTS: "let segments grow by pages, so that free pages can be used elsewhere",
    RemedyKind.NO_MAX_SPLIT: "leave max_split_size_mb out, so that free memory serves smaller requests too",
    RemedyKind.ROUND_UP: "round requests up, so that blocks of nearly the same size serve one another",
    RemedyKind.LESS_ROUNDING: "leave roundup_power2_divisions out",
    RemedyKind.SMALLER_PAGES: "use smaller pages, so that live blocks hold on to less beside them",
}


def _setting(kind: RemedyKind, config: AllocatorConfig) -> Remedy:
    return Remedy(kind=kind, text=_SETTING_TEXTS[kind], alloc_conf=config.to_string())


def _words(kind: RemedyKind, text: str) -> Remedy:
    return Remedy(kind=kind, text=text)


_EARLIER = _words(
    RemedyKind.ALLOCATE_EARLIER,
    "make what lives long (optimizer state, caches, copies of weights) before the temporaries of the first step, "
    "or keep it on the host",
)
_EMPTY = _words(
    RemedyKind.EMPTY_CACHE,
    "call torch.cuda.empty_cache() once between the phases: the cache is given back then, not in the middle of a step",
)
_PACK = _words(
    RemedyKind.PACK_SMALL,
    f"keep many small tensors as views of one large one: the small pool takes {format_bytes(SMALL_SEGMENT)} at a "
    "time, which large requests cannot use",
)
_WORDS: dict[str, tuple[Remedy, ...]] = {
    "LONG_LIVED_IN_HOLE": (_EARLIER,),
    "INTERLEAVED": (_EARLIER,),
    "GROWING_SIZES": (
        _words(
            RemedyKind.LARGEST_FIRST,
            "run the largest size first (a warm-up step of the longest sequence): its segments serve all smaller ones",
        ),
    ),
    "VARYING_SIZES": (
        _words(RemedyKind.FEWER_SIZES, "pad to a few sizes, so that blocks serve one another again"),
    ),
    "SMALLER_SEGMENTS": (_EMPTY,),
    "OTHER_STREAM": (
        _words(
            RemedyKind.ONE_STREAM,
            "make and free such tensors on one stream: the cache of a stream serves that stream alone",
        ),
    ),
    "PENDING_FREE": (
        _words(
            RemedyKind.WAIT_EARLIER,
            "let the streams that use a tensor (record_stream) get past it before more is allocated",
        ),
    ),
    "OTHER_POOL": (_PACK, _EMPTY),
    "PRIVATE_POOL": (
        _words(
            RemedyKind.SHARE_POOL, "let CUDA graphs share one pool (the pool argument of torch.cuda.graph)"
        ),
    ),
    "ROUNDING": (_PACK,),
    "CACHED": (_EMPTY,),
    "PAGE_EDGES": (_EARLIER,),
}


def _live_memory(capacity: int, largest: int, uneven: bool) -> tuple[Remedy, ...]:
    if not capacity:
        text = "a larger card: whatever the program does, its context stays"
        return (replace(_words(RemedyKind.LARGER_CARD, text), computed=True),)
    less = _words(
        RemedyKind.HOLD_LESS,
        "hold less at this moment: a smaller batch or sequence, activation checkpointing, a lower precision, "
        "offloading; no allocator setting helps",
    )
    found = [_words(RemedyKind.SPREAD, "move layers to the cards that hold less")] if uneven else []
    found.append(less)
    if largest:
        text = f"ask for at most {format_bytes(largest)} at once here, for instance in chunks"
        found.append(replace(_words(RemedyKind.SMALLER_REQUEST, text), computed=True))
    return tuple(found)
