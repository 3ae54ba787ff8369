"""One beginning for every run of a process: its random numbers and its garbage do not depend on what ran before.

Sizes that follow from data (a mask's ones, sequences of drawn lengths) follow from the random numbers that the process
has come to. And tensors in reference cycles die when Python's collector happens to run, which it does by the count of
objects that the process has made: what is remembered of an earlier run makes fewer of them. Both moved the peak of one
workload from run to run.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_SEED = 0


@contextmanager
def same_start() -> Iterator[None]:
    """Let a run draw the same random numbers whenever it comes, and collect garbage only where `between_steps` does."""
    with ExitStack() as undo:
        _seed(undo)
        gc.collect()
        if gc.isenabled():
            gc.disable()
            undo.callback(gc.enable)
        yield


def between_steps() -> None:
    """Free what only cycles hold: until here it counts, for no program can rely on the collector to run sooner."""
    gc.collect()


def _seed(undo: ExitStack) -> None:
    """Seed the generators of Python, numpy and torch's CPU; they go on afterwards as if there had been no run."""
    undo.callback(random.setstate, random.getstate())
    random.seed(_SEED)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        undo.callback(numpy.random.set_state, numpy.random.get_state())
        numpy.random.seed(_SEED)
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    torch.default_generator.manual_seed(_SEED)
