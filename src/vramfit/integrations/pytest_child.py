"""One test in an interpreter of its own, where that of the test run cannot carry a virtual GPU.

The child collects the same test with the same options, and its reports take the place of those that the parent would
have made.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vramfit.integrations.pytest_gates import prepare_interpreter
from vramfit.launch.starting import answer

_CLEARED: dict[str, Any] = {
    "numprocesses": None,  # pytest-xdist
    "dist": "no",
    "tx": [],
    "looponfail": False,
    "xmlpath": None,
    "report_log": None,
    "htmlpath": None,
    "no_cov": True,
    "cov_source": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "usepdb": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "verbose": 0,
    "collectonly": False,
}
"""Options that must not act twice: the parent has distributed, selected and reported already."""


def run_in_child(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test in a child; gives its reports of setup, call and teardown.

    A child that dies leaves one failed report that says how.
    """
    with tempfile.TemporaryDirectory(prefix="vramfit-pytest-") as name:
        folder = Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps(_job(item, folder / "reports.json")))
        # Not by `python_command`: tests import what lies in the current folder.
        command = [sys.executable, "-m", "vramfit.integrations.pytest_child", str(folder / "job.pickle")]
        done = answer(command, cwd=item.config.invocation_params.dir)
        if (folder / "reports.json").exists():
            written = json.loads((folder / "reports.json").read_text(encoding="utf-8"))
            reports = [_read(item.config, data) for data in written]
            if reports:
                return reports
        return [_died(item, done)]


def _job(item: pytest.Item, reports: Path) -> dict[str, Any]:
    config = item.config
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    plugins = [str(plugin) for plugin in getattr(config.option, "plugins", [])]
    options |= {name: value for name, value in _CLEARED.items() if name in options}
    options |= {
        "plugins": [*plugins, "no:terminal", "no:cacheprovider"],
        "rootdir": str(config.rootpath),
        "inifilename": str(config.inipath) if config.inipath else None,
        "file_or_dir": [],
        "vram_child": True,
    }
    names = item.nodeid.split("::")[1:]
    return {
        "options": options,
        "arguments": ["::".join([str(item.path), *names])],
        "path": list(sys.path),
        "nodeid": item.nodeid,
        "reports": str(reports),
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _read(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    assert isinstance(report, pytest.TestReport)
    return report


def _died(item: pytest.Item, done: subprocess.CompletedProcess[str]) -> pytest.TestReport:
    how = f"by signal {-done.returncode}" if done.returncode < 0 else f"with exit code {done.returncode}"
    text = f"the interpreter that ran this test on a virtual GPU ended {how} before it could report"
    output = (done.stdout + done.stderr).strip()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"{text}\n\n{output[-4000:]}" if output else text,
        when="call",
    )


class _Reports:
    """Keeps the reports of the one test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.kept: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report as what JSON can hold."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.kept.append(data)


def main(arguments: Sequence[str]) -> int:
    """Run the job of a parent."""
    job = pickle.loads(Path(arguments[0]).read_bytes())
    sys.path[:] = job["path"]
    prepare_interpreter()  # before a conftest can run a backward pass
    config = pytest.Config.fromdictargs(job["options"], job["arguments"])
    reports = _Reports(config)
    config.pluginmanager.register(reports)
    try:
        code = config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    for data in reports.kept:
        data["nodeid"] = job["nodeid"]  # the parent's root may have named it otherwise
    Path(job["reports"]).write_text(json.dumps(reports.kept), encoding="utf-8")
    return int(code or 0)


if __name__ == "__main__":
    from vramfit.launch.running import leave

    leave(main(sys.argv[1:]))
