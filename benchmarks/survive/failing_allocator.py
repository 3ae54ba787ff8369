"""Lets the n-th allocation that torch's library makes on the CPU fail: inside of kernels too.

A small library, built with ``cc`` and loaded before all others (``LD_PRELOAD``), takes the place of ``posix_memalign``
and answers ENOMEM to calls that come from libc10, torch's CPU allocator; all others pass. torch then raises what it
raises when the host's memory is used up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

static int (*next)(void **, size_t, size_t);
static atomic_long seen, raised, first, count;
static atomic_int on;
static void (*told)(void);

void failing_set(long at, long in_a_row) { seen = raised = 0; first = at; count = in_a_row; }
void failing_on(int value) { on = value; }
void failing_tell(void (*to)(void)) { told = to; }
long failing_seen(void) { return seen; }
long failing_raised(void) { return raised; }

static int of_torch(void *caller) {
    static void *base;  /* libc10's, once it was seen */
    Dl_info from;
    if (!dladdr(caller, &from)) return 0;
    if (base) return from.dli_fbase == base;
    if (!from.dli_fname || !strstr(from.dli_fname, "libc10.so")) return 0;
    base = from.dli_fbase;
    return 1;
}

int posix_memalign(void **to, size_t alignment, size_t size) {
    if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    if (on && of_torch(__builtin_return_address(0))) {
        long number = seen++;
        if (told) told();
        if (number >= first && number < first + count) { raised++; return ENOMEM; }
    }
    return next(to, alignment, size);
}
"""

_FLAG = "VRAMFIT_FAILING_ALLOCATOR"


def run_with_it() -> None:
    """Start this program anew with the library, unless it runs with it already.

    Raises:
        subprocess.CalledProcessError: there is no compiler, or it refuses.
    """
    if os.environ.get(_FLAG):
        return
    folder = Path(tempfile.mkdtemp(prefix="failing-allocator-"))
    source, library = folder / "failing.c", folder / "failing.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    more = {"LD_PRELOAD": str(library), _FLAG: str(library), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **more})


class FailingAllocator:
    """The library, in a process that `run_with_it` has started."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[_FLAG])
        for name in ("failing_seen", "failing_raised"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.failing_set.argtypes = [ctypes.c_long, ctypes.c_long]

    def set(self, at: int | None, in_a_row: int = 1) -> None:
        """Count from 0, and let so many allocations fail from a number on; None lets none fail."""
        self._library.failing_set(at or 0, 0 if at is None else in_a_row)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Allocations count, and fail, while this is entered."""
        self._library.failing_on(1)
        try:
            yield
        finally:
            self._library.failing_on(0)

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call a function at each allocation that counts, wherever it is made."""
        inner = ctypes.CFUNCTYPE(None)(listener)
        self._library.failing_tell(inner)
        try:
            yield
        finally:
            self._library.failing_tell(None)

    @property
    def seen(self) -> int:
        """Allocations that were counted."""
        return int(self._library.failing_seen())

    @property
    def raised(self) -> int:
        """Those that failed."""
        return int(self._library.failing_raised())
