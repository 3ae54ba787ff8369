"""Silence for a compiled library that prints to standard output by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_output() -> Iterator[None]:
    """Send what is written to the process's standard output meanwhile nowhere.

    HiGHS as scipy carries it writes a line of its own debugging now and then, whatever its options say
    (``HighsMipSolverData::transformNewIntegerFeasibleSolution``), which would spoil ``--json -``.
    """
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output to spoil
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
