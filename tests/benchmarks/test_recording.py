"""The recorder with the virtual GPU in the card's place, and the comparison of what it recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import pytest
import torch
from comparing.results import Results
from comparing.rows import Figure, Tool
from configurations import ALL
from recording import store
from tests import warm

import record
from vramfit.errors import TraceFormatError, VramfitError

BENCHMARKS = Path(record.__file__).parent
NAMES = ("tiny-llama-expandable", "tiny-resnet")


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # A setting of the machine must not decide what is recorded.
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return warm.run(
        command, capture_output=True, text=True, env=environment, cwd=BENCHMARKS.parent, check=False
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two small recordings that the virtual GPU made, and their pack beside it."""
    folder = tmp_path_factory.mktemp("virtual") / "h200"
    pack = folder.parent / "h200.tar.gz"
    done = run("record.py", "--gpu", "H200", "--only", *NAMES, "--output", folder, "--pack", pack)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 recorded, 0 not" in done.stdout
    return folder


@pytest.fixture(scope="module")
def compared(recorded: Path) -> dict[str, Any]:
    """What the comparison says of those recordings."""
    file = recorded.parent / "figures.json"
    results = recorded.parent / "results"
    asked = ("--recordings", recorded, "--only", *NAMES, "--results", results, "--no-peers")
    done = run("accuracy.py", *asked, "--json", file)
    assert done.returncode == 0, done.stderr
    assert "no evidence" in done.stdout and "All rows that a card made" not in done.stdout
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_virtual_gpu_recorded_is_predicted_exactly(compared: dict[str, Any], name: str) -> None:
    row = next(row for row in compared["rows"] if row["name"] == name)
    assert row["origin"] == "virtual"
    ours = row["figures"]["vramfit"]
    assert (ours["allocated"], ours["reserved"]) == (row["allocated"], row["reserved"])
    stream = row["stream"]
    assert stream["recorded"] == stream["predicted"] > 1000
    assert stream["differing"] == 0 and stream["unequal"] == []
    assert row["context"] == row["predicted_context"]


def test_other_tools_are_asked_about_the_same_program(recorded: Path, tmp_path: Path) -> None:
    row = accuracy.predictions.row_of(store.load(recorded / "tiny-resnet.json"))
    row = row.with_figures({Tool.VRAMFIT: Figure()})
    kept = Results(folder=tmp_path)
    asked = accuracy.asking.ask_peers(row, kept, seconds=120)
    for tool in (Tool.MEM_TRACKER, Tool.ACCELERATE, Tool.FORMULA):
        figure = asked.figures[tool]
        assert figure.reason is None
        assert figure.allocated is not None and 0 < figure.allocated < row.allocated
    # A finished answer is not asked for again.
    file = next(tmp_path.glob("peers-*"))
    file.write_text(file.read_text().replace(str(asked.figures[Tool.FORMULA].allocated), "7"))
    again = accuracy.asking.ask_peers(row, kept, seconds=120)
    assert again.figures[Tool.FORMULA].allocated == 7


def test_virtual_rows_are_scored_apart(compared: dict[str, Any]) -> None:
    assert list(compared["scores"]) == ["virtual"]
    ours = compared["scores"]["virtual"][0]
    assert ours["tool"] == "vramfit" and ours["reserved"] == [0, 0] and ours["rows"] == 2


def test_a_recording_tells_how_it_was_made(recorded: Path) -> None:
    recording = store.load(recorded / "tiny-resnet.json")
    assert recording.source is store.Source.VIRTUAL and recording.is_of_these_programs
    facts = recording.facts
    assert facts["device"]["name"] == "NVIDIA H200" and facts["device"]["torch"] == torch.__version__
    assert facts["configuration"]["precision"] == "fp16"
    assert facts["oom"] is None
    assert len(facts["steps"]) == 1 + ALL["tiny-resnet"].steps
    assert facts["steps"][-1]["peak_reserved_bytes"] == recording.peak_reserved_bytes
    expandable = store.load(recorded / "tiny-llama-expandable.json")
    assert expandable.trace.meta["alloc_conf"] == "expandable_segments:True"
    assert recording.trace.meta["alloc_conf"] == ""


