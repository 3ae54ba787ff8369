"""``vramfit doctor`` on machines that are told to it."""

import json
from pathlib import Path

import pytest
from tests.doctor.machines import NO_CARD, QUIET_BOX, TWO_CARDS
from typer.testing import CliRunner

from vramfit import doctor
from vramfit.cli import app
from vramfit.doctor import Facts


def run(monkeypatch: pytest.MonkeyPatch, facts: Facts, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "gather", lambda **_: facts)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("facts", "arguments", "code"),
    [
        (QUIET_BOX, ["--strict"], 0),
        (NO_CARD, ["--strict"], 0),
        (TWO_CARDS, [], 0),
        (TWO_CARDS, ["--strict"], 3),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, facts: Facts, arguments: list[str], code: int) -> None:
    assert run(monkeypatch, facts, *arguments)[0] == code


def test_json_alone_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = run(monkeypatch, TWO_CARDS, "--json", "-")
    assert json.loads(text)["worst"] == "error"


def test_json_into_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, text = run(monkeypatch, QUIET_BOX, "--json", str(tmp_path / "doctor.json"))
    assert "as it should be" in text
    assert json.loads((tmp_path / "doctor.json").read_text())["counts"]["error"] == 0


def test_a_file_that_cannot_be_written_is_found_before_looking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vramfit.cli import main

    monkeypatch.setattr(doctor, "gather", lambda **_: pytest.fail("looked first"))
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json", str(tmp_path / "no" / "such.json")])
    assert stop.value.code == 2
    assert "Create the folder first" in capsys.readouterr().err
