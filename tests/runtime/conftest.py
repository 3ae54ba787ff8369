"""The virtual GPU beside tests on the CPU, in one process."""

from __future__ import annotations

import pytest

from vramfit.virtual import build_shim


@pytest.fixture(scope="session", autouse=True)
def fit_interpreter() -> None:
    """Prepare autograd before any test runs a backward pass on the CPU: its threads could run none on cuda later."""
    build_shim.install()
    build_shim.self_check()
