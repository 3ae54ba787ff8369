"""The choice of what is kept and what is computed again, against every possible choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.planner.made import MIB, block, op, random_step_profile, step_profile, step_profile_inside
from torch import nn

from vramfit.planner.activation_ilp.decisions import (
    OVERHEAD_SECONDS,
    Decision,
    DecisionKind,
    IlpOptions,
    choosable,
    computed,
    finer_places,
    interval_peaks,
    kept_bytes,
    least_saved,
    predicted_peak,
    recompute_flops,
    recompute_seconds,
    savable_ops,
)
from vramfit.planner.activation_ilp.solver import greedy, lowest_peak, solve
from vramfit.planner.step_profiler import BETWEEN, StepInterval, StepProfile
from vramfit.techniques import ModelBlock


def _all_decisions(one: ModelBlock) -> Iterator[Decision | None]:
    yield None
    numbers = list(savable_ops(one))
    for count in range(len(numbers) + 1):
        for saved in itertools.combinations(numbers, count):
            if least_saved(one) & computed(one, frozenset(saved)):
                continue  # what cannot run again
            yield Decision(DecisionKind.RECOMPUTE, frozenset(saved))


def _best(observed: StepProfile, budget: int) -> float | None:
    best = None
    for chosen in itertools.product(*(list(_all_decisions(one)) for one in observed.blocks)):
        decisions = {
            one.path: found for one, found in zip(observed.blocks, chosen, strict=True) if found is not None
        }
        if predicted_peak(observed, decisions) > budget:
            continue
        cost = sum(
            recompute_seconds(one, decisions[one.path].saved)
            for one in observed.blocks
            if one.path in decisions
        )
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_it_is_as_cheap_as_the_best_of_all_choices(seed: int) -> None:
    assert_as_cheap_as_the_best(random_step_profile(seed))


@pytest.mark.parametrize("seed", range(40))
def test_so_it_is_where_results_are_read_within_blocks(seed: int) -> None:
    assert_as_cheap_as_the_best(step_profile_inside(seed))


@pytest.mark.parametrize("seed", range(40))
def test_the_lowest_peak_within_blocks_is_that_of_the_best_of_all_choices(seed: int) -> None:
    observed = step_profile_inside(seed)
    best = min(
        predicted_peak(
            observed,
            {
                one.path: found
                for one, found in zip(observed.blocks, chosen, strict=True)
                if found is not None
            },
        )
        for chosen in itertools.product(*(list(_all_decisions(one)) for one in observed.blocks))
    )
    assert lowest_peak(observed, IlpOptions()) == best


def assert_as_cheap_as_the_best(observed: StepProfile) -> None:
    plain = predicted_peak(observed, {})
    lowest = lowest_peak(observed, IlpOptions())
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = round(lowest + share * (plain - lowest))
        found, best = solve(observed, budget, IlpOptions(gap=0.0)), _best(observed, budget)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert predicted_peak(observed, found.decisions) <= budget
        cost = sum(
            recompute_seconds(one, found.decisions[one.path].saved)
            for one in observed.blocks
            if one.path in found.decisions
        )
        assert cost == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_the_greedy_way_stays_within_the_budget_and_is_never_cheaper(seed: int) -> None:
    observed = random_step_profile(seed, blocks=5, ops=4)
    plain, lowest = predicted_peak(observed, {}), lowest_peak(observed, IlpOptions())
    budget = (plain + lowest) // 2
    exact, quick = solve(observed, budget, IlpOptions(gap=0.0)), greedy(observed, budget, IlpOptions())
    assert exact is not None
    assert quick is not None
    assert quick.peak_bytes <= budget
    assert quick.extra_seconds >= exact.extra_seconds - 1e-9
    assert quick.gap is None


def test_nothing_is_done_where_it_fits() -> None:
    observed = random_step_profile(1)
    found = solve(observed, predicted_peak(observed, {}), IlpOptions())
    assert found is not None
    assert found.decisions == {}
    assert found.extra_seconds == 0


def test_a_budget_below_the_lowest_peak_has_no_solution() -> None:
    observed = random_step_profile(2)
    lowest = lowest_peak(observed, IlpOptions())
    assert solve(observed, lowest - MIB, IlpOptions()) is None
    assert greedy(observed, lowest - MIB, IlpOptions()) is None
    assert solve(observed, lowest, IlpOptions()) is not None


def _eight(host_gib: float) -> tuple[StepProfile, IlpOptions]:
    """Blocks that keep 2 GiB each, half of it for their input where they are computed again."""
    blocks = [block(index, [op(2048, 50.0)], input_mib=1024) for index in range(8)]
    options = IlpOptions(
        offload=True,
        host_bytes=round(host_gib * 1024 * MIB),
        link_bytes_per_second=25e9,
        window=256 * MIB,
    )
    return step_profile(blocks, base_mib=0, head_mib=0), options


@pytest.mark.parametrize(("host", "gib"), [(0, 9.0), (8, 5.25), (9, 5.25), (16, 2.25)])
def test_the_lowest_peak_mixes_what_is_offloaded_with_what_is_recomputed(host: int, gib: float) -> None:
    observed, options = _eight(host)
    lowest = lowest_peak(observed, options)
    found = solve(observed, lowest, options)
    assert found is not None
    assert found.peak_bytes == lowest
    assert found.host_bytes <= options.host_bytes
    assert lowest / (1024 * MIB) == pytest.approx(gib, abs=0.01)
    assert solve(observed, lowest - 2 * MIB, options) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_lowest_peak_is_that_of_the_best_of_all_choices(seed: int) -> None:
    observed = random_step_profile(seed, blocks=4)
    kept = sum(one.kept_bytes for one in observed.blocks)
    for share in (0.0, 0.3, 0.7, 1.0):
        options = IlpOptions(
            offload=True, host_bytes=round(share * kept), link_bytes_per_second=1e9, window=MIB, gap=0.0
        )
        best = min(
            _peak(observed, fates, options)
            for fates in itertools.product(
                (None, DecisionKind.RECOMPUTE, DecisionKind.OFFLOAD), repeat=len(observed.blocks)
            )
        )
        assert lowest_peak(observed, options) == best


def _peak(observed: StepProfile, fates: tuple[DecisionKind | None, ...], options: IlpOptions) -> float:
    chosen = {
        one.path: Decision(kind) for one, kind in zip(observed.blocks, fates, strict=True) if kind is not None
    }
    away = sum(
        one.kept_bytes
        for one, kind in zip(observed.blocks, fates, strict=True)
        if kind is DecisionKind.OFFLOAD
    )
    if away > options.host_bytes:
        return float("inf")
    return predicted_peak(observed, chosen) + (options.window if away else 0)


def test_cheap_results_are_computed_again_and_dear_ones_saved() -> None:
    observed = step_profile(
        [block(0, [op(10, 50.0, flops=7), op(10, 0.1)]), block(1, [op(10, 50.0, flops=7), op(10, 0.1)])]
    )
    found = solve(observed, predicted_peak(observed, {}) - 10 * MIB, IlpOptions())
    assert found is not None
    assert found.extra_flops == 0
    assert all(decision.saved == {0} for decision in found.decisions.values())


def test_results_that_change_in_place_are_saved_with_their_change() -> None:
    one = block(0, [op(10, 5.0, mutated=True), op(10, 5.0)])
    assert set(savable_ops(one)) == {0, 1}


def test_what_nothing_needs_is_not_computed_again() -> None:
    product, total = op(10, 50.0, kept=False, flops=7), replace(op(10, 0.1), reads=(0,))
    one = block(0, [product, total, replace(op(10, 0.2), reads=(1,))])
    assert recompute_flops(one) == 7
    assert recompute_flops(one, frozenset({1})) == 0
    assert set(savable_ops(one)) == {0, 1, 2}


def test_what_cannot_run_again_is_saved_where_something_needs_it() -> None:
    one = block(0, [replace(op(10, 5.0, kept=False), fixed=True), replace(op(10, 5.0), reads=(0,))])
    observed = step_profile([one])
    found = solve(observed, lowest_peak(observed, IlpOptions()), IlpOptions())
    assert found is not None
    assert not any(0 not in decision.saved for decision in found.decisions.values())


def test_nothing_after_the_last_needed_result_is_computed_again() -> None:
    one = block(0, [op(10, 5.0, flops=3), op(1, 70.0, kept=False, flops=100)])
    assert recompute_flops(one) == 3
    assert recompute_seconds(one) == pytest.approx(5e-3 + OVERHEAD_SECONDS)
    assert recompute_flops(one, frozenset({0})) == 0


def test_what_goes_to_the_host_is_limited_and_costs_what_it_cannot_hide() -> None:
    observed = step_profile([block(i, [op(50, 1.0)]) for i in range(4)])
    budget = predicted_peak(observed, {}) - 60 * MIB
    link = 10e9
    options = IlpOptions(recompute=False, offload=True, host_bytes=1 << 40, link_bytes_per_second=link)
    found = solve(observed, budget, options)
    assert found is not None
    assert {decision.kind for decision in found.decisions.values()} == {DecisionKind.OFFLOAD}
    assert found.host_bytes == 100 * MIB
    assert kept_bytes(observed.blocks[0], Decision(DecisionKind.OFFLOAD)) == 0
    assert (
        solve(
            observed,
            budget,
            IlpOptions(recompute=False, offload=True, host_bytes=90 * MIB, link_bytes_per_second=link),
        )
        is None
    )


def test_the_solver_writes_nothing_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(20):
        observed = random_step_profile(seed, blocks=8, ops=6)
        budget = (predicted_peak(observed, {}) + lowest_peak(observed, IlpOptions())) // 2
        solve(observed, budget, IlpOptions())
    assert capfd.readouterr().out == ""


def test_micro_batches_choose_for_each_turn_and_pay_for_each() -> None:
    once = step_profile([block(0, [op(10, 5.0)]), block(1, [op(10, 5.0)])])
    blocks = tuple(replace(one, calls=2) for one in once.blocks)
    twice = replace(once, blocks=blocks, intervals=once.intervals * 2)
    budget = predicted_peak(once, {}) - 9 * MIB
    first, second = solve(once, budget, IlpOptions()), solve(twice, budget, IlpOptions())
    assert first is not None
    assert second is not None
    assert second.peak_bytes == first.peak_bytes <= budget
    assert second.extra_seconds == pytest.approx(2 * first.extra_seconds)


def test_a_block_that_layers_share_is_left_alone() -> None:
    once = step_profile([block(0, [op(10, 5.0)]), block(1, [op(10, 5.0)])])
    forward, rest = once.intervals[:2], once.intervals[2:]
    shared = replace(
        once,
        blocks=(replace(once.blocks[0], calls=2), once.blocks[1]),
        intervals=(*forward, *forward[:1], *rest),
    )
    assert not choosable(shared, shared.blocks[0])
    assert choosable(shared, shared.blocks[1])


def test_each_call_of_a_block_that_layers_share_frees_what_it_keeps() -> None:
    once = step_profile([block(0, [op(10, 5.0)]), block(1, [op(10, 5.0)])])
    first, second = once.intervals[:2]
    shared = replace(
        once,
        blocks=(replace(once.blocks[0], calls=2), once.blocks[1]),
        intervals=(
            first,
            second,
            replace(first, peak_bytes=140 * MIB),
            StepInterval(BETWEEN, False, 150 * MIB),
            StepInterval(0, True, 135 * MIB, call=7),
            StepInterval(BETWEEN, True, 130 * MIB),
            StepInterval(0, True, 130 * MIB, call=7),  # still the same backward pass
            StepInterval(1, True, 125 * MIB, call=6),
            StepInterval(0, True, 115 * MIB, call=5),
        ),
    )
    assert all(choosable(shared, one) for one in shared.blocks)
    recomputed = {"layers.0": Decision(DecisionKind.RECOMPUTE)}
    # Its input of 1 MiB stays in place of 10 MiB, once or twice.
    plain, less = interval_peaks(shared, {}) / MIB, interval_peaks(shared, recomputed) / MIB
    assert (plain - less).tolist() == [0, 9, 9, 18, 9, 9, 9, 9, 0]
    found = solve(shared, 132 * MIB, IlpOptions(select=False))
    assert found is not None
    assert found.decisions == recomputed
    assert found.peak_bytes == 132 * MIB


def test_a_block_that_cannot_hide_its_copy_pays_for_what_the_window_does_not_hold() -> None:
    observed = step_profile([block(i, [op(50, 0.5), op(50, 0.5)]) for i in range(4)])
    budget = predicted_peak(observed, {}) - 10 * MIB
    link, window = 5e9, 10 * MIB
    options = IlpOptions(
        recompute=False, offload=True, host_bytes=1 << 40, link_bytes_per_second=link, window=window
    )
    found = solve(observed, budget, options)
    assert found is not None
    assert len(found.decisions) == 1
    # The first result crosses while the second is computed, and comes back when both are needed; the second stays.
    crossing = 50 * MIB / link
    assert found.extra_seconds == pytest.approx(2 * crossing - 0.5e-3 + OVERHEAD_SECONDS)
    assert found.peak_bytes <= budget


def test_a_model_of_which_a_part_must_not_run_again_is_decided_on_by_parts() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
    assert list(finer_places(plain)) == [""]
    torch.nn.utils.parametrizations.spectral_norm(plain[1][0])
    assert "" not in finer_places(plain)
