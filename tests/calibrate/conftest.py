"""The virtual GPU inside the test process."""

from collections.abc import Iterator

import pytest
from tests import warm

from vramfit.torch_internals import build_check, build_shim


@pytest.fixture(scope="session", autouse=True)
def fit_interpreter() -> None:
    """Prepare autograd before any test runs a CPU backward pass; see tests/virtual/conftest.py."""
    build_shim.install()
    build_check.self_check()


@pytest.fixture(scope="module")
def warm_children(warm_children: None) -> Iterator[None]:
    """Let workers begin with everything imported, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramfit.calibrate.worker.start", warm.start)
        yield
