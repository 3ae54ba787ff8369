"""Examples in the docstrings of the public names: each name has one, and they give what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import warm


@pytest.mark.slow
def test_examples_in_docstrings_give_what_they_say(tmp_path: Path) -> None:
    inside = Path(__file__).with_name("docstrings_inside.py")
    done = warm.run(
        [sys.executable, inside], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
