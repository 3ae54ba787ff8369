"""The scripts of examples/inference, run as their users do, in one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "inference"
CASES = {
    "tiled_superresolution.py": ([], "larger.npy: (3, 1200, 1600), uint8"),
    "volume_within_budget.py": (["--side", "40"], "(1, 40, 40, 40) labels of torch.uint8"),
    "batches_by_tokens.py": (["--texts", "60"], "(60, 64) embeddings in the order of the texts"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = CASES[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert said in capsys.readouterr().out


def test_all_are_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(CASES)
