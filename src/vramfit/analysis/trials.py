"""Trials: a recording's requests served under one configuration each, and how these rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vramfit.allocator import AllocatorConfig
from vramfit.analysis.setting_candidates import Sizes
from vramfit.trace import Peaks, Played, Rehearsal


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The requests served under one configuration, on fresh cards. Bytes throughout.

    Attributes:
        alloc_conf: the settings; empty for the defaults.
        config: the settings, read.
        family: what kind of settings these are.
        peak_reserved: of the device that needs the most.
        peak_allocated: of the device that needs the most.
        devices: peaks of each device, in the order of `Tuning.devices`.
        device_allocs: calls of cudaMalloc, or of mapping pages, on all devices after the start of the trace.
        device_frees: calls of cudaFree, or of unmapping.
        retries: how often all of the cache was given back for want of memory: each waits for the card.
        ooms: requests that failed.
        complete: it was served to the end; otherwise broken off, being above ``peak_reserved`` already.
        seconds: time of the replay.
    """

    alloc_conf: str
    config: AllocatorConfig
    family: str
    peak_reserved: int
    peak_allocated: int
    devices: tuple[Peaks, ...]
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    complete: bool
    seconds: float

    @property
    def settings(self) -> int:
        """How many settings differ from the defaults."""
        return len(self.alloc_conf.split(":")) - 1 if self.alloc_conf else 0


Progress = Callable[[float, str], None]
"""Called with the share that is done (a guess that never falls) and the settings being tried."""


class TrialSearch:
    """Trials by their settings, each served once."""

    def __init__(self, rehearsals: Sequence[Rehearsal], progress: Progress | None) -> None:
        self.rehearsals = rehearsals
        self.progress = progress
        self.sizes = Sizes(rehearsals)
        self.limit: int | None = None
        self.trials: dict[str, Trial] = {}
        self.done, self.planned = 0, 1
        self._shown = 0.0

    def run(self, candidates: Sequence[tuple[str, AllocatorConfig]]) -> None:
        """Try all that have not been tried."""
        self.planned = self.done + len(candidates)
        for family, config in candidates:
            self.try_(family, config)

    def try_(self, family: str, config: AllocatorConfig) -> Trial:
        """Serve all devices under one configuration."""
        conf = config.to_string()
        if conf not in self.trials:
            self.trials[conf] = self._serve(family, conf, config)
        self.done += 1
        self._tell(0.0, conf)
        return self.trials[conf]

    def _tell(self, share: float, conf: str) -> None:
        if self.progress is not None:
            self._shown = max(self._shown, min(1.0, (self.done + share) / max(1, self.planned)))
            self.progress(self._shown, conf)

    def _serve(self, family: str, conf: str, config: AllocatorConfig) -> Trial:
        played: list[Played] = []
        count = len(self.rehearsals)
        for number, rehearsal in enumerate(self.rehearsals):

            def tick(share: float, number: int = number) -> None:
                self._tell((number + share) / count, conf)

            played.append(rehearsal.play(config, stop_above=self.limit, tick=tick))
        return Trial(
            alloc_conf=conf,
            config=config,
            family=family,
            peak_reserved=max(one.peaks.peak_reserved for one in played),
            peak_allocated=max(one.peaks.peak_allocated for one in played),
            devices=tuple(one.peaks for one in played),
            device_allocs=sum(one.device_allocs for one in played),
            device_frees=sum(one.device_frees for one in played),
            retries=sum(one.retries for one in played),
            ooms=sum(one.ooms for one in played),
            complete=all(one.complete for one in played),
            seconds=sum(one.seconds for one in played),
        )


def rank(trial: Trial) -> tuple[int, int, int, int, int, str]:
    """What trials are sorted by, the best first."""
    return (
        trial.ooms if trial.complete else 1 << 40,
        trial.peak_reserved,
        trial.retries,
        trial.device_allocs + trial.device_frees,
        trial.settings,
        trial.alloc_conf,
    )
