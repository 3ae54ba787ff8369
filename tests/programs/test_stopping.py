"""Programs that are ended early, each in an interpreter of its own: by steps, by time, by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GPU = "RTX 4090"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended, and what it said."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    seconds: float
    left: Sequence[int]


def program(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(BASE) + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def run(folder: Path, body: str, *options: str, signals: Sequence[tuple[str, int]] = ()) -> Ended:
    """Run a program; where signals are given, send them when it says ``ready`` and its process id.

    Each signal goes to ``group``, ``parent`` or ``child``, half a second after the one before.
    """
    json_file = folder / "report.json"
    command = [sys.executable, "-m", "vramfit", "run", "--gpu", GPU, "--json", str(json_file), *options]
    child = 0
    with subprocess.Popen(
        [*command, str(program(folder, body))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        if signals:
            child = int(running.stdout.readline().split()[1])
        family = _family(child) if signals else []
        began = time.monotonic()
        for target, number in signals:
            time.sleep(0.5)
            if target == "group":
                os.killpg(running.pid, number)
            else:
                os.kill(running.pid if target == "parent" else child, number)
        out, err = running.communicate(timeout=120)
    return Ended(
        code=running.returncode,
        out=out,
        err=err,
        report=json.loads(json_file.read_text()),
        seconds=time.monotonic() - began,
        left=[process for process in family if _lives(process)],
    )


def _family(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [process, *(int(one) for one in listed.read_text().split())] if listed.exists() else [process]


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_steps_end_a_program_as_an_exit_would(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
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
        "--steps",
        "steady",
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("finally 4 (64, 64)\nat exit\n✓ fits RTX 4090, steady for 3 steps: ")
    assert "stopped after 4 steps" in " ".join(done.out.split())
    assert "Not seen: what comes later" in done.out
    assert (done.report["end"], done.report["fits"], done.report["exit_code"]) == ("steps", True, 0)
    assert done.report["steps"] == {"seen": 4, "unit": "optimizer_step", "steady_for": 3, "module": None}


def test_a_program_that_catches_everything_ends(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)]).start()
        while True:
            try:
                step()
            except:
                print("caught", flush=True)
        """,
        "--steps",
        "2",
    )
    assert (done.code, done.err, done.out.count("caught")) == (0, "", 3)
    assert done.report["steps"]["seen"] == 2 and done.report["error"] is None


@pytest.mark.parametrize(
    ("body", "cleans_up"),
    [
        ("try:\n    time.sleep(90)\nfinally:\n    print('finally')", True),
        (
            "7 ** (10 ** 8)  # one call of C that keeps the interpreter's lock for longer than a test may take",
            False,
        ),
    ],
    ids=["a sleep", "a call of C"],
)
def test_time_ends_a_program_that_does_nothing_on_the_card(
    tmp_path: Path, body: str, cleans_up: bool
) -> None:
    done = run(tmp_path, f"for _ in range(4):\n    step()\n{body}", "--time", "6s")
    assert (done.code, done.err) == (0, "")
    assert done.report["end"] == "time" and done.report["fits"] is True
    assert done.report["steps"]["seen"] == 4
    assert "✓ fits so far RTX 4090" in done.out and ("finally" in done.out) is cleans_up
    assert done.report["peak"]["allocated_bytes"] > 0


WORKING = """
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, persistent_workers=True)
    for number, x in enumerate(loader):
        step(x)
        if number == 3:
            print("ready", os.getpid(), flush=True)
"""
ENDLESS = """
    for _ in range(4):
        step()
    print("ready", os.getpid(), flush=True)
    try:
        while True:
            step()
    finally:
        time.sleep(90)
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("body", "signals", "code", "end"),
    [
        (WORKING, [("group", signal.SIGINT)], 130, "interrupted"),
        (WORKING, [("group", signal.SIGTERM)], 143, "terminated"),
        (WORKING, [("child", signal.SIGTERM)], 143, "terminated"),
        (ENDLESS, [("group", signal.SIGINT), ("group", signal.SIGINT)], 130, "interrupted"),
        (ENDLESS, [("parent", signal.SIGTERM)], 143, "terminated"),
    ],
    ids=["Ctrl-C", "SIGTERM to all", "SIGTERM to the child", "Ctrl-C twice", "SIGTERM to the parent"],
)
def test_signals_leave_a_verdict(
    tmp_path: Path, body: str, signals: list[tuple[str, int]], code: int, end: str
) -> None:
    done = run(tmp_path, body, signals=signals)
    assert (done.code, done.report["end"]) == (code, end), done.err
    assert done.report["fits"] is None and done.report["outcome"] == "fits_so_far"
    assert done.report["steps"]["seen"] >= 4 and done.report["steps"]["steady_for"] >= 3
    assert done.out.startswith("~ fits so far RTX 4090, steady for ") and "the program failed" not in done.out
    assert "DataLoader worker" not in done.err
    assert done.seconds < 80 and not done.left


def test_a_program_that_handles_a_signal_keeps_doing_so(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
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
        signals=[("child", signal.SIGTERM)],
    )
    assert (done.code, done.report["end"]) == (9, "end")
    assert done.out.startswith("told 15\n")
