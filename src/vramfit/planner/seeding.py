"""The global random generators of torch, Python and NumPy: one seed for all, and their states put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vramfit.training_state.random_generators import GeneratorStates


def seed_all(seed: int) -> None:
    """Let everything that draws from a global generator draw the same again."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside changes nothing outside, on cards that are in use neither."""
    host = GeneratorStates.of(torch.device("cpu"))
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        host.restore()
