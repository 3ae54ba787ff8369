"""The cheapest card, cards that share their memory with the host, and what is known before a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from tests.planner.test_search import workload

import vramfit
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner import cheapest_card
from vramfit.planner import search as searching
from vramfit.planner.candidates import Candidates
from vramfit.planner.cheapest_card import cheapest_plan, hourly, rented_cards
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.plans import NothingFits, Plan, PlanRequest, plan_of
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_clock import SearchClock
from vramfit.techniques import Numerics
from vramfit.workload import Workload

GIB = 1 << 30


def _device(card: GpuSpec) -> VirtualBackend:
    return VirtualBackend(card, alloc_conf="", host_bytes=1 << 34)


def _silent(_text: str) -> None:
    pass


def test_the_card_is_taken_on_which_a_step_costs_least() -> None:
    asked = workload(1024, 1 << 14)
    cards = [find_gpu(name) for name in ("H200", "T4", "L4", "L40S")]
    request = PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=0,
        allowed=frozenset({"optimizer-kernel"}),
        entries=False,
    )
    _, plan = cheapest_plan(_device, request, _silent, cards=cards)
    costs = {
        card.name: hourly(card) * _device(card).step_cost(asked, dict(asked.sizes)).step_seconds
        for card in cards
    }
    assert plan.aim.device == min(costs, key=lambda name: costs[name])
    assert plan.aim.objective == "price"
    assert plan.aim.budget_bytes == find_gpu(plan.aim.device).total_bytes
    card = find_gpu(plan.aim.device)
    dollars = 1000 * plan.after.step_seconds / 3600 * hourly(card)
    assert f"1,000 steps on {card.name} at {card.price}" in plan.notes[0]
    assert f"${dollars:.3g}, the least of 4 cards" in plan.notes[0]


def test_a_card_that_is_too_small_is_passed_over_and_named() -> None:
    asked = workload(256, 1 << 21)  # 16 GiB of activations
    request = PlanRequest(
        workload=asked, sizes=asked.sizes, budget_bytes=0, allowed=frozenset({"tf32"}), entries=False
    )
    _, plan = cheapest_plan(_device, request, _silent, cards=[find_gpu("T4"), find_gpu("A100 80GB SXM")])
    assert plan.aim.device == "A100 SXM 80GB"
    assert plan.notes[0].endswith("No plan fits T4. Searched were 2 of 2.")


@dataclass
class Searched:
    """Stands in for searches: cards come to what they are said to, in dollars a step, and each is noted."""

    seconds: dict[str, float]
    names: list[str] = field(default_factory=list)

    def __call__(
        self, device: VirtualBackend, request: PlanRequest, progress: object, clock: SearchClock
    ) -> tuple[PlanSearch, Plan]:
        self.names.append(device.name)
        figures = PlanFigures(
            peak_allocated_bytes=0,
            peak_reserved_bytes=0,
            total_bytes=0,
            step_seconds=self.seconds[device.name],
        )
        aim = PlanTarget(device=device.name, budget_bytes=1)
        return PlanSearch(Candidates(device=device, request=request)), plan_of((), aim, figures, figures)


def _plain_costs(asked: Workload, names: Iterable[str]) -> dict[str, float]:
    return {
        name: hourly(find_gpu(name))
        * _device(find_gpu(name)).step_cost(asked, dict(asked.sizes)).step_seconds
        for name in names
    }


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_cards_are_searched_until_none_that_is_left_can_be_cheaper(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = workload(1024, 1 << 14)
    names = [find_gpu(name).name for name in ("H200", "T4", "L4", "L40S", "A10G")]
    costs = _plain_costs(asked, names)
    order = sorted(names, key=lambda name: costs[name])
    # Memory makes a step on the first card as dear as this; the others keep their plain seconds.
    seconds = {name: costs[name] / hourly(find_gpu(name)) for name in names}
    seconds[order[0]] *= factor
    searched = Searched(seconds)
    monkeypatch.setattr(cheapest_card, "promised_plan", searched)
    request = PlanRequest(
        workload=asked, sizes=asked.sizes, budget_bytes=0, allowed=frozenset({"tf32"}), entries=False
    )
    _, plan = cheapest_plan(_device, request, _silent, cards=[find_gpu(name) for name in names])
    assert plan.aim.device == order[0 if factor == 1 else 1]
    assert searched.names == order[: 1 if factor == 1 else 2]
    count = len(searched.names)
    told = f"Searched were {count} of 5; a step without any limit of memory costs more on the {5 - count} that were"
    assert told in plan.notes[0]


def test_a_card_that_techniques_make_cheaper_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = workload(4096, 1 << 12)
    names = [find_gpu(name).name for name in ("T4", "A100 80GB SXM")]
    costs = _plain_costs(asked, names)
    seconds = {name: costs[name] / hourly(find_gpu(name)) for name in names}
    first, other = sorted(names, key=lambda name: costs[name])
    assert first == "T4", "without TF32, which it does not have"
    searched = Searched(seconds)
    monkeypatch.setattr(cheapest_card, "promised_plan", searched)
    for numerics, expected in ((Numerics.ROUNDING, [first]), (Numerics.PRECISION, [first, other])):
        searched.names.clear()
        request = PlanRequest(
            workload=asked,
            sizes=asked.sizes,
            budget_bytes=0,
            allowed=frozenset({"tf32"}),
            numerics=numerics,
            entries=False,
        )
        cheapest_plan(_device, request, _silent, cards=[find_gpu(name) for name in names])
        assert searched.names == expected


def test_cards_for_rent_have_the_price_of_an_hour() -> None:
    names = [card.name for card in rented_cards()]
    assert names[0] == "T4"
    assert len(names) == 15
    assert "RTX 4090" not in names


@pytest.mark.parametrize("given", [{"gpu": "T4"}, {"budget": "2GiB"}, {"margin": "1GiB"}])
def test_the_cheapest_card_is_not_given(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="the objective price chooses the card"):
        vramfit.plan(workload(64, 4), objective="price", **given)  # type: ignore[arg-type]


def test_nothing_is_offloaded_where_the_host_has_the_same_memory() -> None:
    asked = workload(1024, 64)
    device = _device(find_gpu("Jetson Orin Nano"))
    least = device.step_cost(asked, dict(asked.sizes)).total_bytes
    # States of Adam could wait on the host: on another card of this budget they do.
    request = PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=least - (24 << 20),
        host_bytes=1 << 34,
        allowed=frozenset({"optimizer-offload"}),
        entries=False,
    )
    with pytest.raises(NothingFits) as raised:
        promised_plan(device, request, _silent)
    assert (
        "Jetson Orin Nano 8GB shares its memory with the host: nothing is offloaded"
        in raised.value.plan.notes[-1]
    )
    assert not raised.value.plan.choices
    context = find_gpu("RTX 4090").typical_context_bytes - device.spec.typical_context_bytes
    elsewhere = PlanRequest(**_parts(request) | {"budget_bytes": request.budget_bytes + context})
    _, plan = promised_plan(_device(find_gpu("RTX 4090")), elsewhere, _silent)
    assert [choice.name for choice in plan.choices] == ["optimizer-offload"]


def _parts(request: PlanRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in PlanRequest.__slots__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("budget", "allowed", "message"),
    [
        (GIB // 4, None, "nothing fits 256.00 MiB: the CUDA context alone takes "),
        (
            1,
            frozenset({"activation-checkpointing"}),
            "the parameters alone take 32.03 MiB, and the CUDA context",
        ),
    ],
    ids=["context", "parameters"],
)
def test_what_no_technique_changes_is_known_before_the_search(
    budget: int, allowed: frozenset[str] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_self: PlanSearch) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr(searching.PlanSearch, "_climb", never)
    asked = workload(1024, 64)
    card = find_gpu("RTX 4090")
    if budget == 1:
        budget = card.typical_context_bytes + (16 << 20)
    request = PlanRequest(workload=asked, sizes=asked.sizes, budget_bytes=budget, allowed=allowed)
    with pytest.raises(NothingFits) as raised:
        PlanSearch(Candidates(device=_device(card), request=request)).plan()
    assert message in raised.value.message
    assert raised.value.plan.before.total_bytes > budget
