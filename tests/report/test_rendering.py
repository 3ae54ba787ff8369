"""One door to every report, by the type of the value."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.synthetic import fitting_run
from vramfit.analysis import peak, verdict
from vramfit.report import json_text, render, to_json

ABOVE = ("workload", "inference", "techniques", "runtime", "planner", "stress", "api", "integrations", "cli")
"""Packages of the layers above the one that measures."""

OWN = {
    "__init__": "REPORT_MODULES = ('owned_values.reports',)",
    "values": "class Own:\n    figure = 7",
    "reports": """
from rich.text import Text
from owned_values.values import Own
from vramfit.report.rendering import json_values, printed_as_lines

@printed_as_lines(Own)
def lines(value, width):
    yield Text(f"figure {value.figure}")

@json_values.register(Own)
def values(value):
    return {"figure": value.figure}
""",
}
"""A package of somebody else's, with a value and its reports."""


def test_a_value_without_a_report_says_so() -> None:
    found = peak(fitting_run().trace)
    with pytest.raises(TypeError, match="Breakdown cannot be printed as a report"):
        render(found)
    with pytest.raises(TypeError, match="Breakdown cannot be written as JSON"):
        to_json(found)


def test_json_text_is_what_to_json_gives() -> None:
    run = fitting_run()
    judged = verdict(run, cards=())
    assert json.loads(json_text(run, judged)) == json.loads(json.dumps(to_json(run, judged)))
    assert json_text(run, judged, ascii_only=True).isascii() and json_text(run, judged).endswith("}\n")


def test_reports_need_nothing_of_the_layers_above_until_a_value_of_theirs_comes() -> None:
    lines = (
        "import sys, vramfit.report",
        f"above = {('torch', *(f'vramfit.{name}' for name in ABOVE))}",
        "print([name for name in sys.modules if name.startswith(above)])",
        "from vramfit.planner.verification import Verification",
        "from vramfit.report.rendering import _of, printer",
        "print('vramfit.planner.reports.verify' in sys.modules)",
        "print(_of(printer, object.__new__(Verification)).__module__)",
    )
    assert subprocess.check_output([sys.executable, "-c", "\n".join(lines)], text=True).splitlines() == [
        "[]",
        "False",
        "vramfit.planner.reports.verify",
    ]


@pytest.mark.parametrize("package", ["vramfit.planner", "vramfit.runtime.feeding", "vramfit.stress"])
def test_a_package_names_reports_that_are_there(package: str) -> None:
    for name in importlib.import_module(package).REPORT_MODULES:
        assert name.startswith(f"{package}.")
        importlib.import_module(name)


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "owned_values"
    package.mkdir()
    for name, text in OWN.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("owned_values", "owned_values.values", "owned_values.reports"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_package")
def test_a_package_brings_the_reports_of_its_own_values() -> None:
    kind = importlib.import_module("owned_values.values").Own
    assert "owned_values.reports" not in sys.modules
    assert render(kind()) == "figure 7\n"
    assert to_json(type("Further", (kind,), {"__module__": "elsewhere", "figure": 8})()) == {"figure": 8}
