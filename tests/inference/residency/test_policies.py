"""What fits together, who leaves, and what that moves: against brute force, Belady's rule and the true optimum."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.errors import UsageError
from vramfit.inference.residency.eviction import (
    CheapestReturn,
    EvictionPolicy,
    GreedyDualSize,
    LeastRecentlyUsed,
)
from vramfit.inference.residency.placement import (
    Processes,
    SizedModel,
    fitting_sets,
    taken_bytes,
    weight_segment,
)
from vramfit.inference.residency.simulation import FarthestInFuture, optimal_bytes, simulate
from vramfit.units import GIB, MIB

SIZES = {"chat": 15, "code": 27, "embed": 3, "vision": 8, "speech": 5, "small": 13}
MODELS = {
    name: SizedModel(name=name, weight_bytes=size * GIB, request_bytes=size * GIB // 16)
    for name, size in SIZES.items()
}
ROOM = 40 * GIB


def zipf(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    names = list(SIZES)
    chance.shuffle(names)
    return chance.choices(names, [1 / rank for rank in range(1, len(names) + 1)], k=count)


def models_of(sizes: list[tuple[int, int]]) -> dict[str, SizedModel]:
    return {
        str(at): SizedModel(name=str(at), weight_bytes=weights, request_bytes=request)
        for at, (weights, request) in enumerate(sizes)
    }


SIZED = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5).map(models_of)


# -- what fits ---------------------------------------------------------------------------------------------------


def test_one_context_in_one_process_and_one_each_in_several() -> None:
    models = [SizedModel(name=str(at), weight_bytes=at, request_bytes=10 * at) for at in (1, 2, 3)]
    assert taken_bytes(models, context_bytes=100) == 6 + 30 + 100
    assert taken_bytes(models, context_bytes=100, at_once=2) == 6 + 50 + 100
    assert taken_bytes(models, context_bytes=100, processes=Processes.EACH) == 6 + 60 + 300


@given(SIZED, st.integers(12, 60), st.integers(0, 3), st.sampled_from(Processes), st.integers(1, 2))
def test_the_sets_that_fit_are_those_that_no_other_fits_beside(
    models: dict[str, SizedModel], room: int, context: int, processes: Processes, at_once: int
) -> None:
    def taken(chosen: tuple[SizedModel, ...]) -> int:
        return taken_bytes(chosen, context_bytes=context, processes=processes, at_once=at_once)

    every = list(models.values())
    if any(taken((one,)) > room for one in every):
        with pytest.raises(UsageError, match="fits not even alone"):
            fitting_sets(every, room, context_bytes=context, processes=processes, at_once=at_once)
        return
    found = fitting_sets(every, room, context_bytes=context, processes=processes, at_once=at_once)
    fits = [
        chosen
        for count in range(1, len(every) + 1)
        for chosen in combinations(every, count)
        if taken(chosen) <= room
    ]
    assert {frozenset(one) for one in found} == {
        frozenset(one) for one in fits if not any(set(one) < set(other) for other in fits)
    }
    assert [len(one) for one in found] == sorted((len(one) for one in found), reverse=True)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_weights_take_a_segment(nbytes: int, segment: int) -> None:
    assert weight_segment(nbytes) == segment


# -- who leaves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, GreedyDualSize, CheapestReturn])
@given(models=SIZED, missing=st.integers(1, 40), asked=st.lists(st.integers(0, 4), max_size=20))
def test_enough_leaves_or_nobody(
    policy: type[EvictionPolicy], models: dict[str, SizedModel], missing: int, asked: list[int]
) -> None:
    chooser = policy()
    every = list(models.values())
    for at in asked:
        chooser.requested(every[at % len(every)])
    gone = chooser.leaving(every, missing)
    freed = sum(one.weight_bytes for one in gone)
    assert len(set(gone)) == len(gone)
    assert set(gone) <= set(every)
    assert freed >= missing if sum(one.weight_bytes for one in every) >= missing else not gone


@given(models=SIZED, missing=st.integers(1, 20), asked=st.lists(st.integers(0, 4), max_size=20))
def test_the_set_that_leaves_is_the_cheapest_to_bring_back(
    models: dict[str, SizedModel], missing: int, asked: list[int]
) -> None:
    policy = CheapestReturn()
    every = list(models.values())
    for at in asked:
        policy.requested(every[at % len(every)])
    gone = policy.leaving(every, missing)
    costs = [
        sum(map(policy.cost, chosen))
        for count in range(len(every) + 1)
        for chosen in combinations(every, count)
        if sum(one.weight_bytes for one in chosen) >= missing
    ]
    assert not costs or sum(map(policy.cost, gone)) == pytest.approx(min(costs), rel=1e-12)


def test_many_models_leave_the_least_likely_first_and_none_in_vain() -> None:
    policy = CheapestReturn()
    models = [SizedModel(name=str(at), weight_bytes=10 if at else 50) for at in range(20)]
    for at, one in enumerate(models):
        for _ in range(at + 1):
            policy.requested(one)
    assert [one.name for one in policy.leaving(models, 20)] == ["0"]
    assert [one.name for one in policy.leaving(models, 55)] == ["0", "1"]
    assert policy.leaving(models, 10_000) == ()


def test_old_requests_count_less() -> None:
    policy = CheapestReturn(half_life=10)
    one, two = (SizedModel(name=name, weight_bytes=1) for name in "ab")
    for _ in range(100):
        policy.requested(one)
    for _ in range(10):
        policy.requested(two)
    assert policy.likelihood("a") == pytest.approx(policy.likelihood("b"), rel=0.01)


def test_likelihoods_stay_finite_over_many_requests() -> None:
    policy = CheapestReturn(half_life=0.5)
    one, two = (SizedModel(name=name, weight_bytes=1) for name in "ab")
    for _ in range(2_000):
        policy.requested(one)
        policy.requested(two)
    assert policy.likelihood("b") == pytest.approx(0.8)
    assert policy.likelihood("a") == pytest.approx(0.2)


# -- what moves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, GreedyDualSize, CheapestReturn])
def test_nobody_leaves_while_all_fit(policy: type[EvictionPolicy]) -> None:
    room = sum(one.weight_bytes for one in MODELS.values()) + max(
        one.request_bytes for one in MODELS.values()
    )
    found = simulate(policy(), MODELS, zipf(0, 500), room)
    assert found.evictions == 0
    assert found.bytes == sum(one.weight_bytes for one in MODELS.values())
    assert simulate(policy(), MODELS, zipf(0, 500), room - 1).evictions > 0


def test_ten_thousand_requests_move_less_than_by_recency_and_no_less_than_the_optimum() -> None:
    """The same on every machine: Python's generator, whole numbers and doubles in one order."""
    requests = zipf(0, 10_000)
    ours = simulate(CheapestReturn(), MODELS, requests, ROOM).bytes
    recent = simulate(LeastRecentlyUsed(), MODELS, requests, ROOM).bytes
    assert ours <= recent
    believed = simulate(LeastRecentlyUsed(), MODELS, requests, ROOM, believed=2.1).bytes
    assert recent < believed


