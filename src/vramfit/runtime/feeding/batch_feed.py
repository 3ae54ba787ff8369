"""Batches of a loader, read and brought to the device by a thread while steps are computed.

NOTE [Depth]: the depth counts the batches that are on the device at once, the one in use among them. The thread begins
a batch when one before is gone: when nobody holds its memory any more, be it by a view or a graph, or at the latest
when the consumer has asked for the second one after it, as somebody who keeps all batches would otherwise never get
another.

NOTE [No locks]: the thread is told what happens by a queue, and alone keeps the books. A tensor may go in any thread,
in the middle of anything, by the garbage collector too; ``queue.SimpleQueue.put`` is made for that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vramfit.runtime.feeding.batch_lanes import BatchLane, lane_to
from vramfit.runtime.feeding.depth_rule import DepthRule
from vramfit.workload.containers import tensors_in

_A_MOMENT = 0.05
"""Most seconds between the news that memory is freed and its end; it takes microseconds."""

_PATIENCE = 10.0
"""Seconds to wait for a loader that is in the middle of a batch when its loop is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedReport:
    """What a pass over a loader was like so far.

    Attributes:
        batches: handed out.
        loading_seconds: that the loader took for them.
        waited_seconds: that steps waited for them, the first one left out.
        first_seconds: until the first one was there.
        depth: batches that may be on the device at once now.
        peak_bytes: most bytes of batches that were on the device at once.
        pinned_bytes: of staging buffers.
    """

    batches: int
    loading_seconds: float
    waited_seconds: float
    first_seconds: float
    depth: int
    peak_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """The consumer wants a batch, after a step of so many seconds (None: before the first)."""

    number: int
    step: float | None


@dataclass(frozen=True, slots=True)
class _Gone:
    """Memory of a batch is being freed."""

    number: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What reading a batch gave: a batch and the end of its copies, or an error, or neither at the end."""

    batch: Any = None
    end: Any = None
    error: BaseException | None = None
    over: bool = False
    seconds: float = 0.0


class _Channel:
    """What the thread and the consumer share."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[_Asked | _Gone | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self.stopped = False


class _Counts:
    """What a report is made of; each figure is written by one thread alone."""

    def __init__(self, depth: int) -> None:
        self.batches = self.peak = self.pinned = 0
        self.loading = self.waited = self.first = 0.0
        self.depth = depth

    def report(self) -> FeedReport:
        return FeedReport(
            batches=self.batches,
            loading_seconds=self.loading,
            waited_seconds=self.waited,
            first_seconds=self.first,
            depth=self.depth,
            peak_bytes=self.peak,
            pinned_bytes=self.pinned,
        )


