"""What a program's own Python objects took of the host's memory, step by step, and the lines where it grew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_WARM_UP = 1
"""Looks that are left out: caches fill at the first steps."""

_LOOKS = 4
"""Looks after these below which nothing is said of growth."""

_NOTABLE = 16 << 10
"""Bytes for each step below which growth is not told: lists of numbers grow in any program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSite:
    """A line that allocated host memory.

    Attributes:
        file, line: where; the program's own line where one was among the callers.
        bytes: what it held at each look.
    """

    file: str
    line: int
    bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory at some steps of a run, as `tracemalloc` saw it: what Python allocated, numpy's arrays among it.

    Memory that libraries take by themselves is not seen: real CPU tensors of torch are not in it, and tensors of a
    virtual GPU have none.

    Attributes:
        steps: numbers of the steps after which it was looked at, evenly apart.
        bytes: in all at each look, without vramfit's own.
        pinned: page-locked bytes that torch held at each look.
        sites: the lines that held the most or grew the most.
    """

    steps: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    sites: tuple[HostSite, ...] = ()

    def per_step(self, values: tuple[int, ...]) -> int:
        """Bytes that are added at each step; 0 where the values do not rise from look to look, or hardly.

        Args:
            values: one for each look.
        """
        later, steps = values[_WARM_UP:], self.steps[_WARM_UP:]
        if len(later) < _LOOKS or any(one >= after for one, after in pairwise(later)):
            return 0
        rate = (later[-1] - later[0]) // (steps[-1] - steps[0])
        return rate if rate >= _NOTABLE else 0

    @property
    def grows_by(self) -> int:
        """Bytes that Python's objects grow by at each step; 0 where nothing leaks."""
        return self.per_step(self.bytes)

    @property
    def pinned_grows_by(self) -> int:
        """The same of page-locked memory."""
        return self.per_step(self.pinned)

    @property
    def growing(self) -> tuple[HostSite, ...]:
        """The lines that grow, the fastest first."""
        found = [site for site in self.sites if self.per_step(site.bytes)]
        return tuple(sorted(found, key=lambda site: (-self.per_step(site.bytes), site.file, site.line)))


def host_memory_from_plain(values: Mapping[str, Any]) -> HostMemory:
    """What `dataclasses.asdict` made of it, after its way through JSON."""
    sites = tuple(
        HostSite(file=site["file"], line=site["line"], bytes=tuple(site["bytes"])) for site in values["sites"]
    )
    return HostMemory(
        steps=tuple(values["steps"]),
        bytes=tuple(values["bytes"]),
        pinned=tuple(values["pinned"]),
        sites=sites,
    )
