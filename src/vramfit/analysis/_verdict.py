"""Whether a run fits its cards, by how much, and why not: a virtual run in, one value out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from vramfit.analysis._growth import NO_GROWTH, Growth, growth
from vramfit.analysis._kept import KeptMemory, kept, with_holders
from vramfit.analysis._leaks import leaks
from vramfit.analysis._phases import phases
from vramfit.analysis.breakdown import Breakdown, Moment, at, oom_row, peak
from vramfit.analysis.held_memory import held
from vramfit.analysis.need import ADDRESSES, Need, estimate_cause, lower_bound, served_by_setting, shown_need
from vramfit.analysis.shortage import Shortage, context_alone
from vramfit.analysis.uncompiled import RAN_EAGERLY, CompiledBar, compiled_bar
from vramfit.gpus import GpuKind, GpuSpec, catalogue
from vramfit.trace import (
    NO_BAR,
    DeviceOutcome,
    Frame,
    OomReport,
    ReservedBar,
    Run,
    Source,
    reserved_bar,
)
from vramfit.trace.address_bar import NO_ADDRESS_BAR, AddressBar, address_bar
from vramfit.units import MIB, format_bytes

NO_CARD = -1
"""Index of what stands in for the card where CUDA_VISIBLE_DEVICES hides them all from the program."""

_ROOM = 1.03  # contexts and allocators differ a little from card to card
_LARGER = 1.05
"""How much larger a card must be to be offered in place of one that ran out."""

_UNBOUNDED = (
    "size-without-bound",
    "op-without-rule",
    "blocks-await-streams",
    "compiled-autotune",
    RAN_EAGERLY,
)
"""Warnings that leave the error bar without a guarantee."""

VARIES = 130 * MIB
"""By how much the memory of a card differs from driver to driver: NVML of three cards, each under a driver of its own,
saw 70 to 130 MiB more than the totals that are known of the same cards elsewhere."""


_TESTED = 5
"""Fewest steps whose memory is looked at by allocating stack: with fewer nothing can be said of any."""


class Outcome(Enum):
    """How a run ended."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    FAILED = "failed"
    """The program failed for a reason other than memory before it was known whether it fits."""
    FITS_SO_FAR = "fits so far"
    """It was interrupted or terminated, and until then it fitted."""
    UNUSED = "the card was not used"
    """The program ended well without ever using a card, so that nothing can be said."""
    UNKNOWN = "unknown"
    """A recording that does not say how large its card is, and did not run out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceVerdict:
    """One card. Bytes throughout.

    Attributes:
        peak_allocated: highest bytes allocated over the run.
        peak_reserved: highest bytes held from the driver over the run.
        peak_active: highest bytes allocated or awaited by a stream.
        headroom: total less context less peak reserved.
        breakdown: where the bytes are: at the peak of allocated memory, or, where the run ended by running
            out on this card, at that moment.
        error_below: bytes by which the peak of allocated bytes may be lower, since some sizes are estimates.
        error_above: bytes by which that peak may be higher.
        reserved_bar: the error bar of the peak of reserved bytes, on which the verdict rests.
        addresses: what of these bars comes from the driver's addresses, which nobody knows beforehand.
    """

    index: int
    gpu: str
    total: int
    context: int
    peak_allocated: int
    peak_reserved: int
    peak_active: int
    headroom: int
    breakdown: Breakdown
    error_below: int = 0
    error_above: int = 0
    reserved_bar: ReservedBar = NO_BAR
    addresses: AddressBar = NO_ADDRESS_BAR

    @property
    def above(self) -> int:
        """Bytes by which the peak may be higher than it is told: the upper end of its error bar."""
        return max(self.error_above, self.reserved_bar.above)

    @property
    def below(self) -> int:
        """Bytes by which the peak may be lower than it is told."""
        return self.reserved_bar.below

    @property
    def used(self) -> int:
        """Bytes of the card that are taken at the peak: reserved and the context."""
        return self.peak_reserved + self.context

    @property
    def is_used(self) -> bool:
        """Whether the program used the card at all."""
        return bool(self.context or self.peak_reserved or self.peak_allocated)

    @property
    def has_room(self) -> bool:
        """Whether the CUDA context leaves anything of the card, as far as its memory is known."""
        return not self.total or self.context < self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a run says about its memory.

    Attributes:
        devices: one verdict per card, by index; never empty (see `NO_CARD`).
        critical: index (into ``devices``) of the card that ran out, else of the fullest one.
        oom: the request that could not be served, also if the program caught it.
        short_by: bytes that were missing for that request, when everything releasable had been released, or for the
            context where nothing ran out; 0 if none.
        line: the user's line at which it ran out.
        moment: what the program was doing then.
        smallest_gpu: the smallest card of the catalogue that holds the whole program at the upper end of the error bar;
            None if none does, and where it is not known what the program needs in all.
        needed: bytes that the program needs of a card, with this card's context; each other card counts its own. Where
            it ran out, see `need`.
        any_batch: False where what does not depend on the batch exceeds the card, so that no batch fits.
        why: the reasons in words, most important first; empty for a run that fits.
        advice: what was tried and helps, in words.
        close: the card's memory decides by less than it differs from driver to driver.
        growth: what the iterations leave behind.
        kept: what the program keeps with each step, epoch, or pass of an evaluation.
        grows_by: bytes by which what every iteration holds grows from one to the next; 0 where nothing leaks.
        runs_out_at: the iteration about which memory runs out if it goes on growing; None where nothing leaks, or
            memory ran out already.
        bounded: whether the error bar covers everything that was not followed. False if a size depends on data without
            a bound, an op has no rule, code that should be compiled ran eagerly, or kernels would be
            chosen by timing.
        need: what it needs, where it ended by running out; None otherwise.
        bar_cause: what the error bar of the deciding card comes from, as a clause; empty without a bar.
    """

    outcome: Outcome
    devices: tuple[DeviceVerdict, ...]
    critical: int
    oom: OomReport | None
    short_by: int
    line: Frame | None
    moment: Moment | None
    smallest_gpu: GpuSpec | None
    needed: int
    why: tuple[str, ...]
    advice: tuple[str, ...]
    bounded: bool = True
    close: bool = False
    growth: Growth = NO_GROWTH
    kept: tuple[KeptMemory, ...] = ()
    grows_by: int = 0
    runs_out_at: int | None = None
    any_batch: bool = True
    need: Need | None = None
    bar_cause: str = ""

    def __repr__(self) -> str:
        used, total = format_bytes(self.device.used), format_bytes(self.device.total)
        return f"<Verdict: {self.outcome.value}, {used} of {total} used on {self.device.gpu or 'the card'}>"

    @property
    def device(self) -> DeviceVerdict:
        """The card that decides."""
        return self.devices[self.critical]

    @property
    def fits(self) -> bool | None:
        """True or false; None if the program failed otherwise, was interrupted, or no card is known or was used."""
        known = self.outcome in (Outcome.FITS, Outcome.DOES_NOT_FIT)
        return self.outcome is Outcome.FITS if known else None

    @property
    def certain(self) -> bool:
        """Whether the answer stays the same over the whole error bars of the peaks, and these bars hold."""
        return self.bounded and self.within_bar

    @property
    def within_bar(self) -> bool:
        """Whether the answer stays the same over the whole error bars of the peaks, allocated and reserved."""
        device, need = self.device, self.need
        if self.outcome is Outcome.DOES_NOT_FIT:
            if need is not None and need.collected:
                return not device.reserved_bar.serves
            below = max(device.error_below, 0 if need is None else need.below)
            return not device.reserved_bar.serves and self.needed - below > device.total
        fits = self.outcome in (Outcome.FITS, Outcome.FITS_SO_FAR)
        return fits and device.above <= device.headroom


