"""Techniques on the CPU and on the virtual GPU, in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.virtual.conftest import fit_interpreter, gpu

__all__ = ["fit_interpreter", "gpu"]  # backward passes on the CPU before tests of the virtual GPU


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models are so small that threads which wait for each other on a busy machine take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
