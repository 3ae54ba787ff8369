"""Techniques on the CPU and on the virtual GPU, in the same process."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run what inductor would generate code for operation by operation: no C++ compiler, seconds for minutes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts of torch are deprecated by others of its parts
        for name in ("torch._dynamo", "torch._inductor.compile_fx"):
            importlib.import_module(name)
    import torch._functorch.config as functorch
    from torch._inductor import compile_fx

    def run(graph: torch.fx.GraphModule, _inputs: Any, **_: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            return graph(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    monkeypatch.setattr(compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=run))
    with functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
