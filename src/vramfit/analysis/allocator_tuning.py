"""Which allocator settings would have served a recording with the least memory, and which do harm or nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.config import misread_numbers
from vramfit.allocator.core import Rounding
from vramfit.allocator.versions import ALLOC_CONF_VARIABLES, TorchVersion, rules_for
from vramfit.analysis._lifetimes import trace_device
from vramfit.analysis.breakdown import last_oom_row
from vramfit.analysis.trials import Progress, Trial, TrialSearch, finer_candidates, first_candidates, rank
from vramfit.errors import ConfigError, UsageError
from vramfit.trace import Capacity, CapacitySource, EventKind, MemoryTrace, Peaks, Rehearsal, Source
from vramfit.trace.settings import CONF_FROM, GIVEN_BY_OPTION
from vramfit.trace.without_history import RECORD_HISTORY, STATE
from vramfit.units import MIB, counted, format_bytes


class TrapKind(Enum):
    """A setting that does harm, or nothing."""

    MAX_SPLIT_EXPANDABLE = "max_split_size_mb with expandable segments"
    COLLECTION_WITHOUT_FRACTION = "garbage_collection_threshold without a memory fraction"
    ROUNDUP_NO_USE = "roundup_power2_divisions on sizes that are powers of two"
    ROUNDUP_COSTS = "roundup_power2_divisions that costs more than it saves"
    OUT_OF_MEMORY = "settings under which requests fail"
    UNKNOWN_SETTING = "a setting that this torch does not know"
    MISREAD_NUMBER = "a number that torch reads otherwise than it is written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trap:
    """A trap that the trace shows.

    Attributes:
        alloc_conf: the settings concerned.
        text: the harm, with the figures of the replay.
    """

    kind: TrapKind
    alloc_conf: str
    text: str


TRAP_CONF = "max_split_size_mb:128,expandable_segments:True"
"""The pair of settings that pytorch/pytorch#123548 and #193400 report to make reserved memory grow."""

_TRAP_FACTOR = 1.2
"""The pair is a trap from so many times the memory of either setting alone."""


def find_traps(
    search: TrialSearch, baseline: Trial, trace: MemoryTrace, given: Sequence[str] = ()
) -> list[Trap]:
    """The traps that some trials show; those of the recorded and the ``given`` settings are always reported."""
    concerned = {baseline.alloc_conf: baseline}
    concerned.update({conf: trial for conf, trial in search.trials.items() if trial.family == "given"})
    version = search.rehearsals[0].version
    traps = [*_unknown_settings(trace, version), *_misread_numbers(trace, given, version), *_growing(search)]
    for trial in concerned.values():
        config = trial.config
        if config.garbage_collection_threshold and config.per_process_memory_fraction == 1.0:
            traps.append(
                Trap(
                    kind=TrapKind.COLLECTION_WITHOUT_FRACTION,
                    alloc_conf=trial.alloc_conf,
                    text="garbage_collection_threshold does nothing until the program or per_process_memory_fraction "
                    "limits the memory: torch collects only then",
                )
            )
        if max(config.roundup_power2_divisions) > 1:
            traps += _roundup(search, trial)
    failing = [
        trial
        for trial in search.trials.values()
        if trial.ooms > baseline.ooms and trial.complete and trial.alloc_conf
    ]
    worst: dict[str, Trial] = {}
    for trial in failing:
        worst[trial.family] = max(trial, worst.get(trial.family, trial), key=lambda one: one.ooms)
    traps += [
        Trap(
            kind=TrapKind.OUT_OF_MEMORY,
            alloc_conf=trial.alloc_conf,
            text=f"{counted(trial.ooms, 'request')} would run out of memory, {baseline.ooms:,} did as recorded"
            + _and_others([one for one in failing if one.family == trial.family]),
        )
        for trial in sorted(worst.values(), key=rank)
    ]
    return traps


def _and_others(failing: Sequence[Trial]) -> str:
    if len(failing) < 2:
        return ""
    return (
        "; so with 1 setting like it"
        if len(failing) == 2
        else f"; so with {len(failing) - 1} settings like it"
    )


