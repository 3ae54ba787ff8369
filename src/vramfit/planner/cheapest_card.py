"""The objective ``price``: the card of the catalogue on which a training costs least, with its plan.

NOTE [The bound]: cards are searched from the one on which a step costs least, were it large enough, until none that is
left can be cheaper than the best plan: what fits less well only takes longer. The least time of a step on a card is
that of the plain program without a limit of memory. Techniques may quicken it: so for a card that would be left out,
what the plans found so far quicken with is run there, too, and all that may quicken it there at once; the quickest
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.planner.candidates import Candidates, key_of
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.planner_job import MARGIN, PRICE
from vramfit.planner.plans import THROUGHPUT, NothingFits, Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_clock import SearchClock, SearchStopped
from vramfit.techniques import Choice, check_together

Progress = Callable[[str], None]

_STEPS = 1000
"""The steps whose hours and dollars notes give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A card for rent, and what a step on it costs.

    Attributes:
        card: with the price of an hour.
        seconds: of a step.
    """

    card: GpuSpec
    seconds: float

    @property
    def dollars(self) -> float:
        """What a step costs."""
        return self.seconds / 3600 * hourly(self.card)

    @property
    def words(self) -> str:
        """The offer as a note gives it."""
        price = self.card.price
        assert price is not None
        hours, dollars = _STEPS * self.seconds / 3600, _STEPS * self.dollars
        return f"{self.card.name} at {price} ({price.date}): {hours:.3g} h and ${dollars:.3g}"


def hourly(card: GpuSpec) -> float:
    """Dollars of an hour; endless for a card without such a price."""
    return card.price.value if card.price is not None and card.price.unit == "USD/h" else float("inf")


def rented_cards() -> tuple[GpuSpec, ...]:
    """The cards of the catalogue that have the price of an hour, the cheapest hour first."""
    return tuple(sorted((card for card in catalogue() if hourly(card) < float("inf")), key=hourly))


def cheapest_plan(
    device_of: Callable[[GpuSpec], DeviceBackend],
    request: PlanRequest,
    progress: Progress,
    clock: SearchClock | None = None,
    cards: Iterable[GpuSpec] | None = None,
) -> tuple[PlanSearch, Plan]:
    """The plan of the card on which a step costs least; its notes name what others cost.

    Args:
        request: what is asked for; its budget is that of each card, less 2 %.
        clock: of all searches together: when it has stopped, the best so far is taken.
        cards: to choose from; None for all with the price of an hour.

    Raises:
        NothingFits: no card has a plan; the closest is that of the largest.
        UsageError: the workload cannot be run.
    """
    choosing = _Choosing(
        device_of=device_of,
        request=request,
        progress=progress,
        clock=clock or SearchClock(limit=request.search_seconds),
    )
    return choosing.cheapest(rented_cards() if cards is None else cards)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A card that was searched and has a plan."""

    offer: Offer
    search: PlanSearch
    plan: Plan


