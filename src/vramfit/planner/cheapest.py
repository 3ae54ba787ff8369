"""The objective ``price``: the card of the catalogue on which a training costs least, with its plan.

Cards with the price of an hour are tried from the one on which a plain step costs least, were it large enough; the
first that have a plan are searched in full, and the cheapest of them is taken. Techniques change what a step costs by
far less than cards differ in price, but they change it: what was not searched may come out a little cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, catalogue
from vramfit.planner.clock import Clock
from vramfit.planner.plan import Plan
from vramfit.planner.price import Device
from vramfit.planner.promising import promised_plan
from vramfit.planner.request import PRICE, THROUGHPUT, NothingFits, Request
from vramfit.planner.search import Search

Progress = Callable[[str], None]

MARGIN = 0.02
"""Part of a card that is left free: drivers, displays and neighbours differ by that much."""

_SEARCHED = 3
"""Cards with a plan, of which the cheapest is taken."""

_STEPS = 1000
"""For which hours and dollars are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A card for rent, and what training on it comes to.

    Attributes:
        card: with the price of an hour.
        seconds: of a step.
    """

    card: GpuSpec
    seconds: float

    @property
    def dollars(self) -> float:
        """Of a step."""
        return self.seconds / 3600 * hourly(self.card)

    @property
    def words(self) -> str:
        """For a reader."""
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
    device_of: Callable[[GpuSpec], Device],
    request: Request,
    progress: Progress,
    clock: Clock | None = None,
    cards: Iterable[GpuSpec] | None = None,
) -> tuple[Search, Plan]:
    """The plan of the card on which a step costs least; its notes name what others cost.

    Args:
        device_of: makes the virtual card.
        request: what is asked for; its budget is that of each card, less 2 %.
        progress: told what is being done.
        clock: of all searches together: when it has stopped, the best so far is taken.
        cards: to choose from; None for all with the price of an hour.

    Raises:
        NothingFits: no card has a plan; the closest is that of the largest.
        UsageError: the workload cannot be run.
    """
    clock = clock or Clock(limit=request.search_seconds)
    plain = []
    for card in rented_cards() if cards is None else cards:
        progress(f"a plain step on {card.name}")
        price = device_of(card).price(request.workload, dict(request.sizes))
        plain.append(Offer(card=card, seconds=price.step_seconds))
    if not plain:
        raise UsageError(
            "no card has the price of an hour", 'Name one with --gpu, and "throughput" as the objective'
        )
    found: list[tuple[Offer, Search, Plan]] = []
    failures: list[NothingFits] = []
    for offer in sorted(plain, key=lambda one: one.dollars):
        if len(found) == _SEARCHED or (found and clock.stopped):
            break
        card = offer.card
        asked = replace(
            request,
            objective=THROUGHPUT,
            budget_bytes=card.total_bytes,
            margin_bytes=round(MARGIN * card.total_bytes),
        )
        try:
            search, plan = promised_plan(device_of(card), asked, _named(progress, card.name), clock)
        except NothingFits as error:
            failures.append(error)
            continue
        found.append((Offer(card=card, seconds=plan.after.step_seconds), search, plan))
    if not found:
        raise max(failures, key=lambda error: error.plan.aim.budget_bytes)
    found.sort(key=lambda one: one[0].dollars)
    (best, search, plan), others = found[0], [offer.words for offer, _, _ in found[1:]]
    note = f"{_STEPS:,} steps on {best.words}, the least of {len(plain)} cards for rent; prices are the catalogue's."
    if others:
        note += f" Next: {'; '.join(others)}."
    if failures:
        note += f" No plan fits {', '.join(error.plan.aim.device for error in failures)}."
    return search, replace(plan, aim=replace(plan.aim, objective=PRICE), notes=(note, *plan.notes))


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")
