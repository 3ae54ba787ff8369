"""``torch.ctc_loss`` with lengths in CPU tensors: torch treats tensor subclasses apart, a card does not."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Give lengths as lists, which is what LossCTC.cpp turns them into when no subclass is among the arguments."""
    original = torch.ctc_loss

    def ctc_loss(
        log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, *args: Any, **kw: Any
    ) -> Any:
        if type(log_probs) is FakeTensor:
            inputs, lengths = (
                value.tolist() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
                for value in (inputs, lengths)
            )
        return original(log_probs, targets, inputs, lengths, *args, **kw)

    patches.set(torch, "ctc_loss", ctc_loss)
