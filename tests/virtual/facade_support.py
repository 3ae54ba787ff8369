"""Installs the facade over a small virtual machine, for the tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vramfit.gpus import find_gpu
from vramfit.patching import PatchStack, together
from vramfit.virtual import torch_cuda
from vramfit.virtual.machine import Machine


@contextmanager
def virtual_cuda(gpu: str = "RTX 4090", count: int = 1, **options: Any) -> Iterator[Machine]:
    """``torch.cuda`` as on `count` cards, inside the block."""
    options.setdefault("alloc_conf", "")
    options.setdefault("visible", ",".join(map(str, range(count))))
    machine = Machine([find_gpu(gpu)] * count, **options)
    patches = PatchStack()
    try:
        with together():
            torch_cuda.install(machine, patches)
        yield machine
    finally:
        with together():
            patches.undo()
