"""Inference on the CPU and on the virtual GPU, in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.virtual.conftest import fit_interpreter, gpu
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["fit_interpreter", "gpu"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models are so small that threads which wait for each other on a busy machine take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class LargestResult(TorchDispatchMode):
    """The largest tensor that operations inside gave, in bytes of its storage."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor):
                self.most = max(self.most, one.untyped_storage().nbytes())
        return found


@pytest.fixture
def largest() -> LargestResult:
    return LargestResult()
