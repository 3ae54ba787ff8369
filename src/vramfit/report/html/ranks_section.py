"""The ranks of a distributed program on the page: who is the worst, and each one's memory beneath the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from vramfit.analysis import NAMES
from vramfit.analysis.rank_memory import WorldMemory
from vramfit.analysis.rank_timelines import RankTimeline, rank_timelines
from vramfit.report.html.columns import Column, pack, to_text
from vramfit.report.html.markup import Html, join, table, tag
from vramfit.report.ranks import world_headline
from vramfit.trace import Category
from vramfit.units import format_bytes

MOST = 24
"""Pictures of ranks, or of ranks that are alike."""

_HELP = (
    "One time axis and one scale of bytes for all. Drag to zoom, double-click to see all; keys as below. Times are the "
    "simulated seconds of each rank since it began: how long a rank waits for another one is not counted."
)


def ranks_section(world: WorldMemory, shown: tuple[RankTimeline, ...]) -> Html:
    """The verdict on all ranks, the place of their pictures, and a table of what these show."""
    kind = {True: "fits", False: "fails", None: None}[world.fits]
    more = len(world.rows) - len(shown)
    return tag(
        "section",
        tag("h2", "Ranks over time", id="h-ranks"),
        tag("p", world_headline(world).plain, class_=f"strong {kind or ''}".strip()),
        *(tag("p", reason) for reason in world.why),
        tag("p", _HELP, class_="help"),
        tag("ul", class_="legend", id="ranks-legend", aria_label="What the colours mean"),
        join(_place(number, one, world) for number, one in enumerate(shown)),
        tag("p", f"{more} more that differ are in the table of the report in the terminal, and not drawn.")
        if more > 0
        else None,
        _figures(shown),
        id="s-ranks",
        aria_labelledby="h-ranks",
    )


def shown_ranks(world: WorldMemory) -> tuple[RankTimeline, ...]:
    """The ranks that a page draws: the first ones, and the worst."""
    found = rank_timelines(world)
    if len(found) <= MOST:
        return found
    worst = next(one for one in found if world.decisive in one.alike.ranks)
    first = found[:MOST]
    return first if worst in first else (*first[:-1], worst)


def ranks_data(shown: tuple[RankTimeline, ...]) -> Html:
    """What the pictures are drawn from, packed (see NOTE [Form of the packed columns] in columns.py)."""
    columns: dict[str, Column] = {}
    facts: list[dict[str, Any]] = []
    for number, one in enumerate(shown):
        columns[f"time_{number}"] = Column(
            values=np.maximum.accumulate(np.maximum(one.over.time_us, 0)), rising=True
        )
        columns[f"reserved_{number}"] = Column(values=one.over.reserved)
        held = [kind for kind in Category if one.over.categories[kind].any()]
        for kind in held:
            columns[f"held_{number}_{int(kind)}"] = Column(values=one.over.categories[kind])
        card = one.alike.first.card
        facts.append(
            {
                "name": _name(one),
                "kinds": [int(kind) for kind in held],
                "peak_us": one.peak_us,
                "limit": max(0, card.total - card.context),
            }
        )
    block = to_text(pack(columns, {"ranks": facts}))
    return tag("script", Html(block), id="data-ranks", type="application/octet-stream")


def _name(one: RankTimeline) -> str:
    stages = one.alike.first.stages
    name = f"rank{'s' if ' ' in one.alike.name else ''} {one.alike.name}"
    if len(stages) > 1:
        return f"{name} (stages {' and '.join(map(str, stages))})"
    return f"{name} (stage {stages[0]})" if stages else name


def _place(number: int, one: RankTimeline, world: WorldMemory) -> Html:
    card = one.alike.first.card
    worst = ", the worst" if world.decisive in one.alike.ranks else ""
    peak = (
        f"allocated at most {format_bytes(card.peak_allocated)}, reserved {format_bytes(card.peak_reserved)}"
    )
    return join(
        [
            tag("h3", f"{_name(one).capitalize()}{worst}: {peak}"),
            tag(
                "div",
                id=f"rank-chart-{number}",
                class_="chart rank-chart",
                tabindex=0,
                role="application",
                aria_roledescription="picture",
                aria_label=f"{_name(one)}: bytes by category over simulated time. The table below holds its peak.",
            ),
        ]
    )


def _figures(shown: tuple[RankTimeline, ...]) -> Html:
    """Each one's peak by category."""
    kinds = [kind for kind in NAMES if any(_held(one, kind) for one in shown)]
    heads = ("rank", "reserved", "allocated", "at", *(NAMES[kind] for kind in kinds))
    rows = [
        (
            one.alike.name,
            format_bytes(one.alike.first.card.peak_reserved),
            format_bytes(one.alike.first.card.peak_allocated),
            f"{one.peak_us / 1e6:.3f} s",
            *(format_bytes(_held(one, kind)) for kind in kinds),
        )
        for one in shown
    ]
    return table(heads, rows, numbers=tuple(range(1, len(heads))))


def _held(one: RankTimeline, kind: Category) -> int:
    return one.alike.first.card.breakdown.categories.get(kind, 0)
