"""One door to every report, by the type of the value."""

import json
import subprocess
import sys

import pytest

from analysis.synthetic import fitting_run
from vramfit.analysis import peak, verdict
from vramfit.report import json_text, render, to_json


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


def test_what_reports_a_plan_is_imported_with_the_first_plan() -> None:
    lines = (
        "import sys, vramfit.report",
        "assert 'torch' not in sys.modules and 'vramfit.report.verify' not in sys.modules",
        "from vramfit.planner.verification import Verification",
        "from vramfit.report.rendering import _of, printer",
        "print(_of(printer, object.__new__(Verification)).__module__)",
    )
    assert (
        subprocess.check_output([sys.executable, "-c", "\n".join(lines)], text=True)
        == "vramfit.report.verify\n"
    )
