"""What several programs take side by side on one card: what fits, what each may have, and when their peaks meet.

NOTE [Processes on one card]
Every process has a CUDA context of its own, and an allocator of its own that keeps what it once reserved: memory that
is cached in one process is lost to the others, whatever it holds live. So peaks of *reserved* memory add up, and the
sum is what fits or not, whenever each program runs. What is live at once matters only where caches are given back.

Time slicing, what a card does by itself with several processes, changes nothing of that: all contexts and all memory
stay on the card, nothing is swapped out, and the seconds add up. Under MPS kernels of several processes run at once.
From Volta on each client keeps an address space of its own, and little of the context is shared (NVIDIA, Multi-Process
Service, "Reduced On-GPU Context Storage": "to a much lesser degree"). See MPS_SERVER and MPS_MORE for figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations

from vramfit.analysis._lifetimes import Measure
from vramfit.analysis.breakdown import Moment, moment
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.live_curves import (
    TICKS,
    JointPeak,
    LiveCurve,
    best_shifts,
    run_curve,
    started_peak,
    step_curve,
    stepped_peak,
)
from vramfit.analysis.process_limits import (
    REPLAYED_EVENTS,
    EmptiedBetweenSteps,
    LeastLimit,
    expandable_peak,
    least_limit,
    parked,
)
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.trace import DeviceOutcome, Rehearsal, Run
from vramfit.trace.estimates import reserved_bar
from vramfit.units import MIB, format_bytes

MOST_PROGRAMS = 12
"""Programs that are looked at together: every set of them is weighed."""

MPS_SERVER = 26 * MIB
"""What nvidia-cuda-mps-server itself holds. nvidia-smi shows 25 MiB on a T4 with driver 460.32 (Microsoft, Azure Stack
Edge Pro, "Use GPU sharing", output with MPS) and 26 MiB on one with driver 535.161 (Oakwoo/seed-emulator,
examples/basic/A36_Nvidia_MPS/MPS_Tutorial.md); the clients show 98 MiB each there, 100 MiB without MPS."""
MPS_MORE = 131 * MIB
"""What each client may take beyond that: in the second of these logs the card shows 1,417 MiB with five clients under
MPS, and 761 MiB without. In the first it shows 242 MiB, which is what its processes add up to."""
_SHARED_CONTEXT = (7, 0)
"""Compute capability below which all clients of MPS share one context (NVIDIA, Multi-Process Service, "Volta MPS")."""

_FRACTIONS = 10**6
"""Parts of a card in which ``per_process_memory_fraction`` is given."""
_SAME_STEP = 0.01
"""Steps that differ by less count as of one length: their shift lasts for some fifty steps."""


class SharingOutcome(Enum):
    """Whether programs fit side by side, and what that needs."""

    FITS = "fits"
    """As they are."""
    WITH_LIMITS = "fits_with_limits"
    """With a limit of memory for each, within which its requests were seen to be served."""
    IN_TURNS = "fits_in_turns"
    """If one at a time runs a step and the others, between two steps, have given their cache back."""
    DOES_NOT_FIT = "does_not_fit"
    """Not even so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedProcess:
    """One of the processes. Sizes are bytes; peaks are of the whole run.

    Attributes:
        name: what it is called.
        context: taken outside torch.
        reserved, allocated: peaks.
        reserved_above: by how much the peak of reserved memory may be higher, sizes being estimated.
        fits_alone: whether it ran to its end on the card by itself.
        least: the smallest limit within which its requests are served; None where the trace is too long to
            replay, or the program ran out by itself.
        expandable: peak of reserved memory with expandable segments; None as well.
        between_steps: what it holds between two steps; None where its trace shows no steps.
        seconds: of the run, by the clock of the trace; simulated on a virtual GPU.
        step_seconds: of its last whole step; None without steps.
        fraction: ``per_process_memory_fraction`` to give it; None where no limits fit.
    """

    name: str
    context: int
    reserved: int
    allocated: int
    reserved_above: int = 0
    fits_alone: bool = True
    least: LeastLimit | None = None
    expandable: int | None = None
    between_steps: EmptiedBetweenSteps | None = None
    seconds: float = 0.0
    step_seconds: float | None = None
    fraction: float | None = None

    @property
    def total(self) -> int:
        """What it takes of the card at its peak."""
        return self.context + self.reserved

    @property
    def smallest(self) -> int:
        """The least that it was seen to do with, its context aside."""
        return self.reserved if self.least is None else min(self.reserved, self.least.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class JointMoment:
    """When programs that start at once hold the most live memory together.

    Attributes:
        bytes: the sum.
        seconds: after the start.
        parts: live bytes of each process then.
        moments: what each is doing; None for one that is over.
    """

    bytes: int
    seconds: float
    parts: tuple[int, ...]
    moments: tuple[Moment | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeeting:
    """What steps that repeat hold at once, all live memory, in bytes.

    Attributes:
        together: if all begin their step at once.
        apart: at the best shifts.
        shifts: these, each as a part of a step; the first is 0.
        sum_of_peaks: what it comes to when the peaks meet.
        keeps: whether the steps are of one length, so that a shift lasts; otherwise they drift, and the peaks meet.
        meet_every_seconds: how often the steps of two programs come to the same shift again; None if they keep it,
            and for more than two.
        in_turns: if one at a time runs its step while the others wait between two steps.
    """

    together: int
    apart: int
    shifts: tuple[float, ...]
    sum_of_peaks: int
    keeps: bool
    meet_every_seconds: float | None
    in_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CardSharing:
    """Several programs on one card, each a process. Sizes are bytes.

    Attributes:
        card: its name.
        card_bytes: its memory.
        processes: in the order given.
        outcome: whether they fit.
        fitting: the largest sets that fit as they are, by positions; none contains another.
        with_limits: contexts and smallest limits together.
        in_turns: contexts, the fullest program and the emptied caches of the others; None without steps.
        mps: the least and the most that all take together under MPS.
        worst: the joint peak of live memory if all start at once.
        steps: how their steps meet; None where a trace shows none.
    """

    card: str
    card_bytes: int
    processes: tuple[SharedProcess, ...]
    outcome: SharingOutcome
    fitting: tuple[tuple[int, ...], ...]
    with_limits: int
    in_turns: int | None
    mps: tuple[int, int]
    worst: JointMoment
    steps: StepMeeting | None

    @property
    def total(self) -> int:
        """What all take: contexts and peaks of reserved memory."""
        return sum(one.total for one in self.processes)

    @property
    def free(self) -> int:
        """What is left of the card; below 0 what is missing."""
        return self.card_bytes - self.total

    @property
    def fits(self) -> bool:
        """Whether they fit as they are."""
        return self.outcome is SharingOutcome.FITS

    @property
    def close(self) -> bool:
        """Whether the error of the peaks could turn the answer."""
        return self.fits and self.free < sum(one.reserved_above for one in self.processes)

    @property
    def seconds_in_turns(self) -> float:
        """Time slicing gives the card to one after the other: all seconds."""
        return sum(one.seconds for one in self.processes)


def share_card(runs: Sequence[Run], names: Sequence[str], card: GpuSpec) -> CardSharing:
    """Whether programs that ran alone fit a card side by side.

    Args:
        runs: each on this card, on one device.
        names: what to call them.

    Raises:
        UsageError: there are fewer than two or too many, or one is of another card or of several.
        TraceFormatError: a trace contradicts itself.
    """
    check_count(len(runs))
    devices = [used_device(run, name, card) for run, name in zip(runs, names, strict=True)]
    pairs = list(zip(runs, devices, strict=True))
    known = {id(run): _process(run, at, card) for run, at in pairs}  # one run may stand for several processes
    found = [replace(known[id(run)], name=name) for run, name in zip(runs, names, strict=True)]
    total = card.total_bytes
    fractions = shared_fractions(found, total)
    turns = _turns(found)
    alone = all(one.fits_alone for one in found)
    contexts = sum(one.context for one in found)
    if not alone:
        outcome = SharingOutcome.DOES_NOT_FIT
    elif sum(one.total for one in found) <= total:
        outcome = SharingOutcome.FITS
    elif fractions is not None:
        outcome = SharingOutcome.WITH_LIMITS
    elif turns is not None and turns <= total:
        outcome = SharingOutcome.IN_TURNS
    else:
        outcome = SharingOutcome.DOES_NOT_FIT
    return CardSharing(
        card=card.name,
        card_bytes=total,
        processes=tuple(
            replace(one, fraction=None if fractions is None or not alone else fractions[at])
            for at, one in enumerate(found)
        ),
        outcome=outcome,
        fitting=_fitting(found, total),
        with_limits=contexts + sum(one.smallest for one in found),
        in_turns=turns,
        mps=_under_mps(found, card),
        worst=_worst(pairs),
        steps=_meeting(pairs, found),
    )


def check_count(programs: int) -> None:
    """Make sure that so many programs can be looked at together.

    Raises:
        UsageError: there are fewer than two, or too many.
    """
    if not 2 <= programs <= MOST_PROGRAMS:
        raise UsageError(
            f"{programs} programs cannot be looked at together", f"Give from 2 to {MOST_PROGRAMS}"
        )


def used_device(run: Run, name: str, card: GpuSpec) -> int:
    """The one device that a run used, by its number.

    Raises:
        UsageError: it used none or several, or one of another card.
    """
    used = [
        one
        for one in run.devices
        if one.peak_reserved_bytes or (run.oom is not None and run.oom.device == one.index)
    ]
    if len(used) > 1:
        raise UsageError(
            f"{name} uses {len(used)} cards", "Give programs that use one each: side by side is told for one"
        )
    if not used:
        raise UsageError(f"{name} never used a card", "Give programs that do")
    found = used[0]
    if not _is_of(found, card):
        raise UsageError(
            f"{name} is of another card: {found.gpu} with {format_bytes(found.total_bytes)}, "
            f"not {card.name} with {format_bytes(card.total_bytes)}",
            "Run the script itself on this card: its workspaces and branches may be others there",
        )
    return found.index


def _is_of(device: DeviceOutcome, card: GpuSpec) -> bool:
    """Whether a run is of a card: by its name where that is known, else by its memory where that is."""
    try:
        return find_gpu(device.gpu).name == card.name
    except UsageError:
        return device.total_bytes in (0, card.total_bytes)


def _process(run: Run, device: int, card: GpuSpec) -> SharedProcess:
    """One process. A snapshot of torch does not tell its context, which is then what the card's usually is."""
    trace = run.trace
    outcome = next(one for one in run.devices if one.index == device)
    curves = DeviceTimeline.of(trace, device).curves
    reserved, allocated = curves.peak(Measure.RESERVED), curves.peak(Measure.ALLOCATED)
    whole = not run.ran_out and len(trace) <= REPLAYED_EVENTS
    rehearsal = Rehearsal(trace, device) if whole else None
    step = step_curve(trace, device)
    return SharedProcess(
        name="",
        context=outcome.context_bytes or card.typical_context_bytes,
        reserved=reserved,
        allocated=allocated,
        reserved_above=reserved_bar(trace, device, run.estimates).above,
        fits_alone=not run.ran_out,
        least=None if rehearsal is None else least_limit(rehearsal, allocated, reserved),
        expandable=None if rehearsal is None else expandable_peak(rehearsal),
        between_steps=parked(trace, device, rehearsal),
        seconds=run.seconds_simulated or run_curve(trace, device).seconds,
        step_seconds=None if step is None else step.seconds,
    )


# -- What fits --------------------------------------------------------------------------------------------------


def _fitting(processes: Sequence[SharedProcess], total: int) -> tuple[tuple[int, ...], ...]:
    """The largest sets that fit as they are."""
    return largest_sets([one.total if one.fits_alone else total + 1 for one in processes], total)


def largest_sets(sizes: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """All sets of positions whose sizes fit together and that no further one fits beside, the fullest first."""
    found: list[tuple[int, ...]] = []
    for count in range(len(sizes), 0, -1):
        for chosen in combinations(range(len(sizes)), count):
            if sum(sizes[at] for at in chosen) <= room and not any(set(chosen) < set(more) for more in found):
                found.append(chosen)
    return tuple(sorted(found, key=lambda chosen: (-sum(sizes[at] for at in chosen), chosen)))


def shared_fractions(processes: Sequence[SharedProcess], total: int) -> list[float] | None:
    """A fraction of the card for each, with what is spare shared out by size; None where the smallest do not fit.

    In whole parts of 1 / _FRACTIONS, rounded so that none gets less than it needs and all together no more than
    there is. A fraction bounds what torch reserves; the context comes on top of it.
    """
    contexts = sum(one.context for one in processes)
    room = max(0, total - contexts) * _FRACTIONS // total
    for needs in ([one.reserved for one in processes], [one.smallest for one in processes]):
        parts = [need * _FRACTIONS // total + 1 for need in needs]
        spare = room - sum(parts)
        if spare >= 0:
            given = sum(parts)
            return [(part + spare * part // given) / _FRACTIONS for part in parts]
    return None


def _turns(processes: Sequence[SharedProcess]) -> int | None:
    """What is taken if one runs a step while the others wait with empty caches; None where one has no steps."""
    waiting = [one.between_steps for one in processes if one.between_steps is not None]
    if len(waiting) < len(processes):
        return None
    most = max(one.peak - one.emptied for one in waiting)
    return sum(one.context for one in processes) + sum(one.emptied for one in waiting) + most


def _under_mps(processes: Sequence[SharedProcess], card: GpuSpec) -> tuple[int, int]:
    """The least and the most that all take with MPS. See NOTE [Processes on one card]."""
    reserved = sum(one.reserved for one in processes)
    contexts = [one.context for one in processes]
    if card.compute_capability < _SHARED_CONTEXT:
        least = reserved + max(contexts) + MPS_SERVER
        return least, reserved + sum(contexts) + MPS_SERVER
    least = reserved + sum(contexts) + MPS_SERVER
    return least, least + len(processes) * MPS_MORE


# -- When peaks meet --------------------------------------------------------------------------------------------


def _worst(pairs: Sequence[tuple[Run, int]]) -> JointMoment:
    curves = [run_curve(run.trace, device) for run, device in pairs]
    peak: JointPeak = started_peak(curves, [0] * len(curves))
    return JointMoment(
        bytes=peak.bytes,
        seconds=peak.moment / 1e6,
        parts=peak.parts,
        moments=tuple(
            moment(run.trace, row) if row >= 0 else None
            for (run, _), row in zip(pairs, peak.rows, strict=True)
        ),
    )


def _meeting(pairs: Sequence[tuple[Run, int]], processes: Sequence[SharedProcess]) -> StepMeeting | None:
    found = [step_curve(run.trace, device) for run, device in pairs]
    cycles: list[LiveCurve] = [one for one in found if one is not None]
    idle = [one.between_steps for one in processes if one.between_steps is not None]
    if len(cycles) < len(pairs) or len(idle) < len(pairs):
        return None
    lengths = [one.seconds for one in cycles]
    keeps = max(lengths) - min(lengths) <= _SAME_STEP * max(lengths)
    even = [one.divided(TICKS) for one in cycles]
    shifts, apart = best_shifts(even)
    again = None
    if len(lengths) == 2 and not keeps:
        again = lengths[0] * lengths[1] / abs(lengths[0] - lengths[1])
    rest = [one.allocated for one in idle]
    return StepMeeting(
        together=stepped_peak(even, [0] * len(even)).bytes,
        apart=apart.bytes,
        shifts=tuple(shift / TICKS for shift in shifts),
        sum_of_peaks=sum(one.peak for one in cycles),
        keeps=keeps,
        meet_every_seconds=again,
        in_turns=sum(rest) + max(one.peak - live for one, live in zip(cycles, rest, strict=True)),
    )
