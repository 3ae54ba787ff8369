from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from analysis.synthetic import fitting_run
from vramfit.cli import main
from vramfit.options.run_options import RunOptions
from vramfit.trace import Run
from vramfit.virtual.virtual_run import VirtualSettings


@dataclass
class Invocation:
    """What a command line printed and how it ended."""

    code: int
    out: str
    err: str


@dataclass
class FakeRunner:
    """Takes the place of the child interpreter: notes what it was asked to run and gives a prepared run.

    Attributes:
        again: what a second run gives of a program that ran out; it is not noted.
    """

    result: Run | BaseException = field(default_factory=fitting_run)
    again: Run = field(default_factory=lambda: replace(fitting_run(), exit_code=1))
    calls: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    def run_in_child(self, command: list[str], options: RunOptions, settings: VirtualSettings) -> Run:
        if settings.aside:
            return self.again
        named = {field.name: getattr(one, field.name) for one in (options, settings) for field in fields(one)}
        named["limits"] = options.limits
        self.calls.append((list(command), named))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    @property
    def command(self) -> list[str]:
        ((command, _),) = self.calls
        return command

    @property
    def options(self) -> dict[str, Any]:
        ((_, options),) = self.calls
        return options


@pytest.fixture(autouse=True)
def outside_github_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests read what a terminal would show, in a workflow of GitHub too."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """The child interpreter replaced; these tests are about the command line alone."""
    fake = FakeRunner()
    monkeypatch.setattr("vramfit.virtual.virtual_run.run_in_child", fake.run_in_child)
    return fake


@pytest.fixture
def vramfit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Invocation]:
    """Run a command line in this process."""

    def invoke(*arguments: object) -> Invocation:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        code = caught.value.code
        captured = capsys.readouterr()
        return Invocation(code=code if isinstance(code, int) else 0, out=captured.out, err=captured.err)

    return invoke
