"""The loop of a watch: looks every so often, says where figures are heading, and tells those who want to know."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from vramfit.watching.card_probe import CardProbe
from vramfit.watching.host_memory import HostProbe
from vramfit.watching.outlooks import WINDOW, OutlookKeeper
from vramfit.watching.watch_reading import CardState, ProgramReading, WatchReading

T = TypeVar("T")

_log = logging.getLogger("vramfit.watch")

_AGAIN_BELOW = 0.02
"""A threshold is armed again once the share has fallen so far below it: no calls at each small swing."""


class WatchSink(Protocol):
    """Hears of each reading."""

    def take(self, reading: WatchReading) -> None:
        """A reading."""
        ...

    def close(self) -> None:
        """The watch is over."""
        ...


@dataclass(slots=True)
class _Threshold:
    share: float
    callback: Callable[[WatchReading], object]
    armed: bool = True


class ProcessWatcher:
    """Watches a process, and tells what it sees.

    Args:
        pid: of the process.
        programs: gives what its processes say of themselves; None knows nothing of that.
        cards: looks at the cards; None without.
        every: seconds between two looks.
        window: seconds of the past that trends are drawn from.
        sinks: hear of each reading.

    Attributes:
        last: the latest reading; None before the first.
    """

    def __init__(
        self,
        pid: int,
        *,
        programs: Callable[[], Iterable[ProgramReading]] | None = None,
        cards: CardProbe | None = None,
        every: float = 1.0,
        window: float = WINDOW,
        sinks: Iterable[WatchSink] = (),
    ) -> None:
        self.pid, self._programs, self._cards, self._every = pid, programs, cards, every
        self._host = HostProbe(pid)
        self._outlooks = OutlookKeeper(window)
        self._sinks: list[WatchSink] = list(sinks)
        self._thresholds: list[_Threshold] = []
        self._began = time.time()
        self._failed = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.last: WatchReading | None = None

    def on_threshold(self, share: float, callback: Callable[[WatchReading], object]) -> None:
        """Call back when the fullest device, or the host, passes a share; again only after it has fallen below it.

        Args:
            share: from 0 to 1.
            callback: called from the watching thread with the reading; what it raises is logged.
        """
        self._thresholds.append(_Threshold(share=share, callback=callback))

    def add(self, sink: WatchSink) -> None:
        """Tell one more."""
        self._sinks.append(sink)

    def look(self) -> WatchReading | None:
        """One look, told to all; None once the process has ended."""
        now = time.time()
        host = self._host.look()
        if host is None:
            return None
        reading = WatchReading(
            time=now,
            elapsed=now - self._began,
            pid=self.pid,
            programs=self._told(self._programs),
            cards=self._told(self._seen_cards),
            host=host,
        )
        reading = replace(reading, outlooks=self._outlooks.look(reading))
        self.last = reading
        for sink in list(self._sinks):
            try:
                sink.take(reading)
            except Exception:  # a full disk, or a writer of the user's: the watch goes on
                _log.exception("%s is told no more", type(sink).__name__)
                self._sinks.remove(sink)
                with contextlib.suppress(Exception):
                    sink.close()
        self._check(reading)
        return reading

    def watch(self) -> None:
        """Look until the process ends or `stop` is called; then close all sinks."""
        try:
            while self.look() is not None and not self._done.wait(self._every):
                pass
        finally:
            self.close()

    def start(self) -> ProcessWatcher:
        """Watch from a daemon thread."""
        self._thread = threading.Thread(target=self.watch, name="vramfit-watcher", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the watch; the process goes on."""
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def close(self) -> None:
        """Close all sinks, and let go of the driver."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                _log.exception("%s was not closed well", type(sink).__name__)
        self._sinks = []
        if self._cards is not None:
            self._cards.close()
            self._cards = None

    def __enter__(self) -> ProcessWatcher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _seen_cards(self) -> tuple[CardState, ...]:
        return () if self._cards is None else self._cards.look(tuple(self._host.family()))

    def _told(self, question: Callable[[], Iterable[T]] | None) -> tuple[T, ...]:
        """The answers; none where it fails, which is said the first time."""
        if question is None:
            return ()
        try:
            return tuple(question())
        except Exception:  # of a driver, or of a program that changes under our hands: the watch goes on
            _log.log(logging.DEBUG if self._failed else logging.WARNING, "a look failed", exc_info=True)
            self._failed = True
            return ()

    def _check(self, reading: WatchReading) -> None:
        share = reading.share
        for one in self._thresholds:
            if one.armed and share >= one.share:
                one.armed = False
                try:
                    one.callback(reading)
                except Exception:  # the user's own code: the watch goes on
                    _log.exception("a callback of the threshold %.0f %% failed", 100 * one.share)
            elif not one.armed and share < one.share - _AGAIN_BELOW:
                one.armed = True
