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

import torch

from vramfit.planner.seeding import generators_kept

_SEED = 0


@contextmanager
def same_start() -> Iterator[None]:
    """Let a run draw the same random numbers whenever it comes, and collect garbage only where `between_steps` does."""
    with ExitStack() as undo:
        undo.enter_context(generators_kept())
        _seed()
        gc.collect()
        if gc.isenabled():
            gc.disable()
            undo.callback(gc.enable)
        yield


def between_steps() -> None:
    """Free what only cycles hold: until here it counts, for no program can rely on the collector to run sooner."""
    gc.collect()


def _seed() -> None:
    """Seed what a run on the host draws from; `torch.manual_seed` would import Dynamo too, ahead of the program."""
    random.seed(_SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
