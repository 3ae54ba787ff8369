"""Ranks on the page: one beneath the other, on one time axis, with the figures of the traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.synthetic import fitting_run
from report.html.browser import Opened
from report.html.conftest import Open
from vramfit.analysis import DeviceTimeline
from vramfit.analysis.rank_memory import RankSpan, WorldMemory, world_memory
from vramfit.analysis.rank_timelines import rank_timelines
from vramfit.report.html import page, write_page
from vramfit.report.html.ranks_section import MOST, shown_ranks
from vramfit.trace import PIPELINE_STAGES, Run


def slower(run: Run, factor: int) -> Run:
    """A rank that takes so many times as long, and holds more on the host."""
    trace = replace(run.trace, time_us=run.trace.time_us * factor)
    return replace(run, trace=trace, host_pinned_peak_bytes=factor)


@pytest.fixture(scope="module")
def world() -> WorldMemory:
    one = fitting_run()
    return world_memory(
        {0: one, 2: one, 3: slower(one, 3)},
        size=4,
        per_node=4,
        spans={0: (RankSpan(first=1, last=1),)},
    )


@pytest.fixture(scope="module")
def file(world: WorldMemory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "ranks.html"
    write_page(path, world)
    return path


def test_each_stretch_of_time_keeps_its_fullest_moment(world: WorldMemory) -> None:
    found = rank_timelines(world, points=50)
    assert [one.alike.name for one in found] == ["0 to 2", "3"]
    end = int(world.ranks[2].run.trace.time_us.max())
    for one in found:
        trace = one.alike.first.run.trace
        allocated = DeviceTimeline.of(trace).curves.allocated
        stretch = trace.time_us * 50 // (end + 1)
        for number in np.unique(stretch):
            inside = stretch[one.over.rows] == number
            assert one.over.allocated[inside].max() == allocated[stretch == number].max()
            assert one.over.rows[inside][-1] == np.flatnonzero(stretch == number)[-1]
        assert one.over.allocated.max() == one.alike.first.card.peak_allocated
        assert (one.over.categories.sum(axis=0) == one.over.allocated).all()
    assert len(found[0].over.rows) < len(world.ranks[0].run.trace)
    assert found[1].peak_us == 3 * found[0].peak_us


def test_the_worst_is_drawn_however_many_there_are(world: WorldMemory) -> None:
    kinds = {number: slower(fitting_run(), number + 1) for number in range(MOST + 3)}
    worst = replace(
        kinds[MOST + 2],
        devices=tuple(replace(d, peak_reserved_bytes=d.total_bytes) for d in kinds[0].devices),
    )
    many = world_memory({**kinds, MOST + 2: worst}, size=MOST + 3, per_node=1)
    assert many.decisive.rank == MOST + 2
    shown = [one.alike.first.rank for one in shown_ranks(many)]
    assert shown == [*range(MOST - 1), MOST + 2]


def test_the_page_has_words_for_what_it_draws(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "Ranks 0 to 2, the worst: allocated at most" in text
    assert "Rank 0 by itself" in text
    assert text.count('class="chart rank-chart"') == 2
    staged = replace(fitting_run(), trace=replace(fitting_run().trace, meta={PIPELINE_STAGES: "0,3/4"}))
    of_stage = page.render_ranks_html(world_memory({0: staged}, size=1, per_node=1))
    assert "Rank 0 (stages 0 and 3), the worst: allocated" in of_stage
    alone = page.render_html(
        fitting_run(), world_memory({0: fitting_run()}, size=1, per_node=1).ranks[0].verdict
    )
    assert "rank-chart-0" not in alone
    assert "data-ranks" not in alone.split("<script>")[0]


def axis(opened: Opened) -> list[list[float]]:
    return list(
        opened.page.evaluate(
            "vramfit.ranks.charts.map(({chart}) => [chart.scales.x.min, chart.scales.x.max])"
        )
    )


def test_all_ranks_share_a_time_axis_and_a_scale(show: Open, file: Path, world: WorldMemory) -> None:
    opened = show(file)
    end = int(world.ranks[2].run.trace.time_us.max())
    assert axis(opened) == [[0, end], [0, end]]
    tops = opened.page.evaluate("vramfit.ranks.charts.map(({chart}) => chart.scales.y.max)")
    assert tops == [1.05 * world.ranks[0].card.peak_reserved] * 2
    drawn = opened.page.evaluate("vramfit.ranks.charts.map(({chart}) => Math.max(...chart.data[1]))")
    assert drawn == [rank.card.peak_allocated for rank in (world.ranks[0], world.ranks[2])]
    lefts = opened.page.evaluate(
        "vramfit.ranks.charts.map(({chart}) => chart.over.getBoundingClientRect().left)"
    )
    assert lefts[0] == lefts[1]

    opened.page.locator("#rank-chart-0").focus()
    opened.page.keyboard.press("+")
    opened.settle()
    one, two = axis(opened)
    assert one == two
    assert one[1] - one[0] < end
    opened.page.keyboard.press("0")
    opened.settle()
    assert axis(opened) == [[0, end], [0, end]]


def test_pointing_at_a_rank_tells_its_bytes(show: Open, file: Path, world: WorldMemory) -> None:
    opened = show(file)
    x, y = opened.place("#rank-chart-1", 400, 60)
    opened.page.mouse.move(x, y)
    opened.settle()
    told = opened.page.locator("#tooltip").inner_text()
    assert told.startswith("rank 3 · ")
    assert "allocated" in told
    opened.page.locator("#theme").click()
    opened.settle()
    assert opened.page.evaluate("vramfit.ranks.charts.length") == 2