def test_recordings_are_small_and_packed(recorded: Path) -> None:
    assert max(file.stat().st_size for file in recorded.iterdir()) < 20_000
    with tarfile.open(recorded.parent / "h200.tar.gz") as pack:
        names = set(pack.getnames())
    assert names == {f"h200/{name}.{end}" for name in NAMES for end in ("json", "vft")}


def test_what_is_recorded_is_left_alone(recorded: Path, tmp_path: Path) -> None:
    recorder = record.Recorder(folder=recorded, gpu=record.find_gpu("H200"), stacks=False)
    assert all(recorder.has(ALL[name]) for name in NAMES)
    on_card = record.Recorder(folder=recorded, gpu=None, stacks=False)
    assert not on_card.has(ALL["tiny-resnet"])  # a virtual recording never stands for a card's
    copy = Path(shutil.copytree(recorded, tmp_path / "copy"))
    facts = json.loads((copy / "tiny-resnet.json").read_text(encoding="utf-8"))
    (copy / "tiny-resnet.json").write_text(json.dumps({**facts, "key": "other"}), encoding="utf-8")
    assert not record.Recorder(folder=copy, gpu=recorder.gpu, stacks=False).has(ALL["tiny-resnet"])
    (copy / "tiny-llama-expandable.vft").unlink()
    with pytest.raises(TraceFormatError, match="no trace beside it"):
        store.load(copy / "tiny-llama-expandable.json")


def test_virtual_recordings_among_those_of_cards_are_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "RECORDINGS", recorded)
    monkeypatch.setattr(sys, "argv", ["accuracy.py"])
    assert accuracy.main() == 2
    assert "was made by the virtual GPU" in capsys.readouterr().err


def test_a_recording_of_another_release_is_warned_of(recorded: Path) -> None:
    row = accuracy.predictions.row_of(store.load(recorded / "tiny-resnet.json"))
    card = accuracy.Origin.CARD
    other = accuracy.remarks([replace(row, origin=card, torch="2.0.1+cu118")])
    assert other[0].startswith("Warning: recorded with torch 2.0.1+cu118")
    assert not accuracy.remarks([replace(row, origin=card)])
    assert accuracy.remarks([row])[0].startswith("Not measured")


def test_what_changed_since_the_recording_is_said(recorded: Path) -> None:
    recording = store.load(recorded / "tiny-resnet.json")
    assert accuracy.predictions.row_of(recording).note == ""
    facts = {**recording.facts, "key": "x"}
    changed = store.Recording(recording.name, recording.source, facts, recording.file)
    assert "have changed since" in accuracy.predictions.row_of(changed).note
    gone = store.Recording("no-longer", recording.source, facts, recording.file)
    assert accuracy.predictions.why_not(recording) is None
    assert "no such configuration" in str(accuracy.predictions.why_not(gone))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "no-such"], "no configuration is called no-such"),
        (["--gpu", "no such card"], "no such card"),
        (["--gpu", "H200", "--output", str(record.RECORDINGS / "h200")], "is for recordings of cards"),
    ],
)
def test_wrong_use_of_the_recorder_is_named(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py", *arguments])
    assert record.main() == 2
    assert told in capsys.readouterr().err


def test_a_machine_without_a_card_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py"])
    monkeypatch.setattr(record, "probe_card", lambda: None)
    assert record.main() == 2
    assert "no CUDA card" in capsys.readouterr().err


def test_a_missing_package_is_a_reason_not_a_failure_of_the_run(tmp_path: Path) -> None:
    configuration = record.Configuration(
        name="x", build="language:gpt", precision=store.ALL["tiny-gpt"].precision, packages=("no_such",)
    )
    recorder = record.Recorder(folder=tmp_path, gpu=None, stacks=False)
    with pytest.raises(record.Failed, match="needs no_such"):
        recorder.record(configuration)


def test_time_that_is_up_leaves_the_rest_for_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = record.Recorder(folder=tmp_path, gpu=None, stacks=False)
    assert record.record_all(recorder, [ALL["tiny-gpt"]], minutes=0.0)
    assert "0 recorded, 0 not, 1 left" in capsys.readouterr().out


def test_unknown_rows_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="there is no folder"):
        accuracy.find_recordings([tmp_path / "none"])
    done = run("accuracy.py", "--only", "no-such")
    assert done.returncode == 2 and "no recording is called no-such" in done.stderr
