"""Batches brought ahead on the CPU: order, values, errors, and threads that end."""

from __future__ import annotations

import gc
import threading
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import vramfit
from vramfit.errors import UsageError
from vramfit.runtime.feeding.depth_rule import MOST, DepthRule
from vramfit.units import GIB

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "vramfit-prefetch"]


def await_until(true: Callable[[], bool]) -> None:
    until = time.perf_counter() + 5
    while not true() and time.perf_counter() < until:
        time.sleep(0.001)
    time.sleep(0.002)  # and a little longer, to see what should not come


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(0, 12),
    depth=st.none() | st.integers(1, 5),
    budget=st.none() | st.integers(1, 200),
)
def test_order_and_values_are_the_loaders(
    data: st.DataObject, count: int, depth: int | None, budget: int | None
) -> None:
    """Whoever is slow, whatever is kept, and wherever the loader fails."""
    fails = data.draw(st.none() | st.integers(0, count))
    slow = data.draw(st.lists(st.sampled_from([0.0, 0.0005]), min_size=count, max_size=count))
    keeps = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    batches = [
        {"x": torch.full((number % 5 + 1,), float(number)), "at": [number, Pair(torch.tensor(number), "s")]}
        for number in range(count)
    ]

    def loader() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == fails:
                raise KeyError(number)
            time.sleep(slow[number])
            yield batch
        if fails == count:
            raise KeyError(count)

    found, kept = [], []
    feed = iter(vramfit.prefetch(loader(), "cpu", depth=depth, budget=budget))
    try:
        for batch in feed:
            found.append(batch["at"][0])
            assert batch is batches[found[-1]]
            if keeps[found[-1]]:
                kept.append(batch)
            else:
                time.sleep(0.0005)
        assert fails is None
    except KeyError as error:
        assert error.args == (fails,)
        assert fails is not None
    assert found == list(range(count if fails is None else fails))
    assert list(feed) == []
    assert not threads()


def test_a_shuffled_loader_draws_what_it_would_draw_and_the_model_too() -> None:
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, shuffle=True)

    def run(batches: Any) -> list[Any]:
        torch.manual_seed(0)
        return [[batch[0].tolist() for batch in batches] for _ in range(2)] + [torch.rand(1).item()]

    assert run(vramfit.prefetch(loader, "cpu")) == run(loader)
    assert len(vramfit.prefetch(loader, "cpu")) == 8


def test_workers_of_a_loader_end_with_the_loop() -> None:
    data = TensorDataset(torch.arange(64))
    loader = DataLoader(data, batch_size=4, num_workers=1, sampler=RandomSampler(data))
    for number, _ in enumerate(vramfit.prefetch(loader, "cpu")):
        if number == 2:
            break
    assert not threads()
    assert not torch.multiprocessing.active_children()


def test_leaving_the_loop_or_losing_the_feed_stops_the_thread_and_frees_the_batches() -> None:
    made, closed = [], []

    def endless() -> Iterator[torch.Tensor]:
        try:
            while True:
                made.append(1)
                yield torch.zeros(8)
        finally:
            closed.append(threading.current_thread().name)

    for _ in vramfit.prefetch(endless(), "cpu", depth=3):
        break
    assert not threads()
    assert closed == ["vramfit-prefetch"]
    assert len(made) <= 3
    feed = iter(vramfit.prefetch(endless(), "cpu"))
    next(feed)
    assert len(threads()) == 1
    circle: list[Any] = [feed]
    circle.append(circle)
    del feed, circle
    gc.collect()
    assert not threads()
    feed = iter(vramfit.prefetch(endless(), "cpu"))
    feed.close()
    assert list(feed) == []
    assert not threads()


def test_an_error_keeps_its_traceback_and_comes_after_what_was_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("of the loader")

    feed = iter(vramfit.prefetch(broken(), "cpu", depth=4))
    assert next(feed) == 1
    with pytest.raises(ZeroDivisionError, match="of the loader") as caught:
        next(feed)
    assert caught.traceback[-1].name == "broken"
    with pytest.raises(StopIteration):
        next(feed)


