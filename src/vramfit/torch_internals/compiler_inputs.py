"""Inputs of compiled programs that are fake before a compiler makes them so: those of a virtual card."""

from __future__ import annotations

from typing import Any

import torch
from torch import _guards
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, get_plain_tensors

from vramfit.patching import PatchStack
from vramfit.torch_internals.names import Feature
from vramfit.torch_internals.releases import at_least

_FEATURE = Feature("compiled programs")


def take_inputs_of_other_modes(patches: PatchStack) -> None:
    """Let torch compile for inputs that are fake already, in a mode that is not its own: those of a virtual card.

    torch does so itself from 2.11 on (torch/_guards.py, torch/_functorch/_aot_autograd/frontend_utils.py).
    """
    if at_least(2, 11):
        return
    detect = _guards.detect_fake_mode
    process = _FEATURE.find("torch._functorch._aot_autograd.frontend_utils.process_inputs")

    def detect_fake_mode(inputs: Any = None) -> Any:
        context = _guards.TracingContext.try_get()
        mode = None if context is None else context.fake_mode
        return detect(inputs) if mode is None else mode

    def process_inputs(
        flat_args: list[Any], aot_config: Any, fake_mode: Any, *rest: Any, **options: Any
    ) -> Any:
        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or _modes(value) <= {fake_mode}:
                return value
            return fake_mode.from_tensor(value)

        with fake_mode:
            flat_args = [described(value) for value in flat_args]
        return process(flat_args, aot_config, fake_mode, *rest, **options)

    patches.rebind([(detect, detect_fake_mode), (process, process_inputs)])


def _modes(value: torch.Tensor) -> set[FakeTensorMode]:
    """The modes of a fake tensor, or of those inside a tensor that wraps others."""
    plain: list[Any] = []
    get_plain_tensors(value, out=plain)
    return {tensor.fake_mode for tensor in plain if isinstance(tensor, FakeTensor)}
