"""SIGTERM before there is a program: the exit code says so, nothing else is said, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vramfit.launch.interrupts import Signals, passed_on, run_child, terminated_by_exit

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

TERMINATED = 128 + signal.SIGTERM


def test_before_there_is_a_child_it_unwinds(tmp_path: Path) -> None:
    before, undone = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as caught, passed_on(tmp_path):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            undone.append(True)
    assert caught.value.code == TERMINATED and undone
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as caught, terminated_by_exit():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == TERMINATED and signal.getsignal(signal.SIGTERM) is before


def test_a_child_that_is_being_started_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with passed_on(tmp_path) as signals:
        code = run_child(["sleep", "60"], signals)
    assert code == -signal.SIGTERM and signals.terminated == signal.SIGTERM


def test_a_handler_of_the_users_own_stays() -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with terminated_by_exit():
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_without_a_child() -> None:
    with pytest.raises(SystemExit):
        Signals(Path()).terminate(signal.SIGTERM)


def test_a_run_that_is_ended_at_its_start_leaves_nothing(tmp_path: Path) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    script.write_text("print('it runs')\n")
    temporary.mkdir()
    command = [sys.executable, "-m", "vramfit", "run", "--gpu", "24GiB", str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        text=True,
    ) as run:
        until = time.monotonic() + 60
        while not list(temporary.glob("vramfit-*/stage")) and time.monotonic() < until:
            time.sleep(0.005)  # the child imports torch from here on, for a second or more
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (TERMINATED, "", "")
    assert list(temporary.rglob("*")) == []
