"""Whether a batch may be cut into micro-batches, and how their losses weigh: tried on the CPU before it is promised.

A model that is too large to be tried as it is, is tried at smaller sizes of its batch, and then by a stand-in of the
same code. What could not be tried is not offered, unless micro-batching was allowed by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.failures import brief
from vramfit.planner.stand_in import stand_in
from vramfit.techniques import Profile
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.techniques.trial import EXAMPLES, NoPiecesError, NotComparableError, Tried, try_pieces
from vramfit.workload import Workload

_CPU_FLOPS = 20e9
"""What a core reaches, at least, for a guess of how long the trial takes."""

_SECONDS = 30.0
"""That a trial may take."""

_STEPS = 8
"""Training steps with all its examples that a trial comes to: a batch and its pieces, twice, and what varies them."""

_PART = 0.125
"""Of the machine's memory that a model may take: a trial holds its values and three gradients."""

_MOST = 1 << 30
"""Bytes of a model in 32 bits, at most: beyond that memory costs more time than arithmetic."""

_SHORTEST = 8
"""Smaller than that no size of a batch is made for a trial."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """What is known of a workload's loss.

    Attributes:
        setting: with which pieces stand for the whole; None if they cannot, or that is not known.
        note: what a reader of a plan with micro-batches, or of one that has to do without, should know.
        known: whether it was tried; False where no trial was possible.
    """

    setting: MicroBatchingSetting | None
    note: str
    known: bool = True


@dataclass(frozen=True, slots=True)
class _Trial:
    """One way to try a workload.

    Attributes:
        sizes: of the batch.
        words: what was tried, after "with".
        model: makes what stands in for the workload's; None for its own.
    """

    sizes: Mapping[str, int]
    words: str
    model: Callable[[], nn.Module] | None = None


def cutting_of(workload: Workload, profile: Profile, *, by_name: bool = False) -> Cutting:
    """Try a workload's loss on some examples, whole and in pieces.

    Args:
        workload: plain.
        profile: of a plain step.
        by_name: whether micro-batching was allowed by its name, and is offered though it could not be tried.
    """
    why = "the model is too large for it here"
    for trial in _trials(workload, profile):
        try:
            found = try_pieces(workload, sizes=trial.sizes, model=trial.model)
        except NoPiecesError as error:
            return Cutting(None, f"micro-batching is left out: {error.message}.")
        except NotComparableError as error:
            why = error.message
            break
        except UsageError as error:
            return Cutting(None, f"micro-batching is left out: {error.message}.")
        except Exception as error:  # whatever the workload's code makes of the CPU, or of smaller sizes
            why = f"the trial with {trial.words} fails ({brief(error)})"
            continue
        return Cutting(found.setting, _told(found, trial))
    tried = "micro-batching: that pieces of a batch give the gradients of the whole was not tried"
    if by_name:
        return Cutting(
            MicroBatchingSetting(),
            f"{tried}, since {why}; it is used since it was allowed by its name. A loss that compares examples with "
            "each other has no pieces.",
            known=False,
        )
    return Cutting(
        None, f"{tried}, since {why}; it is left out unless it is allowed by its name.", known=False
    )


def _told(found: Tried, trial: _Trial) -> str:
    uneven = f", with {' and '.join(found.varied)} made uneven" if found.varied else ""
    return (
        f"micro-batching was tried with {trial.words}: pieces of {EXAMPLES} examples give the gradients of the whole "
        f"in all {found.parameters} parameters{uneven}."
    )


def _trials(workload: Workload, profile: Profile) -> Iterator[_Trial]:
    """Ways to try a workload, the truest first, as far as they are not too dear."""
    sizes = dict(profile.sizes)
    name = batch_size_name(sizes)
    flops = profile.step_flops * _STEPS * EXAMPLES / max(1, sizes[name])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = min(_MOST, round(_PART * memory))
    smaller, less = _smaller(sizes, name, flops)
    if sum(parameter.numel() * 4 for parameter in profile.model.parameters()) <= room:
        if flops <= _SECONDS * _CPU_FLOPS:
            yield _Trial(sizes, "the model itself")
        if less <= _SECONDS * _CPU_FLOPS and smaller != sizes:
            yield _Trial(smaller, f"the model itself at {_words(smaller, name)}")
    for model, words in stand_in(workload, room):
        yield _Trial(sizes if smaller == sizes else smaller, words, model)


def _smaller(sizes: Mapping[str, int], name: str, flops: float) -> tuple[dict[str, int], float]:
    """Sizes halved until a trial is quick enough, and what it comes to then; those of examples stay."""
    found = dict(sizes)
    while flops > _SECONDS * _CPU_FLOPS:
        largest = max((one for one in found if one != name), key=lambda one: found[one], default=None)
        if largest is None or found[largest] // 2 < _SHORTEST:
            break
        found[largest] //= 2
        flops /= 2
    return found, flops


def _words(sizes: Mapping[str, int], name: str) -> str:
    return ", ".join(f"{one} {value:,}" for one, value in sizes.items() if one != name)
