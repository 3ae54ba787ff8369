"""Programs in the child interpreter behave as under ``python``; what cannot be run says why and what to do next."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import warm

import vramfit
from vramfit.errors import UsageError
from vramfit.gpus.measured_profile import MeasuredProfile, save_profile

GPU = "RTX 4090"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "vramfit", *map(str, arguments)]


def cli(
    *arguments: object, cwd: Path | None = None, start: Callable[..., Any] = warm.run, **options: object
) -> subprocess.CompletedProcess[str]:
    """How ``vramfit`` ended, given arguments; what is about the interpreter itself is started by ``subprocess.run``."""
    return start(
        command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **options
    )


def programs_part(text: str) -> str:
    """What the program printed: the report begins with its verdict."""
    return re.split(r"^[✓✗!?] .*", text, maxsplit=1, flags=re.MULTILINE)[0]


# A program that looks at everything an interpreter sets up for it. It uses no card, so python can run it as well.
MIRROR = """
import argparse, atexit, os, sys, threading, time
from pathlib import Path
from typing import Any
import beside                       # a module beside the script
from package import inner           # a package beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--gpu")
parser.add_argument("rest", nargs="*")
options = parser.parse_args()
print("argv", sys.argv, options)
print("name", __name__, "file", __file__, "package", repr(__package__), "spec", __spec__)
print("main", sys.modules["__main__"].__dict__ is globals(), "doc", __doc__)
print("path", sys.path[0], "cwd", os.getcwd())
print("data", Path("data.txt").read_text().strip(), "variable", os.environ["VRAMFIT_TEST_VARIABLE"])
print("stdin", sys.stdin.readline().strip(), input())
print("imports", beside.VALUE, inner.VALUE, beside.__file__)
print("flags", sys.flags.optimize, sys.warnoptions, __debug__)
atexit.register(print, "at exit")
def later():
    time.sleep(0.3)
    print("thread is done", threading.current_thread() is not threading.main_thread())
threading.Thread(target=later).start()
print("to standard error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path / "code" / "mirror.py", MIRROR)
    write(tmp_path / "code" / "beside.py", "VALUE = 'beside'\n")
    write(tmp_path / "code" / "package" / "__init__.py", "")
    write(tmp_path / "code" / "package" / "inner.py", "VALUE = 'inner'\n")
    write(tmp_path / "code" / "package" / "tool.py", MIRROR)
    write(tmp_path / "work" / "data.txt", "the data\n")
    return tmp_path


@pytest.mark.parametrize("how", ["script elsewhere", "module"])
def test_a_program_finds_the_interpreter_that_python_gives_it(project: Path, how: str) -> None:
    environ, start = {**os.environ, "VRAMFIT_TEST_VARIABLE": "set"}, warm.run
    if how == "module":
        cwd, program = project / "code", ["-m", "package.tool"]
        write(cwd / "data.txt", "the data\n")
        environ["PYTHONDONTWRITEBYTECODE"], start = "1", subprocess.run
    else:
        cwd, program = project / "work", ["../code/mirror.py"]
    arguments = [*program, "--gpu", "its own", "a b", ""]
    options = {"cwd": cwd, "env": environ, "input": "first\nsecond\n"}
    real = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )
    done = cli("run", "--gpu", GPU, *arguments, start=start, **options)
    assert real.returncode == 3 and "at exit" in real.stdout, real.stderr
    assert done.returncode == real.returncode, done.stderr

    def comparable(text: str) -> list[str]:
        # A module's spec shows the address of its loader.
        return [re.sub(r"0x[0-9a-f]+", "0x", line) for line in text.splitlines() if line.strip()]

    assert comparable(programs_part(done.stdout)) == comparable(real.stdout)
    assert "to standard error" in done.stderr


def test_an_uncaught_error_shows_the_users_frames_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        """
        import torch

        def step(x):
            return x @ torch.ones(3, device="cuda")

        def main():
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("a value") from step(torch.ones(2, 2, device="cuda")) or error

        main()
        """,
    )
    done = cli("run", "--gpu", GPU, script)
    assert done.returncode == 1
    assert "Traceback (most recent call last):" in done.stderr
    files = set(re.findall(r'File "([^"]+)"', done.stderr))
    assert str(script) in files
    assert not any("vramfit" in Path(f).parts[-3:] or "runpy" in f for f in files), files
    assert "size mismatch" in done.stderr or "mat1 and mat2" in done.stderr or "size" in done.stderr
    assert "KeyError: 'missing'" in done.stderr, "the error it came from is shown, as python does"


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("import sys; print('x'); sys.exit('a text')", 1, "x", "a text"),
        ("import no_such_module_anywhere", 1, "", "ModuleNotFoundError"),
    ],
    ids=["exit with a text", "missing import"],
)
def test_ends_of_a_program_are_those_of_python(
    tmp_path: Path, body: str, code: int, out: str, err: str
) -> None:
    script = write(tmp_path / "script.py", body)
    real = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    done = cli("run", "--gpu", GPU, script)
    assert (done.returncode, real.returncode) == (code, code)
    assert programs_part(done.stdout).strip() == out == real.stdout.strip()
    assert err in done.stderr and done.stderr.strip().startswith(real.stderr.strip()), done.stderr


