"""Ranks side by side as text: in any width, and what it says of ranks that did not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.synthetic import quick_run
from vramfit.analysis.rank_memory import RankSpan, WorldMemory, world_memory
from vramfit.report import render, to_json
from vramfit.trace import EXPERT_RANKS, PIPELINE_STAGES, Run

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


def test_ranks_that_reserve_as_much_and_differ_otherwise() -> None:
    found = world_memory({0: run(0), 1: replace(run(0), host_pinned_peak_bytes=1 << 20)}, size=2, per_node=2)
    text = " ".join(render(found, width=200).split())
    assert "reserve as much, and differ in something else" in text
    assert "0 B more" not in text


def test_ranks_in_a_row_that_are_alike_are_one_row(world: WorldMemory) -> None:
    lines = render(world, width=120).splitlines()
    first = lines.index("Ranks")
    assert [line.split("  ")[0].strip() for line in lines[first + 2 : first + 4]] == ["0 to 4", "6 to 15"]
    text = " ".join(" ".join(lines).split())
    assert "ran: 0, 4, 6, 15" in text
    assert "4 ran since another rank waited for them" in text
    assert (
        "5 did not run and may differ from all that did: taken to be like the larger of the neighbours that ran, rank 6"
        in text
    )


def test_ranks_that_hold_the_same_place_are_one_row() -> None:
    places = {
        place: tuple(
            RankSpan(first=rank, last=rank, alike=place != 2, same_place=place != 2)
            for rank in range(place + 4, 64, 4)
        )
        for place in (0, 1, 2)
    }
    rest = tuple(RankSpan(first=rank, last=rank, alike=False) for rank in range(3, 64, 4))
    found = world_memory(
        {rank: run(64 * rank) for rank in (0, 1, 2)},
        size=64,
        per_node=8,
        spans={**places, 2: (*places[2], *rest)},
    )
    assert [row.name for row in found.rows] == ["0, 4, ..., 60", "1, 5, ..., 61", "2"]
    text = flat(render(found, width=120))
    assert "ranks that hold the same place in the program's groups are taken to be alike" in text
    assert "ranks between two" not in text
    assert "3, 6 to 7, ..., 62 to 63 did not run and may differ from all that did" in text
    assert to_json(found)["ranks"][1]["stands_for"][0] == {
        "first": 5,
        "last": 5,
        "alike": True,
        "same_place": True,
    }


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_any_width(world: WorldMemory, width: int) -> None:
    assert max(len(line) for line in render(world, width=width).splitlines()) <= width


def test_a_rank_on_the_card_of_another_is_told() -> None:
    """All ranks are on the first card where a program never chooses one, unless each hides the others from itself."""
    own, other = run(0), run(0)
    seen = replace(own.trace.devices[0], index=1)
    several = replace(own.trace, devices=(*own.trace.devices, seen))
    on_first = replace(other, trace=several)
    on_both = replace(on_first, devices=(*other.devices, replace(other.devices[0], index=1)))
    found = world_memory({0: replace(own, trace=several), 1: on_first}, size=2, per_node=2)
    assert "rank 1 runs on GPU 0, another rank's card; NCCL refuses" in flat(render(found, width=300))
    found = world_memory({0: replace(own, trace=several), 1: on_both}, size=2, per_node=2)
    assert "of GPU 0, another rank's card, which is not counted there" in flat(render(found, width=300))
    assert [rank.card.index for rank in found.ranks] == [0, 1]
    assert "another rank's card" not in render(
        world_memory({0: own, 1: other}, size=2, per_node=2), width=300
    )


# -- Stages and experts ------------------------------------------------------------------------------------------


def noted(found: Run, **notes: str) -> Run:
    return replace(found, trace=replace(found.trace, meta={**found.trace.meta, **notes}))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_stages_are_told_with_what_the_worst_holds_over_the_mean() -> None:
    stages = {0: "0/4", 1: "1/4", 2: "2/4", 3: "3/4", 4: "0/4"}
    extra = {0: 0, 1: 0, 2: 0, 3: 400, 4: 200}  # ranks 0 and 4 are replicas of the first stage
    runs = {rank: noted(run(extra[rank]), **{PIPELINE_STAGES: text}) for rank, text in stages.items()}
    found = world_memory(runs, size=8, per_node=8)
    (balance,) = found.balances
    base = QUICK.devices[0].peak_reserved_bytes
    reserved = [base + (extra << 20) for extra in (200, 0, 0, 400)]
    assert [(one.name, one.ranks, one.reserved) for one in balance.members] == [
        ("0", (0, 4), reserved[0]),
        ("1", (1,), reserved[1]),
        ("2", (2,), reserved[2]),
        ("3", (3,), reserved[3]),
    ]
    assert (balance.count, balance.worst.name) == (4, "3")
    assert balance.excess == pytest.approx(reserved[3] / (sum(reserved) / 4))
    text = flat(render(found, width=100))
    assert "Stages of the pipeline stage rank reserved of the mean" in text
    assert f"stage 3 reserves {balance.excess:.2f} times the mean of all 4" in text
    (told,) = to_json(found)["balances"]
    assert (told["kind"], told["count"], told["worst"]) == ("stages", 4, "3")
    assert told["members"][0]["ranks"] == [0, 4]


def test_stages_that_a_rank_has_together_are_one() -> None:
    runs = {rank: noted(run(0), **{PIPELINE_STAGES: f"{rank},{3 - rank}/4"}) for rank in (0, 1)}
    (balance,) = world_memory(runs, size=2, per_node=2).balances
    assert ([one.name for one in balance.members], balance.count) == (["0 and 3", "1 and 2"], 2)
    assert "all 2 reserve about as much" in flat(render(world_memory(runs, size=2, per_node=2), width=100))


@pytest.mark.parametrize(
    ("assume", "told"),
    [
        ("upper", "each is taken to receive the even share of tokens; one could receive up to 8 times that"),
        ("typical,imbalance=2", "is taken to be the worst and to receive 2 times the even share of tokens"),
        ("upper,imbalance=50", "is taken to be the worst and to receive 8 times the even share of tokens"),
    ],
)
def test_experts_are_told_with_what_is_assumed(assume: str, told: str) -> None:
    group = {EXPERT_RANKS: ",".join(map(str, range(8)))}
    device = replace(QUICK.devices[0], error_below_bytes=1 << 20)
    worse = replace(QUICK, assume=assume, devices=(device,))
    runs = {0: noted(worse, **group), 7: noted(worse, **group)}
    found = world_memory(runs, size=8, per_node=8)
    assert found.assume == assume
    text = flat(render(found, width=100))
    assert "Ranks that hold experts together" in text
    assert "the 2 of 8 that ran reserve about as much" in text
    assert told in text
    assert ("with the even share" in text) == ("imbalance" in assume)
    assert to_json(found)["assume"] == assume


def test_a_program_without_either_has_no_balance(world: WorldMemory) -> None:
    assert world.balances == ()
    assert to_json(world)["balances"] == []


def test_who_failed_by_itself_comes_before_those_that_waited_for_it() -> None:
    """A chain: each waits for the next, and the last fails; the others hold more."""

    def failing(error: str, more: int) -> Run:
        return replace(run(more), exit_code=1, error=error)

    waits = "PeerEnded: rank {} of 3 waits for rank {}, which has ended without sending what it waits for"
    runs = {
        0: failing(waits.format(0, 1), 9000),
        1: failing(waits.format(1, 2), 8000),
        2: failing("ValueError: a stage without layers", 0),
    }
    found = world_memory(runs, size=3, per_node=8, spans={})
    assert found.failed is found.decisive is found.ranks[2]
    told = flat(render(found, width=120))
    assert "the program failed on rank 2 of 3: ValueError: a stage without layers" in told
    assert [rank.waited_in_vain for rank in found.ranks] == [True, True, False]
