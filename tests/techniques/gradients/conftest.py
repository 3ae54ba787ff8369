"""What all comparisons of gradients need."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.techniques.test_activation_offload import LateLane

from vramfit.techniques import activation_offload


@pytest.fixture
def late_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLane]:
    """Let saved tensors of the CPU leave and come back, as late as those of a card may."""
    lane = LateLane()
    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: lane)
    yield lane
    assert not lane.wrong


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run what inductor would generate code for operation by operation: seconds instead of minutes."""
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
