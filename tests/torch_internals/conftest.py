"""The shim in the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vramfit.torch_internals import build_check, build_shim


@pytest.fixture(scope="session", autouse=True)
def fit_interpreter() -> None:
    """Prepare autograd before any test runs a backward pass; see tests/virtual/conftest.py."""
    build_shim.install()
    build_check.self_check()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own guard and hooks, also on a CPU build, and a self-check that has not passed yet."""
    monkeypatch.setattr(build_check, "_passed_in", None)
    _take_off()
    yield
    monkeypatch.undo()  # what a test has shifted must not be what is installed again
    _take_off()
    build_shim.install()


def _take_off() -> None:
    build_shim._put_back(build_shim._undo or [])
    build_shim._undo = None
