"""Launches of Triton kernels: noted, never run. See NOTE [What is done about foreign kernels] in __init__.py."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.patching import PatchStack, after_import
from vramfit.virtual.foreign.operators import note_launch, virtual_tensors
from vramfit.virtual.foreign.written import written_parameters
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Catch ``kernel[grid](...)`` where Triton would compile and launch it (triton/runtime/jit.py, JITFunction.run)."""
    known: dict[Any, frozenset[str]] = {}

    def catch(module: ModuleType) -> None:
        def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
            if warmup:
                return
            for hook in self.pre_run_hooks:
                hook(*args, **kwargs)
            given = _bound(self, args, kwargs)
            _refuse_host(given)
            if callable(grid):
                grid(given)
            if self.fn not in known:
                known[self.fn] = written_parameters(self.fn)
            written = [given[name] for name in known[self.fn] if name in given]
            note_launch(mode, self.fn.__name__, virtual_tensors(given), virtual_tensors(written))

        patches.set(module.JITFunction, "run", run)

    after_import({"triton.runtime.jit": catch}, patches)


def _bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A launch's arguments by name, the defaults of the kernel among them, as a grid wants them.

    Raises:
        TypeError: an argument is missing or too many; options of the launch (num_warps and others) are none.
    """
    parameters = inspect.signature(kernel.fn).parameters
    named = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _refuse_host(given: dict[str, Any]) -> None:
    """A kernel cannot read the host's memory.

    Raises:
        ValueError: Triton's own, of the launcher in triton/backends/nvidia/driver.py.
    """
    for position, value in enumerate(given.values()):
        if isinstance(value, torch.Tensor) and (type(value) is not FakeTensor or value.device.type == "cpu"):
            raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")
