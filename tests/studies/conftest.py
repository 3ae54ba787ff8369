"""The studies are scripts: their folder leads ``sys.path`` as it does when one of them runs."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import warm

STUDIES = Path(__file__).parents[2] / "studies"

if str(STUDIES) not in sys.path:
    sys.path.insert(0, str(STUDIES))


def _forked(command: list[str], *, env: dict[str, str], **options: Any) -> warm.Popen:
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(STUDIES)
    return warm.Popen(command, cwd=STUDIES, **options)


FORKING = SimpleNamespace(
    Popen=_forked,
    **{name: value for name, value in vars(subprocess).items() if name != "Popen"},
)
"""In the place of a study's ``subprocess``: its worker is forked with everything imported.

A fork finds the study by its folder, as it cannot by a variable.
"""