def test_a_program_that_leaves_at_once_still_has_its_report(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        import os, torch
        held = torch.ones(1000, 1000).cuda()
        os._exit(5)
        """,
    )
    report = vramfit.run(script, gpu=GPU)
    assert report.exit_code == 5
    assert report.peak_allocated_bytes == 4_000_256  # 4,000,000 B in blocks of 512 B


def test_a_program_ended_by_a_signal_leaves_what_had_happened(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        import os, signal, torch
        held = torch.ones(1000, 1000).cuda()
        del held
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    done = cli("run", "--gpu", GPU, "--trace", tmp_path / "run.vft", "--json", "-", script)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    told = json.loads(done.stdout)
    assert told["fits"] is None and told["error"] == "the process was ended by signal SIGKILL"
    assert told["peak"]["allocated_bytes"] == 4_000_256 and told["gpu"]["name"] == GPU
    assert [warning["code"] for warning in told["warnings"]] == ["killed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.vft", "script.py"], "the journal is gone"
    assert vramfit.MemoryTrace.load(tmp_path / "run.vft").meta["source"] == "virtual"


def test_what_a_program_leaves_open_is_written_and_deleted(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        import subprocess, sys
        class Noisy:
            def __del__(self):
                print("deleted")
        noisy = Noisy()
        file = open("log.txt", "w")
        file.write("a line")
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        """,
    )
    report = vramfit.run(script, gpu=GPU, cwd=tmp_path, writes_through=[tmp_path / "log.txt"])
    assert (tmp_path / "log.txt").read_text() == "a line"
    assert [w.code for w in report.run.warnings] == ["other-processes"]
    assert report.run.devices[0].context_bytes == 0, "a program that never touches the card makes no context"


def test_a_profile_of_another_card_is_refused_before_the_program_starts(tmp_path: Path) -> None:
    save_profile(
        MeasuredProfile(
            gpu_name="NVIDIA H200", total_bytes=140 << 30, torch_version="2.13.0", date="2026-01-02"
        ),
        tmp_path / "h200.json",
    )
    started = tmp_path / "started"
    script = write(tmp_path / "script.py", f"open({str(started)!r}, 'w')")
    with pytest.raises(UsageError, match=r"h200\.json was measured on another card, NVIDIA H200"):
        vramfit.run(script, gpu="RTX 4090", profile=tmp_path / "h200.json")
    assert not started.exists()


