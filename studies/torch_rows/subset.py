"""The tests that are marked ``torch_versions``, run in the environment of a row, and what came out."""

from __future__ import annotations

import os
import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

from torch_rows.outcome import Outcome
from torch_rows.rows import ROOT

MARKER = "torch_versions"
MOST_CRASHES = 50
"""Interpreters that tests may end before the rest is not tried: with some releases every test would end one."""

_PERCENT = re.compile(r"\[ *(\d+)%\]")


def marked() -> list[str]:
    """The files and folders that have such tests: pytest need not read the others."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if MARKER in path.read_text(encoding="utf-8"):
            place = path.parent if path.name == "conftest.py" else path
            found.append(place.relative_to(ROOT).as_posix())
    return [one for one in found if not any(one.startswith(f"{other}/") for other in found)]


def run(python: Path, report: Path, jobs: int, told: Callable[[int], None]) -> Outcome:
    """Run the tests; the log lies beside the report.

    Args:
        python: the interpreter of the environment.
        report: where pytest's report goes, an XML file.
        jobs: how many processes run tests.
        told: called with the percentage that is done, whenever it has changed.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        # Hundreds of interpreters are started: each finds its modules compiled and leaves the other cores alone.
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    }
    command = [str(python), "-m", "pytest", "-q", "-m", MARKER, "-p", "no:cacheprovider", "--tb=short"]
    command += [f"--numprocesses={jobs}", "--dist=worksteal", f"--max-worker-restart={MOST_CRASHES}"]
    command += [f"--junitxml={report}", *marked()]
    report.unlink(missing_ok=True)
    began = time.monotonic()
    with (
        report.with_suffix(".log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            log.write(line)
            last = line.strip() or last
            if share := _PERCENT.search(line):
                told(int(share[1]))
    code = process.returncode
    seconds = time.monotonic() - began
    if not report.is_file() or code not in (0, 1):  # 1: tests failed; others: some were not run
        return Outcome(seconds=seconds, reason=f"pytest ended with exit code {code}: {last[:200]}")
    return read(report, seconds)


def read(report: Path, seconds: float) -> Outcome:
    """What pytest's report says."""
    passed = skipped = 0
    failures: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            failures[name] = _why(bad[0])
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(seconds=seconds, passed=passed, skipped=skipped, failures=failures)


def refusal(python: Path) -> str | None:
    """The words with which vramfit refuses the torch of an environment; None where it takes it."""
    command = [str(python), "-m", "vramfit", "run", "--gpu", "RTX 4090", "-m", "this"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    said = [line.removeprefix("error:").strip() for line in done.stderr.splitlines() if "error:" in line]
    return said[0] if done.returncode == 2 and said else None


def _why(failure: ElementTree.Element) -> str:
    """The message of a failure; of a file that could not be read, which has none, the line that says why."""
    errors = [line[1:].strip() for line in (failure.text or "").splitlines() if line.startswith("E ")]
    message = failure.get("message") or ""
    told = errors[-1] if errors and message == "collection failure" else message
    return " ".join(told.split())[:300]
