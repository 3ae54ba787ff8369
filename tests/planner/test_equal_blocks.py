"""Equal blocks are solved as one: as well as one by one, and in no time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.planner.made import MIB, block, op, step_profile
from tests.planner.test_activation_ilp import _best

from vramfit.planner.activation_ilp.decisions import IlpOptions, predicted_peak, recompute_seconds
from vramfit.planner.activation_ilp.ilp import groups_of
from vramfit.planner.activation_ilp.solver import lowest_peak, solve
from vramfit.planner.step_profiler import StepProfile


def layers(seed: int, *, count: int, ops: int, kinds: int = 1, growth: int = 0) -> StepProfile:
    """A step of blocks of some kinds in turn, whose gradients grow by so many MiB from one to the next."""
    draw = random.Random(seed)
    made = [
        [op(draw.randint(1, 30), draw.uniform(0.1, 9), kept=draw.random() < 0.8) for _ in range(ops)]
        for _ in range(kinds)
    ]
    blocks = [
        replace(block(index, made[index % kinds], input_mib=2), like=index % kinds) for index in range(count)
    ]
    once = step_profile(blocks)
    middle, grown = len(blocks), []
    for number, interval in enumerate(once.intervals):
        more = max(0, number - middle) * growth * MIB
        grown.append(replace(interval, peak_bytes=interval.peak_bytes + more))
    return replace(once, intervals=tuple(grown))


def _cost(observed: StepProfile, found: object) -> float:
    decisions = found.decisions  # type: ignore[attr-defined]
    return sum(
        recompute_seconds(one, decisions[one.path].saved) for one in observed.blocks if one.path in decisions
    )


@pytest.mark.parametrize("growth", [0, 9])
@pytest.mark.parametrize("seed", range(6))
def test_equal_blocks_are_as_cheap_as_the_best_of_all_choices(seed: int, growth: int) -> None:
    observed = layers(seed, count=4, ops=2, kinds=1 + seed % 2, growth=growth)
    assert max(len(group.blocks) for group in groups_of(observed)) > 1
    plain, lowest = predicted_peak(observed, {}), lowest_peak(observed, IlpOptions())
    for share in (0.0, 0.3, 0.6, 0.9):
        budget = round(lowest + share * (plain - lowest))
        found, best = solve(observed, budget, IlpOptions(gap=0.0)), _best(observed, budget)
        assert found is not None
        assert best is not None
        assert found.gap is not None
        assert predicted_peak(observed, found.decisions) <= budget
        cost = _cost(observed, found)
        assert best * (1 - 1e-6) <= cost <= best / (1 - found.gap) + 1e-9
        assert cost <= 1.02 * best


def test_many_equal_blocks_are_solved_to_the_end_within_a_second() -> None:
    observed = layers(4, count=48, ops=24, growth=3)
    options = IlpOptions(
        time_limit=1.0, offload=True, host_bytes=1 << 40, link_bytes_per_second=2e9, window=64 * MIB
    )
    plain, lowest = predicted_peak(observed, {}), lowest_peak(observed, options)
    for share in (0.11, 0.4, 0.83):
        budget = round(lowest + share * (plain - lowest))
        found = solve(observed, budget, options)
        assert found is not None
        assert found.status == "optimal"
        assert found.gap is not None
        assert found.gap <= 1e-3
        assert predicted_peak(observed, found.decisions) <= budget


def test_blocks_that_do_not_wait_for_one_another_are_no_group() -> None:
    once = layers(1, count=2, ops=2)
    first, second, head, last, before, rest = once.intervals
    apart = replace(once, intervals=(first, head, before, second, head, last, rest))
    assert [len(group.blocks) for group in groups_of(once)] == [2]
    assert sorted(len(group.blocks) for group in groups_of(apart)) == [1, 1]


def test_equal_blocks_share_the_host() -> None:
    observed = layers(5, count=12, ops=3)
    kept = observed.blocks[0].kept_bytes
    options = IlpOptions(
        recompute=False, offload=True, host_bytes=5 * kept, link_bytes_per_second=1e9, window=MIB, gap=0.0
    )
    plain = predicted_peak(observed, {})
    found = solve(observed, plain - 4 * kept, options)
    assert found is not None
    assert len(found.decisions) == 5
    assert found.host_bytes == 5 * kept
    assert found.peak_bytes <= plain - 4 * kept
    assert solve(observed, plain - 5 * kept, options) is None
