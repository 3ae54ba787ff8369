"""Traps: allocator settings that do harm, or nothing, as the trials of a recording show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.config import misread_numbers
from vramfit.allocator.core import Rounding
from vramfit.allocator.versions import TorchVersion
from vramfit.analysis.trials import Trial, TrialSearch, rank
from vramfit.errors import ConfigError
from vramfit.trace import MemoryTrace
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
        kind: which one.
        alloc_conf: the settings concerned.
        text: what it does, with the figures of the replay.
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
    """The traps that some trials show; those of the recorded and the ``given`` settings are always told."""
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
