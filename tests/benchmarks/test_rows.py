"""What a row of the accuracy table says of itself, and how tools are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparing import formula, predictions, published
from comparing.results import Results, digest
from comparing.rows import (
    CARDS,
    Bar,
    Figure,
    Meaning,
    MeasuredFigure,
    Origin,
    Row,
    Tool,
    bar_scores,
    room_on,
    score,
)
from configurations.catalogue import Precision

from vramfit.trace import EventKind, TraceBuilder
from vramfit.units import GIB

RTX_4090 = "RTX 4090"


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "name": "a",
        "origin": Origin.CARD,
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "allocated": 20 * GIB,
        "reserved": 22 * GIB,
    }
    return Row(**{**values, **changes})


def test_a_recording_decides_only_what_it_can() -> None:
    room = room_on(RTX_4090)
    assert row(allocated=room - 2, reserved=room).truth(RTX_4090) is True
    # The allocator gives cached segments back before it fails: between the peaks nobody knows.
    assert row(allocated=room, reserved=room + 1).truth(RTX_4090) is None
    assert row(allocated=room + 1, reserved=room + 1).truth(RTX_4090) is False
    # What ran out of memory under a limit needs more than it got.
    assert row(allocated=GIB, reserved=GIB, out_of_memory=True).truth(RTX_4090) is None
    assert row(allocated=GIB, reserved=room + 1, out_of_memory=True).truth(RTX_4090) is False


def test_errors_and_verdicts_are_scored_by_tool() -> None:
    ours = Figure(allocated=20 * GIB, reserved=22 * GIB, seconds=3.0)
    low = Figure(allocated=11 * GIB, reserved=11 * GIB)
    rows = [
        row(figures={Tool.VRAMFIT: ours, Tool.FORMULA: low}),
        row(figures={Tool.VRAMFIT: Figure(reason="no program"), Tool.FORMULA: low}),
    ]
    mine, folk = score(Tool.VRAMFIT, rows), score(Tool.FORMULA, rows)
    assert (mine.rows, mine.failed, mine.allocated, mine.reserved) == (1, 1, (0, 0), (0, 0))
    assert (mine.right, mine.judged, mine.seconds) == (len(CARDS), len(CARDS), 3.0)
    assert folk.allocated == (45, 45) and folk.reserved == (50, 50)
    # 11 GiB would fit the cards of 12 and 16 GB, 22 GiB do not.
    assert folk.judged - folk.right == 4
    assert score(Tool.ACCELERATE, rows).rows == 0


def test_a_row_as_json_names_tools_and_errors() -> None:
    plain = row(figures={Tool.VRAMFIT: Figure(allocated=21 * GIB, reserved=22 * GIB)}).to_dict()
    assert plain["origin"] == "card"
    assert plain["errors_percent"]["vramfit"] == {"allocated": 5.0, "reserved": 0.0}
    assert plain["fits"]["H100 SXM"] == {"recorded": True, "vramfit": True}


def test_a_recorded_peak_lies_within_the_bar_or_not_on_either_side() -> None:
    bars = {"allocated": Bar(below=GIB, above=0), "reserved": Bar(below=0, above=GIB)}

    def told(allocated: int, reserved: int) -> Row:
        figure = Figure(allocated=allocated * GIB, reserved=reserved * GIB)
        return row(figures={Tool.VRAMFIT: figure}, bars=bars)

    high, low = told(21, 21), told(19, 23)
    assert high.within(of="allocated") and high.within(of="reserved")
    assert low.within(of="allocated") is False and low.within(of="reserved") is False
    assert high.width(of="allocated") == pytest.approx(100 / 21)
    assert high.to_dict()["within_bar"] == {"allocated": True, "reserved": True}
    assert high.to_dict()["bars"]["reserved"] == {"below": 0, "above": GIB}
    missing = row(figures={Tool.VRAMFIT: Figure(reason="no program")})
    assert missing.within(of="allocated") is None and missing.width(of="allocated") is None
    assert row(figures={Tool.VRAMFIT: Figure(allocated=20 * GIB, reserved=22 * GIB)}).within(of="reserved")


def test_bars_are_scored_by_kind_of_evidence() -> None:
    figure, bars = Figure(allocated=20 * GIB, reserved=20 * GIB), {"reserved": Bar(above=GIB)}
    rows = [
        row(figures={Tool.VRAMFIT: figure}, bars=bars),
        row(figures={Tool.VRAMFIT: figure}, bars=bars, reserved=21 * GIB),
        row(figures={Tool.VRAMFIT: Figure(reason="no program")}),
        row(origin=Origin.VIRTUAL, figures={Tool.VRAMFIT: figure}, bars=bars),
    ]
    measured = MeasuredFigure(
        name="a",
        source="someone",
        device="RTX 4090",
        torch="",
        meaning=Meaning.RESERVED,
        least=GIB,
        most=GIB,
        ran_out=True,
    )
    told = [(s.origin, s.of, s.judged, s.outside, s.width) for s in bar_scores(rows, [measured])]
    assert told == [
        (Origin.CARD, "allocated", 2, 0, 0),
        (Origin.CARD, "reserved", 2, 1, 5),
        (Origin.MEASURED, "figure", 1, 1, None),
    ]
    assert bar_scores(rows, [])[1].to_dict()["origin"] == "card"


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        (Precision.FP32, "adamw-foreach", 16),
        (Precision.BF16, "adam", 18),
        (Precision.BF16_WEIGHTS, "adamw-fused", 8),
        (Precision.BF16, "adamw-8bit", 12),
        (Precision.FP32, "sgd", 8),
        (Precision.FP16_WEIGHTS, None, 2.4),
    ],
)
def test_bytes_per_parameter(precision: Precision, optimizer: str | None, expected: float) -> None:
    assert formula.predicted_bytes(1000, 1000, precision, optimizer) == 1000 * expected


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    assert formula.predicted_bytes(1000, 10, Precision.FP32, "adam") == 4000 + 10 * 12


def test_every_published_recording_is_reproduced_or_has_a_reason() -> None:
    names = set(predictions.published_names())
    assert names == set(published.REPRODUCED) | set(published.NOT_REPRODUCED)
    assert not set(published.REPRODUCED) & set(published.NOT_REPRODUCED)


def test_requests_are_read_off_a_trace_in_order() -> None:
    builder = TraceBuilder(meta={})
    builder.append(EventKind.SEGMENT_ALLOC, device=0, address=1, size=1 << 21)
    builder.append(
        EventKind.ALLOC, device=0, address=1, size=100, block=512, op=builder.op("aten.mm.default")
    )
    builder.append(EventKind.ALLOC, device=1, address=9, size=7, block=512)
    builder.append(EventKind.FREE_REQUESTED, device=0, address=1, size=100, block=512)
    builder.append(EventKind.FREE_COMPLETED, device=0, address=1, size=100, block=512)
    found = predictions.sequence_of(builder.finish(devices=()))
    assert found.requests == [(True, 100), (False, 100)]
    assert found.labels == ["aten.mm.default", "aten.mm.default"]


def test_finished_results_are_found_by_content(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    kept = Results(folder=tmp_path / "results")
    first = digest(source, "torch 2.13")
    assert kept.get("row", first) is None
    kept.put("row", first, {"bytes": 1})
    assert kept.get("row", first) == {"bytes": 1}
    assert Results(folder=kept.folder, fresh=True).get("row", first) is None
    source.write_text("2")
    second = digest(source, "torch 2.13")
    assert second != first and digest(source, "torch 2.14") != second
    kept.put("row", second, {"bytes": 2})
    assert kept.get("row", first) is None and kept.get("row", second) == {"bytes": 2}


def test_a_row_says_which_versions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformers": "5.23.0", "timm": "1.0.29"}
    monkeypatch.setattr(predictions.results, "version", installed.__getitem__)
    assert predictions.other_versions({"timm": "1.0.29"}) == ""
    found = predictions.other_versions({"transformers": "5.17.0", "timm": "1.0.29"})
    assert found == "transformers 5.23.0 here, 5.17.0 where it was recorded"
