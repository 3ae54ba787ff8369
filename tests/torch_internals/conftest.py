"""The shim in the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from vramfit.torch_internals import build_check, build_shim, cuda_hooks, device_guards

NOT_WITH_EVERY_TORCH = {"test_private_names.py", "test_releases.py"}
"""What says the same with every release: names in the sources, and releases that are pretended."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count all other tests of the seam among those that run with every release of torch."""
    if item.path.name not in NOT_WITH_EVERY_TORCH:
        item.add_marker(pytest.mark.torch_versions)


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


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Has virtual tables named anew; afterwards, too."""
    _forget()
    yield _forget
    _forget()


def _forget() -> None:
    cuda_hooks.hook_names.cache_clear()
    device_guards.guard_names.cache_clear()


def _take_off() -> None:
    build_shim._put_back(build_shim._undo or [])
    build_shim._undo = None
    _forget()
    cuda_hooks._table.cache_clear()  # torch points to its own table again