def test_the_depth_is_never_exceeded_and_is_used() -> None:
    """Counted by the loader itself: what it made less what the loop has asked for."""
    for depth in (1, 2, 4):
        made, ahead = [0], []

        def loader(made: list[int] = made) -> Iterator[torch.Tensor]:
            for _ in range(12):
                made[0] += 1
                yield torch.zeros(4)

        for asked, _ in enumerate(vramfit.prefetch(loader(), "cpu", depth=depth), start=1):
            await_until(
                lambda made=made, asked=asked, depth=depth: made[0] - asked + 1 == min(depth, 13 - asked)
            )
            ahead.append(made[0] - asked + 1)  # with the one in use
        assert max(ahead) == depth
        assert ahead[1:6] == [depth] * 5


def test_a_loop_that_keeps_all_batches_gets_all() -> None:
    assert len(list(vramfit.prefetch([torch.zeros(1) for _ in range(20)], "cpu", depth=2))) == 20


def test_the_thread_has_the_modes_of_the_loop() -> None:
    def loader() -> Iterator[tuple[bool, torch.device]]:
        for _ in range(4):
            yield torch.is_grad_enabled(), torch.zeros(1).device

    with torch.no_grad(), torch.device("meta"):
        found = list(vramfit.prefetch(loader(), "cpu"))
    assert found == [(False, torch.device("meta"))] * 4


def test_slow_batches_now_and_then_ask_for_depth_by_time_and_memory_bounds_it() -> None:
    def rule(limit: int | None = None, free: int = GIB) -> int:
        made = DepthRule(None, limit, lambda: free)
        for number in range(64):
            made.loaded(0.05 if number % 8 == 0 else 0.001, 100)
            made.stepped(0.01)
        return made.depth

    assert rule() == 6  # the slowest takes five steps
    assert rule(limit=350) == 3
    assert rule(free=799) == 2
    assert rule(free=800) == 6
    slow = DepthRule(None, None, lambda: GIB)
    for _ in range(64):
        slow.loaded(0.02, 100)
        slow.stepped(0.01)
    assert slow.depth == 2  # a loader that is too slow leaves any queue empty
    bursts = DepthRule(None, None, lambda: GIB)
    for number in range(64):
        bursts.loaded(0.5 if number == 0 else 0.0, 100)
        bursts.stepped(0.01)
    assert bursts.depth == MOST


def test_a_deeper_queue_hides_what_is_late_now_and_then() -> None:
    def loader() -> Iterator[torch.Tensor]:
        for number in range(24):
            time.sleep(0.04 if number % 8 == 7 else 0.0)
            yield torch.zeros(1)

    waited = {1: 9.0, 6: 9.0}
    for depth in (1, 6, 1, 6):
        batches = vramfit.prefetch(loader(), "cpu", depth=depth)
        for _ in batches:
            time.sleep(0.01)
        assert batches.report is not None
        assert batches.report.batches == 24
        waited[depth] = min(waited[depth], batches.report.waited_seconds)
    assert waited[1] > 0.1  # three times 40 ms
    assert waited[6] < waited[1] / 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loader": 3}, "gives no batches"),
        ({"loader": [], "depth": 0}, "depth=0"),
        ({"loader": [], "budget": "many"}, "budget="),
        ({"loader": [], "device": "there"}, "device="),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        vramfit.prefetch(**arguments)


def test_what_iterating_raises_comes_at_once() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        iter(vramfit.prefetch(Broken(), "cpu"))
    assert not threads()
    with pytest.raises(TypeError):
        len(vramfit.prefetch(Broken(), "cpu"))


def test_all_kinds_of_batches_come_as_they_are() -> None:
    batches = [
        UserDict(x=torch.ones(1)),
        Sample(torch.ones(1), "name"),
        Pair(torch.ones(1), [torch.ones(2)]),
        "text",
        None,
        torch.ones(3),
    ]
    found = list(vramfit.prefetch(batches, "cpu"))
    assert all(one is other for one, other in zip(found, batches, strict=True))
