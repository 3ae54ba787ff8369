"""What is gathered here, and that nothing which crashes or hangs in a child takes the doctor with it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.doctor.machines import MACHINES

from vramfit.doctor import Facts, Severity, diagnose, gather
from vramfit.doctor.facts import NvidiaDriver, Torch
from vramfit.plain import from_plain, to_plain


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that torch refuses do not keep it from being asked: they are tried by torch itself, and reported."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")
    facts = gather()
    assert facts.torch is not None
    assert facts.torch.version.startswith("2.")
    assert "too small" in facts.torch.settings_error
    assert facts.virtual_error == ""
    assert facts.host.memory_bytes > 0
    [finding] = [f for f in diagnose(facts).of(Severity.ERROR) if f.check == "alloc-conf"]
    assert "PYTORCH_ALLOC_CONF" in finding.finding


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os; os.abort()", "died of signal SIGABRT"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("raise SystemExit('no kernel')", "ended with exit code 1: no kernel"),
    ],
)
def test_a_broken_driver_only_breaks_a_child(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{body}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    facts = gather(timeout=1.0)
    assert facts.torch is None
    assert facts.torch_error == said
    assert facts.driver_error == said
    assert facts.virtual_error is None
    assert diagnose(facts).worst is Severity.ERROR


@pytest.mark.parametrize("facts", MACHINES.values(), ids=MACHINES.keys())
def test_facts_pass_between_processes_unchanged(facts: Facts) -> None:
    if facts.driver is not None:
        assert from_plain(to_plain(facts.driver), NvidiaDriver) == facts.driver
    if facts.torch is not None:
        assert from_plain(to_plain(facts.torch), Torch) == facts.torch


def test_the_doctor_itself_imports_no_torch() -> None:
    names = "vramfit.cli.doctor, vramfit.doctor.checks, vramfit.report.doctor"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
