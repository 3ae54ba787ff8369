"""The command line of ``vramfit watch``: what it refuses, its exit codes, and how it looks on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Invocation
from vramfit.cli.watch import pid_of
from vramfit.errors import UsageError

SLEEPING = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"]

Vramfit = Callable[..., Invocation]


def test_what_is_watched_is_one_process_or_one_command() -> None:
    assert pid_of(["1234"]) == 1234
    assert pid_of(["python", "train.py", "3"]) is None
    with pytest.raises(UsageError, match="neither"):
        pid_of([])
    with pytest.raises(UsageError, match="both a process, 1234, and a command"):
        pid_of(["1234", "python"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "neither a process nor a command is named"),
        (("4194305",), "there is no process 4194305"),
        (("4194305", "--every", "0.1"), "there is no process 4194305"),
        (("1", "--", "ls"), "both a process, 1, and a command are named"),
        (("--gpu", "RTX 4090", "1"), "--gpu is for a command, and process 1 runs already"),
        (("--", "no-such-command"), "there is no command no-such-command"),
        (("--gpu", "RTX 4900", "--", "train.py"), "no script train.py"),
        (("--device", "cuda", "--", "ls"), "--device cuda is not watched so"),
        (("--prometheus", "x", "--", "ls"), "--prometheus x names no port"),
        (("--log", "/no/such/log", "--", "ls"), "/no/such"),
    ],
)
def test_what_cannot_be_watched_is_one_line(vramfit: Vramfit, arguments: tuple[str, ...], words: str) -> None:
    found = vramfit("watch", *arguments)
    assert found.code == 2
    assert words in found.err and found.err.startswith("error: ") and found.err.count("\n") <= 2


def test_it_does_not_watch_itself(vramfit: Vramfit) -> None:
    assert "is vramfit itself" in vramfit("watch", os.getpid()).err


def test_a_commands_exit_code_and_output_are_its_own(tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    lines = tmp_path / "lines"
    done = _vramfit("--every", "0.05", "--jsonl", str(lines), "--", sys.executable, "-c", program)
    assert done.returncode == 7
    assert done.stdout == "out\n" and "err\n" in done.stderr
    assert "summary of process" in done.stderr


def test_a_command_that_a_signal_ends(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert _vramfit("--", sys.executable, "-c", program).returncode == 143


def test_an_interrupt_of_vramfit_alone_reaches_the_command() -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "vramfit", "watch", "--", *SLEEPING],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert watch.stdout is not None and watch.stdout.readline() == "up\n"
    watch.send_signal(signal.SIGINT)
    assert watch.wait(timeout=30) == 130
    watch.stdout.close()


def test_ctrl_c_ends_the_watch_and_leaves_the_process_alone(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPING, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        watch = subprocess.Popen(
            [sys.executable, "-m", "vramfit", "watch", str(process.pid), "--every", "0.05"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watch.stderr is not None
        while "host" not in watch.stderr.readline():
            pass
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=20)
        assert watch.returncode == 0
        assert f"the watch has ended; process {process.pid} goes on" in err
        assert process.poll() is None
        process.kill()


def test_a_process_that_ends_is_told_with_its_last_figures() -> None:
    with subprocess.Popen(SLEEPING, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        watch = subprocess.Popen(
            [sys.executable, "-m", "vramfit", "watch", str(process.pid), "--every", "0.05"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watch.stderr is not None
        while "host" not in watch.stderr.readline():
            pass
        process.kill()
        _, err = watch.communicate(timeout=20)
    assert watch.returncode == 0
    assert f"summary of process {process.pid}" in err and "resident in 1 process" in err
    assert err.endswith(f"process {process.pid} has ended\n")


@pytest.mark.slow
def test_a_training_on_a_virtual_card_as_a_terminal_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "kept = []\n"
        "for step in range(24):\n"
        "    model(torch.ones(64, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    kept.append(torch.empty(64 * 2**18, device='cuda'))\n"
        "    print('step', step, flush=True)\n"
        "    time.sleep(0.06)\n"
        "raise SystemExit(5)\n"
    )
    lines = tmp_path / "lines"
    command = ["watch", "--every", "0.06", "--jsonl", str(lines), "--gpu", "RTX 4090", str(script)]
    shown, code = _on_terminal([sys.executable, "-m", "vramfit", *command])
    assert code == 5
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "step 23" in text and "vramfit watch" in text and "RTX 4090" in text
    assert "optimizer state 8.01 MiB" in text
    assert "(64.00 MiB a step), full in" in text
    last = json.loads(lines.read_text().splitlines()[-1])
    (device,) = last["programs"][0]["devices"]
    assert last["programs"][0]["steps"] == 24 and device["kind"] == "virtual"
    assert device["allocated"] > 23 * 64 * 2**20
    (outlook,) = (one for one in last["outlooks"] if one["what"] == "allocated cuda:0")
    assert outlook["per_step"] == 64 * 2**20


def _vramfit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vramfit", "watch", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _on_terminal(command: list[str], seconds: float = 120) -> tuple[str, int]:
    """What a command shows on a terminal of 110 columns, and its exit code."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS="110", LINES="40", TERM="xterm-256color")
        os.execv(command[0], command)
    shown, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return shown.decode(errors="replace"), os.waitstatus_to_exitcode(status)
