"""The script examples/language/long_batch.py, run as its users do, in this process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "language" / "long_batch.py"


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--device", "cpu", "--prompts", "2"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "batch 2: (2, 16) tokens" in capsys.readouterr().out
