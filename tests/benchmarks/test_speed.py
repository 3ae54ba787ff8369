"""Programs run beside another revision, in turn, and what was measured is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from speed_parts.beside import Pairs, Round
from speed_parts.programs import PROGRAMS
from tests import warm

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, ROOT / "benchmarks" / "speed.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_ratios_are_of_seconds_and_pair_by_pair() -> None:
    rounds = [Round(seconds=seconds, ops=100) for seconds in (1.0, 4.0, 2.0, 3.0)]
    pairs = Pairs(
        program="tiny-ops",
        first=(rounds[0], rounds[0]),
        pairs=((rounds[0], rounds[1]), (rounds[2], rounds[3])),
    )
    assert pairs.ratios == [4.0, 1.5]
    assert pairs.speed(0) == 75.0, "of 100 and 50 ops a second"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="another revision needs the repository")
def test_a_program_runs_on_both() -> None:
    before = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True, cwd=ROOT)
    done = run("--beside", "HEAD", "--only", "tiny-ops", "--pairs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("tiny-ops"))
    name, ops, here, there, _, ratio, low, high, _ = row.split()
    assert name == "tiny-ops" and ops == "2,000"
    quotient = float(here.replace(",", "")) / float(there.replace(",", ""))
    assert float(ratio) == pytest.approx(quotient, abs=0.02) and low == ratio == high, "of a single pair"
    after = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True, cwd=ROOT)
    folders = [re.sub(r"\s.*", "", line) for line in after.stdout.splitlines()]
    assert not any(folder.endswith("/revision") for folder in folders if folder not in before.stdout)


def test_what_it_cannot_do_is_said() -> None:
    done = run("--beside", "HEAD", "--only", "huge")
    assert done.returncode == 2 and "no program 'huge'" in done.stderr
    assert all(name in done.stderr for name in PROGRAMS)
    done = run("--beside", "no-such-revision", "--only", "tiny-ops")
    assert done.returncode == 2 and "cannot compare with no-such-revision" in done.stderr
