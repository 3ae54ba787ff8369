"""Gates at their bounds: a byte more fails, a byte less passes."""

from __future__ import annotations

import pytest

from vramfit.analysis import Bound, PeakState, Quantity, Tolerance, baseline_gates, budget_gates, card_gates
from vramfit.errors import UsageError


def state(**figures: object) -> PeakState:
    return PeakState(
        **({"name": "now", "device": 0, "allocated": 80, "reserved": 100, "outside": 20} | figures)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quantity", "actual"), [(Quantity.TOTAL, 120), (Quantity.RESERVED, 100), (Quantity.ALLOCATED, 80)]
)
def test_a_budget_is_kept_to_the_byte(quantity: Quantity, actual: int) -> None:
    for budget, passed in ((actual, True), (actual - 1, False)):
        (gate,) = budget_gates([state()], budget, quantity)
        assert (gate.actual, gate.passed, gate.over) == (actual, passed, actual - budget)


def test_every_device_is_held_to_the_budget() -> None:
    gates = budget_gates([state(), state(device=1, reserved=200)], 150)
    assert [gate.passed for gate in gates] == [True, False]


def test_what_is_not_known_is_said() -> None:
    (gate,) = budget_gates([state(outside=None)], 110)
    assert (gate.actual, gate.passed) == (100, True)
    assert "not known" in gate.note
    with pytest.raises(UsageError, match="does not tell the allocated bytes"):
        budget_gates([state(allocated=None)], 1, Quantity.ALLOCATED)


def test_running_out_fails_whatever_it_held() -> None:
    (gate,) = card_gates([state(ran_out=True), state(device=1)])
    assert (gate.bound, gate.passed, gate.device) == (Bound.CARD, False, 0)
    assert budget_gates([state(ran_out=True)], 1000) == ()
    assert [gate.passed for gate in budget_gates([state(ran_out=True)], 100)] == [False]


@pytest.mark.parametrize(("reserved", "passed"), [(100, True), (101, True), (102, False), (50, True)])
def test_a_baseline_bounds_from_above(reserved: int, passed: bool) -> None:
    gates = baseline_gates([state(reserved=reserved)], [state()], Tolerance.parse("1%"))
    assert [(gate.quantity, gate.passed) for gate in gates] == [
        (Quantity.RESERVED, passed),
        (Quantity.ALLOCATED, True),
    ]
    assert ("write it again" in gates[0].note) == (reserved == 50)


def test_less_than_the_baseline_because_it_ran_out_is_no_progress() -> None:
    gates = baseline_gates([state(reserved=10, ran_out=True)], [state()], Tolerance.parse("1%"))
    assert gates[0].note == ""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({"gpu": "NVIDIA GeForce RTX 4090", "torch": "2.13.0+cu126"}, ""),
        ({"gpu": "", "torch": ""}, ""),
        ({"gpu": "H100 SXM", "torch": "2.13.0"}, "the baseline is of H100 SXM, this run of RTX 4090"),
        ({"gpu": "RTX 4090", "torch": "2.12.1"}, "the baseline is of torch 2.12.1, this run of 2.13.0"),
    ],
)
def test_a_baseline_of_another_card_or_torch_is_said_to_be_one(before: dict[str, object], said: str) -> None:
    now = state(gpu="RTX 4090", torch="2.13.0")
    reserved, allocated = baseline_gates([now], [state(**before)], Tolerance.parse("1%"))
    assert reserved.note.startswith(said)
    assert bool(reserved.note) == bool(said)
    assert not allocated.note


def test_a_baseline_must_know_the_device() -> None:
    with pytest.raises(UsageError, match="has no data for device 1"):
        baseline_gates([state(), state(device=1)], [state()], Tolerance.parse("1%"))
    with pytest.raises(UsageError, match="no figure in common"):
        baseline_gates([state(reserved=None)], [state(allocated=None)], Tolerance.parse("1%"))
