"""The table of pages on traces that are short enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pages
import pytest

from vramfit.trace import Category


def test_the_described_loop_tells_all_of_its_blocks() -> None:
    trace = pages.DescribedProgram().run(3000)
    allocations = trace.kind == 0
    for column in ("op", "stack", "module", "tensor"):
        assert (getattr(trace, column)[allocations] >= 0).all()
    assert set(trace.category[allocations].tolist()) == {int(kind) for kind in Category}
    assert (pages.Program().run(3000).address[:500] == trace.address[:500]).all()


def test_a_row_and_its_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages.shutil, "which", lambda _: None)
    result = tmp_path / "pages.json"
    monkeypatch.setattr(
        "sys.argv",
        ["pages.py", "--events", "2000", "--recordings", str(tmp_path), "--json", str(result)],
    )
    monkeypatch.setattr(pages, "traces", lambda events, _: [("loop", pages.Program().run(events))])
    pages.main()
    said = capsys.readouterr().out
    assert "page_mb 0." in said
    assert "paint_s not measured" in said
    (row,) = json.loads(result.read_text())["rows"]
    assert row["events"] >= 2000
    assert 0 < row["page_mb"] < 1
    assert row["torch_page_mb"] > 0
    assert row["paint_s"] is None
