"""Programs that are ended early, each in an interpreter of its own: by steps, by time, by signals.

They run beside each other, as they spend much of their time waiting.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import warm

GPU = "RTX 4090"
AT_ONCE = 3
BASE = """
    import atexit, os, sys, threading, time
    import torch
    from torch import nn

    def step(x=None):
        x = torch.randn(8, 64) if x is None else x
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 20
        def __getitem__(self, index):
            return torch.zeros(64)

    if __name__ == "__main__":
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
"""
WORKING = """
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, persistent_workers=True)
    for number, x in enumerate(loader):
        step(x)
        if number == 3:
            print("ready", os.getpid(), flush=True)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program and what happens to it.

    Attributes:
        body: of the program, after `BASE`.
        options: of ``vramfit run``.
        signals: sent one after the other once it has said ``ready`` and its process id, each to ``group``,
            ``parent`` or ``child``.
        cold: its interpreters are started as a shell does, rather than forked.
    """

    body: str
    options: Sequence[str] = ()
    signals: Sequence[tuple[str, int]] = ()
    cold: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended, and what it said."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    seconds: float
    left: Sequence[int]


CASES = {
    # Those that wait the longest come first.
    "C": Case(
        body="""
        for _ in range(4):
            step()
        import ctypes
        lock = ctypes.PyDLL(None).pthread_mutex_lock  # keeps the interpreter's lock, and hears no signal
        mutex = ctypes.create_string_buffer(128)
        lock(mutex)
        lock(mutex)
        """,
        options=("--time", "4s"),
    ),
    "sleep": Case(
        body="""
        for _ in range(4):
            step()
        try:
            time.sleep(90)
        finally:
            print("finally")
        """,
        options=("--time", "4s"),
    ),
    "Ctrl-C twice": Case(
        body="""
        for _ in range(4):
            step()
        print("ready", os.getpid(), flush=True)
        try:
            while True:
                step()
        finally:
            time.sleep(90)
        """,
        signals=(("group", signal.SIGINT), ("group", signal.SIGINT)),
    ),
    "Ctrl-C": Case(body=WORKING, signals=[("group", signal.SIGINT)], cold=True),
    "SIGTERM to all": Case(body=WORKING, signals=[("group", signal.SIGTERM)]),
    "SIGTERM to the child": Case(body=WORKING, signals=[("child", signal.SIGTERM)]),
    "own handler": Case(
        body="""
        import signal
        def told(number, frame):
            print("told", number, flush=True)
            sys.exit(9)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "what we listen with is not seen"
        assert signal.signal(signal.SIGTERM, told) is signal.SIG_DFL
        step()
        print("ready", os.getpid(), flush=True)
        time.sleep(90)
        """,
        signals=[("parent", signal.SIGTERM)],
    ),
    "steps": Case(
        body="""
        atexit.register(print, "at exit")
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=8, num_workers=2, persistent_workers=True, prefetch_factor=4
        )
        count = 0
        try:
            for x in loader:
                step(x)
                count += 1
        finally:
            held = model.weight.cpu()
            print("finally", count, tuple(held.shape))
        """,
        options=("--steps", "steady"),
    ),
    "caught": Case(
        body="""
        threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)]).start()
        while True:
            try:
                step()
            except:
                print("caught", flush=True)
        """,
        options=("--steps", "2"),
    ),
    "a thread alone": Case(
        body="""
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: [step() for _ in iter(int, 1)]).start()
        """,
        options=("--steps", "3"),
    ),
    "out of memory at the end": Case(
        body="""
        try:
            while True:
                step()
        finally:
            torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
        """,
        options=("--steps", "2"),
    ),
}


def program(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(BASE) + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def run(folder: Path, case: Case, environ: dict[str, str]) -> Ended:
    """Run a program to its end, sending it what the case says.

    ``environ`` is handed over, because a process that inherits the environment reads it in C while
    another test may be changing it in the main thread, and then execve finds a bad address.
    """
    json_file = folder / "report.json"
    command = [sys.executable, "-m", "vramfit", "run", "--gpu", GPU, "--json", str(json_file), *case.options]
    child = 0
    start = subprocess.Popen if case.cold else warm.Popen
    with start(
        [*command, str(program(folder, case.body))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        if case.signals:
            child = int(running.stdout.readline().split()[1])
        family = _family(child) if case.signals else []
        began = time.monotonic()
        for target, number in case.signals:
            time.sleep(0.4)
            if target == "group":
                os.killpg(running.pid, number)
            else:
                os.kill(running.pid if target == "parent" else child, number)
        try:
            out, err = running.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # it would be waited for without end
            raise
    return Ended(
        code=running.returncode,
        out=out,
        err=err,
        report=json.loads(json_file.read_text()),
        seconds=time.monotonic() - began,
        left=_left(family),
    )


def _left(family: list[int]) -> list[int]:
    """Those that outlive the run by more than a moment: Python's fork server ends when its pipe closes."""
    until = time.monotonic() + 2
    while (left := [process for process in family if _lives(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _family(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [process, *(int(one) for one in listed.read_text().split())] if listed.exists() else [process]


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Ended]]:
    """How each of the cases ended that the tests of this session ask for by their ids."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    chosen = [name for name in CASES if any(f"[{name}]" in test for test in asked)]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job hands down to ignore it
    environ = dict(os.environ)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {
            name: pool.submit(run, tmp_path_factory.mktemp("case"), CASES[name], environ) for name in chosen
        }
        yield lambda name: found[name].result()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("case", ["C", "sleep"])
def test_time_ends_a_program_that_does_nothing_on_the_card(ended: Callable[[str], Ended], case: str) -> None:
    done = ended(case)
    assert (done.code, done.err) == (0, "")
    assert done.report["end"] == "time" and done.report["fits"] is True
    assert done.report["steps"]["seen"] == 4
    assert "✓ fits so far RTX 4090" in done.out and ("finally" in done.out) is (case == "sleep")
    assert done.report["peak"]["allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("case", "code", "end"),
    [
        pytest.param(case, code, end, id=case)
        for case, code, end in (
            ("Ctrl-C twice", 130, "interrupted"),
            ("Ctrl-C", 130, "interrupted"),
            ("SIGTERM to all", 143, "terminated"),
            ("SIGTERM to the child", 143, "terminated"),
        )
    ],
)
def test_signals_leave_a_verdict(ended: Callable[[str], Ended], case: str, code: int, end: str) -> None:
    done = ended(case)
    assert (done.code, done.report["end"]) == (code, end), done.err
    assert done.report["fits"] is None and done.report["outcome"] == "fits_so_far"
    assert done.report["steps"]["seen"] >= 4 and done.report["steps"]["steady_for"] >= 3
    assert done.out.startswith("~ fits so far RTX 4090, steady for ") and "the program failed" not in done.out
    assert "DataLoader worker" not in done.err
    assert done.seconds < 80 and not done.left


def test_no_handler_raises_once_results_are_saved() -> None:
    program = """
        import os, signal, threading, time
        from vramfit.launch.stopping import _disarm_handlers

        everywhere, raised = False, 0

        def fail(number, frame):
            global raised
            if everywhere or "_disarm_handlers" in frame.f_code.co_qualname:
                raised += 1
                raise RuntimeError("raised by a handler")

        def send():
            while True:
                os.kill(os.getpid(), signal.SIGWINCH)

        def disarmed():
            try:
                _disarm_handlers()
            except RuntimeError:  # before its first line
                return False
            return True

        threading.Thread(target=send, daemon=True).start()
        end = time.monotonic() + 30
        while raised < 5 and time.monotonic() < end:
            signal.signal(signal.SIGWINCH, fail)
            while not disarmed():
                pass
        everywhere = True
        time.sleep(0.2)
        print("raised" if raised else "never raised")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "raised\n", "")


@pytest.mark.parametrize("case", ["own handler"])
def test_a_program_that_handles_a_signal_keeps_doing_so(ended: Callable[[str], Ended], case: str) -> None:
    done = ended(case)
    assert (done.code, done.report["end"]) == (9, "end"), done.err
    assert done.out.startswith("told 15\n")


@pytest.mark.parametrize("case", ["steps"])
def test_steps_end_a_program_as_an_exit_would(ended: Callable[[str], Ended], case: str) -> None:
    done = ended(case)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("finally 4 (64, 64)\nat exit\n✓ fits RTX 4090, steady for 3 steps: ")
    assert "stopped after 4 steps" in " ".join(done.out.split())
    assert "Not seen: what comes later" in done.out
    assert (done.report["end"], done.report["fits"], done.report["exit_code"]) == ("steps", True, 0)
    assert done.report["steps"] == {"seen": 4, "unit": "optimizer_step", "steady_for": 3, "module": None}


@pytest.mark.parametrize("case", ["caught"])
def test_a_program_that_catches_everything_ends(ended: Callable[[str], Ended], case: str) -> None:
    done = ended(case)
    assert (done.code, done.err, done.out.count("caught")) == (0, "", 3)
    assert done.report["steps"]["seen"] == 2 and done.report["error"] is None


@pytest.mark.parametrize("case", ["a thread alone"])
def test_a_thread_that_outlives_the_main_one_ends(ended: Callable[[str], Ended], case: str) -> None:
    done = ended(case)
    assert (done.code, done.err) == (0, "") and done.out.startswith("at exit\n✓ fits RTX 4090")
    assert (done.report["end"], done.report["steps"]["seen"]) == ("steps", 3)


@pytest.mark.parametrize("case", ["out of memory at the end"])
def test_what_does_not_fit_while_a_program_ends_does_not_fit(
    ended: Callable[[str], Ended], case: str
) -> None:
    done = ended(case)
    assert (done.code, done.report["fits"], done.report["end"]) == (3, False, "steps")
    assert "torch.OutOfMemoryError" in done.err and done.report["oom"]["handled"] is False
