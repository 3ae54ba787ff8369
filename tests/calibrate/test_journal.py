"""What was measured is kept at once, and gone on with only for the same card and torch."""

from dataclasses import replace
from pathlib import Path

import pytest

from vramfit.calibrate.measurement_journal import CalibrationJournal, CaseFailure
from vramfit.errors import UsageError, WriteError

from .support import ABOUT, op, record


def filled(path: Path) -> CalibrationJournal:
    journal = CalibrationJournal(path, ABOUT)
    journal.add(record("sorting/a", op("o32@0 t5"), seconds=0.5))
    journal.fail(CaseFailure(case="sorting/b", kind="died", text="signal"))
    journal.note("rates", {"bandwidth": 3.0})
    return journal


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.measured.jsonl"
    before = filled(path)
    again = CalibrationJournal(path, ABOUT)
    assert again.records == before.records
    assert again.failures == before.failures
    assert again.facts == {"rates": {"bandwidth": 3.0}}
    assert again.has("sorting/a")
    assert again.has("sorting/b")
    assert not again.has("sorting/c")
    assert not again.set_aside


def test_line_that_was_cut_off_is_dropped_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "x.measured.jsonl"
    filled(path)
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    CalibrationJournal(path, ABOUT).add(record("sorting/c", op("o32@0")))
    again = CalibrationJournal(path, ABOUT)
    assert set(again.records) == {"sorting/a", "sorting/c"}
    assert again.facts == {}


def test_another_torch_begins_afresh(tmp_path: Path) -> None:
    path = tmp_path / "x.measured.jsonl"
    filled(path)
    other = CalibrationJournal(path, replace(ABOUT, torch="2.12.0"))
    assert other.set_aside
    assert not other.records
    assert not CalibrationJournal(path, replace(ABOUT, torch="2.12.0")).set_aside


def test_fresh_forgets(tmp_path: Path) -> None:
    path = tmp_path / "x.measured.jsonl"
    filled(path)
    assert not CalibrationJournal(path, ABOUT, fresh=True).records


def test_it_can_be_read_without_the_card(tmp_path: Path) -> None:
    path = tmp_path / "x.measured.jsonl"
    before = filled(path)
    read = CalibrationJournal.read(path)
    assert read.about == ABOUT
    assert read.records == before.records


@pytest.mark.parametrize("content", ["", "no JSON\n", "[1]\n", '{"schema": "other/1"}\n'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(UsageError, match="does not hold measurements"):
        CalibrationJournal.read(path)
    with pytest.raises(UsageError, match=r"cannot read the measurements .*no such file"):
        CalibrationJournal.read(tmp_path / "missing")


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        CalibrationJournal(tmp_path / "file" / "x.measured.jsonl", ABOUT)


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"case": "a", "record": 5}',
        '{"case": "a", "record": {}}',
        '{"case": "a", "failed": ["kind"]}',
        '{"fact": "rates"}',
        '{"fact": "rates", "value": {"bandwidth": -1}}',
        '{"fact": "rates", "value": {"flops": {"float32": NaN}}}',
    ],
)
def test_damaged_lines_are_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.measured.jsonl"
    filled(path)
    with path.open("a") as stream:
        stream.write(line + "\n")
    for read in (CalibrationJournal.read, lambda path: CalibrationJournal(path, ABOUT)):
        with pytest.raises(UsageError, match="holds damaged measurements") as caught:
            read(path)
        assert "--fresh" in caught.value.hint
    assert not CalibrationJournal(path, ABOUT, fresh=True).records


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.measured.jsonl"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UsageError, match="does not hold measurements"):
        CalibrationJournal.read(path)
