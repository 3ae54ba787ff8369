"""What a program needs that ran out: in all, where it was run again without the card's limit, else at least."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from vramfit.allocator import AllocatorConfig
from vramfit.analysis.uncompiled import COMPILED, COMPILED_GRAPHS, RAN_EAGERLY
from vramfit.trace import CardLimit, Category, Estimate, EventKind, MemoryTrace, Rehearsal, Run
from vramfit.trace.outcome import GARBAGE_BYTES, GARBAGE_COLLECTED, End
from vramfit.trace.replay.players import WhatIfPlayer
from vramfit.units import format_bytes

_REPLAYED = 400_000
"""Events of a whole program up to which it is replayed with another setting: a report is to take seconds."""

ADDRESSES = "the driver's addresses decide which free blocks are split"

_CONVOLUTIONS = "cuDNN chooses the workspaces of convolutions"

_STOPPED = {
    End.TIME: "it was stopped after {seconds:.0f} s",
    End.INTERRUPTED: "it was interrupted",
    End.TERMINATED: "it was terminated",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a program needs of one card that ran out. Bytes throughout.

    Attributes:
        bytes: of the card, its context included.
        whole: what it needs in all, as a second run without the card's limit showed; otherwise a lower bound.
        context: what lies outside PyTorch.
        peak_allocated, peak_reserved: of the second run; None where there is none.
        below, above: by how much `bytes` may be lower and higher, since some sizes are estimates.
        collected: garbage was collected (``gc.collect()``) where memory ran short, so that only what lives counts.
        freed: the most that one of these collections freed.
        why_not: why it is not known in all, as a clause; empty where it is, and where nobody tried.
    """

    bytes: int
    whole: bool = False
    context: int = 0
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    below: int = 0
    above: int = 0
    collected: bool = False
    freed: int = 0
    why_not: str = ""

    def __repr__(self) -> str:
        return f"<Need: {'' if self.whole else 'at least '}{format_bytes(self.bytes)}>"

    @property
    def most(self) -> int:
        """The upper end of the error bar, by which a card is chosen."""
        return self.bytes + self.above


def lower_bound(run: Run, at_least: int) -> Need:
    """What is known where no second run showed anything.

    Args:
        run: the first run.
        at_least: what it showed.
    """
    again = run.again
    why_not = f"it was not run again, since {again.why_not}" if again is not None and again.why_not else ""
    return Need(bytes=at_least, why_not=why_not)


def shown_need(run: Run, second: Run, card: Need, at_least: int) -> Need:
    """What a second run showed.

    Args:
        run: the first run.
        second: the run without the card's limit.
        card: the figures of its fullest card, as if it had gone to the end.
        at_least: what the first run showed.
    """
    collected = (
        run.again is not None
        and run.again.limit is CardLimit.COLLECTED
        and int(second.trace.meta.get(GARBAGE_COLLECTED, 0)) > 0
    )
    freed = int(second.trace.meta.get(GARBAGE_BYTES, 0)) if collected else 0
    if why_not := _why_not(run, second, card, collected):
        return Need(bytes=max(at_least, card.bytes), collected=collected, freed=freed, why_not=why_not)
    return replace(card, whole=True, collected=collected, freed=freed)


def _why_not(run: Run, second: Run, card: Need, collected: bool) -> str:
    """Why a second run does not show what the program needs in all; empty where it does."""
    again, oom = "when it was run again without the card's limit", run.oom
    if second.progress.end in _STOPPED:
        return f"{_STOPPED[second.progress.end].format(seconds=second.seconds_wall)} {again}"
    if second.ran_out:
        return f"it ran out even {again}"
    if second.exit_code != 0:
        return f"it failed {again} ({second.error or f'exit code {second.exit_code}'})"
    reached = 0 if oom is None or collected else oom.allocated_bytes + oom.requested_bytes
    if (card.peak_allocated or 0) < reached:
        return f"it went another way {again}"
    return ""


def served_by_setting(second: Run, device: int, usable: int) -> str:
    """What a replay of the whole program says of expandable segments on the card, in words; empty if they do not help.

    Args:
        second: a whole run without the card's limit.
        device: the card.
        usable: bytes of it for the allocator.
    """
    trace = second.trace
    if len(trace) > _REPLAYED or usable <= 0:
        return ""
    rehearsal = Rehearsal(trace, device)
    config = rehearsal.config
    pages = replace(config, expandable_segments=True, max_split_size=None)
    if config.expandable_segments or not _played(rehearsal, config, usable).ooms:
        return ""  # the replay fits without it, so it proves nothing
    player = _played(rehearsal, pages, usable)
    if player.ooms:
        return ""
    reserved = format_bytes(player.allocator.peak_reserved_bytes)
    return (
        f"--alloc-conf expandable_segments:True: replayed with it, the whole program fits "
        f"({reserved} of the usable {format_bytes(usable)} reserved)"
    )


def _played(rehearsal: Rehearsal, config: AllocatorConfig, usable: int) -> WhatIfPlayer:
    player = WhatIfPlayer(rehearsal.plan, config, rehearsal.version, usable)
    rehearsal.run(player)
    return player


def estimate_cause(run: Run, device: int) -> str:
    """What the error bar of a card's peak comes from, as a clause; the largest part of it counts."""
    codes = {warning.code for warning in run.warnings}
    if RAN_EAGERLY in codes:
        return "torch.compile would save and drop other results than the program does without it"
    if codes & {COMPILED, COMPILED_GRAPHS}:
        return "what a card allocates while it compiles is estimated"
    weights: Counter[tuple[str, str]] = Counter()
    for estimate in run.estimates:
        if estimate.device == device:
            weights[_cause(run.trace, estimate)] += estimate.below + estimate.above
    if not weights:
        return "some sizes are estimated"
    (text, op), _ = weights.most_common(1)[0]
    return f"{text} ({op})" if op else text


def _cause(trace: MemoryTrace, estimate: Estimate) -> tuple[str, str]:
    """What leaves a request's size open, and its operator where that is not said with it."""
    if estimate.choice:  # of cuDNN's algorithms, which decide for several shapes at once
        return _CONVOLUTIONS, ""
    row = estimate.row
    if not estimate.taken or row >= len(trace) or trace.kind[row] != EventKind.ALLOC:
        return "closed libraries choose some workspaces", ""
    number = int(trace.op[row])
    op = trace.ops[number].removeprefix("aten.").split(".")[0] if number >= 0 else ""
    if "convolution" in op:
        return _CONVOLUTIONS, ""
    if trace.category[row] in (Category.WORKSPACES, Category.TEMPORARIES):
        return "a closed library chooses its workspaces", op
    return "data decide some sizes, which are assumed", op
