"""What a program is doing: which module runs, when a backward pass and an optimizer step begin and end.

Two functions of torch are replaced while a recording lasts (``nn.Module.__call__`` and the one entry of the autograd
engine), each with its undo; steps are seen by torch's own global optimizer hooks. Nothing is put on the program's
objects. Code that torch.compile traces runs as if none of this were here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vramfit.patching import PatchStack


class Watcher(Protocol):
    """Who is told. None of these may raise, but for SystemExit where a phase begins: the program is to end."""

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's call begins."""

    def leave_module(self) -> None:
        """The call that began last on this thread ends."""

    def begin_backward(self) -> None:
        """The program calls the autograd engine."""

    def end_backward(self) -> None:
        """The engine is done."""

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It ends."""

    def new_parameter(self, tensor: torch.Tensor) -> None:
        """A module was given a parameter or a buffer."""


def watch(watcher: Watcher, patches: PatchStack) -> None:
    """Tell `watcher` what the program does, until `patches` are undone."""
    _watch_modules(watcher, patches)
    _watch_engine(watcher, patches)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        watcher.begin_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        watcher.end_step(optimizer)

    def registered(_: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        del name
        if isinstance(tensor, torch.Tensor):
            watcher.new_parameter(tensor)

    patches.call(register_optimizer_step_pre_hook(before).remove)
    patches.call(register_optimizer_step_post_hook(after).remove)
    patches.call(register_module_parameter_registration_hook(registered).remove)
    patches.call(register_module_buffer_registration_hook(registered).remove)


def _watch_modules(watcher: Watcher, patches: PatchStack) -> None:
    original = nn.Module.__call__
    is_compiling = torch.compiler.is_compiling

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        try:
            watcher.enter_module(self, args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            watcher.leave_module()

    patches.set(nn.Module, "__call__", call)


def _watch_engine(watcher: Watcher, patches: PatchStack) -> None:
    graph = torch.autograd.graph
    original = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # reentrant, as in checkpointing
            return original(*args, **kwargs)
        watcher.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            watcher.end_backward()

    patches.set(graph, "_engine_run_backward", run_backward)
    patches.set(torch.autograd, "_engine_run_backward", run_backward)
