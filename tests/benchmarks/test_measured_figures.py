"""Figures that others measured: how their file is read, what a run says of them, and how a row is judged."""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from pathlib import Path

import accuracy
import pytest
from comparing import figures, tables
from comparing.figures import figure_of, largest_of_each, predict_figure, read_figures, wanted_trainings
from comparing.results import Results
from comparing.rows import Meaning, MeasuredFigure, Origin
from comparing.trainings import MeasuredTraining, chosen
from rich.console import Console

from vramfit.errors import VramfitError
from vramfit.units import MIB

ENTRY = """
[[figure]]
name = "one"
source = "someone/somewhere, results.json"
card = "RTX 4090"
meaning = "reserved"
bytes = 104_857_600
most_bytes = 106_954_752
program = ["program.py", "40"]
"""
PROGRAM = """
import sys
import torch

kept = torch.empty(int(sys.argv[1]) * 2**20, dtype=torch.uint8, device="cuda")
"""


def row(**changes: object) -> MeasuredFigure:
    plain = MeasuredFigure(
        name="a",
        source="someone/somewhere",
        device="RTX 4090",
        torch="2.6",
        meaning=Meaning.RESERVED,
        least=100 * MIB,
        most=110 * MIB,
        predicted=105 * MIB,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_file_of_this_repository_can_be_read() -> None:
    entries = read_figures()
    names = [entry.name for entry in entries] + [line["run"] for line in chosen(None, None)]
    assert len(names) == len(set(names))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks with a program."""
    monkeypatch.setattr(figures, "BENCHMARKS", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    file = folder / "figures.toml"
    file.write_text(text)
    return file


def test_an_entry_is_read(folder: Path) -> None:
    (entry,) = read_figures(written(folder, ENTRY))
    assert entry.meaning is Meaning.RESERVED
    assert (entry.bytes, entry.most_bytes) == (100 * MIB, 102 * MIB)
    assert entry.program == ("program.py", "40")
    assert entry.needs == () and entry.alloc_conf is None
    assert read_figures(written(folder, "# none yet")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ENTRY + ENTRY, "'one' is there twice"),
        (ENTRY.replace("104_857_600", "0"), "no such range"),
        (ENTRY.replace("106_954_752", "5"), "no such range"),
        (ENTRY.replace("someone/somewhere, results.json", ""), "no source"),
        (ENTRY.replace("program.py", "missing.py"), "names no program"),
        (ENTRY.replace("RTX 4090", "RTX 4091"), "RTX 4091"),
        (ENTRY.replace('"reserved"', '"resident"'), "cannot be read"),
        (ENTRY.replace("source =", "sauce ="), "cannot be read"),
        ("[[figure", "cannot be read"),
    ],
)
def test_a_wrong_entry_is_refused(folder: Path, text: str, words: str) -> None:
    with pytest.raises(VramfitError, match=words):
        read_figures(written(folder, text))


def test_a_program_is_run_and_judged_by_what_the_figure_counts(folder: Path) -> None:
    (entry,) = read_figures(written(folder, ENTRY))
    kept = Results(folder=folder / "results")
    found = predict_figure(entry, kept)
    assert (found.predicted, found.below, found.above) == (40 * MIB, 0, 0)
    assert found.error == pytest.approx(-60) and found.within is False
    allocated = predict_figure(replace(entry, name="two", meaning=Meaning.ALLOCATED), kept)
    assert allocated.predicted == 40 * MIB
    device = predict_figure(replace(entry, name="three", meaning=Meaning.DEVICE), kept)
    assert device.predicted is not None and device.predicted > 240 * MIB
    (file,) = kept.folder.glob("figure-one@*")
    file.write_text(file.read_text().replace(str(40 * MIB), str(101 * MIB)))
    assert predict_figure(entry, kept).error == 0


PRINTING = """
import json
import sys

print("some words")
print(json.dumps({"predicted": 102 * 2**20, "below": 5, "above": 7}) if sys.argv[1] == "40" else "nothing")
"""


def test_a_program_may_print_its_prediction(folder: Path) -> None:
    (folder / "program.py").write_text(PRINTING)
    (entry,) = read_figures(written(folder, ENTRY + "prints = true\n"))
    kept = Results(folder=folder / "results")
    found = predict_figure(entry, kept)
    assert (found.predicted, found.below, found.above) == (102 * MIB, 5, 7)
    assert (found.error, found.within) == (0, True)
    failing = predict_figure(replace(entry, program=("program.py", "41")), kept)
    assert failing.predicted is None and "printed no prediction" in str(failing.reason)


def test_what_cannot_be_run_says_why(folder: Path) -> None:
    (entry,) = read_figures(written(folder, ENTRY))
    kept = Results(folder=folder / "results")
    absent = predict_figure(replace(entry, needs=("no-such-package",)), kept)
    assert absent.reason == "needs no-such-package, which is not installed"
    assert absent.within is None and absent.error is None
    full = predict_figure(replace(entry, program=("program.py", "90000")), kept)
    assert full.ran_out and full.within is False and full.error is None
    failing = predict_figure(replace(entry, program=("program.py", "many")), kept)
    assert failing.reason is not None and "ValueError" in failing.reason


def test_a_figure_counts_as_a_range() -> None:
    assert row().error == 0
    assert row(predicted=100 * MIB - 50 * MIB).error == -50
    assert row(predicted=220 * MIB).error == 100
    assert row(predicted=120 * MIB, below=9 * MIB).within is False
    assert row(predicted=120 * MIB, below=10 * MIB).within is True
    assert row(predicted=90 * MIB, above=10 * MIB).within is True
    plain = row(predicted=120 * MIB).to_dict()
    assert plain["origin"] == Origin.MEASURED.value == "measured by others"
    assert (plain["meaning"], plain["within_bar"]) == ("reserved", False)


def test_a_training_of_xmem_is_a_row() -> None:
    training = MeasuredTraining(
        run="VGG16",
        card="RTX 3060",
        measured=1000 * MIB,
        before=300 * MIB,
        predicted=1350 * MIB,
        below=MIB,
        above=2 * MIB,
    )
    found = figure_of(training)
    assert (found.least, found.most) == (1000 * MIB, 1300 * MIB)
    assert found.error == pytest.approx(100 * training.error) and found.within is training.inside is False
    assert figure_of(replace(training, before=100 * MIB)).least == 1100 * MIB


def test_unasked_there_is_one_training_of_each_network_and_card() -> None:
    lines = list(chosen(None, None))
    few = largest_of_each(lines)
    assert {(line["model"], line["card"]) for line in few} == {
        (line["model"], line["card"]) for line in lines
    }
    assert len(few) == 19
    batch = {(line["model"], line["card"]): line["batch"] for line in few}
    assert batch["MnasNet", "RTX 3060"] == "717"
    assert wanted_trainings([], every=False) == few
    assert len(wanted_trainings([], every=True)) == len(lines)
    assert [line["run"] for line in wanted_trainings(["VGG16_SGD*"], every=False)] == ["VGG16_SGD_684_1_90b2"]


def test_the_table_tells_source_meaning_bar_and_outcome() -> None:
    console = Console(record=True, width=170, file=io.StringIO())
    rows = [
        row(),
        row(name="b", predicted=220 * MIB, below=5 * MIB, note="a note"),
        row(name="c", predicted=None, ran_out=True),
        row(name="d", predicted=None, reason="needs peft, which is not installed"),
    ]
    tables.print_figures(console, rows)
    text = console.export_text()
    assert text.count("someone/somewhere") == 1
    assert "100 to 110" in text and "+100 %" in text and "ran out" in text
    assert "b: a note" in text and "d: needs peft" in text
    assert "Of 4 figures 3 were predicted: median error 50.00 %, worst 100.0 %; 2 outside the bar." in text


def test_without_torchvision_trainings_are_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "find_spec", lambda name: None)
    said: list[str] = []
    lines = wanted_trainings([], every=False)
    options = argparse.Namespace(fresh=False, jobs=1)
    assert list(accuracy.work_out_trainings(lines, options, said.append)) == []
    assert said == ["19 trainings are left out: their networks are torchvision's, which is not installed"]
