"""Signals of a process that waits for several children in threads: each child gets them once."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from vramfit.launch.interrupts import passed_on, passed_on_to_all

pytestmark = pytest.mark.usefixtures("interruptible")


class Child:
    """Notes the signals that it is sent."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


def begun(folder: Path, child: Child, over: threading.Event) -> threading.Thread:
    """A thread that waits for a child, as `run_job` does."""
    ready = threading.Event()
    folder.mkdir()

    def wait() -> None:
        with passed_on(folder) as signals:
            signals.started(cast("subprocess.Popen[bytes]", child))
            ready.set()
            over.wait(30)

    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(wait))
    thread.start()
    assert ready.wait(30)
    return thread


@pytest.fixture
def over() -> Iterator[threading.Event]:
    found = threading.Event()
    yield found
    found.set()


def sent(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two bytecodes of this thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_child_gets_a_signal_of_the_parent(tmp_path: Path, over: threading.Event, number: int) -> None:
    handlers: Any = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    children = [Child(), Child()]
    with passed_on_to_all() as group:
        threads = [begun(tmp_path / str(at), child, over) for at, child in enumerate(children)]
        assert not group.interrupted
        sent(number)
        assert group.interrupted
        over.set()
        for thread in threads:
            thread.join()
        sent(number)  # nobody is left to be told
    assert [child.got for child in children] == [[number], [number]]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_child_that_got_an_interrupt_itself_gets_no_second(tmp_path: Path, over: threading.Event) -> None:
    child = Child()
    with passed_on_to_all():
        thread = begun(tmp_path / "0", child, over)
        (tmp_path / "0" / "signals").write_bytes(bytes([signal.SIGINT]))
        sent(signal.SIGINT)
        over.set()
        thread.join()
    assert child.got == []