class FedBatches:
    """An iterable of a loader's batches on a device; each pass over it is one over the loader.

    Args:
        loader: any iterable of batches.
        device: where they are used.
        rule: makes the rule of depth for a pass.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, rule: Callable[[], DepthRule]) -> None:
        self.loader, self.device, self._rule = loader, device, rule
        self._counts: _Counts | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> BatchFeed:
        feed = BatchFeed(self.loader, self.device, self._rule())
        self._counts = feed.counts
        return feed

    @property
    def report(self) -> FeedReport | None:
        """What the last pass was like so far; None before the first."""
        return None if self._counts is None else self._counts.report()


class BatchFeed(Iterator[Any]):
    """One pass over a loader.

    It stops its thread when it is closed, when it is garbage, and at its end.

    Args:
        loader: any iterable of batches.
        device: where they are used.
        rule: of depth.

    Attributes:
        counts: what a report of it is made of.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, rule: DepthRule) -> None:
        self._began = time.perf_counter()
        self._channel, self._lane, self.counts = _Channel(), lane_to(device), _Counts(rule.depth)
        # Samplers and workers draw their seeds with the first batch: in this thread, as they would without another.
        batches = iter(loader)
        first = _read(batches)
        worker = _Worker(self._channel, self._lane, rule, self.counts)
        thread = threading.Thread(
            target=_run,
            args=(worker, self._channel, [batches], [first], _Surroundings.here(device)),
            name="vramfit-prefetch",
            daemon=True,
        )
        self._close = weakref.finalize(self, _stop, self._channel, thread)
        self._returned: float | None = None
        self._over = False
        del batches, first
        thread.start()

    def __iter__(self) -> BatchFeed:
        return self

    def __next__(self) -> Any:
        if self._over or not self._close.alive:
            raise StopIteration
        now, counts = time.perf_counter(), self.counts
        step = None if self._returned is None else now - self._returned
        self._channel.told.put(_Asked(counts.batches, step))
        found = self._channel.ready.get()
        if found.error is not None or found.over:
            self._over = True
            self._close()
            if found.over:
                raise StopIteration
            try:
                raise found.error  # type: ignore[misc]
            finally:
                del found  # else the error holds this frame, and this frame the error
        self._lane.hand_out(found.batch, found.end)
        self._returned = time.perf_counter()
        if counts.batches:
            counts.waited += self._returned - now
        else:
            counts.first = self._returned - self._began
        counts.batches += 1
        return found.batch

    def close(self) -> None:
        """Stop the thread and let its batches and buffers go; nothing comes any more."""
        self._close()


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What torch keeps for each thread and a loader may depend on."""

    grad: bool
    inference: bool
    card: int | None
    device: torch.device

    @classmethod
    def here(cls, device: torch.device) -> _Surroundings:
        card = torch.cuda.current_device() if device.type == "cuda" else None
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), card, torch.get_default_device()
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        if self.card is not None:
            torch.cuda.set_device(self.card)
        with contextlib.ExitStack() as entered:
            if self.device.type != "cpu":
                entered.enter_context(self.device)
            entered.enter_context(torch.inference_mode(self.inference))
            entered.enter_context(torch.set_grad_enabled(self.grad))
            yield


class _Worker:
    """The thread's books. See NOTE [Depth]."""

    def __init__(self, channel: _Channel, lane: BatchLane, rule: DepthRule, counts: _Counts) -> None:
        self._channel, self._lane, self._rule, self._counts = channel, lane, rule, counts
        self._live: dict[int, list[_Freeing]] = {}
        self._bytes: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._asked = -1
        self._produced = 0

    def feed(self, batches: list[Iterator[Any]], first: list[_Outcome]) -> None:
        """Read and bring all batches, or up to the first error, or until the consumer stops it."""
        while True:
            # What waits on the host takes nothing on the card.
            if not self._lane.reads_ahead and not self._await_room(0):
                return
            found = first.pop() if first else _read(batches[0])
            self._counts.loading += found.seconds
            if found.error is not None or found.over:
                self._channel.ready.put(found)
                return
            nbytes = self._lane.nbytes(found.batch)
            self._rule.loaded(found.seconds, nbytes)
            if not self._await_room(nbytes) or not self._bring(found.batch):
                return
            del found

    def _bring(self, batch: Any) -> bool:
        while True:
            try:
                placed, end = self._lane.place(batch)
                break
            except torch.OutOfMemoryError as error:
                if self._must_come:
                    self._channel.ready.put(_Outcome(error=error))
                    return False
            if not self._hear():  # what is in use has to go first
                return False
        number, self._produced = self._produced, self._produced + 1
        self._bytes[number] = self._lane.nbytes(batch)
        self._live[number] = [
            _Freeing(one, partial(_say_gone, self._channel.told, number)) for one in _storages(placed)
        ]
        self._left[number] = len(self._live[number])
        self._counts.peak = max(self._counts.peak, sum(self._bytes.values()))
        self._counts.pinned = self._lane.pinned_bytes
        self._channel.ready.put(_Outcome(batch=placed, end=end))
        return True

    @property
    def _must_come(self) -> bool:
        """Whether the consumer waits for the batch whose turn it is."""
        return self._asked >= self._produced

    def _await_room(self, nbytes: int) -> bool:
        """Wait until one more may come; False where the consumer has stopped."""
        self._hear_all()
        while not self._channel.stopped:
            live = sum(self._bytes.values())
            if self._must_come or (len(self._live) < self._rule.depth and self._rule.fits(live, nbytes)):
                return True
            if not self._hear():
                return False
        return False

    def _hear_all(self) -> None:
        while True:
            try:
                self._take(self._channel.told.get_nowait())
            except queue.Empty:
                return

    def _hear(self) -> bool:
        self._take(self._channel.told.get())
        return not self._channel.stopped

    def _take(self, told: _Asked | _Gone | None) -> None:
        if isinstance(told, _Asked):
            self._asked = told.number
            for number in [one for one in self._live if one < told.number - 1]:
                self._forget(number)
            if told.step is not None:
                self._rule.stepped(told.step)
            self._counts.depth = self._rule.depth
        elif told is not None and told.number in self._left:
            self._left[told.number] -= 1
            if not self._left[told.number]:
                for one in self._live[told.number]:
                    one.await_end()
                self._forget(told.number)

    def _forget(self, number: int) -> None:
        del self._live[number], self._bytes[number], self._left[number]


class _Freeing:
    """Memory of which a batch consists.

    A weak reference calls back when memory is about to be freed, so that what is told then comes a moment too early.
    torch's own weak references to storages tell when it is over.
    """

    def __init__(self, storage: torch.UntypedStorage, call: Callable[[Any], None]) -> None:
        self._watched = weakref.ref(storage, call)
        self._truth = StorageWeakRef(storage)

    def await_end(self) -> None:
        until = time.perf_counter() + _A_MOMENT
        while not self._truth.expired() and time.perf_counter() < until:
            time.sleep(1e-5)


def _storages(batch: Any) -> list[torch.UntypedStorage]:
    """The memory of its tensors, each once; sparse ones have none of their own."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_in(batch):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
    return list(found.values())


def _say_gone(told: queue.SimpleQueue[Any], number: int, _: Any) -> None:
    told.put(_Gone(number))


def _read(batches: Iterator[Any]) -> _Outcome:
    began = time.perf_counter()
    try:
        found = next(batches)
    except StopIteration:
        return _Outcome(over=True)
    except BaseException as error:
        return _Outcome(error=error)
    return _Outcome(batch=found, seconds=time.perf_counter() - began)


def _run(
    worker: _Worker,
    channel: _Channel,
    batches: list[Iterator[Any]],
    first: list[_Outcome],
    surroundings: _Surroundings,
) -> None:
    """The thread. What it is given in lists is let go here: its caller's frame would hold it."""
    try:
        with surroundings.entered():
            worker.feed(batches, first)
    except BaseException as error:
        channel.ready.put(_Outcome(error=error))
    finally:
        batches.clear()


def _stop(channel: _Channel, thread: threading.Thread) -> None:
    channel.stopped = True
    channel.told.put(None)
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join(_PATIENCE)
    while True:
        try:
            channel.ready.get_nowait()
        except queue.Empty:
            return
