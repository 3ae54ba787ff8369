"""The example of several models on one device, run as its users do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "language" / "models_on_one_card.py"


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--requests", "20"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "20 requests: " in capsys.readouterr().out
