"""Interrupts: one that the child got as well is not passed on, one of the parent alone is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramfit
from vramfit.errors import VramfitError
from vramfit.launch.interrupts import Signals, passed_on, run_child, signals_kept, signals_noted

pytestmark = pytest.mark.usefixtures("interruptible")

PROGRAM = """
    import os, pathlib, signal, sys
    from vramfit.launch.interrupts import note_interrupts

    count = 0

    def stop(number, frame):
        global count
        count += 1

    def end(number, frame):
        print(count, flush=True)
        sys.exit()

    note_interrupts(pathlib.Path(sys.argv[1]))
    signal.signal(signal.SIGINT, stop)  # whichever handler the program sets
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that counts its interrupts and tells the number at SIGTERM."""
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


def counted(child: subprocess.Popen[str]) -> int:
    child.send_signal(signal.SIGTERM)
    return int(child.communicate(timeout=60)[0])


def until_noted(folder: Path, count: int) -> None:
    """Wait for the child: two signals that come before it has handled the first are one for the system."""
    until = time.monotonic() + 60
    while signals_noted(folder) < count and time.monotonic() < until:
        time.sleep(0.01)


def test_each_interrupt_reaches_the_child_once(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    with passed_on(tmp_path) as signals:
        signals.child = child  # type: ignore[assignment]
        signal.raise_signal(signal.SIGINT)  # of the parent alone
        until_noted(tmp_path, 1)
        for count in (2, 3):  # of both
            child.send_signal(signal.SIGINT)
            until_noted(tmp_path, count)
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # of the parent alone again
        until_noted(tmp_path, 4)
    assert signals.interrupted
    assert counted(child) == 4


def test_a_demand_to_end_is_passed_on(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    with passed_on(tmp_path) as signals:
        signals.child = child  # type: ignore[assignment]
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait(timeout=60) == 0


def test_before_there_is_a_child_an_interrupt_is_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), passed_on(tmp_path):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with passed_on(tmp_path):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_handler_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    def own(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGINT, own)
    with passed_on(tmp_path):
        assert signal.getsignal(signal.SIGINT) is own
    assert signal.getsignal(signal.SIGINT) is own


def test_the_signals_of_a_program_that_calls_the_planner_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def looked(*_: object, **__: object) -> int:
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        return 1

    monkeypatch.setattr("vramfit.planner.asking.run_child", looked)
    file = tmp_path / "work.py"
    file.touch()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for call in (vramfit.plan, vramfit.fit):
        with pytest.raises(VramfitError, match="the planner's process ended with exit code 1"):
            call(f"{file}:work", gpu="RTX 4090")
    assert seen == [before, before]
    with passed_on(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before[1]


def test_a_handler_that_raises_ends_the_child_at_once(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def enough(number: int, frame: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGTERM, enough)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    try:
        with signals_kept(), passed_on(tmp_path) as signals, pytest.raises(Enough):
            timer.start()
            run_child([sys.executable, "-c", "import time; time.sleep(60)"], signals)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - began < 30
    assert isinstance(signals, Signals)
    assert not signals.interrupted
