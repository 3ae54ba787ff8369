"""The virtual GPU inside the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vramfit.torch_internals import build_check, build_shim
from vramfit.virtual.gpu import VirtualGPU


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
