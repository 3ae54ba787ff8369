"""What a collective gives back: a ``Work`` that lets the program wait, and holds what NCCL's would hold meanwhile.

NOTE [What an asynchronous collective holds]
With ``async_op=True`` a collective runs on a stream of its group, and its work keeps its tensors alive until the
program waits, so that their blocks are not handed out again under it (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
``stashed_for_allocator_safety_``). Without, it runs on the program's current stream and keeps nothing. A work for which
nobody waits lets go once it is done, when the group is given its next collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from vramfit.torch_internals.autograd_engine import current_graph_task_id, execution_engine
from vramfit.torch_internals.distributed import work_from_future

_OURS = (
    3  # references to a work that nobody else holds: the table's, the local variable's, and getrefcount's own
)
Held = Callable[[], object]


def finished(tensors: list[torch.Tensor]) -> Any:
    """A boxed ``Work`` that is done, and holds its results as NCCL's does: DDP's reducer reads them there."""
    return work_from_future(_done(tensors)).boxed()


def _done(tensors: list[torch.Tensor]) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return future


class PendingWork(Work):
    """The work of a collective on a stream of its own.

    C++ looks its methods up by this object, which must live until it is asked to wait, or for its future: `Pending`
    sees to it. C++ asks for either once; a program that asks again has the object itself.

    Args:
        results: the tensors that it writes.
        until: simulated time at which it is done, in microseconds.
        on_wait: lets the program's current stream wait for it.
        let_go: gives back what it holds beside tensors.
        tensors: those that are to stay until it is done.
    """

    def __init__(
        self,
        results: list[torch.Tensor],
        until: float,
        *,
        on_wait: Callable[[float], object],
        let_go: Held,
        tensors: list[torch.Tensor],
        pending: Pending,
    ) -> None:
        super().__init__()
        self.until = until
        self._results = results
        self._on_wait = on_wait
        self._let_go: Held | None = let_go
        self._tensors = tensors
        self._pending = pending

    def release(self) -> None:
        """Let go of everything that was held for the collective."""
        self._tensors = []
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

    def forget(self) -> None:
        """Let go of the results too: the program has dropped the work."""
        self._results = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait; what was held is free to go."""
        self._on_wait(self.until)
        self.release()
        self._pending.drop(self)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """A future that is done, with the results: DDP's reducer waits for it at the end of the backward pass."""
        if current_graph_task_id() != -1:
            engine: Any = execution_engine
            engine.queue_callback(self.wait)
        self._pending.drop(self)
        return _done(self._results)

    def is_completed(self) -> bool:
        """Whether it is done: always, as nothing ever runs."""
        return True

    def is_success(self) -> bool:
        """Whether it went well: always."""
        return True

    def exception(self) -> None:
        """What went wrong: nothing."""
        return

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._results


class Pending:
    """Works for which nobody has waited yet."""

    def __init__(self) -> None:
        self._works: dict[int, PendingWork] = {}

    def add(self, work: PendingWork) -> None:
        """Keep a work."""
        self._works[id(work)] = work

    def let_go(self, now: float) -> None:
        """Let works go that are done by now, in microseconds.

        Their objects stay, for C++ may still ask them to wait: they are small once their tensors are gone.
        """
        for number in tuple(self._works):
            work = self._works[number]
            if work.until <= now:
                work.release()
                if sys.getrefcount(work) <= _OURS:
                    work.forget()

    def drop(self, work: PendingWork) -> None:
        """Forget a work that need not be kept any longer."""
        self._works.pop(id(work), None)

    def clear(self) -> None:
        """Let all of them go."""
        for work in self._works.values():
            work.release()
        self._works.clear()
