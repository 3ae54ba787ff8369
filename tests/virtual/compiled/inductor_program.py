"""Programs that Inductor writes: captured for the CPU, and read line by line, apart from the code under test."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from vramfit.virtual.compiled.wrapper import CompiledGraph

_ALLOCATION = re.compile(r"(\w+) = empty_strided_\w+\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")
_RENAMED = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)")
_DELETED = re.compile(r"del (\w+)")
_BLOCK = 512  # what the caching allocator rounds to


class Written:
    """What a program takes from memory, in bytes."""

    def __init__(self, source: str, *, block: int = 1) -> None:
        self.allocations: list[int] = []
        self.peak = 0
        self.left = 0  # when it returns
        self._live: dict[str, list[int]] = {}
        for line in source[source.index("def call") :].splitlines():
            for part in line.strip().split("; "):
                self._read(part, block)

    def _read(self, part: str, block: int) -> None:
        if found := _ALLOCATION.match(part):
            size, stride = ([int(n) for n in text.split(",") if n.strip()] for text in found.group(2, 3))
            elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
            nbytes = elements * getattr(torch, found[4]).itemsize
            nbytes = -(-nbytes // block) * block
            self._live[found[1]] = [nbytes]
            self.allocations.append(nbytes)
            self.left += nbytes
            self.peak = max(self.peak, self.left)
        elif (found := _RENAMED.match(part)) and found[2] in self._live:
            self._live[found[1]] = self._live[found[2]]
        elif (found := _DELETED.match(part)) and found[1] in self._live:
            gone = self._live.pop(found[1])
            if not any(other is gone for other in self._live.values()):
                self.left -= gone[0]


class _Captured(Exception):
    pass


def written_for_cpu(model: nn.Module, x: Tensor) -> dict[str, str]:
    """The programs of a model's forward and backward pass that torch, without us, writes for the CPU."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config, graph

    found: dict[str, str] = {}

    def stop(*args: Any) -> None:
        raise _Captured

    def to_module(lowering: Any) -> Any:
        found["backward" if lowering.is_backward else "forward"] = lowering.codegen()[0].value
        return SimpleNamespace(call=stop, runner=None, __file__="captured")

    torch._dynamo.reset()
    with (
        patch.object(graph.GraphLowering, "compile_to_module", to_module),
        config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        with suppress(_Captured):
            torch.compile(model)(x)
        torch._dynamo.reset()
    return found


def recorded_programs(run: Callable[[], None]) -> dict[str, str]:
    """The programs that ran on the virtual card while a function ran."""
    found: dict[str, str] = {}
    original = CompiledGraph.__init__

    def init(self: CompiledGraph, source: str, lowering: Any, player: Any) -> None:
        found["backward" if lowering.is_backward else "forward"] = source
        original(self, source, lowering, player)

    with patch.object(CompiledGraph, "__init__", init):
        run()
    return found
