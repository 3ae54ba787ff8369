"""Whether a batch may be cut into micro-batches, and how their losses weigh: tried on the CPU before it is promised.

A model that is too large to be tried as it is, is tried at smaller sizes of its batch, and then by a stand-in of the
same code. A trial that takes too long gives way to the next. What could not be tried is looked at by its shapes (see
coupling.py), and is not offered, unless micro-batching was allowed by its name and shapes tell nothing against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vramfit.errors import UsageError
from vramfit.planner.failures import brief
from vramfit.planner.micro_batch_trial.attempts import TrialAttempt, most_model_bytes, ways_to_try
from vramfit.planner.search_clock import SearchClock
from vramfit.planner.time_limit import TimeOver, limited
from vramfit.techniques import Profile
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.techniques.support.trial import (
    EXAMPLES,
    NoPiecesError,
    NotComparableError,
    Tried,
    try_encoders,
    try_pieces,
)
from vramfit.workload import Workload

_SECONDS = 30.0
"""That a trial may take by its estimate."""

_LONGEST = 60.0
"""Seconds after which a trial is given up: machines are slower than the estimate, and stand-ins have none."""

_TIME_OVER = "the time was over"

_STEPS = 8
"""Training steps with all its examples that a trial takes: a batch and its micro-batches, twice, and varied ones."""

_PART = 0.125
"""Of the machine's memory that a model may take: a trial holds its values and three gradients."""

_MOST = 1 << 30
"""Bytes of a model in 32 bits, at most: beyond that memory costs more time than arithmetic."""


@dataclass(frozen=True, slots=True)
class MicroBatchVerdict:
    """What is known of a workload's loss.

    Attributes:
        setting: with which micro-batches give the gradients of the whole batch; None if they cannot, or nobody knows.
        note: what a reader of a plan with micro-batches, or of one that has to do without, should know.
        known: whether it was tried; False where no trial was possible.
        encoders: names of the modules that may run in micro-batches where the loss may not; see `try_encoders`.
        over: whether the time was over before all that could be tried was: another search may know more.
    """

    setting: MicroBatchingSetting | None
    note: str
    known: bool = True
    encoders: tuple[str, ...] = ()
    over: bool = False


def try_micro_batching(
    workload: Workload,
    profile: Profile,
    *,
    by_name: bool = False,
    probe: Callable[[], str] = lambda: "",
    clock: SearchClock | None = None,
) -> MicroBatchVerdict:
    """Try a workload's loss on some examples, whole and in micro-batches.

    Args:
        workload: plain.
        profile: of a plain step.
        by_name: whether micro-batching was allowed by its name, and is offered though it could not be tried.
        probe: why examples are coupled, as far as shapes tell; asked where nothing could be tried.
        clock: of the search.
    """
    why, over = "the model is too large for it here", False
    trials = _trials(workload, profile)
    trial: TrialAttempt | None = None
    while True:
        try:
            with limited(clock or SearchClock(), _LONGEST):
                trial = next(trials, None)
                if trial is None:
                    break
                return _tried(workload, trial)
        except TimeOver:
            why, over = _TIME_OVER, True
        except NotComparableError as error:
            why = error.message
            break
        except UsageError as error:
            return MicroBatchVerdict(None, f"micro-batching is left out: {error.message}.")
        except Exception as error:  # whatever the workload's code makes of the CPU, or of smaller sizes
            words = "the model itself" if trial is None else trial.words
            why = f"the trial with {words} fails ({brief(error)})"
    if coupled := probe():
        return MicroBatchVerdict(
            None, f"micro-batching is left out: {coupled}. By shapes alone, since {why}.", over=over
        )
    return _untried(why, by_name=by_name, over=over)


def no_time_to_try(*, by_name: bool) -> MicroBatchVerdict:
    """What is known where a search ended before anything was tried."""
    return _untried(_TIME_OVER, by_name=by_name, over=True)


def _untried(why: str, *, by_name: bool, over: bool) -> MicroBatchVerdict:
    """What is known where nothing could be tried, and shapes tell nothing."""
    tried = (
        f"micro-batching: that pieces of a batch give the gradients of the whole was not tried, since {why}"
    )
    if by_name:
        return MicroBatchVerdict(
            MicroBatchingSetting(),
            f"{tried}; it is used since it was allowed by its name. A loss that compares examples with each other has "
            "no pieces.",
            known=False,
            over=over,
        )
    return MicroBatchVerdict(
        None, f"{tried}; it is left out unless it is allowed by its name.", known=False, over=over
    )


def _tried(workload: Workload, trial: TrialAttempt) -> MicroBatchVerdict:
    """What one trial tells.

    Raises:
        TimeOver: it takes too long.
        NotComparableError: it tells nothing.
        UsageError: the batch cannot be cut.
    """
    try:
        found = try_pieces(workload, sizes=trial.sizes, model=trial.model)
    except NoPiecesError as error:
        return _by_encoders(workload, trial, f"micro-batching is left out: {error.message}.")
    return MicroBatchVerdict(found.setting, _words(found, trial))


def _by_encoders(workload: Workload, trial: TrialAttempt, note: str) -> MicroBatchVerdict:
    """What is known where the loss cannot be cut: its encoders may be."""
    try:
        found = try_encoders(workload, sizes=trial.sizes, model=trial.model)
    except TimeOver:
        return MicroBatchVerdict(
            None, f"{note} Whether encoders may run in pieces was not tried, since {_TIME_OVER}.", over=True
        )
    except Exception:  # there are none, or they cannot be tried: nothing is offered
        return MicroBatchVerdict(None, note)
    names = " and ".join(found.modules) if any(found.modules) else "the model"
    return MicroBatchVerdict(
        None,
        f"{note} {names} may run in pieces (gradient-caching): tried with {trial.words}, the gradients of all "
        f"{found.parameters} parameters are those of the whole.",
        encoders=found.modules,
    )


def _words(found: Tried, trial: TrialAttempt) -> str:
    uneven = f", with {' and '.join(found.varied)} made uneven" if found.varied else ""
    return (
        f"micro-batching was tried with {trial.words}: pieces of {EXAMPLES} examples give the gradients of the whole "
        f"in all {found.parameters} parameters{uneven}."
    )


def _trials(workload: Workload, profile: Profile) -> Iterator[TrialAttempt]:
    """Ways to try a workload, the truest first, as far as they are not too dear."""
    sizes = dict(profile.sizes)
    examples = EXAMPLES / max(1, sizes[batch_size_name(sizes)])
    return ways_to_try(
        workload,
        sizes,
        flops=profile.step_flops * _STEPS * examples,
        seconds=_SECONDS,
        model_bytes=sum(parameter.numel() * 4 for parameter in profile.model.parameters()),
        most_bytes=most_model_bytes(_PART, _MOST),
    )
