"""The table of models on clusters: what it says of a result, and that the page has all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
import clusters
from clusters import Cell, Taken

GIB = 1 << 30


def test_a_cell_says_what_is_reserved_and_whether_it_fits() -> None:
    taken = Taken(allocated=40 * GIB, reserved=50 * GIB + GIB // 2, outside=GIB, fits=True)
    paths = {
        "8b/ddp/H100/8": taken,
        "8b/tp8/RTX 4090/64": Taken(allocated=0, reserved=1200 * GIB, outside=0, fits=False),
    }
    rows = {tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in clusters.table(paths)}
    assert ("8 B", "DDP", "", "**50.5**", "", "", "", "", "", "") in rows
    assert ("8 B", "TP 8 and FSDP2", *[""] * 7, "1,200.0") in rows


def test_the_page_has_the_table_and_no_cell_that_cannot_be() -> None:
    text = clusters.PAGE.read_text(encoding="utf-8")
    head, line, *rows = text[text.index(clusters.BEGIN) : text.index(clusters.END)].splitlines()[1:]
    assert [head, line] == clusters.table({})[:2]
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    labels = [(says, way.says) for says in clusters.SIZES.values() for way in clusters.WAYS]
    assert [tuple(row[:2]) for row in table] == labels
    assert "1b/tp8/H100/1" not in {cell.path for cell in clusters.cells()}
    assert table[3][2] == table[3][6] == ""  # a group of eight on one card
    assert all("**" in "".join(row) for row in table[:4])  # 1 B fits somewhere


def test_what_fits_only_after_cached_blocks_went_back_is_tried_on_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card of 24 GiB, and programs that take so much in all: only where it is in doubt are they run again."""
    cards = []

    class Device:
        peak_allocated_bytes = 20 * GIB
        context_bytes = GIB
        peak_reserved_bytes = 22 * GIB

    def run(cell: Cell, card: object) -> tuple[Device, bool]:
        cards.append(card.total_bytes >> 30)  # type: ignore[attr-defined]
        return Device(), False

    monkeypatch.setattr(clusters, "run", run)
    cell = Cell(size="1b", way="ddp", card="RTX 4090", world=8)
    assert clusters.measure(cell).fits and cards == [clusters.NO_LIMIT >> 30]
    Device.peak_reserved_bytes = 30 * GIB
    assert clusters.measure(cell).fits and cards[1:] == [clusters.NO_LIMIT >> 30, 23]
    Device.peak_allocated_bytes = 25 * GIB
    assert not clusters.measure(cell).fits and cards[3:] == [clusters.NO_LIMIT >> 30]


def test_cells_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clusters.main(["--only", "13b"])
    assert "no cell begins with 13b" in capsys.readouterr().err
