"""The examples of survival, run as they are written: on a virtual card that is too small for some of what they do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]


def _on_card(*words: str) -> str:
    command = [sys.executable, "-m", "vramfit", "run", "--gpu", "RTX 3060", *words]
    ended = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_loop_trains_on_a_batch_that_does_not_fit() -> None:
    said = _on_card("examples/survive/surviving_loop.py", "--longest", "2048", "--limit", "3")
    assert "step 2: 2048 words" in said
    assert "4 steps, 3 events" in said


def test_a_service_answers_a_request_in_parts() -> None:
    said = _on_card("examples/survive/surviving_service.py", "--most", "200000", "--limit", "1")
    assert "200,000 rows answered" in said
    assert "up micro-batches 8 parts" in said


@pytest.mark.parametrize(
    ("script", "limit"),
    [("surviving_trainer.py", "1.5"), ("surviving_fit.py", "2.5")],
    ids=["trainer", "fit"],
)
def test_a_trainers_loop_goes_on(script: str, limit: str) -> None:
    said = _on_card(f"examples/survive/{script}", "--longest", "2048", "--limit", limit)
    [(steps, events)] = re.findall(r"^(\d+) steps, (\d+) events$", said, re.MULTILINE)
    assert (int(steps), int(events) > 0) == (4, True)


def test_a_training_is_fed_from_mapped_files() -> None:
    said = _on_card("examples/survive/feeding_a_card.py", "--samples", "200", "--epochs", "1")
    assert "epoch 1: 4 batches" in said
    assert "512.00 KiB pinned" in said
