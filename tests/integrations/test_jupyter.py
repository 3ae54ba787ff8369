from __future__ import annotations

from typing import Any

import pytest

from analysis.synthetic import fitting_run
from vramfit.integrations import jupyter
from vramfit.trace import MemoryTrace, Run


class Formatter(dict[type, Any]):
    """What IPython's formatter does with the functions that it is given, as its documentation says."""

    for_type = dict.__setitem__


class Shell:
    def __init__(self) -> None:
        self.display_formatter = self
        self.formatters = {"text/html": Formatter()}


def shown(shell: Any, value: object) -> str | None:
    show = shell.display_formatter.formatters["text/html"].get(type(value))
    return None if show is None else str(show(value))


def check(shell: Any) -> None:
    run = fitting_run()
    jupyter.load_ipython_extension(shell)
    for value in (run, run.trace):
        text = shown(shell, value)
        assert text is not None
        assert "fits RTX 4090" in text
        assert text.count("<svg") == 1
        assert "<script" not in text


def test_traces_and_runs_show_themselves_while_it_is_loaded() -> None:
    shell = Shell()
    check(shell)
    jupyter.unload_ipython_extension(shell)
    assert shown(shell, fitting_run()) is None
    assert set(shell.formatters["text/html"]) & {MemoryTrace, Run} == set()


def test_in_ipython_itself() -> None:
    core = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
    formatter = core.DisplayFormatter()

    class Real:
        display_formatter = formatter

    shell = Real()
    jupyter.load_ipython_extension(shell)
    data, _ = formatter.format(fitting_run().trace)
    assert "<svg" in data["text/html"]
    jupyter.unload_ipython_extension(shell)
    data, _ = formatter.format(fitting_run().trace)
    assert "text/html" not in data
