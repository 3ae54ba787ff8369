"""Plans beside what people do by hand: how rows are judged and told, and that a network is worked out."""

from __future__ import annotations

from typing import Any

import hand_recipes
import pytest
from recipe_parts.networks import networks


def row(**changes: Any) -> dict[str, Any]:
    """A row as it is kept."""
    given: dict[str, Any] = {
        "network": "unet",
        "share": 0.1,
        "budget": 1 << 30,
        "hand": "full",
        "hand_seconds": 0.040,
        "fits": True,
        "plan_seconds": 0.030,
        "plan": ["activation-checkpointing (lazy)"],
        "seconds": 19.6,
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        ({}, False),
        ({"plan_seconds": 0.040}, False),
        ({"plan_seconds": 0.0401}, True),
        ({"fits": False}, True),
        ({"fits": False, "hand": None, "hand_seconds": None}, False),
    ],
)
def test_a_plan_is_worse_where_it_is_slower_or_missing(changes: dict[str, Any], worse: bool) -> None:
    assert hand_recipes.is_worse(row(**changes)) is worse


def test_rows_are_told() -> None:
    text = hand_recipes.page([row(), row(plan_seconds=0.044)], 20.0, "recipes.md")
    assert "1 of 2 plans are no slower than the best by hand, 1 are slower" in text
    assert (
        "| UNet with attention, 16 x 64 x 64 | 1,024 MiB | full | 40.00 ms | 30.00 ms | -25.0 % | 20 s |"
        in text
    )


def test_there_are_ten_networks_and_what_people_try() -> None:
    assert len(networks()) == 10
    assert {"full", "every second", "selective", "2 pieces", "4 pieces", "full, 2 pieces"} <= set(
        hand_recipes.recipes()
    )