def verdict(run: Run, *, tensors: int = 100, cards: Iterable[GpuSpec] | None = None) -> Verdict:
    """Judge a run.

    A run does not fit if it ended by running out of memory, or if the card is too small for the CUDA context alone. A
    program that caught the error and finished well fits otherwise: it may have been looking for the largest batch that
    does.

    Args:
        run: a run on virtual cards.
        tensors: how many groups of tensors each breakdown keeps.
        cards: among which the smallest that would do is sought; None means the catalogue.
    """
    found = _judged(run, tensors, catalogue() if cards is None else tuple(cards))
    return replace(
        found,
        bounded=all(warning.code not in _UNBOUNDED for warning in run.warnings),
        close=run.source is not Source.CARD and _is_close(found),
        **_growth(run, found),
    )


def _growth(run: Run, found: Verdict) -> dict[str, Any]:
    """What grows, as fields of the verdict."""
    device = found.device
    grown = growth(phases(run.trace, device.index))
    report = leaks(run.trace, device.index) if len(grown.iterations) >= _TESTED else None
    each = kept(run.trace, device.index, grown, report)
    if each:
        each = with_holders(each, held(run.trace, device.index))
    by_steps = [one for one in each if one.every]
    rate = sum(one.bytes_each // one.every for one in by_steps)
    goes_on = bool(rate) and found.fits is not False and device.total > 0
    last = grown.iterations[-1] if grown.iterations else 0
    return {
        "growth": grown,
        "kept": each,
        "grows_by": rate,
        "runs_out_at": last + max(0, device.headroom) // rate + 1 if goes_on else None,
    }


def _is_close(found: Verdict) -> bool:
    """Whether the answer could be another with a card of the catalogue under another driver."""
    device = found.device
    if found.fits is None or not any(
        card.name == device.gpu and card.total_bytes == device.total for card in catalogue()
    ):
        return False  # a size that someone chose is that size
    if found.fits:
        return device.headroom < VARIES
    collected = found.need is not None and found.need.collected
    return not collected and found.needed - device.total < VARIES


def _judged(run: Run, tensors: int, offered: tuple[GpuSpec, ...]) -> Verdict:
    """The verdict, apart from what limits it and what comes after the run."""
    ran_out = run.ran_out
    outcome = _outcome(run)
    devices = tuple(_device(run, found, ran_out, tensors) for found in run.devices) or (_no_card(run),)
    critical = _critical(devices, run.oom if ran_out else None)
    decisive = devices[critical]
    if outcome in (Outcome.FITS, Outcome.FITS_SO_FAR):
        if not decisive.total and decisive.index != NO_CARD:
            outcome = Outcome.UNKNOWN
        elif not any(device.is_used for device in devices):
            outcome = Outcome.UNUSED
        elif not decisive.has_room:
            outcome = Outcome.DOES_NOT_FIT
    cause = _bar_cause(run, decisive)
    if ran_out and run.oom is not None:
        return _ran_out(run, run.oom, devices, critical, offered, cause)
    return Verdict(
        outcome=outcome,
        devices=devices,
        critical=critical,
        oom=run.oom,
        short_by=0 if decisive.has_room else decisive.context - decisive.total,
        line=None,
        moment=None,
        smallest_gpu=_smallest_gpu(decisive.used - decisive.context + decisive.above, offered),
        needed=decisive.used,
        why=() if decisive.has_room else (context_alone(decisive.context, decisive.total),),
        advice=(),
        bar_cause=cause,
    )


def _ran_out(
    run: Run,
    oom: OomReport,
    devices: tuple[DeviceVerdict, ...],
    critical: int,
    offered: tuple[GpuSpec, ...],
    cause: str,
) -> Verdict:
    """The verdict of a run that ended by running out."""
    decisive = devices[critical]
    shortage = Shortage(
        oom=oom,
        breakdown=decisive.breakdown,
        context=decisive.context,
        total=decisive.total,
        used=decisive.used,
    )
    second = None if run.again is None else run.again.run
    need, cause = _need(run, shortage, cause)
    enough = need.collected and need.most <= decisive.total
    # What an allocator reserves hangs on the card a little, so one of the same class is not offered.
    least = 0 if enough else decisive.total * _LARGER
    larger = [card for card in offered if card.total_bytes >= least]
    advice = list(shortage.advice(need))
    if need.whole and second is not None and not need.collected and shortage.is_fragmented:
        advice += filter(None, [served_by_setting(second, oom.device, shortage.usable)])
    return Verdict(
        outcome=Outcome.DOES_NOT_FIT,
        devices=devices,
        critical=critical,
        oom=oom,
        short_by=max(
            0,
            oom.requested_bytes - oom.free_bytes - decisive.breakdown.fragmentation.releasable,
            _beyond(decisive, shortage.reached),
        ),
        line=oom.user_line,
        moment=decisive.breakdown.moment,
        smallest_gpu=_smallest_gpu(need.most - need.context, larger) if need.whole else None,
        needed=need.bytes,
        why=tuple(shortage.reasons()),
        advice=tuple(advice),
        any_batch=shortage.any_batch,
        need=need,
        bar_cause=cause,
    )


def _need(run: Run, shortage: Shortage, cause: str) -> tuple[Need, str]:
    """What a program needs that ran out, and what its error bar comes from."""
    second = None if run.again is None else run.again.run
    if second is None or not second.devices:
        return lower_bound(run, shortage.needed), cause
    cards = [_device(second, outcome, second.ran_out, 1) for outcome in second.devices]
    fullest = max(cards, key=lambda card: card.used)
    card = Need(
        bytes=fullest.used,
        context=fullest.context,
        peak_allocated=fullest.peak_allocated,
        peak_reserved=fullest.peak_reserved,
        below=fullest.below,
        above=fullest.above,
    )
    return shown_need(run, second, card, shortage.needed), _bar_cause(second, fullest)


def _bar_cause(run: Run, card: DeviceVerdict) -> str:
    """What a card's error bar mostly comes from, as a clause; empty without a bar."""
    width = card.below + card.above
    if not width:
        return ""
    if 2 * (card.addresses.below + card.addresses.above) >= width:
        return ADDRESSES
    return estimate_cause(run, card.index)


def _outcome(run: Run) -> Outcome:
    """How a run ended, before its cards are looked at."""
    if run.ran_out:
        return Outcome.DOES_NOT_FIT
    if run.progress.was_asked_for:
        return Outcome.FITS
    if run.progress.is_cut:
        return Outcome.FITS_SO_FAR
    return Outcome.FAILED if run.exit_code != 0 else Outcome.FITS


def _device(run: Run, found: DeviceOutcome, ran_out: bool, tensors: int) -> DeviceVerdict:
    row = None
    if ran_out and run.oom is not None and run.oom.device == found.index:
        row = oom_row(run.trace, found.index)
    if row is None:
        breakdown = peak(run.trace, found.index, tensors=tensors)
    else:
        breakdown = _with_request(at(run.trace, row, found.index, tensors=tensors), run.oom)
    bar = reserved_bar(run.trace, found.index, run.estimates)
    compiled = compiled_bar(run.warnings, breakdown.categories)
    if compiled != CompiledBar():
        ran_out_here = ran_out and run.oom is not None and run.oom.device == found.index
        bar = replace(
            bar,
            below=bar.below + compiled.reserved_below,
            above=bar.above + compiled.reserved_above,
            serves=bar.serves or (ran_out_here and _serves(run, breakdown, compiled)),
        )
    elsewhere = NO_ADDRESS_BAR
    if not ran_out and run.source is Source.VIRTUAL and run.trace.meta.get("source") == "virtual":
        elsewhere = address_bar(run.trace, found.index)
        bar = replace(
            bar, below=bar.below + elsewhere.reserved_below, above=bar.above + elsewhere.reserved_above
        )
    return DeviceVerdict(
        index=found.index,
        gpu=found.gpu,
        total=found.total_bytes,
        context=found.context_bytes,
        peak_allocated=found.peak_allocated_bytes,
        peak_reserved=found.peak_reserved_bytes,
        peak_active=found.peak_active_bytes,
        headroom=found.total_bytes - found.context_bytes - found.peak_reserved_bytes,
        breakdown=breakdown,
        error_below=max(found.error_below_bytes, bar.allocated_below)
        + compiled.below
        + elsewhere.allocated_below,
        error_above=max(found.error_above_bytes, bar.allocated_above)
        + compiled.above
        + elsewhere.allocated_above,
        reserved_bar=bar,
        addresses=elsewhere,
    )


def _serves(run: Run, breakdown: Breakdown, bar: CompiledBar) -> bool:
    """Whether the request that failed may be served within a bar that no replay tried."""
    oom, released = run.oom, breakdown.fragmentation.releasable
    return oom is not None and oom.requested_bytes - oom.free_bytes - released <= bar.reserved_below


def _no_card(run: Run) -> DeviceVerdict:
    """What stands for the card of a program that saw none."""
    return DeviceVerdict(
        index=NO_CARD,
        gpu="no card",
        total=0,
        context=0,
        peak_allocated=0,
        peak_reserved=0,
        peak_active=0,
        headroom=0,
        breakdown=peak(run.trace, NO_CARD),
    )


def _with_request(breakdown: Breakdown, oom: OomReport | None) -> Breakdown:
    """The breakdown with the op and line of the failed request, which its event does not hold."""
    if oom is None:
        return breakdown
    moment = breakdown.moment
    return replace(
        breakdown, moment=replace(moment, op=moment.op or oom.op, line=moment.line or oom.user_line)
    )


def _beyond(device: DeviceVerdict, needed: int) -> int:
    """Bytes beyond a budget that was exceeded before the program began; 0 where it was not."""
    return needed - device.total if device.has_room and 0 < device.total < device.used else 0


def _critical(devices: tuple[DeviceVerdict, ...], oom: OomReport | None) -> int:
    """Position of the card that ran out, else of the fullest; the first of equals."""
    for position, device in enumerate(devices):
        if oom is not None and device.index == oom.device:
            return position
    return max(
        range(len(devices)), key=lambda position: devices[position].used / max(1, devices[position].total)
    )


def _smallest_gpu(reserved: int, cards: Iterable[GpuSpec]) -> GpuSpec | None:
    """The smallest card outside laptops and boards with ``reserved`` bytes beside its context, and some to spare."""
    order = (GpuKind.DESKTOP, GpuKind.DATACENTER, GpuKind.WORKSTATION)
    enough = [
        card
        for card in cards
        if card.kind in order and card.total_bytes >= (reserved + card.typical_context_bytes) * _ROOM
    ]
    return min(enough, key=lambda card: (card.total_bytes, order.index(card.kind), card.name), default=None)
