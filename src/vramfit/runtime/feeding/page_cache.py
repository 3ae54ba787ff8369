"""How much of a file is in the kernel's page cache, by cachestat(2) or mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

_CACHESTAT = 451
"""The system call's number everywhere but on alpha, from Linux 6.5 on (include/uapi/asm-generic/unistd.h)."""


class CacheSource(Enum):
    """Who tells what is cached."""

    CACHESTAT = "cachestat"
    MINCORE = "mincore"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCache:
    """Pages of a range of files.

    Attributes:
        pages: in all.
        cached: of these, in the page cache; by cachestat those too that are on their way from the disk.
        dirty: of these, not written to the disk yet; None where mincore tells, which does not know.
        source: who tells.
    """

    pages: int
    cached: int
    dirty: int | None
    source: CacheSource

    @property
    def hit_rate(self) -> float:
        """The part that is cached: what a read of all of it finds without the disk. 1.0 for nothing."""
        return self.cached / self.pages if self.pages else 1.0


class _Range(ctypes.Structure):
    """struct cachestat_range (include/uapi/linux/mman.h)."""

    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """struct cachestat (include/uapi/linux/mman.h), in pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def page_runs(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of whole pages, in order and each page once, that spans of bytes (start, end) lie in."""
    page, runs = mmap.PAGESIZE, list[tuple[int, int]]()
    for start, end in sorted(spans):
        if start >= end:
            continue
        first, last = start // page * page, -(-end // page) * page
        if runs and first <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return runs


def cached_pages(
    file: int, mapped: mmap.mmap, spans: Iterable[tuple[int, int]], source: CacheSource | None = None
) -> PageCache | None:
    """The pages of spans of bytes of an open, mapped file.

    On an overlay file system, as containers have, cachestat looks at the overlay's file, which has no pages of its own:
    where it finds none, mincore is asked as well, which sees those of the file below.

    Args:
        source: who is asked; None takes cachestat where the kernel has it and finds any.

    Returns:
        None where neither is there, or where the kernel tells it to the file's owner alone.
    """
    if sys.platform != "linux":
        return None
    size = os.fstat(file).st_size
    runs = page_runs((start, min(end, size)) for start, end in spans)
    if source is not CacheSource.MINCORE:
        found = _by_cachestat(file, runs)
        if source is CacheSource.CACHESTAT or (found is not None and found.cached):
            return found
    else:
        found = None
    below = _by_mincore(mapped, runs)
    return below if found is None or (below is not None and below.cached) else found


def _by_cachestat(file: int, runs: list[tuple[int, int]]) -> PageCache | None:
    counts, cached, dirty = _Counts(), 0, 0
    for start, end in runs:
        asked = _Range(start, end - start)
        # Some machines' filters refuse unknown calls with EPERM, older kernels with ENOSYS.
        if _libc().syscall(_CACHESTAT, file, ctypes.byref(asked), ctypes.byref(counts), 0):
            return None
        cached, dirty = cached + counts.cached, dirty + counts.dirty
    return PageCache(pages=_pages(runs), cached=cached, dirty=dirty, source=CacheSource.CACHESTAT)


def _by_mincore(mapped: mmap.mmap, runs: list[tuple[int, int]]) -> PageCache | None:
    import numpy as np

    base = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    cached = 0
    for start, end in runs:
        states = np.empty((end - start) // mmap.PAGESIZE, dtype=np.uint8)
        failed = _libc().mincore(
            ctypes.c_void_p(base + start), ctypes.c_size_t(end - start), ctypes.c_void_p(states.ctypes.data)
        )
        if failed:
            return None
        cached += int(np.count_nonzero(states & 1))  # the other bits are reserved
    return PageCache(pages=_pages(runs), cached=cached, dirty=None, source=CacheSource.MINCORE)


def _pages(runs: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in runs) // mmap.PAGESIZE