def test_signals_reach_the_program(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        """
        import os, signal, sys, time

        def stop(number, frame):
            os.write(1, b"told to stop %d\\n" % number)  # print() may still be at work on the line before
            sys.exit(9)

        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    started = time.monotonic()
    with warm.Popen(command("run", "--gpu", GPU, script), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        rest = running.stdout.read()
    assert running.returncode == 9
    assert rest.startswith(f"told to stop {signal.SIGTERM:d}\n")
    assert time.monotonic() - started < 50


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["of all", "of the parent alone"])
def test_an_interrupt_ends_the_program_as_python_does(tmp_path: Path, send: Any) -> None:
    script = write(tmp_path / "script.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with warm.Popen(
        command("run", "--gpu", GPU, script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to the whole group, a supervisor to one process
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline() == "ready\n"
        send(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.count("KeyboardInterrupt") == 1
    assert "vramfit" not in "".join(re.findall(r'File "([^"]+)"', err))


def test_the_python_face_gives_a_report_of_two_cards(tmp_path: Path) -> None:
    script = write(
        tmp_path / "two.py",
        """
        import os, sys, torch
        assert torch.cuda.device_count() == 2
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        x = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda:1")
        y = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
        assert torch.cuda.memory._snapshot()["segments"][0]["is_expandable"]
        """,
    )
    report = vramfit.run(
        "two.py",
        "30",
        gpu=GPU,
        gpus=3,
        cwd=tmp_path,
        environ={"CUDA_VISIBLE_DEVICES": "2,0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    assert report.exit_code == 0 and report.fits is True
    assert [device.peak_allocated_bytes >> 20 for device in report.run.devices] == [1, 30]
    assert report.peak_allocated_bytes == 30 << 20
    assert report.peak_reserved_bytes == 40 << 20, "two pages of 20 MiB"
    assert report.trace.meta["alloc_conf"] == "expandable_segments:True"
    assert report.run.program == ("two.py", "30")
    assert report.to_dict()["exit_code"] == 0 and "fits" in str(report)
    assert script.exists()


def test_a_seven_billion_parameter_model_needs_little_host_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = write(
        tmp_path / "build.py",
        """
        import resource, time
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        began = time.perf_counter()
        model = LlamaForCausalLM(LlamaConfig())  # the defaults are those of Llama-7B
        parameters = sum(p.numel() for p in model.parameters())
        model.to(torch.bfloat16).cuda()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(parameters, seconds, peak, torch.cuda.memory_allocated())
        """,
    )
    done = cli("run", "--gpu", "H100 SXM", script)
    assert done.returncode == 0, done.stderr
    parameters, seconds, peak, held = map(float, programs_part(done.stdout).split())
    assert parameters == 6_738_415_616
    assert held == pytest.approx(2 * parameters, rel=1e-5)
    assert peak < 1 << 30
    assert seconds < 60


# -- what cannot be used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason", "step"),
    [
        (["run", "--gpu", "RTX 4091", "ok.py"], "RTX 4091", "RTX 4090"),
        (["run", "--gpu", GPU, "no_such.py"], "no_such.py", "path"),
        (["run", "--gpu", GPU, "."], ".", ""),
        (["run", "ok.py"], "no card", "--gpu"),
        (["run", "--gpu", GPU], "no script", "train.py"),
        (["run", "--gpu", GPU, "--alloc-conf", "max_split_size_mb:1", "ok.py"], "max_split_size_mb", ""),
        (["run", "--gpu", GPU, "--alloc-conf", "nonsense", "ok.py"], "nonsense", ""),
        (["run", "--gpu", GPU, "--json", ".", "ok.py"], ".", ""),
        (["run", "--gpu", GPU, "--json", "missing/out.json", "ok.py"], "missing", ""),
        (["run", "--gpu", GPU, "--gpus", "9", "ok.py"], "--gpus", "8"),
        (["replay", "no_such.pickle"], "no_such.pickle", ""),
        (["replay", "empty.pickle"], "empty.pickle", ""),
        (["replay", "corrupt.pickle"], "corrupt.pickle", ""),
        (["replay", "malicious.pickle"], "malicious.pickle", ""),
        (["replay", "truncated.vft"], "truncated.vft", ""),
        (["replay", "."], ".", ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gives_a_reason_and_a_next_step(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
    step: str,
) -> None:
    import pickle

    from vramfit.cli import main

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    write(tmp_path / "ok.py", "print('it ran')")
    (tmp_path / "empty.pickle").touch()
    (tmp_path / "corrupt.pickle").write_bytes(b"\x80\x04\x95\xff\xff nothing of use")
    (tmp_path / "malicious.pickle").write_bytes(pickle.dumps({"segments": Evil(), "device_traces": []}))
    (tmp_path / "truncated.vft").write_bytes(b"VFT")
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    said = [line for line in err.splitlines() if line.strip()]
    assert 1 <= len(said) <= 6 and "Traceback" not in err, err
    assert reason in " ".join(said) and step in " ".join(said), err
    assert "it ran" not in out
    assert sorted(tmp_path.iterdir()) == before, "nothing was executed, nothing was written"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_and_leaves_no_half_file(tmp_path: Path) -> None:
    script = write(tmp_path / "ok.py", "import torch; x = torch.zeros(10, device='cuda')")
    done = cli("run", "--gpu", GPU, "--json", "/dev/full", script, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "/dev/full" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ok.py"]


def test_unreadable_settings_of_the_environment_stop_the_program(tmp_path: Path) -> None:
    script = write(tmp_path / "ok.py", "import torch; torch.zeros(1, device='cuda'); print('it ran')")
    done = cli("run", "--gpu", GPU, script, env={**os.environ, "PYTORCH_ALLOC_CONF": "max_split_size:twelve"})
    assert done.returncode == 2
    assert "max_split_size" in done.stderr and "it ran" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_script_is_refused_by_the_python_face(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no script"):
        vramfit.run(tmp_path / "missing.py", gpu=GPU)


def test_reports_of_a_finished_run_are_whole(tmp_path: Path) -> None:
    script = write(tmp_path / "ok.py", "import torch; x = torch.zeros(1 << 20, device='cuda')")
    done = cli(
        "run",
        "--gpu",
        GPU,
        "--json",
        "-",
        "--trace",
        "run.vft",
        "--snapshot",
        "run.pickle",
        script,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["peak"]["allocated_bytes"] == 4 << 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ok.py", "run.pickle", "run.vft"]
    for name in ("run.vft", "run.pickle"):
        replayed = cli("replay", name, "--json", "-", cwd=tmp_path)
        assert replayed.returncode == 0, replayed.stderr
        (device,) = json.loads(replayed.stdout)["devices"]
        assert device["allocations"] == device["addresses_matched"] == 1