def _growing(search: TrialSearch) -> list[Trap]:
    """Settings with both a limit to splitting and expandable segments that need far more than either alone."""
    found = []
    for conf, trial in list(search.trials.items()):
        config = trial.config
        if config.max_split_size is None or not config.expandable_segments:
            continue
        alone = [
            search.try_("trap", replace(config, max_split_size=None)),
            search.try_("trap", replace(config, expandable_segments=False)),
        ]
        most = max(one.peak_reserved for one in alone)
        if trial.peak_reserved > _TRAP_FACTOR * most:
            more = "" if trial.complete else "more than "
            found.append(
                Trap(
                    kind=TrapKind.MAX_SPLIT_EXPANDABLE,
                    alloc_conf=conf,
                    text=f"reserved memory grows to {more}{_mib(trial.peak_reserved)} with at most "
                    f"{_mib(trial.peak_allocated)} allocated; with expandable segments alone it is "
                    f"{_mib(alone[0].peak_reserved)}, with max_split_size_mb alone {_mib(alone[1].peak_reserved)}: "
                    "free memory above the limit is kept from smaller requests, and new pages are mapped instead",
                )
            )
    return found


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


def _roundup(search: TrialSearch, trial: Trial) -> list[Trap]:
    """Whether rounding up can do anything for these sizes, and what it costs."""
    share = search.sizes.power_of_two_share()
    plain = search.try_("given", replace(trial.config, roundup_power2_divisions=(0,) * 16))
    if share > 0.9:
        return [
            Trap(
                kind=TrapKind.ROUNDUP_NO_USE,
                alloc_conf=trial.alloc_conf,
                text=f"{100 * share:.0f} % of the bytes are in requests of powers of two, which are not rounded",
            )
        ]
    if plain.complete and trial.peak_reserved > plain.peak_reserved:
        rounding = Rounding(trial.config)
        extra = sum(
            (rounding.block(size) - size) * (weight // size)
            for size, weight in zip(search.sizes.sizes.tolist(), search.sizes.weights.tolist(), strict=True)
        )
        part = extra / max(1, int(search.sizes.weights.sum()))
        return [
            Trap(
                kind=TrapKind.ROUNDUP_COSTS,
                alloc_conf=trial.alloc_conf,
                text=f"it makes requests {100 * part:.0f} % larger, and the peak {format_bytes(trial.peak_reserved)} "
                f"instead of {format_bytes(plain.peak_reserved)} without it",
            )
        ]
    return []


def _unknown_settings(trace: MemoryTrace, version: TorchVersion) -> list[Trap]:
    text = str(trace.meta.get("alloc_conf", ""))
    try:
        AllocatorConfig.parse(text, torch_version=version)
    except ConfigError as error:
        major, minor = version
        return [
            Trap(
                kind=TrapKind.UNKNOWN_SETTING,
                alloc_conf=text,
                text=f"torch {major}.{minor} does not take these settings as they are ({error.message}); what it does "
                "not know is left out here",
            )
        ]
    return []


def _misread_numbers(trace: MemoryTrace, given: Sequence[str], version: TorchVersion) -> Iterator[Trap]:
    for text in (str(trace.meta.get("alloc_conf", "")), *given):
        with contextlib.suppress(ConfigError):
            for note in misread_numbers(text, version):
                yield Trap(kind=TrapKind.MISREAD_NUMBER, alloc_conf=text, text=note)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRecording:
    """One device of the recording. Bytes throughout.

    Attributes:
        recorded: peaks by the recording's own figures.
        predicted: peaks of a replay under the recorded settings, from the state in which the recording begins.
        exact: that replay placed every block and every segment as recorded.
        capacity: memory for the allocator, and what tells it.
        begins_in_use: the recording begins with segments that were there already.
        ends_at_failure: the recording ends with a request that ran out of memory, so that what the program would have
            asked for after it is unknown.
        gpu: name of the card; empty if unknown.
    """

    index: int
    recorded: Peaks
    predicted: Peaks
    exact: bool
    capacity: Capacity
    begins_in_use: bool = False
    ends_at_failure: bool = False
    gpu: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What was tried, and what is best.

    Attributes:
        devices: the devices of the recording that were considered.
        torch_version: whose rules and settings apply.
        version_known: the trace names it.
        variable: the environment variable for the settings: the one that the recorded program took them from, where
            the trace says, else the one that wins in all versions.
        recorded_from: where the recorded program took its settings from: an environment variable, or
            `GIVEN_BY_OPTION`; empty if unknown.
        virtual: the recording is of a virtual GPU, so that the program can be run again as it was.
        recorded_alloc_conf: settings of the recording.
        baseline: the recorded settings on fresh cards: what all trials are compared with. It differs from the
            recording itself where that began with memory in use.
        trials: everything that was tried, the best first: by failed requests, peak reserved, retries, calls to the
            driver, number of settings.
        best: the trial to take: of those within `tolerance` of the lowest peak the one with the fewest retries, then
            the fewest settings, then the fewest calls to the driver.
        traps: settings to avoid.
    """

    devices: tuple[DeviceRecording, ...]
    torch_version: TorchVersion
    version_known: bool
    variable: str
    recorded_alloc_conf: str
    baseline: Trial
    trials: tuple[Trial, ...]
    best: Trial
    traps: tuple[Trap, ...]
    events: int
    seconds: float
    recorded_from: str = ""
    virtual: bool = False

    @property
    def saved(self) -> int:
        """Bytes by which the best trial lowers the peak of reserved memory; never negative."""
        return max(0, self.baseline.peak_reserved - self.best.peak_reserved)

    @property
    def tolerance(self) -> int:
        """Bytes within which peaks count as equal."""
        return tolerance(self.trials[0].peak_reserved)

    @property
    def keep(self) -> bool:
        """The recorded settings are as good as any."""
        return self.best.alloc_conf == self.baseline.alloc_conf

    @property
    def failed_last(self) -> DeviceRecording | None:
        """The device whose recording ends with a request that ran out of memory, if one does."""
        return next((device for device in self.devices if device.ends_at_failure), None)

    @property
    def serves_failure(self) -> bool:
        """Whether the best trial serves a request with whose failure the recording ends: what follows is unknown."""
        return self.failed_last is not None and self.best.ooms < self.baseline.ooms

    @property
    def export_line(self) -> str:
        """The line for the shell."""
        if not self.best.alloc_conf:
            if self.recorded_from == GIVEN_BY_OPTION:
                return f"# leave {GIVEN_BY_OPTION} out"
            # Which of the variables held the settings is not in a snapshot, and unsetting both harms nobody.
            return f"unset {self.recorded_from or ' '.join(_VARIABLES)}"
        return f"export {self.variable}={self.best.alloc_conf}"


def tolerance(peak: int) -> int:
    """By how many bytes peaks may differ from the lowest and count as equal, so that simpler settings win.

    It is half a percent, or one segment (20 MiB) of a small peak, but at most 5 % of that.
    """
    return max(peak // 200, min(20 * MIB, peak // 20))


_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_STOP_AT = 1.5
"""A trial is broken off above so many times the recorded peak: it is worse, and by how much does not matter."""


def tune(
    trace: MemoryTrace,
    *,
    device: int | None = None,
    settings: Sequence[str] = (),
    progress: Progress | None = None,
) -> Tuning:
    """Serve a trace's requests under many allocator settings, and rank these.

    Every trial serves every request of every device considered; none is a sample. A trial is broken off only when its
    peak is above one and a half times the recorded one, which it cannot come down from.

    Args:
        device: only this device; None for all, ranked by the one that needs the most.
        settings: try only these, instead of searching.

    Raises:
        UsageError: the trace has no requests, or no such device.
        ConfigError: one of ``settings`` cannot be read by the trace's version of torch.
        TraceFormatError: the recording contradicts itself.
    """
    began = time.perf_counter()
    rehearsals = [Rehearsal(trace, index) for index in _devices(trace, device)]
    version = rehearsals[0].version
    given = [AllocatorConfig.parse(text, torch_version=version) for text in settings]
    recordings = tuple(_recording(rehearsal) for rehearsal in rehearsals)
    search = TrialSearch(rehearsals, progress)
    baseline = search.try_("recorded", rehearsals[0].config)
    search.limit = int(_STOP_AT * baseline.peak_reserved)
    if given:
        search.run([("given", config) for config in given])
    else:
        _search_all(search, recordings, version, known=bool(trace.meta.get("torch_version")))
    trials = tuple(sorted(search.trials.values(), key=rank))
    recorded_from = str(trace.meta.get(CONF_FROM, ""))
    return Tuning(
        devices=recordings,
        torch_version=version,
        version_known=bool(trace.meta.get("torch_version")),
        variable=recorded_from if recorded_from in _VARIABLES else ALLOC_CONF_VARIABLES[0],
        recorded_alloc_conf=rehearsals[0].config.to_string(),
        baseline=baseline,
        trials=trials,
        best=_best(trials, baseline),
        traps=tuple(find_traps(search, baseline, trace, settings)),
        events=len(trace),
        seconds=time.perf_counter() - began,
        recorded_from=recorded_from,
        virtual=trace.meta.get("source") == Source.VIRTUAL.value,
    )


def _devices(trace: MemoryTrace, device: int | None) -> list[int]:
    found = np.unique(trace.device[trace.kind == EventKind.ALLOC]).tolist()
    states = [index for index in trace.known_devices if trace.is_state(index)]
    if device in states or (not found and states):
        where = "" if device is None else f" of device {device}"
        raise UsageError(
            f"the recording{where} is {STATE}: it holds no requests that other settings could serve",
            RECORD_HISTORY,
        )
    if not found:
        raise UsageError("the trace holds no requests", "Record a program that allocates on the card")
    if device is None:
        return list(found)
    if device not in found:
        listed = ", ".join(map(str, found))
        raise UsageError(f"the trace has no requests on device {device}", f"It has some on: {listed}")
    return [device]


def _recording(rehearsal: Rehearsal) -> DeviceRecording:
    player = rehearsal.exact()
    described = trace_device(rehearsal.trace, rehearsal.device)
    allocator = player.allocator
    predicted = Peaks(
        peak_allocated=allocator.peak_allocated_bytes, peak_reserved=allocator.peak_reserved_bytes
    )
    return DeviceRecording(
        index=rehearsal.device,
        recorded=rehearsal.recorded,
        predicted=predicted,
        exact=player.first_difference is None and player.driver.surprises == 0,
        capacity=rehearsal.capacity,
        begins_in_use=bool(rehearsal.start),
        ends_at_failure=last_oom_row(rehearsal.trace, rehearsal.device) is not None,
        gpu=described.name if described is not None else "",
    )


def _search_all(
    search: TrialSearch, recordings: Sequence[DeviceRecording], version: TorchVersion, *, known: bool
) -> None:
    """Coarse settings of each family, then finer ones around the best.

    Where the trace does not name its torch (``known``), settings that only newer ones have are left out.
    """
    limited = known and all(found.capacity.source is not CapacitySource.UNKNOWN for found in recordings)
    segments = known and rules_for(version).large_segment_size_option
    coarse = list(first_candidates(search.sizes, segments=segments, limited=limited))
    search.run(coarse)
    reference = search.trials[""]
    best: dict[str, AllocatorConfig] = {}
    for family in dict.fromkeys(family for family, _ in coarse):
        trial = min(
            (search.trials[config.to_string()] for name, config in coarse if name == family), key=rank
        )
        if rank(trial)[:2] < rank(reference)[:2]:
            best[family] = trial.config
    search.run(list(finer_candidates(best, search.sizes)))
    trap = AllocatorConfig.parse(TRAP_CONF, torch_version=version)
    # In an expandable segment free blocks join to more than any one request.
    if reference.peak_reserved > (trap.max_split_size or 0):
        limit, search.limit = search.limit, None
        search.run([("trap", trap), ("max_split", replace(trap, expandable_segments=False))])
        search.limit = limit


def _best(trials: Sequence[Trial], baseline: Trial) -> Trial:
    """The simplest of the nearly best; the recorded settings if they are among those."""
    first = trials[0]
    near = [
        trial
        for trial in trials
        if trial.complete
        and trial.ooms == first.ooms
        and trial.peak_reserved <= first.peak_reserved + tolerance(first.peak_reserved)
        and trial.family != "trap"
    ]
    if baseline in near and all(baseline.retries <= trial.retries for trial in near):
        return baseline
    return min(
        near or [first],
        key=lambda trial: (
            trial.retries,
            trial.settings,
            trial.device_allocs + trial.device_frees,
            trial.peak_reserved,
        ),
    )
