"""The largest size, looked for on devices whose memory is a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vramfit.planner.devices.cost import StepCost
from vramfit.planner.largest_size import CEILING, CardCheck, LargestSize, SizeSearch, with_card
from vramfit.workload import Workload

WORKLOAD = Workload(
    model=lambda: nn.Linear(2, 2),
    batch=lambda batch_size, length: torch.ones(batch_size, length, 2),
    sizes={"batch_size": 8, "length": 4},
)


class Formula:
    """A device on which a step takes what a function of the sizes says."""

    name, device_type, total_bytes = "formula", "cuda", 1 << 40

    def __init__(self, need: Callable[[int, int], int]) -> None:
        self.need = need
        self.asked: list[dict[str, int]] = []

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        assert workload is WORKLOAD
        self.asked.append(sizes)
        need = self.need(sizes["batch_size"], sizes["length"])
        fits = budget is None or need <= budget
        return StepCost(
            fits=fits,
            peak_allocated_bytes=need,
            peak_reserved_bytes=need,
            step_seconds=sizes["batch_size"] / 100 if fits else 0.0,
        )

    def profile_step(self, *given: object) -> None:
        raise AssertionError("nothing is observed here")


def search(device: Formula, limit: int, *, start: int = 8, name: str = "batch_size") -> LargestSize:
    return SizeSearch(device, WORKLOAD, {**WORKLOAD.sizes, name: start}, name, limit).largest()  # type: ignore[arg-type]


@given(
    each=st.integers(1, 1000),
    base=st.integers(0, 5000),
    limit=st.integers(0, 10**6),
    start=st.integers(1, 5000),
)
def test_the_largest_is_the_last_that_fits(each: int, base: int, limit: int, start: int) -> None:
    found = search(Formula(lambda size, _: base + each * size), limit, start=start)
    most = max(0, limit - base) // each
    assert found.value == found.predicted == most
    assert found.failing == most + 1
    assert found.total_bytes == (base + each * most if most else 0)
    assert found.least_bytes == (0 if most else base + each)
    fitting = {one.value: one.fits for one in found.tries}
    assert not fitting[found.failing]
    assert len(fitting) == len(found.tries)


def test_another_size_varies_alone() -> None:
    device = Formula(lambda size, length: size * length)
    found = search(device, 100, start=2, name="length")
    assert found.value == 12
    assert {sizes["batch_size"] for sizes in device.asked} == {8}


def test_what_never_fails_ends_at_the_ceiling() -> None:
    found = search(Formula(lambda size, _: 1), 1)
    assert found.value == CEILING
    assert found.failing == 0


@given(
    predicted=st.integers(1, 3000),
    true=st.integers(0, 4000),
)
def test_a_card_is_asked_from_the_prediction_down(predicted: int, true: int) -> None:
    device = Formula(lambda size, _: size)
    value, failing, tries = SizeSearch(
        device,  # type: ignore[arg-type]
        WORKLOAD,
        {**WORKLOAD.sizes, "batch_size": predicted},
        "batch_size",
        true,
    ).largest_up_to()
    assert value == min(predicted, true)
    assert failing == (0 if predicted <= true else true + 1)
    assert tries[0].value == predicted
    if predicted <= true:
        assert len(tries) == 1


def test_near_predictions_take_few_runs() -> None:
    device = Formula(lambda size, _: size)
    sizes = {**WORKLOAD.sizes, "batch_size": 1000}
    _, _, tries = SizeSearch(device, WORKLOAD, sizes, "batch_size", 997).largest_up_to()  # type: ignore[arg-type]
    assert len(tries) <= 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8, (8, 9, 0.08)), (6, (6, 7, 0.06)), (0, (0, 1, 0.0))],
)
def test_the_card_has_the_last_word(value: int, expected: tuple[int, int, float]) -> None:
    found = search(Formula(lambda size, _: size), 8)
    device = Formula(lambda size, _: size)
    card, failing, tries = SizeSearch(device, WORKLOAD, WORKLOAD.sizes, "batch_size", value).largest_up_to()  # type: ignore[arg-type]
    both = with_card(found, CardCheck(card="a card", value=card, failing=failing, tries=tries))
    assert (both.value, both.failing, both.step_seconds) == expected
    assert both.predicted == 8


def test_a_card_that_was_not_asked_changes_nothing() -> None:
    found = search(Formula(lambda size, _: size), 8)
    both = with_card(found, CardCheck(card="a card", skipped="it is another one"))
    assert both.value == both.predicted == 8
    assert both.total_bytes == found.total_bytes


def test_a_value_at_which_the_workload_fails_does_not_fit_and_is_told() -> None:
    def need(batch: int, length: int) -> int:
        if length > 128:
            raise IndexError("index out of range in self")
        return batch * length

    found = search(Formula(need), 10**6, start=4, name="length")
    assert (found.value, found.failing) == (128, 129)
    assert found.failure == "length 129 fails: IndexError: index out of range in self"
    with pytest.raises(IndexError):
        search(Formula(need), 10**6, start=200, name="length")


def test_what_techniques_take_of_the_host_is_held_to_its_budget() -> None:
    class Offloading(Formula):
        def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
            return replace(super().step_cost(workload, sizes, budget), host_bytes=10 * sizes["batch_size"])

    device = Offloading(lambda batch, _: batch)
    found = [
        SizeSearch(device, WORKLOAD, WORKLOAD.sizes, "batch_size", 1000, host_limit=limit).largest()  # type: ignore[arg-type]
        for limit in (None, 500)
    ]
    assert [one.value for one in found] == [1000, 50]
    assert all(one.fits == (one.value <= 50) for one in found[1].tries)
