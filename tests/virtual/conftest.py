"""The virtual GPU inside the test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vramfit.torch_internals import build_check, build_shim
from vramfit.virtual.gpu import VirtualGPU

HERE = Path(__file__).parent
NOT_WITH_EVERY_TORCH = {
    "ranks/test_against_gloo.py": "worlds of real processes: half a minute, and gloo's own doing",
    "test_machine.py": "bookkeeping of cards, without torch",
    "test_runner.py": "how an interpreter starts and ends",
    "worlds/test_rank_choice.py": "which ranks a user means, without torch",
}
"""Files of this folder whose tests say little about a release of torch, or take long."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count all other tests of the virtual GPU, new ones too, among those that run with every release of torch."""
    if item.path.relative_to(HERE).as_posix() not in NOT_WITH_EVERY_TORCH:
        item.add_marker(pytest.mark.torch_versions)


@pytest.fixture(scope="session", autouse=True)
def fit_interpreter() -> None:
    """Prepare autograd before any test runs a CPU backward pass.

    Threads that the engine started without the shim cannot run a backward pass on ``cuda`` later, so that one test
    with a CPU backward would make all later ones fail.
    """
    build_shim.install()
    build_check.self_check()


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    """One virtual RTX 4090 with nothing but 256 MiB of context on it, whatever the environment says."""
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=256 << 20) as active:
        yield active
