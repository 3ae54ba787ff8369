"""Tells a survivor when the host's memory is nearly used up, so that it acts before the kernel ends the process."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from contextlib import suppress

from vramfit.runtime.oom_forms import HostPressureError
from vramfit.watching.host_pressure import ControlGroups

_PATIENCE = 50
"""Looks after a relief that brought nothing, before the next one: collecting garbage takes time."""


class HostWatch:
    """Looks at the limits of this process' control groups.

    Args:
        margin: the share of a limit that is to stay free; 0 looks at none.
        groups: the limits; None finds those of this process.
        every: seconds between two looks, which read five small files for each group.

    Attributes:
        pressed: whether the last look found too little left.
    """

    def __init__(self, margin: float, groups: ControlGroups | None = None, *, every: float = 0.5) -> None:
        self._margin, self._every = margin, every
        self._next = 0.0
        self._groups = (groups or ControlGroups()) if margin > 0 else None
        if self._groups is not None and self._groups.nearest() is None:
            self._groups = None  # a limit that is set later is not noticed; a look costs nothing then
        self._rest = 0
        self._said = False
        self.pressed = False

    def near(self) -> HostPressureError | None:
        """The pressure, where less than the margin is left.

        It is given, not raised: a step that has not begun may still be done with less.
        """
        now = time.monotonic()
        if self._groups is None or now < self._next:
            return None
        self._next = now + self._every
        memory = self._groups.nearest()
        self.pressed = memory is not None and memory.share >= 1 - self._margin
        if memory is None or not self.pressed:
            self._said = False
            return None
        return HostPressureError(f"the host's memory is nearly used up: {memory}")

    def relieve(self) -> bool:
        """Collect garbage and give unused pages back to the system; whether that was enough."""
        if self._rest:
            self._rest -= 1
            return False
        gc.collect()
        _trim()
        self._next = 0.0
        enough = self.near() is None
        self._rest = 0 if enough else _PATIENCE
        return enough

    def first_time(self) -> bool:
        """Whether nothing was said of this pressure yet; from now on something was."""
        first, self._said = not self._said, True
        return first


def _trim() -> None:
    """Let glibc give free pages back: malloc_trim(3). Other C libraries have no such function."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