@dataclass(kw_only=True, slots=True)
class _Choosing:
    """The search over cards. See NOTE [The bound]."""

    device_of: Callable[[GpuSpec], DeviceBackend]
    request: PlanRequest
    progress: Progress
    clock: SearchClock
    found: list[_Found] = field(default_factory=list)
    failures: list[NothingFits] = field(default_factory=list)

    def cheapest(self, cards: Iterable[GpuSpec]) -> tuple[PlanSearch, Plan]:
        """The plan of the cheapest card, with its notes.

        Raises:
            NothingFits: no card has a plan.
            UsageError: there is no card, or the workload cannot be run.
        """
        waiting = sorted(map(self._plain, cards), key=lambda one: one.dollars)
        if not waiting:
            raise UsageError(
                "no card has the price of an hour", 'Name one with --gpu, and "throughput" as the objective'
            )
        count = len(waiting)
        left: list[Offer] = []
        while waiting and not (self.found and self.clock.stopped):
            offer = waiting.pop(0)
            try:
                if self.found and self._least(offer).dollars >= self._best.offer.dollars:
                    left.append(offer)
                    continue
            except SearchStopped:
                waiting.insert(0, offer)
                break
            self._search(offer.card)
        if not self.found:
            raise max(self.failures, key=lambda error: error.plan.aim.budget_bytes)
        best = self._best
        plan = replace(best.plan, aim=replace(best.plan.aim, objective=PRICE))
        return best.search, replace(plan, notes=(self._note(count, left, waiting), *plan.notes))

    @property
    def _best(self) -> _Found:
        return min(self.found, key=lambda one: one.offer.dollars)

    def _plain(self, card: GpuSpec) -> Offer:
        """What a plain step costs on a card, if the card were large enough."""
        self.progress(f"a plain step on {card.name}")
        cost = self.device_of(card).step_cost(self.request.workload, dict(self.request.sizes))
        return Offer(card=card, seconds=cost.step_seconds)

    def _least(self, offer: Offer) -> Offer:
        """The least that a step can cost on a card, with what quickens it in the plans so far.

        Raises:
            SearchStopped: there is no time left to find out.
        """
        best = self._best.offer.dollars
        if offer.dollars < best:
            return offer
        self.progress(f"the least on {offer.card.name}")
        candidates = Candidates(
            device=self.device_of(offer.card), request=_asked(self.request, offer.card), clock=self.clock
        )
        tried = {}
        for one in self.found:
            quickening = tuple(choice for choice in one.plan.choices if choice.technique.quickens)
            tried[key_of(quickening)] = quickening
        together = _together(candidates.options(candidates.plain, quickening=True))
        tried.setdefault(key_of(together), together)
        for choices in tried.values():
            if not choices or offer.dollars < best:
                continue
            try:
                cost = candidates.cost_without_limit(choices, 0.0)
            except Exception:  # not every card has what a technique needs
                continue
            offer = min(offer, replace(offer, seconds=cost.step_seconds), key=lambda one: one.seconds)
        return offer

    def _search(self, card: GpuSpec) -> None:
        """Look for the plan of a card."""
        asked = _asked(self.request, card)
        named = _with_name(self.progress, card.name)
        try:
            search, plan = promised_plan(self.device_of(card), asked, named, self.clock)
        except NothingFits as error:
            self.failures.append(error)
            return
        offer = Offer(card=card, seconds=plan.after.step_seconds)
        self.found.append(_Found(offer=offer, search=search, plan=plan))

    def _note(self, count: int, left: Sequence[Offer], waiting: Sequence[Offer]) -> str:
        """What a step costs on each card, how many were searched, and why not all."""
        best, *others = sorted((one.offer for one in self.found), key=lambda one: one.dollars)
        searched = len(self.found) + len(self.failures)
        note = f"{_STEPS:,} steps on {best.words}, the least of {count} cards for rent; prices are the catalogue's."
        if others:
            note += f" Next: {'; '.join(offer.words for offer in others)}."
        if self.failures:
            note += f" No plan fits {', '.join(error.plan.aim.device for error in self.failures)}."
        note += f" Searched were {searched} of {count}"
        if left:
            note += f"; a step without any limit of memory costs more on the {len(left)} that were left out"
        if waiting:
            note += f"; for {len(waiting)} there was no time"
        return f"{note}."


def _asked(request: PlanRequest, card: GpuSpec) -> PlanRequest:
    """What is asked of a card: the quickest step that it has the memory for."""
    return replace(
        request,
        objective=THROUGHPUT,
        budget_bytes=card.total_bytes,
        margin_bytes=round(MARGIN * card.total_bytes),
    )


def _together(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """As many techniques as go together, each with its mildest setting."""
    found: tuple[Choice, ...] = ()
    for choice in choices:
        if choice.name in {one.name for one in found}:
            continue
        try:
            check_together((*found, choice))
        except UsageError:
            continue
        found = (*found, choice)
    return found


def _with_name(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")
