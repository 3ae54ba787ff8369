"""Ranks side by side as text: in any width, and what it says of ranks that did not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.synthetic import quick_run
from vramfit.analysis.rank_memory import RankSpan, WorldMemory, world_memory
from vramfit.report import render
from vramfit.trace import Run

QUICK = quick_run()


def run(more: int) -> Run:
    device = replace(
        QUICK.devices[0], peak_reserved_bytes=QUICK.devices[0].peak_reserved_bytes + (more << 20)
    )
    return replace(QUICK, devices=(device,))


@pytest.fixture(scope="module")
def world() -> WorldMemory:
    return world_memory(
        {0: run(0), 4: run(0), 6: run(64), 15: run(64)},
        size=16,
        per_node=8,
        launcher="torchrun",
        spans={
            0: (RankSpan(first=1, last=3),),
            6: (RankSpan(first=5, last=5, alike=False), RankSpan(first=7, last=14)),
        },
        waited_for=(4,),
    )


def test_the_worst_and_why(world: WorldMemory) -> None:
    text = " ".join(render(world, width=200).split())
    assert world.decisive.rank == 6
    assert "on 2 nodes: rank 6 is the worst" in text
    assert "rank 6 reserves 64.00 MiB more than rank 0, and holds no more" in text
    assert world.known == 16
    assert world.imbalance == pytest.approx(
        world.ranks[2].card.peak_reserved
        / ((5 * world.ranks[0].card.peak_reserved + 11 * world.ranks[2].card.peak_reserved) / 16)
    )


def test_ranks_in_a_row_that_are_alike_are_one_row(world: WorldMemory) -> None:
    lines = render(world, width=120).splitlines()
    first = lines.index("Ranks")
    assert [line.split("  ")[0].strip() for line in lines[first + 2 : first + 4]] == ["0 to 4", "6 to 15"]
    text = " ".join(" ".join(lines).split())
    assert "ran: 0, 4, 6, 15" in text
    assert "4 ran since another rank waited for them" in text
    assert "5 did not run, between two that differ: taken to be like the larger, rank 6" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_any_width(world: WorldMemory, width: int) -> None:
    assert max(len(line) for line in render(world, width=width).splitlines()) <= width
