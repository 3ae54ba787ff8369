"""Finds, in a model's forward pass, until when something else may stay on the card and from when on it may come.

NOTE [Room in a forward pass]: a batch of tiles leaves for the host while the next one is computed. Its results would
add to the peak of that forward pass if they stayed to the end, and the card would wait for the copy if they had to be
gone before. So the first forward pass is watched: the bytes that are allocated before and after each of the model's
innermost modules. Later passes give the results up right before the first module with which both together would exceed
the peak, and upload the next batch as soon as no later module has too little room for it. Memory inside of a module (a
convolution's workspace) is seen where it lifts the peak of the process; elsewhere the bounds of modules have to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vramfit.torch_internals.layers import wraps_compiled

_NEVER = 1 << 62


class ForwardSteps:
    """The innermost modules of a model's forward pass, one call a step.

    Args:
        model: what is called.
        device: a card.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._leaves = _leaves(model)
        self._device = device
        self._levels: list[int] = []
        self._watched = False
        self._step = 0
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._peak = 0

    def last_with_room(self, nbytes: int) -> int:
        """The first step that leaves no room for so many bytes: what holds them has to go before. 0: at once."""
        if not self._levels:
            return 0
        top = max(self._levels)
        return next((step for step, level in enumerate(self._levels) if level + nbytes > top), _NEVER)

    def first_with_room(self, nbytes: int) -> int | None:
        """The first step from which on there is room for so many bytes; None where there is none before the end."""
        if not self._levels:
            return None
        top = max(self._levels)
        short = [step for step, level in enumerate(self._levels) if level + nbytes > top]
        first = short[-1] + 1 if short else 0
        return first if first < len(self._levels) else None

    @contextmanager
    def running(self, due: list[tuple[int, Callable[[], None]]]) -> Iterator[None]:
        """A forward pass, with what is to be done before its steps: each once, at the latest when it is over."""
        self._step, self._due = 0, sorted(due, key=lambda one: one[0])
        self._act(0)
        handles: list[Any] = []
        try:
            if self._due or not self._watched:
                for leaf in self._leaves:
                    handles.append(leaf.register_forward_pre_hook(self._before))
                    if not self._watched:
                        handles.append(leaf.register_forward_hook(self._after))
            yield
            self._watched = True
        finally:
            for handle in handles:
                handle.remove()
            self._act(_NEVER)

    def _act(self, step: int) -> None:
        while self._due and self._due[0][0] <= step:
            self._due.pop(0)[1]()

    def _before(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._act(self._step)
        if not self._watched:
            self._levels.append(torch.cuda.memory_allocated(self._device))
            self._peak = torch.cuda.max_memory_allocated(self._device)
        self._step += 1

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        del module, args, result
        level = torch.cuda.memory_allocated(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        self._levels[-1] = max(self._levels[-1], level, peak if peak > self._peak else 0)


def _leaves(model: Any) -> list[nn.Module]:
    """Modules without children; none of a function, or of a compiled model, whose code hooks would break."""
    if not isinstance(model, nn.Module):
        return []
    modules = list(model.modules())
    if any(wraps_compiled(module) or isinstance(module, torch.jit.ScriptModule) for module in modules):
        return []
    return [module for module in modules if next(module.children(), None) is None]
