"""What runs for real is limited in seconds: trials of micro-batches, and the comparison of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.planner.test_gradient_check import LAYERS, _plan
from tests.planner.test_micro_batch_trial import _profile, _tall, contrastive
from tests.planner.test_search_cache import JOB
from tests.planner.test_search_clock import Second, Timed
from tests.techniques.toys import all_toys

from vramfit.planner import gradient_check, micro_batch_trial
from vramfit.planner.candidates import Candidates
from vramfit.planner.gradient_check import check_promises
from vramfit.planner.micro_batch_trial import try_micro_batching
from vramfit.planner.plans import PlanRequest
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import INTERRUPTED, SearchClock, SearchStopped, TimeOver, limited
from vramfit.planner.search_evidence import Evidence
from vramfit.workload import Batch


class Ticks:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def _chain(second: Second, late: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
    """A loss whose backward pass takes no Python, and the layers that it came to."""
    x = torch.ones(3, requires_grad=True)
    reached: list[int] = []
    x.register_hook(lambda _: reached.append(0))
    out = x
    for number in range(1, 30):
        out = out * 1.5
        if number == 20:
            out.register_hook(lambda _: late())
        if number == 25:
            out.register_hook(lambda _: reached.append(25))
    return out.sum(), reached


def test_a_backward_pass_ends_between_two_operations() -> None:
    second = Second()
    clock = SearchClock(now=second)

    def late() -> None:
        second.time = 9.0

    loss, reached = _chain(second, late)
    with pytest.raises(TimeOver), limited(clock, 8.0):
        loss.backward()
    assert reached == [25]
    loss, reached = _chain(second, lambda: None)
    with limited(clock, 8.0):
        loss.backward()
    assert reached == [25, 0]
    loss, reached = _chain(second, clock.interrupt)
    with pytest.raises(TimeOver), limited(clock, 8.0):
        loss.backward()
    assert reached == [25]


def test_half_of_what_a_search_has_left_is_the_limit() -> None:
    second = Second()
    clock = SearchClock(limit=100.0, now=second)
    with clock.running():
        second.time = 10.0
    with clock.sparing(1), limited(clock, 60.0):
        second.time = 49.0  # of 90 seconds that are left ten are spared
        torch.ones(2).add(1)
        second.time = 50.0
        with pytest.raises(TimeOver):
            torch.ones(2)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_trial_that_takes_too_long_is_none(by_name: bool) -> None:
    workload = replace(all_toys()["mlp"], loss=contrastive)
    found = try_micro_batching(workload, _profile(workload), by_name=by_name, clock=SearchClock(now=Ticks()))
    assert (found.setting is not None, found.known, found.over) == (by_name, False, True)
    assert "was not tried, since the time was over; " in found.note
    assert ("it is left out unless it is allowed by its name" in found.note) is not by_name


def test_what_takes_too_long_is_tried_by_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_trial, "_LONGEST", 3000.0)
    workload = _tall()
    found = try_micro_batching(workload, _profile(workload), clock=SearchClock(now=Ticks()))
    assert found.setting is not None and not found.over
    assert "was tried with a stand-in of the same code with 2 of 12 layers" in found.note
    monkeypatch.setattr(micro_batch_trial, "_LONGEST", 1e6)
    found = try_micro_batching(workload, _profile(workload), clock=SearchClock(now=Ticks()))
    assert "was tried with the model itself" in found.note


def test_encoders_that_were_not_tried_in_time_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise TimeOver

    workload = replace(all_toys()["mlp"], loss=contrastive)
    monkeypatch.setattr(micro_batch_trial, "try_encoders", late)
    found = try_micro_batching(workload, _profile(workload), by_name=True)
    assert (found.setting, found.encoders, found.known, found.over) == (None, (), True, True)
    assert "in pieces was not tried, since the time was over" in found.note


def test_the_next_search_tries_what_this_one_had_no_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = all_toys()["mlp"]
    request = PlanRequest(workload=workload, sizes=workload.sizes, budget_bytes=1 << 33, host_bytes=1 << 30)

    def candidates() -> Candidates:
        cache = SearchCache(tmp_path / "search.jsonl", Evidence(JOB, tmp_path))
        return Candidates(device=Timed(Second()), request=request, cache=cache)

    with monkeypatch.context() as short:
        short.setattr(micro_batch_trial, "_LONGEST", 0.0)
        first = candidates()
        assert first.micro_batching.setting is None
        assert any("not tried, since the time was over" in note for note in first.notes(()))
    second = candidates()
    assert second.micro_batching.setting is not None
    assert "was tried with the model itself" in second.micro_batching.note
    stopped = candidates()
    stopped.cache = None
    assert stopped.plain.profile
    stopped.clock.stopped = INTERRUPTED
    with pytest.raises(SearchStopped):
        _ = stopped.micro_batching
    assert any("not tried, since the time was over" in note for note in stopped.notes(()))
    third = candidates()
    assert third.cache is not None
    assert third.micro_batching.setting == second.micro_batching.setting
    assert third.cache.used == 1


def test_a_comparison_that_takes_too_long_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = all_toys()["language-tied"]
    plan = _plan(workload, activation_checkpointing=LAYERS)
    monkeypatch.setattr(gradient_check, "_LONGEST", 0.0)
    found = check_promises(workload, plan)
    assert found.fault is None
    assert "were not compared with the plain program's, since the time was over" in found.note


def test_an_interrupt_during_the_comparison_leaves_the_plan() -> None:
    toy = all_toys()["language-tied"]
    assert toy.loss is not None
    own = toy.loss
    calls = []

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(model, batch)

    workload = replace(toy, loss=loss)
    found = check_promises(workload, _plan(workload, activation_checkpointing=LAYERS))
    assert found.fault is None
    assert "were not compared with the plain program's, since that was interrupted" in found.note
