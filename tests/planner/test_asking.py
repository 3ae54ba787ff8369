"""What passes between who asks and the process that answers: the time that it has, and what it says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from vramfit.errors import UsageError, VramfitError
from vramfit.launch.job import Failure
from vramfit.planner import asking
from vramfit.planner.asking import answered, ask, job_of, run_job
from vramfit.planner.planner_job import DeviceMemory
from vramfit.planner.verification import CardRuns
from vramfit.planner.verify_questions import CardRunsQuestion

MEMORY = DeviceMemory(device="cpu", gpu=None, budget=1 << 30)
QUESTION = CardRunsQuestion(runs=())

CHILD = """
import json, pathlib, signal, sys, time

folder, waits = pathlib.Path(sys.argv[1]), sys.argv[2]
asked = json.loads((folder / "job.json").read_text())
assert asked["question"] == "vramfit.planner.verify_questions:CardRunsQuestion", asked
(folder / "progress.txt").write_text("waiting")
found = {"found": {"card": "none", "skipped": waits}, "card_here": True}
if waits == "finds":
    (folder / "result.json").write_text(json.dumps(found))
elif waits == "fails":
    failure = {"kind": "", "message": "it broke", "hint": "Mend it", "code": 2, "found": {"plan": "a plan"}}
    (folder / "failure.json").write_text(json.dumps(failure))
else:
    try:
        if waits != "takes no notice":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        time.sleep(60)
    except KeyboardInterrupt:
        if waits == "has something":
            (folder / "result.json").write_text(json.dumps(found))
        else:
            sys.exit(130)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "work.py").touch()
    return f"{tmp_path}/work.py:training"


def child(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Let a small program be the child."""
    monkeypatch.setattr(
        asking, "child_command", lambda folder, _device: [sys.executable, "-c", CHILD, str(folder), does]
    )


def test_an_answer_comes_back_with_what_the_child_says_of_the_machine(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, "finds")
    answer = answered(QUESTION, target, MEMORY, seconds=600)
    assert answer.found == ask(QUESTION, target, MEMORY) == CardRuns(card="none", skipped="finds")
    assert answer.card_here


def test_a_failure_is_raised_or_looked_at_with_what_was_found(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, "fails")
    with pytest.raises(UsageError, match="it broke") as raised:
        ask(QUESTION, target, MEMORY)
    assert raised.value.hint == "Mend it"
    failure = run_job(job_of(QUESTION, target, MEMORY), CardRuns)
    assert isinstance(failure, Failure)
    assert failure.found == {"plan": "a plan"}


def test_a_child_whose_time_is_over_is_interrupted(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "finds nothing")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(VramfitError, match=r"there was no answer within 0\.5 seconds") as raised:
        ask(QUESTION, target, MEMORY, seconds=0.5)
    assert raised.value.hint == "Allow more time, or ask for less"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_a_child_has_when_its_time_is_over_counts(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    child(monkeypatch, "has something")
    assert ask(QUESTION, target, MEMORY, progress=told.append, seconds=3).skipped == "has something"
    assert told == ["waiting"]


def test_a_child_that_takes_no_notice_is_ended(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PATIENCE", 0.3)
    child(monkeypatch, "takes no notice")
    with pytest.raises(VramfitError, match="no answer within 1 seconds"):
        ask(QUESTION, target, MEMORY, seconds=1)


def test_a_child_that_dies_by_itself_is_told(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "child_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(VramfitError, match="the planner's process ended with exit code 7"):
        ask(QUESTION, target, MEMORY, seconds=600)