@pytest.mark.parametrize("seed", range(4))
def test_nobody_does_better_than_the_optimum(seed: int) -> None:
    requests = zipf(seed, 400)
    best = optimal_bytes(MODELS, requests, ROOM)
    for policy in (CheapestReturn(), LeastRecentlyUsed(), GreedyDualSize(), FarthestInFuture(requests)):
        assert simulate(policy, MODELS, requests, ROOM).bytes >= best


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=3).map(models_of),
    st.integers(7, 14),
    st.data(),
)
def test_the_optimum_is_that_of_every_way_to_serve(
    models: dict[str, SizedModel], room: int, data: st.DataObject
) -> None:
    requests = data.draw(st.lists(st.sampled_from(list(models)), min_size=1, max_size=6))
    assert optimal_bytes(models, requests, room) == brute_force(models, requests, room)


def brute_force(models: dict[str, SizedModel], requests: list[str], room: int) -> int:
    """Try every set of models after every request, brought early or late."""
    names = list(models)
    sets = [frozenset(chosen) for count in range(len(names) + 1) for chosen in combinations(names, count)]
    costs = {frozenset[str](): 0}
    for name in requests:
        after: dict[frozenset[str], int] = {}
        for before, there in product(costs, sets):
            weights = sum(models[one].weight_bytes for one in there)
            if name in there and weights + models[name].request_bytes <= room:
                come = costs[before] + sum(models[one].weight_bytes for one in there - before)
                after[there] = min(come, after.get(there, come))
        costs = after
    return min(costs.values())


def test_equal_sizes_make_beladys_rule_the_optimum() -> None:
    models = {name: SizedModel(name=name, weight_bytes=GIB) for name in SIZES}
    requests = zipf(3, 600)
    found = simulate(FarthestInFuture(requests), models, requests, 3 * GIB)
    assert found.bytes == optimal_bytes(models, requests, 3 * GIB)


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UsageError, match="there are no models"):
        simulate(LeastRecentlyUsed(), {}, [], ROOM)
    with pytest.raises(UsageError, match="there are no models"):
        fitting_sets([], ROOM)
    with pytest.raises(UsageError, match="names 'other', which is no model here"):
        simulate(LeastRecentlyUsed(), MODELS, ["other"], ROOM)
    with pytest.raises(UsageError, match=r"the model code fits not even alone: 27.00 GiB of weights"):
        simulate(LeastRecentlyUsed(), MODELS, ["chat"], 20 * GIB)
    for figures in (
        {"weight_bytes": -1},
        {"weight_bytes": "1GiB"},
        {"weight_bytes": 1, "request_bytes": None},
    ):
        with pytest.raises(UsageError, match=r"_bytes of the model a=.* is no whole number from 0 on"):
            SizedModel(name="a", **figures)  # type: ignore[arg-type]
    one = SizedModel(name="a", weight_bytes=GIB)
    assert fitting_sets([one], "2GiB") == ((one,),)
    with pytest.raises(UsageError, match="room='much' cannot be read"):
        fitting_sets([one], "much")
    for arguments, line in (
        ({"processes": "each"}, "processes='each' is no way to share a card"),
        ({"at_once": 0}, "at_once=0 is no whole number from 1 on"),
        ({"context_bytes": -1}, "context_bytes=-1 is no whole number from 0 on"),
    ):
        with pytest.raises(UsageError, match=line):
            taken_bytes([one], **arguments)  # type: ignore[arg-type]
    many = models_of([(1, 1)] * 17)
    with pytest.raises(UsageError, match="17 models make too many sets"):
        fitting_sets(list(many.values()), 99)
    with pytest.raises(UsageError, match="the optimum for 17 models takes too long"):
        optimal_bytes(many, ["0"], 99)
