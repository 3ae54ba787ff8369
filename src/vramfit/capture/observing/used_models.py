"""Notes models that a program runs and does not train: where it put them onto the card, and what calls them how."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import nn

from vramfit.capture.observing.program_frames import (
    frames_here,
    line_of,
    name_of,
    program_frame,
    program_line,
)
from vramfit.capture.observing.tensor_shapes import shapes_of
from vramfit.capture.observing.training_finder import elements
from vramfit.capture.observing.wrappers import kind_of, peeled
from vramfit.holders.naming import local_values
from vramfit.patching import PatchStack
from vramfit.torch_internals.layers import is_compiled
from vramfit.trace.frames import Origin, origin
from vramfit.trace.model import Frame
from vramfit.trace.observed_program import CalledBy, UsedModel

_MOST = 16
"""Models that are noted."""


class UsedModels:
    """The models that a program has called without an optimizer having any of their parameters."""

    def __init__(self) -> None:
        self._moved: weakref.WeakKeyDictionary[nn.Module, Frame] = weakref.WeakKeyDictionary()
        self._number: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._seen: list[UsedModel] = []

    def install(self, patches: PatchStack) -> None:
        """Follow which line puts a model onto a card, until `patches` are undone."""
        for name in ("to", "cuda"):
            patches.set(nn.Module, name, self._following_moves(getattr(nn.Module, name)))

    def _following_moves(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @wraps(original)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            moved = original(module, *args, **kwargs)
            if module not in self._moved and _on_card(module) and (line := program_line()) is not None:
                self._moved[module] = line
            return moved

        return move

    def meet(self, root: nn.Module) -> None:
        """Note a model that is called; only its first call is looked at."""
        if root in self._number or len(self._seen) >= _MOST or not _on_card(root):
            return
        number = self._number[root] = len(self._seen)
        self._seen.append(self._described(root))
        if not any(map(is_compiled, root.modules())):  # a hook would be compiled
            self._look_at_arguments(root, number)

    def _described(self, root: nn.Module) -> UsedModel:
        _, model = peeled(root)
        caller, frame, owner = _caller(model)
        parameters = list(model.parameters())
        dtypes = Counter(str(parameter.dtype).removeprefix("torch.") for parameter in parameters)
        return UsedModel(
            kind=kind_of(model),
            parameters=sum(map(elements, parameters)),
            parameter_bytes=sum(elements(parameter) * parameter.element_size() for parameter in parameters),
            dtype=max(dtypes, key=lambda name: dtypes[name]),
            with_gradients=torch.is_grad_enabled(),
            called_by=caller,
            called_as="" if frame is None else name_of(owner, frame) or name_of(root, frame),
            called_at=None if frame is None else line_of(frame),
            moved_at=self._moved.get(root) or self._moved.get(model),
        )

    def _look_at_arguments(self, root: nn.Module, number: int) -> None:
        def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            self._seen[number] = replace(self._seen[number], shapes=shapes_of((args, kwargs)))

        handle = root.register_forward_pre_hook(look, with_kwargs=True)

    def without(self, trained: weakref.WeakKeyDictionary[nn.Module, int]) -> Iterator[UsedModel]:
        """Those that were not trained later."""
        numbers = {self._number[module] for module in trained if module in self._number}
        yield from (model for number, model in enumerate(self._seen) if number not in numbers)


def _on_card(module: nn.Module) -> bool:
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "cuda"


def _caller(model: nn.Module) -> tuple[CalledBy, FrameType | None, object]:
    """What calls a model, the frame of the program's from which that is called, and the object that it is called on."""
    frames = list(frames_here())
    for place, frame in enumerate(frames):
        owner = local_values(frame).get("self")
        name = frame.f_code.co_name
        if owner is None or name not in ("generate", "__call__"):
            continue
        kinds = {base.__name__ for base in type(owner).__mro__}
        found = None
        if name == "generate" and "GenerationMixin" in kinds:
            found = CalledBy.GENERATE
        elif name == "__call__" and "DiffusionPipeline" in kinds:
            found = CalledBy.PIPELINE
        if found is not None:
            outer = (one for one in frames[place + 1 :] if origin(one.f_code.co_filename) is Origin.USER)
            return found, next(outer, None), owner
    return CalledBy.PROGRAM, program_frame(), model
