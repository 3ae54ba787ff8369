"""Ways to try a workload for real on this machine's CPU within bounds of time and memory, the truest first.

A model that is too large to be tried as it is, is tried at smaller sizes of its batch, and then by a stand-in of the
same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from vramfit.planner.devices import cpu_speed
from vramfit.planner.micro_batch_trial.stand_in import stand_in
from vramfit.techniques.micro_batching import batch_size_name
from vramfit.workload import Workload

_SHORTEST = 8
"""Smaller than that no size of a batch is made."""


@dataclass(frozen=True, slots=True)
class TrialAttempt:
    """One way to try a workload.

    Attributes:
        sizes: of the batch.
        words: what was tried, after "with".
        model: makes what stands in for the workload's; None for its own.
    """

    sizes: Mapping[str, int]
    words: str
    model: Callable[[], nn.Module] | None = None


def ways_to_try(
    workload: Workload,
    sizes: Mapping[str, int],
    *,
    flops: float,
    seconds: float,
    model_bytes: int,
    most_bytes: int,
) -> Iterator[TrialAttempt]:
    """Ways to try a workload, as far as they are not too dear.

    Args:
        workload: plain.
        sizes: of its batch.
        flops: of the whole trial with the model itself at these sizes; 0 where nobody knows.
        seconds: that a trial may take.
        model_bytes: of the model's parameters in 32 bits.
        most_bytes: bytes of parameters in 32 bits that a trial may have.
    """
    name = batch_size_name(sizes)
    most = seconds * cpu_speed.CPU_FLOPS
    smaller, less = _smaller(sizes, name, flops, most)
    if model_bytes <= most_bytes:
        if flops <= most:
            yield TrialAttempt(dict(sizes), "the model itself")
        if less <= most and smaller != dict(sizes):
            yield TrialAttempt(smaller, f"the model itself at {_words(smaller, name)}")
    for model, words in stand_in(workload, most_bytes):
        yield TrialAttempt(smaller, words, model)


def most_model_bytes(part: float, most: int) -> int:
    """Bytes of a model in 32 bits that a trial may have: a part of this machine's memory, and no more than `most`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, round(part * memory))


def _smaller(sizes: Mapping[str, int], name: str, flops: float, most: float) -> tuple[dict[str, int], float]:
    """Sizes halved until a trial is quick enough, and what it comes to then; those of examples stay."""
    found = dict(sizes)
    while flops > most:
        largest = max((one for one in found if one != name), key=lambda one: found[one], default=None)
        if largest is None or found[largest] // 2 < _SHORTEST:
            break
        found[largest] //= 2
        flops /= 2
    return found, flops


def _words(sizes: Mapping[str, int], name: str) -> str:
    return ", ".join(f"{one} {value:,}" for one, value in sizes.items() if one != name)
