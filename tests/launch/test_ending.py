"""What a child makes of its program's end, without an interpreter of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._library import simple_registry

from vramfit.launch import running, stopping
from vramfit.launch.status import ChildState, read_status
from vramfit.launch.stopping import Stopping
from vramfit.options.limits import NO_LIMITS
from vramfit.patching import PatchStack
from vramfit.trace.outcome import End, Unit


class LeftError(Exception):
    """The process would have ended at once."""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopping]:
    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr(stopping, "_EXIT", leave)
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield Stopping(tmp_path, NO_LIMITS)
    for number, handler in found.items():
        if handler is not None and handler != signal.getsignal(number):
            signal.signal(number, handler)


def interrupted(folder: Path) -> None:
    (folder / "signals").write_bytes(bytes([signal.SIGINT]))


def in_a_thread(act: Callable[[], object]) -> BaseException | None:
    found: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0] if found else None


def chained(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    context.__context__ = error  # programs tie such rings
    return error


OWN = ValueError("of its own")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (0, None, End.PROGRAM),
        (1, None, End.INTERRUPTED),  # it caught the interrupt and left by `sys.exit(1)`
        (130, KeyboardInterrupt(), End.INTERRUPTED),
        (1, chained(RuntimeError("could not save"), KeyboardInterrupt()), End.INTERRUPTED),
        (1, RuntimeError("DataLoader worker (pid 7) is killed by signal: Interrupt"), End.INTERRUPTED),
        (1, OWN, End.PROGRAM),
        (1, OUT_OF_MEMORY, End.PROGRAM),
    ],
)
def test_a_program_that_goes_on_after_an_interrupt_may_fail_by_itself(
    child: Stopping, tmp_path: Path, code: int, error: BaseException | None, expected: End
) -> None:
    interrupted(tmp_path)
    found = child.ended(code, error)
    assert child.progress.end is expected
    assert found == ((130, None) if expected is End.INTERRUPTED else (code, error))


def test_what_fails_while_a_program_ends_is_no_failure_unless_memory_runs_out(child: Stopping) -> None:
    with pytest.raises(SystemExit):
        child.stop(End.STEPS)
    assert child.is_of_the_stop(OWN) and not child.is_of_the_stop(OUT_OF_MEMORY)
    assert child.ended(1, OWN) == (0, None)
    assert child.ended(1, OUT_OF_MEMORY) == (1, OUT_OF_MEMORY)
    assert child.progress.end is End.STEPS


def test_what_fails_once_it_got_a_signal_was_ended_by_it(child: Stopping, tmp_path: Path) -> None:
    """Another handler, such as that of DataLoader's workers, raises before the first line of ours."""
    (tmp_path / "signals").write_bytes(bytes([signal.SIGTERM]))
    failure = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
    ended: list[Any] = []
    child.leave = lambda: ended.append(child.progress.end)  # type: ignore[method-assign]
    assert child.is_of_the_stop(failure)
    assert child.ended(1, failure) == (128 + signal.SIGTERM, None)
    assert ended == [End.TERMINATED]


def test_a_program_may_be_ended_by_a_thread_of_it(child: Stopping) -> None:
    assert in_a_thread(lambda: child.ended(4, None)) is None


def test_threads_are_told_after_the_main_one_has_ended(child: Stopping, tmp_path: Path) -> None:
    child.over()
    child.stop(End.TIME)  # by an order, that the main thread hears while it waits for the others
    assert read_status(tmp_path).state is ChildState.STOPPING
    assert isinstance(in_a_thread(child.check), SystemExit)


def test_what_is_told_while_results_are_saved_changes_nothing(child: Stopping, tmp_path: Path) -> None:
    child.ended(7, OWN)
    assert in_a_thread(lambda: child.stop(End.STEPS)) is None
    assert read_status(tmp_path).state is ChildState.SAVING and child.progress.end is End.PROGRAM


def test_counting_does_not_take_back_an_end(child: Stopping, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        child.stop(End.TIME)
    child.note(steps=2, unit=Unit.OPTIMIZER, steady=1)
    told = read_status(tmp_path)
    assert (told.state, told.progress.end, told.progress.steps) == (ChildState.STOPPING, End.TIME, 2)


class Unwritable:
    """A pipe that nobody reads any more."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_leaving_does_not_depend_on_what_can_be_written(
    child: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(code: int) -> None:
        raise OSError("no space left on device")

    with PatchStack() as patches:
        child.install(save, patches)
        monkeypatch.setattr("sys.stdout", Unwritable())
        monkeypatch.setattr("sys.stderr", None)
        with pytest.raises(LeftError):
            child.leave()


def test_a_signal_that_was_handled_once_is_not_held_against_it_later(child: Stopping, tmp_path: Path) -> None:
    with PatchStack() as patches:
        child.install(lambda code: None, patches)
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert read_status(tmp_path).own_terminate


def test_a_signal_waits_while_torch_asks_for_a_rule(child: Stopping) -> None:
    """An exception there would end the process without a word."""
    named: dict[str, Any] = {}
    text = "def ask(act, wait, done):\n    act()\n    wait(0.01)\n    done()"  # the signal is sent again meanwhile
    exec(compile(text, simple_registry.__file__, "exec"), named)
    asked: list[bool] = []
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    with PatchStack() as patches:
        child.install(lambda code: None, patches)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (
            "what we listen with is not seen"
        )
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            named["ask"](interrupt, time.sleep, partial(asked.append, True))
            assert asked
            time.sleep(10)
    assert asked


def test_an_interrupt_while_threads_are_waited_for_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    ended: list[str] = []
    monkeypatch.setattr(threading, "_shutdown", wait)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: ended.append("at exit"))
    code, error = running._wind_down(0, None)
    assert code == 130 and isinstance(error, KeyboardInterrupt) and ended == ["at exit"]
