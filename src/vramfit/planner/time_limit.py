"""Limits one piece of work that calls torch to a part of the time that a search has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.planner.search_clock import SearchClock

_PART = 0.5
"""Of the time that is left of a search, what one limited piece of work may take."""


class TimeOver(BaseException):
    """The time of a piece of work is over. No error: nothing that handles those of a workload may take it for one."""


@contextmanager
def limited(clock: SearchClock, seconds: float) -> Iterator[None]:
    """Inside, work goes on for so many seconds, and for no more than half of the time that a search has left.

    Args:
        clock: of the search; where it is stopped meanwhile, the work is, too.
        seconds: at most.

    Raises:
        TimeOver: between two operations of torch.
    """
    left = clock.left
    with _Limit(clock, clock.now() + (seconds if left is None else min(seconds, _PART * left))):
        yield


class _Limit(TorchDispatchMode):
    """Looks at a clock before each operation."""

    supports_higher_order_operators = True

    def __init__(self, clock: SearchClock, end: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._clock, self._end = clock, end

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
        if self._clock.stopped or self._clock.now() >= self._end:
            raise TimeOver
        return func(*args, **(kwargs or {}))
