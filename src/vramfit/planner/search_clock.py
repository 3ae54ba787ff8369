"""The time of a search: until its limit, or until somebody interrupts it, and what one piece of its work may take."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from vramfit.torch_internals.dispatch import TorchDispatchMode

INTERRUPTED = "interrupted"
"""Why a search ended that Ctrl-C stopped."""

TIME_OVER = "time"
"""Why a search ended that had no time left."""


class SearchStopped(BaseException):
    """No further run may begin. Like an interrupt it is no `Exception`, so that handlers of errors let it pass."""


@dataclass(slots=True)
class SearchClock:
    """The time of one search, however many parts it has.

    Args:
        limit: seconds that it may take; None for no limit.
        spent: seconds of them that were over before the clock was there.
        now: the clock, in seconds.

    Attributes:
        kept_back: seconds at the end that are not the search's once there is a plan: those of what checks it.
        stopped: why it was stopped: `INTERRUPTED` or `TIME_OVER`; empty while it goes on.
        first_plan: seconds after which there was a plan that fits; None without one.
    """

    limit: float | None = None
    spent: float = 0.0
    now: Callable[[], float] = time.perf_counter
    kept_back: float = 0.0
    stopped: str = ""
    first_plan: float | None = None
    _began: float = field(init=False)
    _first: float = 0.0
    _longest: float = 0.0
    _runs: int = 0
    _spare: int = 0
    _aside: bool = False

    def __post_init__(self) -> None:
        """Start the clock."""
        self._began = self.now() - self.spent

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return self.now() - self._began

    @property
    def left(self) -> float | None:
        """Seconds that the search still has, less the time of the runs that are spared; None without a limit."""
        if self.limit is None:
            return None
        return max(0.0, self.limit - self._reserve - self.seconds - self.longest * self._spare)

    @property
    def _reserve(self) -> float:
        return 0.0 if self.first_plan is None else self.kept_back

    @property
    def longest(self) -> float:
        """Seconds of the longest run so far; the first, which loads much for all others, counts while it is alone."""
        return self._longest if self._runs > 1 else self._first

    def check(self) -> None:
        """Go on only if a run as long as the longest so far would end in time.

        Raises:
            SearchStopped: it would not, or the search was stopped before.
        """
        if not self.stopped and self.limit is not None:
            ahead = self.longest * (1 + self._spare) + self._reserve
            if self.seconds + ahead > self.limit:
                if self._spare or self._aside:  # what is spared is still to be used
                    raise SearchStopped
                self.run_out()
        if self.stopped:
            raise SearchStopped

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, one run is made, whose time is noted."""
        began = self.now()
        try:
            yield
        finally:
            took = self.now() - began
            self._runs += 1
            if self._runs == 1:
                self._first = took
            else:
                self._longest = max(self._longest, took)

    @contextmanager
    def sparing(self, runs: int) -> Iterator[None]:
        """Inside, the time of so many runs is left to what follows."""
        before, self._spare = self._spare, runs
        try:
            yield
        finally:
            self._spare = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside is what a search can do without: where there is no time for it, the search was not cut short."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def interrupt(self) -> None:
        """Stop the search: somebody interrupted it."""
        self.stopped = INTERRUPTED

    def run_out(self) -> None:
        """Stop the search, unless it was stopped before: the time is over."""
        self.stopped = self.stopped or TIME_OVER

    def go_on(self) -> None:
        """Let a search whose time was over use what has become free of it since."""
        if self.stopped == TIME_OVER:
            self.stopped = ""

    def found(self) -> None:
        """Note that there is a plan."""
        if self.first_plan is None:
            self.first_plan = self.seconds


@contextmanager
def interruptible(clock: SearchClock) -> Iterator[None]:
    """Inside, an interrupt stops the search even where its exception is lost.

    Python drops what is raised in a ``__del__`` or a callback of the garbage collector, of which virtual runs
    have many. For processes of our own alone: a handler of the user's is never replaced.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        clock.interrupt()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_PART = 0.5
"""Share of the time left to a search that one limited piece of work may take."""


class TimeOver(BaseException):
    """The time of a piece of work is over. It is no `Exception`, so that handlers of workloads' errors let it pass."""


@contextmanager
def limited(clock: SearchClock, seconds: float, *, part: float = _PART) -> Iterator[None]:
    """Inside, work goes on for so many seconds, and for no more than a part of the time that a search has left.

    Args:
        clock: of the search; where it is stopped meanwhile, the work is, too.

    Raises:
        TimeOver: between two operations of torch.
    """
    left = clock.left
    with _Limit(clock, clock.now() + (seconds if left is None else min(seconds, part * left))):
        yield


class _Limit(TorchDispatchMode):
    """Looks at a clock before each operation."""

    supports_higher_order_operators = True

    def __init__(self, clock: SearchClock, end: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._clock, self._end, self._stopped = clock, end, clock.stopped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # torch's signature
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One operation."""
        if self._clock.stopped != self._stopped or self._clock.now() >= self._end:
            raise TimeOver
        return func(*args, **(kwargs or {}))
