"""The ways to batch texts that ours is compared with, and the comparison's account."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "inference"))
import token_batching
import token_peers
from virtual_encoder import Ran

LENGTHS = token_batching.drawn_lengths(3000)


def peak(items: int, length: int) -> int:
    return (256 << 20) + items * (20_000 * length + 72 * length**2)


def test_lengths_are_those_that_are_said() -> None:
    ordered = sorted(LENGTHS)
    assert ordered[-1] == token_batching.LONGEST and 180 < ordered[1500] < 220
    assert token_batching.drawn_lengths(3000) == LENGTHS


def test_every_text_is_in_one_batch_of_each_way() -> None:
    estimate = token_peers.crossfit_estimate(
        {shape: peak(*shape) for shape in token_peers.crossfit_shapes(2048)[::7]}
    )
    for batches in (
        token_peers.crossfit_batches(LENGTHS, estimate, 3.2),
        token_peers.budget_batches(LENGTHS, 16_384),
    ):
        assert sorted(number for batch in batches for number in batch.numbers) == list(range(len(LENGTHS)))
        assert all(batch.length >= max(LENGTHS[number] for number in batch.numbers) for batch in batches)


def test_a_regression_without_products_is_what_it_is() -> None:
    shapes = token_peers.crossfit_shapes(512)
    assert shapes[0] == (1, 1) and shapes[1] == (1, 65) and (257, 1) in shapes and (1793, 449) in shapes
    exact = {(items, length): (items + 2 * length + length**2) * token_peers.GIB for items, length in shapes}
    assert token_peers.crossfit_estimate(exact)(100, 77) == pytest.approx(100 + 2 * 77 + 77**2)
    assert (
        len(token_peers.crossfit_batches([5] * 5000, lambda _items, _length: 9.0, 1.0)) == 10
    )  # 512 at least


def test_the_account_counts_what_ran() -> None:
    def run(items: int, length: int) -> Ran:
        took = peak(items, length)
        return Ran(took, took, 1.0) if took < 6 << 30 else Ran(0, 0, 0.5)

    runner = token_batching.Runner(run, LENGTHS)
    token_batching.run_peers(runner, LENGTHS, token_peers.budget_batches(LENGTHS, 100_000))
    way = runner.way("tokens", 0)
    assert way.in_order and way.ooms > 0
    assert way.seconds == way.batches + 0.5 * way.ooms and 0 < way.padding < 0.2
