"""Plans whose aim is the largest size: the batch, the sequence, or whatever the workload calls its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vramfit.errors import UsageError
from vramfit.planner.bracketing import bracket
from vramfit.planner.clock import TIME_OVER, Clock, SearchStopped
from vramfit.planner.failures import brief
from vramfit.planner.frames import ACTIVATIONS
from vramfit.planner.memory import Memory
from vramfit.planner.plan import Plan
from vramfit.planner.price import Device
from vramfit.planner.reducing import Cutting
from vramfit.planner.request import MEMORY, PRICE, THROUGHPUT, NothingFits, Request
from vramfit.planner.runs import Runs
from vramfit.planner.search import Search
from vramfit.techniques import with_choices
from vramfit.techniques.micro_batching import batch_size_name

Progress = Callable[[str], None]

_ALIASES = ("batch", "sequence")

_CLOSE = 64
"""The largest size is looked for up to this part of it."""


_GROWTHS = 4
"""Times that a plan for the largest size is tried at larger ones."""


def search_for(
    device: Device,
    request: Request,
    progress: Progress,
    clock: Clock | None = None,
    memory: Memory | None = None,
    kept: Runs | None = None,
) -> tuple[Search, Plan]:
    """The best plan for a request, with the search that found it.

    Where the objective is a size, the plan of the lowest peak at the workload's own size is looked for first; with that
    the size is doubled and bisected, a run each, and the quickest plan at the largest is taken. Micro-batching has no
    part in it for the size of the batch: with it there is no largest.

    Args:
        device: where runs are priced.
        request: what is asked for.
        progress: told what is being done.
        clock: of this search, and of others for the same answer.
        memory: of earlier searches; None without one.
        kept: what others ran for the same request, or one that allows more; not for sizes that grow, where the plan of
            the lowest peak decides what is run.

    Raises:
        NothingFits: none stays within the budget.
        UsageError: the workload cannot be run, or the objective is none.
    """
    clock = clock or Clock(limit=request.search_seconds)
    if request.objective in (THROUGHPUT, MEMORY):
        search = Search(
            device=device,
            request=request,
            progress=progress,
            clock=clock,
            memory=memory,
            kept=kept or Runs(),
        )
        return search, search.plan()
    name = grown_size(request)
    forbidden = request.forbidden
    if name == batch_size_name(request.sizes):
        forbidden |= {"micro-batching"}
    growing = _Growing(
        device=device,
        request=replace(request, objective=name, forbidden=forbidden),
        name=name,
        clock=clock,
        memory=memory,
        progress=progress,
    )
    return growing.found()


@dataclass(slots=True)
class _Growing:
    """The search for the largest value of a size, and the plan for it."""

    device: Device
    request: Request
    name: str
    clock: Clock
    memory: Memory | None
    progress: Progress
    best: tuple[Search, Plan] | None = None
    closest: NothingFits | None = None
    failures: dict[int, str] = field(default_factory=dict)

    def found(self) -> tuple[Search, Plan]:
        """The plan for the largest size; where the search is stopped, for the largest so far.

        Raises:
            NothingFits: none stays within the budget.
            KeyboardInterrupt: the search was interrupted before there was any plan.
        """
        try:
            self._grow()
        except SearchStopped:
            if self.best is None and self.clock.stopped == TIME_OVER and self.closest is not None:
                raise self.closest from None
            if self.best is None:
                raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.clock.interrupt()
        assert self.best is not None
        search, plan = self.best
        if self.clock.stopped:
            plan = self._short(plan)
        if self.failures:
            least = min(self.failures)
            note = f"{self.name} {least:,} is too large for the workload itself ({self.failures[least]})."
            plan = replace(plan, notes=(*plan.notes, note))
        return search, plan

    def _short(self, plan: Plan) -> Plan:
        note = f"The search was stopped: a larger {self.name} than {plan.aim.sizes[self.name]:,} may fit."
        return replace(
            plan,
            aim=replace(plan.aim, objective=self.name),
            solved=replace(plan.solved, stopped=self.clock.stopped),
            notes=(note, *plan.notes),
        )

    def _grow(self) -> None:
        request, name = self.request, self.name
        smallest = replace(request, objective=MEMORY, entries=False)
        first = Search(
            device=self.device,
            request=smallest,
            progress=self.progress,
            clock=self.clock,
            memory=self.memory,
        )
        try:
            lean = first.plan()
            self.best = first, lean
        except NothingFits as error:
            if self.clock.stopped:
                raise
            lean = error.plan
            self.closest = error
        value = max(1, self._largest(request.sizes[name], lean))
        step = 1
        known = first.known_cutting
        while isinstance(found := self._planned(value, lean, known), NothingFits):
            if self.clock.stopped and self.best is not None:
                return
            if value <= 1 or self.clock.stopped:
                raise found
            value = max(1, min(value - 1, value - value * step // _CLOSE))
            step *= 2
        self.best = found
        for _ in range(_GROWTHS):
            # The lowest peak may be more fragmented than a higher one: each plan has a largest size of its own.
            larger = self._largest(value, self.best[1])
            if larger <= value:
                break
            better = self._planned(larger, self.best[1], known)
            if isinstance(better, NothingFits):
                break
            value, self.best = larger, better

    def _largest(self, start: int, plan: Plan) -> int:
        """The largest size at which a plan fits; 0 without one.

        What goes wrong above the workload's own size is noted: models end somewhere.
        """
        request, name = self.request, self.name
        planned = with_choices(request.workload, plan.choices)

        def fits(value: int) -> bool:
            self.clock.check()
            self.progress(f"{name} {value:,}")
            try:
                with self.clock.running():
                    price = self.device.price(planned, {**request.sizes, name: value}, request.limit)
            except Exception as error:
                if value <= request.sizes[name]:
                    raise
                self.failures[value] = brief(error)
                return False
            return price.fits and (not plan.entries or price.host_bytes <= request.host_bytes)

        return bracket(fits, start, closer=max(1, start // _CLOSE))[0]

    def _planned(self, value: int, like: Plan, cutting: Cutting | None) -> tuple[Search, Plan] | NothingFits:
        """The best plan at a size, with another one's to begin with; or that there is none."""
        asked = replace(self.request, sizes={**self.request.sizes, self.name: max(1, value)})
        search = Search(
            device=self.device,
            request=asked,
            progress=self.progress,
            start=tuple(choice for choice in like.choices if choice.name not in ACTIVATIONS),
            cutting=cutting,
            clock=self.clock,
            memory=self.memory,
        )
        try:
            return search, search.plan()
        except NothingFits as error:
            return error


def grown_size(request: Request) -> str:
    """The size that an objective names: by its own name, or ``batch`` or ``sequence`` for the one that it must be.

    Raises:
        UsageError: it names none.
    """
    objective, sizes = request.objective, request.sizes
    if objective in sizes:
        return objective
    if objective == "batch":
        return batch_size_name(sizes)
    if objective == "sequence":
        found = [name for name in sizes if "seq" in name or "length" in name]
        if len(found) == 1:
            return found[0]
    known = ", ".join((THROUGHPUT, MEMORY, PRICE, *_ALIASES, *sizes))
    raise UsageError(f"{objective!r} is no objective of this workload", f"Give one of {known}")
