"""Finds the largest batch that steps of the live process fit with, and leaves the process as it was found.

NOTE [Trial]: a trial is several whole steps at one size, from the state that was found, with room left free by a
ballast that is held meanwhile. So the size that comes out was run, with the margin, with the optimizer's states that
its first step makes, and in the memory that the process has. After each trial everything is put back
(`vramfit.runtime.trial_state`), and cuBLAS gives its workspaces back: they would lie where an earlier trial had
room, and other sizes would fit than in a process that begins with this one. Ranks run each trial without their
reduction and vote on its end.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import OutOfMemory, VramfitError
from vramfit.runtime.batch_search import BatchTrial, batch_search
from vramfit.runtime.survival.leftovers import Recovery, memory_now, release_workspaces
from vramfit.runtime.survival.rank_votes import RankVotes, unsynchronised, votes_for
from vramfit.runtime.trial_state import TrialState

_log = logging.getLogger("vramfit.largest_batch")

_FITS, _SHORT, _FAILED = range(3)
"""How a trial ended on a rank; the worst of all counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch that fits. It stands for its size as a number.

    Attributes:
        size: the largest that was run and fits.
        failing: the smallest that was run and does not; 0 where `most` fits.
        predicted: what the virtual GPU or the caller said before; 0 without.
        trials: all, in order.
        left_bytes: that torch holds more than before, on the device; the step's own doing.
    """

    size: int
    failing: int
    predicted: int
    trials: tuple[BatchTrial, ...]
    left_bytes: int

    def __index__(self) -> int:
        return self.size

    def __int__(self) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True)
class TrialSubject:
    """What is tried, and what it changes.

    Attributes:
        step: one whole step on a batch.
        make_batch: makes the largest batch there may be of a size; several where it is not clear which that is.
        models: that the step uses.
        optimizers: that it steps.
        others: what else it changes, as of a `TrialState`.
        device: where memory runs out.
    """

    step: Callable[[Any], Any]
    make_batch: Sequence[Callable[[int], Any]]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Sequence[Any]
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """How the largest batch is looked for.

    Attributes:
        steps: of a trial, for each kind of batch.
        start: the size to begin with where nothing is predicted.
        most: the largest size that is of use.
        margin_bytes: left free during a trial.
        vote_seconds: that a rank waits for the others.
    """

    steps: int
    start: int = 1
    most: int = 1 << 20
    margin_bytes: int = 0
    vote_seconds: float = 300.0


def find_largest_batch(subject: TrialSubject, settings: SearchSettings, predicted: int = 0) -> LargestBatch:
    """The largest batch that steps fit with. See NOTE [Trial].

    Args:
        predicted: the size to begin with; 0 where nothing is known.

    Raises:
        OutOfMemory: not even one entry fits.
        UsageError: the model is sharded.
        BaseException: what a step raises beside running out of memory. All is as before then, too.
    """
    trials = _Trials(subject, settings)
    predicted = trials.agreed_least(predicted)
    largest = batch_search(
        trials.run,
        start=predicted or settings.start,
        most=settings.most,
        predicted=predicted > 0,
        limit_bytes=trials.limit_bytes,
    ).run()
    left = trials.left_bytes()
    if left:
        _log.warning("%d bytes stay on the device that were not there before: the step keeps them", left)
    if not largest.value:
        raise OutOfMemory(
            f"not even a batch of {largest.failing} fits: {trials.message}",
            "Let vramfit.plan make it fit, or free the device",
        )
    return LargestBatch(
        size=largest.value,
        failing=largest.failing,
        predicted=predicted,
        trials=tuple(tried.answer for tried in largest.tries),
        left_bytes=left,
    )


class _Trials:
    """Runs trials, each from the state that was found.

    Attributes:
        limit_bytes: that torch may reserve beside the margin; 0 where nobody knows.
        message: of the last shortage.
    """

    def __init__(self, subject: TrialSubject, settings: SearchSettings) -> None:
        self._subject, self._settings = subject, settings
        self._recovery = Recovery(subject.device)
        votes = [found for model in subject.models if (found := votes_for(model, settings.vote_seconds))]
        self._votes: RankVotes | None = votes[0] if votes else None
        release_workspaces(subject.device)
        now = memory_now(subject.device)
        self._before = 0 if now is None else now.allocated
        limit = 0 if now is None else now.free + now.reserved - settings.margin_bytes
        self.limit_bytes = self.agreed_least(limit)
        self.message = ""
        self._swallowed = False
        self._state = TrialState(
            subject.models,
            subject.optimizers,
            subject.others,
            subject.device,
            [subject.step, *subject.make_batch],
        )

    def run(self, size: int) -> BatchTrial:
        """Some steps at a size, of which nothing is left.

        Raises:
            BaseException: a step's own error, after all was put back.
        """
        peak_before = self._peak()
        failure: BaseException | None = None
        ended = _FITS
        refused = _refused_requests(self._subject.device)
        try:
            with shortages_seen() as seen:
                self._steps(size)
            if seen or _refused_requests(self._subject.device) > refused:
                ended, self._swallowed = _SHORT, True
        except BaseException as error:
            ended = _SHORT if self._recovery.noted(error) else _FAILED
            failure = error if ended is _FAILED else None
        # Outside of the handler: see NOTE [Order] in survival.leftovers.
        peak = self._peak()
        self._recovery.insist(self._state.restore)
        release_workspaces(self._subject.device)
        own = ended
        ended, peak = self._agreed(own, peak if peak > peak_before else 0)
        if ended == _SHORT:
            mine = self._recovery.last if own == _SHORT else None
            self.message = "another rank ran out" if mine is None else mine.message
            if self._swallowed:
                self._swallowed = False
                self.message = "the step ran out of memory and went on, so that it did not do the whole batch"
        if failure is not None:
            raise failure
        if ended == _FAILED:
            raise VramfitError(f"another rank failed at a batch of {size}", "Look at the other ranks' logs")
        trial = BatchTrial(size=size, fits=ended == _FITS, peak_bytes=peak if ended == _FITS else 0)
        _log.info("a batch of %d %s", size, "fits" if trial.fits else "does not fit")
        return trial

    def _steps(self, size: int) -> None:
        subject, settings = self._subject, self._settings
        ballast = torch.empty(settings.margin_bytes, dtype=torch.uint8, device=subject.device)
        with contextlib.ExitStack() as stack:
            for model in subject.models:
                stack.enter_context(unsynchronised(model))
            for make in subject.make_batch:
                for _ in range(settings.steps):
                    subject.step(make(size))
            if subject.device.type != "cpu":
                torch.get_device_module(subject.device).synchronize(subject.device)
        del ballast

    def left_bytes(self) -> int:
        """What the device holds more than before the first trial."""
        gc.collect()
        now = memory_now(self._subject.device)
        return 0 if now is None else max(0, now.allocated - self._before)

    def agreed_least(self, value: int) -> int:
        """The smallest of what the ranks say."""
        return value if self._votes is None else -self._votes.most(-value)[0]

    def _agreed(self, ended: int, peak: int) -> tuple[int, int]:
        """How a trial ended on the worst of the ranks, and the highest peak."""
        if self._votes is None:
            return ended, peak
        worst, highest = self._votes.most(ended, peak)
        return worst, highest

    def _peak(self) -> int:
        """The highest that torch has reserved; not reset, since it is the user's."""
        device = self._subject.device
        return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


