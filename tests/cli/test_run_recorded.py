"""``vramfit run`` without ``--gpu``: the real run, recorded; here on the CPU, which every machine has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

from cli.conftest import Invocation
from vramfit.api import programs
from vramfit.errors import UsageError
from vramfit.trace import MemoryTrace, Source, load_snapshot, marks, read_any

PROGRAM = """
    import os, signal, sys, time
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        model(torch.randn(64, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and len(sys.argv) > 1:
            print("ready", flush=True)
            exec(sys.argv[1])
    print(float(model[0].weight.sum()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "vramfit", "run", *map(str, arguments)]


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return warm.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False, **options)


def test_every_form_of_the_report_is_written(script: Path, tmp_path: Path) -> None:
    files = {option: tmp_path / f"run.{option}" for option in ("json", "vft", "pickle")}
    done = run(
        "--device", "cpu", "--budget", "1GiB", "--json", files["json"], "--trace", files["vft"],
        "--snapshot", files["pickle"], script,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(plain.stdout), "the program computes what it computes"
    assert "CPU with a budget of 1.00 GiB" in done.stdout and "optimizer state" in done.stdout
    assert "virtual" not in done.stdout and "simulated" not in done.stdout
    told = json.loads(files["json"].read_text())
    assert told["source"] == "cpu" and told["fits"] is True and told["total_bytes"] == 1 << 30
    assert told["categories"]["parameters"] == 4 * (257 * 256) + 4 * 1024 + 512
    trace = MemoryTrace.load(files["vft"])
    assert trace.meta["source"] == "cpu" and "step 3/backward" in trace.phases
    assert len(load_snapshot(files["pickle"])["device_traces"][0]) > 100
    assert not (tmp_path / "run.vft.journal").exists()


def test_past_the_budget_it_does_not_fit(script: Path) -> None:
    asked = command("--device", "cpu", "--budget", "1MiB", script)
    done = subprocess.run(
        asked, capture_output=True, text=True, check=False
    )  # cold: its own frames are told apart
    assert done.returncode == 3
    assert "does not fit CPU with a budget of 1.00 MiB" in done.stdout and "train.py:" in done.stdout
    assert "CUDA out of memory" in done.stderr
    assert not any("vramfit" in line for line in done.stderr.splitlines() if line.lstrip().startswith("File"))


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "(signal 9): the process was"),
        ("import ctypes; ctypes.string_at(0)", 128 + signal.SIGSEGV, "ended by signal SIGSEGV"),
        ("os._exit(7)", 7, "the program failed (exit code 7)"),
    ],
    ids=["kill", "segfault", "os._exit"],
)
def test_however_a_program_ends_there_is_a_report(script: Path, how: str, code: int, said: str) -> None:
    done = run("--device", "cpu", script, how)
    assert done.returncode == code
    assert said in done.stdout and "parameters" in done.stdout and "same in all 2" in done.stdout


def test_told_to_stop_it_reports_what_it_has(script: Path) -> None:
    with warm.Popen(
        command("--device", "cpu", script, "time.sleep(60)"), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        out = running.stdout.read()
    assert running.returncode == 128 + signal.SIGTERM
    assert "~ fits so far CPU" in out and "terminated after 2 steps" in out and "same in all 2" in out


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["of all", "of the parent alone"])
def test_an_interrupt_reports_what_it_has(script: Path, send: Any) -> None:
    with warm.Popen(
        command("--device", "cpu", script, "time.sleep(60)"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to the whole group, a supervisor to one process
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        send(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.count("KeyboardInterrupt") == 1 and "optimizer state" in out


def test_when_all_is_killed_the_journal_lies_beside_the_trace(
    vramfit: Any, script: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "run.vft"
    with warm.Popen(
        command("--device", "cpu", "--trace", trace, script, "time.sleep(60)"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        os.killpg(running.pid, signal.SIGKILL)
    assert not trace.exists()
    left = read_any(tmp_path / "run.vft.journal")
    assert left.phases[-1] == "step 2/optimizer" and left.meta["source"] == "cpu"
    for verb in ("replay", "explain"):
        done: Invocation = vramfit(verb, tmp_path / "run.vft.journal")
        assert done.code == 0, (verb, done.err)


@pytest.mark.parametrize(
    ("options", "reason", "step"),
    [
        (["--gpu", "RTX 4090", "--device", "cpu"], "--device", "--gpu"),
        (["--gpu", "RTX 4090", "--budget", "2GiB"], "--budget", "--gpu 20GiB"),
        (["--device", "tpu"], "tpu", "--device cpu"),
        (["--device", "cuda:x"], "cuda:x", "--device cpu"),
        (["--device", ""], "--device", "--device cpu"),
        (["--device", "cpu", "--budget", "lots"], "lots", "24GiB"),
        (["--device", "cpu", "--budget", "0"], "0", "2GiB"),
        (["--device", "cpu", "--gpus", "2"], "--gpus", "--gpu NAME"),
        (["--device", "cpu", "--assume", "typical"], "--assume", "--gpu NAME"),
        (["--device", "cpu", "--profile", "none"], "--profile", "--gpu NAME"),
        (["--device", "cpu", "--alloc-conf", "nonsense"], "nonsense", ""),
        (["--device", "cpu", "--trace", "missing/run.vft"], "missing", "folder"),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_used_are_explained(
    vramfit: Any, script: Path, options: list[str], reason: str, step: str
) -> None:
    done: Invocation = vramfit("run", *options, script)
    assert done.code == 2
    assert reason in done.err and step in done.err and "Traceback" not in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_what_to_choose(script: Path) -> None:
    done = run(script)
    assert done.returncode == 2
    assert "no card" in done.stderr and "--gpu" in done.stderr and "--device cpu --budget" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_the_python_face_records_and_says_that_other_processes_are_not_counted(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import subprocess, sys, torch, vramfit\n"
        "subprocess.run([sys.executable, '-c', 'pass'])\n"
        "held = torch.ones(1 << 18)\n"
        "assert 'allocated 1.00 MiB' in vramfit.snapshot('one')\n"
    )
    report = programs.run(script, device="cpu", budget="1GiB")
    assert report.run.source is Source.CPU and report.fits is True
    assert report.to_dict()["total_bytes"] == 1 << 30
    assert [warning.code for warning in report.run.warnings] == ["other-processes"]
    assert [mark.tag for mark in marks(report.trace)] == ["one"]
    with pytest.raises(UsageError, match="gpu="):
        programs.run(script, gpu="RTX 4090", device="cpu")
    with pytest.raises(UsageError, match="lots"):
        programs.run(script, device="cpu", budget="lots")
