"""The fewest cards, and the largest value of an option: the searches, over worlds whose needs are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.synthetic import oom_run, quick_run
from vramfit.analysis.rank_memory import WorldMemory, world_memory
from vramfit.analysis.rank_search import fewest_cards, largest_value
from vramfit.errors import UsageError, VramfitError
from vramfit.report import json_text, render

FITS, RAN_OUT = quick_run(), oom_run()
FAILS = replace(FITS, exit_code=1, error="ValueError: at least two ranks")


def memory(fits: bool, *, size: int = 1, extra: int = 0) -> WorldMemory:
    run = FITS if fits else RAN_OUT
    device = replace(run.devices[0], peak_reserved_bytes=run.devices[0].peak_reserved_bytes + extra)
    return world_memory({0: replace(run, devices=(device,))}, size=size, per_node=8)


def test_the_fewest_cards() -> None:
    found = fewest_cards(lambda cards: memory(cards >= 4, size=cards))
    assert (found.value, found.failing, [one.value for one in found.tries]) == (4, 2, [1, 2, 4])
    assert render(found).startswith("✓ 4 cards RTX 4090 do: ")
    assert '"world_size": 4' in json_text(found)


def test_no_number_of_cards_does() -> None:
    found = fewest_cards(lambda cards: memory(False, size=cards), 8)
    assert (found.value, len(found.tries)) == (0, 4)
    assert render(found, width=200).startswith(
        "✗ nothing fits: on 8 cards Example 14GB rank 0 takes at least "
    )


def test_worlds_that_are_too_small_for_the_program_are_passed_over() -> None:
    failing = world_memory({0: FAILS}, size=1, per_node=8)
    found = fewest_cards(lambda cards: memory(True, size=cards) if cards > 1 else failing)
    assert (found.value, found.tries[0].failure) == (2, "ValueError: at least two ranks")
    with pytest.raises(VramfitError, match="fails on every number of cards: ValueError: at least two ranks"):
        fewest_cards(lambda _: failing, 4)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 31, 32, 33, 100])
@pytest.mark.parametrize("start", [1, 4, 64])
def test_the_largest_value_is_that_of_trying_all(limit: int, start: int) -> None:
    found = largest_value(lambda value: memory(value <= limit, extra=value), "--batch-size", start, 8)
    assert (found.value, found.failing) == (limit, limit + 1)
    assert len(found.tries) <= 16
    assert render(found, width=200).startswith(f"✓ largest --batch-size {limit} on 8 cards ")


def test_not_even_one() -> None:
    found = largest_value(lambda _: memory(False), "--batch-size", 4, 8)
    assert (found.value, found.failing) == (0, 1)
    assert render(found, width=200).startswith(
        "✗ nothing fits on 8 cards Example 14GB: not even --batch-size 1"
    )


def test_an_option_that_changes_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="takes the same whatever --bs is"):
        largest_value(lambda _: memory(True), "--bs", 1, 8)
    with pytest.raises(VramfitError, match="fails with --bs 1: ValueError"):
        largest_value(lambda _: world_memory({0: FAILS}, size=1, per_node=8), "--bs", 1, 8)
