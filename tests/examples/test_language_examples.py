"""The script of examples/language that streams: looking for a placement, and with one that is known."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "language" / "stream_large_model.py"
SMALL = ["--layers", "12", "--width", "512", "--prompt", "16", "--budget", "110MiB"]


def test_a_large_model_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for _ in range(2):
        monkeypatch.setattr(
            sys, "argv", [SCRIPT.name, *SMALL, "--placement", str(tmp_path / "placement.json")]
        )
        runpy.run_path(str(SCRIPT), run_name="__main__")
        said.append(capsys.readouterr().out)
    assert "3 of 13 layers stay on the card" in said[0]
    assert "4 new tokens" in said[0]
    assert said[0] == said[1]
