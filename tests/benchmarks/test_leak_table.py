"""The table of leaks: some of its programs, and its summary."""

from __future__ import annotations

import leak_table
import pytest

BY_NAME = {program.name: program for program in leak_table.PROGRAMS}


@pytest.mark.parametrize(
    ("name", "steps", "claimed"),
    [
        ("gan that validates in its first round", 3, False),
        ("gan that validates in its first round", 7, False),
        ("an optimizer that never steps", 7, False),
        ("a list emptied each epoch", 20, False),
        ("generation with a growing cache", 7, False),
        ("outputs in a list", 3, False),
        ("outputs in a list", 7, True),
        ("a batch each epoch", 20, True),
        ("running loss with its graph", 3, True),
        ("outputs in a list that nobody empties", 7, True),
    ],
)
def test_what_is_claimed(name: str, steps: int, claimed: bool) -> None:
    row = leak_table.measured(BY_NAME[name], steps)
    assert row["seen_steps"] == steps
    assert bool(row["claimed"]) is claimed, row["kept"]
    assert not claimed or row["line_right"]


def test_the_first_rises_are_only_suspected() -> None:
    row = leak_table.measured(BY_NAME["outputs in a list"], 3)
    assert (row["claimed"], row["suspected"]) == (0, 1)


def test_the_summary_counts_claims_and_lists_what_came_out_otherwise() -> None:
    def row(name: str, plant: str, steps: int, claimed: int) -> dict[str, object]:
        right = 1 if claimed else ""
        return {
            "program": name,
            "plant": plant,
            "steps": steps,
            "claimed": claimed,
            "line_right": right,
            "kept": "x",
        }

    rows = [row("sgd", "innocent", steps, int(steps == 7)) for steps in leak_table.STEPS]
    rows += [row("list", "by step", steps, 0) for steps in leak_table.STEPS]
    lines = list(leak_table.summary(rows))
    assert " ".join(lines[0].split()) == "1 innocent claimed at (3, 7, 20): [0, 1, 0]; lines right 1 of 1"
    assert lines[2:] == ["  claimed: sgd at 7: x", "  missed: list at 20: x"]
