"""``vramfit calibrate``: usage, what it lists, and what it does with an outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vramfit.calibrate.calibration_result import Calibration
from vramfit.calibrate.measurement_journal import About, CalibrationJournal
from vramfit.calibrate.records import CaseRecord, OpRecord, from_text
from vramfit.cli import main
from vramfit.gpus.measured_profile import load_profile, profile_folder

ABOUT = About(
    source="card",
    name="NVIDIA H200",
    total_bytes=140 << 30,
    capability=(9, 0),
    sm_count=132,
    l2_bytes=60 << 20,
    torch="2.11.0",
    cuda="13.0",
    cudnn=91900,
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", *arguments])
    return int(stop.value.code or 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_there_is_a_reason_and_a_way_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--family", "host") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "PyTorch sees no CUDA card" in told
    assert "--gpu NAME" in told


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--family", "convolutions"), "there is no family of ops called 'convolutions'"),
        (("--memory", "many"), "'many' is not a size"),
        (("--memory", "0"), "must be more than 0"),
        (("--gpu", "RTX 40900"), "no GPU is called"),
        (("-o", "missing/folder/p.json", "--list"), "cannot write"),
        (("--measured", "missing.jsonl"), "cannot read the measurements missing.jsonl"),
        (("--measured", "missing.jsonl"), "no such file"),
        (("--measured", "/"), "is a directory"),
        (("-o", "same.json", "--json", "same.json", "--list"), "which another option names too"),
        (("--minutes", "-1"), "--minutes"),
    ],
)
def test_wrong_usage_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr().err
    assert reason in " ".join(told.split())
    assert "Traceback" not in told


def test_list_names_the_cases_of_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list", "--family", "fft", "--family", "host") == 0
    names = capsys.readouterr().out.split("\n")[:-1]
    assert {name.partition("/")[0] for name in names} == {"fft", "host"}
    assert len(names) == len(set(names)) > 30


def _outcome(profiled: CalibrationJournal) -> Calibration:
    told = OpRecord(op="aten.sort.default", signature="int64[7]", steps=from_text("o56@0"))
    return Calibration(
        about=profiled.about,
        measured=profiled.records,
        predicted={"sorting/x": CaseRecord(case="sorting/x", ops=(told,))},
        journal=profiled.path,
    )


def test_profile_and_json_come_of_what_was_measured_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h200.measured.jsonl"
    found = OpRecord(op="aten.sort.default", signature="int64[7]", steps=from_text("o56@0 t512"))
    CalibrationJournal(path, ABOUT).add(CaseRecord(case="sorting/x", ops=(found,)))
    monkeypatch.setattr(
        "vramfit.calibrate.calibration_run.compare_again", lambda journal, names, observer: _outcome(journal)
    )
    profile, document = tmp_path / "p.json", tmp_path / "c.json"
    assert run("--measured", str(path), "-o", str(profile), "--json", str(document)) == 0
    assert "0 of 1 ops exact in bytes" in capsys.readouterr().out
    made = load_profile(profile)
    assert (made.calls, made.gpu_name, made.torch_version) == (1, "NVIDIA H200", "2.11.0")
    told = json.loads(document.read_text())
    assert told["schema"] == "vramfit.calibrate/1"
    assert told["profile"] == str(profile)
    assert told["disagreements"][0]["difference_bytes"] == 512


def test_measurements_from_elsewhere_write_no_profile_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h200.measured.jsonl"
    CalibrationJournal(path, ABOUT)
    monkeypatch.setattr(
        "vramfit.calibrate.calibration_run.compare_again", lambda journal, names, observer: _outcome(journal)
    )
    assert run("--measured", str(path), "--json", "-") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["profile"] is None
    assert "Nothing was compared" in told.err
    assert not profile_folder().exists()


def test_profile_of_a_virtual_card_is_not_found_for_the_real_one() -> None:
    from dataclasses import replace

    from vramfit.cli.calibrate import _journal_of, _profile_of

    usual = _profile_of(None, ABOUT)
    assert usual.parent == profile_folder()
    assert _profile_of(None, replace(ABOUT, source="virtual")).parent == profile_folder() / "virtual"
    assert _journal_of(usual).name == "nvidia-h200-140gib-torch-2.11.0.measured.jsonl"