@contextlib.contextmanager
def shortages_seen() -> Iterator[list[str]]:
    """The out-of-memory errors that come up while this is entered, those that a program catches itself included.

    torch makes each of them an instance of ``torch.OutOfMemoryError``, whose class takes another ``__init__``.
    """
    seen: list[str] = []
    kind: Any = torch.OutOfMemoryError
    own = vars(kind).get("__init__")
    plain = kind.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        seen.append(str(args[0]) if args else "")

    kind.__init__ = noted
    try:
        yield seen
    finally:
        if own is None:
            del kind.__init__
        else:
            kind.__init__ = own


def _refused_requests(device: torch.device) -> int:
    """How often torch's allocator has given up on a device; 0 where it does not count."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def repeated(batch: Any, size: int, dim: int = 0) -> Any:
    """A batch of one entry as one of many, with memory of its own.

    Args:
        batch: a tensor, or tuples, lists and dicts of them; tensors have the entry along `dim`.
    """
    if isinstance(batch, torch.Tensor):
        repeats = [1] * batch.dim()
        if repeats:
            repeats[dim] = size
        return batch.repeat(repeats) if repeats else batch
    if isinstance(batch, dict):
        return type(batch)({name: repeated(value, size, dim) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(repeated(value, size, dim) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(repeated(value, size, dim) for value in batch)
    return batch


def sized(loader_items: Sequence[Any], collate: Callable[[list[Any]], Any]) -> Callable[[int], Any]:
    """What makes batches of any size of some entries, by the loader's own function, repeating them."""

    def make(size: int) -> Any:
        def entries() -> Iterator[Any]:
            for number in range(size):
                yield loader_items[number % len(loader_items)]

        return collate(list(entries()))

    return make
