"""Programs that are run with plans and remedies, on a virtual card and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.scripts import programs
from tests.techniques.conftest import one_thread
from tests.virtual.conftest import fit_interpreter

__all__ = ["fit_interpreter", "one_thread"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a program by its name in `programs` into an empty current folder; returns its file's name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str) -> str:
        Path(f"{name.lower()}.py").write_text(getattr(programs, name))
        return f"{name.lower()}.py"

    return write
