"""Trainings that others measured: which of them count, and how a figure without its first sample is judged."""

from __future__ import annotations

from measured_by_others import DATA, NETWORKS, Row, chosen, table

from vramfit.units import MIB


def row(measured: int, before: int, predicted: int, below: int = 50, above: int = 50) -> Row:
    return Row(
        run="run",
        card="RTX 3060",
        measured=measured * MIB,
        before=before * MIB,
        predicted=predicted * MIB,
        below=below * MIB,
        above=above * MIB,
    )


def test_measurements_are_chosen_and_failures_are_not() -> None:
    lines = list(chosen(None, None))
    assert len(lines) == 110
    assert {line["model"] for line in lines} <= set(NETWORKS)
    assert {line["real_oom"] for line in lines} == {"false"}
    assert len(list(chosen(["RTX 4060"], None))) == 29
    assert [line["measured_bytes"] for line in chosen(None, ["VGG16_Adagrad_480*"])] == ["9730785280"]
    assert len(DATA.read_text().splitlines()) == 118


def test_what_stood_before_the_first_sample_counts() -> None:
    small = row(1000, 100, 1100)
    assert small.whole == 1100 * MIB
    assert small.error == 0
    assert small.inside
    assert not small.plainly_inside
    off = row(1000, 100, 1000)
    assert round(off.error, 4) == -0.0909
    assert not off.inside
    assert off.plainly_inside


def test_of_a_large_model_a_part_may_have_stood() -> None:
    assert row(1000, 300, 1200).error == 0
    assert round(row(1000, 300, 900).error, 4) == -0.1
    assert round(row(1000, 300, 1430).error, 4) == 0.1
    assert row(1000, 300, 960).inside
    assert not row(1000, 300, 940).inside


def test_the_table_counts_per_card_and_in_all() -> None:
    lines = list(table([row(1000, 100, 1100), row(1000, 100, 1000, 100, 100)]))
    assert lines[2:] == [
        "| RTX 3060 | 2 | 4.55% | 9.1% | 2 | 1 | 14.5% | 20.0% |",
        "| all | 2 | 4.55% | 9.1% | 2 | 1 | 14.5% | 20.0% |",
    ]
